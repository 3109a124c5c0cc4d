"""mla_pre through the prepared object on the emulator: one rank and several, whole layers, faults, and the contract.

test_mla_pre_device.py holds each stage against its own input; here whole steps are held against float64 and against the
oracle, in the way that an engine runs them: prepared, nothing cleared, widths in turn, peers in one memory. Many
more cases are in sweep_mla_pre.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flydsl")
pytest.importorskip("tinygrad")

import mla_pre_group as group_of
from fake_hip import SIZES, FakeHip
from mla_pre_group import PAGE, PAGES, Group, HandOffs, step_inputs

from k3dsl import reference
from k3dsl.amd.hip import HipRuntime
from k3dsl.amd.mla_pre import contract
from k3dsl.amd.mla_pre.key import HEADS, MlaPreBuild
from k3dsl.amd.mla_pre.launch import build
from k3dsl.amd.mla_pre.layout import QC_ROWS, X_ROWS
from k3dsl.amd.prepared import PreparedMlaPre
from k3dsl.amd.rank import MlaPreRank
from k3dsl.dims import MlaDims
from k3dsl.errors import CaptureError, PeerError
from k3dsl.reference import mla_pre as oracle
from k3dsl.reference.rounding import f8_clamped

pytestmark = pytest.mark.emulator

SCALE = MlaDims().scale


def error(mine: Tensor, theirs: Tensor) -> float:
    """Relative to the whole."""
    return float((mine.double() - theirs.double()).norm() / theirs.double().norm())


def nearly(mine: Tensor, theirs: Tensor, share: float) -> None:
    """e4m3 bytes that differ in few places, and there by one step of the format (or both are next to zero)."""
    a, b = mine.view(torch.float8_e4m3fn).float(), theirs.view(torch.float8_e4m3fn).float()
    differ = mine.view(torch.uint8) != theirs.view(torch.uint8)
    assert float(differ.float().mean()) <= share
    step = torch.exp2(torch.floor(torch.log2(torch.maximum(a.abs(), b.abs()).clamp(min=2.0**-6))) - 3)
    assert bool(((a - b).abs() <= step).all())


def check_step(group: Group, given: dict[str, Any], nblocks: int, slots: list[Tensor], prefixes: list[Tensor]) -> None:
    """Prefix, gate, entries and gathered query of every rank against the oracle's step and against float64."""
    found = group.expected(given, nblocks)
    rows = given["prefix"].shape[0]
    before = torch.zeros_like(group.caches[0])
    for r, (layer, step) in enumerate(zip(group.layers, found, strict=True)):
        assert layer.rank.read_health()
        assert torch.equal(prefixes[r], step.prefix)
        exact = oracle.mla_pre64(group_of.oracle_of(r), nblocks=nblocks, w_uk=layer.rank.w_uk, **given)
        assert error(layer.rank.gate(rows), exact.gate) < 5e-3
        live = slots[r] >= 0
        written = group.caches[r].view(-1, 576)[slots[r][live]]
        if bool(live.any()):
            nearly(written, step.entry[live], 0.02)
            assert error(written.view(torch.float8_e4m3fn).float(), exact.entry[live]) < 0.04
        untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
        untouched[slots[r][live]] = False
        assert torch.equal(group.caches[r].view(-1, 576)[untouched], before.view(-1, 576)[untouched])
        own = layer.rank.query(rows)[:, r * HEADS : (r + 1) * HEADS]
        limit = 0.2 if layer.rank.w_uk == "mxfp4" else 0.04  # four bits, or fp8 alone
        assert error(own.view(torch.float8_e4m3fn).float(), exact.query) < limit
        assert error(own.view(torch.float8_e4m3fn).float(), step.query().float()) < 0.03  # flips of a step, no more
    every = [layer.rank.query(rows) for layer in group.layers]
    assert all(torch.equal(q, every[0]) for q in every)
    spare = group.layers[0].rank.q_heads - HEADS * group.ranks
    if spare:
        assert torch.equal(every[0][:, HEADS * group.ranks :], every[0][:, :spare])


