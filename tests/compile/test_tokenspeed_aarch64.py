"""The launcher for aarch64 (GB200, GB300), relocated by us and run by an emulator of that CPU.

It must launch what the one for x86-64 does, which runs here. Skips without the emulator: pip install unicorn.
"""

import ctypes
import struct

import pytest
from fake_blackwell import BlackwellDriver

from k3dsl import CompileCache
from k3dsl.nvidia import host_object
from k3dsl.nvidia.core import tokenspeed
from k3dsl.nvidia.core.tokenspeed import ENTRY, LATENT, ROPE, TokenspeedKey
from k3dsl.nvidia.cubin import parse_all
from k3dsl.nvidia.host_object import HostObject, HostPlan
from k3dsl.nvidia.image import Relocatable
from k3dsl.nvidia.stages_packages import _CACHE, _FLAT, _OUT, _QUERY, _TABLE
from k3dsl.nvidia.toolchain import build, compile_key

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(host_object.host_isa() != "x86-64", reason="compares with a launcher that runs on x86-64"),
]
pytest.importorskip("tokenspeed_mla", reason="tokenspeed-mla is not installed: pip install 'k3dsl[nvidia]'")
unicorn = pytest.importorskip("unicorn", reason="unicorn is not installed: pip install unicorn")

ROWS, HEADS, STREAM = 2, 12, 0x57
CODE, CALLS, STACK, HEAP, END = 0x40000000, 0x50000000, 0x60000000, 0x70000000, 0x50008000

#: Bytes of a parameter that are set, by its size: the first half of a tensor map, and structures but for their padding.
MEANT = {128: 64, 48: 44, 40: 36, 16: 12, 12: 10}


