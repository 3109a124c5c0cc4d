"""Host facts of FlyDSL kernels that are there for tests alone: a sound one, and one for each way to go wrong.

out[i] = source[i] * scale + (offset >> 33)        i < count
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class FlyProbeKey:
    """fault: what goes wrong (kernel.py); tag: to have other keys of the same fault; shape: a nested value."""

    fault: str = "none"
    tag: int = 0
    shape: tuple[tuple[int, ...], ...] = ((1, 2), (3,))

    name: ClassVar[str] = "test_flyprobe"
    device_module: ClassVar[str] = "flyprobe.kernel"
    params: ClassVar[tuple[tuple[str, str], ...]] = (
        ("count", "i32"),
        ("source", "ptr"),
        ("scale", "f32"),
        ("offset", "i64"),
        ("out", "ptr"),
    )


@dataclass(frozen=True)
class OtherParamsKey(FlyProbeKey):
    """Names other parameters than its kernel has."""

    name: ClassVar[str] = "test_other_params"
    params: ClassVar[tuple[tuple[str, str], ...]] = (("count", "i32"), ("source", "ptr"))
