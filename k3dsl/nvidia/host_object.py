"""Objects with host code: a launcher that another package's kernels were compiled with, and their cubin inside it.

Where a kernel's parameters are the DSL's private business (tensor maps, layouts, divisors computed by generated host
code), that host code is kept instead of guessed at. The object is linked to a shared library that needs no other: the
eight runtime functions that a launcher calls are jumps through a table, which the loader fills with the driver's launch
function and with callbacks of its own. So the same `Driver` that launches everything else, or a fake one in tests, sees
every launch, and neither the CUDA runtime nor the DSL is loaded.

A shared library is code of this machine: whoever loads one from a cache or a bundle trusts its author, as with any .so.
"""

import ctypes
import itertools
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, addressof, c_int, c_int32, c_uint64, c_void_p
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from k3dsl.errors import CompileError, LaunchError, ToolchainError
from k3dsl.nvidia.cubin import Cubin, parse_all

#: Of the symbols in an object.
PREFIX: Final = "k3dsl"
PAYLOAD: Final = "kernel.so"
_ENTRY: Final = f"_mlir_{PREFIX}__mlir_ciface_"
_TABLE: Final = "k3dsl_calls"
_FATBIN: Final = 0xBA55ED50
_FATBIN_ELF: Final = 2
_INVALID_CONTEXT: Final = 201
_FAILED: Final = 999  # CUDA_ERROR_UNKNOWN
_MAX_SMEM_OPTIN: Final = 97

