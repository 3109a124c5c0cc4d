"""PreparedMla on a driver in Python: what is refused, by name, before anything is launched."""

import pytest
import torch
from fake_runtime import Bench, prepared, run, step

from k3dsl import ConfigError, Deployment, MlaDims, MlaWeights, NotPrepared
from k3dsl.checks import step_problems
from k3dsl.nvidia import pad_requests

DIMS = MlaDims.kimi_k3(8)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path, Deployment(DIMS, target="sm_90a", batches=(1, 4, 8, 32), queries=(1, 4)))


def test_unprepared_shape_names_what_is_near_and_the_argument(bench):
    layer, kv = prepared(bench)
    with pytest.raises(NotPrepared) as caught:
        run(layer, kv, step(DIMS, 7))
    text = str(caught.value)
    assert "(7, 1) is not prepared" in text
    assert "Nearest prepared: (8, 1), (4, 1), (1, 1)" in text
    assert "batches=(..., 7)" in text
    with pytest.raises(NotPrepared, match=r"queries=\(\.\.\., 2\)"):
        run(layer, kv, step(DIMS, 8, 2), q=2)
    with pytest.raises(NotPrepared, match="must be a multiple of q=3"):
        run(layer, kv, step(DIMS, 8), q=3)
    assert bench.fake.launches == []


BAD_STEPS = {
    "projected dtype": ("projected", lambda t: t.half(), "projected is float16, must be bfloat16"),
    "projected narrow": ("projected", lambda t: t[:, :3640].clone(), "axis 1 must be 3648 or more"),
    "projected transposed": ("projected", lambda t: t.T.contiguous().T, "the last must be 1"),
    "projected unaligned": ("projected", lambda t: _shifted(t), "must be 16-byte aligned"),
    "projected odd pitch": ("projected", lambda t: torch.zeros(8, 3650).bfloat16()[:, :3648], "multiple of 8"),
    "out strided": ("out", lambda t: torch.zeros(8, 1600).bfloat16()[:, :1536], "must be contiguous"),
    "out rows": ("out", lambda t: t[:7], "axis 0 must be 8"),
    "slots dtype": ("slots", lambda t: t.int(), "slots is int32, must be int64"),
    "slots short": ("slots", lambda t: t[:7], "axis 0 must be 8 or more"),
    "table dtype": ("block_table", lambda t: t.long(), "block_table is int64, must be int32"),
    "table rank": ("block_table", lambda t: t[0].repeat(3), r"must be \[8, width\]"),
    "lengths dtype": ("lengths", lambda t: t.long(), "lengths is int64, must be int32"),
    "lengths strided": ("lengths", lambda t: torch.ones(16, dtype=torch.int32)[::2], "the last must be 1"),
    "lengths device": ("lengths", lambda t: t.to("meta"), "lengths is on meta, must be on cpu"),
}


def _shifted(tensor):
    wide = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    return wide[4 : 4 + tensor.numel()].view(tensor.shape)


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_tensors_are_refused_before_any_launch(bench, name):
    layer, kv = prepared(bench)
    which, change, message = BAD_STEPS[name]
    if "device" not in name:  # on a GPU no other device looks like it; CPU and meta look alike
        run(layer, kv, step(DIMS, 8))  # the good layout is known
    bench.fake.launches.clear()
    tensors = step(DIMS, 8)
    tensors[which] = change(tensors[which])
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            run(layer, kv, tensors)
    assert bench.fake.launches == []


def test_every_problem_of_a_step_is_in_one_error(bench):
    layer, kv = prepared(bench)
    tensors = step(DIMS, 8)
    tensors["slots"], tensors["lengths"] = tensors["slots"].int(), tensors["lengths"].float()
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*slots is int32.*lengths is float32"):
        run(layer, kv, tensors)


BAD_CACHES = {
    "dtype": (lambda: torch.zeros(4, 64, 576), r"cache is torch.float32 \[4, 64, 576\], must be"),
    "width": (lambda: torch.zeros(4, 64, 640, dtype=torch.uint8), "must be"),
    "ds_mla": (lambda: torch.zeros(4, 64, 656, dtype=torch.uint8), "fp8 or bf16"),
    "page": (lambda: torch.zeros(4, 48, 576, dtype=torch.uint8), "pages of 48 tokens, must be one of 32, 64, 128"),
    "token stride": (lambda: torch.zeros(4, 64, 584, dtype=torch.uint8)[:, :, :576], "multiples of 16"),
    "device": (lambda: torch.zeros(4, 64, 576, dtype=torch.uint8, device="meta"), "cache is on meta, must be on cpu"),
    "address": (lambda: torch.zeros(4 * 64 * 576 + 16, dtype=torch.uint8)[8:-8].view(4, 64, 576), "16-byte aligned"),
    "none": (lambda: None, "cache is NoneType"),
    "scratch": (lambda: torch.zeros(4, 64, 576, dtype=torch.bfloat16), "for a bf16 cache"),
}


@pytest.mark.parametrize("name", BAD_CACHES)
def test_a_cache_that_is_not_served_is_refused(bench, name):
    layer = bench.layer()
    make, message = BAD_CACHES[name]
    with pytest.raises(ConfigError, match=message):
        layer.prepare_cache(make())
    assert bench.fake.launches == []
    with pytest.raises(ConfigError, match="call prepare_cache"):
        run(layer, bench.kv(), step(DIMS, 8))


