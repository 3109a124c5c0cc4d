"""Which kernels one shape of a layer runs. `Deployment.keys` and `PreparedMla` both ask here, so they cannot differ."""

from dataclasses import dataclass

from k3dsl.errors import ConfigError
from k3dsl.nvidia import query as queries
from k3dsl.nvidia import value as values
from k3dsl.nvidia.core import hopper
from k3dsl.nvidia.query import QueryKey
from k3dsl.nvidia.value import ValueKey


@dataclass(frozen=True)
class ShapeKeys:
    """The kernel keys of a shape, in launch order. `core` and `merge` are None where another package has the core."""

    query: QueryKey
    core: hopper.HopperKey | None
    merge: hopper.MergeKey | None
    value: ValueKey

    def all(self) -> list[QueryKey | hopper.HopperKey | hopper.MergeKey | ValueKey]:
        """Those that k3dsl builds."""
        return [key for key in (self.query, self.core, self.merge, self.value) if key is not None]


def shape_keys(*, target: str, heads: int, kv_format: str, page: int, core: str, rows: int, q: int) -> ShapeKeys:
    """The kernels for `rows` rows, q a request. Raises ConfigError with every reason why they cannot be built."""
    attend = hopper.choose(heads=heads, q=q, page=page, kv=kv_format) if core == "hopper" else None
    keys = ShapeKeys(
        query=queries.config(heads, rows, kv_format),
        core=attend,
        merge=hopper.merge_key(attend, requests=rows // q) if attend is not None else None,
        value=ValueKey(heads, values.tile_for(rows)),
    )
    bad = queries.supports(keys.query, target) + values.supports(keys.value, target)
    if keys.core is not None and keys.merge is not None:
        bad += hopper.supports(keys.core, target) + hopper.merge_supports(keys.merge, target)
    if bad:
        raise ConfigError.of(f"rows={rows}, q={q} on {target}", bad)
    return keys
