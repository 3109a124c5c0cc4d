"""PreparedMla on a driver in Python: every launch of `run`, what is shared, what is refused and when."""

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_runtime import STREAM, Bench, prepared, run, step

from k3dsl import (
    CacheMiss,
    CaptureError,
    CompileCache,
    ConfigError,
    Deployment,
    LaunchError,
    MlaDims,
    MlaWeights,
    NotPrepared,
)
from k3dsl.nvidia import query as queries
from k3dsl.nvidia import value as values
from k3dsl.nvidia.core import hopper
from k3dsl.nvidia.layer import shape_keys

DIMS = MlaDims.kimi_k3(8)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path, Deployment(DIMS, target="sm_90a", batches=(1, 4, 8, 32), queries=(1, 4)))


def values_of(bench, keys):
    return [
        launch.values(key.params)
        for launch, key in zip(bench.fake.launches, (keys.query, keys.core, keys.merge, keys.value), strict=True)
    ]


@pytest.mark.parametrize(("rows", "q"), [(1, 1), (4, 1), (4, 4), (8, 4), (32, 1), (32, 4)])
def test_four_launches_with_their_geometry_and_every_argument(bench, rows, q):
    layer, kv = prepared(bench)
    tensors = step(DIMS, rows, q)
    run(layer, kv, tensors, q)

    keys = shape_keys(target="sm_90a", heads=12, kv_format="fp8", page=64, core="hopper", rows=rows, q=q)
    requests = rows // q
    expected = [
        queries.geometry(keys.query, heads=12, rows=rows),
        hopper.geometry(keys.core, requests=requests, sm_count=132),
        hopper.merge_geometry(keys.merge, keys.core, requests=requests),
        values.geometry(keys.value, rows=rows),
    ]
    launches = bench.fake.launches
    assert [(x.grid, x.block, x.cluster, x.smem, x.pdl) for x in launches] == [
        (x.grid, x.block, x.cluster, x.smem, x.pdl) for x in expected
    ]
    assert {x.stream for x in launches} == {STREAM}
    assert all(x.pdl for x in launches)

    query, core, merge, value = values_of(bench, keys)
    weights = layer._attention
    address = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    space = hopper.workspace(keys.core, requests=requests, sm_count=132)
    assert query == {
        "projected": address["projected"],
        "q_norm": weights.q_a_layernorm.weight.data_ptr(),
        "kv_norm": weights.kv_a_layernorm.weight.data_ptr(),
        "q_b": weights.q_b_proj.weight.data_ptr(),
        "w_uk": weights.W_UK_T.data_ptr(),
        "q_scale_inv": weights._q_scale_inv.data_ptr(),
        "k_scale_inv": weights._k_scale_inv.data_ptr(),
        "slots": address["slots"],
        "cache": kv.data_ptr(),
        "query": layer._scratch.data_ptr(),
        "rows": rows,
        "row_pitch": DIMS.pitch,
        "page_shift": 6,
        "uk_head_stride": 256 * 512,
        "uk_stride": 512,
        "page_stride": 64 * 576,
        "token_stride": 576,
        "eps": pytest.approx(1e-5),
    }
    maps = {name: bench.fake.tensor_map(core.pop(name)) for name in ("kv", "kv_tail", "query", "query_tail")}
    assert maps["kv"].address == maps["kv_tail"].address == kv.data_ptr()
    assert maps["query"].address == maps["query_tail"].address == layer._scratch.data_ptr()
    assert maps["kv"].dims == (576, 64, 6)
    assert maps["kv"].strides_bytes == (576, 64 * 576)
    assert maps["query"].dims == (576, rows * 12)
    assert core.pop("scale_log2") == pytest.approx(192**-0.5 * 0.5 * 0.25 * 1.4426950408889634)
    partial, stats = core["partial"], core["stats"]
    assert core == {
        "lengths": address["lengths"],
        "table": address["block_table"],
        "partial": partial,
        "stats": stats,
        "table_stride": 3,
        "requests": requests,
        "splits": hopper.splits(keys.core, 132),
        "slots": space.slots,
    }
    assert merge == {
        "partial": partial,
        "stats": stats,
        "lengths": address["lengths"],
        "out": layer._latent.data_ptr(),
        "lse": 0,
        "requests": requests,
        "splits": core["splits"],
        "slots": space.slots,
        "columns": 12 * q,
        "out_scale": 0.25,
    }
    assert value == {
        "latent": layer._latent.data_ptr(),
        "weight": weights.W_UV.data_ptr(),
        "gate": address["projected"] + 2 * 2112,
        "lengths": address["lengths"],
        "out": address["out"],
        "rows": rows,
        "q": q,
        "head_stride": 256 * 512,
        "v_stride": 512,
        "gate_pitch": DIMS.pitch,
    }
    assert bench.fake.cuda.errors == []


