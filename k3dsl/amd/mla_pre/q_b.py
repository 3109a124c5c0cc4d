"""Stage q_b: workgroup 64 + i takes rows 16 i..+15 of W_qb, of head i // 12, for all tokens.

The first 8 tasks of a head give its nope part, handed on as pairs of bf16; the other 4 its rope part, which is query.
A wave takes a contiguous eighth of K = 1536, 192, as six matrix steps.
"""

from __future__ import annotations

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.gemv import reduce
from k3dsl.amd.mla_pre.handoff import Spec, Step, load_row, poll, put
from k3dsl.amd.mla_pre.key import HEADS, KV_LORA, NOPE, Q_LORA, THREADS
from k3dsl.amd.mla_pre.layout import QB_FIRST, QB_SUB, QC_PITCH, QC_ROWS, ROWS
from k3dsl.amd.mla_pre.query import put_query

STEPS = Q_LORA // 8 // 32
PIECES = Q_LORA * 2 // 16
NOPE_TASKS = NOPE // ROWS


def q_b_stage(s: Step) -> None:
    """For workgroups 64..207."""
    tokens = s.key.tokens
    task = s.block - QB_FIRST
    head = p.udiv(task, QB_SUB)
    sub = task - head * QB_SUB
    group, inner = s.lane >> 4, s.lane & 15
    weight = p.resource(s.args.w_qb + p.long(task * (ROWS * Q_LORA * 2)))
    k = s.wave * (STEPS * 64) + (group << 4)
    rows = [p.load_vector(weight, inner * (Q_LORA * 2) + k + 64 * q, 4, p.NT) for q in range(STEPS)]
    s.read_epoch()
    with p.when(s.thread < tokens):
        poll(s, [Spec("qcr", s.thread)])
    p.barrier()
    p.keep_order()
    pieces = []
    for start in range(0, tokens * PIECES, THREADS):
        piece = p.umin(s.thread + start, tokens * PIECES - 1)
        row = p.udiv(piece, PIECES)
        column = (piece - row * PIECES) << 4
        pieces.append((row * QC_PITCH + column + s.lds.body, load_row(s, QC_ROWS, row * QC_ROWS.pitch + column)))
    for place, value in pieces:
        s.memory.store_vector(place, value, 4)
    p.barrier()
    place = p.umin(inner, tokens - 1) * QC_PITCH + k + s.lds.body
    sums = [p.zeros(), p.zeros()]
    for q in range(STEPS):
        sums[q % 2] = p.mfma_bf16(rows[q], s.memory.load_vector(place + 64 * q, 4), sums[q % 2])
    values = [a + b for a, b in zip(p.floats(sums[0]), p.floats(sums[1]), strict=True)]
    both = reduce(s, values)
    with p.when((sub < NOPE_TASKS) & (s.thread < 8 * tokens)):
        pair, token = s.thread & 7, s.thread >> 3
        v0, v1 = both()
        put(s, "qn", (token * HEADS + head) * (NOPE // 2) + sub * (ROWS // 2) + pair, [p.pack_bf16(v0, v1)])
    with p.when((sub >= NOPE_TASKS) & (s.thread < 4 * tokens)):
        quad, token = s.thread & 3, s.thread >> 2
        total = [fx.Float32(0.0) for _ in range(4)]
        for wave in range(8):
            four = s.memory.load((quad * 16 + token) * 16 + wave * 1024, 4)
            total = [t + p.as_float(w) for t, w in zip(total, four, strict=True)]
        put_query(s, token, head, (sub - NOPE_TASKS) * 4 + quad + KV_LORA // 4, total)
