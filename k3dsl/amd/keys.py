"""What a gfx950 deployment needs: its rules and its kernels. No torch, no FlyDSL.

With an fp8 cache that is mla_pre, after which AMD's own attention runs; with fp8_ds_mla records it is sparse MLA.
"""

from typing import TYPE_CHECKING, Any, Final

from k3dsl.amd.layer import builds
from k3dsl.amd.mla_pre.key import HEADS, MAX_TOKENS, RANKS
from k3dsl.amd.sparse_mla.key import MAX_HEADS, WARM_HEADS, warm_keys

if TYPE_CHECKING:
    from k3dsl.deployment import Deployment

TARGET: Final = "gfx950"
#: What attends after mla_pre. The package is AMD's; where it is missing the reference stands in.
CORE: Final = "aiter"
SPARSE: Final = "sparse"
#: Cache format -> the core that reads it, and why that one.
CORES: Final = {
    "fp8": (CORE, "after mla_pre; the reference where the package amd-aiter is missing"),
    "fp8_ds_mla": (SPARSE, "the core of fp8_ds_mla records: k3dsl.amd.PreparedSparseMla"),
}
#: Rows of a step that are prepared where none are named.
BATCHES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16)


def choice(plan: "Deployment") -> tuple[str, str]:
    """The core of every shape, and why it is that one."""
    return CORES[plan.kv_format]


def problems(plan: "Deployment") -> list[str]:
    """What of a plan, past the numbers' own ranges, gfx950 does not serve."""
    bad = []
    known = plan.kv_format in tuple(CORES)  # which may be asked of a list, too
    if not known:
        bad.append(f"kv_format={plan.kv_format!r} must be one of {', '.join(CORES)} on {TARGET}")
    if type(plan.page_size) is not int or plan.page_size < 1:
        bad.append(f"page_size={plan.page_size!r} must be a positive int")
    core = CORES[plan.kv_format][0] if known else CORE
    if plan.core not in ("auto", core):
        bad.append(f"core={plan.core!r} must be auto or {core} on {TARGET} with a cache of {plan.kv_format}")
    return bad + (_bad_sparse(plan) if core == SPARSE else _bad_pre(plan))


def _bad_sparse(plan: "Deployment") -> list[str]:
    bad = []
    if type(plan.dcp) is not int or plan.dcp != 1:
        bad.append(f"dcp={plan.dcp!r} must be 1 on {TARGET} with a cache of {plan.kv_format}")
    if type(plan.interleave) is not int or plan.interleave != 1:
        bad.append(f"interleave={plan.interleave!r} must be 1 on {TARGET}")
    heads = getattr(plan.dims, "heads", HEADS)
    if type(heads) is int and heads > MAX_HEADS:
        bad.append(f"dims.heads={heads!r} must be 1 to {MAX_HEADS} on {TARGET} with a cache of {plan.kv_format}")
    return bad


def _bad_pre(plan: "Deployment") -> list[str]:
    bad = []
    if type(plan.dcp) is not int or plan.dcp not in RANKS:
        bad.append(f"dcp={plan.dcp!r} must be one of {', '.join(map(str, RANKS))} on {TARGET}")
    if type(plan.interleave) is not int or plan.interleave != 1:
        bad.append(f"interleave={plan.interleave!r} must be 1 on {TARGET}: {CORE} places keys round robin")
    if isinstance(plan.batches, tuple):
        wide = [b for b in plan.batches if type(b) is int and b > MAX_TOKENS]
        bad += [f"batches: {b} must be {MAX_TOKENS} or less on {TARGET}: mla_pre has 32 threads a row" for b in wide]
    heads = getattr(plan.dims, "heads", HEADS)
    if heads != HEADS:
        bad.append(f"dims.heads={heads!r} must be {HEADS} on {TARGET}")
    return bad


def deployment_keys(plan: "Deployment") -> list[Any]:
    """Kernel keys of a plan: mla_pre for every prepared width and 1 to 8 residual blocks, with a delta to add; or every
    build of sparse MLA for the usual head counts and the plan's, which its warm-up asks for."""
    if CORES[plan.kv_format][0] == SPARSE:
        return list(warm_keys(tuple(dict.fromkeys((*WARM_HEADS, plan.dims.heads)))))
    rows = [rows for rows, _ in plan.shapes()]
    return list(builds(rows, ranks=plan.dcp, eps=plan.dims.eps))