def test_bf16_cache_has_no_scales_and_other_strides(tmp_path):
    plan = Deployment(MlaDims.kimi_k3(16), target="sm_90a", kv_format="bf16", page_size=128, batches=(8,))
    bench = Bench(tmp_path, plan)
    layer, kv = bench.layer(), bench.kv(gap=16)
    layer.prepare_cache(kv)
    bench.fake.launches.clear()
    run(layer, kv, step(plan.dims, 8))
    keys = shape_keys(target="sm_90a", heads=6, kv_format="bf16", page=128, core="hopper", rows=8, q=1)
    query, core, merge, _ = values_of(bench, keys)
    assert (query["page_stride"], query["token_stride"], query["page_shift"]) == (144 * 576, 576, 7)
    assert bench.fake.tensor_map(core["kv"]).strides_bytes == (1152, 144 * 1152)
    assert core["scale_log2"] == pytest.approx(192**-0.5 * 1.4426950408889634)
    assert merge["out_scale"] == 1.0


def test_a_step_rewrites_addresses_and_strides_only(bench):
    layer, kv = prepared(bench)
    first, second = step(DIMS, 8), step(DIMS, 8, width=9)
    second["projected"] = torch.zeros(8, DIMS.pitch + 64, dtype=torch.bfloat16)[:, : DIMS.pitch]
    second["block_table"] = torch.zeros(8, 40, dtype=torch.int32)[:, 3:12]
    run(layer, kv, first)
    run(layer, kv, second)
    before, after = bench.fake.launches[:4], bench.fake.launches[4:]
    assert [(x.grid, x.symbol, x.smem) for x in before] == [(x.grid, x.symbol, x.smem) for x in after]
    keys = shape_keys(target="sm_90a", heads=12, kv_format="fp8", page=64, core="hopper", rows=8, q=1)
    del bench.fake.launches[:4]
    query, core, merge, value = values_of(bench, keys)
    assert (query["row_pitch"], value["gate_pitch"], core["table_stride"]) == (DIMS.pitch + 64, DIMS.pitch + 64, 40)
    assert core["table"] == second["block_table"].data_ptr()
    assert core["lengths"] == merge["lengths"] == value["lengths"] == second["lengths"].data_ptr()
    assert value["out"] == second["out"].data_ptr()


def test_run_neither_loads_nor_encodes_nor_asks_the_driver(bench):
    layer, kv = prepared(bench)
    before = dict(bench.fake.calls)
    for rows, q in ((1, 1), (32, 4), (8, 1), (1, 1)):
        run(layer, kv, step(DIMS, rows, q), q)
    made = {name: count - before.get(name, 0) for name, count in bench.fake.calls.items()}
    assert {name for name, count in made.items() if count} == {"cuLaunchKernelEx"}
    assert made["cuLaunchKernelEx"] == 16


def test_short_metadata_is_padded_with_empty_requests(bench):
    layer, kv = prepared(bench)
    tensors = step(DIMS, 8)
    tensors["lengths"], tensors["block_table"] = torch.full((5,), 7, dtype=torch.int32), torch.ones(6, 2).int()
    run(layer, kv, tensors)
    keys = shape_keys(target="sm_90a", heads=12, kv_format="fp8", page=64, core="hopper", rows=8, q=1)
    _, core, _, value = values_of(bench, keys)
    assert core["lengths"] == value["lengths"] != tensors["lengths"].data_ptr()
    assert core["requests"] == 8


def test_preparing_launches_every_shape_once_and_waits(bench):
    layer = bench.layer()
    layer.prepare_cache(bench.kv())
    assert len(bench.fake.launches) == 4 * len(layer.shapes) == 4 * 7
    assert bench.synchronized == 1
    keys = shape_keys(target="sm_90a", heads=12, kv_format="fp8", page=64, core="hopper", rows=1, q=1)
    del bench.fake.launches[4:]
    assert values_of(bench, keys)[1]["requests"] == 1


def test_the_type_of_p_is_the_callers(bench):
    with pytest.raises(CacheMiss, match=r"params\.p: 'e4m3' wanted, 'f16' there"):
        bench.layer(p_dtype="e4m3").prepare_cache(bench.kv())
    with pytest.raises(ConfigError, match="p_dtype='f8' must be one of auto, f16, e4m3, bf16"):
        bench.layer(p_dtype="f8")
    with pytest.raises(ConfigError, match="p='bf16' must be one of f16, e4m3 for a cache of kv='fp8'"):
        bench.layer(p_dtype="bf16").prepare_cache(bench.kv())


