"""Host facts of a kernel that is there for tests alone: every kind of parameter, a cluster, shared memory above 48 KB.

    out[i] = source[i] * scale + (offset >> 33)                  i < count, one element a thread
    tile   = the box of 8 rows x 64 bf16 of `keys` at row `row`, as TMA left it in shared memory (swizzle of 128 bytes)
    ranks[CTA] = 100 * CTAs of the cluster + rank of the CTA in it

`source` is read behind the grid dependency wait, after dependents were let go: chains of it check the PDL attribute.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from k3dsl.nvidia.launch import Launch, Param

THREADS: Final = 128
#: Where the tile lies in dynamic shared memory, bytes: behind what a kernel gets unasked.
TILE_AT: Final = 64 * 1024
TILE_ROWS, TILE_COLUMNS = 8, 64
TILE_BYTES: Final = TILE_ROWS * TILE_COLUMNS * 2
SMEM: Final = TILE_AT + TILE_BYTES + 1024  # and a barrier, and room to align


@dataclass(frozen=True)
class ProbeKey:
    """cluster: CTAs of a cluster along x."""

    cluster: int

    name: ClassVar[str] = "test_probe"
    device_module: ClassVar[str] = "probe.kernel"
    params: ClassVar[tuple[Param, ...]] = (
        Param("source", "ptr"),  # f32 [count]
        Param("count", "i32"),
        Param("keys", "tmap"),  # bf16 [rows, 64], boxes of 8 rows
        Param("scale", "f32"),
        Param("offset", "i64"),
        Param("out", "ptr"),  # f32 [count]
        Param("row", "i32"),
        Param("tile", "ptr"),  # 32-bit words [256]
        Param("ranks", "ptr"),  # i32 [CTAs]
    )

    @property
    def smem(self) -> int:
        return SMEM


def geometry(key: ProbeKey, *, count: int) -> Launch:
    """The launch for `count` elements: whole clusters."""
    blocks = -(-count // (THREADS * key.cluster)) * key.cluster
    return Launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), cluster=(key.cluster, 1, 1), smem=SMEM, pdl=True)
