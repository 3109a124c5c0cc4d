"""What the host spends on an eager `run()`: the whole call, its launches alone, and the same layer in torch ops.

    k3dsl bench --what host [--json FILE]

The stream is never full: batches of calls are queued on an idle device, and the device catches up outside the timing.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from k3dsl import CompileCache, Deployment, MlaDims
from k3dsl.errors import ConfigError
from k3dsl.preparing import detect_target, prepare

from . import harness, layer

#: Calls that are queued between two synchronizations: far below what a stream holds.
QUEUED: Final = 20
ROUNDS: Final = 200


def host_us(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """us of host time a call: the median over rounds of QUEUED calls each."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(QUEUED):
            call()
        times.append((time.perf_counter() - start) * 1e6 / QUEUED)
    torch.cuda.synchronize()
    return statistics.median(times)


def run(*, against: str | None = None, commit: str | None = None, quick: bool = False, **_: Any) -> dict[str, Any]:
    """The document: conditions, and host us for one and for 64 rows."""
    if against not in (None, "torch"):
        raise ConfigError(f"against={against!r} must be torch")
    harness.require_gpu()
    dims = MlaDims.kimi_k3(8)
    plan = Deployment(dims, target=str(detect_target()), batches=(1, 64))
    cache = CompileCache()
    rows = [_measure(plan, batch, cache, 40 if quick else ROUNDS) for batch in (1, 64)]
    method = f"host clock around {QUEUED} queued calls on an idle stream, median of {ROUNDS} rounds; context 1024, fp8"
    return {"conditions": harness.conditions(commit, method), "rows": rows}


def _measure(plan: Deployment, rows: int, cache: CompileCache, rounds: int) -> dict[str, Any]:
    one = layer.Layer(plan.dims, rows, 1024, plan.kv_format, "cuda", 0)
    prepared = prepare(plan, one.weights, cache=cache, device="cuda")
    prepared.prepare_cache(one.cache)
    step = prepared._steps[rows, 1]
    stream = torch.cuda.current_stream().cuda_stream

    def launches() -> None:
        step.query.launch(stream)
        step.core.launch(stream)
        step.value.launch(stream)

    whole = layer._call(prepared, one)
    whole()
    total, launched = host_us(whole, rounds), host_us(launches, rounds)
    return {
        "rows": rows,
        "us": total,
        "launch_us": launched,
        "python_us": total - launched,
        "torch_us": host_us(lambda: layer.torch_layer(one), max(rounds // 10, 5)),
    }


def show(document: dict[str, Any], console: Any) -> None:
    """A table for people."""
    from k3dsl.cli.console import table

    columns = ("rows", "run() us", "its 4 launches us", "the rest us", "torch ops us")
    made = table(f"Host time of an eager layer on {document['conditions']['cpu']}", *columns, right=columns)
    for row in document["rows"]:
        made.add_row(str(row["rows"]), *(f"{row[n]:.2f}" for n in ("us", "launch_us", "python_us", "torch_us")))
    console.print(made)