def ulps(mine: Tensor, exact: Tensor, slack: float) -> float:
    """The largest distance from float64 in units of the last bf16 place, `slack` of which a float32 sum may miss."""
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126))) - 7)
    return float(((mine.double() - exact).abs() / (unit + slack)).max())


def check_stages(group: Group, nblocks: int, delta: bool, slots: list[Tensor], rows: int) -> None:
    """Every stage after the mix recomputed in float64 from what the kernel itself handed to it, on two of the ranks."""
    for r in {0, group.ranks - 1}:
        layer, w = group.layers[r], group_of.oracle_of(r)
        key = layer._keys[(rows, nblocks, delta)]
        found = HandOffs(layer, key)
        tag = int(layer.rank.epoch) * 256 + layer.slot + 1
        assert all(found.tags(name) == [tag] for name in ("part", "wgt", "msq", "xrdy", "qa", "qcr", "qn"))
        x, qa, qc = found.plain(X_ROWS), found.halves("qa", 2112), found.plain(QC_ROWS)
        assert ulps(qa, x.double() @ w.w_qkv.double().T, 1e-5) <= 1
        gate = torch.sigmoid((x.double() @ w.w_g.double().T).to(torch.bfloat16).double()).to(torch.bfloat16)
        differ = layer.rank.gate(rows) != gate  # only where float32 rounds the gate to the other neighbour
        assert float(differ.float().mean()) < 1e-2
        assert float((layer.rank.gate(rows).float() - gate.float()).abs().max()) < 2**-6
        want_qc, entry = oracle.norms(qa, w, torch.float64)
        assert ulps(qc, want_qc.double(), 1e-6) <= 1
        assert float((qc != want_qc).float().mean()) <= 1e-3
        live = slots[r] >= 0
        if bool(live.any()):
            nearly(group.caches[r].view(-1, 576)[slots[r][live]], entry[live], 1e-3)
        qn, pe = found.halves("qn", HEADS, 128), layer.rank.query(rows)[:, r * HEADS : (r + 1) * HEADS, 512:]
        nope, rope = oracle.split_heads(qc.double() @ w.w_qb.double().T)
        assert ulps(qn, nope, 1e-5) <= 1
        nearly(pe.contiguous(), f8_clamped(rope.to(torch.bfloat16)).view(torch.uint8), 1e-2)
        latent = layer.rank.query(rows)[:, r * HEADS : (r + 1) * HEADS, :512].contiguous()
        if key.w_uk == "mxfp4":  # exact: no sum of it is rounded
            absorbed = oracle.absorb_mxfp4(qn, w.w_k, w.w_k_scale)
            assert torch.equal(latent, f8_clamped(absorbed).view(torch.uint8))
        else:
            nearly(latent, f8_clamped(oracle.absorb_bf16(qn, w.w_uk_t, torch.float64)).view(torch.uint8), 1e-2)


def slots_of(ranks: int, rows: int, kind: str, seed: int = 0) -> list[Tensor]:
    """Each token's slot on its rank. kind: "own" (token t on rank t mod ranks), "none", "mixed"."""
    order = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(seed))[:rows]
    token = torch.arange(rows)
    if kind == "none":
        return [torch.full((rows,), -1) for _ in range(ranks)]
    skip = token % 3 == 1 if kind == "mixed" else torch.zeros(rows, dtype=torch.bool)
    return [torch.where((token % ranks == r) & ~skip, order, -1) for r in range(ranks)]


def run_case(
    ranks: int, rows: int, nblocks: int, *, delta: bool = True, kind: str = "own", w_uk: str = "mxfp4", **options: Any
) -> None:
    group = Group(ranks, (rows,), nblocks=(nblocks,), deltas=(delta,), w_uk=w_uk, **options)
    given, slots = step_inputs(rows, nblocks, seed=rows + nblocks, delta=delta), slots_of(ranks, rows, kind)
    prefixes = group.project(given, slots)
    check_step(group, given, nblocks, slots, prefixes)
    check_stages(group, nblocks, delta, slots, rows)


