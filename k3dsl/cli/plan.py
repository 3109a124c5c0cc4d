"""`k3dsl plan`: what a deployment needs, and whether it is there. Builds nothing."""

from typing import Any

from k3dsl.cache.key import short
from k3dsl.cli import planargs as args
from k3dsl.cli.console import Json, emit, out, table
from k3dsl.deployment import Deployment


@args.takes_plan
def plan(
    given: args.PlanArguments,
    json: Json = False,
) -> None:
    """Shows the core of every prepared (rows, q), why it is that one, and every key. Builds nothing.

    What all keys of a kernel have alike stands below the table, once.

    Example: k3dsl plan --target sm_90a --batches 1-8 --queries 1,4 --json
    """
    plans = given.deployments()
    shapes, keys = shape_rows(plans), key_rows(plans)
    if json:
        emit({"shapes": shapes, "keys": keys})
        return
    cores = table("Shapes", "target", "rows", "q", "core", "reason", right=("rows", "q"))
    for s in shapes:
        cores.add_row(s["target"], str(s["rows"]), str(s["q"]), s["core"], s["reason"])
    objects = table("Keys", "key", "kernel", "params", "target", "present")
    alike = _alike(keys)
    for k in keys:
        own = dict(k["params"].items() - alike[k["kernel"]])
        objects.add_row(short(k["digest"]), k["kernel"], _words(own), k["target"], "yes" if k["present"] else "no")
    console = out()
    console.print(cores)
    console.print(objects)
    for kernel, params in alike.items():
        if params:
            console.print(f"every {kernel}: {_words(dict(params))}")
    console.print(f"{sum(k['present'] for k in keys)} of {len(keys)} keys present")


def _alike(keys: list[dict[str, Any]]) -> dict[str, set[tuple[str, Any]]]:
    """Kernel -> what all its keys have alike: nothing for a kernel with one key."""
    found: dict[str, list[set[tuple[str, Any]]]] = {}
    for k in keys:
        found.setdefault(k["kernel"], []).append(set(k["params"].items()))
    return {kernel: set.intersection(*each) if len(each) > 1 else set() for kernel, each in found.items()}


def _words(params: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(params.items()))


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
