"""Objects with host code: a launcher that another package's kernels were compiled with, and their cubin inside it.

Where a kernel's parameters are the DSL's private business (tensor maps, layouts, divisors computed by generated host
code), that host code is kept instead of guessed at. The object is stored as the compiler wrote it, and loaded by
k3dsl.nvidia.image: the eight runtime functions that a launcher calls are the driver's launch function and callbacks of
ours. So the same `Driver` that launches everything else, or a fake one in tests, sees every launch; no C compiler, no
linker, and neither the CUDA runtime nor the DSL takes part.

It is code of this machine: whoever loads one from a cache or a bundle trusts its author, as with any shared library.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, addressof, c_int, c_int32, c_uint64, c_void_p
from typing import Any, Final

from k3dsl.cache.host import host_isa
from k3dsl.errors import CompileError, LaunchError
from k3dsl.nvidia.cubin import Cubin, parse_all
from k3dsl.nvidia.image import Loaded, Relocatable

#: Of the symbols in an object.
PREFIX: Final = "k3dsl"
PAYLOAD: Final = "kernel.o"
_INIT: Final = f"_mlir_{PREFIX}_cuda_init"
_LOAD: Final = f"_mlir_{PREFIX}_cuda_load_to_device"
_ENTRY: Final = f"_mlir_{PREFIX}__mlir_ciface_"
_FATBIN: Final = 0xBA55ED50
_FATBIN_ELF: Final = 2
_INVALID_CONTEXT: Final = 201
_FAILED: Final = 999  # CUDA_ERROR_UNKNOWN

#: What a launcher imports. All take and return what the driver's functions do: launch configurations and attributes
#: have one layout in both APIs (tests/compile/test_tokenspeed.py holds the offsets). True: the driver's takes one more.
_LAUNCH: Final = "_cudaLaunchKernelEx"
IMPORTS: Final[Mapping[str, bool]] = {
    _LAUNCH: True,
    "_cudaLibraryLoadData": False,
    "_cudaLibraryGetKernel": False,
    "_cudaKernelSetAttributeForDevice": False,
    "_cuKernelGetAttribute": False,
    "_cudaDeviceGetAttribute": False,
    "_cudaFuncSetAttribute": False,
    "_cudaGetDevice": False,
}


#: What the compiler calls the baseline of each host ISA: objects run on any machine of it.
TARGETS: Final = {"x86-64": "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64", "aarch64": "linux-aarch64"}

# ---- what an object says of itself


def cubin_of(data: bytes) -> bytes:
    """The cubin inside a host object. Raises CompileError where there is not exactly one."""
    found = []
    head = struct.pack("<I", _FATBIN)
    at = data.find(head)
    while at >= 0:
        try:
            _, version, size, _ = struct.unpack_from("<IHHQ", data, at)
            kind, _, header, length = struct.unpack_from("<HHIQ", data, at + size)
        except struct.error:
            break
        body = data[at + size + header : at + size + header + length]
        if version == 1 and kind == _FATBIN_ELF and body[:4] == b"\x7fELF" and len(body) == length:
            found.append(body)
        at = data.find(head, at + 4)
    if len(found) != 1:
        raise CompileError(f"a host object of {len(data)} bytes holds {len(found)} cubins, it must hold one")
    return found[0]


def facts(data: bytes) -> tuple[Cubin, ...]:
    """The kernels of a host object, in the order of their names. Raises CompileError where it is not one."""
    _read(data)
    return parse_all(cubin_of(data))


def problems(data: bytes, arch: str, isa: str | None = None) -> list[str]:
    """Why `data` cannot be loaded for GPUs of `arch` on a host of `isa` (this one); [] if it can. Loads nothing."""
    try:
        found, kernels = _read(data), parse_all(cubin_of(data))
    except CompileError as error:
        return [str(error)]
    bad = [f"{k.symbol[:60]} is for {k.arch}, not {arch}" for k in kernels if k.arch != arch]
    return bad + _foreign(found, isa or host_isa())


def _foreign(found: Relocatable, isa: str) -> list[str]:
    return [] if found.isa == isa else [f"its host code is for {found.isa}, not {isa}"]


def _read(data: bytes) -> Relocatable:
    """An object whose launcher is one that `HostObject` knows how to start."""
    found = Relocatable(data, IMPORTS)
    entries = _entries(found)
    missing = [name for name in (_INIT, _LOAD) if name not in found.defined]
    if missing or len(entries) != 1:
        raise CompileError(
            f"a host object must have one launcher: it has {len(entries)}, and misses {', '.join(missing) or 'nothing'}"
        )
    return found


def _entries(found: Relocatable) -> list[str]:
    return [name for name in found.defined if name.startswith(_ENTRY)]


# ---- loading


class HostObject:
    """A host object loaded for one device: its cubin through the driver, its launcher into this process' memory.

    Raises CompileError for bytes that are none, LaunchError where the driver or the system refuses. Stays loaded while
    it lives.
    """

    def __init__(self, driver: Any, data: bytes, device: int) -> None:
        found, cubin = _read(data), cubin_of(data)
        if bad := _foreign(found, host_isa()):
            raise CompileError(f"a host object cannot be loaded here: {bad[0]}")
        self.kernels = parse_all(cubin)
        self.driver, self.device = driver, device
        self._errors: list[BaseException] = []
        self._library = driver.load(cubin)
        self._handles = {
            kernel.symbol: driver.function(driver.kernel(self._library, kernel.symbol), device)
            for kernel in self.kernels
        }
        self._callbacks = self._answers()
        launch = {_LAUNCH: driver.launch_kernel}
        functions = {n: ctypes.cast(f, c_void_p).value or 0 for n, f in {**launch, **self._callbacks}.items()}
        self._code = Loaded(found, functions)
        self._start()
        self.entry: Any = self._code.function(_entries(found)[0], None, c_void_p, c_int)

    def _answers(self) -> dict[str, Any]:
        """What the launcher's questions are answered by, each under the name that it imports."""
        driver, device = self.driver, self.device
        out, number = POINTER(c_void_p), POINTER(c_int)

        def load(library: Any, _code: int) -> None:
            library[0] = self._library

        def kernel(handle: Any, _library: int, name: bytes) -> None:
            handle[0] = self._handles[name.decode()]

        def set_attribute(handle: int, which: int, value: int, on: int) -> None:
            driver.set_function_attribute(handle, which, value, on)

        def attribute(value: Any, which: int, handle: int, on: int) -> None:
            value[0] = driver.function_attribute(handle, which, on)

        def device_attribute(value: Any, which: int, on: int) -> None:
            value[0] = driver.attribute(which, on)

        def set_here(handle: int, which: int, value: int) -> None:
            driver.set_function_attribute(handle, which, value, device)

        def current(value: Any) -> None:
            value[0] = device

        return {
            name: CFUNCTYPE(c_int, *types)(self._safe(body))
            for name, body, types in (
                ("_cudaLibraryLoadData", load, (out, c_void_p)),
                ("_cudaLibraryGetKernel", kernel, (out, c_void_p, ctypes.c_char_p)),
                ("_cudaKernelSetAttributeForDevice", set_attribute, (c_void_p, c_int, c_int, c_int)),
                ("_cuKernelGetAttribute", attribute, (number, c_int, c_void_p, c_int)),
                ("_cudaDeviceGetAttribute", device_attribute, (number, c_int, c_int)),
                ("_cudaFuncSetAttribute", set_here, (c_void_p, c_int, c_int)),
                ("_cudaGetDevice", current, (number,)),
            )
        }

    def _safe(self, body: Any) -> Any:
        def call(*arguments: Any) -> int:
            try:
                body(*arguments)
                return 0
            except BaseException as error:  # nothing can be raised through the launcher
                self._errors.append(error)
                return _FAILED

        return call

    def _start(self) -> None:
        """The launcher's own initialization: it takes the kernels' handles and sets their attributes."""
        library, status, device = c_void_p(), c_int32(0), c_int32(self.device)
        at = c_void_p(addressof(library))
        steps: Sequence[tuple[str, tuple[Any, ...]]] = ((_INIT, (at, status)), (_LOAD, (at, device, status)))
        for name, values in steps:
            self._code.function(name, None, c_void_p)((c_void_p * len(values))(*(addressof(v) for v in values)))
            if self._errors:
                raise self._errors[0]
            if status.value:
                raise LaunchError(f"{name} answered {self.driver.error(status.value)}")

    def __del__(self) -> None:
        library, self._library = getattr(self, "_library", 0), 0
        if library:
            try:
                self.driver.unload(library)
            except Exception:  # at interpreter exit the driver may be gone before us: nothing is left to free
                return


