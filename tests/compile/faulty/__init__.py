"""Kernels that go wrong in one way each, and one that does not: what a build must make of them."""

from dataclasses import dataclass
from typing import ClassVar, Final

from k3dsl.nvidia.launch import Param

#: Enough that 1024 threads cannot hold them in 64 registers each.
LIVE: Final = 96


@dataclass(frozen=True)
class FaultyKey:
    """fault: what goes wrong (kernel.py); tag: to have other keys of the same fault; shape: a nested value."""

    fault: str
    tag: int = 0
    shape: tuple[tuple[int, ...], ...] = ((1, 2), (3,))

    name: ClassVar[str] = "test_faulty"
    device_module: ClassVar[str] = "faulty.kernel"
    params: ClassVar[tuple[Param, ...]] = (Param("source", "ptr"), Param("scale", "f32"), Param("out", "ptr"))


@dataclass(frozen=True)
class GreedyKey(FaultyKey):
    """Needs more dynamic shared memory than there is."""

    name: ClassVar[str] = "test_greedy"
    smem: ClassVar[int] = 232449


@dataclass(frozen=True)
class OtherParamsKey(FaultyKey):
    """Names other parameters than its kernel has."""

    name: ClassVar[str] = "test_other_params"
    params: ClassVar[tuple[Param, ...]] = (Param("source", "ptr"), Param("scale", "i64"), Param("out", "ptr"))
