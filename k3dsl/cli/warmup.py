"""`k3dsl warmup`: every key of a deployment built, with no GPU."""

import os
from typing import Annotated, Any

import typer

from k3dsl.cli import planargs as args
from k3dsl.cli.console import FINDING, Json, emit, err, out
from k3dsl.deployment import Deployment
from k3dsl.preparing import Progress, Report, lacking
from k3dsl.preparing import warmup as warm


@args.takes_plan
def warmup(
    given: args.PlanArguments,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers at work.", show_default="cores")] = os.cpu_count() or 1,
    json: Json = False,
) -> None:
    """Builds every kernel that a deployment needs. No GPU is used.

    Ends with "N of N keys ready"; exit 1 if a key failed. Ctrl-C leaves a consistent cache.

    Example: k3dsl warmup --target sm_90a,sm_100a --batches 1-8,16,32,64 --queries 1,4
    """
    plans = given.deployments()
    from k3dsl.cache import CompileCache

    cache = CompileCache()
    if cache.read_only:
        err().print("K3DSL_CACHE: what is built here is checked and not kept", markup=False)
    for what in lacking(plans, cache):  # said before minutes of building what can be built
        err().print(what, markup=False)
    try:
        report = run(plans, cache, jobs)
    except KeyboardInterrupt:
        wanted = {key for plan in plans for key in Deployment.keys(plan)}
        there = sum(key in cache for key in wanted)
        text = f"interrupted: {there} of {len(wanted)} keys ready; the same command goes on from here"
        err().print(text, markup=False)
        raise
    if json:
        counts = {name: getattr(report, name) for name in ("keys", "built", "hit", "failed", "seconds")}
        failures = [
            {"digest": k.digest, "kernel": k.kernel, "params": dict(k.params), "target": k.target, "error": error}
            for k, error in report.failures
        ]
        emit({**counts, "targets": [p.target for p in plans], "jobs": jobs, "failures": failures})
    else:
        for key, error in report.failures:
            err().print(f"failed: {key.kernel} {dict(key.params)} {key.target} {key.short}\n  {error}", markup=False)
        ready = report.keys - report.failed
        out().print(
            f"{ready} of {report.keys} keys ready ({report.built} built, {report.hit} hit, {report.failed} failed, "
            f"{report.seconds:.1f} s)"
        )
    if not report.ok:
        raise typer.Exit(FINDING)


def run(plans: list[Deployment], cache: Any, jobs: int) -> Report:
    """A warm-up with a progress bar on stderr: the kernel at work and the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = err()
    columns = (
        TextColumn("{task.fields[what]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("warmup", total=None, what="")

        def show(now: Progress) -> None:
            bar.update(task, total=now.total, completed=now.done, what=", ".join(now.at_work) or "done")

        return warm(plans, cache, jobs=jobs, progress=show)
