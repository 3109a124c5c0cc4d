"""Decoded instructions to records: operands become indices into the wave's register files, names become operations."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np

from .codeobject import CodeObject, Kernel
from .decode import Instruction, decode, scalar_destination
from .record import (
    ACCUMULATION,
    F_DPP,
    F_DS,
    F_FLAT,
    F_IDXEN,
    F_LDS,
    F_NT,
    F_OFFEN,
    F_RETURN,
    F_SADDR,
    F_SC0,
    F_SC1,
    F_SDWA,
    F_SDWA_SDST,
    F_SMEM,
    F_VMEM,
    FIRST_LITERAL,
    RECORD,
    SCALARS,
    VECTOR,
)

VCC, M0, VCCZ, LITERAL = 106, 124, 251, 255
FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0)  # constants 240..247; 248 is 1 / (2 pi)
READS_DESTINATION = re.compile(r"V_(PK_)?FMAC|V_DOT\dC|V_SWAP|V_PERMLANE")


def signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) & 1 else value


@dataclass
class Lowered:
    """One instruction's record under construction, with the registers it touches."""

    ins: Instruction
    f: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SCALARS, 0))
    reads: list[tuple[int, int]] = field(default_factory=list)  # first register, count
    writes: list[tuple[int, int]] = field(default_factory=list)
    operation: str = ""


@dataclass
class Program:
    """A kernel, lowered. `unknown` lists (pc, name, encoding) of instructions that the core does not implement."""

    kernel: Kernel
    instructions: list[Instruction]
    records: np.ndarray
    literals: np.ndarray
    unknown: list[Instruction]
    operations: list[str]

    def at(self, pc: int) -> int:
        """Index of the instruction at `pc`."""
        return int(np.searchsorted(self.records["pc"], pc))


