"""HIP through ctypes: code objects loaded and launched on one device of torch's.

Nothing but `libamdhip64` is needed on a GPU node: no compiler, no FlyDSL. Written against HIP's public headers and
tested against a stand-in library; NEVER run on an AMD GPU so far.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_uint32, c_void_p
from functools import cache
from typing import Any, Final, NamedTuple

from k3dsl.amd.device import TARGETS
from k3dsl.amd.launch import Arguments, Launch
from k3dsl.errors import ConfigError, LaunchError, ToolchainError

#: Sonames, the newest first. torch's own copy is found once torch is imported.
LIBRARIES: Final = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_OUT, _OUT_INT = POINTER(c_void_p), POINTER(c_int)
#: Every function that is used, with its arguments (hip_runtime_api.h).
SIGNATURES: Final[dict[str, list[Any]]] = {
    "hipInit": [c_uint32],
    "hipGetDeviceCount": [_OUT_INT],
    "hipGetDevice": [_OUT_INT],
    "hipSetDevice": [c_int],
    "hipModuleLoadData": [_OUT, c_void_p],
    "hipModuleUnload": [c_void_p],
    "hipModuleGetFunction": [_OUT, c_void_p, c_char_p],
    "hipModuleLaunchKernel": [c_void_p, *[c_uint32] * 7, c_void_p, c_void_p, c_void_p],
    "hipStreamIsCapturing": [c_void_p, _OUT_INT],
    "hipStreamSynchronize": [c_void_p],
}
_SUCCESS: Final = 0
_CAPTURE_NONE: Final = 0  # hipStreamCaptureStatus


class _Module(NamedTuple):
    module: int
    function: int
    image: bytes  # HIP may read the code object again


class Prepared(NamedTuple):
    """A function and pointers to its arguments, in order; holds the block that they point into."""

    function: int
    array: Any
    arguments: Arguments


class Hip:
    """HIP's functions, checked: a status other than success raises LaunchError saying what was attempted.

    library: what has the `hip*` functions as attributes. Raises ToolchainError without one.
    """

    def __init__(self, library: Any = None) -> None:
        library = library if library is not None else hip_library()
        missing = [name for name in SIGNATURES if getattr(library, name, None) is None]
        if missing:
            raise ToolchainError(f"the HIP library is too old: it has no {', '.join(missing)}")
        self._functions = {name: getattr(library, name) for name in SIGNATURES}
        for name, function in self._functions.items():
            function.argtypes, function.restype = SIGNATURES[name], c_int
        self._text = getattr(library, "hipGetErrorString", None)
        if self._text is not None:
            self._text.argtypes, self._text.restype = [c_int], c_char_p
        self.call("hipInit", 0)
        self.launch_kernel = self._functions["hipModuleLaunchKernel"]

    def call(self, name: str, *arguments: Any, doing: str = "") -> None:
        status = self._functions[name](*arguments)
        if status != _SUCCESS:
            raise LaunchError(f"{doing or name}: {name} answered {self.error(status)}")

    def error(self, status: int) -> str:
        """Number and description of a status."""
        text = self._text(status) if self._text is not None else None
        return f"{status} ({text.decode(errors='replace') if text else 'unknown'})"

    def integer(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self.call(name, *arguments, byref(value))
        return value.value


@cache
def hip() -> Hip:
    """The process's HIP. Raises ToolchainError where there is none."""
    return Hip()


def hip_library() -> Any:
    """libamdhip64. Raises ToolchainError where there is none."""
    problems = []
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise ToolchainError(f"no HIP ({problems[0]}): kernels for gfx950 run only where AMD's runtime is installed")


class HipRuntime:
    """One device, by torch's index. `stream` gives the handle of the stream that launches go to: torch's current."""

    def __init__(self, index: int = 0, *, library: Any = None, target: str | None = None, stream: Any = None) -> None:
        self.hip = hip() if library is None else Hip(library)
        self.index = index
        if target is None:
            target = _arch(index)
        if target not in TARGETS:
            raise ConfigError(f"device {index} ({target}) has no kernels: served are {', '.join(TARGETS)}")
        self._target = target
        self._stream = stream if stream is not None else _torch_stream(index)

    @property
    def target(self) -> str:
        return self._target

    def load(self, payload: bytes, symbol: str) -> _Module:
        """Loads on this device, whatever device is current, and leaves that one current."""
        module, function = c_void_p(), c_void_p()
        with self._current():
            self.hip.call("hipModuleLoadData", byref(module), payload, doing=f"loading {symbol} ({len(payload)} bytes)")
            self.hip.call("hipModuleGetFunction", byref(function), module, symbol.encode(), doing=f"finding {symbol}")
        return _Module(module.value or 0, function.value or 0, payload)

    def unload(self, handle: _Module) -> None:
        self.hip.call("hipModuleUnload", handle.module)

    def prepare(self, handle: _Module, arguments: Arguments) -> Prepared:
        places = [arguments.address + offset for offset in arguments.offsets]
        return Prepared(handle.function, (c_void_p * max(len(places), 1))(*places), arguments)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """With this device current; afterwards the one that was before."""
        before = self.hip.integer("hipGetDevice")
        self.hip.call("hipSetDevice", self.index)
        try:
            yield
        finally:
            self.hip.call("hipSetDevice", before)

    def launch(self, prepared: Prepared, launch: Launch, stream: int) -> None:
        """On this device, whatever device is current: stream 0 is the current device's."""
        if self.hip.integer("hipGetDevice") == self.index:
            self._launch(prepared, launch, stream)
        else:
            with self._current():
                self._launch(prepared, launch, stream)

    def _launch(self, prepared: Prepared, launch: Launch, stream: int) -> None:
        status = self.hip.launch_kernel(
            prepared.function, *launch.grid, *launch.block, launch.lds, stream, ctypes.addressof(prepared.array), None
        )
        if status != _SUCCESS:
            raise LaunchError(f"launch on device {self.index} with {launch}: {self.hip.error(status)}")

    def stream(self) -> int:
        return int(self._stream())

    def capturing(self) -> bool:
        stream = self.stream()
        # The default stream cannot be captured, and asking about it would break a capture of another stream.
        return stream != 0 and self.hip.integer("hipStreamIsCapturing", stream) != _CAPTURE_NONE

    def synchronize(self) -> None:
        with self._current():
            self.hip.call("hipStreamSynchronize", self.stream())


@cache
def runtime(index: int) -> HipRuntime:
    """The runtime of a device. Raises ToolchainError without HIP, ConfigError for a device of another target."""
    return HipRuntime(index)


def _arch(index: int) -> str:
    """gfx950 of gfx950:sramecc+:xnack-."""
    import torch

    return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]


def _torch_stream(index: int) -> Any:
    import torch

    get_stream = torch._C._cuda_getCurrentRawStream
    return lambda: get_stream(index)
