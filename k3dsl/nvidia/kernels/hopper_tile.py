"""What a consumer warpgroup of the `hopper` core does with a tile: S, mask, P, and the step of O. See hopper.py.

Fragments. Lane (r, c) = (lane // 4, lane % 4) of warp w has in accumulator [4g + 2h + b] row 16w + r + 8h, column
8g + 2c + b. FP8 V reaches the A operand by ldmatrix.trans of 16-bit units: register j of a lane has keys 8j + 2c (low
half) and 8j + 2c + 1, latents 2r and 2r + 1. Accumulator rows r and r + 8 then are latents 2r and 2r + 1 of the warp's
16. BF16 V is read by the wgmma itself, transposed.

Rounding and what bounds it: see hopper.py.
"""

from functools import reduce
from operator import add

import cutlass
from cutlass import Float32, Int64, cute

from k3dsl.nvidia.core.hopper import ENTRY, LATENT, TILE, HopperKey, smem
from k3dsl.nvidia.kernels import ptx

#: P is 2^(score - m), and m need not be the maximum of the scores so far: it is raised only when an exponent passes
#: P_LIMIT. That is rare after the first tiles, and saves finding and exchanging maxima in all other steps. P then stays
#: below 256, in the range of every type (448 for e4m3). m is raised to where the largest P is 2^P_TOP: that of e4m3
#: leaves both room above and, with a smallest value of 2^-9, 13 bits below.
P_LIMIT = 8.0
P_TOP = {"f16": 0.0, "bf16": 0.0, "e4m3": 4.0}
#: Bytes from one 128-byte wide box of a tile to the next.
BOX = TILE * 128
#: FP8 QK chains that a warpgroup has in flight, by N: as many as registers allow.
CHAINS = {8: 5, 16: 5, 24: 3}


def fill(registers, value):
    """`value` into every element of a register tensor."""
    put(registers, [Float32(value)] * cute.size(registers))


def put(registers, values):
    """A list into a register tensor."""
    put_at(registers, 0, values)


def put_at(registers, at, values):
    """The same from element `at` on."""
    for x, value in enumerate(values):
        registers[at + x] = value


def added(a, b):
    """The sums of two lists; the second if there is no first."""
    return b if a is None else [x + y for x, y in zip(a, b, strict=True)]


def lane_of(thread):
    """(warp of its warpgroup, lane // 4, lane % 4)."""
    return (thread >> 5) & 3, (thread >> 2) & 7, thread & 3


