"""Where a finished part of the query goes: to q_out, or into every rank's peer buffer."""

from __future__ import annotations

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.handoff import Step, put
from k3dsl.amd.mla_pre.key import HEADS, QUERY_WORDS


def put_query(s: Step, token: fx.Int32, head: fx.Int32, index: fx.Int32, values: list[fx.Float32]) -> None:
    """Elements 4 index..+3 of a head's query, rounded to bf16 first; fp8 has a scale of 1."""
    words = [p.pack_bf16(values[0], values[1]), p.pack_bf16(values[2], values[3])]
    place = (token * HEADS + head) * QUERY_WORDS + index
    if s.key.qbf16:
        p.store(p.resource(s.args.q_out), place * 8, words)
        return
    packed = p.pack_fp8(p.unpack(words))
    if s.key.ranks == 1:
        p.store(p.resource(s.args.q_out), place * 4, [packed])
        return
    pair = s.args.rank * (s.key.tokens * HEADS * QUERY_WORDS) + place
    for rank in range(s.key.ranks):
        put(s, "qg", pair, [packed], s.peer(rank))
