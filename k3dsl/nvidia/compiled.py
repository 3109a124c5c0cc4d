"""The kernels of one shape, without a layer: `compile_core`."""

from typing import TYPE_CHECKING, NamedTuple

from k3dsl.capture import guard
from k3dsl.deployment import Deployment
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError
from k3dsl.nvidia.core import SERVED
from k3dsl.nvidia.layer import shape_keys
from k3dsl.nvidia.toolchain import build, compile_key
from k3dsl.preparing import detect_target

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache, Entry


class Compiled(NamedTuple):
    """The objects of one shape; core and merge are None where another package has the core."""

    query: "Entry"
    core: "Entry | None"
    merge: "Entry | None"
    value: "Entry"


def compile_core(
    batch: int,
    heads: int = 12,
    *,
    q: int = 1,
    kv_format: str = "fp8",
    page_size: int = 64,
    core: str = "auto",
    dcp: int = 1,
    interleave: int = 1,
    rank: int = 0,
    target: str | None = None,
    cache: "CompileCache | None" = None,
) -> Compiled:
    """The kernels of one (batch, q) from `cache`, built where they are missing. Needs no GPU if `target` is given.

    dcp, interleave, rank: of a group that shares contexts, and which of its ranks the kernels are for. Raises
    ConfigError for a shape that is not served, CaptureError inside a stream capture.
    """
    from k3dsl.cache import CompileCache

    guard("compile_core()")
    target = target or detect_target()
    if target is None:
        raise ConfigError(f"no GPU here: target must be one of {', '.join(SERVED)}")
    plan = Deployment(
        MlaDims(heads=heads),
        target=target,
        kv_format=kv_format,
        page_size=page_size,
        batches=(batch,),
        queries=(q,),
        core=core,
        dcp=dcp,
        interleave=interleave,
    )
    keys = shape_keys(
        target=target,
        heads=heads,
        kv_format=kv_format,
        page=page_size,
        core=plan.choice(batch, q).core,
        rows=batch,
        q=q,
        dcp=dcp,
        interleave=interleave,
        rank=rank,
    )
    store = cache if cache is not None else CompileCache()
    return Compiled(
        *(
            None if key is None else store.get_or_build(compile_key(key, target), build)  # type: ignore[arg-type]
            for key in (keys.query, keys.core, keys.merge, keys.value)
        )
    )
