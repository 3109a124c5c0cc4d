"""What a cubin says of itself: its kernel, its target and the resources that the kernel takes.

A cubin is an ELF file. Its `.nv.info` sections are lists of attributes: a format byte, an attribute byte and two bytes
of value or of the length of what follows. Only the attributes read here are relied on; tests/compile holds them.
"""

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any, Final

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from k3dsl.errors import CompileError

_SIZED: Final = 0x04  # format: the value is a length, data follows
_REQNTID, _FRAME_SIZE, _MIN_STACK, _KPARAM, _REGISTERS = 0x10, 0x11, 0x12, 0x17, 0x2F
_INFO: Final = ".nv.info"


@dataclass(frozen=True)
class Cubin:
    """One kernel's cubin. `params`: (offset, bytes) of each kernel parameter, in order. Sizes in bytes."""

    symbol: str
    arch: str
    registers: int
    frame: int
    stack: int
    static_smem: int
    block: tuple[int, int, int]
    params: tuple[tuple[int, int], ...]

    def resources(self) -> dict[str, Any]:
        """For the manifest of a cache entry."""
        facts = asdict(self)
        return {**facts, "block": list(self.block), "params": [list(p) for p in self.params]}


def parse(data: bytes) -> Cubin:
    """The facts of a cubin with one kernel. Raises CompileError where it is not one."""
    try:
        return _parse(data)
    except (ELFError, struct.error, IndexError, UnicodeDecodeError, AssertionError) as error:
        raise CompileError(f"not a readable cubin ({len(data)} bytes): {error}") from error


def _parse(data: bytes) -> Cubin:
    elf = ELFFile(BytesIO(data))
    sections = {s.name: s for s in elf.iter_sections()}
    symbols = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(symbols) != 1:
        raise CompileError(f"a cubin must hold one kernel, this one holds {len(symbols)}: {', '.join(symbols) or 'none'}")
    symbol = symbols[0]
    index = _symbol_index(sections, symbol)
    per_kernel = {}
    for attribute, body in _attributes(sections[_INFO].data()):
        if attribute in (_REGISTERS, _FRAME_SIZE, _MIN_STACK):
            which, value = struct.unpack_from("<II", body)
            if which == index:
                per_kernel[attribute] = value
    params: dict[int, tuple[int, int]] = {}
    block = (0, 0, 0)
    for attribute, body in _attributes(sections[f"{_INFO}.{symbol}"].data()):
        if attribute == _KPARAM:
            # index, ordinal, offset (16 bits each after the 32-bit index), then a word whose bits 18.. are the size
            ordinal, offset, packed = struct.unpack_from("<HHI", body, 4)
            params[ordinal] = (offset, packed >> 18)
        elif attribute == _REQNTID:
            block = struct.unpack_from("<III", body)
    shared = sections.get(f".nv.shared.{symbol}")
    return Cubin(
        symbol=symbol,
        arch=_arch(sections),
        registers=per_kernel[_REGISTERS] if _REGISTERS in per_kernel else 0,
        frame=per_kernel.get(_FRAME_SIZE, 0),
        stack=per_kernel.get(_MIN_STACK, 0),
        static_smem=shared["sh_size"] if shared is not None else 0,
        block=block,
        params=tuple(params[i] for i in range(len(params))),
    )


def _symbol_index(sections: dict[str, Any], symbol: str) -> int:
    table = sections.get(".symtab")
    assert isinstance(table, SymbolTableSection), "no symbol table"
    for i, entry in enumerate(table.iter_symbols()):
        if entry.name == symbol:
            return i
    raise CompileError(f"the cubin has no symbol {symbol}")


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        size = value if kind == _SIZED else 0
        yield attribute, data[at : at + size]
        at += size


def _arch(sections: dict[str, Any]) -> str:
    """The target as ptxas was given it, from its note: `... -arch sm_90a`."""
    note = sections[".note.nv.tkinfo"].data().decode("latin-1") if ".note.nv.tkinfo" in sections else ""
    _, found, tail = note.partition("-arch ")
    return tail.split()[0].strip("\0 ") if found else ""
