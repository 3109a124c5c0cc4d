"""Runs clusters whose threads store to other ranks' memory and wait for what those store: the machine of ptx_cluster.py
with loops, relaxed accesses, atomics and a clock.

Every thread has a program counter; those that are furthest behind run first, so that a loop ends before what follows
it. Launches run one after the other: a wait is for what an earlier launch stored, or goes on until its bound. The clock
advances by a microsecond at each look.
"""

import functools
import re
import tempfile
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from ptx_cluster import Buffer, Program
from ptx_grid import Cta, Memory
from ptx_values import U64, bf16_bits, bf16_values, f32, signed, wrap

TICK = 1000  # nanoseconds


class PeerProgram(Program):
    """A Program in which the labels of each wait are its own."""

    def __init__(self, text: str):
        number = iter(range(10**6))

        def own(found: re.Match) -> str:
            n = next(number)
            body = found[1].replace("bra POLLED", f"bra $done{n}").replace("bra POLL", f"bra $poll{n}")
            return f"$poll{n}: {body} $done{n}:"

        super().__init__(re.sub(r"POLL:(.*?)POLLED:", own, text, flags=re.S))


@functools.cache
def program(key: Any, target: str = "sm_90a") -> PeerProgram:
    """The PTX of a kernel key, parsed."""
    import cutlass.cute as cute

    function, arguments = import_module(key.device_module).trace(key, target)
    with tempfile.TemporaryDirectory() as scratch:
        options = f"--gpu-arch {target} --keep-ptx --dump-dir {scratch}"
        return PeerProgram(cute.compile(function, *arguments, options=options).artifacts.PTX)


