"""A relocatable object as code of this process: what a linker and a loader would do, for what the compiler emits.

The DSL compiles host code for the large code model, so an object for x86-64 has five kinds of relocations, all of 64
bits; one for aarch64 has eight. Anything else is refused when the object is built. There is no library to link to: the
few functions that an object imports are given as addresses, and every one is reached through a jump of its own.
"""

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, NamedTuple

from k3dsl.errors import CompileError, LaunchError
from k3dsl.nvidia.cubin import UNREADABLE

_GOT: Final = "_GLOBAL_OFFSET_TABLE_"
_ALLOC, _EXEC = 2, 4  # SHF_*
_PROT_READ_EXEC: Final = 5
_MASK: Final = (1 << 64) - 1


class _Place(NamedTuple):
    """What a relocation is computed from, with the names of the ELF specification."""

    p: int  # address of what is changed
    s: int  # address of the symbol
    a: int  # addend
    got: int  # address of the table of symbols' addresses
    g: int  # offset of the symbol's address in it


def _word(value: Callable[[_Place], int]) -> Callable[[_Place, bytes], bytes]:
    return lambda at, _: (value(at) & _MASK).to_bytes(8, "little")


def _field(value: Callable[[_Place], int], low: int, high: int, bits: int, shift: int = 0) -> Any:
    """A value within `low` and `high` whose `bits` go into an instruction from bit `shift`."""

    def put(at: _Place, old: bytes) -> bytes:
        number = value(at)
        if not low <= number < high:
            raise CompileError(f"a relocation does not reach: {number} must be from {low} to {high - 1}")
        word = int.from_bytes(old[:4], "little") & ~(((1 << bits) - 1) << shift)
        return (word | (number & ((1 << bits) - 1)) << shift).to_bytes(4, "little")

    return put


def _adrp(at: _Place, old: bytes) -> bytes:
    """The distance in pages of 4 KiB: its two lowest bits from bit 29, 19 more from bit 5."""
    pages = ((at.s + at.a) >> 12) - (at.p >> 12)
    if not -(1 << 20) <= pages < 1 << 20:
        raise CompileError(f"a relocation does not reach: {pages} pages must be below {1 << 20}")
    word = int.from_bytes(old[:4], "little") & 0x9F00001F
    return (word | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5).to_bytes(4, "little")


def _low12(scale: int) -> Any:
    return _field(lambda at: (at.s + at.a & 0xFFF) >> scale, 0, 4096, 12, 10)


_BRANCH: Final = _field(lambda at: (at.s + at.a - at.p) >> 2, -(1 << 25), 1 << 25, 26)


@dataclass(frozen=True)
class Machine:
    """relocations by ELF number; jump: code that goes to an address; jump4: the same, with 0 as the fourth argument."""

    elf: str
    relocations: Mapping[int, Callable[[_Place, bytes], bytes]]
    jump: Callable[[int], bytes]
    jump4: Callable[[int], bytes]


#: By host ISA, as it stands in keys.
MACHINES: Final = {
    "x86-64": Machine(
        "EM_X86_64",
        {
            1: _word(lambda at: at.s + at.a),  # 64
            24: _word(lambda at: at.s + at.a - at.p),  # PC64
            25: _word(lambda at: at.s + at.a - at.got),  # GOTOFF64
            27: _word(lambda at: at.g + at.a),  # GOT64
            29: _word(lambda at: at.got + at.a - at.p),  # GOTPC64
        },
        lambda to: struct.pack("<2sQ2s", b"\x48\xb8", to, b"\xff\xe0"),  # mov rax, to; jmp rax
        lambda to: struct.pack("<4sQ2s", b"\x31\xc9\x48\xb8", to, b"\xff\xe0"),  # xor ecx, ecx; the same
    ),
    "aarch64": Machine(
        "EM_AARCH64",
        {
            257: _word(lambda at: at.s + at.a),  # ABS64
            260: _word(lambda at: at.s + at.a - at.p),  # PREL64
            275: _adrp,  # ADR_PREL_PG_HI21
            277: _low12(0),  # ADD_ABS_LO12_NC
            282: _BRANCH,  # JUMP26
            283: _BRANCH,  # CALL26
            286: _low12(3),  # LDST64_ABS_LO12_NC
            299: _low12(4),  # LDST128_ABS_LO12_NC
        },
        lambda to: struct.pack("<IIQ", 0x58000050, 0xD61F0200, to),  # ldr x16, to; br x16; to
        lambda to: struct.pack("<IIIIQ", 0xAA1F03E3, 0x58000070, 0xD61F0200, 0xD503201F, to),  # mov x3, xzr; the same
    ),
}
_JUMP_BYTES: Final = 32
#: Of an image. Objects are well under a MB.
_MOST_BYTES: Final = 1 << 30


class _Relocation(NamedTuple):
    at: int  # offset in the image
    kind: int
    symbol: int
    addend: int


