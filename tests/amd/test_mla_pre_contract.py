"""The contract checker: a sound walk passes, each way to break it is found, and every build's layout is sound."""

from dataclasses import replace
from itertools import product

import pytest

from k3dsl.amd.mla_pre import contract
from k3dsl.amd.mla_pre.key import HEALTH_WORDS, MlaPreBuild, peer_bytes, scratch_bytes
from k3dsl.amd.mla_pre.layout import PAIRS_FIRST, STAGES, Event, Region, regions, rows
from k3dsl.errors import CompileError

ONE, EIGHT = MlaPreBuild(tokens=8, nblocks=8), MlaPreBuild(tokens=8, nblocks=8, ranks=8)


def walk(ranks: int = 1) -> list[Event]:
    """What a kernel that follows the declared stages does, in program order."""
    d, s = "device", "system"
    events = [
        Event("slice", "part", d, "put"),
        Event("gate", "part", d, "poll"),
        Event("gate", "wgt", d, "put"),
        Event("mix", "wgt", d, "poll"),
        Event("mix", "msq", d, "put"),
        Event("mix", "msq", d, "poll"),
        Event("mix", "x", d, "store"),
        Event("mix", "xrdy", d, "publish"),
        Event("mix", "xrdy", d, "put"),  # which publishing ends with
        Event("gemv", "xrdy", d, "poll"),
        Event("gemv", "x", d, "load"),
        Event("gemv", "qa", d, "put"),
        Event("norm", "qa", d, "poll"),
        Event("norm", "qc", d, "store"),
        Event("norm", "qcr", d, "publish"),
        Event("norm", "qcr", d, "put"),
        Event("q_b", "qcr", d, "poll"),
        Event("q_b", "qc", d, "load"),
        Event("q_b", "qn", d, "put"),
        Event("w_uk", "qn", d, "poll"),
    ]
    if ranks > 1:
        events.insert(-1, Event("q_b", "qg", s, "put"))
        events += [Event("w_uk", "qg", s, "put"), Event("unpack", "qg", s, "poll")]
    return events


def position(events: list[Event], stage: str, region: str, kind: str) -> int:
    return next(i for i, e in enumerate(events) if (e.stage, e.region, e.kind) == (stage, region, kind))


def without(stage: str, region: str, kind: str) -> list[Event]:
    events = walk(8)
    del events[position(events, stage, region, kind)]
    return events


def changed(stage: str, region: str, kind: str, /, **to: str) -> list[Event]:
    events = walk(8)
    at = position(events, stage, region, kind)
    events[at] = events[at]._replace(**to)
    return events


def moved(one: tuple[str, str, str], before: tuple[str, str, str]) -> list[Event]:
    events = walk(8)
    event = events.pop(position(events, *one))
    events.insert(position(events, *before), event)
    return events


def test_the_declared_walk_is_sound() -> None:
    assert contract.order_problems(ONE, walk()) == []
    assert contract.order_problems(EIGHT, walk(8)) == []


BROKEN = [
    (without("q_b", "qg", "put"), "'qg' is never put by q_b"),
    (without("q_b", "qg", "put"), "unpack poll 'qg' before q_b has put it"),
    (without("slice", "part", "put"), "gate poll 'part' before slice has put it: the wait could not end"),
    (without("gate", "part", "poll"), "'part' is never polled by gate"),
    (without("mix", "x", "store"), "rows 'x' are never stored by mix"),
    (without("mix", "x", "store"), "mix publish 'xrdy' before the rows 'x' are stored"),
    (without("gemv", "xrdy", "poll"), "gemv load 'x' before a poll of its flag 'xrdy'"),
    (without("norm", "qcr", "publish"), "norm put 'qcr': the flag of rows 'qc' must be published"),
    ([e for e in walk(8) if (e.stage, e.region) != ("norm", "qcr")], "q_b poll 'qcr' before norm has put it"),
    (changed("q_b", "qg", "put", space="device"), "q_b put 'qg' in 'device' space, the region is in 'system'"),
    (changed("gate", "wgt", "put", space="system"), "gate put 'wgt' in 'system' space, the region is in 'device'"),
    (changed("gemv", "x", "load", space="plain"), "gemv load 'x' in 'plain' space"),
    (changed("gate", "wgt", "put", region="wg"), "gate put 'wg': the region is not declared"),
    (changed("gemv", "x", "load", region="y"), "gemv load 'y': no such plain rows"),
    (changed("gemv", "qa", "put", region="qn"), "gemv put 'qn': its writers are q_b"),
    (changed("norm", "qa", "poll", region="part"), "norm poll 'part': its readers are gate"),
    (changed("mix", "xrdy", "publish", kind="put"), "the flag of rows 'x' must be published"),
    (changed("gate", "wgt", "put", kind="publish"), "only the flags of plain rows are published"),
    (changed("gate", "wgt", "put", kind="peek"), "gate 'peek': the kind must be one of put, poll"),
    (changed("gate", "wgt", "put", stage="gat"), "stage 'gat' must be one of slice, gate"),
    (moved(("mix", "msq", "poll"), ("mix", "msq", "put")), "mix poll 'msq' before mix has put it"),
    (moved(("mix", "xrdy", "publish"), ("mix", "x", "store")), "mix store 'x' after its flag 'xrdy' was published"),
    (moved(("norm", "qa", "poll"), ("gemv", "qa", "put")), "gemv comes after norm: stages must be walked as"),
]


