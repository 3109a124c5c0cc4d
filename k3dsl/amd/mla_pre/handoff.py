"""Hand-offs between workgroups and between ranks: tagged pairs, and rows announced by one.

A pair is 8 aligned bytes, a value and a tag, stored by one instruction; the reader loads it again until the tag is that
of its launch. No separate flag, no wait for the store: one way through the memory. Only data too wide for pairs is
stored as plain rows and announced with `publish`, after the stores are complete.

Every wait ends. A wave that has waited for `wait_ticks` writes a health record (one a workgroup), raises the alarm,
then sets FAILED, in this order and each complete before the next; a wave that finds FAILED set leaves at once. What
flows on after that is garbage, but the launch finishes and the host is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.key import MlaPreBuild
from k3dsl.amd.mla_pre.layout import Event, Lds, Region, Rows, lds, regions

#: Specs that one wait loads together: a batch is held in registers.
BATCH = 12
POLICY = {"device": p.DEVICE, "system": p.SYSTEM}
CLAIM = 0  # word of the LDS head: whether a wave of this workgroup has written the record


@dataclass
class Step:
    """What the stages of one launch share while they are traced."""

    key: MlaPreBuild
    args: SimpleNamespace  # kernel parameters by name
    events: list[Event] = field(default_factory=list)
    stage: str = ""
    regions: dict[str, Region] = field(init=False)
    lds: Lds = field(init=False)

    def __post_init__(self) -> None:
        self.regions = regions(self.key)
        self.lds = lds(self.key)
        self.memory = p.Lds(self.lds.total)
        self.thread = fx.Int32(fx.thread_idx.x)
        self.block = fx.Int32(fx.block_idx.x)
        self.lane = self.thread & 63
        self.wave = p.uniform(self.thread >> 6)
        self.scratch = p.resource(self.args.scratch)
        self.health = p.resource(self.args.health)
        self.epoch = self.tag = fx.Int32(0)

    def read_epoch(self) -> None:
        """Called by each stage once its first loads are on their way, so that those do not wait for the epoch."""
        p.schedule_fence()
        self.epoch = p.scalar_load(self.args.epoch)[0]
        self.tag = ((self.epoch & (2**22 - 1)) << 8) + self.args.layer + 1

    def note(self, region: str, space: str, kind: str) -> None:
        """For the checker of the hand-off contract."""
        self.events.append(Event(self.stage, region, space, kind))

    def peer(self, rank: Any) -> Any:
        """The buffer resource of this step's copy of the gathered query on a rank."""
        low, high = p.scalar_load(self.args.peers, fx.Int32(rank) * 8, 2)
        copy = (self.epoch & 1) * (self.regions["qg"].pairs * 8)
        return p.resource(p.join_long(low, high) + p.long(copy))


@dataclass(frozen=True)
class Spec:
    """One or two neighbouring pairs of a region (two: the first index even)."""

    region: str
    index: fx.Int32
    pairs: int = 1


def put(s: Step, region: str, index: fx.Int32, values: Sequence[fx.Int32], buffer: Any = None) -> None:
    """Stores one or two payload dwords as pairs. `buffer`: the peer's, for a region outside the scratch."""
    s.note(region, s.regions[region].space, "put")
    _store(s, region, index, values, s.scratch if buffer is None else buffer)


def publish(s: Step, region: str, index: fx.Int32) -> None:
    """Announces the rows that this workgroup has stored: all its stores are complete before the flag is stored."""
    s.note(region, s.regions[region].space, "publish")
    p.drain()
    p.barrier()
    with p.when(s.thread == 0):
        _store(s, region, index, [fx.Int32(1)], s.scratch)


def _store(s: Step, region: str, index: fx.Int32, values: Sequence[fx.Int32], buffer: Any) -> None:
    r = s.regions[region]
    p.store(buffer, index * 8 + r.offset, [w for v in values for w in (v, s.tag)], POLICY[r.space])


def store_row(s: Step, rows: Rows, offset: fx.Int32, values: Sequence[fx.Int32]) -> None:
    """Dwords of a plain row, past the L2s."""
    s.note(rows.name, "device", "store")
    p.store(s.scratch, offset + rows.offset, values, p.DEVICE)


def load_row(s: Step, rows: Rows, offset: fx.Int32) -> Any:
    """Four dwords of a plain row, past the L2s; its flag must have been polled."""
    s.note(rows.name, "device", "load")
    return p.load_vector(s.scratch, offset + rows.offset, 4, p.DEVICE)


