"""What the lanes of a warp execute in the machine of ptx_warps.py beyond ptx_grid.py: shuffles, votes, conversions."""

import numpy as np
import torch
from ptx_grid import Cta, f16_bits
from ptx_values import U64, bits32, e4m3_bits, f32, signed, wrap

#: Value of every byte of an e4m3.
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


class Lanes(Cta):
    """32 lanes, `active` those that execute a statement."""

    def op_shfl(self, op, operands):
        assert self.active.all(), "a shuffle in a divergent warp"
        value, lane = self.get(operands[1]), np.arange(32)
        by = self.get(operands[2]).astype(int)
        source = {"bfly": lane ^ by, "idx": by & 31, "up": lane - by}[op[2]]
        inside = source >= 0
        name, _, predicate = operands[0].partition("|")
        self.put(name, np.where(inside, value[source], value))
        if predicate:
            self.put(predicate, inside.astype(U64))

    def op_vote(self, op, operands):
        assert self.active.all()
        vote = self.get(operands[1]) != 0
        if op[2] == "ballot":
            self.put(operands[0], np.full(32, sum(1 << i for i in range(32) if vote[i]), U64))
        else:
            self.put(operands[0], np.full(32, int(vote.any() if op[2] == "any" else vote.all()), U64))

    def op_popc(self, op, operands):
        self.put(operands[0], np.array([int(x & U64(0xFFFFFFFF)).bit_count() for x in self.get(operands[1])], U64))

    def op_prmt(self, op, operands):
        a, b, select = (self.get(x) for x in operands[1:])
        both = (a & U64(0xFFFFFFFF)) | (b << U64(32))
        out = np.zeros(32, U64)
        for i in range(4):
            chosen = (select >> U64(4 * i)) & U64(15)
            assert (chosen < 8).all()
            out |= ((both >> (chosen * U64(8))) & U64(0xFF)) << U64(8 * i)
        self.put(operands[0], out)

    def op_lg2(self, op, operands):
        self.put(operands[0], bits32(np.log2(f32(self.get(operands[1])).astype(np.float64))))

    def op_setp(self, op, operands):
        kind = op[-1]
        if kind == "f32":
            a, b = (f32(self.get(x)) for x in operands[1:])
        elif kind[0] == "s":
            a, b = (signed(self.get(x), int(kind[1:])) for x in operands[1:])
        else:
            a, b = (wrap(self.get(x), int(kind[1:])) for x in operands[1:])
        base = op[1].removesuffix("u") if op[1] not in ("eq", "ne") and kind == "f32" else op[1]
        compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                   "ge": np.greater_equal}[base]  # fmt: skip
        result = compare(a, b)
        if kind == "f32":
            nan = np.isnan(a) | np.isnan(b)
            result = np.where(nan, op[1].endswith("u"), result)
        self.put(operands[0], result.astype(U64))

    def op_div(self, op, operands):
        if op[-1] == "s32":
            a, b = (signed(self.get(x), 32) for x in operands[1:])
            quotient = np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))
            self.put(operands[0], wrap(quotient, 32))
        else:
            super().op_div(op, operands)

    def op_cvt(self, op, operands):
        if op[-1] == "e4m3x2":
            raw = self.get(operands[1])
            low, high = (f16_bits(E4M3[((raw >> U64(8 * i)) & U64(0xFF)).astype(int)]) for i in range(2))
            self.put(operands[0], low | (high << U64(16)))
        elif op[-2] == "e4m3x2":
            hi, lo = (e4m3_bits(f32(self.get(n))) for n in operands[1:])
            self.put(operands[0], lo | (hi << U64(8)))
        else:
            super().op_cvt(op, operands)
