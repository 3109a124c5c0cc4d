"""Host facts of the `hopper` core over a shard of a context that ranks share, for q > 1 (kernels/hopper_dcp.py).

With one query token every key of the shard is visible and the plain core serves. With more, which keys a token sees
follows from the length of the whole context: `totals`, the same on every rank.
"""

from dataclasses import dataclass
from typing import ClassVar

from k3dsl.nvidia.core import hopper
from k3dsl.nvidia.launch import Param


@dataclass(frozen=True)
class HopperDcpKey(hopper.HopperKey):
    """A HopperKey whose launch also says whose shard of what the cache is. heads: those of all ranks."""

    name: ClassVar[str] = "mla_hopper_dcp"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.hopper_dcp"

    @property
    def params(self) -> tuple[Param, ...]:
        """The plain core's, then the context's."""
        return (
            *hopper.HopperKey.params.fget(self),  # type: ignore[attr-defined]
            Param("totals", "ptr"),  # int32 [requests]: tokens of the whole context, this call's included
            Param("ranks", "i32"),
            Param("rank", "i32"),
            Param("interleave", "i32"),  # consecutive positions of a rank
        )


def choose(*, heads: int, q: int, page: int, kv: str, p: str | None = None) -> hopper.HopperKey:
    """The key that serves a shard: the plain core's for q = 1. `heads`: those of all ranks."""
    key = hopper.choose(heads=heads, q=q, page=page, kv=kv, p=p)
    return key if q == 1 else HopperDcpKey(key.heads, key.q, key.page, key.kv, key.p)