#: What a launcher imports, in the order of the table. All take and return what the driver's functions do: launch
#: configurations and attributes have one layout in both APIs (tests/compile/test_tokenspeed.py holds the offsets).
IMPORTS: Final = (
    "_cudaLaunchKernelEx",
    "_cudaLibraryLoadData",
    "_cudaLibraryGetKernel",
    "_cudaKernelSetAttributeForDevice",
    "_cuKernelGetAttribute",
    "_cudaDeviceGetAttribute",
    "_cudaFuncSetAttribute",
    "_cudaGetDevice",
)
_SOURCE: Final = """
typedef int status;
void *k3dsl_calls[8];
#define LOCAL __attribute__((visibility("hidden")))
#define VIA(i, ...) ((status (*)(__VA_ARGS__))k3dsl_calls[i])
LOCAL status _cudaLaunchKernelEx(const void *config, void *kernel, void **arguments)
{ return VIA(0, const void *, void *, void **, void **)(config, kernel, arguments, 0); }
LOCAL status _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d,
                                  unsigned m)
{ return VIA(1, void **, const void *)(library, code); }
LOCAL status _cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{ return VIA(2, void **, void *, const char *)(kernel, library, name); }
LOCAL status _cudaKernelSetAttributeForDevice(void *kernel, int which, int value, int device)
{ return VIA(3, void *, int, int, int)(kernel, which, value, device); }
LOCAL status _cuKernelGetAttribute(int *value, int which, void *kernel, int device)
{ return VIA(4, int *, int, void *, int)(value, which, kernel, device); }
LOCAL status _cudaDeviceGetAttribute(int *value, int which, int device)
{ return VIA(5, int *, int, int)(value, which, device); }
LOCAL status _cudaFuncSetAttribute(void *kernel, int which, int value)
{ return VIA(6, void *, int, int)(kernel, which, value); }
LOCAL status _cudaGetDevice(int *device)
{ return VIA(7, int *)(device); }
"""
_FLAGS: Final = (
    *("-shared", "-fPIC", "-O2", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-s"),
    *("-Wl,-z,defs", "-Wl,-z,noexecstack", "-Wl,--build-id=none"),
)


def host_isa() -> str:
    """The host code that is built here: the baseline of this machine's architecture, not its own CPU."""
    machine = platform.machine()
    return "x86-64" if machine in ("x86_64", "AMD64") else machine


def host_target() -> str:
    """`host_isa` as the compiler wants it."""
    isa = host_isa()
    if isa == "x86-64":
        return "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64"
    if isa == "aarch64":
        return "linux-aarch64"
    raise CompileError(f"host code for {isa!r} cannot be built: it must be x86-64 or aarch64")


def linker() -> list[str]:
    """A C compiler: $PATH's, or PyPI's ziglang. Raises ToolchainError without either."""
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise ToolchainError("objects with host code need a C compiler to be linked: install gcc, or pip install ziglang")


def link(data: bytes) -> bytes:
    """A relocatable object as a shared library that needs no other. Raises CompileError, ToolchainError."""
    with tempfile.TemporaryDirectory(prefix="k3dsl-link-") as folder:
        Path(folder, "calls.c").write_text(_SOURCE, encoding="ascii")
        Path(folder, "kernel.o").write_bytes(data)
        command = [*linker(), *_FLAGS, "-o", PAYLOAD, "calls.c", "kernel.o"]
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=300
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolchainError(f"{command[0]} does not link: {error}") from error
        if done.returncode:
            raise CompileError(
                f"{' '.join(command)} ended with status {done.returncode}\n{done.stderr[-3000:].strip()}"
            )
        return Path(folder, PAYLOAD).read_bytes()


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
    _symbols(data)
    return parse_all(cubin_of(data))


def problems(data: bytes, arch: str) -> list[str]:
    """Why `data` cannot be loaded here for GPUs of `arch`; [] if it can. Loads nothing."""
    try:
        kernels = facts(data)
    except CompileError as error:
        return [str(error)]
    bad = [f"{k.symbol[:60]} is for {k.arch}, not {arch}" for k in kernels if k.arch != arch]
    from elftools.elf.elffile import ELFFile

    with BytesIO(data) as file:
        machine = ELFFile(file)["e_machine"]
    wanted = {"x86-64": "EM_X86_64", "aarch64": "EM_AARCH64"}.get(host_isa())
    return bad + ([f"its host code is for {machine}, this machine runs {host_isa()}"] if machine != wanted else [])


def _symbols(data: bytes) -> dict[str, str]:
    """The names that a loader looks up: init, load, entry, table."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with BytesIO(data) as file:
            elf = ELFFile(file)
            if elf["e_type"] != "ET_DYN":
                raise CompileError("a host object must be a shared library")
            dynamic = elf.get_section_by_name(".dynsym")
            names = [s.name for s in dynamic.iter_symbols()] if dynamic is not None else []
            needed = elf.get_section_by_name(".dynamic")
            others = [t.needed for t in needed.iter_tags("DT_NEEDED")] if needed is not None else []
    except (ELFError, struct.error, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise CompileError(
            f"not a readable host object ({len(data)} bytes): {type(error).__name__}: {error}"
        ) from error
    entries = [n for n in names if n.startswith(_ENTRY)]
    found = {"init": f"_mlir_{PREFIX}_cuda_init", "load": f"_mlir_{PREFIX}_cuda_load_to_device", "table": _TABLE}
    missing = [n for n in found.values() if n not in names]
    if missing or len(entries) != 1 or others:
        raise CompileError(
            f"a host object must have one launcher and need no library: it has {len(entries)}, needs "
            f"{', '.join(others) or 'none'}, misses {', '.join(missing) or 'nothing'}"
        )
    return {**found, "entry": entries[0]}


# ---- loading


class HostObject:
    """A host object loaded for one device: its cubin through the driver, its launcher into this process.

    Raises CompileError for bytes that are none, LaunchError where the driver refuses. Stays loaded while it lives; the
    launcher's few pages stay for the life of the process.
    """

    def __init__(self, driver: Any, data: bytes, device: int) -> None:
        names = _symbols(data)
        cubin = cubin_of(data)
        self.kernels = parse_all(cubin)
        self.driver, self.device = driver, device
        self._errors: list[BaseException] = []
        self._library = driver.load(cubin)
        self._handles = {
            kernel.symbol: driver.function(driver.kernel(self._library, kernel.symbol), device)
            for kernel in self.kernels
        }
        self._code = _open(data)
        self._callbacks = self._bind(names["table"])
        self._start(names)
        self.entry: Any = getattr(self._code, names["entry"])
        self.entry.argtypes, self.entry.restype = [c_void_p, c_int], None

    def _bind(self, table: str) -> list[Any]:
        """Fills the launcher's table."""
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

        callbacks = [
            CFUNCTYPE(c_int, *types)(self._safe(body))
            for body, types in (
                (load, (out, c_void_p)),
                (kernel, (out, c_void_p, ctypes.c_char_p)),
                (set_attribute, (c_void_p, c_int, c_int, c_int)),
                (attribute, (number, c_int, c_void_p, c_int)),
                (device_attribute, (number, c_int, c_int)),
                (set_here, (c_void_p, c_int, c_int)),
                (current, (number,)),
            )
        ]
        places = (c_void_p * len(IMPORTS)).in_dll(self._code, table)
        if any(places):
            raise LaunchError("a launcher was loaded twice as one library: its table is in use")
        for i, function in enumerate((driver.launch_kernel, *callbacks)):
            places[i] = ctypes.cast(function, c_void_p).value
        return callbacks

    def _safe(self, body: Any) -> Any:
        def call(*arguments: Any) -> int:
            try:
                body(*arguments)
                return 0
            except BaseException as error:  # nothing can be raised through the launcher
                self._errors.append(error)
                return _FAILED

        return call

    def _start(self, names: dict[str, str]) -> None:
        """The launcher's own initialization: it takes the kernels' handles and sets their attributes."""
        library, status, device = c_void_p(), c_int32(0), c_int32(self.device)
        at = c_void_p(addressof(library))
        steps: Sequence[tuple[str, tuple[Any, ...]]] = (
            (names["init"], (at, status)),
            (names["load"], (at, device, status)),
        )
        for name, values in steps:
            function = getattr(self._code, name)
            function.argtypes, function.restype = [c_void_p], None
            function((c_void_p * len(values))(*(addressof(v) for v in values)))
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


_loads: Final = itertools.count()


def _open(data: bytes) -> ctypes.CDLL:
    """The library in memory. Each load is a library of its own, with its own table.

    The dynamic loader takes a path that it has seen for the library that it has, and numbers of closed files come
    again: so the path is spelled in another way each time.
    """
    file = os.memfd_create(PREFIX, os.MFD_CLOEXEC)
    spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_loads):032b}")
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(data)
        return ctypes.CDLL(f"/proc/self/fd/{spelling}{file}")
    except OSError as error:
        raise CompileError(f"a host object of {len(data)} bytes does not load: {error}") from error
    finally:
        os.close(file)


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
