"""Kimi-K3 MLA decode on NVIDIA GPUs. Names are fetched on first use: importing this loads neither torch nor a DSL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# name -> module that defines it
_PUBLIC = {
    "PreparedMla": "k3dsl.nvidia.prepared",
    "MlaQuery": "k3dsl.nvidia.stages",
    "MlaValue": "k3dsl.nvidia.stages",
    "DcpBox": "k3dsl.nvidia.dcp_box",
    "DcpQuery": "k3dsl.nvidia.dcp_stages",
    "DcpValue": "k3dsl.nvidia.dcp_stages",
    "local_lengths": "k3dsl.nvidia.dcp_box",
    "virtual_step": "k3dsl.nvidia.prepared_dcp",
    "compile_core": "k3dsl.nvidia.compiled",
    "core_for": "k3dsl.nvidia.core",
    "pad_requests": "k3dsl.metadata",
    "fill_splits": "k3dsl.nvidia.metadata",
    "trtllm_decode": "k3dsl.nvidia.core.packages",
    "stock_decode": "k3dsl.nvidia.core.packages",
    **dict.fromkeys(
        [
            "fused_mla_key_concat_kv_cache_insert",
            "fused_mla_qkv_quant_kv_cache_fp8_insert",
            "fused_mla_key_concat_ds_mla_insert",
            "fused_mla_decode_q_concat_kv_cache_insert",
            "context_pack",
            "context_pack_fp8",
            "prepare_epilogues",
        ],
        "k3dsl.nvidia.epilogue_ops",
    ),
}

__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from k3dsl.metadata import pad_requests
    from k3dsl.nvidia.compiled import compile_core
    from k3dsl.nvidia.core import core_for
    from k3dsl.nvidia.core.packages import stock_decode, trtllm_decode
    from k3dsl.nvidia.dcp_box import DcpBox, local_lengths
    from k3dsl.nvidia.dcp_stages import DcpQuery, DcpValue
    from k3dsl.nvidia.epilogue_ops import (
        context_pack,
        context_pack_fp8,
        fused_mla_decode_q_concat_kv_cache_insert,
        fused_mla_key_concat_ds_mla_insert,
        fused_mla_key_concat_kv_cache_insert,
        fused_mla_qkv_quant_kv_cache_fp8_insert,
        prepare_epilogues,
    )
    from k3dsl.nvidia.metadata import fill_splits
    from k3dsl.nvidia.prepared import PreparedMla
    from k3dsl.nvidia.prepared_dcp import virtual_step
    from k3dsl.nvidia.stages import MlaQuery, MlaValue


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
