"""The `hopper` attention core on the device: MLA decode over a paged latent cache on sm_90a, FP8 or BF16.

Products are swapped: S^T = K Q^T has keys as M and query columns as N, O^T += V^T P^T has latents as M. So few heads
cost N = 8..48 and not a padded M of 64, and both products read the cache as it lies in shared memory.

A CTA has a column block and a run of 64-key tiles (kernels/cut.py). Two or four consumer warpgroups compute; of the two
warps after them one loads tiles, the other queries. A step is two tiles (FP8) or one (BF16):
* S: a warpgroup does a tile, from 32 columns on half of the columns of a tile; BF16 with few columns: all of it, too;
* softmax: reference m and sum l a column, in registers, in log2 units. Scores become P with the m of the steps before;
  only where one is more than 2^8 above it, all warps agree on a new m first. P goes to shared memory (two buffers in
  turn, so that one barrier a step is enough);
* O: warpgroup g of G accumulates latents 512g/G..512(g+1)/G-1 over all tiles of the step. Nothing is exchanged at the
  end.

Rounding: S in float32 (FP8: one accumulation chain a 128-element box, added in float32: a chain that runs over all of
them loses 3 bits); P to f16, bf16 or, times 2^4, e4m3 (e4m3x2: to the sum of two, 8 bits, for a second wgmma and none
of the conversions of f16); l sums the unrounded P; O in float32.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, GridConstant, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from k3dsl.nvidia.core.hopper import ENTRY, LATENT, TILE, HopperKey
from k3dsl.nvidia.kernels import cut, ptx
from k3dsl.nvidia.kernels.hopper_tile import BOX, P_LIMIT, Tile, fill, lane_of, put

#: m of a column that has seen no key: below every score, and its square of a difference is still finite.
UNSEEN = -1.0e30

#: Registers a thread of the consumers and of the loaders with four consumer warpgroups, where the even share is 96.
CONSUMER_REGISTERS, LOADER_REGISTERS = 112, 32


class Core(Tile):
    """One build. `key`: HopperKey."""

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
        launch = {
            "grid": (self.key.blocks, 1, 1),
            "block": (self.key.threads, 1, 1),
            "smem": self.smem.total,
            "stream": stream,
            "use_pdl": True,
            "min_blocks_per_mp": 1,
        }
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
                cute.arch.mbarrier_init(empty + i, 4 * self.key.groups)
            for i in cutlass.range_constexpr(lay.queries):
                cute.arch.mbarrier_init(query_full + i, 1)
                cute.arch.mbarrier_init(query_empty + i, 4 * self.key.groups)
            cute.arch.mbarrier_init_fence()
        work = cut.split(loaded, requests, splits)
        if warp == 0:
            cut.store(work, base + lay.split, lane)
        cute.arch.sync_threads()
        group = warp // 4
        if group == self.key.groups:
            if cutlass.const_expr(self.key.groups > 2):
                cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp == 4 * self.key.groups:
                self.load_tiles(maps, table, table_stride, full, empty, base, lane, work, cta)
            if warp == 4 * self.key.groups + 1:
                for m in maps:  # here, where nothing waits for it: in front of the barrier it delays every role
                    ptx.prefetch_tmap(m)
                self.load_queries(maps, query_full, query_empty, base, lane, work, block, cta)
        else:
            if cutlass.const_expr(self.key.groups > 2):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                partial, stats, full, empty, query_full, query_empty, base, tid, warp, group, lane, work, cta, slots,
                scale_log2,
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ loaders

    @cute.jit
    def load_tiles(self, maps, table, table_stride, full, empty, base, lane, work, cta):
        """The tiles of the CTA's run through the block table, `stages` ahead of the consumers.

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

    @cute.jit
    def load_tile(self, maps, dst, j, number, bar):
        row = j % (self.key.page // TILE) * TILE if self.key.page > TILE else 0
        for b in cutlass.range(self.boxes, unroll=1 if self.key.page < TILE else self.boxes):
            for x, n in enumerate(number):
                ptx.tma_3d(dst + (b * BOX + x * 32 * 128), maps[0], b * self.width, row, n, bar)
        if self.fp8:
            for x, n in enumerate(number):
                ptx.tma_3d(dst + (self.boxes * BOX + x * 32 * 64), maps[1], self.boxes * self.width, row, n, bar)

    @cute.jit
    def load_queries(self, maps, query_full, query_empty, base, lane, work, block, cta):
        """The query columns of each request of the run. The kernel before writes them.

        The boxes may reach into the columns of another block or request: their results are dropped.
        """
        key, lay = self.key, self.smem
        cute.arch.griddepcontrol_wait()  # also where there is no work: the next kernel relies on every CTA's wait
        at, end = cut.run(work, cta)
        i = Int32(0)
        while at < end:
            request, _length, _first, last = cut.locate(work, at)
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
        self, partial, stats, full, empty, query_full, query_empty, base, tid, warp, group, lane, work, cta, slots,
        scale_log2,
    ):  # fmt: skip
        """The consumers: attend, request by request, and write a partial for each."""
        key, lay, alone = self.key, self.smem, self.key.alone
        stages, cols = lay.stages, self.cols
        w, c = warp & 3, lane & 3
        start, end = cut.run(work, cta)
        tile_of_step, column_half = self.share_of(group)
        copy = group if alone else tile_of_step  # of P
        p_row = 64 if self.e4m3 else 128
        p_mine = self.p_store_addresses(copy * lay.p_bytes + column_half * (self.own * p_row), w, lane)
        barrier = 1 + group if alone else 1
        threads = 128 if alone else 128 * key.groups
        acc = cute.make_rmem_tensor(self.latent_tiles * self.half, Float32)
        s = cute.make_rmem_tensor(self.own // 2, Float32)
        m = cute.make_rmem_tensor(cols, Float32)
        total = cute.make_rmem_tensor(cols, Float32)
        sums = cute.make_rmem_tensor(cols, Float32)
        done = Int32(0)  # tiles of the CTA before this request
        segment = Int32(0)
        while start + done < end:
            request, length, first, last = cut.locate(cut.stored(base + lay.split, lane), start + done)
            count = min(end, last) - (start + done)
            keys = length - (start + done - first) * TILE  # from the first tile here to the end of the request
            fill(acc, 0.0)
            fill(m, UNSEEN)
            fill(total, 0.0)
            buffer = segment % lay.queries
            q_lo = ptx.descriptor(base + lay.query + buffer * lay.query_bytes)
            q_lo, q_tail = self.own_columns(q_lo, column_half)
            cute.arch.mbarrier_wait(query_full + buffer, (segment // lay.queries) & 1)
            for step in cutlass.range(0, count, key.step, unroll=1):
                # ---- S^T of my tile
                fill(s, -math.inf)
                mine = step + tile_of_step
                if mine < count:
                    i = done + mine
                    tile = base + (i % stages) * lay.tile_bytes
                    cute.arch.mbarrier_wait(full + i % stages, (i // stages) & 1)
                    if cutlass.const_expr(self.fp8 and key.halves > 1):
                        self.scores_by_box(s, ptx.descriptor(tile), q_lo, q_tail)
                    else:
                        put(s, self.scores(ptx.descriptor(tile), q_lo, q_tail))
                    valid = keys - mine * TILE  # keys of the tile that are there, if below 64
                    if valid < TILE + key.q - 1:
                        self.mask(s, valid, request)
                    if valid < TILE:
                        if cutlass.const_expr(key.groups > key.step):  # another warpgroup may still read the keys
                            cute.arch.barrier(barrier_id=3 + tile_of_step, number_of_threads=256)
                        self.clear_values(tile, group // key.step, valid)
                # ---- P^T of my tile by the m that we have; it holds if no score is far above m
                half_p = base + lay.p + (step // key.step & 1) * 2 * lay.p_bytes
                at_p = [half_p + x for x in p_mine]
                here, worst = self.store_p(s, m, at_p, scale_log2)
                put(sums, here)
                cute.arch.fence_proxy("async.shared", space="cta")
                if ptx.barrier_any(worst > P_LIMIT, barrier, threads):
                    # ---- a new m: the maximum of all tiles of the step; then P again
                    row, column_at = self.exchange_place()
                    self.share_peaks(s, base + lay.peaks + row * key.n * 4 + column_at)
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
                    peaks = base + lay.peaks + (row // 4 * 4 if alone else 0) * key.n * 4 + column_at
                    self.raise_to_peaks(sums, m, peaks, scale_log2)
                    factor = [ptx.ex2(m[x] - sums[x]) for x in range(cols)]
                    put(total, [total[x] * factor[x] for x in range(cols)])
                    put(m, [sums[x] for x in range(cols)])
                    if cutlass.const_expr(key.halves > 1):
                        self.share_factors(factor, base + lay.factors + column_at, row)
                    else:
                        self.rescale(acc, factor)
                    again, _ = self.store_p(s, m, at_p, scale_log2)
                    put(sums, again)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
                    if cutlass.const_expr(key.halves > 1):
                        self.rescale(acc, self.shared_factors(base + lay.factors + c * 8))
                put(total, [total[x] + sums[x] for x in range(cols)])
                if (step + key.step >= count) & (lane == 0):  # the queries have been read for the last time
                    cute.arch.mbarrier_arrive(query_empty + buffer)
                # ---- O^T += V^T P^T, my latents, all tiles of the step
                for u in cutlass.range(min(2, count - step) if key.step == 2 else 1, unroll=1):
                    i = done + step + u
                    stage = i % stages
                    tile = base + stage * lay.tile_bytes + group * (self.latents // self.width * BOX)
                    cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
                    p_lo = ptx.descriptor(half_p + (group if alone else u) * lay.p_bytes)
                    if cutlass.const_expr(self.fp8):
                        self.values_fp8(acc, tile + lane * 128 + ((w ^ (lane & 7)) << 4), p_lo, slots >> 30)
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
            self.store_partial(acc, m, total, partial, stats, base, lane, request, slots, barrier, threads)
            done += count
            segment += 1

    # ------------------------------------------------------------------------------------------------ results

    @cute.jit
    def store_partial(
        self, acc, m, total, partial, stats, base, lane, request, slots, barrier: cutlass.Constexpr,
        threads: cutlass.Constexpr,
    ):  # fmt: skip
        """O and (m, l) of a request to its slot."""
        key = self.key
        w, r, c = lane_of(ptx.thread_x())
        row_mine, column_at = self.exchange_place()
        group = ptx.thread_x() >> 7
        sums = base + self.smem.sums + column_at
        here = [total[x] for x in range(self.cols)]
        for distance in (4, 8, 16):
            here = [x + cute.arch.shuffle_sync_bfly(x, distance) for x in here]
        if lane < 4:
            for g in cutlass.range_constexpr(self.own // 8):
                ptx.sts_v2f(sums + row_mine * (key.n * 4), here[2 * g], here[2 * g + 1], offset=32 * g)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
        block, slot = ptx.block_x(), ptx.block_y() + request
        limit = min(key.block, key.columns - block * key.block)
        row = (Int64(block * slots + slot) * key.block + Int64(2 * c)) * (LATENT * 4)
        first = group * self.latents + w * 16
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
        if (row_mine == 0) & (lane < 4):
            column = column_at // 4
            to = stats + (Int64(block * key.block + column) * Int64(slots) + Int64(slot)) * 8
            for g in cutlass.range_constexpr(self.own // 8):
                for b in cutlass.range_constexpr(2):
                    sum_ = Float32(0.0)
                    for x in cutlass.range_constexpr(4 * key.step):
                        sum_ = sum_ + ptx.lds_f32(sums, offset=(x * key.n + 8 * g + b) * 4)
                    if column + 8 * g + b < limit:
                        ptx.stg_v2f(to + Int64((8 * g + b) * slots) * 8, m[2 * g + b], sum_)


def trace(key: HopperKey, target: str):
    """The function to compile and stand-ins for its arguments."""
    return Core(key), (
        *(Int64(1) for _ in range(4)),
        *(Int32(1) for _ in range(4)),
        Float32(1.0),
        make_fake_stream(),
    )
