"""DcpValue on the device: partial outputs to the rank of their head; there they are merged, up-projected and gated.

Pushers, the first CTAs: send every row of the local shard's output to its head's rank, arm the query that it came from
again (the core has read it), and never wait for anything.

Mergers, a cluster of 8 for a head and a tile of rows: CTA `part` waits for latents 64 part.. of the tile from every
rank, so that one thread reads a word and arms it again; merges them by their LSEs in the order of the ranks, one
rounding to bf16; and sends the result to all eight CTAs. Each then has the whole tile, and does 16 columns of W_UV and
the gate as MlaValue does.
"""

import struct
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from k3dsl.nvidia import dcp
from k3dsl.nvidia import value as facts
from k3dsl.nvidia.kernels import peer, ptx
from k3dsl.nvidia.kernels import primitives as P  # noqa: N812
from k3dsl.nvidia.kernels.value import MlaValue, load_word

#: Latents that a CTA merges, in 16-byte pieces.
PIECES = facts.LATENT // dcp.CLUSTER // 8
EMPTY_BITS = struct.unpack("<i", struct.pack("<f", dcp.EMPTY))[0]


class Args(NamedTuple):
    """The kernel's arguments; pointers are addresses. See dcp.DcpValueKey.params."""

    latent: Any
    latent_lse: Any
    peers: Any
    lse_peers: Any
    box: Any
    partial: Any
    lse: Any
    weight: Any
    gate: Any
    lengths: Any
    totals: Any
    out: Any
    poison: Any
    alarm: Any
    limit: Any
    rows: Any
    q: Any
    head_stride: Any
    v_stride: Any
    gate_pitch: Any
    entry: Any
    parity: Any
    rank: Any
    pushers: Any


