"""The compile cache: how fast it hits, how often it builds, what kills and faults do to it.

    k3dsl bench --what cache [--quick] [--against PYTHON] [--json FILE]

No GPU takes part. `--against` names the Python of an environment with `triton` and `quack-kernels`: their caches then
go through the same faults, with kernels that they really compile. As root, for the read-only mounts.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from k3dsl.cache import CompileCache
from k3dsl.errors import ConfigError

from . import harness
from .cache_faults import faults, worker
from .cache_faults.worker import build_of, key_of

REPOSITORY: Final = Path(__file__).resolve().parents[2]
#: What each figure must be at most: us, ms, ms.
LIMITS: Final = {"memory_us": 5.0, "disk_ms": 2.0, "deployment_ms": 150.0}

DEPLOYMENT: Final = """
import sys
from k3dsl.cache import Built, CompileCache
from k3dsl.deployment import Deployment
from k3dsl.dims import MlaDims
plan = Deployment(MlaDims.kimi_k3(8), target="sm_90a", batches=(1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64), queries=(1, 4))
cache = CompileCache(sys.argv[1])
if len(sys.argv) > 2:
    for n, key in enumerate(plan.keys()):
        cache.get_or_build(key, lambda key: Built(bytes([n % 251 + 1]) * 30_000, "kernel.cubin"))
else:
    keys = list(plan.keys())
    assert all(cache.get(key) is not None for key in keys)
    assert not {"cutlass", "torch"} & set(sys.modules), "a DSL or torch was imported"
    print(len(keys))
"""


def _best(work: Callable[[], Any], count: int, blocks: int = 15) -> float:
    """Seconds of one `work()`: the best of blocks of `count`, as whatever else runs here only ever adds."""
    times = []
    for _ in range(blocks):
        began = time.perf_counter()
        for _ in range(count):
            work()
        times.append((time.perf_counter() - began) / count)
    return min(times)


def lookups(place: Path) -> dict[str, float]:
    """Hits from memory (the entry held by somebody; dropped each time) and from the disk, checksum and all."""
    cache = CompileCache(place / "lookups")
    keys = [key_of(n) for n in range(50)]
    for key in keys:
        cache.get_or_build(key, build_of)
    dropped = _best(lambda: cache.get(keys[0]), 2000)
    held = cache.get(keys[0])
    assert held is not None
    kept = _best(lambda: cache.get(keys[0]), 2000)
    disk = _best(lambda: cache.reread(keys[1]), 200)
    return {"memory_us": kept * 1e6, "memory_dropped_us": dropped * 1e6, "disk_ms": disk * 1e3}


def deployment(place: Path, repeats: int) -> dict[str, Any]:
    """A new process that loads all keys of a TP8 deployment, against one that does nothing."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode

    def run(*arguments: str) -> tuple[float, str]:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", *arguments], env=environ, capture_output=True, text=True, check=True
        )
        return time.perf_counter() - began, done.stdout.strip()

    run(DEPLOYMENT, str(place / "deployment"), "build")
    _, keys = run(DEPLOYMENT, str(place / "deployment"))
    loads = [run(DEPLOYMENT, str(place / "deployment"))[0] for _ in range(repeats)]
    starts = [run("pass")[0] for _ in range(repeats)]
    return {
        "keys": int(keys),
        "deployment_ms": (min(loads) - min(starts)) * 1e3,
        "deployment_median_ms": (statistics.median(loads) - statistics.median(starts)) * 1e3,
        "interpreter_ms": min(starts) * 1e3,
    }


def cold(place: Path, processes: int = 8) -> dict[str, Any]:
    """Processes that all want the same 50 keys, none of which is there."""
    marks, start = place / "marks", place / "start"
    marks.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(worker.__file__), str(place / "cold"), str(marks), str(start)]
    children = [subprocess.Popen(command, env=environ) for _ in range(processes)]
    while len(list(place.glob("ready.*"))) < processes:
        time.sleep(0.01)
    began = time.perf_counter()
    start.touch()
    codes = [child.wait(300) for child in children]
    seconds = time.perf_counter() - began
    builds = [path.name.partition(".")[0] for path in marks.iterdir()]
    return {
        "processes": processes,
        "keys": worker.KEYS,
        "builds": len(builds),
        "built_twice": len(builds) - len(set(builds)),
        "failed_processes": sum(code != 0 for code in codes),
        "seconds": seconds,
    }


