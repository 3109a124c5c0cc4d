"""The checks that the GPU tests of context parallelism make: right steps pass, and each planted fault is found."""

import pytest
import torch
from parallel_oracle import Oracle
from parallel_runs import Ending, Group, unequal_replays

from k3dsl.cli.bench import question
from k3dsl.scenario_parallel import MERGE_ERROR, ParallelCase

CASE = ParallelCase(4, 16, 4, heads=1, totals=(1, 3, 4, 17, 300, 0, 65, 0))


def test_right_steps_pass_whatever_the_lengths_become():
    group = Group(Oracle(), CASE)
    group.run()
    group.verdict().require(MERGE_ERROR)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        group.shorten(generator)
        group.poison()
        group.run()
        group.verdict().require(MERGE_ERROR)
    full = [out.clone() for outs in group.outs for out in outs.values()]
    group.poison()
    group.run(requests=7)  # the last one is padding
    assert all(torch.equal(a, b) for a, b in zip(full, (o for outs in group.outs for o in outs.values()), strict=True))
    assert group.armed()


def test_a_bf16_cache_is_compared_bit_by_bit():
    """Its poison is NaN, which equals nothing."""
    group = Group(Oracle(), ParallelCase(2, 1, 1, heads=1, totals=(5, 70, 0), kv_format="bf16"), layers=1)
    group.run()
    group.verdict().require(MERGE_ERROR)


def spoil_output(calls):
    calls[1]["out"][4 * 4 + 1] *= 1.02


def spoil_zero(calls):
    calls[2]["out"][5 * 4, 7] = 1e-30


def spoil_nan(calls):
    calls[0]["out"][4 * 4, 0] = torch.nan


def spoil_entry(calls):
    live = calls[3]["slots"][calls[3]["slots"] >= 0]
    calls[3]["cache"].flatten(0, 1)[live[0], 5] ^= 1


def spoil_another_slot(calls):
    calls[0]["cache"][0, 0, 0] = 0


def swap_ranks(calls):
    one = calls[0]["out"].clone()
    calls[0]["out"].copy_(calls[1]["out"])
    calls[1]["out"].copy_(one)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (spoil_output, "against the layer of one device"),
        (spoil_zero, "not zero"),
        (spoil_nan, "against"),
        (spoil_entry, "an entry differs"),
        (spoil_another_slot, "an entry differs"),
        (swap_ranks, "against"),
    ],
)
def test_faults_are_found(fault, message):
    group = Group(Oracle(fault), CASE, layers=1)
    group.run()
    with pytest.raises(AssertionError, match=message):
        group.verdict().require(MERGE_ERROR)


def test_an_unequal_replay_is_counted():
    calls = []

    def fault(of):
        calls.append(of)
        if len(calls) == 3:
            of[0]["out"][0, 0] = 3.0

    group = Group(Oracle(fault), CASE, layers=1)
    assert unequal_replays(group, group.backend.captured(group.run), 4) == 1
    assert len(calls) == 5


def test_a_stopped_rank_ends_the_others():
    group = Group(Oracle(), CASE)
    ending = Ending.of(group, group.boxes[1], lambda: group.run(stopped=(2,)), group.run)
    assert (ending.error.rank, ending.error.peer, ending.error.region) == (1, 2, "q")
    assert ending.again is group.boxes[0].error
    assert group.boxes[2].error is None
    assert not group.armed()
    for box in group.boxes:
        box.reset()
    group.run()
    group.verdict().require(MERGE_ERROR)
    assert group.armed()


def test_processes_give_what_one_device_gives():
    """Two processes, gloo: each makes the whole step and holds its rank's part."""
    ranks = question("ranks")
    with ranks.Ranks(2, {"OMP_NUM_THREADS": "1"}) as both:
        both.call("k3dsl_bench.ranks:join", "gloo", ranks.free_port(), 60.0)
        case = ParallelCase(2, 1, 4, heads=1, totals=(1, 9, 200, 0))
        found = both.call("parallel_ranks:compare", case, "oracle", 2)
    for one in found:
        one.verdict.require(MERGE_ERROR)
        assert one.armed
        assert one.unequal == 0