class Arm:
    """An object in the emulator, with the driver played here. `launches`: symbol, grid, block, smem, stream, words."""

    def __init__(self, data):
        from unicorn import arm64_const as registers

        self.x = [getattr(registers, f"UC_ARM64_REG_X{i}") for i in range(4)]
        self.lr, self.sp = registers.UC_ARM64_REG_LR, registers.UC_ARM64_REG_SP
        self.cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.object = Relocatable(data, host_object.IMPORTS)
        self.names, self.kernels, self.launches = list(host_object.IMPORTS), [], []
        self.facts = {kernel.symbol: kernel for kernel in parse_all(host_object.cubin_of(data))}
        for at, size in ((CODE, -(-self.object.size // 65536) * 65536), (CALLS, 65536), (STACK, 65536), (HEAP, 65536)):
            self.cpu.mem_map(at, size)
        self.cpu.mem_write(CODE, self.object.image(CODE, {n: CALLS + 16 * i for i, n in enumerate(self.names)}))
        self.cpu.mem_write(CALLS, b"\xc0\x03\x5f\xd6" * 16384)  # ret
        self.cpu.hook_add(unicorn.UC_HOOK_CODE, self.called, begin=CALLS, end=CALLS + 16 * len(self.names) - 1)
        self.free = HEAP

    def put(self, data):
        at, self.free = self.free, self.free + -(-len(data) // 64) * 64
        self.cpu.mem_write(at, bytes(data))
        return at

    def read(self, at, size):
        return bytes(self.cpu.mem_read(at, size))

    def text(self, at):
        end = at
        while self.read(end, 1) != b"\0":
            end += 1
        return self.read(at, end - at).decode()

    def word(self, at):
        return int.from_bytes(self.read(at, 8), "little")

    def called(self, cpu, address, size, user):
        name, x = self.names[(address - CALLS) // 16], [cpu.reg_read(r) for r in self.x]
        if name == "_cudaLibraryGetKernel":
            self.kernels.append(self.text(x[2]))
            cpu.mem_write(x[0], len(self.kernels).to_bytes(8, "little"))
        elif name == "_cudaLaunchKernelEx":
            assert x[3] == 0  # what the driver's function takes more than the runtime's
            kernel = self.facts[self.kernels[x[1] - 1]]
            grid, block, smem, _, stream = struct.unpack("<12s12sIIQ", self.read(x[0], 40))
            arguments = [self.read(self.word(x[2] + 8 * i), size) for i, (_, size) in enumerate(kernel.params)]
            self.launches.append(
                (kernel.symbol, struct.unpack("<3I", grid), struct.unpack("<3I", block), smem, stream, arguments)
            )
        elif name in ("_cuKernelGetAttribute", "_cudaDeviceGetAttribute"):
            cpu.mem_write(x[0], (1024 if name[3] == "K" else 232448).to_bytes(4, "little"))
        elif name in ("_cudaGetDevice", "_cudaLibraryLoadData"):
            cpu.mem_write(x[0], bytes(4))
        cpu.reg_write(self.x[0], 0)

    def call(self, symbol, values, count=0):
        self.cpu.reg_write(self.sp, STACK + 65536)
        self.cpu.reg_write(self.lr, END)
        self.cpu.reg_write(self.x[0], self.put(b"".join(v.to_bytes(8, "little") for v in values)))
        self.cpu.reg_write(self.x[1], count)
        self.cpu.emu_start(CODE + self.object.defined[symbol], END, count=1_000_000)


def arguments(cut):
    """The values that TokenspeedCore packs, at made-up addresses."""
    query, cache, table, out, partial, lengths = (n << 36 for n in range(1, 7))
    rows = (HEADS * ENTRY, HEADS * ENTRY, ENTRY)
    pages, latents = (80 * ENTRY, ENTRY), (HEADS * LATENT, HEADS * LATENT, LATENT)
    return [
        _QUERY(query, (ROWS, 1, HEADS, LATENT), rows),
        _QUERY(query + LATENT, (ROWS, 1, HEADS, ROPE), rows),
        _CACHE(cache, (9, 64, LATENT), pages),
        _CACHE(cache + LATENT, (9, 64, ROPE), pages),
        _TABLE(table, (ROWS, 8), (8,)),
        _OUT(out, (ROWS, 1, HEADS, LATENT), latents),
        _FLAT(partial, (cut.workspace,)),
        ctypes.c_int32(cut.splits),
        *(_FLAT(lengths, (ROWS,)), _FLAT(lengths, (ROWS,))),
        *(ctypes.c_float(0.07), ctypes.c_float(0.25)),
    ]


def test_it_launches_what_the_one_for_x86_64_does(tmp_path):
    store, cut = CompileCache(tmp_path), tokenspeed.work(
        "sm_100a", heads=HEADS, q=1, requests=ROWS, max_context=131072, sm_count=148
    )  # fmt: skip
    objects = {
        isa: store.get_or_build(compile_key(TokenspeedKey(HEADS, capacity=128, bands=2, host=isa), "sm_100a"), build)
        for isa in ("x86-64", "aarch64")
    }
    driver = BlackwellDriver()
    HostPlan(HostObject(driver, objects["x86-64"].payload, 0), arguments(cut)).launch(STREAM)

    arm = Arm(objects["aarch64"].payload)
    status, device = arm.put(bytes(4)), arm.put(bytes(4))
    library = arm.put(arm.put(bytes(8)).to_bytes(8, "little"))
    arm.call(host_object._INIT, (library, status))
    arm.call(host_object._LOAD, (library, device, status))
    places = [arm.put(bytes(v)) for v in (*arguments(cut), ctypes.c_uint64(STREAM), ctypes.c_int32(-1))]
    [entry] = host_object._entries(arm.object)
    arm.call(entry, places, len(places))
    assert arm.read(places[-1], 4) == arm.read(status, 4) == bytes(4)

    assert len(arm.launches) == len(driver.launches) == 2
    for (symbol, grid, block, smem, stream, values), native in zip(arm.launches, driver.launches, strict=True):
        assert (grid, block, smem, stream) == (native.grid, native.block, native.smem, native.stream)
        assert symbol == native.symbol
        for one, other in zip(values, native.arguments, strict=True):
            assert one[: MEANT.get(len(one), len(one))] == other[: MEANT.get(len(one), len(one))]
