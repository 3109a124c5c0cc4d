"""mla_pre's machine code on the emulator, each stage against a computation from the kernel's own hand-off before it."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from typing import Any

import pytest
import torch

pytest.importorskip("flydsl")
pytest.importorskip("tinygrad")

from tools.gfx950 import build, flydsl_backend

os.environ.setdefault("FLYDSL_RUNTIME_CACHE_DIR", str(build.cache_folder() / "flydsl"))
flydsl_backend.install()

import mla_pre_device as device  # noqa: E402

from k3dsl.amd import primitives, toolchain  # noqa: E402
from k3dsl.amd.health import decode_health  # noqa: E402
from k3dsl.amd.mla_pre import contract, handoff, kernel, mix  # noqa: E402
from k3dsl.amd.mla_pre.key import LDS_LIMIT, PEER_HEAD, MlaPreBuild, peer_pairs  # noqa: E402
from k3dsl.reference import mla_pre as reference  # noqa: E402
from k3dsl.reference.mla_pre import PreWeights  # noqa: E402

pytestmark = pytest.mark.emulator

weights = functools.cache(PreWeights.random)
compiled = functools.cache(lambda key: kernel.launcher(key)[0])

CASES: list[tuple[dict[str, Any], dict[str, Any], list[int] | None]] = [
    # key, emulator's schedule, slots
    ({"tokens": 1}, {}, None),
    ({"tokens": 2, "nblocks": 3}, {"model": "weak", "seed": 1}, [-1, 63]),
    ({"tokens": 4, "nblocks": 8, "w_uk": "bf16"}, {}, [5, -1, -1, 0]),
    ({"tokens": 8, "nblocks": 8}, {"model": "weak", "seed": 2}, None),
    ({"tokens": 8, "nblocks": 5, "delta": False}, {"quantum": 2000, "seed": 3}, [-1] * 8),
    ({"tokens": 16, "nblocks": 8}, {}, None),
    ({"tokens": 5, "nblocks": 7, "delta": False, "w_uk": "bf16", "qbf16": True}, {"model": "weak", "seed": 4}, None),
]


@pytest.mark.parametrize(("fields", "schedule", "slots"), CASES, ids=[str(i) for i in range(len(CASES))])
def test_every_stage(fields: dict[str, Any], schedule: dict[str, Any], slots: list[int] | None) -> None:
    key = MlaPreBuild(**fields)
    rank = device.Rank(key, weights(), device.inputs(key, 7, slots, wide=1))
    result = device.launch([rank], 3, 5, compiled(key), **schedule)
    device.check(rank)
    assert not result.reports


@pytest.mark.parametrize("w_uk", ["mxfp4", "bf16"])
def test_w_uk_may_lie_at_any_dword(w_uk: str) -> None:
    key, w = MlaPreBuild(tokens=2, w_uk=w_uk), weights()
    name = "w_k" if w_uk == "mxfp4" else "w_uk_t"
    own = getattr(w, name)
    shifted = torch.zeros(*own.shape[:2], own.shape[2] + 4 // own.element_size(), dtype=own.dtype)
    shifted = shifted[..., -own.shape[2] :].copy_(own)  # rows 4 bytes apart from the last, the first at 4
    rank = device.Rank(key, dataclasses.replace(w, **{name: shifted}), device.inputs(key, 3))
    result = device.launch([rank], 3, 5, compiled(key))
    device.check(rank)
    assert not result.reports


@pytest.mark.parametrize("seed", range(60))
def test_any_build_under_any_schedule(seed: int, request: pytest.FixtureRequest) -> None:
    """Random keys, slots, tags, schedules and norms; 10 s a case, so only with --mla-pre-sweep."""
    if not request.config.getoption("--mla-pre-sweep"):
        pytest.skip("only with --mla-pre-sweep")
    pick = random.Random(seed)
    key = MlaPreBuild(
        tokens=pick.randint(1, 16),
        nblocks=pick.randint(1, 8),
        delta=pick.random() < 0.7,
        qbf16=pick.random() < 0.2,
        w_uk=pick.choice(["mxfp4", "bf16"]),
        eps=pick.choice([1e-5, 1e-3]),
        q_eps=pick.choice([1e-5, 1e-2]),
    )
    schedule = {
        "seed": pick.randint(0, 99),
        "model": pick.choice(["flat", "weak", "weak"]),
        "quantum": pick.choice([11, 100, 1000, 5000, 100_000]),
    }
    slots = [pick.choice([-1, i]) for i in pick.sample(range(64), key.tokens)]
    w = dataclasses.replace(weights(), eps=key.eps, q_eps=key.q_eps)
    rank = device.Rank(key, w, device.inputs(key, seed, slots, wide=pick.randint(0, 2)))
    epoch = pick.choice([1, 5, 2**22 - 1, 2**22, 2**22 + 7, 2**31 - 1])
    device.launch([rank], pick.randint(0, 255), epoch, kernel.launcher(key)[0], **schedule)
    device.check(rank)


EXTREMES = [{"tokens": 16, "nblocks": 8, "ranks": 8}, {"tokens": 9, "nblocks": 8, "w_uk": "bf16", "qbf16": True}]


@pytest.mark.parametrize("fields", [{"tokens": 1, "ranks": 2, "w_uk": "bf16"}, *EXTREMES], ids=str)
def test_the_order_of_hand_offs(fields: dict[str, Any]) -> None:
    key = MlaPreBuild(**fields)
    assert contract.order_problems(key, kernel.trace_events(key)) == []
    assert contract.layout_problems(key) == []


@pytest.mark.parametrize("fields", EXTREMES, ids=str)
def test_all_workgroups_are_resident(fields: dict[str, Any]) -> None:
    built = toolchain.build(toolchain.compile_key(MlaPreBuild(**fields), "gfx950"))
    got = built.resources
    assert got["private"] == got["vgpr_spills"] == got["sgpr_spills"] == 0
    assert got["vgprs"] <= 256  # two waves of a workgroup share a SIMD
    assert got["lds"] <= LDS_LIMIT
    assert tuple(got["block"]) == (512, 1, 1)


def group(key: MlaPreBuild, seed: int = 7) -> list[device.Rank]:
    """Ranks with the same activations and each its own q_b."""
    inputs, w = device.inputs(key, seed), weights()
    own = [dataclasses.replace(w, w_qb=w.w_qb.roll(192 * 5 * r, 0)) if r else w for r in range(key.ranks)]
    return [device.Rank(key, own[r], inputs, r) for r in range(key.ranks)]


def copies(r: device.Rank) -> list[torch.Tensor]:
    """The tags in the two copies of a rank's gathered query."""
    pairs = r.peer[PEER_HEAD:].view(torch.int32).view(2, peer_pairs(r.key.tokens, r.key.ranks), 2)
    return [pairs[0, :, 1].unique(), pairs[1, :, 1].unique()]


