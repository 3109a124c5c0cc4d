"""Launches of gfx950 kernels whose arguments are packed once, on whatever runtime there is.

A runtime is HIP (k3dsl/amd/hip.py) or the emulator of tools/gfx950; this file knows neither. What both take is the
kernel's argument block, laid out as the code object says.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint64
from dataclasses import dataclass
from typing import Any, Final, Protocol

from k3dsl.amd.codeobject import CodeObject, parse
from k3dsl.errors import ConfigError

#: Bytes and ctypes class of each kind of parameter.
KINDS: Final[dict[str, tuple[int, Any]]] = {
    "ptr": (8, c_uint64),
    "i32": (4, c_int32),
    "i64": (8, c_int64),
    "f32": (4, c_float),
}
_RANGES: Final = {"ptr": (0, 2**64 - 1), "i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}
#: Work items of a dimension: HIP counts a grid in 32 bits.
MAX_ITEMS: Final = 2**32 - 1
MAX_THREADS: Final = 1024
#: Compilers load whole groups of scalar registers, past the last argument.
_SLACK: Final = 64


@dataclass(frozen=True)
class Launch:
    """A launch: grid in workgroups, block in threads, `lds` bytes of dynamic LDS beside what the kernel declares."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    lds: int = 0


class Runtime(Protocol):
    """One device. Handles are the runtime's own."""

    @property
    def target(self) -> str:
        """Architecture of the device, as gfx950."""

    def load(self, payload: bytes, symbol: str) -> Any:
        """A kernel of a code object, loaded on the device."""

    def unload(self, handle: Any) -> None:
        """Frees what `load` gave."""

    def prepare(self, handle: Any, arguments: "Arguments") -> Any:
        """What `launch` takes for these arguments, which stay where they are."""

    def launch(self, prepared: Any, launch: Launch, stream: int) -> None:
        """Starts the kernel on `stream`. Raises LaunchError where it is refused."""

    def stream(self) -> int:
        """The handle of the current stream."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""

    def synchronize(self) -> None:
        """Waits for the current stream."""


def runtime_problems(runtime: Any) -> list[str]:
    """Why this is no runtime; None stands for HIP."""
    if runtime is None or hasattr(runtime, "target"):
        return []
    return [f"runtime={runtime!r} must be None for HIP, or what has the methods of k3dsl.amd.launch.Runtime"]


class Arguments:
    """The argument block of one kernel, 64-byte aligned, and where each parameter stands in it."""

    def __init__(self, facts: CodeObject, params: Sequence[tuple[str, str]], values: dict[str, Any]) -> None:
        bad = param_problems(facts, params)
        if not bad:
            bad = _value_problems(params, values)
        if bad:
            raise ConfigError.of(f"launch of {facts.symbol}", bad)
        self.size = facts.kernarg
        self._memory = ctypes.create_string_buffer(self.size + _SLACK + 64)
        base = ctypes.addressof(self._memory)
        self.address = base + (-base) % 64
        self.offsets = tuple(offset for offset, _ in facts.params)
        self.slots: dict[str, Any] = {}
        self.kinds = dict(params)
        for (name, kind), offset in zip(params, self.offsets, strict=True):
            slot = KINDS[kind][1].from_buffer(self._memory, self.address - base + offset)
            slot.value = values[name]
            self.slots[name] = slot

    def content(self) -> bytes:
        """The block as it is now."""
        return ctypes.string_at(self.address, self.size)


class Executable:
    """A code object loaded on a runtime's device, for as long as it or a plan of it lives."""

    def __init__(self, runtime: Runtime, payload: bytes) -> None:
        self.facts = parse(payload)
        self.runtime = runtime
        self._handle: Any = None
        if self.facts.arch != runtime.target:
            raise ConfigError(f"{self.facts.symbol} is for {self.facts.arch}, the device is {runtime.target!r}")
        self._handle = runtime.load(payload, self.facts.symbol)

    @classmethod
    def load(cls, runtime: Runtime, payload: bytes) -> "Executable":
        """Raises CompileError where `payload` is no code object of one kernel, LaunchError where it is refused."""
        return cls(runtime, payload)

    @property
    def handle(self) -> Any:
        """The runtime's handle of the kernel."""
        return self._handle

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle is not None:
            try:
                self.runtime.unload(handle)
            except Exception:  # at interpreter exit the runtime may be gone before us: nothing is left to free
                return


