"""The compile cache: keys become objects, through memory, one folder, read-only layers, and at last a build.

It knows nothing of what it holds: a vendor's toolchain makes the keys and the objects, its driver loads them. A process
that only loads entries imports no more than that takes: names of the other tasks are fetched on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from k3dsl.cache.compile_cache import CompileCache
from k3dsl.cache.entry import Build, Built, CorruptError, Entry, Manifest
from k3dsl.cache.key import ABSENT, CompileKey, Difference, KeyTypeError
from k3dsl.cache.sources import source_digest
from k3dsl.cache.trust import UntrustedError

if TYPE_CHECKING:
    from k3dsl.cache.bound import PruneReport
    from k3dsl.cache.bundle import ExportReport, ImportReport
    from k3dsl.cache.explain import Explanation
    from k3dsl.cache.stats import COUNTERS, Stats
    from k3dsl.cache.tar import BundleError
    from k3dsl.cache.verify import VerifyReport

_LATE = {
    "COUNTERS": "k3dsl.cache.stats",
    "Explanation": "k3dsl.cache.explain",
    "Stats": "k3dsl.cache.stats",
    "BundleError": "k3dsl.cache.tar",
    "ExportReport": "k3dsl.cache.bundle",
    "ImportReport": "k3dsl.cache.bundle",
    "PruneReport": "k3dsl.cache.bound",
    "VerifyReport": "k3dsl.cache.verify",
}

__all__ = [
    "ABSENT",
    "COUNTERS",
    "Build",
    "Built",
    "BundleError",
    "CompileCache",
    "CompileKey",
    "CorruptError",
    "Difference",
    "Entry",
    "Explanation",
    "ExportReport",
    "ImportReport",
    "KeyTypeError",
    "Manifest",
    "PruneReport",
    "Stats",
    "UntrustedError",
    "VerifyReport",
    "source_digest",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value
