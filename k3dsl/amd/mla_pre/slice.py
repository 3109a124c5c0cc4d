"""Stage slice: workgroup k < 56 reads columns 128 k..+127 of every source of every token.

A source is a block, or the prefix, which with `delta` becomes bf16(prefix + delta) here and is written back. Thread
(token and source, 4 columns); the float values stay in LDS for the mixing stage, and the slice's two sums per token and
source, of squares and of the products with norm weight times score vector, are handed to the gate.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.handoff import Step, put
from k3dsl.amd.mla_pre.key import HIDDEN, THREADS
from k3dsl.amd.mla_pre.layout import COLUMNS

HALF = (16, 8, 4, 2, 1)  # the butterfly over the 32 lanes of a (token, source)


def slice_stage(s: Step) -> None:
    """For workgroups below 56."""
    key, a = s.key, s.args
    tokens, nb = key.tokens, key.nblocks
    quarter = s.thread & 31
    column = ((s.block << 7) + (quarter << 2)) * 2  # bytes
    norm, score = (p.load(p.resource(x), column, 2) for x in (a.ares_nw, a.ares_qk))
    token = p.umin(s.thread >> 5, tokens - 1)
    prefix = p.resource(a.prefix)
    base = p.load(prefix, token * (HIDDEN * 2) + column, 2)
    delta = p.load(p.resource(a.delta), token * (HIDDEN * 2) + column, 2) if key.delta else None
    blocks = p.resource(a.blocks)
    pending = []
    for start in range(0, tokens * nb * 32, THREADS):
        row = (s.thread + start) >> 5
        inside = row < tokens * nb if start + THREADS > tokens * nb * 32 else None
        row = p.umin(row, tokens * nb - 1)
        t = p.udiv(row, nb)
        source = row - t * nb
        offset = (t * a.blocks_token_stride + source * a.blocks_block_stride) * 2 + column
        pending.append((t, source, inside, p.load(blocks, offset, 2)))
    s.read_epoch()
    weights = [x * y for x, y in zip(p.unpack(norm), p.unpack(score), strict=True)]

    inside = s.thread < tokens * 32 if tokens * 32 < THREADS else None
    if delta is not None:
        total = [x + y for x, y in zip(p.unpack(base), p.unpack(delta), strict=True)]
        base = [p.pack_bf16(total[0], total[1]), p.pack_bf16(total[2], total[3])]
        with p.when(s.thread < tokens * 32):
            p.store(prefix, token * (HIDDEN * 2) + column, base)
    _sums(s, token, fx.Int32(nb), inside, base, weights, quarter)
    for t, source, inside, words in pending:
        _sums(s, t, source, inside, words, weights, quarter)


def _sums(s: Step, t: fx.Int32, source: fx.Int32, inside: Any, words: Any, weights: Any, quarter: Any) -> None:
    """Keeps four values, and hands on the sums of their 128 columns. Clamped items (`inside` false) store nothing."""
    values = p.unpack(words)
    square = fx.Float32(0.0)
    dot = fx.Float32(0.0)
    for v, w in zip(values, weights, strict=True):
        square = square + v * v
        dot = dot + v * w
    square, dot = p.butterfly(square, HALF, p.add), p.butterfly(dot, HALF, p.add)
    row = t * s.key.sources + source
    with p.when(inside if inside is not None else fx.Boolean(True)):
        s.memory.store((row * COLUMNS + (quarter << 2)) * 4 + s.lds.body, [p.bits(v) for v in values])
        with p.when(quarter == 0):
            pair = (s.block * (s.key.tokens * s.key.sources) + row) * 2
            put(s, "part", pair, [p.bits(square), p.bits(dot)])
