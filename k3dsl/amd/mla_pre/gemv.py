"""Stage gemv: the qkv_a and gate projections, 16 weight rows a workgroup, against all tokens at once.

Task i < 132 gives 16 columns of the projection, handed on as pairs of bf16; tasks 132..227 give 16 columns of the gate,
whose sigmoid is written out. Workgroups 56..255 take tasks 0..199; the 28 tasks left, all gate columns, go to
workgroups 28..55 after they have mixed: those have no later work, so no q_b task waits behind a second projection.

A wave takes the K chunks of 128 numbered wave, wave + 8, ...; a task's whole weight slice of 229 KB is requested before
the workgroup waits for the rows of x. More rows than LDS holds are multiplied in two parts of K.
"""

from __future__ import annotations

from collections.abc import Callable

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.handoff import Spec, Step, load_row, poll, put
from k3dsl.amd.mla_pre.key import GATE, HIDDEN, QKV_A, THREADS
from k3dsl.amd.mla_pre.layout import A_TASKS, G_TASKS, GEMV_FIRST, ROUND, ROUNDS, ROWS, SLICES, X_ROWS, x_parts, x_pitch

#: Workgroups that take a gate task after they have mixed.
LATE_FIRST = SLICES - (A_TASKS + G_TASKS - (256 - GEMV_FIRST))


def gemv_stage(s: Step, task: fx.Int32) -> None:
    """One task; uniform over the workgroup."""
    tokens = s.key.tokens
    a = s.args
    row = p.choose(task < A_TASKS, task, task - A_TASKS) * (ROWS * HIDDEN * 2)
    weight = p.resource(p.choose(task < A_TASKS, a.w_qkv, a.w_g) + p.long(row))
    group, inner = s.lane >> 4, s.lane & 15
    k = (s.wave << 8) + (group << 4)  # bytes along K, chunk 0
    rows = [
        [p.load_vector(weight, inner * (HIDDEN * 2) + k + (ROUND * i + 64 * q), 4, p.NT) for q in range(4)]
        for i in range(ROUNDS)
    ]
    s.read_epoch()
    with p.when(s.thread < SLICES):
        poll(s, [Spec("xrdy", s.thread)])
    p.barrier()
    p.keep_order()
    token = p.umin(inner, tokens - 1)
    sums = [p.zeros() for _ in range(4)]
    for first, rounds in x_parts(tokens):
        if first:
            p.barrier()  # all waves have multiplied the part before
        _load_x(s, first, rounds)
        p.barrier()
        place = token * x_pitch(rounds) + k + s.lds.body
        for i in range(rounds):
            for q in range(4):
                x = s.memory.load_vector(place + (ROUND * i + 64 * q), 4)
                sums[q] = p.mfma_bf16(rows[first + i][q], x, sums[q])
    both = reduce(s, _total(sums))
    with p.when(s.thread < 8 * tokens):
        pair, t = s.thread & 7, s.thread >> 3
        v0, v1 = both()
        words = p.pack_bf16(v0, v1)
        with p.when(task < A_TASKS):
            put(s, "qa", t * (QKV_A // 2) + task * (ROWS // 2) + pair, [words])
        with p.when(task >= A_TASKS):
            out = p.pack_bf16(sigmoid(p.low(words)), sigmoid(p.high(words)))
            p.store(p.resource(a.gate_out), (t * (GATE // 2) + (task - A_TASKS) * (ROWS // 2) + pair) * 4, [out])


def _load_x(s: Step, first: int, rounds: int) -> None:
    """Of every row of x the columns of some rounds, into LDS."""
    width = rounds * ROUND // 16  # pieces of 16 bytes
    count = s.key.tokens * width
    pieces = []
    for start in range(0, count, THREADS):
        piece = s.thread + start if start + THREADS <= count else p.umin(s.thread + start, count - 1)
        row = p.udiv(piece, width)
        column = (piece - row * width) << 4
        value = load_row(s, X_ROWS, row * X_ROWS.pitch + column + first * ROUND)
        pieces.append((row * x_pitch(rounds) + column + s.lds.body, value))
    for place, value in pieces:  # clamped threads write what the last one writes
        s.memory.store_vector(place, value, 4)


def _total(sums: list) -> list[fx.Float32]:
    columns = [p.floats(v) for v in sums]
    return [a + b + (c + d) for a, b, c, d in zip(*columns, strict=True)]


def reduce(s: Step, values: list[fx.Float32]) -> Callable[[], tuple[fx.Float32, fx.Float32]]:
    """Puts a wave's 16 x 16 sums into LDS; the function that is returned adds the eight waves' in order, giving thread
    (row pair thread % 8, token thread // 8) its two. All waves must come here.
    """
    s.memory.store(s.thread * 16, [p.bits(v) for v in values])
    p.barrier()

    def both() -> tuple[fx.Float32, fx.Float32]:
        pair, token = s.thread & 7, s.thread >> 3
        place = ((pair >> 1) * 16 + token) * 16 + (pair & 1) * 8
        total = [fx.Float32(0.0), fx.Float32(0.0)]
        for wave in range(8):
            total = [t + p.as_float(w) for t, w in zip(total, s.memory.load(place + wave * 1024, 2), strict=True)]
        return total[0], total[1]

    return both


def sigmoid(z: fx.Float32) -> fx.Float32:
    """1 / (1 + 2 ** (-z log2 e)), the division correctly rounded."""
    return fx.Float32(1.0) / (fx.Float32(1.0) + p.exp2(z * fx.Float32(-p.LOG2E)))
