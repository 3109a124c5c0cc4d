# ruff: noqa: N802  (methods are named after the functions of the driver that they stand for)
"""A CUDA driver in Python, for tests without a GPU: it checks and records what the real one would be asked to do.

    driver = FakeDriver()                                # an H200; FakeDriver(sm_count=148, capability=(10, 0)), ...
    module = Module.load(driver, make_cubin(params))     # or a real cubin
    plan = LaunchPlan(module.function(0), Launch(...), params, rows=3, ...)
    plan.launch(stream)
    launch = driver.launches[-1]
    launch.grid, .block, .cluster, .smem, .pdl, .stream, .device, .symbol, .attributes
    launch.values(params)                                # {"rows": 3, ...}; a tensor map as its 128 bytes
    driver.tensor_map(bytes)                             # what a recorded map was encoded with

    with driver.capture(stream):                         # is_capturing(stream) is True; what must not happen meanwhile
        ...                                              # (loads, attributes, contexts) is noted in driver.violations
    driver.fail("cuLaunchKernelEx", 700)                 # the next such call answers this status
    driver.calls                                         # Counter of the functions called

`fake_build(key)` is a build function for `CompileCache.get_or_build`: an object with the right target and parameters
and no code. The fixture `fake_driver` (conftest.py) makes a FakeDriver the process's driver for a test.

A launch is refused as the real driver refuses it: a grid that is no multiple of the cluster, more shared memory than
was allowed, another block than compiled, no context in this thread. Needs no torch and no DSL.
"""

import ctypes
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any

from k3dsl.cache.entry import Built
from k3dsl.cache.key import CompileKey
from k3dsl.nvidia.cubin import RESERVED_SMEM, Cubin, parse
from k3dsl.nvidia.driver import KINDS, OPTIONAL, SIGNATURES, Driver, LaunchAttribute, LaunchConfig, Param

MAP_PATTERN = b"k3dsl-map"
INVALID_VALUE, INVALID_IMAGE, INVALID_CONTEXT, INVALID_HANDLE, UNKNOWN = 1, 200, 201, 400, 999
_NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    200: "CUDA_ERROR_INVALID_IMAGE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    400: "CUDA_ERROR_INVALID_HANDLE",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
}
_DEFAULT_SMEM = 48 * 1024
#: Calls that must not happen while a stream is captured.
_NOT_IN_CAPTURE = (
    "cuLibraryLoadData",
    "cuLibraryUnload",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuFuncLoad",
    "cuFuncSetAttribute",
    "cuDevicePrimaryCtxRetain",
)


@dataclass(frozen=True)
class Recorded:
    """One launch as the driver saw it."""

    symbol: str
    device: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    pdl: bool
    stream: int
    arguments: tuple[bytes, ...]
    attributes: tuple[int, ...]

    def values(self, params: Sequence[Param]) -> dict[str, Any]:
        """The arguments by name, as the kinds of `params` read them."""
        assert [len(a) for a in self.arguments] == [KINDS[p.kind][0] for p in params]
        formats = {"ptr": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}
        return {
            p.name: data if p.kind == "tmap" else struct.unpack(formats[p.kind], data)[0]
            for p, data in zip(params, self.arguments, strict=True)
        }


@dataclass(frozen=True)
class Encoded:
    """The arguments of one cuTensorMapEncodeTiled."""

    dtype: int
    address: int
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    fill: int


