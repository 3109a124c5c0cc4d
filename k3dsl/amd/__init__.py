"""The AMD half: kernels for gfx950 in FlyDSL. Names are fetched on first use: importing this loads no torch, no DSL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# name -> module that defines it
_PUBLIC = {
    **dict.fromkeys(
        ["MlaPreBuild", "q_heads", "peer_pairs", "scratch_bytes", "peer_bytes"],
        "k3dsl.amd.mla_pre.key",
    ),
    "mla_pre": "k3dsl.amd",  # the package, which is called as the function
    "build": "k3dsl.amd.mla_pre.launch",
    **dict.fromkeys(["even_code", "mxfp4_quantize"], "k3dsl.reference.mxfp4"),
    "decode_health": "k3dsl.amd.health",
    "MlaPreRank": "k3dsl.amd.rank",
    "MlaPreWeights": "k3dsl.amd.weights",
    "PreparedMlaPre": "k3dsl.amd.prepared",
    **dict.fromkeys(
        [
            "PreparedSparseMla",
            "flydsl_sparse_mla_fp8ds_fwd",
            "flydsl_sparse_mla_fp8ds_supported",
            "flydsl_sparse_mla_fp8ds_warmup",
            "sparse_mla_problems",
        ],
        "k3dsl.amd.sparse_mla.launch",
    ),
    "SparseMlaKey": "k3dsl.amd.sparse_mla.key",
    **dict.fromkeys(["fp8_ds_mla_pack", "fp8_ds_mla_unpack"], "k3dsl.reference.sparse_mla"),
}

__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from k3dsl.amd.health import decode_health
    from k3dsl.amd.mla_pre.key import MlaPreBuild, peer_bytes, peer_pairs, q_heads, scratch_bytes
    from k3dsl.amd.mla_pre.launch import build, mla_pre
    from k3dsl.amd.prepared import PreparedMlaPre
    from k3dsl.amd.rank import MlaPreRank
    from k3dsl.amd.sparse_mla.key import SparseMlaKey
    from k3dsl.amd.sparse_mla.launch import (
        PreparedSparseMla,
        flydsl_sparse_mla_fp8ds_fwd,
        flydsl_sparse_mla_fp8ds_supported,
        flydsl_sparse_mla_fp8ds_warmup,
        sparse_mla_problems,
    )
    from k3dsl.amd.weights import MlaPreWeights
    from k3dsl.reference.mxfp4 import even_code, mxfp4_quantize
    from k3dsl.reference.sparse_mla import fp8_ds_mla_pack, fp8_ds_mla_unpack


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module(f"{module}.{name}") if name == "mla_pre" else getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
