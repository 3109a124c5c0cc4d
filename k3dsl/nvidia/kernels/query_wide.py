"""MlaQuery for many rows: the CTAs of a cluster split the 1536 columns of x and W_qb, and exchange sums.

Normalizing 16 rows or more in every CTA costs more than the rest of the kernel, so a CTA takes 192 columns of all rows,
for all 192 rows of W_qb of the head: an eighth of the reads and of the arithmetic, the same weights. What it pays:

1. factors. A CTA sums the squares of an eighth of the rows, whole, and sends each factor to all CTAs.
2. partial sums. Warp w holds rows 24 w.. of W_qb in registers (72 a thread, loaded before the grid dependency wait, in
   fragment order) and computes them over the CTA's columns; CTA w of the cluster gets the result and adds the eight in
   order. So a warp sends to one CTA, straight from its accumulators.
3. u. CTA w rounds its 24 rows of u to bf16 and sends the nope part to all CTAs; then each absorbs 64 latent columns.

All three are st.async from registers, each to its own barrier, in fragment order: two adjacent accumulator tiles of u
are the A fragment of one k16 step of the absorbing MMA. x lies in shared memory as A fragments as well: [16 rows][chunk
of 32 k][k16 step][lane] 16 bytes, written by a thread that normalizes the same 8 columns of rows g and g + 8.
"""

import cutlass
from cutlass import Float32, Int64, cute

from k3dsl.nvidia import query as facts
from k3dsl.nvidia.kernels import primitives as P  # noqa: N812
from k3dsl.nvidia.kernels import query_parts as parts

COLUMNS = facts.LORA // facts.CLUSTER
CHUNKS = COLUMNS // 8  # of 16 bytes, of a row
BLOCKS = facts.PART_ROWS // 8  # of 8 rows of W_qb, a warp's n tiles