@pytest.mark.parametrize(
    ("ranks", "rows", "nblocks", "more"),
    [
        (1, 4, 6, {"kind": "mixed", "model": "weak", "seed": 1}),
        (1, 16, 2, {"delta": False, "w_uk": "bf16"}),
        (8, 2, 3, {"model": "weak", "seed": 2}),
    ],
    ids=["one rank", "one rank bf16", "eight ranks"],
)
def test_a_prepared_step(ranks: int, rows: int, nblocks: int, more: dict[str, Any]) -> None:
    run_case(ranks, rows, nblocks, **more)


def test_widths_in_turn_with_nothing_cleared() -> None:
    """Steps of 3, 1, 3 and 1 rows in one scratch and one peer buffer: each is as right as the first, on both ranks."""
    group = Group(2, (1, 3), nblocks=(2,), model="weak", seed=3)
    for epoch, rows in enumerate((3, 1, 3, 1), 1):
        for cache in group.caches:
            cache.zero_()
        given, slots = step_inputs(rows, 2, seed=10 + epoch), slots_of(2, rows, "own", seed=epoch)
        prefixes = group.project(given, slots)
        assert [int(layer.rank.epoch) for layer in group.layers] == [epoch, epoch]
        check_step(group, given, 2, slots, prefixes)