@pytest.mark.parametrize(("ranks", "tokens", "seed"), [(8, 1, 1), (2, 3, 2)])
def test_every_rank_has_all_heads(ranks: int, tokens: int, seed: int) -> None:
    """Two steps with nothing cleared between them: the heads of all ranks, in rank order, pad heads at the end."""
    key = MlaPreBuild(tokens=tokens, ranks=ranks, nblocks=2)
    members = group(key)
    for epoch in (5, 6):
        for r in members:
            r.prefix.copy_(r.inputs["prefix"])
            r.outs["q_out"].fill_(0x5A)
            r.outs["kv_cache"].fill_(0xA5)
        device.launch(members, 3, epoch, compiled(key), model="weak", seed=seed)
        live, other = copies(members[0])[:: 1 if epoch == 6 else -1]
        assert live.tolist() == [epoch * 256 + 4]
        assert other.tolist() == [0 if epoch == 5 else 5 * 256 + 4]  # the copies take turns
        queries = []
        for r in members:
            if epoch == 6 and r.rank < 2:
                device.check(r)
            pe = reference.split_heads(reference.project(r.rows("qc"), r.weights.w_qb))[1]
            queries.append(reference.query(reference.absorb_mxfp4(r.qn, r.weights.w_k, r.weights.w_k_scale), pe))
        want = reference.gather_heads(queries, key.q_heads).view(torch.uint8)
        got = members[0].outs["q_out"]
        assert torch.equal(got[..., :512], want[..., :512])
        assert (got != want).float().mean() < 0.005
        assert all(torch.equal(r.outs["q_out"], got) for r in members)


