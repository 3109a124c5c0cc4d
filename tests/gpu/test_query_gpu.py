"""MlaQuery on the GPU against the oracle: every batch size, format and build; poison around what must stay as it is."""

import harness
import pytest
import query_cases as qc
import torch
from query_cases import QueryCase

from k3dsl import reference as ref
from k3dsl.nvidia import query as facts
from k3dsl.nvidia.driver import LaunchPlan

pytestmark = pytest.mark.gpu

#: What tests/gpu/build_objects.py must have built.
GPU_KEYS = [key for kv_format in facts.ELEMENT for key in qc.every_build(kv_format)]

ROWS = (*range(1, 9), 15, 16, 17, 31, 32, 33, 48, 63, 64)
GRID = [QueryCase(b, heads=h, kv_format=f) for f in facts.ELEMENT for h in (6, 12) for b in ROWS]
#: Every build at the rows where its tile is nearly empty, one short, full, and one over.
FORCED = [
    QueryCase(rows, heads=6, kv_format=key.kv_format, key=key, slots="all", name="forced")
    for key in GPU_KEYS
    for rows in sorted({1, max(1, key.tile - 1), key.tile, min(64, key.tile + 1)})
]
EDGES = [
    QueryCase(7, page=32, gap=64, token_gap=64, pitch=4096, slots="first", name="strides"),
    QueryCase(40, page=128, gap=576 * 7, pitch=2112, slots="all", name="strides"),
    QueryCase(20, page=128, gap=576 * 7, pitch=2880, slots="first", kv_format="bf16", name="strides"),
    QueryCase(64, page=32, slots="all", kv_format="bf16", name="many_pages"),
    QueryCase(3, slots="none", name="no_insert"),
    QueryCase(30, slots="none", name="no_insert"),
    QueryCase(5, copied_uk=True, name="own_w_uk"),
    QueryCase(33, copied_uk=True, kv_format="bf16", name="own_w_uk"),
    QueryCase(20, q_scale=0.25, k_scale=2.0, eps=1e-3, name="scales"),
    QueryCase(4, q_scale=1e-3, k_scale=1e-3, name="saturates"),
    QueryCase(1, heads=1, name="one_head"),
    QueryCase(64, heads=1, name="one_head"),
    QueryCase(64, heads=96, name="many_waves"),
]


def plan_of(given: qc.QueryInputs) -> LaunchPlan:
    key, case = given.case.build, given.case
    launch = facts.geometry(key, heads=case.heads, rows=case.rows)
    return LaunchPlan(harness.function(key), launch, key.params, **facts.arguments(key, **given.tensors()))


def run(given: qc.QueryInputs) -> None:
    plan_of(given).launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", [*GRID, *FORCED, *EDGES], ids=lambda c: c.id)
def test_values(case):
    given = qc.inputs(case, "cuda")
    run(given)
    qc.check(given)


@pytest.mark.parametrize("kv_format", facts.ELEMENT)
@pytest.mark.parametrize("rows", [3, 8, 16, 33, 64])
def test_bad_rows_stay_in_their_rows(rows, kv_format):
    case = QueryCase(rows, kv_format=kv_format, slots="all")
    given = qc.inputs(case, "cuda", bad_rows={1: torch.nan, rows - 1: torch.inf})
    run(given)
    qc.check(given, bad_rows=(1, rows - 1))
    clean = qc.inputs(case, "cuda")
    run(clean)
    others = [b for b in range(rows) if b not in (1, rows - 1)]
    assert torch.equal(clean.query[others], given.query[others])


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_rows_do_not_depend_on_each_other(rows):
    """Row 0 of a batch is bit for bit what it is in another batch of the same build."""
    case = QueryCase(rows, slots="all")
    given, other = qc.inputs(case, "cuda"), qc.inputs(case, "cuda", seed=0)
    other.projected[1:] *= 3.0
    run(given)
    run(other)
    assert torch.equal(given.query[0], other.query[0])


