"""MlaQuery for few rows: every CTA normalizes all rows of its tile, and owns 24 rows of W_qb and 64 columns of W_UK.

The whole slice of W_qb (72 registers a thread) is loaded before the grid dependency wait: warp w holds k = 192 w.. of
all 24 rows, so that the MMAs start as soon as the normalized rows are in shared memory. The partial sums of the 8 warps
meet in shared memory, their bf16 goes to all 8 CTAs of the cluster (st.async), and each CTA absorbs its columns.

W_qb is the A of the MMA, 8 rows at a time, and a 16-byte load of 8 consecutive k is the fragment as it lies: words 0, 2
(k = 0, 1, 4, 5 of the 8) are row g of A, words 1, 3 (k = 2, 3, 6, 7) are row g + 8. So each half of A multiplies its
half of k. B holds both halves of x side by side, column 2t + h for half h of row t: of the result, (g, 2t) and
(g + 8, 2t + 1) are the sums of the two halves of k for row t, both in lane 4g + t, and the other entries mix halves and
are dropped. Eight rows of W_qb and 32 k for four rows of x by one MMA, without moving a register.
"""

import cutlass
from cutlass import Float32, Int64, cute

from k3dsl.nvidia import query as facts
from k3dsl.nvidia.kernels import primitives as P  # noqa: N812
from k3dsl.nvidia.kernels import query_parts as parts


