"""`k3dsl plan`: what a deployment needs, and whether it is there. Builds nothing."""

from typing import Any

from k3dsl.cli import planargs as args
from k3dsl.cli.console import Json, emit, out, table
from k3dsl.deployment import Deployment


def plan(
    plan: args.PlanFile = None,
    model: args.Model = None,
    tp: args.Tp = None,
    target: args.TargetList = None,
    kv_format: args.KvFormat = None,
    batches: args.Batches = None,
    queries: args.Queries = None,
    page_size: args.PageSize = None,
    max_context: args.MaxContext = None,
    core: args.Core = None,
    dcp: args.Dcp = None,
    interleave: args.Interleave = None,
    epilogues: args.Epilogues = None,
    host: args.Host = None,
    p_dtype: args.PDtype = None,
    json: Json = False,
) -> None:
    """Shows the core of every prepared (rows, q), why it is that one, and every key. Builds nothing.

    Example: k3dsl plan --target sm_90a --batches 1-8 --queries 1,4 --json
    """
    given = args.PlanArguments(
        plan,
        model,
        tp,
        target,
        kv_format,
        batches,
        queries,
        page_size,
        max_context,
        core,
        dcp,
        interleave,
        epilogues,
        host,
        p_dtype,
    )
    plans = given.deployments()
    shapes, keys = shape_rows(plans), key_rows(plans)
    if json:
        emit({"shapes": shapes, "keys": keys})
        return
    cores = table("Shapes", "target", "rows", "q", "core", "reason", right=("rows", "q"))
    for s in shapes:
        cores.add_row(s["target"], str(s["rows"]), str(s["q"]), s["core"], s["reason"])
    objects = table("Keys", "key", "kernel", "params", "target", "present")
    for k in keys:
        params = " ".join(f"{name}={value}" for name, value in sorted(k["params"].items()))
        objects.add_row(k["digest"][:12], k["kernel"], params, k["target"], "yes" if k["present"] else "no")
    console = out()
    console.print(cores)
    console.print(objects)
    console.print(f"{sum(k['present'] for k in keys)} of {len(keys)} keys present")


def shape_rows(plans: list[Deployment]) -> list[dict[str, Any]]:
    """Every prepared (rows, q) with its core and the reason."""
    found = []
    for plan in plans:
        for rows, q in plan.shapes():
            choice = plan.choice(rows, q)
            found.append(
                {"rows": rows, "q": q, "core": choice.core, "reason": choice.reason, "target": str(plan.target)}
            )
    return found


def key_rows(plans: list[Deployment]) -> list[dict[str, Any]]:
    """Every key, each once, and whether the cache has it."""
    from k3dsl.cache import CompileCache

    cache = CompileCache()
    keys = dict.fromkeys(key for plan in plans for key in plan.keys())  # noqa: SIM118 - a method, not a dict's
    return [
        {
            "digest": key.digest,
            "kernel": key.kernel,
            "params": dict(key.params),
            "target": key.target,
            "present": key in cache,
        }
        for key in keys
    ]
