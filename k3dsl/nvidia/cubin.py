"""What a cubin says of itself: its kernel, its target and the resources that the kernel takes.

A cubin is an ELF file. Its `.nv.info` sections are lists of attributes: a format byte, an attribute byte and two bytes
of value or of the length of what follows. The format is not documented; only the attributes named here are relied on,
and tests/compile/test_toolchain.py holds them against what ptxas and the driver say.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any, Final

from k3dsl.errors import CompileError

_SIZED: Final = 0x04  # format: the value is a length, data follows
_REQNTID, _FRAME_SIZE, _MIN_STACK, _KPARAM, _REGISTERS = 0x10, 0x11, 0x12, 0x17, 0x2F
_ENTRY: Final = 0x10  # st_other of a kernel's symbol
_SYMBOL_BYTES: Final = 24
_INFO: Final = ".nv.info"
#: Shared memory that the system takes of every CTA from sm_90 on: part of the section, no part of a kernel's limit.
RESERVED_SMEM: Final = 1024
#: What reading damaged bytes may raise, here and in pyelftools, beside its own ELFError.
UNREADABLE: Final = (
    *(struct.error, LookupError, AttributeError, ValueError, TypeError),
    *(AssertionError, OverflowError, MemoryError),
)


@dataclass(frozen=True)
class Cubin:
    """The facts of a cubin with one kernel. All sizes in bytes.

    registers: of a thread; frame, stack: local memory of a thread (spills, arrays); block: the threads that it must be
    launched with, None for any; params: (offset, bytes) of each kernel parameter, in order; tool: release of ptxas.
    """

    symbol: str
    arch: str
    tool: str
    registers: int
    frame: int
    stack: int
    static_smem: int
    block: tuple[int, int, int] | None
    params: tuple[tuple[int, int], ...]

    def resources(self) -> dict[str, Any]:
        """For the manifest of a cache entry: plain lists, strings and ints."""
        block = list(self.block) if self.block else None
        return {**asdict(self), "block": block, "params": [list(p) for p in self.params]}


def parse(data: bytes) -> Cubin:
    """The facts of a cubin. Raises CompileError where it is none, or holds another number of kernels than one."""
    kernels = parse_all(data)
    if len(kernels) != 1:
        names = ", ".join(kernel.symbol for kernel in kernels) or "none"
        raise CompileError(
            f"not a readable cubin ({len(data)} bytes): ValueError: it must hold one kernel, it holds "
            f"{len(kernels)}: {names}"
        )
    return kernels[0]


def parse_all(data: bytes) -> tuple[Cubin, ...]:
    """The facts of every kernel of a cubin, in the order of their names. Raises CompileError where it is none."""
    from elftools.common.exceptions import ELFError  # 20 ms that a process which only makes keys does not spend

    try:
        return _parse(data)
    except (ELFError, *UNREADABLE) as error:
        raise CompileError(f"not a readable cubin ({len(data)} bytes): {type(error).__name__}: {error}") from error


def _parse(data: bytes) -> tuple[Cubin, ...]:
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(BytesIO(data))
    if elf["e_machine"] != "EM_CUDA":
        raise ValueError(f"it is for {elf['e_machine']}, not EM_CUDA")
    sections = {s.name: s for s in elf.iter_sections()}
    kernels = _kernels(sections[".symtab"])
    built_by = _built_by(elf, sections)
    found = (_kernel(sections, index, symbol, kernels, built_by) for index, symbol in kernels.items())
    return tuple(sorted(found, key=lambda kernel: kernel.symbol))


def _kernel(
    sections: dict[str, Any], index: int, symbol: str, kernels: dict[int, str], built_by: tuple[str, str]
) -> Cubin:
    # Of the kernel itself and of any function that it calls: what a thread needs is the most that one of them says.
    # Another kernel's numbers are its own.
    registers = frame = stack = 0
    for attribute, body in _attributes(sections[_INFO].data()):
        if attribute in (_REGISTERS, _FRAME_SIZE, _MIN_STACK):
            which, value = struct.unpack_from("<II", body)
            if which != index and which in kernels:
                continue
            registers = value if attribute == _REGISTERS and which == index else registers
            frame = max(frame, value) if attribute == _FRAME_SIZE else frame
            stack = max(stack, value) if attribute == _MIN_STACK else stack
    params: dict[int, tuple[int, int]] = {}
    block = None
    for attribute, body in _attributes(sections[f"{_INFO}.{symbol}"].data()):
        if attribute == _KPARAM:
            # a 32-bit index; ordinal and offset, 16 bits each; a word whose bits from 18 on are the size
            ordinal, offset, packed = struct.unpack_from("<HHI", body, 4)
            params[ordinal] = (offset, packed >> 18)
        elif attribute == _REQNTID:
            x, y, z = struct.unpack_from("<III", body)
            block = (x, y, z)
    shared = sections.get(f".nv.shared.{symbol}")
    arch, tool = built_by
    return Cubin(
        symbol=symbol,
        arch=arch,
        tool=tool,
        registers=registers,
        frame=frame,
        stack=stack,
        static_smem=max(0, shared["sh_size"] - RESERVED_SMEM) if shared is not None else 0,
        block=block,
        params=tuple(params[i] for i in range(len(params))),
    )


def _kernels(table: Any) -> dict[int, str]:
    """Symbol index -> name of every kernel."""
    from elftools.elf.sections import SymbolTableSection

    if not isinstance(table, SymbolTableSection):
        raise ValueError("it has no symbol table")
    raw = table.data()  # pyelftools keeps no more of st_other than the bits that all processors share
    entries = enumerate(table.iter_symbols())
    functions = {i: entry.name for i, entry in entries if entry["st_info"]["type"] == "STT_FUNC"}
    return {i: name for i, name in functions.items() if raw[i * _SYMBOL_BYTES + 5] & _ENTRY}


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        size = value if kind == _SIZED else 0
        if at + size > len(data):
            raise ValueError("an attribute of .nv.info ends outside of it")
        yield attribute, data[at : at + size]
        at += size


def _built_by(elf: Any, sections: dict[str, Any]) -> tuple[str, str]:
    """Target and release of ptxas, from its note: `... release 13.4, ...  -arch sm_90a`."""
    note = sections[".note.nv.tkinfo"].data().decode("latin-1")
    arch, release = re.search(r"-arch (sm_(\d+)\w*)", note), re.search(r"release (\d+\.\d+)", note)
    if arch is None or release is None:
        raise ValueError("its note names no target and release")
    number = elf["e_flags"] >> 8 & 0xFF
    if number != int(arch[2]):
        raise ValueError(f"its note says {arch[1]}, its header sm_{number}")
    return arch[1], release[1]
