"""What an AMD code object says of itself: its kernel, its target and the resources that the kernel takes.

A code object is an ELF file; a note of it holds the metadata of its kernels in msgpack (LLVM's AMDGPU usage page, code
object V3 and later), and its header the target. Nothing but pyelftools is needed: no FlyDSL, no ROCm.
"""

import struct
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any, Final

import msgspec

from k3dsl.amd.device import TARGETS
from k3dsl.errors import CompileError

EM_AMDGPU: Final = 224
_NOTE_METADATA: Final = 32
_MACH: Final = 0xFF  # of e_flags
#: Rows of vector registers are given out eight at a time.
_ROWS: Final = 8
#: What reading damaged bytes may raise, here and in pyelftools, beside its own ELFError.
_UNREADABLE: Final = (
    *(struct.error, LookupError, AttributeError, ValueError, TypeError),
    *(AssertionError, OverflowError, MemoryError, msgspec.DecodeError),
)


@dataclass(frozen=True)
class CodeObject:
    """The facts of a code object with one kernel. All sizes in bytes.

    vgprs: vector registers of a lane, accumulation registers among them; agprs: those alone; lds: declared, of a
    workgroup; private: scratch of a lane; params: (offset, bytes) of each explicit argument; hidden: kinds of the
    others; block: the threads that it must be launched with, None for any; max_threads: of a workgroup.
    """

    symbol: str
    arch: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds: int
    private: int
    dynamic_stack: bool
    kernarg: int
    block: tuple[int, int, int] | None
    max_threads: int
    params: tuple[tuple[int, int], ...]
    hidden: tuple[str, ...]

    @property
    def waves(self) -> int:
        """Waves of a SIMD that the registers allow."""
        target = TARGETS[self.arch]
        return min(target.waves, target.registers // max(_ROWS, -(-self.vgprs // _ROWS) * _ROWS))

    def workgroups(self, lds: int = 0) -> int:
        """Workgroups that a compute unit holds, by registers and by LDS; lds: dynamic bytes beside the declared."""
        target = TARGETS[self.arch]
        x, y, z = self.block or (self.max_threads, 1, 1)
        by_registers = 4 * self.waves // -(-x * y * z // 64)
        return min(by_registers, target.lds // (self.lds + lds)) if self.lds + lds else by_registers

    def resources(self) -> dict[str, Any]:
        """For the manifest of a cache entry: plain lists, strings and ints."""
        block = list(self.block) if self.block else None
        more = {"block": block, "params": [list(p) for p in self.params], "hidden": list(self.hidden)}
        return {**asdict(self), **more, "waves": self.waves}


def parse(data: bytes) -> CodeObject:
    """The facts of a code object. Raises CompileError where it is none, or holds another number of kernels than one."""
    from elftools.common.exceptions import ELFError  # 20 ms that a process which only makes keys does not spend

    try:
        return _parse(data)
    except (ELFError, *_UNREADABLE) as error:
        raise CompileError(
            f"not a readable code object ({len(data)} bytes): {type(error).__name__}: {error}"
        ) from error


def _parse(data: bytes) -> CodeObject:
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(BytesIO(data))
    if elf["e_machine"] not in (EM_AMDGPU, "EM_AMDGPU"):
        raise ValueError(f"it is for {elf['e_machine']}, not EM_AMDGPU")
    names = {t.mach: t.name for t in TARGETS.values()}
    mach = elf["e_flags"] & _MACH
    if mach not in names:
        raise ValueError(f"it is for machine 0x{mach:x}, not one of {', '.join(names.values())}")
    metadata = _metadata(elf)
    kernels = metadata["amdhsa.kernels"]
    if len(kernels) != 1:
        found = ", ".join(str(k.get(".name")) for k in kernels) or "none"
        raise ValueError(f"it must hold one kernel, it holds {len(kernels)}: {found}")
    kernel = kernels[0]
    block = kernel.get(".reqd_workgroup_size")
    arguments = kernel.get(".args", [])
    hidden = [a for a in arguments if a[".value_kind"].startswith("hidden_")]
    _descriptor(elf, kernel[".symbol"])
    return CodeObject(
        symbol=str(kernel[".name"]),
        arch=names[mach],
        vgprs=int(kernel[".vgpr_count"]),
        agprs=int(kernel.get(".agpr_count", 0)),
        sgprs=int(kernel[".sgpr_count"]),
        vgpr_spills=int(kernel.get(".vgpr_spill_count", 0)),
        sgpr_spills=int(kernel.get(".sgpr_spill_count", 0)),
        lds=int(kernel[".group_segment_fixed_size"]),
        private=int(kernel[".private_segment_fixed_size"]),
        dynamic_stack=bool(kernel.get(".uses_dynamic_stack", False)),
        kernarg=int(kernel[".kernarg_segment_size"]),
        block=(int(block[0]), int(block[1]), int(block[2])) if block else None,
        max_threads=int(kernel[".max_flat_workgroup_size"]),
        params=tuple((int(a[".offset"]), int(a[".size"])) for a in arguments if a not in hidden),
        hidden=tuple(str(a[".value_kind"]) for a in hidden),
    )


def _metadata(elf: Any) -> dict[str, Any]:
    for segment in elf.iter_segments():
        if segment["p_type"] != "PT_NOTE":
            continue
        data, at = segment.data(), 0
        while at + 12 <= len(data):
            name_size, size, kind = struct.unpack_from("<III", data, at)
            at += 12 + (name_size + 3) // 4 * 4
            if kind == _NOTE_METADATA:
                if at + size > len(data):
                    raise ValueError("its metadata ends outside of the file")
                return dict(msgspec.msgpack.decode(data[at : at + size]))
            at += (size + 3) // 4 * 4
    raise ValueError("it has no metadata")


def _descriptor(elf: Any, symbol: str) -> None:
    """The kernel's descriptor and its code must be there, inside of the file."""
    from elftools.elf.sections import SymbolTableSection

    tables = [s for s in elf.iter_sections() if isinstance(s, SymbolTableSection)]
    found = [s for table in tables for s in table.iter_symbols() if s.name == symbol]
    loaded = [(s["p_vaddr"], s["p_vaddr"] + s["p_filesz"]) for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
    if not found or not any(low <= found[0]["st_value"] and found[0]["st_value"] + 64 <= high for low, high in loaded):
        raise ValueError(f"it has no descriptor {symbol}")
