"""The bench of context parallelism without a GPU: both ways agree, one call leaves nothing undone, nothing hangs."""

import json
import time

import pytest
import torch

from k3dsl import ToolchainError
from k3dsl.cli.bench import question

dcp, work = question("dcp"), question("dcp_rank")


def test_a_dry_run_checks_measures_and_loses_a_rank(tmp_path, capsys):
    file = tmp_path / "dcp.json"
    file.write_text(json.dumps({"8": {"kept": True}}))
    assert dcp.main(["--ranks", "2", "--dry-run", "--json", str(file), "--commit", "abc"]) == 0
    runs = json.loads(file.read_text())
    assert runs["8"] == {"kept": True}
    found = runs["2-dry"]
    assert found["ok"]
    assert found["conditions"]["commit"] == "abc"
    assert [(r["rows"], r["q"]) for r in found["rows"]] == [(1, 1), (4, 1), (4, 4)]
    assert all(0 < r["error_against_nccl"] < 6e-3 and r["speedup"] > 0 for r in found["rows"])
    assert {c["case"][:5] for c in found["check"]} == {"d2-i1", "d2-i6"}
    assert max(c["error"] for c in found["check"]) < 6e-3
    assert found["lost"]["found"][0]["peer"] == 1
    assert found["lost"]["found"][1] is None
    out = capsys.readouterr().out
    assert "nccl publish" in out
    assert "ok in" in out


def test_a_step_that_takes_too_long_ends_all_and_says_so(tmp_path, capsys):
    file = tmp_path / "dcp.json"
    began = time.monotonic()
    assert dcp.main(["--ranks", "2", "--dry-run", "--json", str(file), "--step", "0.01"]) == 1
    assert time.monotonic() - began < 60
    found = json.loads(file.read_text())["2-dry"]
    assert not found["ok"]
    assert "not done after" in found["problems"][0]
    assert "NOT ok" in capsys.readouterr().out


def bench(*arguments):
    options = {"ranks": 2, "virtual": 0, "heads": 12, "interleave": 1, "commit": "abc", "dry_run": False, "json": None}
    return dcp.Bench(dcp.argparse.Namespace(**options))


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"seconds": 1.0, "peer": None, "region": None, "text": "no error"},
        {"seconds": 1.0, "peer": 0, "region": "q", "text": "another rank's name"},
        {"seconds": 30.0, "peer": 1, "region": "q", "text": "too late"},
    ],
)
def test_a_rank_that_is_not_told_is_a_problem(answer):
    one = bench()
    one._lost([{"seconds": 1.1, "peer": 1, "region": "q", "text": "rank 0 waited 1 s for rank 1"}, None], 1)
    assert one.document["problems"] == []
    one._lost([answer, None], 1)
    assert len(one.document["problems"]) == 1


def test_wrong_results_and_words_left_behind_are_problems():
    one, shape = bench(), work.Shape(4, 1, 64, 2)
    good = {"us": 10.0, "nccl_us": 30.0, "error_against_nccl": 4e-3, "armed": True}
    one._measured(shape, [good, {**good, "us": 12.0}])
    assert one.document["problems"] == []
    assert (one.document["rows"][0]["us"], one.document["rows"][0]["speedup"]) == (12.0, 2.5)
    for bad in ({"error_against_nccl": 0.5}, {"error_against_nccl": float("nan")}, {"armed": False}):
        before = len(one.document["problems"])
        one._measured(shape, [good, {**good, **bad}])
        assert len(one.document["problems"]) == before + 1
    before = len(one.document["problems"])
    one._measured(shape, [{"us": 9.0, "armed": True, "nccl_error": "no capture"}, good])
    assert (one.document["rows"][-1]["us"], "nccl_us" in one.document["rows"][-1]) == (10.0, False)
    assert len(one.document["problems"]) == before + 1
    case = {"case": "d2", "error": 1e-3, "zeros": True, "armed": True}
    one._checked([[case], [case]])
    before = len(one.document["problems"])
    for bad in ({"error": 0.1}, {"zeros": False}, {"armed": False}):
        one._checked([[case], [{**case, **bad}]])
    assert len(one.document["problems"]) == before + 3


def test_shapes_rotate_over_an_even_number_of_layers():
    for rows, q, context in ((1, 1, 32768), (4, 4, 131072), (64, 1, 131072)):
        for ranks in (2, 4, 8):
            shape = work.Shape(rows, q, context, ranks)
            assert shape.layers % 2 == 0
            assert shape.layers == 24 or shape.layers * shape.bytes >= 320 << 20
            assert shape.local == -(-context // ranks)


def test_ranks_draw_the_same_step():
    """What all ranks must agree on is drawn alike; gates, weights and their positions' slots are their own."""
    shape = work.Shape(2, 2, 200, 2, heads=1)
    one, two = (work.Layer(shape, rank, 3, "cpu") for rank in range(2))
    assert torch.equal(one.projected[:, :2112], two.projected[:, :2112])
    assert torch.equal(one.table, two.table)
    assert not torch.equal(one.projected[:, 2112:], two.projected[:, 2112:])
    assert not torch.equal(one.weights.W_UV, two.weights.W_UV)
    assert torch.equal((one.slots >= 0).int() + (two.slots >= 0).int(), torch.ones(2, dtype=torch.int32))
    assert not bool((one.cache & 0x7F == 0x7F).any())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_a_dry_run():
    with pytest.raises(ToolchainError, match="no GPU"):
        dcp.main(["--ranks", "2"])
    with pytest.raises(SystemExit):
        dcp.main(["--virtual", "2", "--dry-run"])
