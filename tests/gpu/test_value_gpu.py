"""MlaValue on the GPU against the oracle: every batch size, padded requests, poison around what is read and written."""

import harness
import pytest
import torch
from value_cases import INF, NAN, Case, check, inputs

from k3dsl.nvidia import value as facts
from k3dsl.nvidia.driver import LaunchPlan

pytestmark = pytest.mark.gpu

HEADS = (6, 12, 96)
#: What tests/gpu/build_objects.py must have built.
GPU_KEYS = [facts.ValueKey(heads, tile) for heads in (1, *HEADS, 128) for tile in facts.TILES]


def plan_of(case: Case, given: dict) -> LaunchPlan:
    launch = facts.geometry(case.key, rows=case.rows)
    return LaunchPlan(harness.function(case.key), launch, case.key.params, **facts.arguments(case.key, **given))


def run(case: Case, given: dict) -> torch.Tensor:
    plan_of(case, given).launch(harness.stream())
    torch.cuda.synchronize()
    return given["out"]


ROWS = [
    *(Case(rows, heads=heads, q=q) for heads in HEADS for rows in (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64)
      for q in (1, 4) if rows % q == 0),
    *(Case(rows, heads=12, lengths=kind) for rows in (1, 16, 64) for kind in ("all", "none")),
    *(Case(rows, heads=heads, tile=tile) for rows, tile in ((1, 32), (16, 32), (64, 16)) for heads in (12, 128)),
    Case(5, heads=1), Case(64, heads=1, q=8), Case(60, heads=12, q=3), Case(200, heads=12),
]  # fmt: skip


@pytest.mark.parametrize("case", ROWS, ids=lambda c: c.name)
def test_values(case):
    given = inputs(case, "cuda")
    check(case, given, run(case, given))


@pytest.mark.parametrize("rows", [1, 15, 17, 64])
def test_rows_beyond_the_batch_are_neither_read_nor_written(rows):
    case = Case(rows, heads=12, lengths="all")
    given = inputs(case, "cuda")
    want = run(case, given).clone()
    wide = {
        n: torch.full((rows + 40, *given[n].shape[1:]), NAN, dtype=torch.bfloat16).cuda() for n in ("latent", "out")
    }
    wide["latent"][:rows] = given["latent"]
    given["latent"] = wide["latent"][:rows]
    packed = torch.full((rows + 40, 2112 + 12 * 128), NAN, dtype=torch.bfloat16, device="cuda")
    packed[:rows, 2112:] = given["gate"]
    given["gate"] = packed[:rows, 2112:]
    given["out"] = wide["out"][:rows]
    assert torch.equal(run(case, given), want)
    assert wide["out"][rows:].isnan().all()


def test_a_row_does_not_depend_on_the_others():
    case = Case(64, heads=12, lengths="all")
    given = inputs(case, "cuda")
    want = run(case, given).clone()
    given["latent"][7], given["latent"][40] = NAN, INF
    got = run(case, given)
    rest = [b for b in range(64) if b not in (7, 40)]
    assert torch.equal(got[rest], want[rest])
    assert got[7].isnan().all()


def test_gates_over_their_whole_range():
    """Every bf16 as a gate: 65536 of them over 64 rows of 1024 (8 heads of the 12)."""
    case = Case(64, heads=12, lengths="all")
    given = inputs(case, "cuda")
    every = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).reshape(64, 1024)
    given["gate"][:, :1024] = every
    got = run(case, given)
    silent = every.isnan()
    assert torch.equal(got[:, :1024].isnan(), silent)
    given["gate"][:, :1024] = every.masked_fill(silent, 0.0)
    check(case, given, run(case, given))


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_replays_of_a_graph_are_bit_equal_and_follow_the_lengths(rows):
    case = Case(rows, heads=12, q=1)
    given = inputs(case, "cuda")
    plan = plan_of(case, given)
    plan.launch(harness.stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            plan.launch(harness.stream())
    graph.replay()
    torch.cuda.synchronize()
    first = given["out"].clone()
    check(case, given, first)
    for _ in range(100):
        given["out"].fill_(NAN)
        graph.replay()
        assert torch.equal(given["out"], first)
    given["lengths"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (given["out"].view(torch.int16) == 0).all()


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_reads_nothing_before_the_kernel_before_has_written_it(rows):
    """Latents, gates and lengths change right before every launch, which starts early (programmatic launch)."""
    case = Case(rows, heads=12, lengths="all")
    given = inputs(case, "cuda")
    plan = plan_of(case, given)
    sets = [inputs(case, "cuda", seed=s) for s in range(3)]
    want = []
    for other in sets:
        for name in ("latent", "gate", "lengths"):
            given[name].copy_(other[name])
        torch.cuda.synchronize()
        want.append(run(case, given).clone())
    for i in range(60):
        for name in ("lengths", "gate", "latent"):
            given[name].copy_(sets[i % 3][name])
        plan.launch(harness.stream())
        assert torch.equal(given["out"], want[i % 3])
