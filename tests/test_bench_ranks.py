"""The processes of a group: whatever a rank does, a call ends in time, says which rank it was, and leaves nobody."""

import os
import subprocess
import sys
import time

import pytest

from k3dsl.cli.bench import question

ranks = question("ranks")
Ranks, RankError = ranks.Ranks, ranks.RankError


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def pair():
    with Ranks(2, {"OMP_NUM_THREADS": "1"}) as both:
        yield both


def test_a_group_answers_by_rank_and_ends(pair):
    found = pair.call("rank_functions:where", "x")
    assert [f[:2] + f[3:] for f in found] == [(0, 2, "x"), (1, 2, "x")]
    pids = [f[2] for f in found]
    assert pair.call("rank_functions:where", each=["a", "b"])[1][3:] == ("b",)
    assert pair.call("k3dsl_bench.ranks:join", "gloo", ranks.free_port(), 30.0) == ["cpu", "cpu"]
    assert pair.call("rank_functions:total", 10) == [21, 21]
    pair.close()
    assert all(map(gone, pids))


def test_an_error_names_its_rank_and_ends_all(pair):
    pids = [f[2] for f in pair.call("rank_functions:where")]
    with pytest.raises(RankError, match=r"(?s)failed on 1 of 2 ranks\nrank 1:.*no such colour.*about to fail") as e:
        pair.call("rank_functions:fail_on", 1)
    assert set(e.value.failures) == {1}
    assert all(map(gone, pids))
    assert not pair.alive
    with pytest.raises(RankError, match="the ranks have ended"):
        pair.call("rank_functions:where")


def test_a_death_ends_those_that_wait_for_it(pair):
    pair.call("k3dsl_bench.ranks:join", "gloo", ranks.free_port(), 60.0)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1: ended with status 7"):
        pair.call("rank_functions:wait_for_a_dead_peer", timeout=60)
    assert time.monotonic() - began < 10


def test_a_death_that_is_meant_is_no_failure(pair):
    assert pair.call("rank_functions:die_on", 1, dying=(1,)) == ["alive", None]
    with Ranks(1) as one, pytest.raises(RankError, match="answered, and should have ended"):
        one.call("rank_functions:where", dying=(0,))


def test_a_deadline_ends_all(pair):
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0: not done after 0") as e:
        pair.call("rank_functions:sleep", 60, timeout=0.5)
    assert set(e.value.failures) == {0, 1}
    assert time.monotonic() - began < 10


def test_an_answer_that_cannot_travel_is_an_error(pair):
    with pytest.raises(RankError, match=r"(?s)rank 0.*pickle"):
        pair.call("rank_functions:unpicklable")


def test_children_go_with_their_parent():
    code = (
        "from k3dsl.cli.bench import question; import os, time\n"
        "r = question('ranks').Ranks(2)\n"
        "print(*[f[2] for f in r.call('rank_functions:where')], flush=True)\n"
        "os._exit(0)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                         capture_output=True, text=True, timeout=60)  # fmt: skip
    pids = [int(p) for p in out.stdout.split()]
    assert len(pids) == 2, out.stderr
    until = time.monotonic() + 5
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(map(gone, pids))
