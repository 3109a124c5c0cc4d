"""Deployments: what they refuse, their shapes and cores, and that their keys are all that a layer can ask for."""

import os
import random
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from k3dsl import ConfigError, Deployment, MlaDims
from k3dsl.nvidia.core import SERVED, choose, core_for
from k3dsl.nvidia.epilogue import EpilogueKey
from k3dsl.nvidia.layer import shape_keys
from k3dsl.nvidia.toolchain import KERNELS, compile_key, kernel_key

TP8, TP16 = MlaDims.kimi_k3(8), MlaDims.kimi_k3(16)
BASE = Deployment(TP8, target="sm_90a", batches=(8,), queries=(1,))
NO_EPILOGUES = replace(BASE, epilogues=())

#: kernel -> field of its key -> (deployment, deployment) whose keys differ in that field. A field that is not here is
#: one that nobody has thought of in Deployment.keys().
VARIED = {
    "mla_query": {
        "schedule": (BASE, replace(BASE, batches=(16,))),
        "tile": (BASE, replace(BASE, batches=(4,))),
        "kv_format": (BASE, replace(BASE, kv_format="bf16")),
    },
    "mla_value": {
        "heads": (BASE, replace(BASE, dims=TP16)),
        "tile": (BASE, replace(BASE, batches=(32,))),
    },
    "mla_hopper": {
        "heads": (BASE, replace(BASE, dims=TP16)),
        "q": (BASE, replace(BASE, queries=(4,))),
        "page": (BASE, replace(BASE, page_size=32)),
        "kv": (BASE, replace(BASE, kv_format="bf16")),
        "p": (BASE, replace(BASE, p_dtype="e4m3")),
    },
    "mla_merge": {
        "block": (BASE, replace(BASE, dims=TP16)),
        "slice": (replace(BASE, batches=(1,)), BASE),
        "groups": (replace(BASE, batches=(1,)), BASE),
        "batch": (replace(BASE, batches=(1,)), BASE),
        "partial": (BASE, replace(BASE, kv_format="bf16")),
    },
    "mla_epilogue": {
        "op": (BASE, NO_EPILOGUES),
        "format": (BASE, replace(BASE, kv_format="bf16")),
        "dtype": (BASE, replace(BASE, epilogues=("bf16", "fp16"))),
        "heads": (BASE, replace(BASE, dims=TP16)),
        "rope": (BASE, NO_EPILOGUES),
        "pe_fp8": (BASE, replace(BASE, kv_format="bf16")),
    },
}


def made(plan):
    """The keys of a plan by kernel."""
    found = {}
    for key in plan.keys():  # noqa: SIM118 - a method, not a dict's
        found.setdefault(key.kernel, []).append(key)
    return found


def test_every_field_of_every_kernel_key_is_enumerated():
    kernels = {key.kernel: type(kernel_key(key.kernel, key.params)) for key in BASE.keys()}  # noqa: SIM118
    assert set(kernels) == set(VARIED) <= set(KERNELS)
    for kernel, kind in kernels.items():
        assert {f.name for f in fields(kind)} == set(VARIED[kernel]), f"{kernel}: a field is not enumerated"


@pytest.mark.parametrize(("kernel", "field"), [(k, f) for k, names in VARIED.items() for f in names])
def test_each_field_follows_from_the_deployment(kernel, field):
    values = [{key.params[field] for key in made(plan).get(kernel, [])} for plan in VARIED[kernel][field]]
    assert values[0] != values[1]


def test_keys_cover_every_shape_that_a_layer_can_be_asked_for():
    plan = Deployment(TP8, target="sm_90a", batches=tuple(range(1, 65)), queries=(1, 2, 3, 4, 5, 8))
    known = {key.digest for key in plan.keys()}  # noqa: SIM118
    for rows, q in random.Random(0).sample(plan.shapes(), 60):
        needed = shape_keys(target="sm_90a", heads=12, kv_format="fp8", page=64, core="hopper", rows=rows, q=q)
        assert {compile_key(key, "sm_90a").digest for key in needed.all()} <= known


def test_keys_come_once_each_and_in_one_order():
    plan = Deployment(TP8, target="sm_90a", queries=(1, 4))
    keys = plan.keys()
    assert len(keys) == len(set(keys))
    assert keys == plan.keys()
    assert {key.target for key in keys} == {"sm_90a"}


def test_keys_are_the_same_in_any_process():
    code = (
        "from k3dsl import *; p = Deployment(MlaDims.kimi_k3(8), target='sm_90a', queries=(1, 4)); "
        "print(' '.join(k.digest for k in p.keys()))"
    )
    seen = set()
    for seed in ("0", "7", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "CUDA_VISIBLE_DEVICES": ""}
        seen.add(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))
    assert len(seen) == 1


def test_blackwell_has_keys_for_all_but_trtllm():
    plan = Deployment(TP8, target="sm_100a", batches=(1, 16), queries=(1,), epilogues=())
    assert {key.kernel for key in plan.keys()} == {"mla_query", "mla_tokenspeed", "mla_value"}  # noqa: SIM118
    plan = replace(plan, batches=(16,))
    assert {key.kernel for key in plan.keys()} == {"mla_query", "mla_value"}  # noqa: SIM118


