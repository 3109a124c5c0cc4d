"""The CUDA driver through ctypes: modules, kernels, and launches whose arguments are packed once.

Nothing but `libcuda.so.1` is needed on a GPU node: no CUDA runtime, no compiler, no DSL. Contexts and streams are those
of the CUDA runtime, so a stream of torch (`torch.cuda.current_stream().cuda_stream`) is passed as it is.

Tests replace the library by a table of Python callbacks with the same names (tests/fake_cuda.py).
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, addressof, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, Final, NamedTuple

from k3dsl.errors import ConfigError, LaunchError, ToolchainError
from k3dsl.nvidia.cubin import Cubin, parse
from k3dsl.nvidia.launch import Launch, Param
from k3dsl.nvidia.tensor_map import BYTES as TENSOR_MAP_BYTES
from k3dsl.nvidia.tensor_map import TensorMap

__all__ = ["Driver", "Function", "Launch", "LaunchPlan", "Module", "Param", "TensorMap", "driver", "tensor_map"]

tensor_map = TensorMap

#: Objects are built with CUDA 13, and a driver loads those of its own major version or older.
MIN_VERSION: Final = 13000
# CUfunction_attribute, CUlaunchAttributeID, CUresult: cuda.h
FUNCTION_ATTRIBUTES: Final = {"max_threads": 0, "static_smem": 1, "local_bytes": 3, "registers": 4}
_MAX_DYNAMIC_SMEM, _NON_PORTABLE_CLUSTER = 8, 14
_CLUSTER, _PDL = 4, 6
_INVALID_CONTEXT: Final = 201
_MAX_SMEM_OPTIN: Final = 97  # CUdevice_attribute
#: The largest cluster that every device holds, and the largest with the attribute that asks for more.
PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
MAX_GRID: Final = (2**31 - 1, 65535, 65535)


class _AttributeValue(ctypes.Union):
    _fields_ = [("bytes", ctypes.c_char * 64), ("dim", c_uint32 * 3), ("flag", c_int)]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", c_uint32), ("_pad", c_uint32), ("value", _AttributeValue)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("smem", c_uint32),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint32),
    ]


#: Bytes and ctypes class of each kind of parameter.
KINDS: Final[dict[str, tuple[int, Any]]] = {
    "ptr": (8, c_uint64),
    "i32": (4, c_int32),
    "i64": (8, c_int64),
    "f32": (4, c_float),
    "tmap": (TENSOR_MAP_BYTES, None),
}
_RANGES: Final = {"ptr": (0, 2**64 - 1), "i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}

_OUT, _OUT_INT = POINTER(c_void_p), POINTER(c_int)
#: Every function that is used, with its arguments (cuda.h).
SIGNATURES: Final[dict[str, list[Any]]] = {
    "cuInit": [c_uint32],
    "cuDriverGetVersion": [_OUT_INT],
    "cuDeviceGetCount": [_OUT_INT],
    "cuDeviceGet": [_OUT_INT, c_int],
    "cuDeviceGetName": [c_void_p, c_int, c_int],
    "cuDeviceGetAttribute": [_OUT_INT, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [_OUT, c_int],
    "cuCtxGetCurrent": [_OUT],
    "cuCtxSetCurrent": [c_void_p],
    "cuLibraryLoadData": [_OUT, c_void_p, c_void_p, c_void_p, c_uint32, c_void_p, c_void_p, c_uint32],
    "cuLibraryUnload": [c_void_p],
    "cuLibraryGetKernel": [_OUT, c_void_p, c_char_p],
    "cuKernelGetFunction": [_OUT, c_void_p],
    "cuFuncGetAttribute": [_OUT_INT, c_int, c_void_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernelEx": [c_void_p, c_void_p, c_void_p, c_void_p],
    "cuStreamIsCapturing": [c_void_p, _OUT_INT],
    "cuTensorMapEncodeTiled": [c_void_p, c_int, c_uint32, c_void_p, *[c_void_p] * 4, *[c_int] * 4],
    "cuOccupancyMaxActiveClusters": [_OUT_INT, c_void_p, c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}
#: Those that only newer drivers have: what they would do is then left out.
OPTIONAL: Final[dict[str, list[Any]]] = {
    "cuFuncLoad": [c_void_p],  # 12.4
    "cuKernelGetParamInfo": [c_void_p, ctypes.c_size_t, POINTER(ctypes.c_size_t), POINTER(ctypes.c_size_t)],  # 12.4
}


class Driver:
    """The driver's functions, checked: a status other than success raises LaunchError saying what was attempted.

    library: what has the `cu*` functions as attributes; by default libcuda.so.1. Raises ToolchainError without a driver
    or with one that is too old.
    """

    def __init__(self, library: Any = None) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[int, int] = {}
        self._functions: dict[str, Any] = {}
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise ToolchainError(
                    f"no CUDA driver ({error}): kernels for sm_* run only where NVIDIA's driver is installed"
                ) from error
        for name, arguments in {**SIGNATURES, **OPTIONAL}.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, c_int
                self._functions[name] = function
        missing = [name for name in SIGNATURES if name not in self._functions]
        if missing:
            raise ToolchainError(f"the CUDA driver is too old: it has no {', '.join(missing)}")
        version = self.version()
        if version < MIN_VERSION:
            raise ToolchainError(
                f"the driver serves CUDA {version // 1000}.{version % 1000 // 10}, kernels need "
                f"{MIN_VERSION // 1000}.0 or later (driver 580)"
            )
        self._call("cuInit", 0)
        self.launch_kernel = self._functions["cuLaunchKernelEx"]

    def _call(self, name: str, *arguments: Any, doing: str = "") -> None:
        status = self._functions[name](*arguments)
        if status:
            raise LaunchError(f"{doing or name}: {name} answered {self.error(status)}")

    def _int(self, name: str, *arguments: Any, doing: str = "") -> int:
        value = c_int()
        self._call(name, byref(value), *arguments, doing=doing)
        return value.value

    def _handle(self, name: str, *arguments: Any, doing: str = "") -> int:
        value = c_void_p()
        self._call(name, byref(value), *arguments, doing=doing)
        return value.value or 0

    def error(self, status: int) -> str:
        """Name, number and description of a status."""
        name, text = c_char_p(), c_char_p()
        self._functions["cuGetErrorName"](status, byref(name))
        self._functions["cuGetErrorString"](status, byref(text))
        words = [v.value.decode(errors="replace") if v.value else "unknown" for v in (name, text)]
        return f"{words[0]} ({status}: {words[1]})"

    def version(self) -> int:
        """What the driver serves, as 1000 * major + 10 * minor."""
        return self._int("cuDriverGetVersion")

    def device_count(self) -> int:
        return self._int("cuDeviceGetCount")

    def device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device(device))
        return text.value.decode(errors="replace")

    def attribute(self, which: int, device: int) -> int:
        """A CUdevice_attribute of a device."""
        return self._int("cuDeviceGetAttribute", which, self._device(device), doing=f"attribute {which} of {device}")

    def _device(self, device: int) -> int:
        return self._int("cuDeviceGet", device, doing=f"device {device}")

    def ensure_context(self, device: int) -> None:
        """If this thread has no current context: makes it the primary one of `device`, which is torch's too."""
        if not self._handle("cuCtxGetCurrent"):
            self._call("cuCtxSetCurrent", self._primary(device))

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """With the primary context of `device` current; afterwards what was current before."""
        before = self._handle("cuCtxGetCurrent")
        self._call("cuCtxSetCurrent", self._primary(device))
        try:
            yield
        finally:
            self._call("cuCtxSetCurrent", before)

    def _primary(self, device: int) -> int:
        with self._lock:  # retained once, and for as long as the process lives
            if device not in self._contexts:
                doing = f"context of device {device}"
                self._contexts[device] = self._handle("cuDevicePrimaryCtxRetain", self._device(device), doing=doing)
            return self._contexts[device]

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured on `stream`. The default stream cannot be, and is not asked about."""
        if not stream:  # asking would break a capture of another stream
            return False
        value = c_int()
        self._call("cuStreamIsCapturing", stream, byref(value))
        return value.value != 0

    def load(self, cubin: bytes) -> int:
        """A library handle, of no device. The driver keeps its own copy of the bytes."""
        arguments = (cubin, None, None, 0, None, None, 0)
        return self._handle("cuLibraryLoadData", *arguments, doing=f"loading a cubin of {len(cubin)} bytes")

    def unload(self, library: int) -> None:
        self._call("cuLibraryUnload", library)

    def kernel(self, library: int, symbol: str) -> int:
        """A kernel of a library, of no device."""
        return self._handle("cuLibraryGetKernel", library, symbol.encode(), doing=f"finding {symbol[:80]}")

    def kernel_params(self, kernel: int, count: int) -> list[int] | None:
        """Bytes of the first `count` parameters; None where the driver cannot tell."""
        if "cuKernelGetParamInfo" not in self._functions:
            return None
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        found = []
        for i in range(count):
            self._call("cuKernelGetParamInfo", kernel, i, byref(offset), byref(size), doing=f"parameter {i}")
            found.append(size.value)
        return found

    def function(self, kernel: int, device: int) -> int:
        """A kernel's handle on `device`, its code loaded there now and not at its first launch, maybe in a capture."""
        with self.context(device):
            handle = self._handle("cuKernelGetFunction", kernel, doing=f"loading a kernel on device {device}")
            if "cuFuncLoad" in self._functions:
                self._call("cuFuncLoad", handle, doing=f"loading a kernel on device {device}")
        return handle

    def function_attribute(self, function: int, which: int, device: int) -> int:
        """A CUfunction_attribute."""
        with self.context(device):
            return self._int("cuFuncGetAttribute", which, function)

    def set_function_attribute(self, function: int, which: int, value: int, device: int) -> None:
        with self.context(device):
            self._call("cuFuncSetAttribute", function, which, value, doing=f"setting attribute {which} to {value}")

    def encode_tensor_map(self, target: int, *arguments: Any) -> None:
        """cuTensorMapEncodeTiled; `TensorMap` checks its arguments."""
        self._call("cuTensorMapEncodeTiled", target, *arguments, doing="encoding a tensor map")

    def max_active_clusters(self, function: "Function", launch: Launch) -> int:
        """How many clusters of this launch the device holds at once."""
        function.allow(launch.smem, launch.cluster)
        config, _attributes = pack_config(launch)
        with self.context(function.device):
            return self._int("cuOccupancyMaxActiveClusters", function.handle, addressof(config))