class DcpValue(MlaValue):
    """Compile-time facts: heads, ranks and the row tile."""

    def __init__(self, key: dcp.DcpValueKey):
        super().__init__(facts.ValueKey(key.heads, key.tile))
        self.dcp = key
        self.all_heads = key.heads * key.ranks
        self.smem = key.layout

    @cute.jit
    def __call__(
        self,
        latent: Int64,
        latent_lse: Int64,
        peers: Int64,
        lse_peers: Int64,
        box: Int64,
        partial: Int64,
        lse: Int64,
        weight: Int64,
        gate: Int64,
        lengths: Int64,
        totals: Int64,
        out: Int64,
        poison: Int64,
        alarm: Int64,
        limit: Int64,
        rows: Int32,
        q: Int32,
        head_stride: Int32,
        v_stride: Int32,
        gate_pitch: Int32,
        entry: Int32,
        parity: Int32,
        rank: Int32,
        pushers: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel_dcp(
            latent, latent_lse, peers, lse_peers, box, partial, lse, weight, gate, lengths, totals, out, poison, alarm,
            limit, rows, q, head_stride, v_stride, gate_pitch, entry, parity, rank, pushers,
        ).launch(
            grid=(dcp.CLUSTER, 1, 1),
            block=(dcp.THREADS, 1, 1),
            cluster=(dcp.CLUSTER, 1, 1),
            smem=self.smem.total,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=dcp.CTAS_A_SM,
            preferred_smem_carveout=100,  # given, because the DSL would ask a GPU for its limits
        )  # fmt: skip

    @cute.kernel
    def kernel_dcp(
        self,
        latent: Int64,
        latent_lse: Int64,
        peers: Int64,
        lse_peers: Int64,
        box: Int64,
        partial: Int64,
        lse: Int64,
        weight: Int64,
        gate: Int64,
        lengths: Int64,
        totals: Int64,
        out: Int64,
        poison: Int64,
        alarm: Int64,
        limit: Int64,
        rows: Int32,
        q: Int32,
        head_stride: Int32,
        v_stride: Int32,
        gate_pitch: Int32,
        entry: Int32,
        parity: Int32,
        rank: Int32,
        pushers: Int32,
    ):
        args = Args(
            latent, latent_lse, peers, lse_peers, box, partial, lse, weight, gate, lengths, totals, out, poison, alarm,
            limit, rows, q, head_stride, v_stride, gate_pitch, entry, parity, rank, pushers,
        )  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = cutlass.memory.SmemAllocator().allocate(self.smem.total, 16).toint()
        if block < pushers:
            self.push(args, block * dcp.THREADS + thread, pushers * dcp.THREADS)
        else:
            self.merge(args, shared, thread, block - pushers)

    # ------------------------------------------------------------------------------------------------ pushers

    @cute.jit
    def push(self, args: Args, first, threads):
        """first: this thread's number among all `threads` that push."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        ranks, heads, every = self.dcp.ranks, self.heads, self.all_heads
        mine = args.parity * ranks + args.rank  # block of 64 rows that this rank has on each of the others
        i = first
        while i < args.rows * every:
            row = i // every
            head = i - row * every
            owner = head // heads
            x = ptx.ldg_b32(args.latent_lse + Int64(i) * 4)
            x = self.finite(x, ptx.ldg_b32(args.lengths + Int64(row // args.q) * 4))
            to = peer.ldg_address(args.lse_peers + Int64(owner) * 8)
            to = to + Int64((mine * dcp.CAP + row) * heads + head - owner * heads) * 4
            peer.send32(to, x, Int32(1))
            i += threads
        pieces = args.rows * (every * (facts.LATENT // 8))
        i = first
        while i < pieces:
            self.push_pieces(args, mine, [i + k * threads for k in range(dcp.PIECES)], pieces)
            i += dcp.PIECES * threads

    def push_pieces(self, args: Args, mine, numbers, pieces) -> None:
        """16-byte pieces of rows to their owners, by number; each rank begins with another owner.

        The query of a (row, head) in the local mailbox is armed again by those who then push that row: its owner
        publishes the next one only when all of the row has arrived there.
        """
        armed = [Int32(dcp.ARMED)] * 4
        box = args.box + Int64(args.parity * (dcp.CAP * self.all_heads)) * Int64(args.entry)
        every, heads, row_pieces = self.all_heads, self.heads, facts.LATENT // 8
        moves = []
        for x in numbers:
            live = x < pieces
            row = x // (every * row_pieces)
            head = (x - row * (every * row_pieces)) // row_pieces + (args.rank + 1) * heads
            head = cutlass.select_(head >= every, head - every, head)
            owner = head // heads
            piece = x % row_pieces
            source = args.latent + Int64((row * every + head) * row_pieces + piece) * 16
            place = Int64(((mine * dcp.CAP + row) * heads + head - owner * heads) * row_pieces + piece) * 16
            words = P.ldg_if(source, live)
            length = load_word(args.lengths + Int64(row // args.q) * 4, live)
            to = peer.ldg_address_if(args.peers + Int64(owner) * 8, live) + place
            query = box + Int64(row * every + head) * Int64(args.entry) + piece * 16
            for more in (0, row_pieces * 16):  # a bf16 query has more pieces than a row of latents
                P.stg128_if(query + more, armed, live & (piece * 16 + more < args.entry))
            moves.append((words, length, to, live))
        for words, length, to, live in moves:
            data = [cutlass.select_(length > 0, peer.without_minus_zero(w), Int32(0)) for w in words]
            peer.send128(to, data, live)

    def finite(self, bits, length):
        """An LSE as it is published (its bits): EMPTY for a shard with no key, NaN, infinities and what is as large."""
        size = peer.as_float(bits & 0x7FFFFFFF)
        usable = (length > 0) & (size < dcp.HUGE)
        return cutlass.select_(usable, bits, Int32(EMPTY_BITS))

    # ------------------------------------------------------------------------------------------------ mergers

    @cute.jit
    def merge(self, args: Args, shared, thread, block):
        """block: number among the CTAs that merge: CTA of the cluster, head, row tile."""
        tile, heads, ranks, smem = self.tile, self.heads, self.dcp.ranks, self.smem
        part = block % dcp.CLUSTER
        head = block // dcp.CLUSTER % heads
        row0 = block // (dcp.CLUSTER * heads) * tile
        warp, lane = thread // 32, thread % 32
        g, c = lane // 4, lane % 4
        chunks = facts.LATENT // facts.WARPS // 32
        k0 = warp * (32 * chunks) + 8 * c
        gathered = shared + smem.barrier
        if thread == 0:
            P.mbarrier_expect(gathered, tile * facts.LATENT * 2)
            cute.arch.mbarrier_init_fence()
        b = self.weights(args.weight, head, args.head_stride, args.v_stride, part * facts.COLUMNS + g, k0)

        # The pair of outputs that this thread finishes.
        column = part * facts.COLUMNS + (thread % 8) * 2
        row = row0 + (thread // 64) * 8 + (thread % 64) // 8
        live = (thread < tile * 8) & (row < args.rows)
        out = args.out + (Int64(row) * (heads * facts.V) + Int64(head * facts.V + column)) * 2
        gate = args.gate + (Int64(row) * Int64(args.gate_pitch) + Int64(head * facts.V + column)) * 2

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        logits = load_word(gate, live)
        length = load_word(args.totals + Int64(row // args.q) * 4, live)

        # LSEs of the tile from every rank, to shared memory. All CTAs of the cluster read them; one arms them again.
        mine = args.parity * ranks
        lse_at = self.lse_places(args, thread, head, row0)
        missing = self.read_lse(args, thread, lse_at, shared + smem.lse)
        if missing != 0:
            lost = thread + peer.lowest(missing) * dcp.THREADS
            where = 2 | ((lost // tile) << 8) | ((row0 + lost % tile) << 16) | (args.rank << 24)
            peer.report(args.poison, args.alarm, where, args.parity)
        cute.arch.sync_threads()
        cute.arch.cluster_arrive_relaxed()

        # A piece of 8 latents of a row: its weights, then its words from every rank.
        r, piece = thread // PIECES, thread % PIECES
        here = (r < tile) & (row0 + r < args.rows)
        scales = self.scales(shared + smem.lse + cutlass.select_(r < tile, r, 0) * (ranks * 4))
        at = Int64((mine * dcp.CAP + row0 + r) * heads + head) * (facts.LATENT * 2)
        at = args.partial + at + Int64((part * PIECES + piece) * 16)
        total, lost = self.collect(args, at, here, scales)
        if lost != 0:
            where = 3 | (peer.lowest(lost) << 8) | ((row0 + r) << 16) | (args.rank << 24)
            peer.report(args.poison, args.alarm, where, args.parity)
        merged = [P.pack_bf16(total[2 * w], total[2 * w + 1]) for w in range(4)]
        cute.arch.cluster_wait()  # every CTA's barrier is set up, and every CTA has its LSEs
        self.arm_lse(lse_at, part == 0)
        if r < tile:
            to = shared + smem.latent + r * dcp.LATENT_PITCH + (part * PIECES + piece) * 16
            for rank in cutlass.range_constexpr(dcp.CLUSTER):
                peer.st_async128(P.map_to_peer(to, rank), merged, P.map_to_peer(gathered, rank))
        P.mbarrier_wait_cluster(gathered)
        a = [
            [P.lds128(shared + smem.latent + (8 * m + g) * dcp.LATENT_PITCH + (k0 + 32 * i) * 2) for i in range(chunks)]
            for m in range(tile // 8)
        ]
        self.finish(self.products(a, b), logits, length, shared + smem.sums, thread, warp, lane, out, live)

    def lse_places(self, args: Args, thread, head, row0):
        """(address, whether there is one, rank, row of the tile) of each LSE that this thread reads."""
        tile, ranks = self.tile, self.dcp.ranks
        places = []
        for i in range(-(-tile * ranks // dcp.THREADS)):
            item = thread + i * dcp.THREADS
            source, r = item // tile, item % tile
            at = Int64(((args.parity * ranks + source) * dcp.CAP + row0 + r) * self.heads + head) * 4
            places.append((args.lse + at, (item < tile * ranks) & (row0 + r < args.rows), source, r))
        return places

    def read_lse(self, args: Args, thread, places, shared):
        """The LSEs to shared memory, [row][rank], EMPTY in rows that do not exist; a bit for each that never came."""
        words, missing = peer.await_words(
            [at for at, *_ in places], [here for _, here, *_ in places], dcp.ARMED, args.limit, args.poison, width=1
        )
        for i, ((_, here, source, r), (word,)) in enumerate(zip(places, words, strict=True)):
            to = shared + (r * self.dcp.ranks + source) * 4
            exists = thread + i * dcp.THREADS < self.tile * self.dcp.ranks
            peer.sts32_if(to, cutlass.select_(here, word, Int32(EMPTY_BITS)), exists)
        return missing

    def arm_lse(self, places, wanted) -> None:
        for at, here, *_ in places:
            P.stg32_if(at, Int32(dcp.ARMED), here & wanted)

    def collect(self, args: Args, at, here, scales):
        """(8 sums over the ranks of scale x latent, a bit for each rank whose piece never came); the words are armed
        again. at: address of the first rank's piece."""
        stride = dcp.CAP * self.heads * facts.LATENT * 2
        armed = [Int32(dcp.ARMED_PARTIAL)] * 4
        total, lost = [Float32(0.0)] * 8, Int32(0)
        for first in range(0, self.dcp.ranks, dcp.IN_FLIGHT):
            sources = range(first, min(first + dcp.IN_FLIGHT, self.dcp.ranks))
            found, missing = peer.await_words(
                [at + s * stride for s in sources], [here] * len(sources), dcp.ARMED_PARTIAL, args.limit, args.poison
            )
            lost = lost | (missing << first)
            for s, words in zip(sources, found, strict=True):
                P.stg128_if(at + s * stride, armed, here)
                for w, word in enumerate(words):
                    # A rank that has no key has no part in the result, whatever it sent.
                    low, high = P.unpack_bf16(cutlass.select_(scales[s] != 0.0, word, Int32(0)))
                    total[2 * w] = P.fma(scales[s], low, total[2 * w])
                    total[2 * w + 1] = P.fma(scales[s], high, total[2 * w + 1])
        return total, lost

    def scales(self, lse):
        """The weight of each rank in a row: 2^lse over the sum of all, 0 for ranks with no key. lse: shared address."""
        x = [P.lds_f32(lse + 4 * s) for s in range(self.dcp.ranks)]
        top = x[0]
        for y in x[1:]:
            top = ptx.fmax(top, y)
        weight = [cutlass.select_(y > dcp.EMPTY, ptx.ex2(y - top), Float32(0.0)) for y in x]
        total = weight[0]
        for y in weight[1:]:
            total = total + y
        return [cutlass.select_(total > 0.0, P.div(y, total), Float32(0.0)) for y in weight]


def trace(key: dcp.DcpValueKey, target: str):
    """The jitted launcher and arguments of the right types, to be traced and compiled."""
    kinds = {"ptr": Int64(16), "i64": Int64(16), "i32": Int32(1), "f32": Float32(1.0)}
    return DcpValue(key), (*(kinds[p.kind] for p in key.params), make_fake_stream())
