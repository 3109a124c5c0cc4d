"""MlaQuery on the device: the kernel's signature and its launch. The work is in query_narrow.py and query_wide.py."""

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from k3dsl.nvidia import query as facts
from k3dsl.nvidia.kernels import primitives as P  # noqa: N812
from k3dsl.nvidia.kernels.query_narrow import Narrow
from k3dsl.nvidia.kernels.query_parts import Args
from k3dsl.nvidia.kernels.query_wide import Wide


class MlaQuery:
    """Compile-time facts: the schedule with its tile and format. Arguments: facts.QueryKey.params."""

    def __init__(self, key: facts.QueryKey, target: str):
        schedule = Narrow if key.schedule == "narrow" else Wide
        self.schedule = schedule(key, packed=target in P.PACKED_F32)
        self.launch = facts.geometry(key, heads=1, rows=1)
        self.ctas_a_sm = 2 if (key.schedule, key.tile) in facts.TWO_A_SM else 1

    @cute.jit
    def __call__(
        self,
        projected: Int64,
        q_norm: Int64,
        kv_norm: Int64,
        q_b: Int64,
        w_uk: Int64,
        q_scale_inv: Int64,
        k_scale_inv: Int64,
        slots: Int64,
        cache: Int64,
        query: Int64,
        rows: Int32,
        row_pitch: Int32,
        page_shift: Int32,
        uk_head_stride: Int64,
        uk_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            projected, q_norm, kv_norm, q_b, w_uk, q_scale_inv, k_scale_inv, slots, cache, query,
            rows, row_pitch, page_shift, uk_head_stride, uk_stride, page_stride, token_stride, eps,
        ).launch(
            grid=self.launch.grid,
            block=self.launch.block,
            cluster=self.launch.cluster,
            smem=self.launch.smem,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.ctas_a_sm,
            preferred_smem_carveout=100,  # given, because the DSL would ask a GPU for its limits
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        projected: Int64,
        q_norm: Int64,
        kv_norm: Int64,
        q_b: Int64,
        w_uk: Int64,
        q_scale_inv: Int64,
        k_scale_inv: Int64,
        slots: Int64,
        cache: Int64,
        query: Int64,
        rows: Int32,
        row_pitch: Int32,
        page_shift: Int32,
        uk_head_stride: Int64,
        uk_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        eps: Float32,
    ):
        self.schedule.body(
            Args(
                projected, q_norm, kv_norm, q_b, w_uk, q_scale_inv, k_scale_inv, slots, cache, query,
                rows, row_pitch, page_shift, uk_head_stride, uk_stride, page_stride, token_stride, eps,
            )
        )  # fmt: skip


def trace(key: facts.QueryKey, target: str):
    """The jitted launcher and arguments of the right types, to be traced and compiled."""
    kinds = {"ptr": Int64(16), "i64": Int64(16), "i32": Int32(1), "f32": Float32(1.0)}
    return MlaQuery(key, target), (*(kinds[p.kind] for p in key.params), make_fake_stream())