_lock = threading.Lock()
_driver: Driver | None = None


def driver() -> Driver:
    """The process's driver. Raises ToolchainError where there is none."""
    global _driver
    with _lock:
        if _driver is None:
            _driver = Driver()
        return _driver


class Module:
    """A loaded cubin, of no device. Stays loaded for as long as it, a function or a plan of it lives."""

    def __init__(self, driver: Driver, cubin: bytes) -> None:
        self.facts: Cubin = parse(cubin)
        self.driver = driver
        self._lock = threading.Lock()
        self._functions: dict[int, int] = {}
        self._allowed: dict[tuple[int, int], int] = {}
        self._library = driver.load(cubin)
        self._kernel = driver.kernel(self._library, self.facts.symbol)
        sizes = driver.kernel_params(self._kernel, len(self.facts.params))
        if sizes is not None and sizes != [size for _, size in self.facts.params]:
            raise LaunchError(
                f"{self.title}: the driver sees parameters of {sizes} bytes, the cubin {self.facts.params}"
            )

    @classmethod
    def load(cls, driver: Driver, cubin: bytes) -> "Module":
        """Loads a cubin. Raises CompileError where it is none, LaunchError where the driver refuses it."""
        return cls(driver, cubin)

    @property
    def title(self) -> str:
        """The kernel, for messages."""
        return f"{self.facts.symbol[:60]} ({self.facts.arch})"

    def function(self, device: int) -> "Function":
        """The kernel on `device`, loaded there."""
        with self._lock:
            if device not in self._functions:
                self._functions[device] = self.driver.function(self._kernel, device)
            return Function(self, self._functions[device], device)

    def raise_attribute(self, device: int, which: int, value: int) -> None:
        """Sets an attribute of the kernel on `device` unless it is as high already."""
        with self._lock:
            if value > self._allowed.get((device, which), 0):
                self.driver.set_function_attribute(self._functions[device], which, value, device)
                self._allowed[device, which] = value

    def __del__(self) -> None:
        library, self._library = getattr(self, "_library", 0), 0
        if library:
            try:
                self.driver.unload(library)
            except Exception:  # at interpreter exit the driver may be gone before us: nothing is left to free
                return


