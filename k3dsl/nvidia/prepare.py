"""From a deployment to its prepared layers: `k3dsl.prepare` on NVIDIA."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from k3dsl.checks import require
from k3dsl.deployment import Deployment
from k3dsl.errors import ConfigError
from k3dsl.nvidia.prepared import PreparedMla
from k3dsl.nvidia.query import ELEMENT
from k3dsl.nvidia.runtime import runtime_of
from k3dsl.weights import require_attention

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache


def prepare_layer(
    plan: Deployment,
    attention: Any,
    *,
    cache: "CompileCache | None" = None,
    device: "torch.device | str | int | None" = None,
    dcp: Any = None,
    parity: int = 0,
) -> PreparedMla:
    """The PreparedMla of a deployment, see `k3dsl.prepare`."""
    _require_box(plan, dcp)
    where = _device(attention, device)
    here = runtime_of(where)
    if here.device.target != plan.target:
        raise ConfigError(
            f"device={str(where)!r} ({here.device.name}) runs {here.device.target or 'no target'}, the plan is for "
            f"target={plan.target!r}"
        )
    require_attention(attention, plan.dims, where)
    here.guard("prepare()")
    return PreparedMla(
        attention,
        {rows: plan.dims.pitch for rows, _ in plan.shapes()},
        here.query_scratch(plan.dims.heads, ELEMENT[plan.kv_format]),
        max_context=plan.max_context,
        core=plan.core,
        queries=plan.queries,
        page_size=plan.page_size,
        p_dtype=plan.p_dtype,
        cache=cache,
        dcp=dcp,
        parity=parity,
    )


def _require_box(plan: Deployment, box: Any) -> None:
    """Raises ConfigError unless there is a box of the plan's ranks exactly where the plan has more than one."""
    if plan.dcp == 1 and box is None:
        return
    ranks = getattr(box, "size", 1)
    bad = [f"dcp={plan.dcp} of the plan, the box has {ranks} ranks"] if plan.dcp != ranks else []
    if box is None:
        bad = [f"dcp={plan.dcp} needs dcp=k3dsl.nvidia.DcpBox(group, heads={plan.dims.heads}, ...)"]
    else:
        for name in ("interleave", "kv_format"):
            ours, theirs = getattr(plan, name), getattr(box, name, None)
            bad += [f"{name}={ours!r} of the plan, the box has {theirs!r}"] if ours != theirs else []
    require("prepare", bad)


def _device(attention: Any, device: "torch.device | str | int | None") -> torch.device:
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    weight = getattr(attention, "W_UK_T", None)
    return weight.device if isinstance(weight, Tensor) else torch.device("cuda")
