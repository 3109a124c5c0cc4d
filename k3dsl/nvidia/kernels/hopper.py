"""The `hopper` attention core on the device: MLA decode over a paged latent cache on sm_90a, FP8 or BF16.

Products are swapped: S^T = K Q^T has keys as M and query columns as N, O^T += V^T P^T has latents as M. So few heads
cost N = 8..48 and not a padded M of 64, and both products read the cache as it lies in shared memory.

A CTA has a column block and a run of 64-key tiles (kernels/cut.py). Of the two warps after the consumers one loads
tiles, the other queries. Two consumer warpgroups do it all in turn (hopper_together.py), or with FP8 and more than 24
columns two do S and P and two do O, up to four tiles behind (hopper_apart.py):
* S: a warpgroup does a tile; with BF16 and more than 24 columns half of the columns of a tile;
* softmax: reference m and sum l a column, in log2 units. Scores become P with the m of the tiles before; only where one
  is more than 8 above it, the warps that share a tile agree on a new m first. P goes to shared memory, to several
  places in turn, so that none waits for O;
* O: of the warpgroups that do it one accumulates the first 256 latents, the other the rest. Nothing is exchanged at
  the end.

Rounding: S in float32 (FP8: one accumulation chain a 128-element box, added in float32: a chain that runs over all of
them loses 3 bits); P to f16, bf16 or, times 2^4, e4m3; l sums the unrounded P; O in float32; partials of FP8 to f16.

What bounds it: memory up to 24 columns; beyond, the card's power in long calls and the rate of shared memory; with few
tiles a CTA the latency of one tile, the partials and the merge (docs/hopper.md).
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, GridConstant, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from k3dsl.nvidia.core.hopper import ENTRY, PARTS_OF_P, TILE, HopperKey
from k3dsl.nvidia.kernels import cut, ptx
from k3dsl.nvidia.kernels.hopper_apart import Apart
from k3dsl.nvidia.kernels.hopper_tile import BOX
from k3dsl.nvidia.kernels.hopper_together import Together

#: Registers a thread of each role, if S and O are apart. The even share is 96; two warpgroups score, two accumulate.
SCORE_REGISTERS, VALUE_REGISTERS, LOADER_REGISTERS = 88, 136, 32


class Core(Together, Apart):
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
        if cutlass.const_expr(self.key.apart):
            p_full = smem_.allocate_array(Int64, PARTS_OF_P)
            p_empty = smem_.allocate_array(Int64, PARTS_OF_P)
            l_full = smem_.allocate_array(Int64, 1)
            l_empty = smem_.allocate_array(Int64, 1)
        if tid == 0:
            for i in cutlass.range_constexpr(lay.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, 4 * self.key.readers)
            for i in cutlass.range_constexpr(lay.queries):
                cute.arch.mbarrier_init(query_full + i, 1)
                cute.arch.mbarrier_init(query_empty + i, 8)
            if cutlass.const_expr(self.key.apart):
                for i in cutlass.range_constexpr(PARTS_OF_P):
                    cute.arch.mbarrier_init(p_full + i, 4)
                    cute.arch.mbarrier_init(p_empty + i, 8)
                cute.arch.mbarrier_init(l_full, 1)
                cute.arch.mbarrier_init(l_empty, 8)
            cute.arch.mbarrier_init_fence()
        work = cut.split(loaded, requests, splits)
        if warp == 0:
            cut.store(work, base + lay.split, lane)
        cute.arch.sync_threads()
        group = warp // 4
        if group == self.key.groups:
            if cutlass.const_expr(self.key.apart):
                cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp == 4 * self.key.groups:
                self.load_tiles(maps, table, table_stride, full, empty, base, lane, work, cta)
            if warp == 4 * self.key.groups + 1:
                for m in maps:  # here, where nothing waits for it: in front of the barrier it delays every role
                    ptx.prefetch_tmap(m)
                self.load_queries(maps, query_full, query_empty, base, lane, work, block, cta)
        elif cutlass.const_expr(not self.key.apart):
            self.consume(
                partial, stats, full, empty, query_full, query_empty, base, warp, group, lane, work, cta, slots,
                scale_log2,
            )  # fmt: skip
        elif group < 2:
            cute.arch.setmaxregister_decrease(SCORE_REGISTERS)
            self.score(
                stats, full, empty, query_full, query_empty, p_full, p_empty, l_full, l_empty, base, group, lane, work,
                cta, slots, scale_log2,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(VALUE_REGISTERS)
            self.value(
                partial, full, empty, p_full, p_empty, l_full, l_empty, base, warp, group - 2, lane, work, cta, slots
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


def trace(key: HopperKey, target: str):
    """The function to compile and stand-ins for its arguments."""
    return Core(key), (
        *(Int64(1) for _ in range(4)),
        *(Int32(1) for _ in range(4)),
        Float32(1.0),
        make_fake_stream(),
    )
