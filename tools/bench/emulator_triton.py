"""Kernels for Triton's AMD backend, which compiles for gfx950 without a GPU: the ideas of its tutorials, anew."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tools.gfx950 import CodeObject, Emulator, Memory, Result


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + (k + inner)[None, :])
        right = tl.load(b + (k + inner)[:, None] * N + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total)


@triton.jit
def matmul_scaled(
    a,
    sa,
    b,
    sb,
    c,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    AF: tl.constexpr,
    BF: tl.constexpr,
    AP: tl.constexpr,
    BP: tl.constexpr,
):
    rows, columns, slices = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK // 32)
    left = tl.load(a + rows[:, None] * (BK // AP) + tl.arange(0, BK // AP)[None, :])
    right = tl.load(b + columns[None, :] * (BK // BP) + tl.arange(0, BK // BP)[:, None])
    left_scale = tl.load(sa + rows[:, None] * (BK // 32) + slices[None, :])
    right_scale = tl.load(sb + columns[:, None] * (BK // 32) + slices[None, :])
    tl.store(c + rows[:, None] * BN + columns[None, :], tl.dot_scaled(left, left_scale, AF, right, right_scale, BF))


@triton.jit
def softmax(x, y, N, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < N
    value = tl.load(x + row * N + column, mask=inside, other=-float("inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * N + column, power / tl.sum(power, 0), mask=inside)


@triton.jit
def layer_norm(x, weight, bias, y, N, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < N
    value = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, 0) / N, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / N + eps)
    out = centred * scale * tl.load(weight + column, mask=inside) + tl.load(bias + column, mask=inside)
    tl.store(y + row * N + column, out, mask=inside)


@triton.jit
def dropout(x, y, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    tl.store(y + at, tl.where(keep, tl.load(x + at, mask=at < N) / (1 - p), 0.0), mask=at < N)


@triton.jit
def grid_barrier(counter, mine, sums, BLOCKS: tl.constexpr):
    """Every block adds itself to a counter, waits for all, and sums what the others wrote."""
    block = tl.program_id(0)
    tl.store(mine + block, block + 1)
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < BLOCKS:
        pass
    tl.store(sums + block, tl.sum(tl.load(mine + tl.arange(0, BLOCKS), volatile=True)))


def build(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4, **options: Any
) -> tuple[CodeObject, int]:
    """The code object and its dynamic LDS."""
    source = ASTSource(kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options=dict(num_warps=warps, **options))
    return CodeObject(built.asm["hsaco"]), built.metadata.shared


def run(built: tuple[CodeObject, int], grid: Any, args: list[Any], warps: int = 4, **options: Any) -> Result:
    """Launches over exactly the tensors among `args`."""
    code, lds = built
    memory = Memory(*(a for a in args if hasattr(a, "data_ptr")))
    wanted = sum(not a.hidden for a in code.kernel().arguments)
    args = [*args, *[None] * (wanted - len(args))]  # scratch pointers that these kernels do not use
    return Emulator(memory, **options).launch(code, None, grid, 64 * warps, args, dynamic_lds=lds)
