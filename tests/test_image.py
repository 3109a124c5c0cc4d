"""Relocatable objects as code of this process: relocations by their numbers, jumps, protection, refusals."""

import ctypes
import struct

import pytest
from fake_blackwell import BlackwellDriver
from fake_host import host_object, make_object

from k3dsl import CompileError, LaunchError
from k3dsl.nvidia import host_object as host
from k3dsl.nvidia import image
from k3dsl.nvidia.host_object import IMPORTS, HostObject
from k3dsl.nvidia.image import Loaded, Relocatable

BASE, TARGET = 0x7F0000000000, 0x123456789ABC
x86 = pytest.mark.skipif(host.host_isa() != "x86-64", reason="runs x86-64 code")


def word(data, at, size=8):
    return int.from_bytes(data[at : at + size], "little")


def test_x86_64_words():
    """Each kind against its formula of the ABI, S + A - P and so on."""
    kinds = ((1, "there", 5), (24, "there", -4), (25, "there", 3), (27, "call", 0), (29, "_GLOBAL_OFFSET_TABLE_", 9))
    relocations = tuple((8 * i, kind, name, addend) for i, (kind, name, addend) in enumerate(kinds))
    symbols = {"_GLOBAL_OFFSET_TABLE_": None, "call": None, "there": 40}
    found = Relocatable(make_object(bytes(64), b"data", symbols, relocations, "x86-64"), {"call": False})
    data = found.image(BASE, {"call": TARGET})
    got, there = BASE + found._got, BASE + 40
    assert word(data, 0) == there + 5
    assert (word(data, 8) + BASE + 8) % 2**64 == there - 4
    assert (word(data, 16) + got) % 2**64 == there + 3
    slot = word(data, 24)  # of the table: the address of a jump
    jump = word(data, found._got + slot) - BASE
    assert data[jump : jump + 12] == b"\x48\xb8" + struct.pack("<Q", TARGET) + b"\xff\xe0"
    assert (word(data, 32) + BASE + 32) % 2**64 == got + 9
    assert found.code % 4096 == found.size % 4096 == 0
    assert found.code <= found._got < found.size


def test_aarch64_fields():
    """Instructions with their immediates, decoded as the ARM manual says."""
    code = struct.pack("<6I", 0x90000000, 0x91000000, 0xF9400000, 0x3DC00000, 0x94000000, 0x14000000) + bytes(8192)
    at = {"_GLOBAL_OFFSET_TABLE_": None, "call": None, "there": 0x1230}
    kinds = (
        (275, "there", 8),
        (277, "there", 8),
        (286, "there", 8),
        (299, "there", 0),
        (283, "call", 0),
        (282, "there", 0),
    )
    relocations = tuple((4 * i, kind, name, addend) for i, (kind, name, addend) in enumerate(kinds))
    relocations += ((24, 260, "there", 1), (32, 257, "there", 2))
    found = Relocatable(make_object(code, b"data", at, relocations, "aarch64"), {"call": True})
    data = found.image(BASE, {"call": TARGET})
    adrp, add, load8, load16, call, branch = (word(data, 4 * i, 4) for i in range(6))
    pages = (adrp >> 29 & 3) | (adrp >> 5 & 0x7FFFF) << 2
    assert (BASE & ~0xFFF) + (pages << 12) == (BASE + 0x1238) & ~0xFFF
    assert add >> 10 & 0xFFF == 0x238
    assert (load8 >> 10 & 0xFFF) * 8 == 0x238
    assert (load16 >> 10 & 0xFFF) * 16 == 0x230
    assert 20 + (branch & 0x3FFFFFF) * 4 == 0x1230
    jump = 16 + (call & 0x3FFFFFF) * 4
    assert data[jump : jump + 24] == struct.pack("<4IQ", 0xAA1F03E3, 0x58000070, 0xD61F0200, 0xD503201F, TARGET)
    opcodes = [adrp & 0x9F00001F, add & ~(0xFFF << 10), load8 & ~(0xFFF << 10), load16 & ~(0xFFF << 10), call >> 26]
    assert opcodes == [0x90000000, 0x91000000, 0xF9400000, 0x3DC00000, 0x94000000 >> 26]
    assert (word(data, 24) + BASE + 24) % 2**64 == BASE + 0x1231
    assert word(data, 32) == BASE + 0x1232


def test_what_does_not_reach_is_refused():
    far = make_object(struct.pack("<I", 0x94000000), b"", {"there": 0}, ((0, 283, "there", 1 << 28),), "aarch64")
    with pytest.raises(CompileError, match="does not reach: 67108864 must be from -33554432"):
        Relocatable(far, {}).image(BASE, {})


