"""The AMD half: kernels for gfx950 in FlyDSL. Names are fetched on first use: importing this loads no torch, no DSL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# name -> module that defines it
_PUBLIC = {
    **dict.fromkeys(
        ["MlaPreBuild", "q_heads", "peer_pairs", "scratch_bytes", "peer_bytes"],
        "k3dsl.amd.mla_pre.key",
    ),
    **dict.fromkeys(["even_code", "mxfp4_quantize"], "k3dsl.reference.mxfp4"),
}

__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from k3dsl.amd.mla_pre.key import MlaPreBuild, peer_bytes, peer_pairs, q_heads, scratch_bytes
    from k3dsl.reference.mxfp4 import even_code, mxfp4_quantize


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
