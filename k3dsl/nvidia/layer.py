"""Which kernels one shape of a layer runs. `Deployment.keys` and `PreparedMla` both ask here, so that they cannot differ."""

from dataclasses import dataclass

from k3dsl.errors import ConfigError
from k3dsl.nvidia import query, value
from k3dsl.nvidia.core import hopper


@dataclass(frozen=True)
class ShapeKeys:
    """The kernel keys of a shape, in launch order. `core` and `merge` are None where another package has the core."""

    query: query.QueryKey
    core: hopper.HopperKey | None
    merge: hopper.MergeKey | None
    value: value.ValueKey

    def all(self) -> list[query.QueryKey | hopper.HopperKey | hopper.MergeKey | value.ValueKey]:
        """Those that k3dsl builds."""
        return [key for key in (self.query, self.core, self.merge, self.value) if key is not None]


def shape_keys(*, target: str, heads: int, kv_format: str, page: int, core: str, rows: int, q: int) -> ShapeKeys:
    """The kernels for `rows` rows, q a request. Raises ConfigError with every reason why they cannot be built."""
    attend = hopper.choose(heads=heads, q=q, page=page, kv=kv_format) if core == "hopper" else None
    keys = ShapeKeys(
        query=query.config(heads, rows, kv_format),
        core=attend,
        merge=hopper.merge_key(attend, requests=rows // q) if attend is not None else None,
        value=value.ValueKey(heads, value.tile_for(rows)),
    )
    bad = query.supports(keys.query, target) + value.supports(keys.value, target)
    if keys.core is not None and keys.merge is not None:
        bad += hopper.supports(keys.core, target) + hopper.merge_supports(keys.merge, target)
    if bad:
        raise ConfigError.of(f"rows={rows}, q={q} on {target}", bad)
    return keys