def test_layers_share_modules_scratch_and_workspace(bench):
    one, two = bench.layer(seed=0), bench.layer(seed=1)
    first, second = bench.kv(), bench.kv(pages=9)
    one.prepare_cache(first)
    loaded = bench.fake.calls["cuLibraryLoadData"]
    assert loaded == len(replace(bench.plan, epilogues=()).keys())
    two.prepare_cache(second)
    assert bench.fake.calls["cuLibraryLoadData"] == loaded
    bench.fake.launches.clear()
    keys = shape_keys(target="sm_90a", heads=12, kv_format="fp8", page=64, core="hopper", rows=8, q=1)
    found = []
    for layer, kv in ((one, first), (two, second)):
        bench.fake.launches.clear()
        run(layer, kv, step(DIMS, 8))
        found.append(values_of(bench, keys))
    (query, core, merge, _), (query2, core2, merge2, _) = found
    assert query["query"] == query2["query"]
    assert (core["partial"], core["stats"]) == (core2["partial"], core2["stats"])
    assert merge["out"] != merge2["out"]
    assert query["q_b"] != query2["q_b"]


def test_modules_live_as_long_as_a_layer_and_no_longer(bench):
    one, two = bench.layer(seed=0), bench.layer(seed=1)
    one.prepare_cache(bench.kv())
    two.prepare_cache(bench.kv())
    kinds = len(bench.fake.cuda.loaded)
    del one
    gc.collect()
    assert len(bench.fake.cuda.loaded) == kinds
    del two
    gc.collect()
    assert bench.fake.cuda.loaded == {}


def test_a_cache_that_moves_keeps_what_graphs_may_replay(bench):
    layer, kv = prepared(bench)
    kinds = len(bench.fake.cuda.loaded)
    moved = bench.kv(pages=11, page=32)
    with pytest.raises(Exception, match="page"):
        # Pages of 32 are another kernel, and the sealed cache has none of those: nothing may change.
        layer.prepare_cache(moved)
    run(layer, kv, step(DIMS, 8))
    again = bench.kv(pages=11)
    layer.prepare_cache(again)
    assert len(bench.fake.cuda.loaded) == kinds
    bench.fake.launches.clear()
    run(layer, again, step(DIMS, 8))
    keys = shape_keys(target="sm_90a", heads=12, kv_format="fp8", page=64, core="hopper", rows=8, q=1)
    query, core, _, _ = values_of(bench, keys)
    assert query["cache"] == again.data_ptr()
    assert bench.fake.tensor_map(core["kv"]).dims == (576, 64, 11)
    with pytest.raises(ConfigError, match=r"prepare_cache\(kv_cache\) when the cache moves"):
        run(layer, kv, step(DIMS, 8))


def test_preparing_the_same_cache_again_does_nothing(bench):
    layer, kv = prepared(bench)
    before = dict(bench.fake.calls)
    layer.prepare_cache(kv)
    layer.prepare_cache(kv[:])
    assert dict(bench.fake.calls) == {**before, "cuStreamIsCapturing": before["cuStreamIsCapturing"] + 2}


def test_a_layer_does_not_keep_the_memory_of_a_cache(bench):
    layer, kv = prepared(bench)
    gone = weakref.ref(kv)
    other = bench.kv(pages=9)
    del kv
    gc.collect()
    assert gone() is None
    layer.prepare_cache(other)
    run(layer, other, step(DIMS, 8))
    run(layer, other[:], step(DIMS, 8))  # another view of the same memory


def test_stock_core_is_core_and_merge_of_the_scratch(bench):
    layer, kv = prepared(bench)
    tensors = step(DIMS, 8, 4)
    latent = layer.stock_core(kv, tensors["block_table"], tensors["lengths"], 8, q=4)
    assert [launch.block[0] for launch in bench.fake.launches] == [640, bench.fake.launches[1].block[0]]
    assert len(bench.fake.launches) == 2
    # Any kernel may be in front of the core here, and the core reads metadata before it waits: so no early start.
    assert [launch.pdl for launch in bench.fake.launches] == [False, True]
    core = bench.fake.launches[0].values(layer._steps[8, 4].core.key.params)
    assert core["lengths"] == tensors["lengths"].data_ptr()
    assert core["table"] == tensors["block_table"].data_ptr()
    assert latent.data_ptr() == layer._latent.data_ptr()
    assert latent.shape == (8, 12, 512)


