"""Context parallelism on one GPU: D virtual ranks against the layer of one device and against the reference.

Every step has requests of 0, 1, D - 1, D, 17, 65 and 4099 keys, so ranks without a key and padding are in every case.
Caches, tables and rows are poisoned where nothing must be read (k3dsl.scenario_parallel).
"""

import pytest
import torch
from harness import stream
from parallel_runs import KERNELS, SEEN, Ending, Group, caught, unequal_replays

from k3dsl import ConfigError
from k3dsl.nvidia.layer import shape_keys
from k3dsl.reference import bits
from k3dsl.scenario_parallel import INTERLEAVES, ParallelCase

pytestmark = pytest.mark.gpu

RANKS = (2, 4, 8)
CASES = [ParallelCase(dcp, interleave, q) for dcp in RANKS for interleave in INTERLEAVES for q in (1, 4)]
#: Rows of other steps: one, a tile and one more, all of a mailbox.
ROWS = (1, 17, 64)
#: Six heads a rank, the shard of 16 tensor-parallel ranks; and caches of bf16.
MORE = (
    ParallelCase(8, 16, 4, heads=6),
    ParallelCase(2, 16, 1, kv_format="bf16"),
    ParallelCase(2, 1, 4, kv_format="bf16"),
)


def plan(dcp: int, heads: int, shapes, kv_format: str = "fp8") -> list:
    """The kernel keys of (rows, q) shapes, of the ranks and of one device."""
    facts = {"target": "sm_90a", "heads": heads, "kv_format": kv_format, "page": 64, "core": "hopper"}
    return [key for rows, q in shapes for d in (dcp, 1) for key in shape_keys(**facts, rows=rows, q=q, dcp=d).all()]


GPU_KEYS = [
    *(key for dcp in RANKS for key in plan(dcp, 12, [(8, 1), (32, 4)])),
    *(key for dcp in (2, 8) for key in plan(dcp, 12, [(rows, 1) for rows in ROWS])),
    *plan(8, 6, [(32, 4)]),
    *plan(2, 12, [(8, 1), (32, 4)], "bf16"),
    *plan(2, 12, [(8, 4)]),  # of the plan that is refused
]


@pytest.fixture(scope="module", autouse=True)
def largest_errors(request):
    """Says at the end how far ranks and one device were apart: what the limits leave."""
    SEEN.clear()
    yield
    if SEEN:
        worst = {name: max(getattr(v, name) for v in SEEN) for name in ("kernels", "reference")}
        with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
            print(
                f"\n{len(SEEN)} steps: a row is at most {worst['kernels']:.2e} of its norm from the layer of one "
                f"device, {worst['reference']:.2e} from the reference"
            )


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda c: c.id)
def test_ranks_give_what_one_device_gives(case):
    """Eagerly, replayed, and replayed after lengths, slots, rows and caches have changed."""
    group = Group(KERNELS, case)
    group.run()
    group.verdict().require()
    assert group.armed()
    replay = group.backend.captured(group.run)
    group.poison()
    replay()
    group.verdict().require()
    group.shorten(torch.Generator().manual_seed(case.q))
    group.poison()
    replay()
    group.verdict().require()
    assert group.armed()
    for box in group.boxes:
        box.check()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dcp", [2, 8])
def test_every_number_of_rows(dcp, rows):
    generator = torch.Generator().manual_seed(rows)
    totals = torch.randint(0, 700, (rows,), generator=generator)
    totals[0] = 130
    group = Group(KERNELS, ParallelCase(dcp, 1, totals=tuple(totals.tolist())))
    group.run()
    group.verdict().require()
    assert group.armed()


def test_requests_that_are_all_empty_give_zeros_and_write_nothing():
    group = Group(KERNELS, ParallelCase(4, 1, totals=(0,) * 8))
    group.run()
    group.backend.synchronize()
    assert not any(bits(out).any() for outs in group.outs for out in outs.values())
    for step, before in zip(group.steps, group.before, strict=True):
        assert all(torch.equal(step.shards[r].cache, before[r]) for r in group.ranks)
    assert group.armed()


@pytest.mark.parametrize("q", [1, 4])
def test_a_padded_request_is_an_empty_one(q):
    group = Group(KERNELS, ParallelCase(4, 16, q))
    group.run()
    group.backend.synchronize()
    full = [{r: bits(out).clone() for r, out in outs.items()} for outs in group.outs]
    group.poison()
    group.run(requests=len(group.case.requests) - 1)
    group.backend.synchronize()
    for outs, kept in zip(group.outs, full, strict=True):
        assert all(torch.equal(bits(out), kept[r]) for r, out in outs.items())
    assert group.armed()