class LaunchPlan:
    """One kernel with its launch and its arguments, packed once; a call rewrites what changed and launches.

    values: by name an address or int, or a float, for every parameter. Raises ConfigError with all that differs from
    what the kernel takes or a compute unit holds. A plan is for one thread at a time.
    """

    def __init__(
        self, executable: Executable, launch: Launch, params: Sequence[tuple[str, str]], /, **values: Any
    ) -> None:
        bad = launch_problems(executable.facts, launch)
        if bad:
            raise ConfigError.of(f"launch of {executable.facts.symbol}", bad)
        self._executable = executable
        self._arguments = Arguments(executable.facts, params, values)
        self._launch = launch
        self._runtime = executable.runtime
        self._prepared = self._runtime.prepare(executable.handle, self._arguments)

    def slot(self, name: str) -> Any:
        """A parameter's ctypes value, in the argument block: `.value` may be rewritten between launches, unchecked."""
        return self._arguments.slots[name]

    def set(self, name: str, value: Any) -> None:
        """Rewrites a parameter, checked."""
        bad = _value_problem(name, self._arguments.kinds[name], value)
        if bad:
            raise ConfigError(f"launch of {self._executable.facts.symbol}: {bad}")
        self._arguments.slots[name].value = value

    def launch_as(self, launch: Launch, stream: int) -> None:
        """Launches in another shape, which must be one that the kernel takes: it is not checked again."""
        self._runtime.launch(self._prepared, launch, stream)

    def launch(self, stream: int) -> None:
        """Launches on `stream`, 0 for the default one. Raises LaunchError if the runtime refuses."""
        self._runtime.launch(self._prepared, self._launch, stream)


def param_problems(facts: CodeObject, params: Sequence[tuple[str, str]]) -> list[str]:
    """How the kernel's parameters differ from `params` in number, bytes or place; [] if they do not."""
    bad = [f"{name}: kind {kind!r} must be one of {', '.join(KINDS)}" for name, kind in params if kind not in KINDS]
    if bad:
        return bad
    want, at = [], 0
    for _, kind in params:
        size = KINDS[kind][0]
        at = -(-at // size) * size  # natural alignment
        want.append((at, size))
        at += size
    if want != list(facts.params):
        names = ", ".join(f"{name} {kind}" for name, kind in params)
        bad.append(f"the kernel's parameters are {list(facts.params)} (offset, bytes), they must be {want} ({names})")
    if facts.hidden:
        bad.append(f"the kernel takes hidden arguments ({', '.join(facts.hidden)}), which no launch here fills in")
    return bad


def check_params(facts: CodeObject, params: Sequence[tuple[str, str]]) -> None:
    """Raises ConfigError unless the kernel's parameters are `params`."""
    bad = param_problems(facts, params)
    if bad:
        raise ConfigError.of(f"kernel {facts.symbol} ({facts.arch})", bad)


def _value_problem(name: str, kind: str, value: Any) -> str | None:
    if kind == "f32":
        return None if type(value) in (int, float) else f"{name}={value!r} must be a float"
    low, high = _RANGES[kind]
    if type(value) is not int or not low <= value <= high:
        return f"{name}={value!r} must be an int from {low} to {high} ({kind})"
    return None


def _value_problems(params: Sequence[tuple[str, str]], values: dict[str, Any]) -> list[str]:
    names = [name for name, _ in params]
    bad = [f"{name} is missing" for name in names if name not in values]
    bad += [f"{name} is no parameter, they are {', '.join(names)}" for name in values if name not in names]
    problems = (_value_problem(name, kind, values[name]) for name, kind in params if name in values)
    return bad + [p for p in problems if p]


def launch_problems(facts: CodeObject, launch: Launch) -> list[str]:
    """Why the kernel cannot be launched so; [] if it can."""
    bad = []
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if len(launch.grid) != 3 or min(launch.grid) < 1:
        bad.append(f"grid {launch.grid} must be three positive numbers of workgroups")
    elif any(g * b > MAX_ITEMS for g, b in zip(launch.grid, launch.block, strict=True)):
        bad.append(f"grid {launch.grid} of blocks {launch.block} must be at most {MAX_ITEMS} threads a dimension")
    if facts.block is not None and launch.block != facts.block:
        bad.append(f"block {launch.block} must be {facts.block}, as compiled")
    if min(launch.block) < 1 or threads > min(MAX_THREADS, facts.max_threads):
        bad.append(f"block {launch.block} must have from 1 to {min(MAX_THREADS, facts.max_threads)} threads")
    from k3dsl.amd.device import check_target

    limit = check_target(facts.arch).lds
    if not 0 <= launch.lds <= limit - facts.lds:
        bad.append(f"lds={launch.lds} must be from 0 to {limit - facts.lds} bytes ({limit} less {facts.lds} declared)")
    return bad
