"""The merge of the `hopper` core on the device: the partials of a request, weighed, are its attention output.

out[r, c, :] = out_scale * sum_s 2^(m_s - M) O_s / sum_s 2^(m_s - M) l_s over the slots s of request r (kernels/cut.py),
M = max m_s; lse[r, c] = log2(sum_s 2^(m_s - M) l_s) + M. A column that saw no key, of an empty request or of a token in
front of the first key, is exactly 0 and -inf. A partial in float32 is O_s, one in f16 is O_s / l_s.

A CTA owns one column and a slice of the latents. `warps` warps hold the data (a lane 4 latents of every groups-th
split) and ask for `batch` partials at once, while one more warp works out the weights: both latencies overlap. In one
warp, ptxas puts the two groups of loads one after the other.

All sums are float32; the output is rounded once, to bf16. What bounds it is one round of loads from L2 at small batch,
the number of CTAs at large (docs/hopper.md).
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from k3dsl.nvidia.core.hopper import LATENT, MAX_SPLITS, PARTIALS, UNSEEN, MergeKey
from k3dsl.nvidia.kernels import cut, ptx

CHUNK = 8  # partials of a batch that are weighed without a look at whether there are so many


class Merge:
    """One build. `key`: MergeKey."""

    def __init__(self, key: MergeKey) -> None:
        self.key = key
        self.lanes = key.slice // 4  # threads of a group
        self.size = PARTIALS[key.partial]  # bytes of an element, and so 32-bit words of four
        self.half = key.partial == "f16"

    @cute.jit
    def __call__(
        self,
        partial: Int64,
        stats: Int64,
        lengths: Int64,
        out: Int64,
        lse: Int64,
        requests: Int32,
        splits: Int32,
        slots: Int32,
        columns: Int32,
        out_scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(partial, stats, lengths, out, lse, requests, splits, slots, columns, out_scale).launch(
            grid=(1, LATENT // self.key.slice, 1),
            block=(32 * self.key.warps + 32, 1, 1),
            smem=self.key.smem,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        partial: Int64,
        stats: Int64,
        lengths: Int64,
        out: Int64,
        lse: Int64,
        requests: Int32,
        splits: Int32,
        slots: Int32,
        columns: Int32,
        out_scale: Float32,
    ):
        key = self.key
        tid, _, _ = cute.arch.thread_idx()
        column, part, request = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        base = cutlass.memory.SmemAllocator().allocate(key.smem, 16).toint()
        weights, sums = base, base + 4 * MAX_SPLITS
        total_at = sums + 4 * key.groups * key.slice
        cute.arch.griddepcontrol_launch_dependents()
        # The lengths are older than the kernel before the core, and that one is over when a core begins.
        work = cut.split(cut.load_lengths(lengths, requests, lane), requests, splits)
        first, count = cut.ctas(work, request)
        slot = first + request
        block = column // key.block
        group = warp // (key.slice // 128)
        o = cute.make_rmem_tensor(4, Float32)
        v = cute.make_rmem_tensor((self.size, key.batch), Int32 if self.half else Float32)  # 4 latents of a partial
        for x in cutlass.range_constexpr(4):
            o[x] = Float32(0.0)
        row = (Int64(block * slots + slot) * key.block + Int64(column - block * key.block)) * (LATENT * self.size)
        mine = partial + row + Int64((part * key.slice + tid % self.lanes * 4) * self.size)
        cute.arch.griddepcontrol_wait()
        if warp < key.warps:
            self.fetch(v, mine, group, count)
        else:
            self.weigh(weights, total_at, lse, stats + (Int64(column) * Int64(slots) + Int64(slot)) * 8,
                       Int64(request * columns + column) * 4, lane, part, count, out_scale)  # fmt: skip
        cute.arch.sync_threads()
        if warp < key.warps:
            at = group
            while at < count:
                for first_of in cutlass.range_constexpr(0, key.batch, CHUNK):
                    if at + first_of * key.groups < count:  # many requests have fewer partials than a batch
                        for b in cutlass.range_constexpr(first_of, min(first_of + CHUNK, key.batch)):
                            f = ptx.lds_f32(weights + min(at + b * key.groups, MAX_SPLITS - 1) * 4)
                            got = self.latents(v, b)
                            for x in cutlass.range_constexpr(4):
                                o[x] = o[x] + f * got[x]
                at += key.batch * key.groups
                if at < count:
                    self.fetch(v, mine, at, count)
            if cutlass.const_expr(key.groups > 1):
                ptx.sts_v4f(sums + tid * 16, o[0], o[1], o[2], o[3])
        if cutlass.const_expr(key.groups > 1):
            cute.arch.sync_threads()
        if tid < self.lanes:
            for g in cutlass.range_constexpr(1, key.groups):
                more = ptx.lds_v4f(sums + tid * 16, offset=16 * self.lanes * g)
                for x in cutlass.range_constexpr(4):
                    o[x] = o[x] + more[x]
            seen = ptx.lds_f32(total_at) != Float32(0.0)  # NaN keys in sight: their NaN stays to be seen
            value = [cutlass.select_(seen, o[x], Float32(0.0)) for x in range(4)]
            to = out + Int64(request * columns + column) * (LATENT * 2) + Int64((part * key.slice + tid * 4) * 2)
            ptx.stg_v2b(to, ptx.cvt_bf16x2(value[1], value[0]), ptx.cvt_bf16x2(value[3], value[2]))

    @cute.jit
    def fetch(self, v, mine, at, count):
        """The next partials of this thread; zeros beyond the last split."""
        key = self.key
        for b in cutlass.range_constexpr(key.batch):
            s = at + b * key.groups
            load = ptx.ldg_v2b_below if self.half else ptx.ldg_v4f_below
            got = load(mine + Int64(s) * (key.block * LATENT * self.size), s, count)
            for x in cutlass.range_constexpr(self.size):
                v[x, b] = got[x]

    def latents(self, v, b):
        """The four latents of partial b, as Float32."""
        if not self.half:
            return [v[x, b] for x in range(4)]
        return [y for x in range(2) for y in ptx.halves_f32(v[x, b])]

    @cute.jit
    def weigh(self, weights, total_at, lse, stats, lse_at, lane, part, count, out_scale):
        """The weights of all splits, 0 beyond the last, and the total that they are divided by. One warp."""
        each = MAX_SPLITS // 32  # a lane takes splits lane, lane + 32, ...
        m, l_ = [], []
        for k in cutlass.range_constexpr(each):
            a, b = ptx.ldg_v2f_below(stats + Int64(k * 32 + lane) * 8, k * 32 + lane, count)
            m.append(cutlass.select_(k * 32 + lane < count, a, Float32(UNSEEN)))
            l_.append(b)
        top = m[0]
        for k in cutlass.range_constexpr(1, each):
            top = ptx.fmax(top, m[k])
        for distance in (1, 2, 4, 8, 16):
            top = ptx.fmax(top, cute.arch.shuffle_sync_bfly(top, distance))
        factor = [ptx.ex2(m[k] - top) for k in range(each)]
        total = factor[0] * l_[0]
        for k in cutlass.range_constexpr(1, each):
            total = total + factor[k] * l_[k]
        for distance in (1, 2, 4, 8, 16):
            total = total + cute.arch.shuffle_sync_bfly(total, distance)
        scale = out_scale / total
        for k in cutlass.range_constexpr(each):
            weight = factor[k] * l_[k] if self.half else factor[k]
            ptx.sts_f32(weights + lane * 4, weight * scale, offset=k * 128)
        if lane == 0:
            ptx.sts_f32(total_at, total)
            if (part == 0) & (lse != 0):
                ptx.stg_f32(lse + lse_at, cutlass.select_(total != 0.0, ptx.lg2(total) + top, -Float32.inf))


def trace(key: MergeKey, target: str):
    """The function to compile and stand-ins for its arguments."""
    return Merge(key), (
        *(Int64(1) for _ in range(5)),
        *(Int32(1) for _ in range(4)),
        Float32(1.0),
        make_fake_stream(),
    )
