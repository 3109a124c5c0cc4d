"""Context parallelism on two GPUs, a process each: equal to one device, replayed, stopped, killed, in disagreement.

A rank's process answers for its own part (tests/parallel_ranks.py); nothing here can outlast its deadline. Peer stores
are unicast: NVLink multicast is switched off in the ranks' environment.
"""

import pytest
import torch
from test_dcp_gpu import plan

from k3dsl.cli.bench import question
from k3dsl.scenario_parallel import INTERLEAVES, ParallelCase

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host"),
]

DCP = 2
BOUND = 1.0
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
GPU_KEYS = plan(DCP, 12, [(8, 1), (32, 4), (8, 4)])
ranks = question("ranks")


def started():
    """Two processes in one process group."""
    pair = ranks.Ranks(DCP, ENVIRONMENT)
    try:
        names = pair.call("k3dsl_bench.ranks:join", "nccl", ranks.free_port(), 60.0, timeout=120)
    except BaseException:
        pair.close()
        raise
    assert len(names) == DCP
    return pair


@pytest.fixture(scope="module")
def kept():
    """The group that tests share, in a list; replaced when a failed test has ended it."""
    groups = []
    yield groups
    for group in groups:
        group.close()


@pytest.fixture
def shared(kept):
    """A group for tests that leave it whole."""
    if not kept or not kept[-1].alive:
        kept.append(started())
    return kept[-1]


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize("interleave", INTERLEAVES)
def test_ranks_give_what_one_device_gives(shared, interleave, q):
    """Eagerly, replayed, replayed with other lengths; a thousand replays bit-equal; mailboxes armed afterwards."""
    case = ParallelCase(DCP, interleave, q)
    for rank, one in enumerate(shared.call("parallel_ranks:compare", case, "kernels", 1000, timeout=90)):
        one.verdict.require()
        assert one.unequal == 0, f"rank {rank}"
        assert one.armed, f"rank {rank}"


@pytest.mark.parametrize("stopped", range(DCP))
def test_a_stopped_rank_ends_the_other_with_its_name(shared, stopped):
    found = shared.call("parallel_ranks:stop", ParallelCase(DCP), stopped, BOUND, timeout=90)
    for rank, one in enumerate(found):
        one.after.require()
        if rank == stopped:
            continue
        for ending in (one.ending, one.replayed):
            assert BOUND * 0.9 <= ending.seconds <= 2 * BOUND + 1
            assert (ending.error.rank, ending.error.peer, ending.error.region) == (rank, stopped, "q")
            assert f"rank {stopped}" in str(ending.error)
            assert str(ending.again) == str(ending.error)


def test_a_rank_that_stops_after_its_queries_is_missed_in_the_merge(shared):
    found = shared.call("parallel_ranks:publish_only", ParallelCase(DCP, 1, 4), 0, BOUND, timeout=90)
    error = found[1].error
    assert (error.rank, error.peer, error.parity) == (1, 0, 0)
    assert error.region in ("lse", "partial")
    assert found[1].seconds <= 2 * BOUND + 1


def test_a_killed_rank_ends_the_other_with_its_name():
    with started() as pair:
        found = pair.call("parallel_ranks:die", ParallelCase(DCP), 1, BOUND, timeout=90, dying=(1,))
    assert (found[0].error.rank, found[0].error.peer, found[0].error.region) == (0, 1, "q")
    assert found[0].seconds <= 2 * BOUND + 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"max_context": 16384}, "max_context"), ({"queries": (1, 4)}, "queries"), ({"parity": 1}, "parity")],
)
def test_plans_that_differ_are_refused_by_every_rank(shared, changes, field):
    texts = shared.call(
        "parallel_ranks:disagree", ParallelCase(DCP), [{"parity": 0}, {"parity": 0, **changes}], timeout=60
    )
    assert all(field in text for text in texts), texts
    assert all("page_size" not in text for text in texts), "names a field that does not differ"


def test_boxes_that_differ_are_refused_by_every_rank(shared):
    texts = shared.call("parallel_ranks:disagree_boxes", ParallelCase(DCP), [{}, {"interleave": 16}], timeout=60)
    assert all("interleave" in text and "16" in text for text in texts), texts
