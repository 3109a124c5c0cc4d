"""Which kernels one shape of a layer runs. `Deployment.keys` and `PreparedMla` both ask here, so they cannot differ."""

from dataclasses import dataclass
from typing import Final, TypeAlias

from k3dsl.errors import ConfigError
from k3dsl.nvidia import query as queries
from k3dsl.nvidia import value as values
from k3dsl.nvidia.core import hopper, tokenspeed
from k3dsl.nvidia.core.tokenspeed import TokenspeedKey
from k3dsl.nvidia.query import QueryKey
from k3dsl.nvidia.value import ValueKey

#: The bound for planning where a caller names none.
MAX_CONTEXT: Final = 131072
CoreKey: TypeAlias = hopper.HopperKey | TokenspeedKey
AnyKey: TypeAlias = QueryKey | CoreKey | hopper.MergeKey | ValueKey


@dataclass(frozen=True)
class ShapeKeys:
    """The kernel keys of a shape, in launch order. `core` is None where another package has all of it.

    `merge` is None for cores that have one of their own. tokenspeed's object depends on the number of SMs: there may be
    several in `cores`, one for each of the devices of a target.
    """

    query: QueryKey
    cores: tuple[CoreKey, ...]
    merge: hopper.MergeKey | None
    value: ValueKey

    @property
    def core(self) -> CoreKey | None:
        """The core's key, on the first of the devices that were asked for."""
        return self.cores[0] if self.cores else None

    def all(self) -> list[AnyKey]:
        """Those that k3dsl builds."""
        return [key for key in (self.query, *self.cores, self.merge, self.value) if key is not None]


def shape_keys(
    *,
    target: str,
    heads: int,
    kv_format: str,
    page: int,
    core: str,
    rows: int,
    q: int,
    max_context: int = MAX_CONTEXT,
    sm_counts: tuple[int, ...] | None = None,
) -> ShapeKeys:
    """The kernels for `rows` rows, q a request. Raises ConfigError with every reason why they cannot be built.

    sm_counts: of the devices that they are for, by default all that a target is sold with; max_context: see Deployment.
    """
    cores: tuple[CoreKey, ...] = ()
    merge = None
    if core == "hopper":
        attend = hopper.choose(heads=heads, q=q, page=page, kv=kv_format)
        cores, merge = (attend,), hopper.merge_key(attend, requests=rows // q)
    elif core == "tokenspeed":
        cores = tokenspeed.keys_for(
            target,
            sm_counts=sm_counts or (),
            heads=heads,
            q=q,
            requests=rows // q,
            page=page,
            max_context=max_context,
        )
    keys = ShapeKeys(
        query=queries.config(heads, rows, kv_format),
        cores=cores,
        merge=merge,
        value=ValueKey(heads, values.tile_for(rows)),
    )
    bad = queries.supports(keys.query, target) + values.supports(keys.value, target)
    for key in cores:
        bad += hopper.supports(key, target) if isinstance(key, hopper.HopperKey) else tokenspeed.supports(key, target)
    if merge is not None:
        bad += hopper.merge_supports(merge, target)
    if bad:
        raise ConfigError.of(f"rows={rows}, q={q} on {target}", bad)
    return keys