class Tensor(ctypes.Structure):
    """A tensor argument of a launcher: address, extents, then strides of all but the innermost dimension."""

    data: int


def tensor_type(dims: int, strides: int, wide: bool = True) -> Any:
    """The structure of a tensor with that many dynamic extents (int32) and strides (elements; wide: int64, else int32).

    The C header that the DSL writes says int64 for all strides. What is compiled is what its types say: the device
    module checks the launcher's signature, and tests the tensor maps that come out.
    """
    fields: list[Any] = [("data", c_uint64), ("shape", c_int32 * dims)]
    if strides:
        fields.append(("strides", (ctypes.c_int64 if wide else c_int32) * strides))
    return type(f"Tensor{dims}_{strides}", (Tensor,), {"_fields_": fields})


class HostPlan:
    """One call of a launcher with its arguments packed once. `values` may be rewritten in place between launches."""

    def __init__(self, loaded: HostObject, values: Sequence[Any]) -> None:
        self._loaded = loaded
        self._values = tuple(values)
        self._stream = c_uint64(0)
        self._status = c_int32(0)
        places = [addressof(v) for v in (*self._values, self._stream, self._status)]
        self._array = (c_void_p * len(places))(*places)
        self._entry = loaded.entry
        self._arguments = (addressof(self._array), len(places))

    def launch(self, stream: int) -> None:
        """Launches on `stream`, a CUstream handle. Raises LaunchError if the driver refuses."""
        self._stream.value = stream
        self._entry(*self._arguments)
        if self._status.value:
            self._recover()

    def _recover(self) -> None:
        """A thread that never touched the GPU has no context: it gets the device's, once. All else is an error."""
        loaded = self._loaded
        if self._status.value == _INVALID_CONTEXT:
            loaded.driver.ensure_context(loaded.device)
            self._status.value = 0
            self._entry(*self._arguments)
        status, self._status.value = self._status.value, 0
        if status:
            title = loaded.kernels[0].symbol[:60]
            raise LaunchError(f"launch of {title} on device {loaded.device}: {loaded.driver.error(status)}")
