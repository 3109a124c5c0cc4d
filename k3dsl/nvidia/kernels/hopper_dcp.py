"""The `hopper` core over one rank's shard of a shared context, for more than one query token: another causal mask.

Token t of a request sees the keys at positions below total - (q - 1) + t of the whole context; which of them lie here
follows from the interleave. All else is the core's (hopper.py): `lengths` are the shard's.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, GridConstant, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from k3dsl.nvidia.core.hopper import ENTRY
from k3dsl.nvidia.core.hopper_dcp import HopperDcpKey
from k3dsl.nvidia.kernels import ptx
from k3dsl.nvidia.kernels.hopper import Core
from k3dsl.nvidia.kernels.hopper_tile import lane_of


class DcpCore(Core):
    """One build. `key`: HopperDcpKey."""

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
        totals: Int64,
        ranks: Int32,
        rank: Int32,
        interleave: Int32,
        stream: cuda.CUstream,
    ):
        """For tracing only: the maps that a launch passes are encoded by the host."""
        dtype = cutlass.Float8E4M3FN if self.fp8 else cutlass.BFloat16
        main = create_tensor_map_tiled(lengths, dtype, [ENTRY, 64], [72], [64, 8], swizzle=TensorMapSwizzle.s128b)
        rest = (lengths, table, partial, stats, table_stride, requests, splits, slots, scale_log2)
        context = (totals, ranks, rank, interleave)
        launch = {
            "grid": (self.key.blocks, 1, 1),
            "block": (self.key.threads, 1, 1),
            "smem": self.smem.total,
            "stream": stream,
            "use_pdl": True,
            "min_blocks_per_mp": 1,
        }
        if cutlass.const_expr(self.fp8):
            self.kernel_fp8_dcp(main, main, main, main, *rest, *context).launch(**launch)
        else:
            self.kernel_bf16_dcp(main, main, *rest, *context).launch(**launch)

    @cute.kernel
    def kernel_fp8_dcp(
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
        totals: Int64,
        ranks: Int32,
        rank: Int32,
        interleave: Int32,
    ):
        self.context = totals, ranks, rank, interleave  # for `mask`, which the body calls
        maps = [m.get_ptr().toint() for m in (kv, kv_tail, query, query_tail)]
        self.body(maps, lengths, table, partial, stats, table_stride, requests, splits, slots, scale_log2)

    @cute.kernel
    def kernel_bf16_dcp(
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
        totals: Int64,
        ranks: Int32,
        rank: Int32,
        interleave: Int32,
    ):
        self.context = totals, ranks, rank, interleave
        k, q = kv.get_ptr().toint(), query.get_ptr().toint()
        self.body([k, k, q, q], lengths, table, partial, stats, table_stride, requests, splits, slots, scale_log2)

    @cute.jit
    def mask(self, s, valid, request):
        """-inf for the keys that a column does not see. valid: keys from the tile's first to the shard's end."""
        key = self.key
        totals, _ranks, _rank, _interleave = self.context
        total = ptx.ldg_b32(totals + Int64(request) * 4)
        here = self.local(total)
        w, r, _c = lane_of(ptx.thread_x())
        first = self.first_column()
        for g in cutlass.range_constexpr(self.own // 8):
            for b in cutlass.range_constexpr(2):
                limit = valid - here + self.local(total - (key.q - 1) + (first + 8 * g + b) // key.heads)
                for h in cutlass.range_constexpr(2):
                    x = 4 * g + 2 * h + b
                    s[x] = ptx.keep_below(s[x], w * 16 + r + 8 * h, limit)

    def local(self, total):
        """How many of the first `total` positions are this rank's."""
        _totals, ranks, rank, interleave = self.context
        total = cutlass.max(total, Int32(0))
        rounds = total // (ranks * interleave)
        rest = total - rounds * (ranks * interleave) - rank * interleave
        return rounds * interleave + cutlass.min(cutlass.max(rest, Int32(0)), interleave)


def trace(key: HopperDcpKey, target: str):
    """The function to compile and stand-ins for its arguments."""
    return DcpCore(key), (
        *(Int64(1) for _ in range(4)),
        *(Int32(1) for _ in range(4)),
        Float32(1.0),
        Int64(1),
        *(Int32(1) for _ in range(3)),
        make_fake_stream(),
    )