class Function(NamedTuple):
    """A kernel on one device. Holds its module."""

    module: Module
    handle: int
    device: int

    def attribute(self, name: str) -> int:
        """max_threads, static_smem (bytes), local_bytes or registers, as the driver sees them."""
        return self.module.driver.function_attribute(self.handle, FUNCTION_ATTRIBUTES[name], self.device)

    def allow(self, smem: int, cluster: tuple[int, int, int] = (1, 1, 1)) -> None:
        """Lets the kernel be launched with `smem` bytes of dynamic shared memory, and with such clusters."""
        if smem:
            self.module.raise_attribute(self.device, _MAX_DYNAMIC_SMEM, smem)
        if cluster[0] * cluster[1] * cluster[2] > PORTABLE_CLUSTER:
            self.module.raise_attribute(self.device, _NON_PORTABLE_CLUSTER, 1)


class LaunchPlan:
    """One kernel with its launch and its arguments, packed once; a call rewrites what changed and launches.

    values: by name an address or int, a float or a TensorMap for every parameter. Raises ConfigError with all that
    differs from what the cubin takes or the device holds. A plan is for one thread at a time.
    """

    def __init__(self, function: Function, launch: Launch, params: Sequence[Param], /, **values: Any) -> None:
        module, driver = function.module, function.module.driver
        bad = param_problems(module.facts, params)
        if not bad:
            bad = _value_problems(params, values)
        bad += _launch_problems(module.facts, launch, driver.attribute(_MAX_SMEM_OPTIN, function.device))
        if bad:
            raise ConfigError.of(f"launch of {module.title}", bad)
        function.allow(launch.smem, launch.cluster)
        self.params = tuple(params)
        self._kinds = dict(self.params)
        self._slots = {p.name: KINDS[p.kind][1](values[p.name]) if p.kind != "tmap" else values[p.name] for p in params}
        places = [slot.at if isinstance(slot, TensorMap) else addressof(slot) for slot in self._slots.values()]
        self._array = (c_void_p * len(places))(*places)
        self._config, self._attributes = pack_config(launch)
        self._launch = launch
        self._function = function
        self._driver = driver
        # All that launch() touches, bound once.
        self._call = driver.launch_kernel
        self._arguments = (addressof(self._config), function.handle, addressof(self._array), None)

    def slot(self, name: str) -> Any:
        """A parameter's ctypes value (`.value` may be rewritten between launches, unchecked), or its TensorMap."""
        return self._slots[name]

    def set(self, name: str, value: Any) -> None:
        """Rewrites a parameter, checked; an address re-encodes a tensor map."""
        slot = self._slots[name]
        if isinstance(slot, TensorMap):
            slot.encode(value)
            return
        bad = _value_problem(Param(name, self._kinds[name]), value)
        if bad:
            raise ConfigError(f"launch of {self._function.module.title}: {bad}")
        slot.value = value

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Another grid for the launches to come."""
        bad = _grid_problems(grid, self._launch.cluster)
        if bad:
            raise ConfigError.of(f"launch of {self._function.module.title}", bad)
        self._config.grid[:] = grid

    @property
    def launch_facts(self) -> Launch:
        """The launch as it is now."""
        x, y, z = self._config.grid
        return Launch((x, y, z), self._launch.block, self._launch.cluster, self._launch.smem, self._launch.pdl)

    def launch(self, stream: int) -> None:
        """Launches on `stream` (a CUstream handle, 0 for the default one). Raises LaunchError if the driver refuses."""
        self._config.stream = stream
        status = self._call(*self._arguments)
        if status:
            self._recover(status)

    def _recover(self, status: int) -> None:
        """A thread that never touched the GPU has no context: it gets the device's, once. All else is an error."""
        if status == _INVALID_CONTEXT:
            self._driver.ensure_context(self._function.device)
            status = self._call(*self._arguments)
        if status:
            where = f"on device {self._function.device} with {self.launch_facts}"
            raise LaunchError(f"launch of {self._function.module.title} {where}: {self._driver.error(status)}")