class Narrow:
    """Compile-time facts: tile rows, format, packed FP32 math."""

    def __init__(self, key: facts.QueryKey, packed: bool):
        self.tile = key.tile
        self.kv_format = key.kv_format
        self.packed = packed
        self.smem = facts.smem("narrow", key.tile)
        # A row is normalized by 6 warps (one 16-byte chunk a lane), 3 (two), 2 (three) or 1 (six).
        self.row_warps = {1: 6, 2: 3, 4: 2}.get(key.tile, 1)
        self.chunks = facts.LORA // 8 // (32 * self.row_warps)

    @cute.jit
    def body(self, args: parts.Args):
        tile, smem = self.tile, self.smem
        at = parts.Where.here(tile)
        base = cutlass.memory.SmemAllocator().allocate(smem.total, 16).toint()
        gathered = base + smem.barriers
        if at.thread == 0:
            P.mbarrier_expect(gathered, tile * facts.NOPE * 2)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()

        # Weights: older than every kernel of the step.
        w = self.load_q_b(args, at)
        parts.stage_uk(args, at, base + smem.uk)
        mine = at.warp // self.row_warps  # the row of the tile that this warp normalizes, if less than tile
        lane_in_row = at.thread - mine * (32 * self.row_warps)
        weight = [P.ldg_const(args.q_norm + self.chunk(lane_in_row, j) * 16) for j in range(self.chunks)]
        insert = parts.Insert(args, at, self.kv_format, tile, self.packed)
        live = (mine < tile) & (at.row0 + mine < args.rows)
        source = args.projected + Int64(at.row0 + mine) * Int64(args.row_pitch) * 2

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        raw = [P.ldg_if(source + self.chunk(lane_in_row, j) * 16, live) for j in range(self.chunks)]
        insert.load()
        scale = P.ldg_f32(args.q_scale_inv) if self.kv_format == "fp8" else None

        # x = bf((c * factor) * weight), into shared memory. Rows that do not exist are zeros.
        total = P.warp_sum(parts.sum_squares(raw, self.packed))
        if cutlass.const_expr(self.row_warps > 1):
            P.sts_f32_if(base + smem.scale + at.warp * 4, total, at.lane == 0)
            cute.arch.sync_threads()
            total = self.sum_of_row(base + smem.scale, mine)
        factor = parts.q_factor(total, args.eps)
        x_row = base + smem.x + mine * facts.X_PITCH_NARROW
        for j in cutlass.range_constexpr(self.chunks):
            x = parts.normalize(raw[j], weight[j], factor, self.packed)
            halves = [x[0], x[2], x[1], x[3]]
            P.sts128_if(x_row + self.chunk(lane_in_row, j) * 16, halves, mine < tile)
        cute.arch.sync_threads()

        self.multiply(at, base, w)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()

        # Sum over the warps, in order. A thread finishes one pair of rows of W_qb for one row of the tile, and sends it
        # to `peers` CTAs of the cluster.
        pairs = facts.PART_ROWS // 2 * tile
        groups = max(n for n in (1, 2, 4, 8) if n * pairs <= facts.THREADS)
        if at.thread < pairs * groups:
            group = at.thread // pairs
            local = at.thread - group * pairs
            row = local // (facts.PART_ROWS // 2)
            pair = local - row * (facts.PART_ROWS // 2)
            lo = Float32(0.0)
            hi = Float32(0.0)
            for warp in cutlass.range_constexpr(facts.WARPS):
                a, b = P.lds_f32x2(base + smem.sums + (warp * tile + row) * (facts.PART_ROWS * 4) + pair * 8)
                lo = lo + a
                hi = hi + b
            word = P.pack_bf16(lo, hi)
            block = at.part * (facts.PART_ROWS // 8) + (pair >> 2)
            if block < facts.NOPE // 8:
                fragment = block * 32 + row * 4 + (pair & 3)
                peers = facts.CLUSTER // groups
                for i in cutlass.range_constexpr(peers):
                    rank = group * peers + i
                    target = P.map_to_peer(base + smem.u + fragment * 4, rank)
                    P.st_async32(target, word, P.map_to_peer(gathered, rank))
            elif group == 0:
                column = facts.LATENT + (block - facts.NOPE // 8) * 8 + (pair & 3) * 2
                live = at.row0 + row < args.rows
                parts.put_query(args, at, self.kv_format, at.row0 + row, column, word, scale, live)

        uk = parts.load_uk(at, base + smem.uk)
        store_entry = insert.store  # a bare name: the DSL would carry `insert` through the branch
        if insert.wanted():
            store_entry()
        P.mbarrier_wait_cluster(gathered)
        parts.absorb(args, at, self.kv_format, tile, base + smem.u, uk, scale)

    def chunk(self, lane_in_row, j: int):
        """The j-th 16-byte chunk of a row that a lane normalizes."""
        return lane_in_row + j * (32 * self.row_warps)

    def load_q_b(self, args: parts.Args, at: parts.Where):
        """[chunk of 32 k][8 rows]: four words of fragments, k = 192 warp + 32 chunk + 8 c.., rows 24 part + 8 i + g."""
        row = at.head * facts.QK + at.part * facts.PART_ROWS + at.g
        source = args.q_b + (Int64(row) * facts.LORA + Int64(at.warp * (facts.LORA // facts.WARPS) + at.c * 8)) * 2
        chunks, blocks = facts.LORA // facts.WARPS // 32, facts.PART_ROWS // 8
        return [
            [P.ldg_weight(source + (i * 8 * facts.LORA + j * 32) * 2) for i in range(blocks)] for j in range(chunks)
        ]

    def sum_of_row(self, sums, mine):
        """The sums of squares of the warps of a row, added in order."""
        first = sums + mine * (4 * self.row_warps)
        total = P.lds_f32(first)
        for i in range(1, self.row_warps):
            total = total + P.lds_f32(first + 4 * i)
        return total

    def multiply(self, at: parts.Where, base, w) -> None:
        """Partial u over this warp's k, for the CTA's 24 rows of W_qb and all rows of the tile."""
        tile = self.tile
        k0 = at.warp * (facts.LORA // facts.WARPS) + at.c * 8
        for n in range(-(-tile // 4)):
            # Two chains of MMAs for each 8 rows of W_qb: even chunks, odd chunks.
            acc = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(facts.PART_ROWS // 8)]
            row = at.g >> 1
            if tile < 4:  # columns beyond the tile repeat its last row and are dropped
                row = cutlass.select_(row < tile, row, tile - 1)
            x = base + self.smem.x + (4 * n + row) * facts.X_PITCH_NARROW + k0 * 2 + (at.g & 1) * 8
            for j, blocks in enumerate(w):
                b = P.lds64(x + j * 64)
                for i, words in enumerate(blocks):
                    acc[i][j % 2] = P.mma_bf16(acc[i][j % 2], words, b)
            column = 4 * n + at.c
            target = base + self.smem.sums + (at.warp * tile + column) * (facts.PART_ROWS * 4) + at.g * 4
            for i, (even, odd) in enumerate(acc):
                P.sts_f32_if(target + i * 32, (even[0] + even[3]) + (odd[0] + odd[3]), column < tile)
