"""Stage gate: workgroup t < S turns the 56 slices' sums of token t into the weights of its sources.

logit_s = dot_s * rsq(square_s / 7168 + eps);  e_s = exp2(logit_s log2e - max);  den = sum_s e_s
"""

from __future__ import annotations

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.handoff import Spec, Step, poll, put
from k3dsl.amd.mla_pre.key import HIDDEN
from k3dsl.amd.mla_pre.layout import SLICES

GROUPS = 8  # the 56 slices are summed as 8 groups of 7
GROUP = SLICES // GROUPS


def gate_stage(s: Step) -> None:
    """For workgroups below S."""
    key = s.key
    ns, token = key.sources, s.block
    s.read_epoch()
    with p.when(s.thread < GROUPS * ns):
        group = p.udiv(s.thread, ns)
        source = s.thread - group * ns
        slices = [((group * GROUP + j) * key.tokens + token) * ns + source for j in range(GROUP)]
        parts = poll(s, [Spec("part", k * 2, 2) for k in slices])
        sums = [fx.Float32(0.0), fx.Float32(0.0)]
        for part in parts:
            sums = [total + p.as_float(w) for total, w in zip(sums, part, strict=True)]
        s.memory.store(s.thread * 8, [p.bits(x) for x in sums])
    p.barrier()
    with p.when(s.thread < 64):
        source = p.umin(s.lane, ns - 1)
        square, dot = fx.Float32(0.0), fx.Float32(0.0)
        for group in range(GROUPS):
            x, y = s.memory.load((source + group * ns) * 8, 2)
            square, dot = square + p.as_float(x), dot + p.as_float(y)
        logit = dot * p.rsq(square * fx.Float32(1.0 / HIDDEN) + fx.Float32(key.eps)) * fx.Float32(p.LOG2E)
        logit = p.choose(s.lane < ns, logit, fx.Float32(-3e38))
        row = (8, 4, 2, 1)  # at most 9 sources: one row of 16 lanes
        e = p.exp2(logit - p.butterfly(logit, row, p.larger))
        e = p.choose(s.lane < ns, e, fx.Float32(0.0))
        den = p.butterfly(e, row, p.add)
        with p.when(s.lane < ns + 1):
            value = p.choose(s.lane == ns, den, e)
            put(s, "wgt", token * (ns + 1) + s.lane, [p.bits(value)])