@pytest.mark.parametrize(("events", "says"), BROKEN, ids=[f"{i}-{says[:32]}" for i, (_, says) in enumerate(BROKEN)])
def test_each_broken_walk_is_found(events: list[Event], says: str) -> None:
    found = contract.order_problems(EIGHT, events)
    assert any(says in line for line in found), found
    with pytest.raises(CompileError, match="contract of mla_pre is broken"):
        contract.require("mla_pre", found)


def test_a_poll_in_the_putting_stage_needs_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {n: r._replace(exchange=False) for n, r in regions(ONE).items()}
    monkeypatch.setattr(contract, "regions", lambda key: plain)
    assert contract.order_problems(ONE, walk()) == ["mix poll 'msq' in the stage that puts it, and it is no exchange"]


BUILDS = [
    MlaPreBuild(tokens=s, ranks=r, nblocks=nb, w_uk=w)
    for s, r, nb, w in product((1, 3, 8, 16), (1, 2, 4, 8), (1, 8), ("mxfp4", "bf16"))
]


def test_every_build_is_laid_out_soundly() -> None:
    for key in BUILDS:
        assert contract.layout_problems(key) == [], key
    assert contract.sharing_problems(BUILDS) == []


def test_rows_lie_at_one_place_in_every_build() -> None:
    """The hazard that they cure: bf16 (0.0, tiny) as a dword is a live tag of an early epoch."""
    assert all(
        region.offset >= PAIRS_FIRST for key in BUILDS for region in regions(key).values() if region.name != "qg"
    )
    assert [r.name for r in rows()] == ["x", "qc"]
    assert sum(r.bytes for r in rows()) == PAIRS_FIRST


def test_rows_on_pairs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    low = {"part": Region("part", "device", ("slice",), ("gate",), False, PAIRS_FIRST - 64, 1000)}
    monkeypatch.setattr(contract, "regions", lambda key: low)
    assert contract.sharing_problems([ONE]) == [f"{ONE.symbol}: 'part' lies on plain rows at 229376"]
    odd = {"part": low["part"]._replace(offset=PAIRS_FIRST + 4)}
    monkeypatch.setattr(contract, "regions", lambda key: odd)
    assert any("a value could lie on a tag" in line for line in contract.sharing_problems([ONE]))


def test_a_broken_layout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = regions(EIGHT)
    last = list(whole)[-2]
    wrong = {
        **whole,
        "wgt": whole["wgt"]._replace(offset=whole["part"].offset + 16),
        "msq": whole["msq"]._replace(offset=whole["msq"].offset + 8),
        last: whole[last]._replace(pairs=whole[last].pairs + 2),
        "qg": whole["qg"]._replace(pairs=whole["qg"].pairs + 1),
    }
    monkeypatch.setattr(contract, "regions", lambda key: wrong)
    found = "\n".join(contract.layout_problems(EIGHT))
    for says in (
        "'part' ends at",
        "'msq' starts at",
        "16-byte aligned",
        f"scratch_bytes is {scratch_bytes(EIGHT)}",
        f"do not fit peer_bytes={peer_bytes(EIGHT)}",
    ):
        assert says in found, found


def test_tag_slots_of_a_step() -> None:
    layers = [(f"mla_pre of layer {i}", i) for i in range(3, 93, 4)]
    assert contract.slot_problems([*layers, *((f"k2 of layer {i}", 128 + i) for i in range(93))]) == []
    assert contract.slot_problems([*layers, ("again", 7)]) == [
        "again and mla_pre of layer 7 share the tag slot 7 in one step: the second would see old tags"
    ]
    assert "tag slot 256, must be an int from 0 to 255" in contract.slot_problems([("x", 256)])[0]
    assert contract.slot_problems([("x", True)])  # type: ignore[list-item]


def test_residency() -> None:
    sound = {"private": 0, "lds": 160 * 1024, "vgprs": 256, "block": [512, 1, 1]}
    assert contract.residency_problems(sound) == []
    for what, value, says in (
        ("private", 4, "may be dispatched in parts"),
        ("lds", 160 * 1024 + 1, "bytes of LDS"),
        ("vgprs", 264, "have 256 each"),
        ("block", [256, 1, 1], "must be of (512, 1, 1)"),
    ):
        found = contract.residency_problems(sound | {what: value})
        assert len(found) == 1
        assert says in found[0]
    assert "a partitioned device?" in contract.residency_problems(sound, compute_units=64)[0]


def test_the_stages_and_sizes_that_the_checks_assume() -> None:
    assert STAGES == ("slice", "gate", "mix", "gemv", "norm", "q_b", "w_uk", "unpack")
    assert HEALTH_WORDS == 2056
    assert replace(ONE, ranks=8, q_heads=96) == EIGHT
