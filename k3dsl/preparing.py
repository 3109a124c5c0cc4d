"""From a deployment to built kernels (`warmup`) and to a layer that runs (`prepare`). Knows the vendors, late."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from k3dsl.amd.keys import TARGET as AMD
from k3dsl.capture import guard
from k3dsl.deployment import REFERENCE, Deployment
from k3dsl.errors import CompileError, ConfigError, K3Error, ToolchainError
from k3dsl.nvidia.core import SERVED

if TYPE_CHECKING:
    import torch

    from k3dsl.amd.prepared import PreparedMlaPre
    from k3dsl.cache import Build, Built, CompileCache, CompileKey
    from k3dsl.compiling import Pool
    from k3dsl.nvidia.prepared import PreparedMla
    from k3dsl.prepared_reference import PreparedReference

_NVIDIA: Final = tuple(SERVED)
_AMD: Final = (AMD,)


class Target(str):
    """An architecture string; equal to the plain string."""

    __slots__ = ()

    @property
    def vendor(self) -> str:
        """nvidia, amd, or reference."""
        return "nvidia" if self in _NVIDIA else "amd" if self in _AMD else REFERENCE


def detect_target(device: "torch.device | str | int | None" = None) -> Target | None:
    """The target of `device` (by default of device 0); None without a GPU or with one that there are no kernels for."""
    from k3dsl.amd.detect import present
    from k3dsl.nvidia.device import device as facts

    target: str | None = None
    try:
        index = device_index(device)
        target = present(index)
        if target is None:
            target = facts(index).target
    except K3Error:  # no driver, no device of that kind, or a driver that finds no device at its initialization
        return None
    return None if target is None else Target(target)


def device_index(device: "torch.device | str | int | None") -> int:
    """The index that a CUDA device is counted by. Raises ConfigError for another kind of device."""
    if device is None:
        return 0
    if isinstance(device, int):
        return device
    kind, _, index = str(device).partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise ConfigError(f"device={str(device)!r} must be cuda or cuda:N")
    return int(index or 0)


def prepare(
    plan: Deployment,
    attention: Any,
    *,
    cache: "CompileCache | None" = None,
    device: "torch.device | str | int | None" = None,
    dcp: Any = None,
    parity: int = 0,
) -> "PreparedMla | PreparedMlaPre | PreparedReference":
    """The prepared object of `plan.target` for one layer: it has `prepare_cache`, `run` and `shapes`.

    attention: weights as in k3dsl.MlaWeights, on `device`. cache: where kernels come from; by default the user's.
    dcp, parity: the group's DcpBox and the layer's ordinal among MLA layers modulo 2, for a plan with dcp > 1.
    Layers on one device share executables and scratch memory, so their runs must be ordered, as on one stream. Raises
    ConfigError for weights that do not fit the plan or a device of another target, CaptureError inside a capture.
    """
    from k3dsl.cache.arguments import kernel_cache_problems
    from k3dsl.checks import require, torch_device
    from k3dsl.nvidia.metadata import parity_problems

    if not isinstance(plan, Deployment):
        raise ConfigError(f"plan={plan!r} must be a Deployment")
    bad = parity_problems(parity)
    bad += kernel_cache_problems(cache)
    if dcp is not None and plan.target not in _NVIDIA:
        bad.append(f"dcp={dcp!r} must be None on {plan.target}, which takes no box")
    require("prepare", bad)
    device = torch_device(device)
    if plan.target == REFERENCE:
        from k3dsl.prepared_reference import PreparedReference

        return PreparedReference(plan, attention, device)
    if plan.target in _AMD:
        from k3dsl.amd.prepared import prepare_layer as prepare_amd

        return prepare_amd(plan, attention, cache=cache, device=device)
    from k3dsl.nvidia.prepare import prepare_layer

    return prepare_layer(plan, attention, cache=cache, device=device, dcp=dcp, parity=parity)


def _plans(plan: "Deployment | Iterable[Deployment]") -> list[Deployment]:
    """The plan, or the plans. Raises ConfigError for anything else."""
    plans = list(plan) if isinstance(plan, Iterable) else [plan]
    wrong = [one for one in plans if not isinstance(one, Deployment)]
    if wrong:
        raise ConfigError(f"plan={wrong[0]!r} must be a Deployment")
    return plans


def builder_for(key: "CompileKey") -> "Build | None":
    """The function that builds `key`; None where this machine cannot: no compiler, or a target of nobody's."""
    toolchain = _toolchain(key.target)
    if toolchain is None:
        return None
    build: Build = toolchain.build
    return build if toolchain.installed() else None


