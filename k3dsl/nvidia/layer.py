"""Which kernels one shape of a layer runs. `Deployment.keys` and `PreparedMla` both ask here, so they cannot differ."""

from dataclasses import dataclass
from typing import Final, TypeAlias

from k3dsl.errors import ConfigError
from k3dsl.nvidia import dcp as parallel
from k3dsl.nvidia import query as queries
from k3dsl.nvidia import value as values
from k3dsl.nvidia.core import hopper, hopper_dcp, tokenspeed
from k3dsl.nvidia.core.tokenspeed import TokenspeedKey
from k3dsl.nvidia.dcp import DcpQueryKey, DcpValueKey
from k3dsl.nvidia.host_object import host_isa
from k3dsl.nvidia.query import QueryKey
from k3dsl.nvidia.value import ValueKey

#: The bound for planning where a caller names none.
MAX_CONTEXT: Final = 131072
CoreKey: TypeAlias = hopper.HopperKey | TokenspeedKey
AnyKey: TypeAlias = QueryKey | DcpQueryKey | CoreKey | hopper.MergeKey | ValueKey | DcpValueKey


@dataclass(frozen=True)
class ShapeKeys:
    """The kernel keys of a shape, in launch order. `core` is None where another package has all of it.

    `merge` is None for cores that have one of their own. tokenspeed's object depends on the number of SMs: there may be
    several in `cores`, one for each of the devices of a target.
    """

    query: QueryKey | DcpQueryKey
    cores: tuple[CoreKey, ...]
    merge: hopper.MergeKey | None
    value: ValueKey | DcpValueKey

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
    sm_counts: tuple[int, ...] = (),
    host: str = "",
    dcp: int = 1,
    interleave: int = 1,
    rank: int | None = None,
    multicast: bool = False,
    p_dtype: str = "auto",
) -> ShapeKeys:
    """The kernels for `rows` rows, q a request. Raises ConfigError with every reason why they cannot be built.

    heads: of a rank; sm_counts: of the devices that they are for, by default all that are sold; max_context, host, dcp,
    interleave: see Deployment; rank: whose keys, by default every rank's; multicast: see DcpBox.
    p_dtype: type of the softmax weights in the hopper core, "auto" or one of hopper.P_DTYPES[kv_format].
    """
    if dcp > 1:
        bad = parallel.rank_problems(dcp, heads)
        if bad:
            raise ConfigError.of(f"rows={rows}, q={q} on {target}", bad)
    cores: tuple[CoreKey, ...] = ()
    merge = None
    if core == "hopper":
        attend = (hopper_dcp if dcp > 1 else hopper).choose(
            heads=dcp * heads, q=q, page=page, kv=kv_format, p=None if p_dtype == "auto" else p_dtype
        )
        cores, merge = (attend,), hopper.merge_key(attend, requests=rows // q)
    elif core == "tokenspeed":
        cores = tokenspeed.keys_for(
            target,
            host=host or host_isa(),
            sm_counts=sm_counts,
            ranks=dcp,
            rank=rank,
            heads=dcp * heads,
            q=q,
            requests=rows // q,
            page=page,
            max_context=parallel.local_bound(max_context, dcp),
            interleave=interleave,
        )
    keys = ShapeKeys(
        query=parallel.query_config(heads, rows, kv_format, dcp, multicast)
        if dcp > 1
        else queries.config(heads, rows, kv_format),
        cores=cores,
        merge=merge,
        value=parallel.DcpValueKey(heads, dcp, values.tile_for(rows))
        if dcp > 1
        else ValueKey(heads, values.tile_for(rows)),
    )
    bad = []
    for key in keys.all():
        bad += _supports(key, target)
    if bad:
        raise ConfigError.of(f"rows={rows}, q={q} on {target}", bad)
    return keys


def _supports(key: AnyKey, target: str) -> list[str]:
    if isinstance(key, QueryKey):
        return queries.supports(key, target)
    if isinstance(key, DcpQueryKey):
        return parallel.query_supports(key, target)
    if isinstance(key, ValueKey):
        return values.supports(key, target)
    if isinstance(key, DcpValueKey):
        return parallel.value_supports(key, target)
    if isinstance(key, hopper.MergeKey):
        return hopper.merge_supports(key, target)
    return hopper.supports(key, target) if isinstance(key, hopper.HopperKey) else tokenspeed.supports(key, target)