@pytest.mark.parametrize(
    "case", [ParallelCase(2, 1, 1), ParallelCase(8, 64, 4), ParallelCase(8, 1, 1)], ids=lambda c: c.id
)
def test_1000_replays_are_bit_equal(case):
    group = Group(KERNELS, case)
    group.run()
    group.backend.synchronize()
    assert unequal_replays(group, group.backend.captured(group.run), 1000) == 0
    group.verdict().require()
    assert group.armed()


@pytest.mark.parametrize(("dcp", "stopped"), [(2, 0), (2, 1), (4, 2), (8, 7)])
def test_a_stopped_rank_ends_every_other_with_its_name(dcp, stopped):
    bound = 0.5
    group = Group(KERNELS, ParallelCase(dcp), timeout=bound)
    group.run()
    replay = group.backend.captured(group.run)
    group.verdict().require()
    waiting = [r for r in group.ranks if r != stopped]
    ending = Ending.of(group, group.boxes[waiting[0]], lambda: group.run(stopped=(stopped,)), group.run)
    # Each virtual rank waits in its turn on one stream: no more than once each.
    assert bound * 0.9 <= ending.seconds <= bound * len(waiting) * 2 + 1
    for r in waiting:
        error = caught(group.boxes[r].check)
        assert error is not None
        assert (error.rank, error.peer, error.region) == (r, stopped, "q")
        assert error.seconds == bound
        assert f"rank {r}" in str(error)
        assert f"rank {stopped}" in str(error)
    assert ending.again is not None
    # The graph still ends, and at once: the boxes are poisoned.
    again = Ending.of(group, group.boxes[waiting[0]], replay, group.run)
    assert again.seconds < bound + 1
    assert again.error is not None
    for box in group.boxes:
        box.reset()
    assert group.armed()
    for work in (group.run, replay):
        group.poison()
        work()
        group.verdict().require()
    for box in group.boxes:
        box.check()


@pytest.mark.parametrize("silent", [0, 3])
def test_a_rank_that_stops_after_its_queries_is_missed_in_the_merge(silent):
    """It has published, so all cores run; then nothing of it arrives: by LSE or by partial, whoever looks first."""
    bound = 0.5
    group = Group(KERNELS, ParallelCase(4, 16, 4), timeout=bound)
    group.run()
    group.verdict().require()
    bound_to = [layer.bound(**call, q=4) for layer, call in zip(group.layers[0], group.calls(0), strict=True)]
    steps = [step for step, _ in bound_to]
    now = stream()
    for step in steps:
        step.query.publish(now)
    for step in steps:
        step.query.launch(now)
        step.core.launch(now)
    for rank, step in enumerate(steps):
        if rank != silent:
            step.value.push(now)
    for step in steps:
        step.value.merge(now)
    torch.cuda.synchronize()
    for rank, box in enumerate(group.boxes):
        error = caught(box.check)
        assert error is not None
        assert (error.rank, error.peer, error.parity) == (rank, silent, 0)
        assert error.region in ("lse", "partial")
        assert 0 <= error.row < group.case.rows
    for box in group.boxes:
        box.reset()
    group.poison()
    group.run()
    group.verdict().require()
    assert group.armed()


def test_a_virtual_rank_does_not_run_alone():
    group = Group(KERNELS, ParallelCase(2))
    with pytest.raises(ConfigError, match="virtual"):
        group.layers[0][0].run(**group.calls(0)[0])
    group.run()
    group.verdict().require()


def test_totals_are_required_and_checked():
    group = Group(KERNELS, ParallelCase(2))
    calls = group.calls(0)
    for bad, message in (
        (None, "totals"),
        (calls[0]["totals"].long(), "(?s)totals.*int64"),
        (calls[0]["totals"].cpu(), "(?s)totals.*cpu"),
    ):
        wrong = [{**call, "totals": bad} for call in calls]
        with pytest.raises(ConfigError, match=message):
            KERNELS.step(group.layers[0], wrong, 1, ())
    group.backend.synchronize()
    assert all(out.isnan().all() for out in group.outs[0].values())
    assert group.armed()
    group.run()
    group.verdict().require()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"max_context": 16384}, "max_context"), ({"queries": (1, 4)}, "queries"), ({"parity": 1}, "parity")],
)
def test_ranks_that_were_prepared_differently_are_refused(changes, field):
    case = ParallelCase(2)
    group = Group(KERNELS, case)
    boxes = KERNELS.virtual(case, 1.0)
    shards = [group.steps[0].shards[r] for r in group.ranks]

    def prepare_and_step():
        layers = [KERNELS.layer(case, s, b, **c) for s, b, c in zip(shards, boxes, ({}, changes), strict=True)]
        KERNELS.step(layers, group.calls(0), 1, ())

    with pytest.raises(ConfigError, match=field):
        prepare_and_step()
