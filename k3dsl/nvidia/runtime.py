"""One GPU as prepared layers use it: driver, facts, current stream, and what its layers share.

Executables, query scratch and workspaces are shared by all layers of equal layout. Nothing here owns them: each layer
holds what it uses for as long as it lives, so nothing is unloaded or freed under a graph that may still replay it.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from k3dsl.capture import guard
from k3dsl.errors import ConfigError
from k3dsl.nvidia import device as devices
from k3dsl.nvidia.driver import Driver, Function, Module, driver
from k3dsl.nvidia.host_object import HostObject
from k3dsl.nvidia.query import ENTRY, MAX_ROWS
from k3dsl.nvidia.toolchain import build, compile_key

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache, CompileKey


class KernelKey(Protocol):
    """The frozen facts of one kernel family."""

    name: Any
    device_module: Any
    params: Any


class Executables:
    """Loaded modules by digest, of no device: one load of a cubin serves every device and every layer."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._lock = threading.Lock()
        self._modules: WeakValueDictionary[str, Module] = WeakValueDictionary()
        self._hosts: WeakValueDictionary[tuple[str, int], HostObject] = WeakValueDictionary()

    def module(self, key: "CompileKey", cache: "CompileCache") -> Module:
        """The module of `key`; its object comes from `cache`, which builds it if need be."""
        with self._lock:
            found = self._modules.get(key.digest)
            if found is None:
                found = Module.load(self.driver, cache.get_or_build(key, build).payload)
                self._modules[key.digest] = found
            return found

    def host(self, key: "CompileKey", cache: "CompileCache", device: int) -> HostObject:
        """The host object of `key` for one device: its launcher keeps the handles of that device's kernels."""
        with self._lock:
            found = self._hosts.get((key.digest, device))
            if found is None:
                found = HostObject(self.driver, cache.get_or_build(key, build).payload, device)
                self._hosts[key.digest, device] = found
            return found


class Workspace:
    """Memory that a core's launches write and its merges read. Never cleared; used by one launch at a time."""

    def __init__(self, partial: int, stats: int, device: torch.device) -> None:
        self.partial, self.stats = (torch.empty(max(n, 16), dtype=torch.uint8, device=device) for n in (partial, stats))

    def holds(self, partial: int, stats: int) -> bool:
        """Whether launches of these bytes fit."""
        return self.partial.numel() >= partial and self.stats.numel() >= stats


class Runtime:
    """A device. `stream` gives the handle of the stream that launches go to: torch's current one."""

    def __init__(
        self,
        executables: Executables,
        device: devices.Device,
        torch_device: torch.device,
        stream: Callable[[], int],
        synchronize: Callable[[], None],
    ) -> None:
        self.executables = executables
        self.driver = executables.driver
        self.device = device
        self.torch_device = torch_device
        self.stream = stream
        self.synchronize = synchronize
        self._lock = threading.Lock()
        self._scratch: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
        self._workspaces: WeakValueDictionary[str, Workspace] = WeakValueDictionary()

    def guard(self, what: str) -> None:
        """Raises CaptureError if the current stream is being captured."""
        guard(what, self.capturing)

    def capturing(self) -> bool:
        """Whether the current stream is being captured. The legacy default stream, 0, cannot be."""
        return self.driver.is_capturing(self.stream())

    def function(self, key: KernelKey, cache: "CompileCache") -> Function:
        """The kernel of a kernel key on this device, loaded."""
        return self.executables.module(compile_key(key, self._target()), cache).function(self.device.index)

    def host(self, key: Any, cache: "CompileCache") -> HostObject:
        """The host object of a kernel key on this device, loaded."""
        return self.executables.host(compile_key(key, self._target()), cache, self.device.index)

    def _target(self) -> str:
        target = self.device.target
        if target is None:
            served = ", ".join(devices.TARGETS)
            raise ConfigError(f"device {self.device.index} ({self.device.name}) has no kernels: served are {served}")
        return target

    def query_scratch(self, heads: int, element: int) -> Tensor:
        """uint8 [64, heads, 576 * element], the same tensor for every layer that asks for it while one holds it."""
        with self._lock:
            found = self._scratch.get((heads, element))
            if found is None:
                found = torch.zeros(MAX_ROWS, heads, ENTRY * element, dtype=torch.uint8, device=self.torch_device)
                self._scratch[heads, element] = found
            return found

    def workspace(self, partial: int, stats: int) -> Workspace:
        """A workspace of at least these bytes: the one in use if it is large enough, else a new one for all to come."""
        with self._lock:
            found = self._workspaces.get("core")
            if found is None or not found.holds(partial, stats):
                if found is not None:
                    partial, stats = max(partial, found.partial.numel()), max(stats, found.stats.numel())
                found = Workspace(partial, stats, self.torch_device)
                self._workspaces["core"] = found
            return found


@cache
def _executables() -> Executables:
    return Executables(driver())


@cache
def runtime(index: int) -> Runtime:
    """The runtime of CUDA device `index`. Raises ToolchainError without a driver, ConfigError without the device."""
    facts = devices.device(index)
    get_stream = torch._C._cuda_getCurrentRawStream
    return Runtime(
        _executables(),
        facts,
        torch.device("cuda", index),
        lambda: get_stream(index),
        lambda: torch.cuda.current_stream(index).synchronize(),
    )


def runtime_of(device: torch.device) -> Runtime:
    """The runtime of a torch device. Raises ConfigError for one that is no CUDA device."""
    if device.type != "cuda":
        raise ConfigError(f"device={str(device)!r} must be a CUDA device: weights, cache and steps lie on one GPU")
    return runtime(torch.cuda.current_device() if device.index is None else device.index)