def test_a_whole_layer_of_two_ranks_is_one_devices() -> None:
    """Gather, shards of the cache, combination by LSE, value and gate, against float64 over the whole context."""
    ranks, q, past = 2, 2, 13
    group = Group(ranks, (2,), queries=(q,), nblocks=(1,))
    whole = torch.randn(past + q, 576, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    table = torch.tensor([[3, 9]], dtype=torch.int32)
    position = torch.arange(past + q)
    blocks = table.expand(past + q, -1)
    slots = [reference.local_slots(position, blocks, PAGE, ranks, r) for r in range(ranks)]
    for r in range(ranks):
        held = slots[r] >= 0
        held[past:] = False
        group.caches[r].view(-1, 576)[slots[r][held]] = whole.view(torch.uint8)[held]
    given = step_inputs(q, 1, seed=4)
    group.project(given, [s[past:].contiguous() for s in slots])
    totals = torch.tensor([past + q], dtype=torch.int32)
    lengths = [reference.local_len(totals, ranks, r) for r in range(ranks)]
    outs = group.attend(table, lengths, totals, rows=q, q=q)
    steps = group.expected(given, 1)
    keys = whole.double()
    keys[past:] = steps[0].entry.view(torch.float8_e4m3fn).double()
    for r, out in enumerate(outs):
        query = steps[r].query().double()
        for t in range(q):
            seen = keys[: past + 1 + t]
            p = (query[t] @ seen.T * SCALE).softmax(1)
            up = torch.einsum("hl,hlv->hv", p @ seen[:, :512], group_of.weights(r).W_UV.double())
            want = up.flatten() * steps[r].gate[t].double()
            assert error(out[t], want) < 0.03


def stall_case(ranks: int, **options: Any) -> None:
    """The bound is cut short and rank 1 stalls once. The step after the reset is right again, with nothing cleared."""
    wait = 60_000  # ticks of the emulator's clock; a sound step takes a few thousand
    fault = {"fault_rank": 1, "fault_epoch": 2, "fault_slot": 0, "fault_ticks": 8 * wait}
    group = Group(ranks, (1,), nblocks=(1,), changes={"wait_ticks": wait, **fault}, **options)
    slots = slots_of(ranks, 1, "own")
    for epoch in (1, 2):
        group.project(step_inputs(1, 1, seed=epoch), slots)
        assert all(layer.rank.poll() for layer in group.layers) == (epoch == 1)
    failed = [layer.rank.rank for layer in group.layers if not layer.rank.poll()]
    assert group.layers[0].rank.alarms() == failed
    with pytest.raises(PeerError, match="mla_pre gave up waiting") as told:
        group.layers[0].rank.check()
    assert f"alarms of ranks {failed}" in str(told.value)
    assert 0 not in failed or "waited for epoch 2 slot 0" in str(told.value)
    for layer in group.layers:
        assert layer.rank.read_health().failed == (layer.rank.rank in failed)
        layer.rank.reset()
    for cache in group.caches:
        cache.zero_()
    given = step_inputs(1, 1, seed=7)
    prefixes = group.project(given, slots)
    for layer in group.layers:
        layer.rank.check()
    check_step(group, given, 1, slots, prefixes)


def test_a_stalled_rank_ends_in_an_error_and_can_begin_anew() -> None:
    stall_case(2, model="weak", seed=5)


def test_hip_is_given_each_runs_own_tensors() -> None:
    """What libamdhip64 is called with: the grid, torch's stream, and of two runs the arguments by name."""
    fake = FakeHip()
    runtime = HipRuntime(0, library=fake, target="gfx950", stream=lambda: 0x77)
    weights = group_of.weights()
    layer = PreparedMlaPre(weights, batches=(2,), nblocks=(1,), runtime=runtime, cache=group_of.kernels(), slot=9)
    cache = torch.zeros(4, 2, PAGE, 576, dtype=torch.uint8)[:, 1]
    layer.prepare_cache(cache)
    fake.sizes = [SIZES[kind] for _, kind in MlaPreBuild.params]
    assert len(fake.loaded) == 1
    slots = torch.tensor([3, -1])
    for seed in (1, 2):
        given = step_inputs(2, 1, seed=seed)
        layer.project(given["prefix"], blocks=given["blocks"], delta=given["delta"], cache=cache, slots=slots)
        launch = fake.launches[-1]
        assert (launch["grid"], launch["block"], launch["lds"], launch["stream"]) == ((256, 1, 1), (512, 1, 1), 0, 0x77)
        names = [name for name, _ in MlaPreBuild.params]
        values = {n: int.from_bytes(v, "little") for n, v in zip(names, launch["values"], strict=True)}
        for name in ("prefix", "delta", "blocks"):
            assert values[name] == given[name].data_ptr(), name
        rank = layer.rank
        fixed = {
            "kv_cache": cache,
            "slots": slots,
            "w_qkv": weights.w_qkv,
            "scratch": rank.scratch,
            "epoch": rank.epoch,
        }
        fixed |= {
            "health": rank.health,
            "q_out": rank.query(2),
            "gate_out": rank.gate(2),
            "w_qb": weights.q_b_proj.weight,
        }
        for name, tensor in fixed.items():
            assert values[name] == tensor.data_ptr(), name
        assert (values["kv_block_stride"], values["kv_slot_stride"], values["block_size"]) == (
            2 * PAGE * 576,
            576,
            PAGE,
        )
        assert (values["blocks_token_stride"], values["blocks_block_stride"]) == (7168, 7168)
        assert (values["w_k_stride0"], values["w_k_stride1"]) == (64, 768)
        assert [values[f"w_k_scale_stride{i}"] for i in range(3)] == [4, 48, 1]
        assert (values["rank"], values["layer"], values["peers"], values["tl"]) == (0, 9, 0, 0)
    assert len(fake.launches) == 2


def test_nothing_is_built_or_loaded_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = PreparedMlaPre(group_of.weights(), batches=(1,), nblocks=(1,))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cache = torch.zeros(1, PAGE, 576, dtype=torch.uint8)
    for refused in (
        lambda: layer.prepare_cache(cache),
        lambda: PreparedMlaPre(group_of.weights(), batches=(1,)),
        lambda: MlaPreRank((1,)),
        lambda: build(MlaPreBuild(tokens=1), cache=group_of.kernels()),
        layer.rank.check,
        layer.rank.reset,
    ):
        with pytest.raises(CaptureError, match="inside a stream capture is refused"):
            refused()


def test_the_traced_kernel_keeps_the_contract() -> None:
    """Hand-offs as traced, and residency of the object that the toolchain makes of it."""
    from tools.gfx950 import flydsl_backend

    flydsl_backend.install()
    from k3dsl.amd.mla_pre.kernel import trace_events

    key = MlaPreBuild(tokens=3, ranks=4, q_heads=64, timeline=True)
    assert contract.order_problems(key, trace_events(key)) == []
    resources = build(key, cache=group_of.kernels()).resources
    assert contract.residency_problems(resources) == []
    assert resources["private"] == 0
    assert resources["lds"] <= 160 * 1024
    assert resources["waves"] >= 2  # 8 waves of a workgroup on four SIMDs