def kills(place: Path, count: int) -> dict[str, Any]:
    """kill -9 at random points of processes that build and remove; after each, every entry is checked."""
    root, generator, torn, broken = place / "kills", random.Random(1), 0, 0
    for _ in range(count):
        seed = generator.randrange(2**32)
        pid = os.fork()
        if pid == 0:
            try:
                _for_ever(root, random.Random(seed))
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.002, 0.08))
        os.kill(pid, signal.SIGKILL)
        broken += not os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        torn += len(CompileCache(root).verify().corrupt)
    cache = CompileCache(root, lock_timeout=5)
    began = time.perf_counter()
    wrong = sum(
        cache.get_or_build(key_of(n), lambda key: build_of(key, 200_000)).payload
        != build_of(key_of(n), 200_000).payload
        for n in range(12)
    )
    stats = cache.stats()
    return {
        "kills": count,
        "torn_entries": torn,
        "wrong_kernels": wrong,
        "stuck_locks": stats["session"]["lock_timeout"],
        "failed_processes": broken,
        "entries_after": stats["entries"],
        "healing_seconds": time.perf_counter() - began,
    }


def _for_ever(root: Path, generator: random.Random) -> None:
    cache = CompileCache(root)
    while True:
        key = key_of(generator.randrange(12))
        assert cache.get_or_build(key, lambda key: build_of(key, 200_000)).payload == build_of(key, 200_000).payload
        cache.remove(key_of(generator.randrange(12)))


def _versions(python: str) -> dict[str, str]:
    try:
        return faults.versions(python)
    except (OSError, subprocess.CalledProcessError, ValueError):
        needed = "triton, quack-kernels and nvidia-cutlass-dsl"
        raise ConfigError(f"against={python!r} must be the Python of an environment with {needed}") from None


def run(against: str | None = None, commit: str | None = None, quick: bool = False) -> dict[str, Any]:
    """All figures, with the conditions."""
    versions = _versions(against) if against is not None else None
    with tempfile.TemporaryDirectory(prefix="k3dsl-bench-cache-") as name:
        place = Path(name)
        figures = {**lookups(place), **deployment(place, 5 if quick else 15)}
        document: dict[str, Any] = {
            "conditions": {
                **harness.conditions(commit, "best of 15 blocks or processes; a 30 KB object; wall time"),
                "filesystem": subprocess.run(
                    ["stat", "-f", "-c", "%T", name], capture_output=True, text=True
                ).stdout.strip(),
                "load": os.getloadavg()[0],
                "cores": os.cpu_count(),
            },
            "limits": LIMITS,
            "figures": figures,
            "cold": cold(place),
            "kills": kills(place, 20 if quick else 200),
        }
    subjects = [faults.OURS, *(faults.rivals(against) if against else [])]
    if versions:
        document["conditions"]["against"] = versions
    document["faults"] = faults.observe(subjects, quick)
    document["ours_red"] = sum(
        faults.is_red(word) for counts in document["faults"]["k3dsl"].values() for word in counts
    )
    return document


def show(document: dict[str, Any], console: Any) -> None:
    """Tables for people."""
    from rich.text import Text

    from k3dsl.cli.console import table

    figures, limits = document["figures"], document["limits"]
    made = table(
        f"Lookups on {document['conditions']['cpu']}", "what", "measured", "at most", right=("measured", "at most")
    )
    made.add_row("hit in memory, us", f"{figures['memory_us']:.2f}", f"{limits['memory_us']:g}")
    made.add_row(
        "the same, entry dropped each time, us", f"{figures['memory_dropped_us']:.2f}", f"{limits['memory_us']:g}"
    )
    made.add_row("hit on disk, 30 KB checked, ms", f"{figures['disk_ms']:.3f}", f"{limits['disk_ms']:g}")
    made.add_row(
        f"new process loads {figures['keys']} keys, ms",
        f"{figures['deployment_ms']:.0f}",
        f"{limits['deployment_ms']:g}",
    )
    console.print(made)
    cold, killed = document["cold"], document["kills"]
    console.print(
        f"{cold['processes']} processes, {cold['keys']} cold keys: {cold['builds']} builds in {cold['seconds']:.1f} s\n"
        f"{killed['kills']} kills: {killed['torn_entries']} torn entries, {killed['wrong_kernels']} wrong kernels, "
        f"{killed['stuck_locks']} stuck locks; healed in {killed['healing_seconds']:.1f} s"
    )
    names = list(document["faults"])
    made = table("The same faults", "fault", *names)
    for fault in document["faults"][names[0]]:
        cells = []
        for name in names:
            words = document["faults"][name][fault]
            color = "red" if any(faults.is_red(word) for word in words) else "green"
            cells.append(Text("; ".join(_times(word, count) for word, count in words.items()), style=color))
        made.add_row(fault, *cells)
    console.print(made)


def _times(word: str, count: int) -> str:
    return word if count == 1 else f"{word} (x{count})"
