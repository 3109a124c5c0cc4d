"""The consumers of the `hopper` core where S and O have warpgroups of their own. See hopper.py.

With many columns the work on a tile takes about as long as a tile takes to arrive, so none of it may wait for the rest:
two warpgroups work out S and P, each of half of the columns, two accumulate O, each half of the latents, up to
PARTS_OF_P tiles behind. What goes from the first to the second: P, and per half of the columns a flag that m has risen
at this tile, with the factors by which O is to be multiplied first.
"""

import cutlass
from cutlass import Float32, Int32, cute

from k3dsl.nvidia.core.hopper import PARTS_OF_P, TILE
from k3dsl.nvidia.kernels import cut, ptx
from k3dsl.nvidia.kernels.hopper_tile import BOX, P_LIMIT, UNSEEN, Tile, fill, put


class Apart(Tile):
    """A warpgroup does one of the products."""

    @cute.jit
    def score(
        self, stats, full, empty, query_full, query_empty, p_full, p_empty, base, group, lane, work, cta, slots,
        scale_log2,
    ):  # fmt: skip
        """Warpgroups 0 and 1: S and P of half of the columns, tile by tile, and (m, l) of each request."""
        key, lay, cols = self.key, self.smem, self.cols
        stages = lay.stages
        start, end = cut.run(work, cta)
        p_mine = self.p_store_addresses(base + lay.p + group * (self.own * self.p_row), ptx.thread_x() >> 5 & 3, lane)
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
            fill(m, UNSEEN)
            fill(total, 0.0)
            buffer = segment % lay.queries
            q_lo = ptx.descriptor(base + lay.query + buffer * lay.query_bytes)
            q_lo, q_tail = self.own_columns(q_lo, group)
            cute.arch.mbarrier_wait(query_full + buffer, (segment // lay.queries) & 1)
            for step in cutlass.range(0, count, 1, unroll=1):
                i = done + step
                stage, part = i % stages, i % PARTS_OF_P
                tile = base + stage * lay.tile_bytes
                cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
                put(s, self.scores(ptx.descriptor(tile), q_lo, q_tail))
                valid = keys - step * TILE  # keys of the tile that are there, if below 64
                if valid < TILE + key.q - 1:
                    self.mask(s, valid, request)
                if valid < TILE:
                    cute.arch.barrier(barrier_id=3, number_of_threads=256)  # the other half may still read the keys
                    self.clear_values(tile, group, valid)
                if i >= PARTS_OF_P:
                    cute.arch.mbarrier_wait(p_empty + part, (i // PARTS_OF_P - 1) & 1)
                at_p = [x + part * lay.p_bytes for x in p_mine]
                here, worst = self.store_p(s, m, at_p, scale_log2)
                put(sums, here)
                risen = Int32(0)
                if ptx.barrier_any(worst > P_LIMIT, 1 + group, 128):
                    row, column_at = self.exchange_place()
                    self.share_peaks(s, base + lay.peaks + row * key.n * 4 + column_at)
                    cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                    self.raise_to_peaks(sums, m, base + lay.peaks + column_at, scale_log2)
                    factor = [ptx.ex2(m[x] - sums[x]) for x in range(cols)]
                    put(total, [total[x] * factor[x] for x in range(cols)])
                    put(m, [sums[x] for x in range(cols)])
                    self.share_factors(factor, base + lay.factors + part * (key.n * 4 + 8) + column_at, row)
                    again, _ = self.store_p(s, m, at_p, scale_log2)
                    put(sums, again)
                    risen = Int32(1)
                put(total, [total[x] + sums[x] for x in range(cols)])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    # every warp of a half says the same
                    ptx.sts_b32(base + lay.factors + part * (key.n * 4 + 8) + key.n * 4 + group * 4, risen)
                    cute.arch.mbarrier_arrive(p_full + part)
                    cute.arch.mbarrier_arrive(empty + stage)
                    if step + 1 >= count:  # the queries have been read for the last time
                        cute.arch.mbarrier_arrive(query_empty + buffer)
            cute.arch.griddepcontrol_wait()  # the merge of the layer before may still read the workspace
            self.store_stats(m, total, stats, base, lane, request, slots, 1 + group, 128)
            done += count
            segment += 1

    @cute.jit
    def value(self, partial, full, empty, p_full, p_empty, base, warp, group, lane, work, cta, slots):
        """Warpgroups 2 and 3: O of half of the latents, tile by tile."""
        key, lay = self.key, self.smem
        stages = lay.stages
        w, c = warp & 3, lane & 3
        start, end = cut.run(work, cta)
        mine = base + group * (self.latents // self.width * BOX) + lane * 128 + ((w ^ (lane & 7)) << 4)
        acc = cute.make_rmem_tensor(self.latent_tiles * self.half, Float32)
        done = Int32(0)
        while start + done < end:
            request, _length, _first, last = cut.locate(cut.stored(base + lay.split, lane), start + done)
            count = min(end, last) - (start + done)
            fill(acc, 0.0)
            for step in cutlass.range(0, count, 1, unroll=1):
                i = done + step
                stage, part = i % stages, i % PARTS_OF_P
                cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
                cute.arch.mbarrier_wait(p_full + part, (i // PARTS_OF_P) & 1)
                factors = base + lay.factors + part * (key.n * 4 + 8)
                low, high = (ptx.lds_b32(factors, offset=key.n * 4 + 4 * x) for x in range(2))
                if low != 0:
                    self.rescale(acc, self.shared_factors(factors + c * 8, 0, 2))
                if high != 0:
                    self.rescale(acc, self.shared_factors(factors + c * 8, 1, 2), first=self.cols)
                p_lo = ptx.descriptor(base + lay.p + part * lay.p_bytes)
                self.values_fp8(acc, mine + stage * lay.tile_bytes, p_lo)
                cute.arch.sync_warp()
                if lane == 0:  # every ldmatrix of this warp has returned: its part of the stage is free
                    cute.arch.mbarrier_arrive(empty + stage)
                cute.nvgpu.warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(p_empty + part)
            cute.arch.griddepcontrol_wait()
            self.store_values(acc, partial, group, request, slots)
            done += count