def pack_config(launch: Launch) -> tuple[LaunchConfig, Any]:
    """The launch as the driver takes it, and its attributes, which must stay alive beside it."""
    attributes = []
    if launch.cluster != (1, 1, 1):
        attributes.append(LaunchAttribute(id=_CLUSTER, value=_AttributeValue(dim=(c_uint32 * 3)(*launch.cluster))))
    if launch.pdl:
        attributes.append(LaunchAttribute(id=_PDL, value=_AttributeValue(flag=1)))
    array = (LaunchAttribute * max(len(attributes), 1))(*attributes)
    config = LaunchConfig(
        grid=(c_uint32 * 3)(*launch.grid),
        block=(c_uint32 * 3)(*launch.block),
        smem=launch.smem,
        attributes=addressof(array),
        count=len(attributes),
    )
    return config, array


def param_problems(facts: Cubin, params: Sequence[Param]) -> list[str]:
    """How the kernel's parameters differ from `params` in number or bytes; [] if they do not."""
    bad = [f"{p.name}: kind {p.kind!r} must be one of {', '.join(KINDS)}" for p in params if p.kind not in KINDS]
    want = [KINDS[p.kind][0] for p in params if p.kind in KINDS]
    have = [size for _, size in facts.params]
    if not bad and want != have:
        names = ", ".join(f"{p.name} {p.kind}" for p in params)
        bad.append(f"the cubin's parameters have {have} bytes, they must have {want} ({names})")
    return bad


