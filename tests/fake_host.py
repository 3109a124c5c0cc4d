"""Objects with host code without a compiler: a relocatable ELF file written here, whose functions return at once."""

import struct
from functools import cache
from typing import Final

from fake_cuda import make_cubin

from k3dsl.nvidia.host_object import PREFIX, host_isa

#: By host ISA: ELF machine, and a return from a function.
_MACHINES: Final = {"x86-64": (62, b"\xc3"), "aarch64": (183, b"\xc0\x03\x5f\xd6")}
_NAMES: Final = ("_cuda_init", "_cuda_load_to_device", "__mlir_ciface_nothing")
_ALLOC, _EXEC, _GLOBAL = 2, 4, 1


def make_object(
    code: bytes,
    data: bytes,
    symbols: dict[str, int | None],
    relocations: tuple[tuple[int, int, str, int], ...] = (),
    isa: str = "",
) -> bytes:
    """A relocatable object of one part of code and one of data.

    symbols: offset in the code, or None for an import; relocations: offset in the code, kind, symbol, addend.
    """
    names = ["", ".text", ".rodata", ".rela.text", ".symtab", ".strtab", *symbols]
    strings = b"".join(n.encode() + b"\0" for n in names)
    place = {n: strings.index(n.encode() + b"\0") for n in names}
    table = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", place[n], _GLOBAL << 4, 0, 0 if at is None else 1, at or 0, 0)
        for n, at in symbols.items()
    )
    order = list(symbols)
    rela = b"".join(
        struct.pack("<QQq", at, (order.index(n) + 1) << 32 | kind, addend) for at, kind, n, addend in relocations
    )
    parts = (code, data, rela, table, strings)
    at, offsets = 64, []
    for part in parts:
        offsets.append(at)
        at += -(-len(part) // 16) * 16
    #      name, type, flags, part, link, info, entry
    rows = (
        (".text", 1, _ALLOC | _EXEC, 0, 0, 0, 0),
        (".rodata", 1, _ALLOC, 1, 0, 0, 0),
        (".rela.text", 4, 0, 2, 4, 1, 24),
        (".symtab", 2, 0, 3, 5, 1, 24),
        (".strtab", 3, 0, 4, 0, 0, 0),
    )
    headers = bytes(64) + b"".join(
        struct.pack("<IIQQQQIIQQ", place[n], kind, flags, 0, offsets[i], len(parts[i]), link, info, 16, entry)
        for n, kind, flags, i, link, info, entry in rows
    )
    machine = _MACHINES[isa or host_isa()][0]
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 1, machine, 1, 0, 0, at, 0, 64, 0, 0, 64, 6, 5)
    )
    return header + b"".join(part + bytes(-len(part) % 16) for part in parts) + headers


@cache
def host_object(arch: str) -> bytes:
    """A host object for `arch`: a launcher that does nothing, and two kernels with no instruction in them."""
    cubin = make_cubin((), symbol="fake_mla_tokenspeed", arch=arch, kernels=2)
    size = len(cubin).to_bytes(8, "little")
    fatbin = b"\x50\xed\x55\xba\x01\x00\x10\x00" + (len(cubin) + 64).to_bytes(8, "little")
    fatbin += b"\x02\x00\x01\x01" + (64).to_bytes(4, "little") + size + bytes(48) + cubin
    return make_object(_MACHINES[host_isa()][1], fatbin, {f"_mlir_{PREFIX}{name}": 0 for name in _NAMES})