class FakeCuda:
    """The function table: an object with the driver's functions as attributes, for `Driver(library)`."""

    def __init__(
        self,
        *,
        sm_count: int = 132,
        capability: tuple[int, int] = (9, 0),
        smem: int = 232448,
        devices: int = 1,
        version: int = 13000,
        without: Sequence[str] = (),
    ) -> None:
        self.attributes = {16: sm_count, 75: capability[0], 76: capability[1], 97: smem, 81: 233472, 38: 60 * 2**20}
        self.devices, self.driver_version = devices, version
        self.launches: list[Recorded] = []
        self.maps: list[Encoded] = []
        self.violations: list[str] = []
        self.errors: list[str] = []
        self.calls: Counter[str] = Counter()
        self.capturing: set[int] = set()
        self.loaded: dict[int, Cubin] = {}  # library handle -> facts
        self.allowed: dict[tuple[int, int], int] = {}  # (function handle, attribute) -> value
        self.failures: dict[str, int] = {}
        self._next = 0x1000
        self._kernels: dict[int, Cubin] = {}
        self._functions: dict[int, tuple[Cubin, int]] = {}
        self._thread = threading.local()
        self._keep = []
        for name, arguments in {**SIGNATURES, **OPTIONAL}.items():
            if name not in without:
                callback = CFUNCTYPE(c_int, *arguments)(self._wrap(name))
                self._keep.append(callback)
                setattr(self, name, callback)

    def _wrap(self, name: str) -> Any:
        body = getattr(self, f"_{name}")

        def call(*arguments: Any) -> int:
            try:
                self.calls[name] += 1
                if self.capturing and name in _NOT_IN_CAPTURE:
                    self.violations.append(name)
                if name in self.failures:
                    return self.failures.pop(name)
                return body(*arguments) or 0
            except Exception as error:  # nothing can be raised through C
                self.errors.append(f"{name}: {type(error).__name__}: {error}")
                return UNKNOWN

        return call

    def _handle(self) -> int:
        self._next += 0x10
        return self._next

    # ---- the functions, in the order of SIGNATURES

    def _cuInit(self, flags: int) -> int:
        return 0

    def _cuDriverGetVersion(self, out: Any) -> int:
        out[0] = self.driver_version
        return 0

    def _cuDeviceGetCount(self, out: Any) -> int:
        out[0] = self.devices
        return 0

    def _cuDeviceGet(self, out: Any, index: int) -> int:
        out[0] = index
        return 0 if 0 <= index < self.devices else 101

    def _cuDeviceGetName(self, text: Any, size: int, device: int) -> int:
        ctypes.memmove(text, b"Fake GPU\0", 9)
        return 0

    def _cuDeviceGetAttribute(self, out: Any, which: int, device: int) -> int:
        if which not in self.attributes:
            return INVALID_VALUE
        out[0] = self.attributes[which]
        return 0

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> int:
        out[0] = 0xC0 + device
        return 0

    def _cuCtxGetCurrent(self, out: Any) -> int:
        out[0] = getattr(self._thread, "context", None)
        return 0

    def _cuCtxSetCurrent(self, context: int | None) -> int:
        self._thread.context = context
        return 0

    def _cuLibraryLoadData(self, out: Any, code: int, *_: Any) -> int:
        try:
            facts = parse(_elf_at(code))
        except Exception:
            return INVALID_IMAGE
        major, minor = self.attributes[75], self.attributes[76]
        if facts.arch != f"sm_{major}{minor}a":
            return 209  # CUDA_ERROR_NO_BINARY_FOR_GPU
        out[0] = handle = self._handle()
        self.loaded[handle] = facts
        return 0

    def _cuLibraryUnload(self, library: int) -> int:
        return 0 if self.loaded.pop(library, None) else INVALID_HANDLE

    def _cuLibraryGetKernel(self, out: Any, library: int, symbol: bytes) -> int:
        facts = self.loaded[library]
        if symbol.decode() != facts.symbol:
            return 500  # CUDA_ERROR_NOT_FOUND
        out[0] = handle = self._handle()
        self._kernels[handle] = facts
        return 0

    def _cuKernelGetFunction(self, out: Any, kernel: int) -> int:
        context = getattr(self._thread, "context", None)
        if not context:
            return INVALID_CONTEXT
        out[0] = handle = self._handle()
        self._functions[handle] = (self._kernels[kernel], context - 0xC0)
        return 0

    def _cuFuncGetAttribute(self, out: Any, which: int, function: int) -> int:
        facts, _ = self._functions[function]
        out[0] = {0: 1024, 1: facts.static_smem, 3: facts.frame, 4: facts.registers}[which]
        return 0

    def _cuFuncSetAttribute(self, function: int, which: int, value: int) -> int:
        facts, _ = self._functions[function]
        if which == 8 and value + facts.static_smem > self.attributes[97]:
            return INVALID_VALUE
        self.allowed[function, which] = value
        return 0

    def _cuLaunchKernelEx(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        if not getattr(self._thread, "context", None):
            return INVALID_CONTEXT
        if function not in self._functions:
            return INVALID_HANDLE
        facts, device = self._functions[function]
        launch = LaunchConfig.from_address(config)
        cluster, pdl, ids = (1, 1, 1), False, []
        attributes = (LaunchAttribute * launch.count).from_address(launch.attributes) if launch.count else []
        for attribute in attributes:
            ids.append(attribute.id)
            if attribute.id == 4:
                cluster = tuple(attribute.value.dim)
            elif attribute.id == 6:
                pdl = bool(attribute.value.flag)
        recorded = Recorded(
            symbol=facts.symbol,
            device=device,
            grid=tuple(launch.grid),
            block=tuple(launch.block),
            cluster=cluster,
            smem=launch.smem,
            pdl=pdl,
            stream=launch.stream or 0,
            arguments=tuple(_argument(arguments, i, size) for i, (_, size) in enumerate(facts.params)),
            attributes=tuple(ids),
        )
        if self._refused(recorded, facts, function):
            return INVALID_VALUE
        self.launches.append(recorded)
        return 0

    def _refused(self, launch: Recorded, facts: Cubin, function: int) -> bool:
        ctas = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        smem = self.allowed.get((function, 8), _DEFAULT_SMEM - facts.static_smem)
        return (
            min(*launch.grid, *launch.block, *launch.cluster) < 1
            or any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True))
            or max(launch.grid[1:]) > 65535
            or launch.smem > smem
            or ctas > (16 if self.allowed.get((function, 14)) else 8)
            or facts.block not in (None, launch.block)
            or launch.block[0] * launch.block[1] * launch.block[2] > 1024
        )

    def _cuStreamIsCapturing(self, stream: int | None, out: Any) -> int:
        out[0] = int((stream or 0) in self.capturing)
        return 0

    def _cuTensorMapEncodeTiled(self, at: int, dtype: int, rank: int, address: int, *rest: int) -> int:
        dims, strides, box, steps, *modes = rest
        if at % 64 or address % 16:
            return INVALID_VALUE
        number = len(self.maps)
        self.maps.append(
            Encoded(
                dtype,
                address,
                tuple((c_uint64 * rank).from_address(dims)),
                tuple((c_uint64 * (rank - 1)).from_address(strides)),
                tuple((c_uint32 * rank).from_address(box)),
                tuple((c_uint32 * rank).from_address(steps)),
                *modes,
            )
        )
        ctypes.memmove(at, struct.pack("<16sQQ96x", MAP_PATTERN, number, address), 128)
        return 0

    def _cuOccupancyMaxActiveClusters(self, out: Any, function: int, config: int) -> int:
        launch = LaunchConfig.from_address(config)
        attributes = (LaunchAttribute * launch.count).from_address(launch.attributes) if launch.count else []
        ctas = next((a.value.dim[0] * a.value.dim[1] * a.value.dim[2] for a in attributes if a.id == 4), 1)
        out[0] = self.attributes[16] // ctas
        return 0

    def _cuGetErrorName(self, status: int, out: Any) -> int:
        out[0] = _TEXTS.get(status, b"CUDA_ERROR_OTHER")
        return 0

    def _cuGetErrorString(self, status: int, out: Any) -> int:
        out[0] = b"as the test asked for"
        return 0

    def _cuFuncLoad(self, function: int) -> int:
        return 0 if function in self._functions else INVALID_HANDLE

    def _cuKernelGetParamInfo(self, kernel: int, index: int, offset: Any, size: Any) -> int:
        params = self._kernels[kernel].params
        if index >= len(params):
            return INVALID_VALUE
        offset[0], size[0] = params[index]
        return 0


