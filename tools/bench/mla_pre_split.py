"""The same step as mla_pre's, bf16 W_UK, as seven launches of plain Triton kernels: what one launch saves, in counts.

    python -m tools.bench.mla_pre_split [--tokens 8] [--blocks 8]

The kernels are simple ones of ours, one for each operation of the stock chain; nobody's tuned library. Counts, no
times: wave instructions, the longest wave of each launch (they add up: a launch waits for the one before) and bytes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k3dsl.amd.mla_pre.key import HIDDEN, MlaPreBuild
from k3dsl.reference import mla_pre as reference
from tools.bench.mla_pre import measure
from tools.gfx950 import CodeObject, Emulator, Memory, Result

WARPS = 8


@triton.jit
def mix(prefix, delta, blocks, nw, qk, in_nw, x, eps, NB: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    """AttnRes and input norm of one token; sources are read twice."""
    t, d = tl.program_id(0), tl.arange(0, BLOCK)
    inside = d < D
    score = tl.load(nw + d, mask=inside, other=0).to(tl.float32) * tl.load(qk + d, mask=inside, other=0)
    p = tl.load(prefix + t * D + d, mask=inside, other=0).to(tl.float32) + tl.load(
        delta + t * D + d, mask=inside, other=0
    )
    p = p.to(tl.bfloat16).to(tl.float32)
    tl.store(prefix + t * D + d, p.to(tl.bfloat16), mask=inside)
    largest = tl.sum(p * score, 0) / tl.sqrt(tl.sum(p * p, 0) / D + eps)
    total, den = p, 1.0
    for s in range(NB):
        v = tl.load(blocks + (t * NB + s) * D + d, mask=inside, other=0).to(tl.float32)
        logit = tl.sum(v * score, 0) / tl.sqrt(tl.sum(v * v, 0) / D + eps)
        top = tl.maximum(largest, logit)
        old, new = tl.exp(largest - top), tl.exp(logit - top)
        total, den, largest = total * old + v * new, den * old + new, top
    m = total / den
    m = m / tl.sqrt(tl.sum(m * m, 0) / D + eps) * tl.load(in_nw + d, mask=inside, other=0)
    tl.store(x + t * D + d, m.to(tl.bfloat16), mask=inside)


@triton.jit
def project(x, w, out, S, N, K: tl.constexpr, BK: tl.constexpr):
    """16 columns of x w^T, up to 16 rows."""
    rows, columns, inner = tl.arange(0, 16), tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, BK)
    total = tl.zeros((16, 16), tl.float32)
    for k in range(0, K, BK):
        left = tl.load(x + rows[:, None] * K + (k + inner)[None, :], mask=(rows < S)[:, None], other=0)
        total = tl.dot(left, tl.load(w + columns[None, :] * K + (k + inner)[:, None]), total)
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16), mask=(rows < S)[:, None])


@triton.jit
def norms(qa, q_nw, kv_nw, slots, qc, cache, eps, PITCH: tl.constexpr):
    """Both norms of one token and its cache entry."""
    t, q, kv, pe = tl.program_id(0), tl.arange(0, 2048), tl.arange(0, 512), tl.arange(0, 64)
    v = tl.load(qa + t * PITCH + q, mask=q < 1536, other=0).to(tl.float32)
    v = v / tl.sqrt(tl.sum(v * v, 0) / 1536 + eps) * tl.load(q_nw + q, mask=q < 1536, other=0)
    tl.store(qc + t * 1536 + q, v.to(tl.bfloat16), mask=q < 1536)
    n = tl.load(qa + t * PITCH + 1536 + kv).to(tl.float32)
    n = (n / tl.sqrt(tl.sum(n * n, 0) / 512 + eps) * tl.load(kv_nw + kv)).to(tl.bfloat16).to(tl.float32)
    entry = cache + tl.load(slots + t) * 576
    tl.store(entry + kv, tl.clamp(n, -448.0, 448.0).to(tl.float8e4nv))
    k = tl.load(qa + t * PITCH + 2048 + pe).to(tl.float32)
    tl.store(entry + 512 + pe, tl.clamp(k, -448.0, 448.0).to(tl.float8e4nv))


@triton.jit
def absorb(u, w_uk, latent, S):
    """64 latent columns of one head."""
    h, rows, k = tl.program_id(0), tl.arange(0, 16), tl.arange(0, 128)
    n = tl.program_id(1) * 64 + tl.arange(0, 64)
    left = tl.load(u + rows[:, None] * 2304 + h * 192 + k[None, :], mask=(rows < S)[:, None], other=0)
    total = tl.dot(left, tl.load(w_uk + (h * 128 + k)[:, None] * 512 + n[None, :]))
    tl.store(latent + (rows * 12 + h)[:, None] * 512 + n[None, :], total.to(tl.bfloat16), mask=(rows < S)[:, None])


@triton.jit
def query(latent, u, out):
    """Concatenation and e4m3 of one head of one token."""
    row, n, pe = tl.program_id(0), tl.arange(0, 512), tl.arange(0, 64)
    a = tl.load(latent + row * 512 + n).to(tl.float32)
    tl.store(out + row * 576 + n, tl.clamp(a, -448.0, 448.0).to(tl.float8e4nv))
    b = tl.load(u + (row // 12) * 2304 + (row % 12) * 192 + 128 + pe).to(tl.float32)
    tl.store(out + row * 576 + 512 + pe, tl.clamp(b, -448.0, 448.0).to(tl.float8e4nv))


@triton.jit
def gate(g, out, PITCH: tl.constexpr):
    """Sigmoid of one token's gate."""
    t, n = tl.program_id(0), tl.arange(0, 2048)
    v = tl.load(g + t * PITCH + 2112 + n, mask=n < 1536, other=0).to(tl.float32)
    tl.store(out + t * 1536 + n, (1 / (1 + tl.exp(-v))).to(tl.bfloat16), mask=n < 1536)


