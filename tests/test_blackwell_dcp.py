"""Context-parallel layers on a fake Blackwell: which object each rank loads, and what its core is given."""

import pytest
import torch
from fake_blackwell import BlackwellBench
from fake_cuda import fake_build
from fake_runtime import step

from k3dsl import CompileCache, Deployment, MlaDims
from k3dsl.nvidia import DcpBox, virtual_step
from k3dsl.nvidia.core import tokenspeed
from k3dsl.nvidia.prepared_dcp import PreparedDcp

DIMS, RANKS, INTERLEAVE = MlaDims.kimi_k3(8), 8, 16


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """All ranks' layers, prepared, with their boxes and caches."""
    plan = Deployment(DIMS, "sm_100a", batches=(8,), queries=(1, 4), dcp=RANKS, interleave=INTERLEAVE)
    store = CompileCache(tmp_path_factory.mktemp("objects"))
    for key in plan.keys():  # noqa: SIM118 - a method, not a dict's
        store.get_or_build(key, fake_build)
    bench = BlackwellBench(plan, store)
    boxes = DcpBox.virtual(RANKS, heads=DIMS.heads, device="cpu", interleave=INTERLEAVE)
    found = [
        bench.layer(seed=r, dcp=box, query_scratch=torch.zeros(64, DIMS.heads, 576, dtype=torch.uint8))
        for r, box in enumerate(boxes)
    ]
    caches = [bench.kv() for _ in found]
    for layer, kv in zip(found, caches, strict=True):
        layer.prepare_cache(kv)
    return bench, boxes, found, caches


def test_every_rank_has_its_own_object_where_tokens_differ(layers):
    bench, _, found, _ = layers
    assert all(type(layer) is PreparedDcp for layer in found)
    for rank, layer in enumerate(found):
        plain, verify = layer._steps[8, 1].core, layer._steps[8, 4].core
        assert (plain.key.heads, plain.key.lse, plain.key.ranks) == (96, True, 1)
        assert (verify.key.ranks, verify.key.rank, verify.key.interleave) == (RANKS, rank, INTERLEAVE)
        assert (verify.key.pack, verify.key.lse) == (True, True)
        assert verify.work == tokenspeed.work(
            "sm_100a", heads=96, q=4, requests=2, max_context=16384, sm_count=148, pack=True
        )
    names = {key.digest: key for key in bench.plan.keys() if key.kernel == "mla_tokenspeed"}  # noqa: SIM118
    # at q=1 one for all ranks, at q=4 one for each
    assert len(names) == 1 + RANKS


def test_a_step_binds_local_lengths_and_whole_ones(layers):
    bench, boxes, found, caches = layers
    calls = [
        {**step(DIMS, 8, 4, width=2), "cache": kv, "totals": torch.full((2,), 9, dtype=torch.int32)} for kv in caches
    ]
    bench.fake.launches.clear()
    virtual_step(found, calls, q=4)
    for layer, call, box in zip(found, calls, boxes, strict=True):
        core = layer._steps[8, 4].core
        assert core._lengths.data == call["lengths"].data_ptr()
        assert core._bounds.data == call["totals"].data_ptr()
        assert box.rows_lse.data_ptr() in {getattr(v, "data", 0) for v in core._plan._values}
    virtual_step(
        found, [{**c, **step(DIMS, 8, 1, width=2), "totals": torch.full((8,), 9, dtype=torch.int32)} for c in calls]
    )
    for layer in found:
        core = layer._steps[8, 1].core
        assert core._bounds.data == core._lengths.data  # one token sees every key of its shard