class Peers(Cta):
    """One cluster of `ctas` CTAs. clock: nanoseconds, shared by the launches of a test."""

    def __init__(self, code: Program, ctas: int, smem: int, grid: tuple[int, int, int], first: int, y: int, z: int):
        super().__init__(code, ctas, smem, grid, y, z)
        self.special["%ctaid.x"] = self.rank + first
        self.special |= {f"%nctaid.{d}": np.full(self.lanes, n) for d, n in zip("xyz", grid, strict=True)}
        self.clock = 1
        self.steps = 0

    def run(self, arguments: list[int], buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.regs = {}
        self.arguments = {name: value for (_, name), value in zip(self.program.params, arguments, strict=True)}
        statements, labels = self.program.statements, self.program.labels
        pc = np.zeros(self.lanes, int)
        while (index := int(pc.min())) < len(statements):
            raw, guard, op, operands = statements[index]
            here = pc == index
            pc[here] += 1
            self.active = here & ((self.regs[guard[0]] != 0) ^ guard[1]) if guard else here
            self.steps += 1
            if op[0] == "label" or not self.active.any():
                continue
            if op[0] == "bra":
                pc[self.active] = labels[operands[0]]
            elif op[0] == "ret":
                pc[self.active] = 1 << 30
            else:
                try:
                    with np.errstate(all="ignore"):
                        getattr(self, "op_" + op[0])(op, operands)
                except Exception as e:
                    raise AssertionError(f"statement {index}: {raw}: {e}") from e
        assert not any(self.in_flight.values()), "a store to a peer that nobody waited for"

    def get(self, name):
        if name == "%globaltimer":
            self.clock += TICK
            return np.full(self.lanes, self.clock, U64)
        return super().get(name)

    @staticmethod
    def plain(op):
        """ld.relaxed.sys.global.b32 -> ld.global.b32."""
        return [part for part in op if part not in ("relaxed", "sys", "gpu")]

    def op_ld(self, op, operands):
        super().op_ld(self.plain(op), operands)

    def op_st(self, op, operands):
        op = self.plain(op)
        if op[1] != "global":
            super().op_st(op, operands)
            return
        width = int(op[-1][1:]) // 8
        data = self.bytes_of(self.vector(operands[1]), width)
        for lanes, buffer, offsets in self.find(self.where(operands[0]), data.shape[1], store=True):
            index = offsets[:, None] + np.arange(data.shape[1])
            assert np.unique(index).size == index.size, "two lanes store to one byte"
            buffer.data[index] = data[lanes]
            buffer.written[index] = True

    def op_atom(self, op, operands):
        assert op[-2:] == ["cas", "b64"]
        address, compare, value = self.where(operands[1]), self.get(operands[2]), self.get(operands[3])
        before, every = self.regs.get(operands[0], np.zeros(self.lanes, U64)).copy(), self.active
        for lane in np.flatnonzero(every):
            self.active = np.arange(self.lanes) == lane
            ((_, buffer, offsets),) = self.find(address, 8, store=True)
            word = buffer.data[offsets[0] : offsets[0] + 8].view(U64)
            before[lane] = word[0]
            if word[0] == compare[lane]:
                word[0] = value[lane]
        self.active = every
        self.regs[operands[0]] = before

    def op_setp(self, op, operands):
        if op[2] != "and" and op[-1] != "f32":
            super().op_setp(op, operands)
            return
        if op[-1] == "f32":
            a, b = (f32(self.get(n)) for n in operands[1:3])
            name = op[1].removesuffix("u")
            compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                       "ge": np.greater_equal}[name]  # fmt: skip
            nan = np.isnan(a) | np.isnan(b)
            result = np.where(nan, op[1] == "neu" or op[1] != name, compare(a, b)).astype(U64)
        else:
            width = int(op[-1][1:])
            result = (wrap(self.get(operands[1]), width) == wrap(self.get(operands[2]), width)).astype(U64)
            assert op[1] == "eq"
        if op[2] == "and":
            result &= self.get(operands[3])
        self.put(operands[0], result)

    def op_popc(self, op, operands):
        self.put(operands[0], np.array([int(x & U64(0xFFFFFFFF)).bit_count() for x in self.get(operands[1])], U64))

    def op_fma(self, op, operands):
        if op[-1] != "bf16x2":
            super().op_fma(op, operands)
            return
        halves = []
        for shift in (0, 16):
            a, b, c = (bf16_values(self.get(n) >> U64(shift)) for n in operands[1:])
            halves.append(bf16_bits(a * b + c))
        self.put(operands[0], halves[0] | (halves[1] << U64(16)))

    def op_mul(self, op, operands):
        if op[-1][0] in "su" and op[1] == "lo":
            width = int(op[-1][1:])
            a, b = (signed(self.get(n), width) for n in operands[1:3])
            self.put(operands[0], wrap(a * b, width))
        else:
            super().op_mul(op, operands)

    def op_div(self, op, operands):
        self.signed_division(op, operands, lambda a, b: np.abs(a) // np.maximum(np.abs(b), 1)) or super().op_div(
            op, operands
        )

    def op_rem(self, op, operands):
        if op[-1] == "s32":
            a, b = (signed(self.get(n), 32) for n in operands[1:3])
            self.put(operands[0], wrap(np.sign(a) * (np.abs(a) % np.maximum(np.abs(b), 1)), 32))
        else:
            super().op_rem(op, operands)

    def signed_division(self, op, operands, f) -> bool:
        if op[-1] != "s32":
            return False
        a, b = (signed(self.get(n), 32) for n in operands[1:3])
        self.put(operands[0], wrap(np.sign(a) * np.sign(b) * f(a, b), 32))
        return True


def launch(key: Any, shape: Any, values: Mapping[str, Any], memory: Memory) -> int:
    """Launches `key` over its grid, cluster after cluster; gives the statements executed."""
    code = program(key)
    assert shape.block == (code.threads, 1, 1)
    arguments = []
    for p in key.params:
        value = values[p.name]
        if p.kind == "f32":
            value = int(np.float32(value).view(np.uint32))
        arguments.append(value & ((1 << (64 if p.kind in ("ptr", "i64") else 32)) - 1))
    total = 0
    for z in range(shape.grid[2]):
        for y in range(shape.grid[1]):
            for x in range(0, shape.grid[0], shape.cluster[0]):
                cluster = Peers(code, shape.cluster[0], shape.smem, shape.grid, x, y, z)
                cluster.run(arguments, memory.buffers)
                assert cluster.waited, "a cluster that never waits for the kernel before"
                total += cluster.steps
    return total