class FakeDriver(Driver):
    """A Driver on a FakeCuda; the arguments are those of FakeCuda."""

    def __init__(self, **facts: Any) -> None:
        self.cuda = FakeCuda(**facts)
        super().__init__(self.cuda)

    @property
    def launches(self) -> list[Recorded]:
        return self.cuda.launches

    @property
    def violations(self) -> list[str]:
        return self.cuda.violations

    @property
    def calls(self) -> Counter[str]:
        return self.cuda.calls

    def tensor_map(self, data: bytes) -> Encoded:
        """What a map was encoded with, from its 128 bytes."""
        pattern, number, _ = struct.unpack_from("<16sQQ", data)
        assert len(data) == 128
        assert pattern.rstrip(b"\0") == MAP_PATTERN
        return self.cuda.maps[number]

    @contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        """A graph is being captured on `stream`."""
        self.cuda.capturing.add(stream)
        try:
            yield
        finally:
            self.cuda.capturing.discard(stream)

    def fail(self, name: str, status: int) -> None:
        """The next call of `name` answers `status`."""
        self.cuda.failures[name] = status


_TEXTS = {status: name.encode() for status, name in _NAMES.items()}


def _argument(array: int, index: int, size: int) -> bytes:
    place = ctypes.c_void_p.from_address(array + 8 * index).value
    assert place, f"parameter {index} has no address"
    return ctypes.string_at(place, size)