def test_epilogue_keys_are_those_of_the_cache_format():
    plan = replace(BASE, epilogues=("bf16", "fp16"))
    keys = plan.epilogue_keys()
    assert [k for k in keys if k.op == "decode"] == [
        EpilogueKey("decode", "fp8", dtype, 12, rope) for dtype in ("bf16", "fp16") for rope in (False, True)
    ]
    assert {compile_key(key, "sm_90a") for key in keys} < set(plan.keys())
    assert NO_EPILOGUES.epilogue_keys() == []


def test_reference_needs_no_kernel():
    plan = Deployment(MlaDims(heads=3), target="reference", kv_format="fp8_ds_mla", page_size=5)
    assert plan.keys() == plan.epilogue_keys() == []
    assert plan.choice(8, 1).core == "reference"


def test_shapes_are_those_in_which_q_divides_rows():
    plan = Deployment(TP8, target="sm_90a", batches=(1, 4, 6, 8, 4), queries=(1, 4))
    assert plan.shapes() == ((1, 1), (4, 1), (6, 1), (8, 1), (4, 4), (8, 4))


def test_it_is_frozen_and_compares_by_value():
    plan = Deployment(TP8, target="sm_90a", batches=[1, 2], queries=range(1, 3))
    assert plan == Deployment(TP8, target="sm_90a", batches=(1, 2), queries=(1, 2))
    assert hash(plan) == hash(replace(plan))
    with pytest.raises(FrozenInstanceError):
        plan.target = "sm_100a"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "sm_90"}, "target='sm_90' must be one of sm_90a, sm_100a, sm_103a, gfx950, reference"),
        ({"target": "gfx942"}, "target='gfx942' must be one of"),
        ({"kv_format": "fp16"}, "kv_format='fp16' must be one of fp8, bf16 on sm_90a"),
        ({"kv_format": "fp8_ds_mla"}, "must be one of fp8, bf16 on sm_90a"),
        ({"target": "sm_100a", "kv_format": "bf16"}, "must be one of fp8 on sm_100a"),
        ({"page_size": 16}, "page_size=16 must be one of 32, 64, 128 on sm_90a"),
        ({"page_size": 64.0}, "page_size=64.0 must be"),
        ({"batches": ()}, "non-empty tuple"),
        ({"batches": 4}, "batches=4 must be"),
        ({"batches": (0, 65, True, 8)}, "batches: 0 must be an int from 1 to 64"),
        ({"batches": (0, 65, True, 8)}, "batches: 65 must be"),
        ({"batches": (0, 65, True, 8)}, "batches: True must be"),
        ({"queries": (9,)}, "queries: 9 must be an int from 1 to 8"),
        ({"queries": (3,)}, r"3 divides none of batches=\(8,\)"),
        ({"core": "trtllm"}, "core='trtllm' must be auto or one of hopper on sm_90a"),
        ({"core": "reference"}, "must be auto or one of hopper"),
        ({"p_dtype": "bf16"}, "p_dtype='bf16' must be auto or f16 or e4m3 for kv_format='fp8' on sm_90a"),
        ({"target": "sm_100a", "p_dtype": "f16"}, "p_dtype='f16' must be auto for kv_format='fp8' on sm_100a"),
        ({"epilogues": ("bf16", "fp8")}, "epilogues: 'fp8' must be one of bf16, fp16"),
        ({"epilogues": "bf16"}, "epilogues='bf16' must be a tuple of bf16, fp16, or empty"),
        ({"dcp": 3}, "dcp=3 must be one of 1, 2, 4, 8, 16"),
        ({"dcp": 16}, "dcp=16 with 12 heads must have 128 heads at most"),
        ({"kv_format": []}, r"kv_format=\[\] must be one of fp8, bf16"),
        ({"target": "reference", "host": "x"}, "host='x' must be one of x86-64, aarch64"),
        ({"target": "gfx950", "batches": (4,), "interleave": True}, "interleave=True must be 1 on gfx950"),
        ({"interleave": 0}, "interleave=0 must be an int from 1 to 1048576"),
        ({"max_context": 0}, "max_context=0 must be an int from 1 to 1048576"),
        ({"dims": MlaDims(heads=7)}, "dims.heads=7 must be one of 6, 12"),
        ({"dims": MlaDims(kv_lora=256)}, "dims.kv_lora=256 must be 512"),
        ({"dims": 12}, "dims=12 must be an MlaDims"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(BASE, **changes)


def test_every_problem_is_in_one_error():
    with pytest.raises(ConfigError) as caught:
        Deployment(MlaDims(heads=7), target="sm_90a", kv_format="int8", page_size=7, batches=(99,), core="x", dcp=3)
    assert "6 problems" in str(caught.value)
    for word in ("heads=7", "int8", "page_size=7", "99", "core='x'", "dcp=3"):
        assert word in str(caught.value)


def test_an_unknown_target_hides_nothing_else():
    with pytest.raises(ConfigError) as caught:
        Deployment(MlaDims(), target="sm_91", kv_format="fp7", page_size=65, batches=(0,), core="foo")
    for word in ("'sm_91'", "'fp7' must be one of bf16, fp8, fp8_ds_mla", "65 must be one of 32, 64", "0", "'foo'"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("target", "rows", "q", "core", "dcp", "chosen"),
    [
        ("sm_90a", 1, 1, "auto", 1, "hopper"),
        ("sm_90a", 64, 4, "hopper", 1, "hopper"),
        ("sm_100a", 15, 1, "auto", 1, "tokenspeed"),
        ("sm_100a", 16, 1, "auto", 1, "trtllm"),
        ("sm_103a", 16, 2, "auto", 1, "tokenspeed"),
        ("sm_103a", 64, 1, "auto", 8, "tokenspeed"),
        ("sm_100a", 1, 1, "trtllm", 1, "trtllm"),
        ("sm_100a", 64, 1, "tokenspeed", 1, "tokenspeed"),
    ],
)
def test_choice_of_the_core(target, rows, q, core, dcp, chosen):
    choice = choose(target, rows, q, core, dcp)
    assert choice.core == chosen
    assert choice.reason
    assert core_for(rows, core, q, target=target, dcp=dcp) == chosen


@pytest.mark.parametrize(
    ("target", "core", "dcp"), [("sm_90a", "trtllm", 1), ("sm_100a", "hopper", 1), ("sm_100a", "trtllm", 8)]
)
def test_a_core_that_the_target_cannot_run_is_a_value_error_with_those_that_it_can(target, core, dcp):
    with pytest.raises(ValueError, match="tokenspeed" if dcp > 1 else ", ".join(SERVED[target].cores)):
        core_for(16, core, target=target, dcp=dcp)
    with pytest.raises(ValueError, match="unknown"):
        core_for(16, "flash", target=target)


def test_without_a_device_the_automatic_choice_is_that_of_sm_100a():
    if os.path.exists("/dev/nvidia0"):
        assert core_for(16) == "hopper"
    else:
        assert (core_for(16), core_for(8), core_for(16, q=2)) == ("trtllm", "tokenspeed", "tokenspeed")


def test_gfx950_keys_are_mla_pre_of_every_width_and_number_of_blocks():
    plan = Deployment(MlaDims(), target="gfx950", batches=(4, 8), queries=(1, 4), dcp=8)
    keys = plan.keys()
    assert {key.kernel for key in keys} == {"mla_pre"}
    assert [(key.params["tokens"], key.params["nblocks"]) for key in keys] == [
        (b, n) for b in (4, 8) for n in range(1, 9)
    ]
    assert {key.params["ranks"] for key in keys} == {8}
    assert plan.choice(8, 4).core == "aiter"
    assert Deployment(MlaDims(), target="gfx950").batches == (1, 2, 3, 4, 5, 6, 7, 8, 16)
    assert not plan.epilogue_keys()


def test_gfx950_keys_are_every_build_of_sparse_mla_with_a_cache_of_records():
    plan = Deployment(MlaDims(heads=3), target="gfx950", kv_format="fp8_ds_mla", batches=(64,), page_size=1)
    keys = plan.keys()
    assert {key.kernel for key in keys} == {"sparse_mla"}
    assert len(set(keys)) == 32
    assert {key.params["heads"] for key in keys} == {1, 2, 3, 4, 6, 8, 12, 16}
    assert len(Deployment(MlaDims(), target="gfx950", kv_format="fp8_ds_mla").keys()) == 28
    assert plan.choice(64, 1).core == "sparse"
    with pytest.raises(ConfigError, match="4 problems") as error:
        Deployment(MlaDims(heads=17), target="gfx950", kv_format="fp8_ds_mla", core="aiter", dcp=2, interleave=4)
    for says in ("core='aiter' must be auto or sparse", "dcp=2 must be 1", "interleave=4", "heads=17 must be 1 to 16"):
        assert says in str(error.value)


def test_gfx950_names_everything_it_does_not_serve():
    with pytest.raises(ConfigError, match="6 problems") as error:
        Deployment(
            MlaDims(heads=6), target="gfx950", kv_format="bf16", page_size=0, core="hopper", dcp=3, batches=(32,)
        )
    for says in (
        "kv_format='bf16'",
        "page_size=0",
        "core='hopper'",
        "dcp=3 must be one of 1, 2, 4, 8",
        "32 must be 16",
    ):
        assert says in str(error.value)
    assert "dims.heads=6 must be 12" in str(error.value)


def test_a_core_without_lse_and_numbers_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="core='trtllm' gives no LSE, which dcp=8 needs"):
        Deployment(MlaDims(), "sm_100a", core="trtllm", dcp=8)
    for changes, says in (
        ({"batch": 0}, "rows=0 must be a positive int"),
        ({"batch": "x"}, "rows='x' must be"),
        ({"q": None}, "q=None must be"),
        ({"dcp": -1}, "dcp=-1 must be"),
    ):
        with pytest.raises(ConfigError, match=says):
            core_for(**{"batch": 16, "target": "sm_100a", **changes})