def check_params(facts: Cubin, params: Sequence[Param]) -> None:
    """Raises ConfigError unless the kernel's parameters are `params` in number and bytes."""
    bad = param_problems(facts, params)
    if bad:
        raise ConfigError.of(f"kernel {facts.symbol[:60]} ({facts.arch})", bad)


def _value_problem(param: Param, value: Any) -> str | None:
    name, kind = param
    if kind == "tmap":
        return None if isinstance(value, TensorMap) else f"{name}={value!r} must be a TensorMap"
    if kind == "f32":
        return None if type(value) in (int, float) else f"{name}={value!r} must be a float"
    low, high = _RANGES[kind]
    if type(value) is not int or not low <= value <= high:
        return f"{name}={value!r} must be an int from {low} to {high} ({kind})"
    return None


def _value_problems(params: Sequence[Param], values: dict[str, Any]) -> list[str]:
    names = [p.name for p in params]
    bad = [f"{name} is missing" for name in names if name not in values]
    bad += [f"{name} is no parameter, they are {', '.join(names)}" for name in values if name not in names]
    problems = (_value_problem(p, values[p.name]) for p in params if p.name in values)
    return bad + [p for p in problems if p]


def _grid_problems(grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> list[str]:
    bad = [f"grid {grid} must be from (1, 1, 1) to {MAX_GRID}"]
    if len(grid) == 3 and all(1 <= g <= m for g, m in zip(grid, MAX_GRID, strict=True)):
        bad = []
        if any(g % c for g, c in zip(grid, cluster, strict=True) if c > 0):
            bad.append(f"grid {grid} must be a multiple of the cluster {cluster}")
    return bad


def _launch_problems(facts: Cubin, launch: Launch, smem_limit: int) -> list[str]:
    bad = []
    ctas = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if min(launch.cluster) < 1 or ctas > MAX_CLUSTER:
        bad.append(f"cluster {launch.cluster} must have from 1 to {MAX_CLUSTER} CTAs")
    bad += _grid_problems(launch.grid, launch.cluster)
    if facts.block is not None and launch.block != facts.block:
        bad.append(f"block {launch.block} must be {facts.block}, as compiled")
    if min(launch.block) < 1 or threads > 1024:
        bad.append(f"block {launch.block} must have from 1 to 1024 threads")
    if not 0 <= launch.smem <= smem_limit - facts.static_smem:
        bad.append(
            f"smem={launch.smem} must be from 0 to {smem_limit - facts.static_smem} bytes "
            f"({smem_limit} of the device less {facts.static_smem} static)"
        )
    return bad