def _elf_at(address: int) -> bytes:
    """The bytes of an ELF file in memory: it ends with its section or program headers."""
    head = ctypes.string_at(address, 64)
    if head[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    phoff, shoff = struct.unpack_from("<QQ", head, 0x20)
    phsize, phnum, shsize, shnum = struct.unpack_from("<HHHH", head, 0x36)
    return ctypes.string_at(address, max(shoff + shsize * shnum, phoff + phsize * phnum))


# ---- objects without code


def make_cubin(
    params: Sequence[Param],
    *,
    symbol: str = "kernel_of_a_test",
    arch: str = "sm_90a",
    block: tuple[int, int, int] | None = None,
    registers: int = 32,
    frame: int = 0,
    static_smem: int = 0,
    tool: str = "13.4",
    kernels: int = 1,
) -> bytes:
    """A cubin that says of itself what the arguments say, and holds no instruction."""
    names = [symbol, *(f"{symbol}_{i}" for i in range(1, kernels))]
    strings = b"\0" + b"".join(n.encode() + b"\0" for n in names)
    note = f"Cuda compilation tools, release {tool}, V{tool}.59\0-O 3 -arch {arch} \0".encode()
    table = bytes(24)
    sections: list[tuple[str, int, bytes, int, int]] = []  # name, type, data, link, bytes if it has none in the file
    for name in names:
        table += struct.pack("<IBBHQQ", strings.index(name.encode()), 0x12, 0x10, 1, 0, 16)
    per_kernel = b"".join(
        _sized(attribute, struct.pack("<II", i + 1, value))
        for i in range(kernels)
        for attribute, value in ((0x2F, registers), (0x11, frame), (0x12, frame))
    )
    own, offset = b"", 0
    places = []
    for param in params:
        size = KINDS[param.kind][0]
        align = 64 if param.kind == "tmap" else size
        offset = -(-offset // align) * align
        places.append((offset, size))
        offset += size
    for ordinal, (place, size) in reversed(list(enumerate(places))):
        own += _sized(0x17, struct.pack("<IHHI", 0, ordinal, place, size << 18 | 0xF000))
    if block is not None:
        own += _sized(0x10, struct.pack("<III", *block))
    sections += [(".symtab", 2, table, 2, 0), (".strtab", 3, strings, 0, 0), (".note.nv.tkinfo", 7, note, 0, 0)]
    sections += [(".nv.info", 0x70000000, per_kernel, 1, 0)]
    for name in names:
        sections += [(f".text.{name}", 1, bytes(16), 1, 0), (f".nv.info.{name}", 0x70000000, own, 1, 0)]
        sections += [(f".nv.shared.{name}", 8, b"", 0, static_smem + RESERVED_SMEM)]
    titles = b"\0" + b"".join(n.encode() + b"\0" for n, *_ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", 3, titles, 0, 0))
    body, headers = b"", bytes(64)
    for name, kind, data, link, size in sections:
        place = titles.index(b"\0" + name.encode() + b"\0") + 1
        entry = 24 if kind == 2 else 0
        headers += struct.pack("<IIQQQQIIQQ", place, kind, 0, 0, 64 + len(body), size or len(data), link, 1, 4, entry)
        body += data + bytes(-len(data) % 8)
    flags = 0x6000002 | int(arch[3:].rstrip("af")) << 8
    ident = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7)
    count = len(sections) + 1
    head = struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), flags, 64, 56, 0, 64, count, count - 1)
    return ident + head + body + headers


def _sized(attribute: int, data: bytes) -> bytes:
    return struct.pack("<BBH", 4, attribute, len(data)) + data


def fake_build(key: CompileKey) -> Built:
    """A build function: no compiler, no code, the right target and parameters."""
    from k3dsl.nvidia.toolchain import PAYLOAD, is_host, kernel_key

    if is_host(kernel_key(key.kernel, key.params)):
        from fake_host import host_object

        return Built(payload=host_object(key.target), filename="kernel.o", resources={}, log="")
    cubin = make_cubin(kernel_key(key.kernel, key.params).params, symbol=f"fake_{key.kernel}", arch=key.target)
    return Built(payload=cubin, filename=PAYLOAD, resources=parse(cubin).resources(), log="")
