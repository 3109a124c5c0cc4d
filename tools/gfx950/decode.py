"""Machine code to instructions, over the decoder that the tinygrad package generates from AMD's ISA description.

Two guards make it exact for gfx950. Its class for the two-part scaled MFMA looks only at the third dword, so any
instruction that stands 8 bytes before an unscaled f8f6f4 MFMA would be swallowed: 16 bytes are offered only where the
first dword announces a scale. And v_readlane / v_readfirstlane write a scalar register, which it types as a vector one;
`scalar_destination` names the operations whose destination has to be read as a scalar.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad.renderer.amd import decode_inst

from .errors import UnsupportedInstructionError

SCALED_PREFIX = b"\xac\xd3"
scalar_destination = frozenset({"V_READFIRSTLANE_B32", "V_READLANE_B32"})


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction: `pc` counts from the kernel's entry; `fields` gives its encoding's fields by name."""

    pc: int
    size: int
    encoding: bytes
    name: str  # without the _E32 / _E64 suffix
    format: str  # VOP3, DS, ...
    variant: str  # the encoding class: VOP2_SDWA, VOP1_DPP16, ...
    fields: Any

    def get(self, name: str, default: int = 0) -> int:
        """A plain field; `default` where the encoding has none."""
        if not hasattr(type(self.fields), name):
            return default
        return int(getattr(self.fields, name))

    def register(self, name: str) -> int:
        """An operand field as its number in the operand space (0..127 scalar, 128..255 constants, 256.. vector)."""
        value = getattr(self.fields, name)
        return int(getattr(value, "offset", value))

    def bits(self, name: str, default: int = 32) -> int:
        return int(self.fields.op_bits.get(name, default))

    def words(self, name: str) -> int:
        return max(1, (self.bits(name) + 31) // 32)

    def number_format(self, name: str) -> str:
        entry = self.fields.operands.get(name)
        return entry[0].name.removeprefix("FMT_NUM_") if entry else "ANY"

    @property
    def literal(self) -> int:
        return int(self.fields.literal)


def decode(code: bytes, base: int = 0) -> Iterator[Instruction]:
    """The instructions of `code` in order. `base` is the pc of its first byte."""
    at = 0
    while at < len(code):
        window = code[at : at + 16] if code[at + 2 : at + 4] == SCALED_PREFIX else code[at : at + 8]
        try:
            inst: Any = decode_inst(window, "cdna")
            name = inst.op.name.removesuffix("_E32").removesuffix("_E64")
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            raise UnsupportedInstructionError(
                f"0x{base + at:x}: no instruction of gfx950 has the encoding {window[:8].hex()}"
            ) from error
        size = inst.size()
        variant = type(inst).__name__
        yield Instruction(base + at, size, code[at : at + size], name, variant.split("_")[0], variant, inst)
        at += size
