"""The `hopper` attention core on the device: MLA decode over a paged latent cache on sm_90a, FP8 or BF16.

Products are swapped: S^T = K Q^T has keys as M and query columns as N, O^T += V^T P^T has latents as M. So few heads cost
N = 8..48 and not a padded M of 64, and both products read the cache as it lies in shared memory.

A CTA has a column block and a run of 64-key tiles (kernels/cut.py). Warp 8 loads tiles, warp 9 queries, warp 10 fetches
the tensor maps' descriptors; two consumer warpgroups compute. A step is two tiles (FP8) or one (BF16), `HopperKey.pair`:
* S: in a pair each warpgroup does one tile, in a single both do the same one, each for itself;
* softmax: reference m and sum l a column, in registers, in log2 units. Scores become P with the m of the steps before;
  only where one is more than 2^8 above it, all warps agree on a new m first. P goes to shared memory (two buffers in
  turn, so that one barrier a step is enough);
* O: warpgroup g accumulates latents 256g..256g+255 over all tiles of the step. Nothing is exchanged at the end.

Rounding: S in float32 (FP8: one accumulation chain a 128-element box, added in float32: a chain that runs over all of
them loses 3 bits); P to f16, bf16 or, times 2^4, e4m3 (e4m3x2: to the sum of two, 8 bits, for a second wgmma and none of
the conversions of f16); l sums the unrounded P; O in float32.

Fragments. Lane (r, c) = (lane // 4, lane % 4) of warp w has in accumulator [4g + 2h + b] row 16w + r + 8h, column
8g + 2c + b. FP8 V reaches the A operand by ldmatrix.trans of 16-bit units: register j of a lane has keys 8j + 2c (low
half) and 8j + 2c + 1, latents 2r and 2r + 1. Accumulator rows r and r + 8 then are latents 2r and 2r + 1 of the warp's
16. BF16 V is read by the wgmma itself, transposed.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, GridConstant, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from k3dsl.nvidia.core.hopper import CONSUMERS, ENTRY, LATENT, THREADS, TILE, HopperKey, smem
from k3dsl.nvidia.kernels import cut, ptx

#: m of a column that has seen no key: below every score, and its square of a difference is still finite.
UNSEEN = -1.0e30
#: P is 2^(score - m + bias). m need not be the maximum of the scores so far: it is raised to it only when an exponent
#: passes the limit. That is rare after the first tiles, and saves finding and exchanging maxima in all other steps. The
#: largest P, 256, is in the range of every type (448 for e4m3); the bias of e4m3 keeps P down to 2^-13 from vanishing.
P_LIMIT = {"f16": 8.0, "bf16": 8.0, "e4m3": 8.0, "e4m3x2": 8.0}
P_BIAS = {"f16": 0.0, "bf16": 0.0, "e4m3": 4.0, "e4m3x2": 4.0}
#: Bytes from one 128-byte wide box of a tile to the next.
BOX = TILE * 128
#: Registers a thread of the consumers and of the loaders, where the even share of 168 is too little.
CONSUMER_REGISTERS, LOADER_REGISTERS = 224, 56
#: From here on the consumers get more registers than their even share.
WIDE = 32
#: FP8 QK chains that a warpgroup has in flight, by N: as many as registers allow.
CHAINS = {8: 5, 16: 5, 24: 3, 32: 2}
#: From here on it is one, in a loop: unrolled, ptxas puts the additions off and takes registers for all of them. The
#: other warpgroup's wgmmas fill the gaps.
BOX_BY_BOX = 40


class Core:
    """One build. `key`: HopperKey."""

    def __init__(self, key: HopperKey) -> None:
        self.key, self.smem = key, smem(key)
        self.fp8 = key.kv == "fp8"
        self.e4m3 = key.p in ("e4m3", "e4m3x2")
        self.parts = 2 if key.p == "e4m3x2" else 1  # summands of P
        self.width = 128 if self.fp8 else 64  # elements of a box row
        self.boxes = ENTRY // self.width  # whole boxes; FP8 has a tail of 64 elements beside them
        self.half = key.n // 2  # accumulator registers of a 64-row tile
        self.cols = key.n // 4  # columns that a thread sees of each: 8g + 2c + b
        self.latent_tiles = LATENT // TILE // CONSUMERS  # of a warpgroup

    # ------------------------------------------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self,
        lengths: Int64,
        table: Int64,
        partial: Int64,
        stats: Int64,
        table_stride: Int32,
        requests: Int32,
        splits: Int32,
        slots: Int32,
        scale_log2: Float32,
        stream: cuda.CUstream,
    ):
        """For tracing only: the maps that a launch passes are encoded by the host."""
        dtype = cutlass.Float8E4M3FN if self.fp8 else cutlass.BFloat16
        main = create_tensor_map_tiled(lengths, dtype, [ENTRY, 64], [72], [64, 8], swizzle=TensorMapSwizzle.s128b)
        rest = (lengths, table, partial, stats, table_stride, requests, splits, slots, scale_log2)
        launch = dict(
            grid=(self.key.blocks, 1, 1),
            block=(THREADS, 1, 1),
            smem=self.smem.total,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(self.fp8):
            self.kernel_fp8(main, main, main, main, *rest).launch(**launch)
        else:
            self.kernel_bf16(main, main, *rest).launch(**launch)

    @cute.kernel
    def kernel_fp8(
        self,
        kv: GridConstant[TensorMap],
        kv_tail: GridConstant[TensorMap],
        query: GridConstant[TensorMap],
        query_tail: GridConstant[TensorMap],
        lengths: Int64,
        table: Int64,
        partial: Int64,
        stats: Int64,
        table_stride: Int32,
        requests: Int32,
        splits: Int32,
        slots: Int32,
        scale_log2: Float32,
    ):
        maps = [m.get_ptr().toint() for m in (kv, kv_tail, query, query_tail)]
        self.body(maps, lengths, table, partial, stats, table_stride, requests, splits, slots, scale_log2)

    @cute.kernel
    def kernel_bf16(
        self,
        kv: GridConstant[TensorMap],
        query: GridConstant[TensorMap],
        lengths: Int64,
        table: Int64,
        partial: Int64,
        stats: Int64,
        table_stride: Int32,
        requests: Int32,
        splits: Int32,
        slots: Int32,
        scale_log2: Float32,
    ):
        k, q = kv.get_ptr().toint(), query.get_ptr().toint()
        self.body([k, k, q, q], lengths, table, partial, stats, table_stride, requests, splits, slots, scale_log2)

    @cute.jit
    def body(self, maps, lengths, table, partial, stats, table_stride, requests, splits, slots, scale_log2):
        lay = self.smem
        tid, _, _ = cute.arch.thread_idx()
        block, cta, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_launch_dependents()
        loaded = cut.load_lengths(lengths, requests, lane)
        smem_ = cutlass.memory.SmemAllocator()
        base = smem_.allocate(lay.bytes, 1024).toint()
        full = smem_.allocate_array(Int64, lay.stages)
        empty = smem_.allocate_array(Int64, lay.stages)
        query_full = smem_.allocate_array(Int64, lay.queries)
        query_empty = smem_.allocate_array(Int64, lay.queries)
        if tid == 0:
            for i in cutlass.range_constexpr(lay.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, 4 * CONSUMERS)
            for i in cutlass.range_constexpr(lay.queries):
                cute.arch.mbarrier_init(query_full + i, 1)
                cute.arch.mbarrier_init(query_empty + i, 4 * CONSUMERS)
            cute.arch.mbarrier_init_fence()
        work = cut.split(loaded, requests, splits)
        cute.arch.sync_threads()
        group = warp // 4
        if group == CONSUMERS:
            if cutlass.const_expr(self.key.n >= WIDE):
                cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp == 4 * CONSUMERS:
                self.load_tiles(maps, table, table_stride, full, empty, base, lane, work, cta)
            if warp == 4 * CONSUMERS + 1:
                self.load_queries(maps, query_full, query_empty, base, lane, work, block, cta)
            if warp == 4 * CONSUMERS + 2:  # a warp of its own: in front of the barrier it delays every role
                for m in maps:
                    ptx.prefetch_tmap(m)
        else:
            if cutlass.const_expr(self.key.n >= WIDE):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                partial, stats, full, empty, query_full, query_empty, base, tid, warp, group, lane, work, block, cta,
                slots, scale_log2,
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ loaders

    @cute.jit
    def load_tiles(self, maps, table, table_stride, full, empty, base, lane, work, cta):
        """Warp 8: the tiles of the CTA's run through the block table, `stages` ahead of the consumers.

        The kernel before may still be writing the last q tokens of a request; all else is older than that kernel. So
        only tiles that hold one of these wait for it.
        """
        page, stages = self.key.page, self.smem.stages
        at, end = cut.run(work, cta)
        i = Int32(0)  # tiles loaded
        while at < end:
            request, length, first, last = cut.locate(work, at)
            count = min(end, last) - at
            pages = (length + (page - 1)) // page
            row = table + Int64(request) * Int64(table_stride) * 4
            window = Int32(-1)  # which 32 table entries `entries` has: one coalesced read, handed out by shuffles
            entries = Int32(0)
            for j in cutlass.range(at - first, at - first + count, unroll=1):
                at_page = j * TILE // page
                if at_page >> 5 != window:
                    window = at_page >> 5
                    # entries beyond the request's last page are not there to be read
                    entries = ptx.ldg_b32(row + Int64(min((window << 5) + lane, pages - 1)) * 4)
                number = [
                    cute.arch.shuffle_sync(entries, (at_page + x) & 31)
                    for x in range(max(1, TILE // page))  # a second page of 32 beyond the last one repeats the last
                ]
                stage = i % stages
                if i >= stages:
                    cute.arch.mbarrier_wait(empty + stage, (i // stages - 1) & 1)
                if (j + 1) * TILE > length - self.key.q:
                    cute.arch.griddepcontrol_wait()
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.smem.tile_bytes)
                    self.load_tile(maps, base + stage * self.smem.tile_bytes, j, number, full + stage)
                i += 1
            at += count

    def load_tile(self, maps, dst, j, number, bar):
        row = j % (self.key.page // TILE) * TILE if self.key.page > TILE else 0
        for b in range(self.boxes):
            for x, n in enumerate(number):
                ptx.tma_3d(dst + (b * BOX + x * 32 * 128), maps[0], b * self.width, row, n, bar)
        if self.fp8:
            for x, n in enumerate(number):
                ptx.tma_3d(dst + (self.boxes * BOX + x * 32 * 64), maps[1], self.boxes * self.width, row, n, bar)

    @cute.jit
    def load_queries(self, maps, query_full, query_empty, base, lane, work, block, cta):
        """Warp 9: the query columns of each request of the run. The kernel before writes them.

        The boxes may reach into the columns of another block or request: their results are dropped.
        """
        key, lay = self.key, self.smem
        cute.arch.griddepcontrol_wait()  # also where there is no work: the next kernel relies on every CTA's wait
        at, end = cut.run(work, cta)
        i = Int32(0)
        while at < end:
            request, length, first, last = cut.locate(work, at)
            at = min(end, last)
            buffer = i % lay.queries
            if i >= lay.queries:
                cute.arch.mbarrier_wait(query_empty + buffer, (i // lay.queries - 1) & 1)
            if lane == 0:
                bar = query_full + buffer
                dst = base + lay.query + buffer * lay.query_bytes
                row = request * key.columns + block * key.block
                cute.arch.mbarrier_arrive_and_expect_tx(bar, key.n * ENTRY * key.element)
                for b in cutlass.range_constexpr(self.boxes):
                    ptx.tma_2d(dst + b * key.n * 128, maps[2], b * self.width, row, bar)
                if cutlass.const_expr(self.fp8):
                    ptx.tma_2d(dst + self.boxes * key.n * 128, maps[3], self.boxes * self.width, row, bar)
            i += 1

    # ------------------------------------------------------------------------------------------------ consumers

    @cute.jit
    def consume(
        self, partial, stats, full, empty, query_full, query_empty, base, tid, warp, group, lane, work, block, cta,
        slots, scale_log2,
    ):  # fmt: skip
        """Warps 0..7: attend, request by request, and write a partial for each."""
        key, lay, pair = self.key, self.smem, self.key.pair
        stages, cols = lay.stages, self.cols
        w, r, c = warp & 3, lane >> 2, lane & 3
        at, end = cut.run(work, cta)
        p_mine = self.p_store_addresses(group * lay.p_bytes, w, lane)
        peaks = base + lay.peaks + (0 if pair else group * 4 * key.n * 4)
        peak_mine = peaks + (warp if pair else w) * key.n * 4 + c * 8
        barrier = 1 if pair else 1 + group
        threads = 256 if pair else 128
        acc = cute.make_rmem_tensor(self.latent_tiles * self.half, Float32)
        s = cute.make_rmem_tensor(self.half, Float32)
        m = cute.make_rmem_tensor(cols, Float32)
        total = cute.make_rmem_tensor(cols, Float32)
        sums = cute.make_rmem_tensor(cols, Float32)
        done = Int32(0)  # tiles of the CTA before this request
        segment = Int32(0)
        while at < end:
            request, length, first, last = cut.locate(work, at)
            count = min(end, last) - at
            tile0 = at - first
            for x in cutlass.range_constexpr(self.latent_tiles * self.half):
                acc[x] = Float32(0.0)
            for x in cutlass.range_constexpr(cols):
                m[x] = Float32(UNSEEN)
                total[x] = Float32(0.0)
            buffer = segment % lay.queries
            q_lo = ptx.descriptor(base + lay.query + buffer * lay.query_bytes)
            cute.arch.mbarrier_wait(query_full + buffer, (segment // lay.queries) & 1)
            for step in cutlass.range(0, count, 2 if pair else 1, unroll=1):
                # ---- S^T of my tile
                for x in cutlass.range_constexpr(self.half):
                    s[x] = Float32(-math.inf)
                mine = step + group if pair else step
                if mine < count:
                    i = done + mine
                    tile = base + (i % stages) * lay.tile_bytes
                    cute.arch.mbarrier_wait(full + i % stages, (i // stages) & 1)
                    if cutlass.const_expr(self.fp8 and key.n >= BOX_BY_BOX):
                        self.scores_by_box(s, ptx.descriptor(tile), q_lo)
                    else:
                        scores = self.scores(ptx.descriptor(tile), q_lo)
                        for x in cutlass.range_constexpr(self.half):
                            s[x] = scores[x]
                    valid = length - (tile0 + mine) * TILE  # keys of the tile that are there, if below 64
                    if valid < TILE + key.q - 1:
                        self.mask(s, w, r, c, block, valid)
                    if valid < TILE:
                        if cutlass.const_expr(not pair):  # the other warpgroup may still read the keys
                            cute.arch.barrier(barrier_id=3, number_of_threads=256)
                        self.clear_values(tile, group, tid, valid)
                # ---- P^T of my tile by the m that we have; it holds if no score is far above m
                half_p = base + lay.p + (step // (2 if pair else 1) & 1) * 2 * lay.p_bytes
                at_p = [half_p + x for x in p_mine]
                here, worst = self.store_p(s, m, at_p, scale_log2)
                for x in cutlass.range_constexpr(cols):
                    sums[x] = here[x]
                cute.arch.fence_proxy("async.shared", space="cta")
                if ptx.barrier_any(worst > P_LIMIT[key.p], barrier, threads):
                    # ---- a new m: the maximum of all tiles of the step; then P again
                    self.share_peaks(s, lane, peak_mine)
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
                    new = self.new_maxima(m, peaks + c * 8, scale_log2)
                    factor = [ptx.ex2(m[x] - new[x]) for x in range(cols)]
                    for x in cutlass.range_constexpr(cols):
                        m[x] = new[x]
                        total[x] = total[x] * factor[x]
                    for x in cutlass.range_constexpr(self.latent_tiles * self.half):
                        y = x % self.half
                        acc[x] = acc[x] * factor[(y >> 2) * 2 + (y & 1)]
                    again, _ = self.store_p(s, m, at_p, scale_log2)
                    for x in cutlass.range_constexpr(cols):
                        sums[x] = again[x]
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
                for x in cutlass.range_constexpr(cols):
                    total[x] = total[x] + sums[x]
                if step + (2 if pair else 1) >= count:  # the queries have been read for the last time
                    if lane == 0:
                        cute.arch.mbarrier_arrive(query_empty + buffer)
                # ---- O^T += V^T P^T, my latents, all tiles of the step
                for u in cutlass.range(min(2, count - step) if pair else 1, unroll=1):
                    i = done + step + u
                    stage = i % stages
                    tile = base + stage * lay.tile_bytes + group * (LATENT // CONSUMERS // self.width * BOX)
                    cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
                    p_lo = ptx.descriptor(half_p + (u if pair else group) * lay.p_bytes)
                    if cutlass.const_expr(self.fp8):
                        self.values_fp8(acc, tile + lane * 128 + ((w ^ (lane & 7)) << 4), p_lo)
                        cute.arch.sync_warp()
                        if lane == 0:  # every ldmatrix of this warp has returned: its part of the stage is free
                            cute.arch.mbarrier_arrive(empty + stage)
                        cute.nvgpu.warpgroup.wait_group(0)
                    else:
                        self.values_bf16(acc, ptx.descriptor(tile), p_lo)
                        cute.nvgpu.warpgroup.wait_group(0)
                        if lane == 0:
                            cute.arch.mbarrier_arrive(empty + stage)
            cute.arch.griddepcontrol_wait()  # the merge of the layer before may still read the workspace
            self.store_partial(
                acc, m, total, partial, stats, base, warp, group, lane, block, cta + request, slots, barrier, threads
            )
            done += count
            at += count
            segment += 1

    def scores(self, k_lo, q_lo):
        """S^T of a tile, 64 keys x n columns, as `half` Float32."""
        n, fp8 = self.key.n, self.fp8
        boxes = [(b * BOX, b * n * 128, 4, ptx.SW128) for b in range(self.boxes)]
        if fp8:
            boxes.append((self.boxes * BOX, self.boxes * n * 128, 2, ptx.SW64))
        chains = len(boxes) if fp8 else 1  # a bf16 wgmma adds in float32: one chain is exact enough
        depth = CHAINS[n] if fp8 else 1
        flying, result = [], None

        def land(result):
            d = ptx.settled(flying.pop(0))
            return d if result is None else [x + y for x, y in zip(result, d, strict=True)]

        for b, (k_at, q_at, steps, layout) in enumerate(boxes):
            if b < chains:
                if len(flying) == depth:
                    cute.nvgpu.warpgroup.wait_group(depth - 1)
                    result = land(result)
                flying.append([Float32(0.0)] * self.half)
                cute.nvgpu.warpgroup.fence()
            for k in range(steps):
                a, q = k_lo + (k_at + 32 * k) // 16, q_lo + (q_at + 32 * k) // 16
                follows = k > 0 or b >= chains
                flying[-1] = ptx.wgmma_ss("e4m3" if fp8 else "bf16", flying[-1], a, layout, q, layout, follows)
            if b >= chains - 1 or fp8:
                cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(0)
        while flying:
            result = land(result)
        return result

    @cute.jit
    def scores_by_box(self, s, k_lo, q_lo):
        """The same for FP8 into `s`, with one chain at a time."""
        n = self.key.n
        for x in cutlass.range_constexpr(self.half):
            s[x] = Float32(0.0)
        for b in cutlass.range(self.boxes, unroll=1):
            self.add_box(s, k_lo + b * (BOX // 16), q_lo + b * (n * 128 // 16), 4, ptx.SW128)
        self.add_box(s, k_lo + self.boxes * BOX // 16, q_lo + self.boxes * n * 128 // 16, 2, ptx.SW64)

    def add_box(self, s, k_lo, q_lo, steps, layout):
        d = [Float32(0.0)] * self.half
        cute.nvgpu.warpgroup.fence()
        for k in range(steps):
            d = ptx.wgmma_ss("e4m3", d, k_lo + 2 * k, layout, q_lo + 2 * k, layout, k > 0)
        cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(0)
        d = ptx.settled(d)
        for x in range(self.half):
            s[x] = s[x] + d[x]

    @cute.jit
    def mask(self, s, w, r, c, block, valid):
        """-inf for the keys that a column does not see: those past the length and, per token, the causal ones."""
        key = self.key
        for g in cutlass.range_constexpr(key.n // 8):
            for b in cutlass.range_constexpr(2):
                limit = valid
                if cutlass.const_expr(key.q > 1):
                    column = 8 * g + 2 * c + b
                    if cutlass.const_expr(key.blocks > 1):
                        column = column + block * key.block
                    limit = valid - (key.q - 1) + column // key.heads
                for h in cutlass.range_constexpr(2):
                    x = 4 * g + 2 * h + b
                    s[x] = ptx.keep_below(s[x], w * 16 + r + 8 * h, limit)

    def clear_values(self, tile, group, tid, valid):
        """Zeros into the rows of V past the length: P is 0 there, but 0 times the NaN that may lie there is NaN.

        In a pair the warpgroup of the tile clears all latents, else each warpgroup those that it reads.
        """
        if self.key.pair:
            at, boxes = tile, LATENT // self.width // 2
        else:
            at, boxes = tile + group * (LATENT // CONSUMERS // self.width * BOX), LATENT // CONSUMERS // self.width // 2
        self.clear_rows(at, tid, valid, boxes)

    @cute.jit
    def clear_rows(self, at, tid, valid, boxes: cutlass.Constexpr):
        row = (tid & 127) >> 1
        if row >= valid:
            mine = at + (tid & 1) * (boxes * BOX) + row * 128
            for x in cutlass.range_constexpr(boxes * 8):
                ptx.sts_zero16(mine, offset=x // 8 * BOX + x % 8 * 16)

    @cute.jit
    def share_peaks(self, s, lane, to):
        """The largest score of each column among this warp's 16 keys to shared memory."""
        groups = self.key.n // 8
        peak = [ptx.fmax(s[4 * g + b], s[4 * g + 2 + b]) for g in range(groups) for b in range(2)]
        for distance in (4, 8, 16):
            peak = [ptx.fmax(x, cute.arch.shuffle_sync_bfly(x, distance)) for x in peak]
        if lane < 4:
            for g in cutlass.range_constexpr(groups):
                ptx.sts_v2f(to, peak[2 * g], peak[2 * g + 1], offset=32 * g)

    def new_maxima(self, m, peaks, scale_log2):
        """Per column of this thread: the larger of m and the warps' maxima, in log2 units."""
        new = [m[x] for x in range(self.cols)]
        for warp in range(8 if self.key.pair else 4):
            for g in range(self.key.n // 8):
                a, b = ptx.lds_v2f(peaks, offset=(warp * self.key.n + 8 * g) * 4)
                new[2 * g] = ptx.fmax(new[2 * g], a * scale_log2)
                new[2 * g + 1] = ptx.fmax(new[2 * g + 1], b * scale_log2)
        return new

    def p_store_addresses(self, p, w, lane):
        """Where this lane writes P, of a tile at p. Rows of a P tile are columns; a row has the 64 keys, in swizzled 16-byte chunks.

        16-bit P: natural key order, by stmatrix: lane 16x + 8h + i gives the address of column 8x + i, keys 16w + 8h.
        e4m3: the keys r and r + 8 of a warp's 16 are neighbours, so that the lane that holds both stores one 16-bit
        pair; the A operand is put together in the same order. Columns 8g + 2c + b: one address for each b.
        """
        if self.e4m3:
            c, r = lane & 3, lane >> 2
            return [p + (2 * c + b) * 64 + ((w ^ c) << 4) + r * 2 for b in range(2)]
        i, h, x = lane & 7, (lane >> 3) & 1, lane >> 4
        return [p + (8 * x + i) * 128 + (((2 * w + h) ^ i) << 4)]

    def store_p(self, s, m, at, scale_log2):
        """P = 2^(s scale - m + bias) of this thread's keys and columns to shared memory.

        Gives their sum a column, and the largest exponent: above P_LIMIT, P is to be done again with a larger m.
        """
        kind, groups, bias = self.key.p, self.key.n // 8, P_BIAS[self.key.p]
        regs, sums, worst = [], [], None
        for g in range(groups):
            pairs = []  # per column: of keys r and r + 8
            for b in range(2):
                low = m[2 * g + b] - bias if bias else m[2 * g + b]
                x0, x1 = (s[4 * g + 2 * h + b] * scale_log2 - low for h in range(2))
                p0, p1 = ptx.ex2(x0), ptx.ex2(x1)
                peak = ptx.fmax(x0, x1)
                worst = peak if worst is None else ptx.fmax(worst, peak)
                sums.append(p0 + p1)
                pairs.append((p0, p1))
            if self.e4m3:
                for b, pair in enumerate(pairs):
                    if kind == "e4m3x2":
                        rest = [x - ptx.e4m3_near(x) for x in pair]
                        pair = [ptx.e4m3_near(x) for x in pair]
                        ptx.sts_b16(at[b], ptx.cvt_e4m3x2(rest[1], rest[0]), offset=g * 512 + self.key.n * 64)
                    ptx.sts_b16(at[b], ptx.cvt_e4m3x2(pair[1], pair[0]), offset=g * 512)
            else:
                convert = ptx.cvt_f16x2 if kind == "f16" else ptx.cvt_bf16x2
                regs.append([convert(pairs[1][h], pairs[0][h]) for h in range(2)])
        for g in range(0, len(regs), 2):
            ptx.stsm_t(at[0], [x for two in regs[g : g + 2] for x in two], offset=g * 1024)
        return sums, worst

    def values_fp8(self, acc, va, p_lo):
        """acc += V^T P^T over a tile; va: the address of this lane's row in ldmatrix. Leaves one group in flight.

        A fragment may be overwritten once its wgmma is through: with one group in flight there are two of them.
        """
        half, f16 = self.half, not self.e4m3
        other = va ^ 64  # the second 64 latents of a box
        for t in range(self.latent_tiles):
            d = [acc[half * t + x] for x in range(half)]
            for k32 in range(2):
                at = (other if t % 2 else va) + (t // 2 * BOX + k32 * 32 * 128)
                v = ptx.ldsm_x4_t(at)
                if f16:
                    a = [list(ptx.cvt_e4m3x4_f16(ptx.prmt(x, x, 0x3120))) for x in v]
                    steps = [(a[2 * g] + a[2 * g + 1], k32 * 64 + g * 32) for g in range(2)]
                else:
                    a = [ptx.prmt(v[j], v[j + 1], sel) for j in (0, 2) for sel in (0x6240, 0x7351)]
                    steps = [(a, k32 * 32 + x * self.key.n * 64) for x in range(self.parts)]
                if t or k32:
                    cute.nvgpu.warpgroup.wait_group(1)
                cute.nvgpu.warpgroup.fence()
                for fragment, p_at in steps:
                    d = ptx.wgmma_rs("f16" if f16 else "e4m3", d, fragment, p_lo + p_at // 16, ptx.SW128 if f16 else ptx.SW64)
                cute.nvgpu.warpgroup.commit_group()
            for x in range(half):
                acc[half * t + x] = d[x]

    def values_bf16(self, acc, v_lo, p_lo):
        """acc += V^T P^T over a tile, V^T read transposed from shared memory. Leaves everything in flight."""
        half = self.half
        cute.nvgpu.warpgroup.fence()
        for t in range(self.latent_tiles):
            d = [acc[half * t + x] for x in range(half)]
            for k16 in range(4):
                v, p = v_lo + (t * BOX + k16 * 16 * 128) // 16, p_lo + k16 * 32 // 16
                d = ptx.wgmma_ss("bf16", d, v, ptx.SW128, p, ptx.SW128, True, a_mn_major=True)
            for x in range(half):
                acc[half * t + x] = d[x]
        cute.nvgpu.warpgroup.commit_group()

    # ------------------------------------------------------------------------------------------------ results

    @cute.jit
    def store_partial(
        self, acc, m, total, partial, stats, base, warp, group, lane, block, slot, slots, barrier: cutlass.Constexpr,
        threads: cutlass.Constexpr,
    ):  # fmt: skip
        """O and (m, l) of a request to its slot."""
        key = self.key
        r, c = lane >> 2, lane & 3
        sums = base + self.smem.sums + c * 8
        here = [total[x] for x in range(self.cols)]
        for distance in (4, 8, 16):
            here = [x + cute.arch.shuffle_sync_bfly(x, distance) for x in here]
        if lane < 4:
            for g in cutlass.range_constexpr(key.n // 8):
                ptx.sts_v2f(sums + warp * (key.n * 4), here[2 * g], here[2 * g + 1], offset=32 * g)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
        limit = min(key.block, key.columns - block * key.block)
        row = (Int64(block * slots + slot) * key.block + Int64(2 * c)) * (LATENT * 4)
        first = group * (LATENT // CONSUMERS) + (warp & 3) * 16
        to = partial + row + Int64((first + (2 * r if self.fp8 else r)) * 4)
        for g in cutlass.range_constexpr(key.n // 8):
            for b in cutlass.range_constexpr(2):
                if 8 * g + 2 * c + b < limit:
                    for t in cutlass.range_constexpr(self.latent_tiles):
                        x = self.half * t + 4 * g + b
                        offset = ((8 * g + b) * LATENT + t * TILE) * 4
                        if cutlass.const_expr(self.fp8):
                            ptx.stg_v2f(to, acc[x], acc[x + 2], offset=offset)
                        else:
                            ptx.stg_f32(to, acc[x], offset=offset)
                            ptx.stg_f32(to, acc[x + 2], offset=offset + 32)
        if warp == 0:
            if lane < 4:
                to = stats + (Int64(block * key.block + 2 * c) * Int64(slots) + Int64(slot)) * 8
                bias = P_BIAS[key.p]
                for g in cutlass.range_constexpr(key.n // 8):
                    for b in cutlass.range_constexpr(2):
                        sum_ = Float32(0.0)
                        for x in cutlass.range_constexpr(8 if key.pair else 4):
                            sum_ = sum_ + ptx.lds_f32(sums, offset=(x * key.n + 8 * g + b) * 4)
                        if 8 * g + 2 * c + b < limit:
                            ptx.stg_v2f(to + Int64((8 * g + b) * slots) * 8, m[2 * g + b] - bias, sum_)


def trace(key: HopperKey, target: str):
    """The function to compile and stand-ins for its arguments."""
    return Core(key), (
        *(Int64(1) for _ in range(4)),
        *(Int32(1) for _ in range(4)),
        Float32(1.0),
        make_fake_stream(),
    )