def test_capture_refuses_preparation_and_stays_valid(bench):
    layer, kv = prepared(bench)
    fresh = bench.layer(seed=3)
    before = dict(bench.fake.calls)
    with bench.fake.capture(STREAM):
        with pytest.raises(CaptureError, match="prepare_cache"):
            fresh.prepare_cache(bench.kv())
        with pytest.raises(CaptureError):
            layer.prepare_cache(bench.kv(pages=7))
        with pytest.raises(CaptureError):
            bench.layer(seed=4)
        with pytest.raises(NotPrepared):
            run(layer, kv, step(DIMS, 7))
        run(layer, kv, step(DIMS, 8))
    made = {n: c - before.get(n, 0) for n, c in bench.fake.calls.items() if c != before.get(n, 0)}
    assert set(made) == {"cuLaunchKernelEx", "cuStreamIsCapturing"}
    assert bench.fake.violations == []
    fresh.prepare_cache(bench.kv())
    assert fresh.shapes == layer.shapes


def test_a_launch_that_the_driver_refuses_is_an_error(bench):
    layer, kv = prepared(bench)
    bench.fake.fail("cuLaunchKernelEx", 700)
    with pytest.raises(LaunchError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        run(layer, kv, step(DIMS, 8))


def test_a_failed_preparation_leaves_the_old_one(bench, tmp_path):
    layer, kv = prepared(bench)
    layer._store = CompileCache(tmp_path / "empty", frozen=True)
    bench.fake.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(LaunchError):
        layer.prepare_cache(bench.kv(pages=7))
    run(layer, kv, step(DIMS, 8))
    assert len(bench.fake.launches) == 4


def test_a_process_that_loads_and_runs_needs_no_compiler(tmp_path):
    """Neither the DSL nor torch's compiler stack: their import alone takes seconds."""
    Bench(tmp_path, Deployment(DIMS, target="sm_90a", batches=(8,)))
    code = f"""
import sys
import weakref
from pathlib import Path
from fake_runtime import Bench, step
from k3dsl import Deployment, MlaDims
dims = MlaDims.kimi_k3(8)
bench = Bench(Path({str(tmp_path)!r}), Deployment(dims, target="sm_90a", batches=(8,)))
layer, kv = bench.layer(), bench.kv()
layer.prepare_cache(kv)
layer.run(**step(dims, 8), cache=kv)
print(len(bench.fake.launches), bench.cache.stats().session["built"])
print(*[m for m in ("cutlass", "torch._dynamo", "torch._inductor", "triton") if m in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    out = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert out.splitlines() == ["8 0", ""]


def test_a_layer_keeps_the_weights_that_its_launches_read(bench):
    """An engine may make a weight anew at each access, give it up, or point its parameter elsewhere."""
    weights = MlaWeights.random(DIMS)
    freed = []

    def copy(tensor):
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        weakref.finalize(new.untyped_storage(), freed.append, tuple(new.shape))
        return new

    class Engine:
        W_UK_T = property(lambda self: copy(weights.W_UK_T))
        W_UV = property(lambda self: copy(weights.W_UV))

    engine = Engine()
    for field in fields(weights):
        if not hasattr(Engine, field.name):
            setattr(engine, field.name, getattr(weights, field.name))
    parameter = torch.nn.Parameter(copy(weights.q_b_proj.weight), requires_grad=False)
    engine.q_b_proj = SimpleNamespace(weight=parameter)
    layer, kv = bench.layer(attention=engine), bench.kv()
    gc.collect()
    freed.clear()
    layer.prepare_cache(kv)
    parameter.data = torch.zeros_like(parameter)
    read = set()
    for shape, one in layer._steps.items():
        bench.fake.launches.clear()
        run(layer, kv, step(DIMS, *shape), shape[1])
        query, *_, value = bench.fake.launches
        read |= {query.values(one.query.key.params)[name] for name in ("w_uk", "q_b")}
        read.add(value.values(one.value.key.params)["weight"])
    gc.collect()
    assert (2304, 1536) not in freed
    held = {t.data_ptr() for s in layer._steps.values() for t in (*s.query._hold, *s.value._hold)}
    assert read <= held


def test_a_layer_that_did_not_get_warm_is_not_bound(bench, monkeypatch):
    """An error of the warm-up that went unseen at the second call would come back in the first capture."""
    layer, kv = prepared(bench)
    other = bench.kv()

    def fault():
        raise LaunchError("an illegal address")

    monkeypatch.setattr(bench.runtime, "synchronize", fault)
    with pytest.raises(LaunchError):
        layer.prepare_cache(other)
    monkeypatch.undo()
    run(layer, kv, step(DIMS, 4))
    with pytest.raises(ConfigError, match="not the one that was prepared"):
        run(layer, other, step(DIMS, 4))
    bench.fake.launches.clear()
    layer.prepare_cache(other)
    assert len(bench.fake.launches) == 4 * len(layer.shapes)
    run(layer, other, step(DIMS, 4))
