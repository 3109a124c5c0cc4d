"""Runs a kernel's PTX on the CPU over a whole grid of single CTAs: the machine of ptx_cluster.py and the instructions
that MlaValue and the epilogues need beyond those of MlaQuery."""

import functools
import tempfile
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from ptx_cluster import Buffer, Cluster, Program
from ptx_values import U64, bits32, f32, wrap


def f16_bits(values):
    return torch.from_numpy(np.ascontiguousarray(values)).half().view(torch.int16).numpy().view(np.uint16).astype(U64)


def f16_values(bits):
    return (bits & U64(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)


class Cta(Cluster):
    """One CTA. Approximate instructions are exact here, rounded once."""

    def op_ex2(self, op, operands):
        self.put(operands[0], bits32(np.exp2(f32(self.get(operands[1])).astype(np.float64))))

    def op_rcp(self, op, operands):
        self.put(operands[0], bits32(1.0 / f32(self.get(operands[1])).astype(np.float64)))

    def op_neg(self, op, operands):
        self.put(operands[0], bits32(-f32(self.get(operands[1]))))

    def op_abs(self, op, operands):
        self.put(operands[0], bits32(np.abs(f32(self.get(operands[1])))))

    def op_max(self, op, operands):
        if op[-1] == "f32":  # a NaN counts as missing
            self.put(operands[0], bits32(np.fmax(f32(self.get(operands[1])), f32(self.get(operands[2])))))
        else:
            self.binary(op, operands, np.maximum)

    def op_sub(self, op, operands):
        if op[-1] == "f32":
            self.put(operands[0], bits32(f32(self.get(operands[1])) - f32(self.get(operands[2]))))
        else:
            super().op_sub(op, operands)

    def op_setp(self, op, operands):
        if op[-1] == "f32":
            assert op[1] == "eq"
            self.put(operands[0], (f32(self.get(operands[1])) == f32(self.get(operands[2]))).astype(U64))
        else:
            super().op_setp(op, operands)

    def op_xor(self, op, operands):
        self.logic(op, operands, lambda a, b: a ^ b)

    def op_div(self, op, operands):
        if op[-1] == "f32":
            super().op_div(op, operands)
        else:
            self.binary(op, operands, lambda a, b: a // np.maximum(b, 1))

    def op_rem(self, op, operands):
        self.binary(op, operands, lambda a, b: a % np.maximum(b, 1))

    def op_prefetch(self, op, operands):
        for _ in self.find(self.where(operands[0]), 1, store=False):
            pass

    def op_cvt(self, op, operands):
        if op[-2] == "f16x2":
            hi, lo = (f16_bits(f32(self.get(n))) for n in operands[1:])
            self.put(operands[0], lo | (hi << U64(16)))
        elif op[-1] == "f16":
            self.put(operands[0], bits32(f16_values(self.get(operands[1]))))
        else:
            super().op_cvt(op, operands)

    def op_mad(self, op, operands):
        width = int(op[-1][1:])
        self.put(
            operands[0],
            wrap(self.product(op, operands) + self.get(operands[3]), 64 if op[1] == "wide" else width),
        )

    def op_mov(self, op, operands):
        if op[-1] == "f32" and not operands[1].startswith(("%", "$", "0f")) and operands[1] not in self.regs:
            raise AssertionError(f"unknown operand {operands[1]}")
        super().op_mov(op, operands)


@functools.cache
def program(key: Any, target: str = "sm_90a") -> Program:
    """The PTX of a kernel key, parsed."""
    import cutlass.cute as cute

    function, arguments = import_module(key.device_module).trace(key, target)
    with tempfile.TemporaryDirectory() as scratch:
        options = f"--gpu-arch {target} --keep-ptx --dump-dir {scratch}"
        return Program(cute.compile(function, *arguments, options=options).artifacts.PTX)


class Memory:
    """Tensors as buffers of the machine, each at an address of its own."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._next = 0x7F00_0000_0000

    def place(self, tensor: torch.Tensor, writable: bool = False, gap: int = 1 << 20) -> int:
        """The device address of the tensor's first element; its whole storage is reachable. CPU memory is shared, so
        stores show in the tensor."""
        storage = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
        buffer = Buffer(storage.numpy(), writable, self._next)
        self._next += -(-buffer.data.size // 256) * 256 + gap
        self.buffers.append(buffer)
        return buffer.address + tensor.storage_offset() * tensor.element_size()


def run(key: Any, launch: Any, values: Mapping[str, int], memory: Memory, smem: int = 0) -> None:
    """Launches `key` over its grid, CTA after CTA."""
    code = program(key)
    arguments = [values[p.name] & (1 << 64 if p.kind in ("ptr", "i64") else 1 << 32) - 1 for p in key.params]
    assert launch.block == (code.threads, 1, 1)
    for z in range(launch.grid[2]):
        for y in range(launch.grid[1]):
            for x in range(launch.grid[0]):
                cta = Cta(code, 1, max(smem, 1), launch.grid, y, z)
                cta.special["%ctaid.x"] = np.full(cta.lanes, x)
                cta.run(arguments, memory.buffers)
                assert cta.uninitialized == 0