def _toolchain(target: str) -> Any:
    """The module that builds for `target`; None for a target of nobody's."""
    vendor = Target(target).vendor
    return None if vendor == REFERENCE else import_module(f"k3dsl.{vendor}.toolchain")


@dataclass(frozen=True)
class Progress:
    """Where a warm-up stands: keys done of all, the kernels at work, seconds so far."""

    done: int
    total: int
    at_work: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Report:
    """What a warm-up did. `keys` = `built` + `hit` + `failed`; `failures` has each failed key and why."""

    keys: int
    built: int
    hit: int
    failed: int
    seconds: float
    failures: "tuple[tuple[CompileKey, str], ...]" = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every key is there and loads."""
        return self.failed == 0


def warmup(
    plan: "Deployment | Iterable[Deployment]",
    cache: "CompileCache",
    *,
    jobs: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Builds every key of the plan (or plans) that `cache` does not have, with `jobs` compilers. Needs no GPU.

    Each object is checked, and in the end every key is read back as another process would find it, so that "ready"
    means that it is there and loads. A key that fails is reported and the others go on. On Ctrl-C the compilers are
    ended and the cache is as if the unfinished keys had not been begun.
    """
    from k3dsl.cache.arguments import kernel_cache_problems

    plans = _plans(plan)
    bad = ["cache=None must be a CompileCache"] if cache is None else kernel_cache_problems(cache)
    if type(jobs) is not int or jobs < 1:
        bad.append(f"jobs={jobs!r} must be a positive int")
    if bad:
        raise ConfigError.of("warmup", bad)
    guard("warmup()")
    keys = list(dict.fromkeys(key for one in plans for key in one.keys()))  # noqa: SIM118 - a method, not a dict's
    return _Warmup(cache, keys, progress).run(min(jobs, max(len(keys), 1)))


def lacking(plan: "Deployment | Iterable[Deployment]", cache: "CompileCache") -> list[str]:
    """What must be installed before a warm-up can build all that `cache` does not have; [] where nothing is amiss."""
    absent = [key for one in _plans(plan) for key in Deployment.keys(one) if key not in cache]
    amd = [key for key in absent if Target(key.target).vendor == "amd"]
    return _lacking_nvidia([key for key in absent if key not in amd]) + (_lacking_amd() if amd else [])


def _lacking_nvidia(absent: "list[CompileKey]") -> list[str]:
    from k3dsl.nvidia.toolchain import installed, kernel_key, lacks

    if not absent:
        return []
    if installed() is None:
        return ["the compiler is not installed: pip install 'k3dsl[nvidia]'"]
    found = dict.fromkeys((key.kernel, key.target, lacks(kernel_key(key.kernel, key.params))) for key in absent)
    return [f"{kernel} for {target} cannot be built: {what}" for kernel, target, what in found if what]


def _lacking_amd() -> list[str]:
    from k3dsl.amd.toolchain import installed, linker

    if installed() is None:
        return ["the compiler of gfx950 is not installed: pip install 'k3dsl[amd]'"]
    return [] if linker() else ["no ld.lld, which links objects of gfx950: install LLVM's lld, or pip install ziglang"]


