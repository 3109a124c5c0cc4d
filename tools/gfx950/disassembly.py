"""Instructions as text: for messages, traces and the disassembler."""

from __future__ import annotations

from collections.abc import Iterator

from .decode import Instruction, scalar_destination
from .lower import Program, signed

NAMES = {
    102: "flat_scratch_lo",
    103: "flat_scratch_hi",
    106: "vcc",
    107: "vcc_hi",
    124: "m0",
    126: "exec",
    127: "exec_hi",
    235: "src_shared_base",
    240: "0.5",
    241: "-0.5",
    242: "1.0",
    243: "-1.0",
    244: "2.0",
    245: "-2.0",
    246: "4.0",
    247: "-4.0",
    248: "1/(2*pi)",
    251: "vccz",
    252: "execz",
    253: "scc",
}
OPERANDS = (
    "vdst",
    "sdst",
    "sdata",
    "vdata",
    "addr",
    "vaddr",
    "data0",
    "data1",
    "data",
    "saddr",
    "srsrc",
    "sbase",
    "soffset",
    "ssrc0",
    "ssrc1",
    "src0",
    "vsrc0",
    "src1",
    "vsrc1",
    "src2",
    "scale_src0",
    "scale_src1",
)
FLAGS = ("offen", "idxen", "sc0", "sc1", "nt", "lds", "acc", "clmp")


def operand(ins: Instruction, number: int, words: int, bank: str = "v") -> str:
    """One operand; registers with their width."""
    if number >= 256:
        first = number - 256
        return f"{bank}{first}" if words == 1 else f"{bank}[{first}:{first + words - 1}]"
    if number < 106 and number not in NAMES:
        return f"s{number}" if words == 1 else f"s[{number}:{number + words - 1}]"
    if number in NAMES:
        return NAMES[number]
    if number == 255:
        return f"0x{ins.literal:x}"
    if 128 <= number <= 208:
        return str(number - 128 if number <= 192 else 192 - number)
    return f"ttmp{number - 108}"


def _skipped(ins: Instruction, name: str) -> bool:
    operands = ins.fields.operands
    plain = name.removeprefix("v") if name in ("vsrc0", "vsrc1") else name
    if name not in operands and plain not in operands and name != "sdst":
        return True
    if name == "saddr":
        return ins.register(name) == 127
    if name == "soffset":
        return ins.format == "SMEM" and not ins.get("soffset_en")
    return name == "src0" and hasattr(type(ins.fields), "vsrc0")


def _banks(ins: Instruction, name: str) -> str:
    acc = ins.get("acc")
    if name in ("data", "data0", "data1", "vdata") or (name == "vdst" and ins.format in ("DS", "GLOBAL", "FLAT")):
        return "a" if acc else "v"
    if name in ("src0", "src1") and "MFMA" in ins.name:
        return "a" if acc >> (name == "src1") & 1 else "v"
    if name in ("vdst", "src2") and "MFMA" in ins.name:
        return "a" if ins.get("acc_cd") else "v"
    if (ins.name, name) in (("V_ACCVGPR_WRITE", "vdst"), ("V_ACCVGPR_READ", "src0")):
        return "a"
    return "v"


def text_of(ins: Instruction) -> str:
    """The instruction in one line, close to the assembler's own syntax."""
    parts = []
    for name in OPERANDS:
        if not hasattr(type(ins.fields), name) or _skipped(ins, name):
            continue
        number = ins.register(name)
        if name == "vdst" and ins.name in scalar_destination:
            number &= 0xFF
        sized = name if name in ins.fields.op_bits else name.removeprefix("v")
        words = ins.words(sized)
        if name == "addr" and ins.format in ("GLOBAL", "FLAT"):  # a whole address unless a scalar base stands beside it
            words = 1 if ins.format == "GLOBAL" and ins.register("saddr") != 127 else 2
        parts.append(operand(ins, number, words, _banks(ins, name)))
    return " ".join([ins.name.lower(), *([", ".join(parts)] if parts else []), *_modifiers(ins)])


def _modifiers(ins: Instruction) -> list[str]:
    out = []
    if ins.format == "SOPP":
        imm = ins.get("simm16")
        if "BRANCH" in ins.name:
            out.append(f"0x{ins.pc + ins.size + 4 * signed(imm, 16):x}")
        elif ins.name == "S_WAITCNT":
            out.append(_wait(imm))
        elif ins.name not in ("S_ENDPGM", "S_BARRIER"):
            out.append(str(imm))
    if ins.format == "SOPK":
        out.append(f"0x{ins.get('simm16'):x}")
    if ins.format in ("GLOBAL", "SMEM", "MUBUF", "FLAT") and ins.get("offset"):
        width = {"GLOBAL": 13, "SMEM": 21}.get(ins.format, 31)
        out.append(f"offset:{signed(ins.get('offset'), width)}")
    out += [f"{n}:{ins.get(n)}" for n in ("offset0", "offset1") if ins.get(n)]
    out += [n for n in FLAGS if ins.get(n) and not (n in ("acc", "clmp") and "MFMA" in ins.name)]
    out += [
        f"{n}:{ins.get(n)}"
        for n in ("cbsz", "blgp", "dst_sel", "dpp", "opsel", "neg", "abs", "neg_hi", "omod")
        if ins.get(n)
    ]
    return out


def _wait(imm: int) -> str:
    vector, lgkm, export = imm & 15 | (imm >> 14 & 3) << 4, imm >> 8 & 15, imm >> 4 & 7
    found = [
        f"{n}({v})" for n, v, top in (("vmcnt", vector, 63), ("expcnt", export, 7), ("lgkmcnt", lgkm, 15)) if v != top
    ]
    return " ".join(found)


def listing(program: Program) -> Iterator[str]:
    """Address, encoding and text of every instruction."""
    for ins in program.instructions:
        words = " ".join(ins.encoding[k : k + 4][::-1].hex() for k in range(0, ins.size, 4))
        yield f"{ins.pc:6x}  {words:36}{text_of(ins)}"


def around(program: Program, pc: int, before: int = 4, after: int = 3) -> list[str]:
    """The code around an instruction, which is marked."""
    at = program.at(pc)
    first = max(0, at - before)
    return [
        f"{'>' if k == at else ' '} {program.instructions[k].pc:6x}  {text_of(program.instructions[k])}"
        for k in range(first, min(len(program.instructions), at + after + 1))
    ]
