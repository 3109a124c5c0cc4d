"""How everything here is measured: graphs of calls that share no data, and the conditions beside every number."""

import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

from k3dsl import __version__
from k3dsl.errors import ToolchainError

Call = Callable[[], Any]
#: Bytes that calls rotate over, at least: several times the 50 MB of an H200's L2.
ROTATED: Final = 320 << 20
_SMI: Final = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def require_gpu() -> None:
    """Raises ToolchainError without a GPU."""
    if not torch.cuda.is_available():
        raise ToolchainError("nothing to measure: torch sees no GPU here")


def conditions(commit: str | None = None, method: str = "") -> dict[str, Any]:
    """Where, when and with what: what a number means nothing without. Clocks are those at the time of the call."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or _head(),
        "k3dsl": __version__,
        "gpu": smi(),
        "cpu": cpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "method": method,
    }


def smi() -> dict[str, str]:
    """What nvidia-smi says of the device in use; empty where it is not there."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    try:
        lines = subprocess.check_output(query, text=True, stderr=subprocess.DEVNULL).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(_SMI, lines[0].split(", "), strict=True)) if lines else {}


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _head() -> str:
    here = Path(__file__).resolve().parent
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def rotation(bytes_per_call: int, most: int = 24) -> int:
    """How many calls on data of their own it takes to pass ROTATED bytes, 4 to `most`."""
    return max(4, min(most, -(-ROTATED // max(bytes_per_call, 1))))


def graph_us(calls: Sequence[Call], repeats: int = 9, rounds: int = 1) -> float:
    """us of a call: one graph of `rounds` times all calls, the median of its replays, over the number of calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(2):
        graph.replay()
    return statistics.median(_events(graph.replay) for _ in range(repeats)) / (len(calls) * rounds)


def _events(work: Call) -> float:
    """us between events around `work`."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def pyplot() -> Any:
    """matplotlib, without a display. Raises ToolchainError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ToolchainError("--plot needs matplotlib: pip install 'k3dsl[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