@x86
def test_code_runs_calls_and_is_protected():
    """call: mov rcx, 7; movabs rax, call; jmp rax. The jump to the import makes the fourth argument 0."""
    code = b"\x48\xc7\xc1\x07\x00\x00\x00" + b"\x48\xb8" + bytes(8) + b"\xff\xe0"
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
    def function(*arguments):
        seen.append(arguments)
        return 42

    data = make_object(code, b"data", {"start": 0, "call": None}, ((9, 1, "call", 0),))
    for extra, fourth in ((True, 0), (False, 7)):
        loaded = Loaded(Relocatable(data, {"call": extra}), {"call": ctypes.cast(function, ctypes.c_void_p).value})
        start = loaded.function("start", ctypes.c_int, *[ctypes.c_uint64] * 4)
        assert start(1, 2, 3, 4) == 42
        assert seen.pop() == (1, 2, 3, fourth)
    address = ctypes.cast(start, ctypes.c_void_p).value
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[:2] for line in maps]
    [flags] = [f for r, f in ranges if int(r.split("-")[0], 16) <= address < int(r.split("-")[1], 16)]
    assert flags == "r-xp"


@x86
def test_a_system_that_forbids_it_is_named(monkeypatch):
    monkeypatch.setattr(image, "_PROT_READ_EXEC", 0x40000000)  # not a protection
    with pytest.raises(LaunchError, match=r"does not let a process make memory executable \(Invalid argument\)"):
        Loaded(Relocatable(make_object(b"\xc3", b"", {"start": 0}), {}), {})


def test_unknown_imports_and_relocations_are_named():
    data = make_object(bytes(16), b"", {"malloc": None, "start": 0}, ((0, 2, "start", 0),), "x86-64")
    with pytest.raises(CompileError, match="it calls malloc beside, and has kinds 2 beside"):
        Relocatable(data, {"call": False})


def test_objects_of_another_machine_or_none():
    whole = host_object("sm_100a")
    assert host.problems(whole, "sm_100a") == []
    for bad in (b"", b"\x7fELF", whole[:300], whole[:-40], b"\x7fELF\x02\x01\x01" + bytes(4000)):
        assert host.problems(bad, "sm_100a")
    other = "aarch64" if host.host_isa() == "x86-64" else "x86-64"
    foreign = bytearray(whole)
    foreign[18:20] = struct.pack("<H", {"x86-64": 62, "aarch64": 183}[other])
    assert host.problems(bytes(foreign), "sm_100a") == [f"its host code is for {other}, not {host.host_isa()}"]
    assert host.problems(bytes(foreign), "sm_100a", other) == []
    with pytest.raises(CompileError, match=f"cannot be loaded here: its host code is for {other}"):
        HostObject(BlackwellDriver(), bytes(foreign), 0)
    with pytest.raises(CompileError, match="must have one launcher: it has 0"):
        host.facts(make_object(b"\xc3", b"", {"start": 0}))
    assert len(IMPORTS) == 8


@pytest.mark.parametrize("size", [1 << 31, 1 << 62, (1 << 64) - 1])
def test_sizes_that_cannot_be_are_refused(size):
    """Before any memory is asked for."""
    data = bytearray(make_object(bytes(16), b"data", {"start": 0}))
    text = int.from_bytes(data[40:48], "little") + 64  # the header of .text
    data[text + 4 : text + 8] = struct.pack("<I", 8)  # SHT_NOBITS
    data[text + 32 : text + 40] = struct.pack("<Q", size)
    with pytest.raises(CompileError, match=r"its parts take [0-9]+ bytes, must take 1073741824 at most"):
        Relocatable(bytes(data), {})


@pytest.mark.parametrize("at", [13, 64, 1 << 40])
def test_relocations_stay_within_their_part(at):
    data = make_object(bytes(16), b"data", {"start": 0}, ((at, 1, "start", 0),), "x86-64")
    with pytest.raises(CompileError, match=f"relocation at {at} lies outside of its part of 16 bytes"):
        Relocatable(data, {})


def test_damaged_headers_are_compile_errors():
    """Offsets of 64 bits that no file has: one wrong byte at every place of the headers and tables."""
    whole = host_object("sm_100a")
    start = int.from_bytes(whole[40:48], "little")
    for at in (*range(16, 64), *range(start, len(whole))):
        for value in (0x80, 0xFF):
            damaged = whole[:at] + bytes([value]) + whole[at + 1 :]
            assert isinstance(host.problems(damaged, "sm_100a"), list)
