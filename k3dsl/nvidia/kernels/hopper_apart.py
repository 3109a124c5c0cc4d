"""The consumers of the `hopper` core where S and O have warpgroups of their own. See hopper.py.

With many columns the work on a tile takes about as long as a tile takes to arrive, so none of it may wait for the rest:
two warpgroups work out S and P of the tiles in turn, two accumulate O, each half of the latents, up to PARTS_OF_P tiles
behind. What goes from the first to the second: P, and a flag that m has risen at this tile, with the factors by which O
is to be multiplied first.

m passes from one scoring warpgroup to the other, in shared memory, with the same flag and factors. Only the look at the
largest score stands between two tiles: the products and the exponentials of one overlap with those of the next.
"""

import cutlass
from cutlass import Float32, Int32, cute

from k3dsl.nvidia.core.hopper import PARTS_OF_P, TILE, UNSEEN
from k3dsl.nvidia.kernels import cut, ptx
from k3dsl.nvidia.kernels.hopper_tile import BOX, P_LIMIT, Tile, fill, put

#: Named barriers: OWN + g of scoring warpgroup g alone, BOTH of the two, TURN + g by which g gets m from the other.
OWN, BOTH, TURN = 1, 3, 4


class Apart(Tile):
    """A warpgroup does one of the products."""

    @property
    def flag(self):
        """Offset of the flag that m has risen, behind the factors that go with a part of P."""
        return self.key.n * 4

    @cute.jit
    def score(
        self, stats, full, empty, query_full, query_empty, p_full, p_empty, l_full, l_empty, base, group, lane, work,
        cta, slots, scale_log2,
    ):  # fmt: skip
        """Warpgroups 0 and 1: S and P of every second tile, and (m, l) of each request."""
        key, lay, cols = self.key, self.smem, self.cols
        stages = lay.stages
        start, end = cut.run(work, cta)
        p_mine = self.p_store_addresses(base + lay.p, ptx.thread_x() >> 5 & 3, lane)
        s = cute.make_rmem_tensor(self.own // 2, Float32)
        m = cute.make_rmem_tensor(cols, Float32)
        total = cute.make_rmem_tensor(cols, Float32)
        done = Int32(0)  # tiles of the CTA before this request
        segment = Int32(0)
        while start + done < end:
            request, length, first, last = cut.locate(cut.stored(base + lay.split, lane), start + done)
            count = min(end, last) - (start + done)
            keys = length - (start + done - first) * TILE  # from the first tile here to the end of the request
            fill(total, 0.0)
            buffer = segment % lay.queries
            q_lo, q_tail = self.own_columns(ptx.descriptor(base + lay.query + buffer * lay.query_bytes), 0)
            cute.arch.mbarrier_wait(query_full + buffer, (segment // lay.queries) & 1)
            for step in cutlass.range((group + done) & 1, count, 2, unroll=1):
                i = done + step
                stage, part = i % stages, i % PARTS_OF_P
                tile = base + stage * lay.tile_bytes
                cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
                self.scores_in_turn(s, ptx.descriptor(tile), q_lo, q_tail)
                valid = keys - step * TILE  # keys of the tile that are there, if below 64
                if valid < TILE + key.q - 1:
                    self.mask(s, valid, request)
                if valid < TILE:
                    cute.arch.barrier(barrier_id=OWN + group, number_of_threads=128)  # all warps have read the keys
                    self.clear_values(tile, 0, valid)
                if i >= PARTS_OF_P:
                    cute.arch.mbarrier_wait(p_empty + part, (i // PARTS_OF_P - 1) & 1)
                # ---- m, with which the other warpgroup has just done the tile before
                fill(m, UNSEEN)
                if step > 0:
                    cute.arch.barrier(barrier_id=TURN + group, number_of_threads=256)
                    self.catch_up(total, base, i - 1)
                    put(m, self.shared_figures(base + lay.m + self.exchange_place()[1]))
                risen = Int32(0)
                if ptx.barrier_any((step == 0) | (self.worst(s, m, scale_log2) > P_LIMIT), OWN + group, 128):
                    row, column_at = self.exchange_place()
                    self.share_peaks(s, base + lay.peaks + row * key.n * 4 + column_at)
                    cute.arch.barrier(barrier_id=OWN + group, number_of_threads=128)
                    self.raise_m(total, m, base, part, scale_log2)
                    risen = Int32(1)
                if ptx.thread_x() & 127 == 0:
                    ptx.sts_b32(self.factors_of(base, part), risen, offset=self.flag)
                if step + 1 < count:
                    cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=256)
                # ---- P
                here, _ = self.store_p(s, m, [x + part * lay.p_bytes for x in p_mine], scale_log2)
                put(total, [total[x] + here[x] for x in range(cols)])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(p_full + part)
                    cute.arch.mbarrier_arrive(empty + stage)
            if lane == 0:
                cute.arch.mbarrier_arrive(query_empty + buffer)
            # ---- both have their part of l; the one that did not do the last tile may have it by an older m
            cute.arch.barrier(barrier_id=BOTH, number_of_threads=256)
            if (done + count - 1 + group) & 1 != 0:
                self.catch_up(total, base, done + count - 1)
            put(m, self.shared_figures(base + lay.m + self.exchange_place()[1]))
            self.share_sums(total, base, lane, BOTH, 256)
            if ptx.thread_x() < 32:
                if segment > 0:
                    cute.arch.mbarrier_wait(l_empty, (segment - 1) & 1)
                self.publish(m, stats, l_full, base, lane, request, slots)
            done += count
            segment += 1

    @cute.jit
    def publish(self, m, stats, l_full, base, lane, request, slots):
        """(m, l) of a request for the merge, and 1 / l for the warpgroups that have O. By one warp."""
        self.share_figures(
            [ptx.rcp_or_zero(x) for x in self.shared_sums(base)], base + self.smem.inverse + self.exchange_place()[1], 0
        )
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(l_full)
        cute.arch.griddepcontrol_wait()  # the merge of the layer before may still read the workspace
        self.store_stats(m, stats, base, lane, request, slots)

    def factors_of(self, base, part):
        """Where the factors for O stand that go with a part of P."""
        return base + self.smem.factors + part * (self.key.n * 4 + 8)

    @cute.jit
    def catch_up(self, total, base, i):
        """Brings this thread's part of l to the m that tile i was done with, if that has risen there."""
        at = self.factors_of(base, i % PARTS_OF_P)
        if ptx.lds_b32(at, offset=self.flag) != 0:
            factor = self.shared_figures(at + self.exchange_place()[1])
            put(total, [total[x] * factor[x] for x in range(self.cols)])

    @cute.jit
    def raise_m(self, total, m, base, part, scale_log2):
        """m of this thread's columns to the largest scores of the tile, l with it, and what others must know of it."""
        row, column_at = self.exchange_place()
        new = cute.make_rmem_tensor(self.cols, Float32)
        peaks = base + self.smem.peaks + (row & -4) * (self.key.n * 4) + column_at
        self.raise_to_peaks(new, m, peaks, scale_log2)
        factor = [ptx.ex2(m[x] - new[x]) for x in range(self.cols)]
        put(total, [total[x] * factor[x] for x in range(self.cols)])
        put(m, [new[x] for x in range(self.cols)])
        self.share_figures(factor, self.factors_of(base, part) + column_at, row)
        self.share_figures([new[x] for x in range(self.cols)], base + self.smem.m + column_at, row)

    @cute.jit
    def value(
        self, partial, full, empty, p_full, p_empty, l_full, l_empty, base, warp, group, lane, work, cta, slots
    ):  # fmt: skip
        """Warpgroups 2 and 3: O of half of the latents, tile by tile."""
        lay = self.smem
        stages = lay.stages
        w, c = warp & 3, lane & 3
        start, end = cut.run(work, cta)
        mine = base + group * (self.latents // self.width * BOX) + lane * 128 + ((w ^ (lane & 7)) << 4)
        acc = cute.make_rmem_tensor(self.latent_tiles * self.half, Float32)
        done = Int32(0)
        segment = Int32(0)
        while start + done < end:
            request, _length, _first, last = cut.locate(cut.stored(base + lay.split, lane), start + done)
            count = min(end, last) - (start + done)
            fill(acc, 0.0)
            for step in cutlass.range(0, count, 1, unroll=1):
                i = done + step
                stage, part = i % stages, i % PARTS_OF_P
                cute.arch.mbarrier_wait(full + stage, (i // stages) & 1)
                cute.arch.mbarrier_wait(p_full + part, (i // PARTS_OF_P) & 1)
                factors = self.factors_of(base, part)
                if ptx.lds_b32(factors, offset=self.flag) != 0:
                    self.rescale(acc, self.shared_figures(factors + c * 8))
                p_lo = ptx.descriptor(base + lay.p + part * lay.p_bytes)
                self.values_fp8(acc, mine + stage * lay.tile_bytes, p_lo)
                cute.arch.sync_warp()
                if lane == 0:  # every ldmatrix of this warp has returned: its part of the stage is free
                    cute.arch.mbarrier_arrive(empty + stage)
                cute.nvgpu.warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(p_empty + part)
            cute.arch.mbarrier_wait(l_full, segment & 1)
            self.rescale(acc, self.shared_figures(base + lay.inverse + c * 8))
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(l_empty)
            cute.arch.griddepcontrol_wait()
            self.store_values(acc, partial, group, request, slots)
            done += count
            segment += 1
