"""What host facts say of a kernel's parameters and launch. A file of its own: it is part of every kernel's sources."""

from dataclasses import dataclass
from typing import NamedTuple


class Param(NamedTuple):
    """A kernel parameter. kind: ptr, i32, i64, f32, or tmap for a tensor map by value."""

    name: str
    kind: str


@dataclass(frozen=True)
class Launch:
    """A launch: grid and cluster in CTAs, block in threads, dynamic shared memory in bytes.

    pdl: the kernel may start while the one before it on the stream still runs; it waits by griddepcontrol.wait.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem: int = 0
    pdl: bool = True
