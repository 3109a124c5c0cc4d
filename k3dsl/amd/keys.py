"""What a gfx950 deployment needs: its rules and its kernels. No torch, no FlyDSL."""

from typing import TYPE_CHECKING, Any, Final

from k3dsl.amd.layer import builds
from k3dsl.amd.mla_pre.key import HEADS, MAX_TOKENS, RANKS

if TYPE_CHECKING:
    from k3dsl.deployment import Deployment

TARGET: Final = "gfx950"
#: What attends after mla_pre. The package is AMD's; where it is missing the reference stands in.
CORE: Final = "aiter"
#: Rows of a step that are prepared where none are named.
BATCHES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16)
KV_FORMATS: Final = ("fp8",)


def problems(plan: "Deployment") -> list[str]:
    """What of a plan, past the numbers' own ranges, gfx950 does not serve."""
    bad = []
    if plan.kv_format not in KV_FORMATS:
        bad.append(f"kv_format={plan.kv_format!r} must be one of {', '.join(KV_FORMATS)} on {TARGET}")
    if type(plan.page_size) is not int or plan.page_size < 1:
        bad.append(f"page_size={plan.page_size!r} must be a positive int")
    if plan.core not in ("auto", CORE):
        bad.append(f"core={plan.core!r} must be auto or {CORE} on {TARGET}")
    if type(plan.dcp) is not int or plan.dcp not in RANKS:
        bad.append(f"dcp={plan.dcp!r} must be one of {', '.join(map(str, RANKS))} on {TARGET}")
    if plan.interleave != 1:
        bad.append(f"interleave={plan.interleave!r} must be 1 on {TARGET}: {CORE} places keys round robin")
    if isinstance(plan.batches, tuple):
        wide = [b for b in plan.batches if type(b) is int and b > MAX_TOKENS]
        bad += [f"batches: {b} must be {MAX_TOKENS} or less on {TARGET}: mla_pre has 32 threads a row" for b in wide]
    heads = getattr(plan.dims, "heads", HEADS)
    if heads != HEADS:
        bad.append(f"dims.heads={heads!r} must be {HEADS} on {TARGET}")
    return bad


def deployment_keys(plan: "Deployment") -> list[Any]:
    """Kernel keys of every prepared width: mla_pre for 1 to 8 residual blocks, with a delta to add."""
    rows = [rows for rows, _ in plan.shapes()]
    return list(builds(rows, ranks=plan.dcp, eps=plan.dims.eps))
