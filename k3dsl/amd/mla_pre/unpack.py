"""Stage unpack, with more than one rank: the gathered query out of this rank's peer buffer into q_out.

Thread u takes pairs 2 u and 2 u + 1 of (source rank, token, head, dword). Heads past 12 * ranks repeat the first ones:
attention kernels want a multiple of 16.
"""

from __future__ import annotations

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.handoff import Spec, Step, poll
from k3dsl.amd.mla_pre.key import GRID, HEADS, QUERY_WORDS, THREADS

DOUBLES = QUERY_WORDS // 2


def unpack_stage(s: Step) -> None:
    """For all workgroups; at most 110,592 threads of 131,072 have a unit, so one round does."""
    key = s.key
    units = key.ranks * key.tokens * HEADS * DOUBLES
    if units > GRID * THREADS:
        raise ValueError(f"{units} units are more than {GRID * THREADS} threads")
    s.read_epoch()
    unit = s.block * THREADS + s.thread
    with p.when(unit < units):
        words = poll(s, [Spec("qg", unit * 2, 2)], s.peer(s.args.rank))[0]
        row = p.udiv(unit, DOUBLES)
        double = unit - row * DOUBLES
        line = p.udiv(row, HEADS)
        source = p.udiv(line, key.tokens)
        token = line - source * key.tokens
        head = source * HEADS + (row - line * HEADS)
        out = p.resource(s.args.q_out)
        place = (token * key.q_heads + head) * (QUERY_WORDS * 4) + double * 8
        p.store(out, place, words)
        spare = key.q_heads - HEADS * key.ranks
        if spare:
            with p.when(head < spare):
                p.store(out, place + HEADS * key.ranks * QUERY_WORDS * 4, words)
