"""The hand-off contract of mla_pre, checked without running anything.

Why a launch cannot hang rests on facts that a compiler does not see: every region is written before it is polled, by
the stages that it names, in the scope that its readers need; plain rows are announced; nothing of one build lies where
another looks for tags; all workgroups are resident. Each function returns the broken facts as sentences.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from k3dsl.amd.mla_pre.key import GRID, LDS_LIMIT, PEER_HEAD, TAG_SLOTS, THREADS, MlaPreBuild, peer_bytes, scratch_bytes
from k3dsl.amd.mla_pre.layout import STAGES, Event, Region, Rows, lds, regions, rows
from k3dsl.errors import CompileError

#: Register rows of a SIMD; a workgroup of 8 waves puts two on each of a compute unit's four.
_REGISTER_ROWS: Final = 512
_WAVES_A_SIMD: Final = THREADS // 64 // 4
_PAIR: Final = 8
_KINDS: Final = ("put", "poll", "publish", "store", "load")


def order_problems(key: MlaPreBuild, events: Sequence[Event]) -> list[str]:
    """What is wrong with the hand-offs of a traced kernel: `events` in program order, as every workgroup walks it."""
    known = regions(key)
    plain = {r.name: r for r in rows()}
    bad = _walk_problems(events)
    written: dict[str, list[str]] = {}  # region -> stages that have put so far
    polled: dict[str, list[str]] = {}
    stored: dict[str, list[str]] = {}
    for at, event in enumerate(events):
        where = f"{event.stage} {event.kind} {event.region!r}"
        if event.kind in ("store", "load"):
            row = plain.get(event.region)
            if row is None:
                bad.append(f"{where}: no such plain rows")
                continue
            bad += _row_problems(where, event, row, polled, written)
            if event.kind == "store":
                stored.setdefault(event.region, []).append(event.stage)
            continue
        region = known.get(event.region)
        if region is None:
            bad.append(f"{where}: the region is not declared for this build")
            continue
        if event.space != region.space:
            bad.append(f"{where} in {event.space!r} space, the region is in {region.space!r}")
        if event.kind == "poll":
            bad += _poll_problems(where, event, region, written)
            polled.setdefault(event.region, []).append(event.stage)
        else:
            if event.stage not in region.writers:
                bad.append(f"{where}: its writers are {', '.join(region.writers)}")
            own = at > 0 and events[at - 1] == event._replace(kind="publish")  # the store that publishing ends with
            bad += [] if own else _flag_problems(where, event, plain.values(), stored)
            written.setdefault(event.region, []).append(event.stage)
    for region in known.values():
        bad += [f"{region.name!r} is never put by {w}" for w in region.writers if w not in written.get(region.name, [])]
        bad += [
            f"{region.name!r} is never polled by {r}" for r in region.readers if r not in polled.get(region.name, [])
        ]
    bad += [f"rows {row.name!r} are never stored by {row.writer}" for row in plain.values() if row.name not in stored]
    return list(dict.fromkeys(bad))


def _walk_problems(events: Sequence[Event]) -> list[str]:
    """Stages must come in one order, the same for every workgroup."""
    bad = []
    for event in events:
        if event.kind not in _KINDS:
            bad.append(f"{event.stage} {event.kind!r}: the kind must be one of {', '.join(_KINDS)}")
        if event.stage not in STAGES:
            bad.append(f"stage {event.stage!r} must be one of {', '.join(STAGES)}")
    if bad:
        return bad
    order = [STAGES.index(event.stage) for event in events]
    for before, after in pairwise(order):
        if after < before:
            bad.append(f"{STAGES[after]} comes after {STAGES[before]}: stages must be walked as {', '.join(STAGES)}")
    return bad


def _poll_problems(where: str, event: Event, region: Region, written: Mapping[str, list[str]]) -> list[str]:
    bad = []
    if event.stage not in region.readers:
        bad.append(f"{where}: its readers are {', '.join(region.readers)}")
    before = written.get(region.name, [])
    for writer in region.writers:
        if writer not in before:
            bad.append(f"{where} before {writer} has put it: the wait could not end")
        elif writer == event.stage and not region.exchange:
            bad.append(f"{where} in the stage that puts it, and it is no exchange")
    return bad


def _row_problems(
    where: str, event: Event, row: Rows, polled: Mapping[str, list[str]], written: Mapping[str, list[str]]
) -> list[str]:
    bad = []
    if event.space != "device":
        bad.append(f"{where} in {event.space!r} space: the reader is on another XCD, so it must be 'device'")
    if event.kind == "store":
        if event.stage != row.writer:
            bad.append(f"{where}: its writer is {row.writer}")
        if row.writer in written.get(row.flag, []):
            bad.append(f"{where} after its flag {row.flag!r} was published")
    else:
        if event.stage != row.reader:
            bad.append(f"{where}: its reader is {row.reader}")
        if event.stage not in polled.get(row.flag, []):
            bad.append(f"{where} before a poll of its flag {row.flag!r}")
    return bad


def _flag_problems(where: str, event: Event, plain: Iterable[Rows], stored: Mapping[str, list[str]]) -> list[str]:
    """A flag of plain rows must be published: with a wait for the rows before it, which a bare put lacks."""
    row = next((r for r in plain if r.flag == event.region), None)
    if row is None:
        return [f"{where}: only the flags of plain rows are published"] if event.kind == "publish" else []
    if event.kind == "put":
        return [f"{where}: the flag of rows {row.name!r} must be published"]
    return [] if row.name in stored else [f"{where} before the rows {row.name!r} are stored"]


def layout_problems(key: MlaPreBuild) -> list[str]:
    """Whether one build's memory is laid out soundly: pairs aligned and apart, within the sizes that hosts are told."""
    bad = []
    own = [r for r in regions(key).values() if r.space == "device"]
    spans = [(r.offset, r.offset + r.bytes, repr(r.name)) for r in own]
    spans += [(r.offset, r.offset + r.bytes, f"rows {r.name!r}") for r in rows()]
    spans.sort()
    for one, two in pairwise(spans):
        if two[0] < one[1]:
            bad.append(f"{one[2]} ends at {one[1]}, {two[2]} starts at {two[0]}")
    if spans and spans[-1][1] > scratch_bytes(key):
        bad.append(f"{spans[-1][2]} ends at {spans[-1][1]}, scratch_bytes is {scratch_bytes(key)}")
    for region in regions(key).values():
        if region.offset % 16:
            bad.append(f"{region.name!r} starts at {region.offset}, must be 16-byte aligned: two pairs are one access")
        if region.bytes < region.pairs * _PAIR:
            bad.append(f"{region.name!r} has room for {region.bytes // _PAIR} of {region.pairs} pairs")
    peer = regions(key).get("qg")
    if (peer is not None) != (key.ranks > 1):
        bad.append("the gathered query belongs to builds of more than one rank, and to those alone")
    if peer is not None and PEER_HEAD + 2 * peer.pairs * _PAIR > peer_bytes(key):
        bad.append(f"two copies of 'qg' do not fit peer_bytes={peer_bytes(key)}")
    ids = {r.id: r.name for r in regions(key).values()}
    if len(ids) != len(regions(key)):
        bad.append("two regions have the same id in health records")
    if lds(key).total > LDS_LIMIT:
        bad.append(f"a workgroup takes {lds(key).total} bytes of LDS, a compute unit has {LDS_LIMIT}")
    return bad