class Relocatable:
    """The parts of a relocatable object that are loaded, laid out: code and jumps, then from a new page all data.

    imports: the functions that the object may call, each True if it is given one argument more, a 0 as its fourth.
    Raises CompileError for bytes that are no such object, and for what `MACHINES` does not know.
    """

    def __init__(self, data: bytes, imports: Mapping[str, bool]) -> None:
        from elftools.common.exceptions import ELFError

        try:
            self._read(data, imports)
        except (ELFError, *UNREADABLE) as error:
            raise CompileError(
                f"not a readable host object ({len(data)} bytes): {type(error).__name__}: {error}"
            ) from error

    def _read(self, data: bytes, imports: Mapping[str, bool]) -> None:
        from elftools.elf.elffile import ELFFile

        elf = ELFFile(BytesIO(data))
        isas = [isa for isa, machine in MACHINES.items() if machine.elf == elf["e_machine"]]
        if elf["e_type"] != "ET_REL" or not isas:
            raise CompileError(f"a host object must be relocatable, for {' or '.join(MACHINES)}")
        self.isa, self.imports = isas[0], dict(imports)
        sections, symbols = list(elf.iter_sections()), list(elf.get_section_by_name(".symtab").iter_symbols())
        loaded = [i for i, one in enumerate(sections) if one["sh_flags"] & _ALLOC and one.name != ".eh_frame"]

        at, starts = 0, {}
        for part in (True, False):
            for i in loaded:
                if bool(sections[i]["sh_flags"] & _EXEC) is part:
                    starts[i] = _up(at, max(sections[i]["sh_addralign"], 1))
                    at = starts[i] + sections[i]["sh_size"]
            if part:
                at = _up(at, 16)
                self._jumps = {name: at + _JUMP_BYTES * n for n, name in enumerate(imports)}
                self.code = at = _up(at + _JUMP_BYTES * len(imports), mmap.PAGESIZE)
        self._got = _up(at, 8)
        self.size = _up(self._got + 8 * len(symbols), mmap.PAGESIZE)

        if self.size > _MOST_BYTES:
            raise ValueError(f"its parts take {self.size} bytes, must take {_MOST_BYTES} at most")

        self._content = [(starts[i], sections[i].data()) for i in loaded if sections[i]["sh_type"] != "SHT_NOBITS"]
        self._symbols = [self._where(symbol, starts) for symbol in symbols]
        outside = [s for s in symbols if s["st_info"]["bind"] != "STB_LOCAL"]
        places = dict(zip(symbols, self._symbols, strict=True))
        self.defined = {s.name: n for s in outside if (n := places[s]) is not None}
        self._relocations = [
            _Relocation(
                starts[one["sh_info"]] + _within(r["r_offset"], sections[one["sh_info"]]["sh_size"]),
                *(r["r_info_type"], r["r_info_sym"], r["r_addend"]),
            )
            for one in sections
            if one["sh_type"] == "SHT_RELA" and one["sh_info"] in starts
            for r in one.iter_relocations()
        ]
        used = [symbols[r.symbol] for r in self._relocations]
        missing = dict.fromkeys(s.name or "a part that is not loaded" for s in (*outside, *used) if places[s] is None)
        kinds = sorted({r.kind for r in self._relocations} - MACHINES[self.isa].relocations.keys())
        if missing or kinds:
            calls, others = ", ".join(missing) or "nothing", ", ".join(map(str, kinds)) or "none"
            raise CompileError(
                f"a host object must call nothing but {', '.join(imports)}, and have relocations that are known on "
                f"{self.isa}: it calls {calls} beside, and has kinds {others} beside"
            )

    def _where(self, symbol: Any, starts: Mapping[int, int]) -> int | None:
        """A symbol's offset in the image; None if it is in no part that is loaded."""
        section = symbol["st_shndx"]
        if symbol.name == _GOT:
            return self._got
        if section == "SHN_UNDEF":
            return self._jumps.get(symbol.name)
        return starts[section] + symbol["st_value"] if section in starts else None

    def image(self, base: int, functions: Mapping[str, int]) -> bytes:
        """The bytes to be put at address `base`. functions: the address of each import. Raises CompileError."""
        machine, out = MACHINES[self.isa], bytearray(self.size)
        for start, content in self._content:
            out[start : start + len(content)] = content
        for name, start in self._jumps.items():
            jump = (machine.jump4 if self.imports[name] else machine.jump)(functions[name])
            out[start : start + len(jump)] = jump
        for i, offset in enumerate(self._symbols):
            if offset is not None:
                out[self._got + 8 * i : self._got + 8 * i + 8] = (base + offset).to_bytes(8, "little")
        for r in self._relocations:
            offset = self._symbols[r.symbol]
            assert offset is not None
            place = _Place(base + r.at, base + offset, r.addend, base + self._got, 8 * r.symbol)
            new = machine.relocations[r.kind](place, bytes(out[r.at : r.at + 8]))
            out[r.at : r.at + len(new)] = new
        return bytes(out)


class Loaded:
    """A relocatable object in this process' memory, code read-only and data not executable, for as long as this lives.

    functions: see `Relocatable.image`. Raises LaunchError where the system forbids code in memory.
    """

    def __init__(self, found: Relocatable, functions: Mapping[str, int]) -> None:
        self._memory = mmap.mmap(-1, found.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._memory[:] = found.image(base, functions)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(found.code), _PROT_READ_EXEC):
            why = os.strerror(ctypes.get_errno())
            raise LaunchError(f"this system does not let a process make memory executable ({why}): SELinux or seccomp")
        self._symbols = {name: base + offset for name, offset in found.defined.items()}

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of the object, to be called while this lives."""
        return ctypes.CFUNCTYPE(result, *arguments)(self._symbols[name])


def _within(at: int, size: int) -> int:
    if at + 4 > size:
        raise ValueError(f"a relocation at {at} lies outside of its part of {size} bytes")
    return at


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
