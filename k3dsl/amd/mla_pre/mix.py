"""Stage mix: workgroup k < 56 mixes the sources in its 128 columns and normalizes the result.

    m = (sum_s e_s v_s) / den;  x = bf16(m * rsq(mean(m^2) + out_eps) * in_nw)

The mean needs all 56 slices: each puts its sum of squares and polls the others' (an exchange). Rows of x are stored
plainly and announced.
"""

from __future__ import annotations

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.gate import GROUP, GROUPS
from k3dsl.amd.mla_pre.handoff import Spec, Step, poll, publish, put, store_row
from k3dsl.amd.mla_pre.key import HIDDEN, THREADS
from k3dsl.amd.mla_pre.layout import COLUMNS, X_ROWS
from k3dsl.amd.mla_pre.slice import HALF

# Bytes into the reduction area of LDS; the gate's sums are before them.
WEIGHTS = 1024
SQUARES = 2048


def mix_stage(s: Step) -> None:
    """For workgroups below 56."""
    key = s.key
    tokens, ns = key.tokens, key.sources
    quarter = s.thread & 31
    token = p.umin(s.thread >> 5, tokens - 1)
    owner = s.thread < tokens * 32
    column = ((s.block << 7) + (quarter << 2)) * 2
    norm = p.load(p.resource(s.args.in_nw), column, 2)
    count = tokens * (ns + 1)
    s.read_epoch()
    with p.when(s.thread < count):
        weight = poll(s, [Spec("wgt", s.thread)])[0]
        s.memory.store(s.thread * 4 + WEIGHTS, weight)
    p.barrier()
    mixed = [fx.Float32(0.0) for _ in range(4)]
    for source in range(ns):
        e = p.as_float(s.memory.load((token * (ns + 1) + source) * 4 + WEIGHTS)[0])
        place = ((token * ns + source) * COLUMNS + (quarter << 2)) * 4 + s.lds.body
        mixed = [m + e * p.as_float(v) for m, v in zip(mixed, s.memory.load(place, 4), strict=True)]
    den = p.as_float(s.memory.load((token * (ns + 1) + ns) * 4 + WEIGHTS)[0])
    mixed = [m / den for m in mixed]
    square = fx.Float32(0.0)
    for m in mixed:
        square = square + m * m
    square = p.butterfly(square, HALF, p.add)
    with p.when(owner & (quarter == 0)):
        put(s, "msq", s.block * tokens + token, [p.bits(square)])

    with p.when(s.thread < GROUPS * tokens):
        group, t = s.thread & (GROUPS - 1), s.thread >> 3
        parts = poll(s, [Spec("msq", (group * GROUP + j) * tokens + t) for j in range(GROUP)])
        total = fx.Float32(0.0)
        for part in parts:
            total = total + p.as_float(part[0])
        s.memory.store(s.thread * 4 + SQUARES, [p.bits(total)])
    p.barrier()
    total = fx.Float32(0.0)
    for half in range(2):
        for w in s.memory.load(token * (GROUPS * 4) + (SQUARES + 16 * half), 4):
            total = total + p.as_float(w)
    scale = p.rsq(total * fx.Float32(1.0 / HIDDEN) + fx.Float32(key.out_eps))
    x = [m * scale * w for m, w in zip(mixed, p.unpack(norm), strict=True)]
    with p.when(owner if tokens * 32 < THREADS else fx.Boolean(True)):
        words = [p.pack_bf16(x[0], x[1]), p.pack_bf16(x[2], x[3])]
        store_row(s, X_ROWS, token * X_ROWS.pitch + column, words)
    publish(s, "xrdy", s.block)