class Lowering:
    """Lowers one kernel; collects the literals that its instructions carry."""

    def __init__(self, operations: dict[str, int]) -> None:
        self.operations = operations
        self.literals: list[int] = []
        self.index: dict[int, int] = {}

    def run(self, code_object: CodeObject, kernel: Kernel) -> Program:
        instructions = list(decode(code_object.code(kernel)))
        self.index = {ins.pc: k for k, ins in enumerate(instructions)}
        self.index[kernel.size] = len(instructions)
        lowered = [self.one(ins) for ins in instructions]
        records = np.zeros(len(lowered) + 1, RECORD)
        unknown = []
        for k, low in enumerate(lowered):
            op = self.operations.get(low.operation, -1)
            if op < 0:
                unknown.append(low.ins)
            low.f["op"] = op
            self._place(low, kernel.accumulation_base)
            for name, value in low.f.items():
                records[name][k] = np.uint32(value & 0xFFFFFFFF).view(np.int32)
            for ranges, vector, scalar in ((low.reads, "vread", "sread"), (low.writes, "vwrite", "swrite")):
                vset, sset = 0, 0
                for first, count in ranges:
                    if first >= VECTOR:
                        vset |= ((1 << count) - 1) << (first - VECTOR)
                    elif first < 128:
                        sset |= (((1 << count) - 1) << first) & ((1 << 128) - 1)
                records[vector][k] = np.frombuffer((vset & ((1 << 512) - 1)).to_bytes(64, "little"), "<u4")
                records[scalar][k] = np.frombuffer(sset.to_bytes(16, "little"), "<u4")
        records["op"][-1], records["pc"][-1] = -1, kernel.size  # falling off the end stops
        names = [low.operation for low in lowered]
        return Program(kernel, instructions, records, np.array(self.literals or [0], "<u4"), unknown, names)

    @staticmethod
    def _place(low: Lowered, base: int) -> None:
        def move(index: int) -> int:
            return index - ACCUMULATION + VECTOR + base if index >= ACCUMULATION else index

        for name in ("dst", "dst2", "a", "b", "c") + (("imm",) if low.operation.startswith("V_MFMA_SCALE") else ()):
            low.f[name] = move(low.f[name])
        low.reads = [(move(r), n) for r, n in low.reads]
        low.writes = [(move(r), n) for r, n in low.writes]

    # ---- operands ----

    def literal(self, *words: int) -> int:
        at = FIRST_LITERAL + len(self.literals)
        self.literals.extend(w & 0xFFFFFFFF for w in words)
        return at

    def constant(self, ins: Instruction, number: int, bits: int, kind: str) -> int:
        """Index of a constant or literal as an operand of `bits` bits with the number format `kind`."""
        if bits == 64 and not kind.startswith("PK2"):
            return self.literal(*self._wide(ins, number, kind))
        if number == LITERAL:
            return self.literal(ins.literal)
        if number >= 240 and ("F16" in kind):
            value = FLOATS[number - 240] if number < 248 else 0.15915494
            half = struct.unpack("<I", struct.pack("<f", value))[0] >> 16 if "BF16" in kind else 0
            return self.literal(half or struct.unpack("<H", struct.pack("<e", value))[0])
        return number

    @staticmethod
    def _wide(ins: Instruction, number: int, kind: str) -> tuple[int, int]:
        if number == LITERAL:
            word = ins.literal
            if kind == "F64":
                return 0, word
            return word, 0xFFFFFFFF if kind == "I64" and word >> 31 else 0
        if number >= 240:
            value = FLOATS[number - 240] if number < 248 else 0.15915494309189532
            low, high = struct.unpack("<II", struct.pack("<d", value))
            return low, high
        value = number - 128 if number <= 192 else 192 - number
        return value & 0xFFFFFFFF, 0xFFFFFFFF if value < 0 else 0

    def source(
        self, low: Lowered, to: str, name: str, acc: int = 0, number: int | None = None, operand: str = ""
    ) -> None:
        """Operand `name` of the encoding into record field `to`."""
        ins = low.ins
        number = ins.register(name) if number is None else number
        operand = operand or name
        words = ins.words(operand)
        if number >= 256:
            index = (ACCUMULATION if acc else VECTOR) + number - 256
        elif 128 <= number < 235 or number >= 240:
            if number in (251, 252, 253):
                index = number
            else:
                index = self.constant(ins, number, ins.bits(operand), ins.number_format(operand))
        else:
            index = number
        low.f[to] = index
        low.reads.append((VCC, 2) if number == VCCZ else (index, words))

    def one(self, ins: Instruction) -> Lowered:
        low = Lowered(ins, operation=ins.name)
        low.f["pc"] = ins.pc
        getattr(self, "_" + ins.format.lower(), self._other)(low)
        return low

    def _other(self, low: Lowered) -> None:
        low.operation = ""

    # ---- scalar formats ----

    def _sopp(self, low: Lowered) -> None:
        imm = low.ins.get("simm16")
        low.f["imm"] = imm
        if "BRANCH" in low.ins.name:
            low.f["target"] = self.target(low.ins, imm)
        if "VCC" in low.ins.name:
            low.reads.append((VCC, 2))

    def target(self, ins: Instruction, imm: int) -> int:
        return self.index.get(ins.pc + ins.size + 4 * signed(imm, 16), len(self.index))

    def _sopk(self, low: Lowered) -> None:
        ins = low.ins
        low.f["dst"] = ins.register("sdst")
        low.f["imm"] = signed(ins.get("simm16"), 16)
        if "REG" in ins.name:
            low.f["imm"] = ins.get("simm16")
        if ins.name == "S_SETREG_IMM32_B32":
            low.f["a"] = self.literal(ins.literal)
        elif ins.name == "S_CALL_B64":
            low.f["target"] = self.target(ins, ins.get("simm16"))
            low.writes.append((low.f["dst"], 2))
        elif ins.name.startswith("S_CMPK") or ins.name == "S_SETREG_B32":
            low.reads.append((low.f["dst"], 1))
        else:
            low.writes.append((low.f["dst"], 1))

    def _sop1(self, low: Lowered) -> None:
        if low.ins.name != "S_GETPC_B64":
            self.source(low, "a", "ssrc0")
        if low.ins.name != "S_SETPC_B64":
            low.f["dst"] = low.ins.register("sdst")
            low.writes.append((low.f["dst"], low.ins.words("sdst")))

    def _sop2(self, low: Lowered) -> None:
        self._sop1(low)
        self.source(low, "b", "ssrc1")

    def _sopc(self, low: Lowered) -> None:
        self.source(low, "a", "ssrc0")
        self.source(low, "b", "ssrc1")

    def _smem(self, low: Lowered) -> None:
        ins = low.ins
        low.f["flags"] |= F_SMEM
        low.f["dst"], low.f["a"] = ins.register("sdata"), ins.register("sbase")
        low.f["imm"] = signed(ins.get("offset"), 21) if ins.get("imm") else 0
        low.f["b"] = ins.register("soffset") if ins.get("soffset_en") else -1
        if not ins.get("imm") and not ins.get("soffset_en"):
            low.f["b"] = ins.get("offset") & 0x7F
        match = re.fullmatch(r"S_(BUFFER_)?LOAD_DWORD(?:X(\d+))?", ins.name)
        if match:
            low.operation = "S_BUFFER_LOAD" if match[1] else "S_LOAD"
            low.f["count"] = int(match[2] or 1)
            low.reads.append((low.f["a"], 4 if match[1] else 2))
            if low.f["b"] >= 0:
                low.reads.append((low.f["b"], 1))
            low.writes.append((low.f["dst"], low.f["count"]))
        elif ins.name in ("S_MEMTIME", "S_MEMREALTIME"):
            low.writes.append((low.f["dst"], 2))

    # ---- vector formats ----

    def destination(self, low: Lowered, acc: int = 0) -> None:
        ins = low.ins
        number = ins.register("vdst")
        if ins.name in scalar_destination:
            number &= 0xFF
        low.f["dst"] = number if number < 256 else (ACCUMULATION if acc else VECTOR) + number - 256
        words = ins.words("vdst")
        low.writes.append((low.f["dst"], words))
        if READS_DESTINATION.match(ins.name):
            low.reads.append((low.f["dst"], words))

    def special(self, low: Lowered) -> bool:
        """DPP and SDWA controls; true when the instruction has one (its first source is then `vsrc0`)."""
        ins = low.ins
        dpp, sdwa = "DPP" in ins.variant, "SDWA" in ins.variant
        if not (dpp or sdwa):
            return False
        low.f["neg"] = ins.get("src0_neg") | ins.get("src1_neg") << 1
        low.f["abs"] = ins.get("src0_abs") | ins.get("src1_abs") << 1
        if dpp:
            low.f["flags"] |= F_DPP
            low.f["dpp"] = ins.get("dpp")
            low.f["dpp_mask"] = ins.get("row_mask") | ins.get("bank_mask") << 4 | ins.get("bc") << 8
        else:
            low.f["flags"] |= F_SDWA | (F_SDWA_SDST if "SDST" in ins.variant else 0)
            low.f["clamp"], low.f["omod"] = ins.get("clmp"), ins.get("omod")
            low.f["sdwa"] = (
                ins.get("dst_sel", 6)
                | ins.get("dst_unused") << 3
                | ins.get("src0_sel") << 5
                | ins.get("src1_sel") << 8
                | ins.get("src0_sext") << 11
                | ins.get("src1_sext") << 12
            )
        number = ins.register("vsrc0")
        self.source(low, "a", "vsrc0", number=number - 256 if sdwa and ins.get("s0") else number, operand="src0")
        return True

    def _vop1(self, low: Lowered) -> None:
        if low.ins.name in ("V_NOP", "V_CLREXCP"):
            return
        self.destination(low)
        if not self.special(low):
            self.source(low, "a", "src0")
        if low.ins.name == "V_ACCVGPR_MOV_B32":
            low.operation = "V_MOV_B32"
            low.f["a"] += ACCUMULATION - VECTOR
            low.f["dst"] += ACCUMULATION - VECTOR
            low.reads, low.writes = [(low.f["a"], 1)], [(low.f["dst"], 1)]
        if low.ins.name in ("V_SWAP_B32", "V_PERMLANE16_SWAP_B32", "V_PERMLANE32_SWAP_B32"):
            low.writes.append((low.f["a"], 1))

    def _second(self, low: Lowered) -> None:
        number = low.ins.register("vsrc1")
        self.source(
            low, "b", "vsrc1", number=number - 256 if "SDWA" in low.ins.variant and low.ins.get("s1") else number
        )

    def _vop2(self, low: Lowered) -> None:
        ins = low.ins
        self.destination(low)
        if not self.special(low):
            self.source(low, "a", "src0")
        self._second(low)
        low.f["c"] = VCC
        if ins.name in ("V_FMAMK_F32", "V_MADMK_F16"):
            low.f["c"], low.f["b"] = low.f["b"], self.literal(ins.literal)
        elif ins.name in ("V_FMAAK_F32", "V_MADAK_F16"):
            low.f["c"] = self.literal(ins.literal)
        elif "_CO_" in ins.name:
            low.f["dst2"] = VCC
            low.writes.append((VCC, 2))
        if ins.name.startswith(("V_CNDMASK", "V_ADDC", "V_SUBB")):
            low.reads.append((VCC, 2))

    def _vopc(self, low: Lowered) -> None:
        if not self.special(low):
            self.source(low, "a", "src0")
        self._second(low)
        low.f["dst"] = low.ins.register("sdst") if low.ins.get("sd") else VCC
        low.writes.append((low.f["dst"], 2))

    def _vop3(self, low: Lowered) -> None:
        ins = low.ins
        if ins.name in ("V_NOP", "V_CLREXCP"):
            return
        self.destination(low)
        operands = ins.fields.operands
        for to, name in (("a", "src0"), ("b", "src1"), ("c", "src2")):
            if name in operands or (name == "src1" and "vsrc1" in operands):
                self.source(low, to, name)
        low.f["neg"], low.f["abs"] = ins.get("neg"), ins.get("abs")
        low.f["clamp"], low.f["omod"], low.f["opsel"] = ins.get("clmp"), ins.get("omod"), ins.get("opsel")
        if ins.name.startswith("V_BITOP3"):  # the truth table lies in the modifier fields
            low.f["imm"] = ins.get("neg") | ins.get("abs") << 3 | ins.get("omod") << 6
            low.f["neg"] = low.f["abs"] = low.f["omod"] = 0
        if ins.name.startswith("V_DIV_FMAS"):
            low.reads.append((VCC, 2))

    def _vop3sd(self, low: Lowered) -> None:
        self._vop3(low)
        if low.ins.name.startswith(("V_ADDC", "V_SUBB")):
            self.source(low, "c", "src2")
            low.reads[-1] = (low.f["c"], 2)
        low.f["dst2"] = low.ins.register("sdst")
        low.writes.append((low.f["dst2"], 2))

    def _vop3p(self, low: Lowered) -> None:
        ins = low.ins
        if "MFMA" in ins.name or "SMFMAC" in ins.name:
            return self._matrix(low)
        if ins.name == "V_ACCVGPR_READ":
            low.operation = "V_MOV_B32"
            self.destination(low)
            return self.source(low, "a", "src0", acc=1)
        if ins.name == "V_ACCVGPR_WRITE":
            low.operation = "V_MOV_B32"
            self.destination(low, acc=1)
            return self.source(low, "a", "src0")
        self.destination(low)
        operands = ins.fields.operands
        for to, name in (("a", "src0"), ("b", "src1"), ("c", "src2")):
            if name in operands:
                self.source(low, to, name)
        low.f["neg"], low.f["neg_hi"], low.f["clamp"] = ins.get("neg"), ins.get("neg_hi"), ins.get("clmp")
        low.f["opsel"], low.f["opsel_hi"] = ins.get("opsel"), ins.get("opsel_hi") | ins.get("opsel_hi2") << 2

    def _matrix(self, low: Lowered) -> None:
        ins = low.ins
        acc, acc_cd = ins.get("acc"), ins.get("acc_cd")
        self.destination(low, acc=acc_cd)
        self.source(low, "a", "src0", acc=acc & 1)
        self.source(low, "b", "src1", acc=acc & 2)
        self.source(low, "c", "src2", acc=acc_cd)
        low.f["x0"], low.f["x1"] = ins.get("cbsz"), ins.get("blgp")
        if "F8F6F4" not in ins.name and (low.f["x0"] or low.f["x1"] or ins.get("abid")):
            low.operation = ""  # broadcast and negate controls of the older forms

    def _vop3px2(self, low: Lowered) -> None:
        ins = low.ins
        self._matrix(low)
        for to, name in (("dst2", "scale_src0"), ("imm", "scale_src1")):
            self.source(low, to, name)
        # op_sel and op_sel_hi give the two bits of the scale's byte, bit 0 for A and bit 1 for B.
        low_bits, high_bits = ins.get("opsel"), ins.get("opsel_hi")
        byte_a = low_bits & 1 | (high_bits & 1) << 1
        byte_b = low_bits >> 1 & 1 | (high_bits >> 1 & 1) << 1
        low.f["imm2"] = byte_a | byte_b << 2

    # ---- memory formats ----

    def _ds(self, low: Lowered) -> None:
        ins = low.ins
        bank = ACCUMULATION if ins.get("acc") else VECTOR
        low.f["flags"] |= F_DS
        low.f["dst"] = bank + ins.register("vdst") - 256
        low.f["a"] = VECTOR + ins.register("addr") - 256
        low.f["b"], low.f["c"] = bank + ins.register("data0") - 256, bank + ins.register("data1") - 256
        low.f["imm"], low.f["imm2"] = ins.get("offset0"), ins.get("offset1")
        if not re.search(r"(READ|WRITE|WRXCHG)2", ins.name):
            low.f["imm"] |= ins.get("offset1") << 8
        operands = ins.fields.operands
        for to, name in (("a", "addr"), ("b", "data0"), ("c", "data1")):
            if name in operands:
                low.reads.append((low.f[to], ins.words(name)))
        if "vdst" in operands:
            low.writes.append((low.f["dst"], ins.words("vdst")))
        if ins.get("gds"):
            low.operation = ""

    def policy(self, low: Lowered) -> None:
        ins = low.ins
        low.f["flags"] |= F_VMEM | F_SC0 * ins.get("sc0") | F_SC1 * ins.get("sc1") | F_NT * ins.get("nt")
        if ins.get("sc0") and "ATOMIC" in ins.name:
            low.f["flags"] |= F_RETURN

    def sized(self, low: Lowered, name: str) -> None:
        """DWORDX2 and the like are one operation with a count."""
        match = re.search(r"_DWORDX(\d)$", name)
        low.f["count"] = int(match[1]) if match else 1
        low.operation = re.sub(r"_DWORDX\d$", "_DWORD", name)

    def moves(self, low: Lowered, data: int, words: int, result: int, result_words: int) -> None:
        name = low.ins.name
        if "STORE" in name or "ATOMIC" in name:
            low.reads.append((data, words))
        if ("LOAD" in name and not low.f["flags"] & F_LDS) or low.f["flags"] & F_RETURN:
            low.writes.append((result, result_words))

    def _global(self, low: Lowered) -> None:
        ins = low.ins
        bank = ACCUMULATION if ins.get("acc") else VECTOR
        self.policy(low)
        low.f["dst"] = bank + ins.register("vdst") - 256
        low.f["a"], low.f["b"] = VECTOR + ins.register("addr") - 256, bank + ins.register("data") - 256
        low.f["imm"] = signed(ins.get("offset"), 13) if ins.format == "GLOBAL" else ins.get("offset")
        address_words = 2
        if ins.format == "GLOBAL" and ins.register("saddr") != 127:
            low.f["flags"] |= F_SADDR
            low.f["c"] = ins.register("saddr")
            low.reads.append((low.f["c"], 2))
            address_words = 1
        low.reads.append((low.f["a"], address_words))
        name = ins.name
        if "LOAD_LDS" in name:
            low.f["flags"] |= F_LDS
            name = name.replace("LOAD_LDS", "LOAD")
        if ins.format == "FLAT":
            low.f["flags"] |= F_FLAT
            name = name.replace("FLAT_", "GLOBAL_")
        self.sized(low, name)
        self.moves(low, low.f["b"], ins.words("data"), low.f["dst"], ins.words("vdst"))

    _flat = _global

    def _mubuf(self, low: Lowered) -> None:
        ins = low.ins
        bank = ACCUMULATION if ins.get("acc") else VECTOR
        self.policy(low)
        flags = F_OFFEN * ins.get("offen") | F_IDXEN * ins.get("idxen") | F_LDS * ins.get("lds")
        low.f["flags"] |= flags
        if ins.name in ("BUFFER_INV", "BUFFER_WBL2"):
            return
        low.f["dst"], low.f["a"] = bank + ins.register("vdata") - 256, VECTOR + ins.register("vaddr") - 256
        low.f["b"], low.f["imm"] = ins.register("srsrc"), ins.get("offset")
        self.source(low, "c", "soffset")
        low.reads.append((low.f["b"], 4))
        if flags & (F_OFFEN | F_IDXEN):
            low.reads.append((low.f["a"], ins.get("offen") + ins.get("idxen")))
        self.sized(low, ins.name)
        words = ins.words("vdata")
        result = words // 2 if "CMPSWAP" in ins.name else words
        self.moves(low, low.f["dst"], words, low.f["dst"], result)
