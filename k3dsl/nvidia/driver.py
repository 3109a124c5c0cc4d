"""The CUDA driver through ctypes: modules, kernels, tensor maps, and launches whose arguments are packed once.

Nothing but `libcuda.so.1` is needed on a GPU node: no CUDA runtime, no compiler, no DSL. Handles of this API are the
same objects as the runtime's, so streams of torch are passed as they are.

Tests replace the library by `FakeDriver` (tests/fake_cuda.py): anything with the `cu*` functions used here as attributes.
"""

import ctypes
import threading
from collections.abc import Iterable, Sequence
from ctypes import POINTER, addressof, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from k3dsl.errors import ConfigError, LaunchError, ToolchainError
from k3dsl.nvidia.cubin import Cubin, parse

# CUfunction_attribute, CUdevice_attribute, CUlaunchAttributeID and the enums of tensor maps, of cuda.h
_MAX_DYNAMIC_SMEM, _NON_PORTABLE_CLUSTER = 8, 14
SM_COUNT, MAX_SMEM, MAJOR, MINOR = 16, 97, 75, 76
_CLUSTER, _PDL = 4, 6
_PORTABLE_CLUSTER: Final = 8
_CAPTURE_NONE: Final = 0
_DTYPES: Final = {"u8": (0, 1), "e4m3": (0, 1), "bf16": (9, 2), "f16": (6, 2), "f32": (7, 4)}  # enum, bytes
_SWIZZLES: Final = {"none": (0, 256 * 16), "32": (1, 32), "64": (2, 64), "128": (3, 128)}  # enum, bytes of a box row
_PROMOTIONS: Final = {"none": 0, "64": 1, "128": 2, "256": 3}


class Param(NamedTuple):
    """A kernel parameter: `kind` is one of ptr, i32, i64, f32, tmap (a tensor map by value)."""

    name: str
    kind: str