def poll(s: Step, specs: Sequence[Spec], buffer: Any = None) -> list[list[fx.Int32]]:
    """The payloads of `specs`, once all of them carry this launch's tag in every lane of the wave."""
    found = []
    for start in range(0, len(specs), BATCH):
        found += _poll(s, specs[start : start + BATCH], s.scratch if buffer is None else buffer)
    return found


def _poll(s: Step, specs: Sequence[Spec], buffer: Any) -> list[list[fx.Int32]]:
    spaces = {s.regions[x.region].space for x in specs}
    if len(spaces) != 1:
        raise ValueError(f"a batch is polled in one scope, not in {', '.join(sorted(spaces))}")
    for spec in specs:
        s.note(spec.region, s.regions[spec.region].space, "poll")
    policy = POLICY[spaces.pop()]

    def fetch() -> list[Any]:
        return [p.load_vector(buffer, x.index * 8 + s.regions[x.region].offset, 2 * x.pairs, policy) for x in specs]

    def wrong(vectors: Sequence[Any]) -> list[Any]:
        """For each spec, whether a tag of it is not the wanted one."""
        return [
            _any([p.split(v, 2 * x.pairs)[2 * k + 1] != s.tag for k in range(x.pairs)])
            for x, v in zip(specs, vectors, strict=True)
        ]

    def waiting(held: list[Any]) -> Any:
        return p.lanes(_any(wrong(held[:-1])) & (fx.Int32(held[-1]) == 0)) != 0

    p.keep_order()
    first = fetch()
    began = p.clock()

    def again(held: list[Any]) -> list[Any]:
        p.sleep(1)
        p.keep_order()  # or the loads would be taken out of the loop
        fresh = fetch()
        failed = p.load(s.health, 0, 1, p.SYSTEM)[0]  # with the pairs: one way through the memory an iteration
        return [*fresh, _stop(s, specs, wrong(fresh), fresh, p.uniform(failed), began)]

    held = p.repeat([*first, fx.Int32(0)], waiting, again)
    p.keep_order()
    return [p.split(v, 2 * x.pairs)[::2] for x, v in zip(specs, held[:-1], strict=True)]


def _any(conditions: Sequence[Any]) -> Any:
    found = conditions[0]
    for c in conditions[1:]:
        found = found | c
    return found


def _stop(
    s: Step, specs: Sequence[Spec], bad: list[Any], vectors: list[Any], failed: fx.Int32, began: fx.Int64
) -> fx.Int32:
    """1 when the wave must stop waiting: its time is over, or this rank has failed before. `bad`: what still lacks."""
    now = p.clock()
    late = ((now - began) > s.key.wait_ticks) & (p.lanes(_any(bad)) != 0)
    with p.when(late & (failed == 0)):
        region, index, seen = fx.Int32(0), fx.Int32(0), fx.Int32(0)
        for spec, vector, wrong in reversed(list(zip(specs, vectors, bad, strict=True))):
            region = p.choose(wrong, fx.Int32(s.regions[spec.region].id), region)
            index = p.choose(wrong, fx.Int32(spec.index), index)
            seen = p.choose(wrong, p.split(vector, 2 * spec.pairs)[1], seen)
        with p.when(s.lane == p.first_lane(p.lanes(_any(bad)))):
            with p.when(s.memory.exchange(s.lds.head + 4 * CLAIM, 1) == 0):
                record = s.block * 32 + 32
                with p.when(p.load(s.health, record, 1, p.SYSTEM)[0] == 0):
                    ticks = fx.Int32(p.truncate(now)) & 0x7FFFFFFF
                    p.store(s.health, record + 16, [seen, s.block, ticks, fx.Int32(0)], p.SYSTEM)
                    p.store(s.health, record, [fx.Int32(1), region, index, s.tag], p.SYSTEM)
            alarm(s)
            p.drain()
            p.store(s.health, 0, [fx.Int32(1)], p.SYSTEM)
            p.drain()
    return p.choose(late | (failed != 0), fx.Int32(1), fx.Int32(0))


def alarm(s: Step) -> None:
    """Sets this rank's flag word on rank 0."""
    with p.when(s.args.alarm != 0):
        p.store(p.resource(s.args.alarm), 0, [fx.Int32(1)], p.SYSTEM)