def sharing_problems(builds: Iterable[MlaPreBuild]) -> list[str]:
    """Whether builds that share one scratch can mistake each other's data for tags.

    Nothing is cleared between launches, so a plain row that lies where another build has pairs could hold a live tag.
    Pairs on pairs are safe: a value may lie where another build has a tag only if pairs were 4 bytes out of step.
    """
    bad = []
    seen = list(dict.fromkeys(builds))
    first = {(r.offset, r.bytes) for r in rows()}
    for key in seen:
        for region in regions(key).values():
            if region.space != "device":
                continue
            if region.offset % _PAIR:
                bad.append(f"{key.symbol}: {region.name!r} starts at {region.offset}: a value could lie on a tag")
            for offset, size in first:
                if region.offset < offset + size and offset < region.offset + region.bytes:
                    bad.append(f"{key.symbol}: {region.name!r} lies on plain rows at {offset}")
    return bad


def slot_problems(launches: Iterable[tuple[str, int]]) -> list[str]:
    """Whether the launches of one step, (name, tag slot), can be told apart: no slot twice, all below 256."""
    bad = []
    taken: dict[int, str] = {}
    for name, slot in launches:
        if type(slot) is not int or not 0 <= slot < TAG_SLOTS:
            bad.append(f"{name} has the tag slot {slot!r}, must be an int from 0 to {TAG_SLOTS - 1}")
        elif slot in taken:
            bad.append(f"{name} and {taken[slot]} share the tag slot {slot} in one step: the second would see old tags")
        else:
            taken[slot] = name
    return bad


def residency_problems(resources: Mapping[str, Any], compute_units: int = GRID) -> list[str]:
    """Whether all 256 workgroups of an object can run at once, from its manifest's resources.

    resources: `private` and `lds` in bytes, `vgprs` (accumulation registers among them), `block`; those that are not
    there are not judged.
    compute_units: of the device.
    """
    bad = []
    if size := resources.get("private", 0):
        bad.append(f"a private segment of {size} bytes (spills): such a kernel may be dispatched in parts")
    if resources.get("lds", 0) > LDS_LIMIT:
        bad.append(f"{resources['lds']} bytes of LDS, a compute unit has {LDS_LIMIT}")
    registers, most = resources.get("vgprs", 0), _REGISTER_ROWS // _WAVES_A_SIMD
    if registers > most:
        bad.append(f"{registers} vector registers, 8 waves of a workgroup have {most} each")
    block = tuple(resources.get("block", (THREADS, 1, 1)))
    if block != (THREADS, 1, 1):
        bad.append(f"workgroups of {block} threads, must be of {(THREADS, 1, 1)}")
    if compute_units < GRID:
        bad.append(
            f"{compute_units} compute units hold a workgroup each, {GRID} must run at once (a partitioned device?)"
        )
    return bad


def require(what: str, problems: Sequence[str]) -> None:
    """CompileError with every line, if there is one."""
    if problems:
        raise CompileError("\n  - ".join([f"the hand-off contract of {what} is broken", *problems]))