@pytest.mark.parametrize("kv_format", facts.ELEMENT)
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 33, 64])
def test_repeated_launches_are_bit_equal(rows, kv_format):
    given = qc.inputs(QueryCase(rows, kv_format=kv_format), "cuda")
    run(given)
    query, cache = given.query_bytes.clone(), given.cache_bytes.clone()
    plan = plan_of(given)
    for _ in range(200):
        given.refill()
        for _ in range(3):
            plan.launch(torch.cuda.current_stream().cuda_stream)
        assert torch.equal(given.query_bytes, query)
        assert torch.equal(given.cache_bytes, cache)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_reads_nothing_before_the_kernel_before_has_written_it(rows):
    """The projection and the slots change right before every launch, which starts early (programmatic launch)."""
    given = qc.inputs(QueryCase(rows, slots="all"), "cuda")
    plan = plan_of(given)
    inputs = [(qc.inputs(given.case, "cuda", seed=s).projected.clone(), given.slots.roll(s)) for s in range(4)]
    expected = []
    for projected, slots in inputs:
        given.projected.copy_(projected)
        given.slots.copy_(slots)
        given.refill()
        run(given)
        expected.append((given.query_bytes.clone(), given.cache_bytes.clone()))
    results = []
    for i in range(100):
        projected, slots = inputs[i % 4]
        given.refill()
        given.slots.copy_(slots)
        given.projected.copy_(projected)
        plan.launch(torch.cuda.current_stream().cuda_stream)
        results.append((given.query_bytes.clone(), given.cache_bytes.clone()))
    torch.cuda.synchronize()
    for i, (query, cache) in enumerate(results):
        assert torch.equal(query, expected[i % 4][0]), f"launch {i}"
        assert torch.equal(cache, expected[i % 4][1]), f"launch {i}"


@pytest.mark.parametrize("kv_format", facts.ELEMENT)
@pytest.mark.parametrize("rows", [2, 32])
def test_graph_replay_follows_its_inputs(rows, kv_format):
    given = qc.inputs(QueryCase(rows, kv_format=kv_format, slots="all"), "cuda")
    plan = plan_of(given)
    run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch(torch.cuda.current_stream().cuda_stream)
        plan.launch(torch.cuda.current_stream().cuda_stream)
    for seed in range(1, 5):
        fresh = qc.inputs(given.case, "cuda", seed=seed)
        given.projected.copy_(fresh.projected)
        given.slots.copy_(fresh.slots)
        given.slots[0] = -1
        given.refill()
        graph.replay()
        torch.cuda.synchronize()
        qc.check(given)


@pytest.mark.parametrize("kv_format", facts.ELEMENT)
@pytest.mark.parametrize("rows", [2, 20])
def test_offsets_beyond_32_bits(rows, kv_format):
    """Pages 2^31 elements apart: byte offsets of 2^31 to 2^33. The slots are on pages 1 and 2, and end one."""
    given = qc.inputs(QueryCase(rows, kv_format=kv_format, slots="all"), "cuda")
    stride, size = 2**31 + 64, facts.ELEMENT[kv_format]
    given.cache_bytes = torch.empty((2 * stride + 64 * facts.ENTRY) * size, dtype=torch.uint8, device="cuda")
    elements = given.cache_bytes.view(given.cache.dtype)
    given.cache = elements.as_strided((3, 64, facts.ENTRY), (stride, facts.ENTRY, 1))
    given.slots.copy_(torch.arange(rows, device="cuda") + 64)
    given.slots[1::2] += 64 - 1
    given.slots[-1] = 3 * 64 - 1
    for page in given.cache:
        page.view(torch.uint8).fill_(qc.FILL)
    run(given)
    want = torch.full((3, 64, facts.ENTRY * size), qc.FILL, dtype=torch.uint8, device="cuda").view(given.cache.dtype)
    ref.insert(given.projected, given.weights, want, given.slots, kv_format)
    got = torch.stack([page.clone() for page in given.cache])
    steps = (qc.fp8_steps if kv_format == "fp8" else qc.bf16_steps)(got, want)
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 0.01
    assert (got[0].view(torch.uint8) == qc.FILL).all()