@pytest.mark.parametrize("schedule", [{}, {"model": "weak", "seed": 1}, {"seed": 2, "quantum": 700}], ids=str)
def test_a_stalled_rank_is_told_and_nobody_hangs(schedule: dict[str, Any]) -> None:
    """Rank 3 sleeps through the bound. Every launch ends; whoever gave up is FAILED for good and has raised its alarm.

    Which ranks give up depends on the schedule: rank 3's own workgroups may be the first, and then the garbage that
    they pass on carries right tags. Their alarm is there before it.
    """
    wait = 60_000  # ticks: the clock of the emulator counts turns and sleep, a sound step takes 2,000 to 7,000
    fault = {"fault_rank": 3, "fault_epoch": 6, "fault_slot": 3, "fault_ticks": 8 * wait}
    key = MlaPreBuild(tokens=1, ranks=4, wait_ticks=wait, **fault)
    members = group(key)
    alarms = members[0].peer[: 4 * key.ranks].view(torch.int32)
    for epoch in (5, 6, 7):
        device.launch(members, 3, epoch, compiled(key), **schedule)
        failed = [int(r.outs["health"][0]) for r in members]
        assert alarms.tolist() == failed
        assert any(failed) if epoch > 5 else not any(failed)
    for r in members:
        health = decode_health(r.outs["health"])
        assert health.failed == bool(health.records) == bool(alarms[r.rank])
        assert all(g.region in ("xrdy", "qg", "part", "wgt", "msq") for g in health.records)
        assert all(g.expected == 6 * 256 + 4 and g.seen < g.expected for g in health.records)


@pytest.mark.parametrize("broken", ["pairs", "rows", "announcement"])
def test_the_weak_model_finds_what_a_chip_might_forgive(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above have teeth: hand-offs without their scope, and flags that overtake their rows."""
    if broken == "pairs":
        monkeypatch.setitem(handoff.POLICY, "device", primitives.PLAIN)
    elif broken == "rows":

        def plain(s: Any, rows: Any, offset: Any, values: Any) -> None:
            primitives.store(s.scratch, offset + rows.offset, values, primitives.PLAIN)

        monkeypatch.setattr(mix, "store_row", plain)
    else:
        monkeypatch.setattr(primitives, "drain", lambda: None)
    key = MlaPreBuild(tokens=2, nblocks=2, wait_ticks=40_000)
    rank = device.Rank(key, weights(), device.inputs(key, 1))
    device.launch([rank], 3, 5, kernel.launcher(key)[0], model="weak", seed=1)
    with pytest.raises(AssertionError):
        device.check(rank)


def test_a_timeline_has_a_stamp_for_each_stage() -> None:
    key = MlaPreBuild(tokens=1, timeline=True)
    rank = device.Rank(key, weights(), device.inputs(key, 7))
    device.launch([rank], 3, 5, compiled(key))
    stamps = rank.outs["tl"] > 0
    took = {1: range(56), 2: range(1), 3: range(56), 4: range(28, 256), 6: range(1), 7: range(64, 208)}
    for point, blocks in (took | {8: range(208, 256)}).items():
        assert stamps[:, point].nonzero().flatten().tolist() == list(blocks)
    assert not stamps[:, [5, 9, 10, 11, 12, 13, 14, 15]].any()
