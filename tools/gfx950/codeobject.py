"""Reads an AMD GPU code object: its kernels, their descriptors and metadata, and the bytes of its program."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from .errors import CodeObjectError

EM_AMDGPU = 224
MACH_GFX950 = 0x04F
NOTE_METADATA = 32
LDS_LIMIT = 160 * 1024
REGISTER_LIMIT = 512
THREAD_LIMIT = 1024
IMAGE_LIMIT = 1 << 30  # bytes; code objects have kilobytes


@dataclass(frozen=True)
class Argument:
    """One kernel argument: where it stands in the kernel's argument block."""

    offset: int
    size: int
    kind: str  # by_value, global_buffer, hidden_*
    name: str = ""

    @property
    def hidden(self) -> bool:
        return self.kind.startswith("hidden_")


@dataclass(frozen=True)
class Kernel:
    """One kernel of a code object: the fields of its descriptor, decoded, and its metadata."""

    name: str
    entry: int  # address in the image
    size: int
    lds_bytes: int
    private_bytes: int
    kernarg_bytes: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int
    metadata: dict[str, Any] = field(repr=False)
    arguments: tuple[Argument, ...] = field(repr=False)

    @property
    def vector_registers(self) -> int:
        return int(self.metadata.get(".vgpr_count", 0))

    @property
    def accumulation_registers(self) -> int:
        return int(self.metadata.get(".agpr_count", 0))

    @property
    def accumulation_base(self) -> int:
        """Row at which the accumulation registers begin in the unified file."""
        return ((self.rsrc3 & 0x3F) + 1) * 4

    @property
    def rows(self) -> int:
        """Vector register rows that a wave owns."""
        own = max(self.vector_registers, ((self.rsrc1 & 0x3F) + 1) * 8)
        if self.accumulation_registers:
            own = max(own, self.accumulation_base + self.accumulation_registers)
        return own

    @property
    def user_registers(self) -> int:
        return self.rsrc2 >> 1 & 31

    @property
    def kernarg_register(self) -> int:
        """Scalar register pair that receives the address of the arguments, or -1. Registers for the dispatch packet,
        the queue and the like keep a poison value: whoever follows it is stopped by the bounds check."""
        if not self.properties & 8:
            return -1
        return sum(width for bit, width in ((1, 4), (2, 2), (4, 2)) if self.properties & bit)

    def refusals(self, lds_bytes: int, threads: int) -> list[str]:
        """Why this kernel cannot run here with that much LDS and that many threads; empty when it can."""
        reasons = []
        if self.private_bytes:
            reasons.append(f"it uses a private segment of {self.private_bytes} bytes (spills or a stack)")
        if lds_bytes > LDS_LIMIT:
            reasons.append(f"{lds_bytes} bytes of LDS, a compute unit has {LDS_LIMIT}")
        if self.rows > REGISTER_LIMIT:
            reasons.append(f"{self.rows} vector registers, a wave has {REGISTER_LIMIT}")
        if not 1 <= threads <= THREAD_LIMIT:
            reasons.append(f"{threads} threads a workgroup, allowed are 1 to {THREAD_LIMIT}")
        declared = self.metadata.get(".max_flat_workgroup_size", THREAD_LIMIT)
        if threads > declared:
            reasons.append(f"{threads} threads a workgroup, the kernel was compiled for at most {declared}")
        if self.properties >> 10 & 1:
            reasons.append("it runs waves of 32 lanes")
        return reasons


class CodeObject:
    """A parsed code object. `data` is a path or the bytes of the file."""

    def __init__(self, data: bytes | str | Path) -> None:
        self.data = data if isinstance(data, bytes) else Path(data).read_bytes()
        self.lowered: dict[str, Any] = {}  # by kernel: kept by the emulator for later launches
        if self.data[:4] != b"\x7fELF":
            raise CodeObjectError("not an ELF file")
        try:
            self._parse(ELFFile(io.BytesIO(self.data)))
        except CodeObjectError:
            raise
        # What elftools, struct, msgspec and the look-ups here make of bytes that are not what their headers say.
        except (ELFError, struct.error, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CodeObjectError(f"a damaged code object: {type(error).__name__}: {error}") from error

    def _parse(self, elf: ELFFile) -> None:
        if elf.header["e_machine"] not in (EM_AMDGPU, "EM_AMDGPU"):
            raise CodeObjectError(f"not an AMD GPU code object: machine {elf.header['e_machine']}")
        mach = elf.header["e_flags"] & 0xFF
        if mach != MACH_GFX950:
            raise CodeObjectError(f"compiled for another target (machine flag 0x{mach:x}, gfx950 is 0x{MACH_GFX950:x})")
        self.image = self._load(elf)
        self.symbols = {
            s.name: (int(s["st_value"]), int(s["st_size"]))
            for section in elf.iter_sections()
            if isinstance(section, SymbolTableSection)
            for s in section.iter_symbols()
        }
        self.metadata = self._metadata(elf)
        self.kernels = {k.name: k for k in map(self._kernel, self.metadata["amdhsa.kernels"])}

    @staticmethod
    def _load(elf: ELFFile) -> bytes:
        loads = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
        size = max((s["p_vaddr"] + s["p_memsz"] for s in loads), default=0)
        if not 0 < size <= IMAGE_LIMIT:
            raise CodeObjectError(f"a damaged code object: it loads {size} bytes, allowed are 1 to {IMAGE_LIMIT}")
        image = bytearray(size)
        for s in loads:
            data = s.data()
            if not len(data) == s["p_filesz"] <= s["p_memsz"]:
                raise CodeObjectError(f"a damaged code object: {len(data)} of {s['p_filesz']} bytes to load are there")
            image[s["p_vaddr"] : s["p_vaddr"] + len(data)] = data
        return bytes(image)

    @staticmethod
    def _metadata(elf: ELFFile) -> dict[str, Any]:
        for segment in elf.iter_segments():
            if segment["p_type"] != "PT_NOTE":
                continue
            data, at = segment.data(), 0
            while at + 12 <= len(data):
                name_size, size, kind = struct.unpack_from("<III", data, at)
                at += 12 + (name_size + 3) // 4 * 4
                if kind == NOTE_METADATA:
                    return dict(msgspec.msgpack.decode(data[at : at + size]))
                at += (size + 3) // 4 * 4
        raise CodeObjectError("no kernel metadata: not a code object of version 3 or later")

    def _kernel(self, meta: dict[str, Any]) -> Kernel:
        at = self.symbols[meta[".symbol"]][0]
        lds, private, kernarg = struct.unpack_from("<III", self.image, at)
        (entry,) = struct.unpack_from("<q", self.image, at + 16)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", self.image, at + 44)
        name = meta[".name"]
        kernarg = max(kernarg, int(meta.get(".kernarg_segment_size", 0)))
        start, size = at + entry, self.symbols[name][1]
        if start < 0 or start + size > len(self.image):
            raise CodeObjectError(f"a damaged code object: kernel {name} lies outside of what it loads")
        args = tuple(
            Argument(a[".offset"], a[".size"], a[".value_kind"], a.get(".name", "")) for a in meta.get(".args", [])
        )
        return Kernel(name, start, size, lds, private, kernarg, rsrc1, rsrc2, rsrc3, properties, preload, meta, args)

    def kernel(self, name: str | None = None) -> Kernel:
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name in self.kernels:
            return self.kernels[name]
        raise CodeObjectError(f"kernel {name!r} is not in the code object; it has {', '.join(sorted(self.kernels))}")

    def code(self, kernel: Kernel) -> bytes:
        return self.image[kernel.entry : kernel.entry + kernel.size]