class Tile:
    """Facts of a build and the work on a tile. Methods without cute.jit have no run-time control flow of their own."""

    def __init__(self, key: HopperKey) -> None:
        self.key, self.smem = key, smem(key)
        self.fp8 = key.kv == "fp8"
        self.e4m3 = key.p == "e4m3"
        self.width = 128 if self.fp8 else 64  # elements of a box row
        self.boxes = ENTRY // self.width  # whole boxes; FP8 has a tail of 64 elements beside them
        self.half = key.n // 2  # accumulator registers of a 64-row tile of O
        self.own = key.n // key.halves  # columns of a warpgroup's scores
        self.cols = self.own // 4  # those that a thread sees: 8g + 2c + b of its half
        self.latents = LATENT // 2  # of a warpgroup that accumulates them
        self.latent_tiles = self.latents // TILE
        self.p_row = 64 if self.e4m3 else 128  # bytes of a column of P

    def own_columns(self, q_lo, column_half):
        """Descriptors of a warpgroup's columns of the query at q_lo: in the boxes, and in the tail."""
        n = self.key.n
        if self.key.halves > 1:  # BF16, which has no tail
            q_lo = q_lo + column_half * (n // 2 * 128 // 16)
        return q_lo, q_lo + self.boxes * n * 128 // 16

    def scores(self, k_lo, q_lo, q_tail):
        """S^T of a tile, 64 keys x own columns, as own / 2 Float32. q_lo, q_tail: see own_columns."""
        n = self.key.n
        boxes = [(k_lo, b * BOX, q_lo + b * (n * 128 // 16), 4, ptx.SW128) for b in range(self.boxes)]
        if not self.fp8:  # a bf16 wgmma adds in float32: one chain over all boxes is exact enough
            d = self.zeros()
            cute.nvgpu.warpgroup.fence()
            for b, box in enumerate(boxes):
                d = self.products("bf16", d, *box, follows=b > 0)
                cute.nvgpu.warpgroup.commit_group()
            cute.nvgpu.warpgroup.wait_group(0)
            return ptx.settled(d)
        boxes.append((k_lo, self.boxes * BOX, q_tail, 2, ptx.SW64))
        depth, flying, result = CHAINS[self.own], [], None
        for box in boxes:
            if len(flying) == depth:
                cute.nvgpu.warpgroup.wait_group(depth - 1)
                result = added(result, ptx.settled(flying.pop(0)))
            flying.append(self.chain(*box))
        cute.nvgpu.warpgroup.wait_group(0)
        for d in flying:
            result = added(result, ptx.settled(d))
        return result

    @cute.jit
    def scores_in_turn(self, s, k_lo, q_lo, q_tail):
        """The same for FP8 with many columns, into s: one chain at a time, other warpgroups fill the gaps.

        A loop: unrolled, ptxas puts the additions off and takes registers for all of them.
        """
        d = self.chain(k_lo, self.boxes * BOX, q_tail, 2, ptx.SW64)
        cute.nvgpu.warpgroup.wait_group(0)
        put(s, ptx.settled(d))
        for box in cutlass.range(self.boxes, unroll=1):
            d = self.chain(k_lo + box * (BOX // 16), 0, q_lo + box * (self.key.n * 128 // 16), 4, ptx.SW128)
            cute.nvgpu.warpgroup.wait_group(0)
            put(s, added([s[x] for x in range(self.own // 2)], ptx.settled(d)))

    def chain(self, k, at, q, steps, layout):
        """Sets a chain of FP8 products going that begins at 0: `steps` times 32 elements of a box."""
        cute.nvgpu.warpgroup.fence()
        d = self.products("e4m3", self.zeros(), k, at, q, steps, layout)
        cute.nvgpu.warpgroup.commit_group()
        return d

    def zeros(self):
        """Accumulators of own columns."""
        return [Float32(0.0)] * (self.own // 2)

    def products(self, kind, d, k, at, q, steps, layout, follows=False):
        """d (+)= keys x queries over `steps` times 32 bytes, of keys from byte `at` of the tile on; k, q: descriptors.

        follows: whether d counts at first.
        """
        for step in range(steps):
            d = ptx.wgmma_ss(kind, d, k + (at + 32 * step) // 16, layout, q + 2 * step, layout, follows or step > 0)
        return d

    def first_column(self):
        """The first column of a request whose scores this thread has; the others are 8g + b after it."""
        _row, column_at = self.exchange_place()
        return column_at // 4 if self.key.blocks == 1 else column_at // 4 + ptx.block_x() * self.key.block

    @cute.jit
    def mask(self, s, valid, request):
        """-inf for the keys that a column does not see: those past the length and, per token, the causal ones.

        `request` is for builds whose tokens' bounds do not follow from the length alone (kernels/hopper_dcp.py).
        """
        key = self.key
        w, r, _c = lane_of(ptx.thread_x())
        first = self.first_column()
        for g in cutlass.range_constexpr(self.own // 8):
            for b in cutlass.range_constexpr(2):
                limit = valid
                if cutlass.const_expr(key.q > 1):
                    limit = valid - (key.q - 1) + (first + 8 * g + b) // key.heads
                for h in cutlass.range_constexpr(2):
                    x = 4 * g + 2 * h + b
                    s[x] = ptx.keep_below(s[x], w * 16 + r + 8 * h, limit)

    def clear_values(self, tile, part, valid):
        """Zeros into the rows of V past the length: P is 0 there, but 0 times the NaN that may lie there is NaN.

        The warpgroups that have this tile share its latents; part: the number of this one.
        """
        boxes = LATENT // self.width // (1 if self.key.step == 2 or self.key.apart else 2)
        self.clear_rows(tile + part * (boxes * BOX), ptx.thread_x(), valid, boxes // 2)

    @cute.jit
    def clear_rows(self, at, tid, valid, boxes: cutlass.Constexpr):
        row = (tid & 127) >> 1
        if row >= valid:
            mine = at + (tid & 1) * (boxes * BOX) + row * 128
            for x in cutlass.range_constexpr(boxes * 8):
                ptx.sts_zero16(mine, offset=x // 8 * BOX + x % 8 * 16)

    @cute.jit
    def share_peaks(self, s, to):
        """The largest score of each column among this warp's 16 keys to shared memory."""
        groups = self.own // 8
        peak = [ptx.fmax(s[4 * g + b], s[4 * g + 2 + b]) for g in range(groups) for b in range(2)]
        for distance in (4, 8, 16):
            peak = [ptx.fmax(x, cute.arch.shuffle_sync_bfly(x, distance)) for x in peak]
        if ptx.thread_x() & 31 < 4:
            for g in cutlass.range_constexpr(groups):
                ptx.sts_v2f(to, peak[2 * g], peak[2 * g + 1], offset=32 * g)

    @cute.jit
    def raise_to_peaks(self, new, m, peaks, scale_log2):
        """new = per column of this thread: m, raised to where the warps' largest score gives a P of 2^P_TOP.

        A loop, though a short one: unrolled, all its loads are in flight at once and take registers that are not there.
        """
        put(new, [m[x] for x in range(self.cols)])
        for warp in cutlass.range(4 * self.key.step, unroll=1):
            self.raise_by(new, peaks + warp * (self.key.n * 4), scale_log2)

    def raise_by(self, new, peaks, scale_log2):
        for g in range(self.own // 8):
            for b, peak in enumerate(ptx.lds_v2f(peaks, offset=32 * g)):
                x = 2 * g + b
                new[x] = ptx.fmax(new[x], ptx.fma(peak, scale_log2, Float32(-P_TOP[self.key.p])))

    def share_of(self, group):
        """(tile of a step, half of the columns) whose scores warpgroup `group` works out, one of the first two."""
        return group % self.key.step, group // self.key.step % self.key.halves

    def exchange_place(self):
        """(row, byte of the first column) of this thread where warps exchange figures of columns.

        From the thread's number anew: kept from step to step, they would take registers that are not there.
        """
        thread = ptx.thread_x()
        w, _r, c = lane_of(thread)
        tile_of_step, column_half = self.share_of(thread >> 7)
        row = 4 * (thread >> 7 if self.key.alone else tile_of_step) + w
        return row, column_half * (self.own * 4) + c * 8

    @cute.jit
    def share_figures(self, figures, to, row):
        """Figures of this warpgroup's columns to shared memory, by one warp: all have the same."""
        if (row & 3 == 0) & (ptx.thread_x() & 31 < 4):
            for g in cutlass.range_constexpr(self.own // 8):
                ptx.sts_v2f(to, figures[2 * g], figures[2 * g + 1], offset=32 * g)

    def shared_figures(self, at):
        """What stands at `at` for each of this thread's columns of all."""
        return [f for g in range(self.key.n // 8) for f in ptx.lds_v2f(at, offset=32 * g)]

    def rescale(self, acc, factor):
        """acc times a factor a column."""
        for x in range(self.latent_tiles * self.half):
            acc[x] = acc[x] * factor[(x % self.half >> 2) * 2 + (x & 1)]

    def worst(self, s, m, scale_log2):
        """The largest exponent that P would have by this m."""
        found = None
        for g in range(self.own // 8):
            for b in range(2):
                x = ptx.fma(ptx.fmax(s[4 * g + b], s[4 * g + 2 + b]), scale_log2, -m[2 * g + b])
                found = x if found is None else ptx.fmax(found, x)
        return found

    def p_store_addresses(self, p, w, lane):
        """Where this lane writes P of a tile at p. Its rows are columns; a row has 64 keys in swizzled 16-byte chunks.

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
        """P = 2^(s scale - m) of this thread's keys and columns to shared memory.

        Gives their sum a column, and the largest exponent: above P_LIMIT, P is to be done again with a larger m.
        """
        kind, groups = self.key.p, self.own // 8
        regs, sums, worst = [], [], None
        for g in range(groups):
            pairs = []  # per column: of keys r and r + 8
            for b in range(2):
                x0, x1 = (ptx.fma(s[4 * g + 2 * h + b], scale_log2, -m[2 * g + b]) for h in range(2))
                p0, p1 = ptx.ex2(x0), ptx.ex2(x1)
                peak = ptx.fmax(x0, x1)
                worst = peak if worst is None else ptx.fmax(worst, peak)
                sums.append(p0 + p1)
                pairs.append((p0, p1))
            if self.e4m3:
                for b, pair in enumerate(pairs):
                    ptx.sts_b16(at[b], ptx.cvt_e4m3x2(pair[1], pair[0]), offset=g * 512)
            else:
                convert = ptx.cvt_f16x2 if kind == "f16" else ptx.cvt_bf16x2
                regs.append([convert(pairs[1][h], pairs[0][h]) for h in range(2)])
        for g in range(0, len(regs), 2):
            ptx.stsm_t(at[0], [x for two in regs[g : g + 2] for x in two], offset=g * 1024)
        return sums, worst

    def latents_of(self, va, t, k32):
        """32 keys of this warp's 16 latents in latent tile t, as ldmatrix gives them. Two tiles lie in a box."""
        return ptx.ldsm_x4_t((va ^ 64 if t % 2 else va) + (t // 2 * BOX + k32 * 32 * 128))

    def values_fp8(self, acc, va, p_lo):
        """acc += V^T P^T over a tile; va: this lane's row in ldmatrix. f16 leaves a group in flight, e4m3 none."""
        if self.e4m3:
            self.values_e4m3(acc, va, p_lo)
        else:
            self.values_f16(acc, va, p_lo)

    def values_f16(self, acc, va, p_lo):
        """A fragment may be overwritten once its wgmma is through, so there are those of two groups, one in flight.

        Groups have two wgmmas, or one where O leaves no registers for four fragments.
        """
        half = self.half
        for t in range(self.latent_tiles):
            d = [acc[half * t + x] for x in range(half)]
            for k32 in range(2):
                v = self.latents_of(va, t, k32)
                fragments = [
                    [x for y in v[2 * g : 2 * g + 2] for x in ptx.cvt_e4m3x4_f16(ptx.prmt(y, y, 0x3120))]
                    for g in range(2)
                ]
                for group in ([0], [1]) if self.key.apart else ([0, 1],):
                    if t or k32 or group == [1]:
                        cute.nvgpu.warpgroup.wait_group(1)
                    cute.nvgpu.warpgroup.fence()
                    for g in group:
                        d = ptx.wgmma_rs("f16", d, fragments[g], p_lo + (k32 * 64 + g * 32) // 16, ptx.SW128)
                    cute.nvgpu.warpgroup.commit_group()
            put_at(acc, half * t, d)

    def values_e4m3(self, acc, va, p_lo):
        """An e4m3 wgmma adds with 14 bits: each tile has a chain of its own, added to acc in float32. A chain over all
        tiles would lose what comes late.

        With few columns a chain is added while the next one runs. With many there are registers for half of one only,
        and other warpgroups fill the gap.
        """
        # The chain before is added between the two wgmmas of this one, the first of which is in flight meanwhile; with
        # two parts in front of both, as there are no registers for two chains.
        parts, size = (2, self.half // 2) if self.key.apart else (1, self.half)
        flying = None

        def land(at, d):
            put_at(acc, at, [acc[at + x] + y for x, y in enumerate(ptx.settled(d))])

        for t in range(self.latent_tiles):
            fragments = []  # of this tile: both halves of the columns are multiplied with them
            for part in range(parts):
                d = [Float32(0.0)] * size
                for k32 in range(2):
                    if part == 0:
                        v = self.latents_of(va, t, k32)
                        fragments.append([ptx.prmt(v[j], v[j + 1], x) for j in (0, 2) for x in (0x6240, 0x7351)])
                    if flying is not None and k32 == 2 - parts:
                        cute.nvgpu.warpgroup.wait_group(2 - parts)
                        land(*flying)
                        flying = None
                    elif parts == 1 and (t or k32):
                        cute.nvgpu.warpgroup.wait_group(1)
                    cute.nvgpu.warpgroup.fence()
                    p = p_lo + (k32 * 32 + part * (self.key.n // 2) * 64) // 16
                    d = ptx.wgmma_rs("e4m3", d, fragments[k32], p, ptx.SW64, k32 > 0)
                    cute.nvgpu.warpgroup.commit_group()
                flying = self.half * t + part * size, d
        cute.nvgpu.warpgroup.wait_group(0)
        land(*flying)

    def values_bf16(self, acc, v_lo, p_lo):
        """acc += V^T P^T over a tile, V^T read transposed from shared memory. Leaves everything in flight."""
        half = self.half
        cute.nvgpu.warpgroup.fence()
        for t in range(self.latent_tiles):
            d = [acc[half * t + x] for x in range(half)]
            for k16 in range(4):
                v, p = v_lo + (t * BOX + k16 * 16 * 128) // 16, p_lo + k16 * 32 // 16
                d = ptx.wgmma_ss("bf16", d, v, ptx.SW128, p, ptx.SW128, True, a_mn_major=True)
            put_at(acc, half * t, d)
        cute.nvgpu.warpgroup.commit_group()

    # ---- what a request leaves

    @cute.jit
    def share_sums(self, total, base, lane, barrier: cutlass.Constexpr, threads: cutlass.Constexpr):
        """This warp's part of l to shared memory; after the barrier those of all its warps are there."""
        row, column_at = self.exchange_place()
        here = [total[x] for x in range(self.cols)]
        for distance in (4, 8, 16):
            here = [x + cute.arch.shuffle_sync_bfly(x, distance) for x in here]
        if lane < 4:
            for g in cutlass.range_constexpr(self.own // 8):
                at = base + self.smem.sums + row * (self.key.n * 4) + column_at
                ptx.sts_v2f(at, here[2 * g], here[2 * g + 1], offset=32 * g)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)

    def shared_sums(self, base):
        """l of this thread's columns, after share_sums."""
        at = base + self.smem.sums + self.exchange_place()[1]
        found = []
        for g in range(self.own // 8):
            parts = [ptx.lds_v2f(at, offset=x * self.key.n * 4 + 32 * g) for x in range(8 if self.fp8 else 4)]
            found += [reduce(add, (part[b] for part in parts)) for b in range(2)]
        return found

    @cute.jit
    def store_stats(self, m, stats, base, lane, request, slots):
        """(m, l) of a request's columns to its slot, by one warp of those that have the columns; after share_sums."""
        key = self.key
        row, column_at = self.exchange_place()
        if (row == 0) & (lane < 4):
            block, slot = ptx.block_x(), ptx.block_y() + request
            column = column_at // 4
            limit = min(key.block, key.columns - block * key.block) - column
            sums = self.shared_sums(base)
            to = stats + (Int64(block * key.block + column) * Int64(slots) + Int64(slot)) * 8
            for g in cutlass.range_constexpr(self.own // 8):
                for b in cutlass.range_constexpr(2):
                    if 8 * g + b < limit:
                        ptx.stg_v2f(to + Int64((8 * g + b) * slots) * 8, m[2 * g + b], sums[2 * g + b])

    @cute.jit
    def store_values(self, acc, partial, part, request, slots):
        """O of a request, FP8: O / l, to its slot. part: which half of the latents this warpgroup has."""
        key = self.key
        w, r, c = lane_of(ptx.thread_x())
        block, slot = ptx.block_x(), ptx.block_y() + request
        limit = min(key.block, key.columns - block * key.block)
        size = key.partial_bytes
        row = (Int64(block * slots + slot) * key.block + Int64(2 * c)) * (LATENT * size)
        first = part * self.latents + w * 16
        to = partial + row + Int64((first + (2 * r if self.fp8 else r)) * size)
        for g in cutlass.range_constexpr(key.n // 8):
            for b in cutlass.range_constexpr(2):
                if 8 * g + 2 * c + b < limit:
                    for t in cutlass.range_constexpr(self.latent_tiles):
                        x = self.half * t + 4 * g + b
                        offset = ((8 * g + b) * LATENT + t * TILE) * size
                        if cutlass.const_expr(self.fp8):
                            ptx.stg_b32(to, ptx.cvt_f16x2(acc[x + 2], acc[x]), offset=offset)
                        else:
                            ptx.stg_f32(to, acc[x], offset=offset)
                            ptx.stg_f32(to, acc[x + 2], offset=offset + 32)