@dataclass(frozen=True)
class Launch:
    """A launch: grid, block and cluster in CTAs and threads, dynamic shared memory in bytes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem: int = 0
    pdl: bool = True


class _AttributeValue(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("dim", c_uint32 * 3), ("flag", c_int)]  # noqa: RUF012


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_uint32), ("_pad", c_uint32), ("value", _AttributeValue)]  # noqa: RUF012


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [  # noqa: RUF012
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("smem", c_uint32),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("count", c_uint32),
    ]


#: Bytes and ctypes class of each kind of parameter.
KINDS: Final[dict[str, tuple[int, Any]]] = {
    "ptr": (8, c_uint64),
    "i32": (4, c_int32),
    "i64": (8, c_int64),
    "f32": (4, c_float),
    "tmap": (128, None),
}

_SIGNATURES: Final[dict[str, list[Any]]] = {
    "cuInit": [c_uint32],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuLibraryLoadData": [POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint32, c_void_p, c_void_p, c_uint32],
    "cuLibraryUnload": [c_void_p],
    "cuLibraryGetKernel": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuKernelSetAttribute": [c_int, c_int, c_void_p, c_int],
    "cuLaunchKernelEx": [POINTER(LaunchConfig), c_void_p, c_void_p, c_void_p],
    "cuStreamIsCapturing": [c_void_p, POINTER(c_int)],
    "cuTensorMapEncodeTiled": [c_void_p, c_int, c_uint32, c_void_p, *[c_void_p] * 4, c_int, c_int, c_int, c_int],
    "cuOccupancyMaxActiveClusters": [POINTER(c_int), c_void_p, POINTER(LaunchConfig)],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


class Driver:
    """The driver's functions, checked: a status other than success raises LaunchError with its name."""

    def __init__(self, library: Any = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise ToolchainError(
                    "no CUDA driver: libcuda.so.1 does not load "
                    f"({error}); kernels for sm_* run only where NVIDIA's driver is installed"
                ) from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise ToolchainError(f"the CUDA driver has no {name}: 12.4 or later is needed")
            if hasattr(function, "argtypes"):
                function.argtypes, function.restype = arguments, c_int
            setattr(self, f"_{name}", function)
        self.launch_kernel = self._cuLaunchKernelEx
        self._contexts: dict[int, int] = {}
        self._call("cuInit", 0)

    def __getattr__(self, name: str) -> Any:  # the functions that __init__ binds, for the type checker
        raise AttributeError(name)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self, f"_{name}")(*arguments)
        if status:
            raise LaunchError(f"{name} failed with {self.error_name(status)} ({status})")

    def error_name(self, status: int) -> str:
        """CUDA_ERROR_... of a status."""
        text = c_char_p()
        self._cuGetErrorName(status, byref(text))
        return text.value.decode() if text.value else "an unknown error"

    def _int(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self._call(name, byref(value), *arguments)
        return value.value

    def version(self) -> int:
        """What the driver serves, as 1000 * major + 10 * minor."""
        return self._int("cuDriverGetVersion")

    def device_count(self) -> int:
        return self._int("cuDeviceGetCount")

    def device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), device)
        return text.value.decode()

    def attribute(self, which: int, device: int) -> int:
        """A CUdevice_attribute of a device."""
        return self._int("cuDeviceGetAttribute", which, device)

    def ensure_context(self, device: int) -> None:
        """Makes the primary context of `device` current if this thread has none: torch's own context."""
        current = c_void_p()
        self._call("cuCtxGetCurrent", byref(current))
        if current.value:
            return
        if device not in self._contexts:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._contexts[device] = context.value or 0
        self._call("cuCtxSetCurrent", self._contexts[device])

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured on `stream`."""
        return self._int_out_last("cuStreamIsCapturing", stream) != _CAPTURE_NONE

    def _int_out_last(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self._call(name, *arguments, byref(value))
        return value.value

    def load(self, cubin: bytes) -> int:
        """A library handle of a cubin, for every device."""
        handle = c_void_p()
        self._call("cuLibraryLoadData", byref(handle), cubin, None, None, 0, None, None, 0)
        return handle.value or 0

    def unload(self, library: int) -> None:
        self._call("cuLibraryUnload", library)

    def kernel(self, library: int, symbol: str) -> int:
        handle = c_void_p()
        self._call("cuLibraryGetKernel", byref(handle), library, symbol.encode())
        return handle.value or 0

    def set_kernel_attribute(self, kernel: int, which: int, value: int, device: int) -> None:
        self._call("cuKernelSetAttribute", which, value, kernel, device)

    def encode_tensor_map(self, target: int, *arguments: Any) -> None:
        self._call("cuTensorMapEncodeTiled", target, *arguments)

    def max_active_clusters(self, function: "Function", launch: Launch) -> int:
        """Clusters of this launch that the device holds at once."""
        config, _keep = _config(launch)
        return self._int("cuOccupancyMaxActiveClusters", function.handle, byref(config))


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
    """A loaded cubin. Device independent; it stays loaded for as long as anything holds it or one of its functions."""

    def __init__(self, driver: Driver, cubin: bytes) -> None:
        self.facts: Cubin = parse(cubin)
        self._driver = driver
        self._image = cubin  # the driver may read it again for another device
        self._library = driver.load(cubin)
        self._kernel = driver.kernel(self._library, self.facts.symbol)

    def function(self, device: int, *, smem: int = 0, cluster: int = 1) -> "Function":
        """The kernel on `device`, allowed `smem` bytes of dynamic shared memory and clusters of `cluster` CTAs."""
        if smem:
            self._driver.set_kernel_attribute(self._kernel, _MAX_DYNAMIC_SMEM, smem, device)
        if cluster > _PORTABLE_CLUSTER:
            self._driver.set_kernel_attribute(self._kernel, _NON_PORTABLE_CLUSTER, 1, device)
        return Function(self, self._kernel, device)

    def __del__(self) -> None:
        # At interpreter exit the driver may be gone before us: then there is nothing left to free.
        library, self._library = getattr(self, "_library", 0), 0
        if library:
            try:
                self._driver.unload(library)
            except Exception:
                return


class Function(NamedTuple):
    """A kernel on one device. Holds its module."""

    module: Module
    handle: int
    device: int


class TensorMap:
    """A 128-byte tensor map, encoded on the host and passed to a kernel by value.

    dims, box: elements, innermost first; strides: bytes of every dim but the innermost. Raises ConfigError for what the
    hardware does not take. Source of the rules: cuTensorMapEncodeTiled in the CUDA driver API.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        dtype: str,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: str = "128",
        promotion: str = "128",
        address: int = 0,
    ) -> None:
        code, size = _DTYPES[dtype]
        mode, span = _SWIZZLES[swizzle]
        rank = len(dims)
        bad = []
        if not 1 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
            bad.append(f"{rank} dims, {len(strides)} strides, {len(box)} box sizes: must be n, n - 1, n with n from 1 to 5")
        bad += [f"dim {d} must be from 1 to 2**32" for d in dims if not 1 <= d <= 2**32]
        bad += [f"stride {s} must be a multiple of 16 below 2**40" for s in strides if s % 16 or not 0 <= s < 2**40]
        bad += [f"box size {b} must be from 1 to 256" for b in box if not 1 <= b <= 256]
        if box and box[0] * size > span:
            bad.append(f"a box row of {box[0] * size} bytes must fit the swizzle of {span}")
        if bad:
            raise ConfigError.of("tensor map", bad)
        self._driver = driver
        self._buffer = (ctypes.c_uint8 * 192)()
        self.at = (addressof(self._buffer) + 63) & ~63
        self._dims = (c_uint64 * rank)(*dims)
        self._strides = (c_uint64 * max(rank - 1, 1))(*strides)
        self._box = (c_uint32 * rank)(*box)
        self._ones = (c_uint32 * rank)(*[1] * rank)
        self._fixed = (code, rank)
        self._modes = (0, mode, _PROMOTIONS[promotion], 0)
        if address:
            self.encode(address)

    def encode(self, address: int) -> "TensorMap":
        """Points the map at another base address."""
        if address % 16:
            raise ConfigError(f"tensor map: base address {address:#x} must be a multiple of 16")
        code, rank = self._fixed
        shapes = (addressof(self._dims), addressof(self._strides), addressof(self._box), addressof(self._ones))
        self._driver.encode_tensor_map(self.at, code, rank, address, *shapes, *self._modes)
        return self

    def bytes(self) -> bytes:
        """The encoded map."""
        return ctypes.string_at(self.at, 128)