def test_weights_of_another_model_are_refused(bench):
    other = MlaWeights.random(MlaDims(heads=12, q_lora=768))
    with pytest.raises(
        ConfigError, match=r"q_b_proj.weight is bfloat16 \[2304, 768\], must be bfloat16 \[2304, 1536\]"
    ):
        bench.layer(attention=other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"core": "flash"}, r"core='flash' must be auto or one of hopper on sm_90a"),
        ({"core": "trtllm"}, "must be auto or one of hopper"),
        ({"queries": (9,)}, "9 must be an int from 1 to 8"),
        ({"pitches": {65: 3648}}, "65 must be an int from 1 to 64"),
        ({"pitches": {8: 3640}}, r"pitches\[8\]=3640 must be a multiple of 8, 3648 or more"),
        ({"dcp": object()}, "must be None"),
        ({"max_context": 0}, "max_context=0"),
    ],
)
def test_bad_constructor_arguments(bench, changes, message):
    with pytest.raises(ConfigError, match=message):
        bench.layer(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.ones(4, dtype=torch.int64)}, "lengths is int64, must be int32"),
        ({"lengths": torch.ones(8, dtype=torch.int32)[::2]}, "lengths has strides"),
        ({"lengths": torch.ones(4, dtype=torch.int32, device="meta")}, "lengths is on meta"),
        ({"block_table": torch.zeros(4, 3, dtype=torch.int64)}, "block_table is int64, must be int32"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32).t()}, "block_table has strides"),
    ],
)
def test_stock_core_refuses_metadata_that_it_would_misread(bench, changes, message):
    layer, kv = prepared(bench)
    tensors = {name: step(DIMS, 4)[name] for name in ("block_table", "lengths")}
    with pytest.raises(ConfigError, match=message):
        layer.stock_core(kv, **{**tensors, **changes}, batch=4)
    assert bench.fake.launches == []


def test_a_scratch_that_is_no_tensor_and_pages_of_another_plan_are_refused(bench):
    with pytest.raises(ConfigError, match="query_scratch is NoneType"):
        bench.layer(query_scratch=None).prepare_cache(bench.kv())
    with pytest.raises(ConfigError, match=r"must be \[pages, 64, 576\]"):
        bench.layer(page_size=64).prepare_cache(bench.kv(page=128))
    assert bench.fake.launches == []


@pytest.mark.parametrize("name", ["projected", "out", "slots", "block_table", "lengths", "cache"])
@pytest.mark.parametrize("value", [None, [1], torch.tensor(1)], ids=["none", "list", "scalar"])
def test_what_is_no_tensor_is_named(bench, name, value):
    layer, kv = prepared(bench)
    if name == "cache" and isinstance(value, torch.Tensor):
        return run_refused(layer, {**step(DIMS, 8), "cache": value}, "is not the one that was prepared")
    says = f"{name} has shape" if isinstance(value, torch.Tensor) else f"{name} is {type(value).__name__}, must be a"
    return run_refused(layer, {**step(DIMS, 8), "cache": kv, name: value}, says)


@pytest.mark.parametrize("name", ["block_table", "lengths"])
def test_metadata_that_cannot_be_padded_is_named(bench, name):
    layer, kv = prepared(bench)
    given = {**step(DIMS, 8), "cache": kv}
    run_refused(layer, {**given, name: given[name][None]}, f"{name} has shape .* must have")


def run_refused(layer, given, says):
    start = len(layer._runtime.driver.launches)
    with pytest.raises(ConfigError, match=says):
        layer.run(**given)
    assert len(layer._runtime.driver.launches) == start


@pytest.mark.parametrize(("name", "shape"), [("projected", (4, 3648)), ("block_table", (4, 3))])
def test_row_strides_that_kernels_cannot_hold_are_refused(name, shape):
    """They count in 32 bits."""
    meta, tensors = torch.device("meta"), {n: t.to("meta") for n, t in step(DIMS, 4).items()}
    dtype = tensors[name].dtype
    for stride, refused in ((2**31 - 8, False), (2**31, True)):
        tensors[name] = torch.empty_strided(shape, (stride, 1), dtype=dtype, device=meta)
        bad = step_problems(DIMS, 4, 1, meta, **tensors)
        assert bad == ([f"{name} has a row stride of {stride} elements, must be below 2^31"] if refused else [])


def test_a_known_layout_lets_no_other_memory_in(bench):
    layer, kv = prepared(bench)
    tensors = step(DIMS, 8)
    run(layer, kv, tensors)
    bench.fake.launches.clear()
    with pytest.raises(ConfigError, match="cache is NoneType, must be a tensor"):
        run(layer, None, tensors)
    kv.data = torch.zeros_like(kv)  # the tensor that was bound, and other memory
    with pytest.raises(ConfigError, match="is not the one that was prepared"):
        run(layer, kv, tensors)
    with pytest.raises(ConfigError, match=r"q=\[1\] must be an int"):
        run(layer, kv, tensors, q=[1])
    assert bench.fake.launches == []


def test_stock_core_names_what_is_no_tensor(bench):
    layer, kv = prepared(bench)
    one = step(DIMS, 8)
    good = {"cache": kv, "block_table": one["block_table"], "lengths": one["lengths"]}
    for name in good:
        with pytest.raises(ConfigError, match=f"{name} is list, must be a tensor"):
            layer.stock_core(**{**good, name: [1]}, batch=8)
    with pytest.raises(ConfigError, match=r"lengths has shape \[\], must have an axis"):
        layer.stock_core(**{**good, "lengths": torch.tensor(1)}, batch=8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((4, None, torch.ones(2)), "block_table is NoneType"), ((4, torch.ones(2, 3), [1]), "lengths is list")],
)
def test_padding_names_what_is_no_tensor(arguments, says):
    with pytest.raises(ConfigError, match=says):
        pad_requests(*arguments)
