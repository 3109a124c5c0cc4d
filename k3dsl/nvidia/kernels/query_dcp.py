"""MlaQuery that publishes: what a CTA wrote of the query goes to every rank's mailbox, then all ranks' is waited for.

A CTA reads its own part back after a block barrier: 64 latents of each row as 16-byte pieces, its rope elements as runs
of eight. The end of the grid means that the queries of all ranks lie in this rank's mailbox, so the core needs its
ordinary grid dependency wait alone.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from k3dsl.nvidia import dcp
from k3dsl.nvidia import query as facts
from k3dsl.nvidia.kernels import peer
from k3dsl.nvidia.kernels import primitives as P  # noqa: N812
from k3dsl.nvidia.kernels import query_parts as parts
from k3dsl.nvidia.kernels.query import MlaQuery

ROPE_BLOCKS = facts.PART_ROWS // 8  # runs of eight rows of W_qb that a CTA owns


class DcpQuery(MlaQuery):
    """Compile-time facts: those of MlaQuery, ranks, multicast. Arguments: dcp.DcpQueryKey.params."""

    def __init__(self, key: dcp.DcpQueryKey, target: str):
        super().__init__(key.query, target)
        self.key = key
        if (key.schedule, key.tile) == ("narrow", 2):  # publishing takes this build past the 128 registers of two
            self.ctas_a_sm = 1
        self.size = facts.ELEMENT[key.kv_format]
        self.entry = facts.ENTRY * self.size  # bytes of a head's query
        self.in_flight = 4 if key.schedule == "narrow" else dcp.IN_FLIGHT  # few rows are few pieces a thread

    @cute.jit
    def __call__(
        self,
        projected: Int64,
        q_norm: Int64,
        kv_norm: Int64,
        q_b: Int64,
        w_uk: Int64,
        q_scale_inv: Int64,
        k_scale_inv: Int64,
        slots: Int64,
        cache: Int64,
        query: Int64,
        rows: Int32,
        row_pitch: Int32,
        page_shift: Int32,
        uk_head_stride: Int64,
        uk_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        eps: Float32,
        box: Int64,
        peers: Int64,
        poison: Int64,
        alarm: Int64,
        limit: Int64,
        parity: Int32,
        rank: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel_dcp(
            projected, q_norm, kv_norm, q_b, w_uk, q_scale_inv, k_scale_inv, slots, cache, query,
            rows, row_pitch, page_shift, uk_head_stride, uk_stride, page_stride, token_stride, eps,
            box, peers, poison, alarm, limit, parity, rank,
        ).launch(
            grid=self.launch.grid,
            block=self.launch.block,
            cluster=self.launch.cluster,
            smem=self.launch.smem,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.ctas_a_sm,
            preferred_smem_carveout=100,  # given, because the DSL would ask a GPU for its limits
        )  # fmt: skip

    @cute.kernel
    def kernel_dcp(
        self,
        projected: Int64,
        q_norm: Int64,
        kv_norm: Int64,
        q_b: Int64,
        w_uk: Int64,
        q_scale_inv: Int64,
        k_scale_inv: Int64,
        slots: Int64,
        cache: Int64,
        query: Int64,
        rows: Int32,
        row_pitch: Int32,
        page_shift: Int32,
        uk_head_stride: Int64,
        uk_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        eps: Float32,
        box: Int64,
        peers: Int64,
        poison: Int64,
        alarm: Int64,
        limit: Int64,
        parity: Int32,
        rank: Int32,
    ):
        args = parts.Args(
            projected, q_norm, kv_norm, q_b, w_uk, q_scale_inv, k_scale_inv, slots, cache, query,
            rows, row_pitch, page_shift, uk_head_stride, uk_stride, page_stride, token_stride, eps,
        )  # fmt: skip
        self.schedule.body(args)
        at = parts.Where.here(self.key.tile)
        start = Int64(parity * (dcp.CAP * self.key.ranks)) * Int64(at.heads) * self.entry  # of this parity
        if cutlass.const_expr(self.key.multicast):
            targets = [peers + start]
        else:
            targets = [peer.ldg_address(peers + 8 * d) + start for d in range(self.key.ranks)]
        cute.arch.sync_threads()  # what the CTA's threads stored
        self.publish(args, at, targets, rank)
        if limit > 0:
            self.gather(at, box + start, poison, alarm, limit, rows, parity, rank)

    def publish(self, args: parts.Args, at: parts.Where, targets, rank) -> None:
        """This CTA's part of the query to row (token, rank, head) of each target."""
        size, tile = self.size, self.key.tile
        width = facts.PART_COLUMNS * size // 16  # pieces of a row
        for i in range(-(-tile * width // facts.THREADS)):
            item = at.thread + i * facts.THREADS
            row = item // width
            column = at.part * (facts.PART_COLUMNS * size) + (item - row * width) * 16
            self.copy(args, at, targets, rank, row, column, 16, item < tile * width)
        for i in range(-(-tile * ROPE_BLOCKS // facts.THREADS)):
            item = at.thread + i * facts.THREADS
            row = item // ROPE_BLOCKS
            block = at.part * ROPE_BLOCKS + item - row * ROPE_BLOCKS - facts.NOPE // 8
            column = facts.LATENT * size + block * (8 * size)
            self.copy(args, at, targets, rank, row, column, 8 * size, (block >= 0) & (item < tile * ROPE_BLOCKS))

    def copy(self, args: parts.Args, at: parts.Where, targets, rank, row, column, count: int, live) -> None:
        """`count` bytes (8 or 16) at byte `column` of the CTA's head in a row of its tile."""
        token = at.row0 + row
        live = live & (token < args.rows)
        source = args.query + (Int64(token) * Int64(at.heads) + Int64(at.head)) * self.entry + Int64(column)
        place = Int64((token * self.key.ranks + rank) * at.heads + at.head) * self.entry + Int64(column)
        words = P.ldg_if(source, live) if count == 16 else P.ldg_pair_if(source, live, 0)
        if self.key.multicast:
            send = peer.send_all128 if count == 16 else peer.send_all64
        else:
            send = peer.send128 if count == 16 else peer.send64
        for target in targets:
            send(target + place, words, live)

    @cute.jit
    def gather(self, at, box, poison, alarm, limit, rows, parity, rank):
        """Every thread of the grid waits for its share of the rows' queries of all ranks."""
        _, _, tiles = cute.arch.grid_dim()
        _, _, tile = cute.arch.block_idx()
        a_head = self.entry // 16
        a_row = at.heads * (self.key.ranks * a_head)
        step = at.heads * tiles * (facts.CLUSTER * facts.THREADS)
        piece = ((tile * at.heads + at.head) * facts.CLUSTER + at.part) * facts.THREADS + at.thread
        while piece < rows * a_row:
            mine = [piece + k * step for k in range(self.in_flight)]
            live = [x < rows * a_row for x in mine]
            addresses = [box + Int64(x) * 16 for x in mine]
            _, missing = peer.await_words(addresses, live, dcp.ARMED, limit, poison)
            if missing != 0:
                lost = piece + peer.lowest(missing) * step
                row = lost // a_row
                source = (lost - row * a_row) // a_head // at.heads
                where = 1 | (source << 8) | (row << 16) | (rank << 24)
                peer.report(poison, alarm, where, parity)
            piece += self.in_flight * step


def trace(key: dcp.DcpQueryKey, target: str):
    """The jitted launcher and arguments of the right types, to be traced and compiled."""
    kinds = {"ptr": Int64(16), "i64": Int64(16), "i32": Int32(1), "f32": Float32(1.0)}
    return DcpQuery(key, target), (*(kinds[p.kind] for p in key.params), make_fake_stream())