class LaunchPlan:
    """One kernel with its launch and its arguments packed once; a call rewrites what changed and launches.

    values: an address or an int, a float or a TensorMap for every parameter, by name. Raises ConfigError where names,
    kinds or sizes differ from what the cubin takes.
    """

    def __init__(
        self, driver: Driver, function: Function, launch: Launch, params: Sequence[Param], values: dict[str, Any]
    ) -> None:
        check_params(function.module.facts, params)
        facts = function.module.facts
        bad = [f"{n} is missing" for n in _names(params) if n not in values]
        bad += [f"{n} is no parameter" for n in values if n not in set(_names(params))]
        if facts.block != (0, 0, 0) and facts.block != launch.block:
            bad.append(f"block {launch.block} must be {facts.block}, as compiled")
        bad += [f"{what} {dims} must be at least 1 each" for what, dims in _dims(launch) if min(dims) < 1]
        bad += [f"grid {launch.grid} is no multiple of the cluster {launch.cluster}"] * any(
            g % c for g, c in zip(launch.grid, launch.cluster, strict=True)
        )
        if bad:
            raise ConfigError.of(f"launch of {facts.symbol[:60]}", bad)
        self.launch_facts = launch
        self.params = tuple(params)
        self._slots: dict[str, Any] = {p.name: _pack(p, values[p.name]) for p in params}
        pointers = [slot.at if isinstance(slot, TensorMap) else addressof(slot) for slot in self._slots.values()]
        self._array = (c_void_p * len(pointers))(*pointers)
        self._config, self._attributes = _config(launch)
        self._function = function
        self._driver = driver
        # What launch() touches, bound once.
        self._call = driver.launch_kernel
        self._arguments = (byref(self._config), function.handle, addressof(self._array), None)

    def slot(self, name: str) -> Any:
        """The ctypes value of a parameter (`.value` may be rewritten between launches), or its TensorMap."""
        return self._slots[name]

    def set(self, **values: Any) -> None:
        """Rewrites parameters by name."""
        for name, value in values.items():
            self._slots[name].value = value

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Another grid for the launches to come."""
        self._config.grid[:] = grid

    def launch(self, stream: int) -> None:
        """Launches on `stream` (a CUstream handle). Raises LaunchError if the driver refuses."""
        self._config.stream = stream
        status = self._call(*self._arguments)
        if status:
            name = self._driver.error_name(status)
            raise LaunchError(f"launch of {self._function.module.facts.symbol[:60]} failed with {name} ({status})")


def check_params(facts: Cubin, params: Sequence[Param]) -> None:
    """Raises ConfigError unless the cubin's parameters have the sizes of `params`, in order."""
    bad = [f"{p.name}: kind {p.kind!r} must be one of {', '.join(KINDS)}" for p in params if p.kind not in KINDS]
    if not bad:
        want = [KINDS[p.kind][0] for p in params]
        have = [size for _, size in facts.params]
        if want != have:
            bad.append(f"parameter sizes {have} of the cubin must be {want} ({', '.join(_names(params))})")
    if bad:
        raise ConfigError.of(f"kernel {facts.symbol[:60]}", bad)


def _names(params: Iterable[Param]) -> list[str]:
    return [p.name for p in params]


def _dims(launch: Launch) -> list[tuple[str, tuple[int, int, int]]]:
    return [("grid", launch.grid), ("block", launch.block), ("cluster", launch.cluster)]


def _pack(param: Param, value: Any) -> Any:
    if param.kind == "tmap":
        if not isinstance(value, TensorMap):
            raise ConfigError(f"{param.name}={value!r} must be a TensorMap")
        return value
    return KINDS[param.kind][1](value)


def _config(launch: Launch) -> tuple[LaunchConfig, Any]:
    """The launch as the driver takes it, and what must stay alive beside it."""
    attributes = []
    if launch.cluster != (1, 1, 1):
        attributes.append(_Attribute(id=_CLUSTER, value=_AttributeValue(dim=(c_uint32 * 3)(*launch.cluster))))
    if launch.pdl:
        attributes.append(_Attribute(id=_PDL, value=_AttributeValue(flag=1)))
    array = (_Attribute * max(len(attributes), 1))(*attributes)
    config = LaunchConfig(
        grid=(c_uint32 * 3)(*launch.grid),
        block=(c_uint32 * 3)(*launch.block),
        smem=launch.smem,
        attributes=ctypes.cast(array, POINTER(_Attribute)),
        count=len(attributes),
    )
    return config, array
