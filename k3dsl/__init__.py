"""k3dsl: Kimi-K3 MLA decode layers, built ahead of graph capture, one `run()` each.

Importing this package loads neither torch nor a DSL and touches no GPU: every public name is fetched on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "MlaDims": "k3dsl.dims",
    "MlaWeights": "k3dsl.weights",
    "Deployment": "k3dsl.deployment",
    "CompileCache": "k3dsl.cache",
    "CompileKey": "k3dsl.cache",
    "Target": "k3dsl.preparing",
    "detect_target": "k3dsl.preparing",
    "prepare": "k3dsl.preparing",
    "warmup": "k3dsl.preparing",
    **dict.fromkeys(
        [
            "K3Error",
            "ConfigError",
            "NotPrepared",
            "CaptureError",
            "CacheMiss",
            "CompileError",
            "ToolchainError",
            "LaunchError",
            "PeerError",
        ],
        "k3dsl.errors",
    ),
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache, CompileKey
    from k3dsl.deployment import Deployment
    from k3dsl.dims import MlaDims
    from k3dsl.errors import (
        CacheMiss,
        CaptureError,
        CompileError,
        ConfigError,
        K3Error,
        LaunchError,
        NotPrepared,
        PeerError,
        ToolchainError,
    )
    from k3dsl.preparing import Target, detect_target, prepare, warmup
    from k3dsl.weights import MlaWeights


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
