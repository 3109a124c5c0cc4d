"""The consumers of the `hopper` core where two warpgroups work out S, P and O in turn. See hopper.py.

A step is two tiles with FP8, one for each warpgroup's S, and one tile with BF16. Warpgroup g then accumulates latents
256 g.. of O over the tiles of the step. One barrier a step, at which all vote whether m holds: P lies in two places in
turn, so that a step may write while the slower warpgroup still reads the one before.
"""

import math

import cutlass
from cutlass import Float32, Int32, cute

from k3dsl.nvidia.core.hopper import TILE, UNSEEN
from k3dsl.nvidia.kernels import cut, ptx
from k3dsl.nvidia.kernels.hopper_tile import BOX, P_LIMIT, Tile, fill, put


class Together(Tile):
    """Both products in the same warpgroups."""

    @cute.jit
    def consume(
        self, partial, stats, full, empty, query_full, query_empty, base, warp, group, lane, work, cta, slots,
        scale_log2,
    ):  # fmt: skip
        """Two warpgroups: attend, request by request, and write a partial for each."""
        key, lay, alone = self.key, self.smem, self.key.alone
        stages, cols = lay.stages, self.cols
        w, c = warp & 3, lane & 3
        start, end = cut.run(work, cta)
        tile_of_step, column_half = self.share_of(group)
        copy = group if alone else tile_of_step  # of P
        p_mine = self.p_store_addresses(copy * lay.p_bytes + column_half * (self.own * self.p_row), w, lane)
        barrier = 1 + group if alone else 1
        threads = 128 if alone else 256
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
                    put(s, self.scores(ptx.descriptor(tile), q_lo, q_tail))
                    valid = keys - mine * TILE  # keys of the tile that are there, if below 64
                    if valid < TILE + key.q - 1:
                        self.mask(s, valid, request)
                    if valid < TILE:
                        if cutlass.const_expr(key.step == 1):  # the other warpgroup may still read the keys
                            cute.arch.barrier(barrier_id=3, number_of_threads=256)
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
                        self.share_figures(factor, base + lay.factors + column_at, row)
                    else:
                        self.rescale(acc, factor)
                    again, _ = self.store_p(s, m, at_p, scale_log2)
                    put(sums, again)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
                    if cutlass.const_expr(key.halves > 1):
                        self.rescale(acc, self.shared_figures(base + lay.factors + c * 8))
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
            self.share_sums(total, base, lane, barrier, threads)
            self.store_stats(m, stats, base, lane, request, slots)
            if cutlass.const_expr(self.fp8):
                self.rescale(acc, [ptx.rcp_or_zero(x) for x in self.shared_sums(base)])
            self.store_values(acc, partial, group, request, slots)
            done += count
            segment += 1