class _Warmup:
    """One warm-up: a thread for each compiler, which is a child process."""

    def __init__(
        self, cache: "CompileCache", keys: "list[CompileKey]", progress: Callable[[Progress], None] | None
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._progress = progress
        self._began = time.monotonic()
        self._at_work: dict[CompileKey, None] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, jobs: int) -> Report:
        self._pools = {vendor: _toolchain(t).Compilers(jobs) for vendor, t in _vendors(self._keys).items()}
        built: dict[CompileKey, bool] = {}
        failures: dict[CompileKey, str] = {}
        pool = ThreadPoolExecutor(jobs, thread_name_prefix="k3dsl-warmup")
        try:
            todo = {pool.submit(self._one, key): key for key in self._keys}
            waiting: set[Future[bool]] = set(todo)
            while waiting:
                self._tell(len(todo) - len(waiting))
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    error = future.exception()
                    if error is None:
                        built[todo[future]] = future.result()
                    elif isinstance(error, K3Error | OSError):
                        failures[todo[future]] = str(error)
                    else:
                        raise error
            self._tell(len(todo))
        finally:  # on Ctrl-C too: compilers are ended at once, so that no thread waits for them
            self._stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            for compilers in self._pools.values():
                compilers.close()
            pool.shutdown(wait=True)
        if not self._cache.read_only:  # else nothing was to be stored
            problems = ((key, self._problem(key)) for key in built)
            failures |= {key: problem for key, problem in problems if problem is not None}
        counts = Counter(new for key, new in built.items() if key not in failures)
        seconds = round(time.monotonic() - self._began, 3)
        return Report(len(self._keys), counts[True], counts[False], len(failures), seconds, tuple(failures.items()))

    def _problem(self, key: "CompileKey") -> str | None:
        """Why another process would not find `key` now, which was built or found here; None if it would."""
        entry = self._cache.reread(key)
        if entry is not None:
            try:
                check_object(key, entry.payload)
            except K3Error as error:
                return str(error)
            return None
        why = list(self._cache.degraded.values())
        if self._cache.max_bytes is not None:
            why.append(f"max_bytes={self._cache.max_bytes} may be less than all keys take")
        why = why or ["its folder does not give it back"]
        return f"{key.kernel} {key.short} was built or found but could not be stored: {'; '.join(why)}"

    def _tell(self, done: int) -> None:
        if self._progress is not None:
            with self._lock:
                names = tuple(f"{key.kernel} {key.short}" for key in self._at_work)
            self._progress(Progress(done, len(self._keys), names, time.monotonic() - self._began))

    def _one(self, key: "CompileKey") -> bool:
        """Whether `key` had to be built. Its object is one that loads; whether it is stored, `_problem` tells."""
        with self._lock:
            self._at_work[key] = None
        try:
            entry = self._cache.get_or_build(key, self._build)
            check_object(key, entry.payload)
            return entry.source == "built"
        finally:
            with self._lock:
                del self._at_work[key]

    def _build(self, key: "CompileKey") -> "Built":
        if self._stopped:
            raise ToolchainError("the warm-up was stopped")
        compilers: Pool = self._pools[Target(key.target).vendor]
        return compilers.build(key)


def _vendors(keys: "Iterable[CompileKey]") -> dict[str, str]:
    """The vendors of some keys, each with one of its targets. Raises ConfigError for a target of nobody's."""
    found = {Target(key.target).vendor: key.target for key in keys}
    if REFERENCE in found:
        raise ConfigError(f"target={found[REFERENCE]!r} must be one of {', '.join([*_NVIDIA, *_AMD])}")
    return found


def check_object(key: "CompileKey", payload: bytes) -> None:
    """Raises CompileError or ConfigError unless `payload` is an object of `key`'s target with its parameters."""
    if Target(key.target).vendor == "amd":
        _check_amd(key, payload)
        return
    from k3dsl.nvidia.cubin import parse
    from k3dsl.nvidia.driver import check_params
    from k3dsl.nvidia.toolchain import is_host, kernel_key

    if is_host(kernel := kernel_key(key.kernel, key.params)):
        from k3dsl.nvidia.host_object import problems

        bad = problems(payload, key.target, kernel.host)
        if bad:
            raise CompileError("\n  - ".join([f"the object of {key.kernel} {key.short} cannot be loaded:", *bad]))
        return
    found = parse(payload)
    if found.arch != key.target:
        raise CompileError(f"the object of {key.kernel} {key.short} is for {found.arch!r}, not {key.target!r}")
    check_params(found, kernel.params)


def _check_amd(key: "CompileKey", payload: bytes) -> None:
    from k3dsl.amd.codeobject import parse
    from k3dsl.amd.launch import check_params
    from k3dsl.amd.toolchain import kernel_key

    found = parse(payload)
    if found.arch != key.target:
        raise CompileError(f"the object of {key.kernel} {key.short} is for {found.arch!r}, not {key.target!r}")
    check_params(found, kernel_key(key.kernel, key.params).params)