class Wide:
    """Compile-time facts: tile rows, format, packed FP32 math."""

    def __init__(self, key: facts.QueryKey, packed: bool):
        self.tile = key.tile
        self.kv_format = key.kv_format
        self.packed = packed
        self.smem = facts.smem("wide", key.tile)
        self.m_tiles = key.tile // 16
        self.sum_rows = key.tile // facts.CLUSTER
        self.items = key.tile // 2 * CHUNKS  # pairs of 16-byte chunks, of rows g and g + 8 of an M tile

    @cute.jit
    def body(self, args: parts.Args):
        tile, smem = self.tile, self.smem
        at = parts.Where.here(tile)
        base = cutlass.memory.SmemAllocator().allocate(smem.total, 16).toint()
        factors, sums, gathered = base + smem.barriers, base + smem.barriers + 8, base + smem.barriers + 16
        if at.thread == 0:
            P.mbarrier_expect(factors, tile * 4)
            P.mbarrier_expect(sums, facts.CLUSTER * self.m_tiles * BLOCKS * facts.UNIT)
            P.mbarrier_expect(gathered, tile * facts.NOPE * 2)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()

        # Weights: older than every kernel of the step.
        w = self.load_q_b(args, at)
        parts.stage_uk(args, at, base + smem.uk)
        passes = -(-self.items // facts.THREADS)
        items = [self.item(at, i) for i in range(passes)]
        weight = [P.ldg_const(args.q_norm + (at.part * CHUNKS + chunk) * 16) for _, _, chunk in items]
        insert = parts.Insert(args, at, self.kv_format, tile, self.packed)
        row = at.part * self.sum_rows + at.warp
        live = (at.warp < self.sum_rows) & (at.row0 + row < args.rows)
        source = args.projected + Int64(at.row0 + row) * Int64(args.row_pitch) * 2
        pairs = [self.pair_at(args, at, item) for item in items]

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        whole = [P.ldg_if(source + (at.lane + 32 * j) * 16, live) for j in range(facts.LORA // 256)]
        raw = [[P.ldg_if(address, wanted) for address, wanted in rows] for rows in pairs]
        insert.load()
        scale = P.ldg_f32(args.q_scale_inv) if self.kv_format == "fp8" else None

        # One factor a row, to every CTA. Rows that do not exist are zeros.
        factor = parts.q_factor(P.warp_sum(parts.sum_squares(whole, self.packed)), args.eps)
        cute.arch.cluster_wait()
        if (at.warp < self.sum_rows) & (at.lane < facts.CLUSTER):
            target = P.map_to_peer(base + smem.scale + row * 4, at.lane)
            P.st_async_f32(target, factor, P.map_to_peer(factors, at.lane))
        P.mbarrier_wait_cluster(factors)

        # x = bf((c * factor) * weight), into shared memory.
        for i in cutlass.range_constexpr(passes):
            active, pair, chunk = items[i]
            if active:
                top = (pair >> 3) * 16 + (pair & 7)
                upper, lower = (
                    parts.normalize(raw[i][h], weight[i], P.lds_f32(base + smem.scale + (top + 8 * h) * 4), self.packed)
                    for h in range(2)
                )
                target = base + smem.x + ((pair >> 3) * (COLUMNS // 32) + (chunk >> 2)) * facts.X_CHUNK
                target = target + ((pair & 7) * 4 + (chunk & 3)) * 16
                P.sts128(target, [upper[0], lower[0], upper[1], lower[1]])
                P.sts128(target + 512, [upper[2], lower[2], upper[3], lower[3]])
        cute.arch.sync_threads()

        peer_sums = P.map_to_peer(sums, at.warp)
        for m in cutlass.range_constexpr(self.m_tiles):
            acc = self.multiply(at, base, w, m)
            for n in cutlass.range_constexpr(BLOCKS):
                unit = (at.part * self.m_tiles + m) * BLOCKS + n
                target = P.map_to_peer(base + smem.sums + unit * facts.UNIT + at.lane * 16, at.warp)
                P.st_async_f32x4(target, acc[n], peer_sums)

        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        uk = parts.load_uk(at, base + smem.uk)
        store_entry = insert.store  # a bare name: the DSL would carry `insert` through the branch
        if insert.wanted():
            store_entry()

        # Sum over the CTAs, in order. A warp finishes units (16 rows of the tile, 8 rows of W_qb).
        P.mbarrier_wait_cluster(sums)
        units = self.m_tiles * BLOCKS
        for i in cutlass.range_constexpr(-(-units // facts.WARPS)):
            unit = at.warp + i * facts.WARPS
            if unit < units:
                m = unit // BLOCKS
                block = at.part * BLOCKS + unit - m * BLOCKS
                mine = base + smem.sums + unit * facts.UNIT + at.lane * 16
                total = [Float32(0.0)] * 4
                for part in cutlass.range_constexpr(facts.CLUSTER):
                    more = P.lds_f32x4(mine + part * units * facts.UNIT)
                    total = [a + b for a, b in zip(total, more, strict=True)]
                words = [P.pack_bf16(total[0], total[1]), P.pack_bf16(total[2], total[3])]
                if block < facts.NOPE // 8:
                    fragment = base + smem.u + ((m * (facts.NOPE // 8) + block) * 32 + at.lane) * 8
                    for rank in cutlass.range_constexpr(facts.CLUSTER):
                        target = P.map_to_peer(fragment, rank)
                        P.st_async64(target, words[0], words[1], P.map_to_peer(gathered, rank))
                else:
                    column = facts.LATENT + (block - facts.NOPE // 8) * 8 + 2 * at.c
                    for h in cutlass.range_constexpr(2):
                        out = at.row0 + 16 * m + 8 * h + at.g
                        parts.put_query(args, at, self.kv_format, out, column, words[h], scale, out < args.rows)

        P.mbarrier_wait_cluster(gathered)
        parts.absorb(args, at, self.kv_format, tile, base + smem.u, uk, scale)

    def load_q_b(self, args: parts.Args, at: parts.Where):
        """[chunk of 32 k][8 rows]: four words of fragments, k = 192 part + 32 chunk + 8 c.., rows 24 warp + 8 i + g."""
        row = at.head * facts.QK + at.warp * facts.PART_ROWS + at.g
        source = args.q_b + (Int64(row) * facts.LORA + Int64(at.part * COLUMNS + at.c * 8)) * 2
        return [
            [P.ldg_weight(source + (i * 8 * facts.LORA + j * 32) * 2) for i in range(BLOCKS)]
            for j in range(COLUMNS // 32)
        ]

    def item(self, at: parts.Where, i: int):
        """(is there one, pair of rows, 16-byte chunk of the CTA's columns) that a thread normalizes in pass i."""
        index = at.thread + i * facts.THREADS
        pair = index // CHUNKS
        return index < self.items, pair, index - pair * CHUNKS

    def pair_at(self, args: parts.Args, at: parts.Where, item):
        """(address, whether to load) of the item's chunk in rows g and g + 8 of its M tile."""
        active, pair, chunk = item
        row = at.row0 + (pair >> 3) * 16 + (pair & 7)
        source = args.projected + (Int64(row) * Int64(args.row_pitch) + Int64((at.part * CHUNKS + chunk) * 8)) * 2
        return [(source + Int64(args.row_pitch) * (16 * h), active & (row + 8 * h < args.rows)) for h in range(2)]

    def multiply(self, at: parts.Where, base, w, m: int):
        """Partial u of 16 rows of the tile and this warp's 24 rows of W_qb: three accumulator tiles."""
        acc = [[Float32(0.0)] * 4 for _ in range(BLOCKS)]
        for j, blocks in enumerate(w):
            for s in range(2):
                a = P.lds128(base + self.smem.x + (m * len(w) + j) * facts.X_CHUNK + s * 512 + at.lane * 16)
                for n, words in enumerate(blocks):
                    acc[n] = P.mma_bf16(acc[n], a, words[2 * s : 2 * s + 2])
        return acc