NAMES = {torch.bfloat16: "*bf16", torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv"}


def launch(kernel: Any, grid: Any, *args: Any, **constants: int) -> Result:
    """Compiles for gfx950 and runs over the tensors among `args`."""
    names = [n for n in kernel.arg_names if n not in constants]
    types = {
        n: NAMES[a.dtype] if isinstance(a, Tensor) else "fp32" if isinstance(a, float) else "i32"
        for n, a in zip(names, args, strict=True)
    }
    source = ASTSource(kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options={"num_warps": WARPS})
    code = CodeObject(built.asm["hsaco"])
    memory = Memory(*(a for a in args if isinstance(a, Tensor)))
    hidden = [None] * (sum(not a.hidden for a in code.kernel().arguments) - len(args))
    shared = built.metadata.shared
    return Emulator(memory).launch(code, None, grid, 64 * WARPS, [*args, *hidden], dynamic_lds=shared)


def split(w: reference.PreWeights, tokens: int, nb: int) -> list[tuple[str, Result]]:
    """The chain; its query is checked against the oracle."""
    g = torch.Generator().manual_seed(1)
    normal = lambda std, *shape: (torch.randn(shape, generator=g) * std).bfloat16()  # noqa: E731
    prefix, delta, blocks = normal(2, tokens, HIDDEN), normal(0.5, tokens, HIDDEN), normal(2, tokens, nb, HIDDEN)
    want = reference.mla_pre(w, prefix=prefix, delta=delta, blocks=blocks, nblocks=nb, w_uk="bf16")
    empty = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)  # noqa: E731
    x, qa, qc, u = empty(tokens, HIDDEN), empty(tokens, 3648), empty(tokens, 1536), empty(tokens, 2304)
    latent, gated = empty(tokens, 12, 512), empty(tokens, 1536)
    cache = torch.zeros(64, 576, dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = torch.zeros(tokens, 12, 576, dtype=torch.uint8).view(torch.float8_e4m3fn)
    slots, merged = torch.arange(tokens), torch.cat([w.w_qkv, w.w_g])
    wide = {"NB": nb, "BLOCK": 8192, "D": HIDDEN}
    steps = [
        ("mix", launch(mix, tokens, prefix, delta, blocks, w.ares_nw, w.ares_qk, w.in_nw, x, w.eps, **wide)),
        ("qkv_a and gate", launch(project, 228, x, merged, qa, tokens, 3648, K=HIDDEN, BK=256)),
        ("norms", launch(norms, tokens, qa, w.q_nw, w.kv_nw, slots, qc, cache, w.q_eps, PITCH=3648)),
        ("q_b", launch(project, 144, qc, w.w_qb, u, tokens, 2304, K=1536, BK=256)),
        ("W_UK", launch(absorb, (12, 8), u, w.w_uk_t, latent, tokens)),
        ("query", launch(query, tokens * 12, latent, u, out)),
        ("gate", launch(gate, tokens, qa, gated, PITCH=3648)),
    ]
    apart = (out.float() - want.query().float()).abs() / want.query().float().abs().clamp(min=0.25)
    if apart.max() > 0.15 or (gated.float() - want.gate.float()).abs().max() > 0.01:
        raise RuntimeError(f"the chain is wrong: {apart.max()}")
    return steps


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description="mla_pre against separate kernels, in the emulator's counts")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=8)
    args = parser.parse_args()
    w = reference.PreWeights.random(0)
    row = "{:16} {:>12,} {:>12,} {:>14,} {:>12,}".format
    print(f"{'':16} {'instructions':>12} {'longest wave':>12} {'bytes read':>14} {'written':>12}")
    totals = [0, 0, 0, 0]
    for name, result in split(w, args.tokens, args.blocks):
        moved = result.profiles[0].bytes
        reads, writes = (
            sum(n for k, n in moved.items() if k[0] == "global" and k[2] == way) for way in ("read", "write")
        )
        counts = [result.instructions, result.longest_wave, reads, writes]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        print(row(name, *counts))
    print(row("seven launches", *totals))
    one = measure(MlaPreBuild(tokens=args.tokens, nblocks=args.blocks, w_uk="bf16", timeline=True), w)
    moved = one["bytes"]
    reads, writes = (
        sum(n for k, n in moved.items() if k.startswith("global") and k.endswith(way)) for way in ("read", "write")
    )
    print(row("mla_pre, one", one["instructions"], one["longest_wave"], reads, writes))


if __name__ == "__main__":
    main()
