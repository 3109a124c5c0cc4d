"""The torch functions of the epilogues on a fake driver: what is launched, and what is refused before a launch."""

from contextlib import nullcontext

import epilogue_cases as ec
import pytest
import torch
from epilogue_cases import Case
from fake_cuda import fake_build

from k3dsl.errors import CaptureError, ConfigError
from k3dsl.nvidia import epilogue as facts
from k3dsl.nvidia import epilogue_ops as ops
from k3dsl.nvidia.epilogue import EpilogueKey, epilogue_keys

STREAM = 0x77


class Kernels:
    """In place of the compile cache: objects without code, and what was asked for."""

    def __init__(self):
        self.asked = []

    def get_or_build(self, key, build):
        self.asked.append(key)
        return fake_build(key)


@pytest.fixture
def device(fake_driver, monkeypatch):
    """The fake driver, with CPU tensors passing for CUDA ones."""
    fake_driver.kernels = Kernels()
    monkeypatch.setattr(ops, "_device_type", "cpu")
    monkeypatch.setattr(ops, "_stream", lambda index: STREAM)
    monkeypatch.setattr(ops, "_on", lambda index: nullcontext())
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(ops, "_functions", {})
    monkeypatch.setattr(ops, "_cache", fake_driver.kernels)
    return fake_driver


def key_of(case: Case) -> EpilogueKey:
    return EpilogueKey(case.op, case.format, case.dtype, case.heads, case.rope, case.pe_fp8)


def results_of(got: dict) -> list:
    return [t for n, t in got.items() if n not in ("cache", "q_in")]


ALL = [Case(op, kind, rope=rope) for op, kind in ec.KINDS for rope in ((False, True) if op != "context" else (False,))]


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_a_call_is_one_launch_with_these_arguments(device, case):
    call = ec.make(case)
    got = call.run(ops)
    (launch,) = device.launches
    key = key_of(case)
    assert (launch.grid, launch.block) == (facts.geometry(key, tokens=5).grid, (256, 1, 1))
    assert launch.pdl
    assert launch.stream == STREAM
    values = launch.values(key.params)
    assert values["tokens"] == 5
    assert values["per_thread"] == 1
    given = vars(ec.keys(call))
    assert all(values[n] == given[n].data_ptr() for n in values if n in given)
    outs = [values[n] for n in values if n == "out" or n.endswith("_out")]
    assert sorted(outs) == sorted(t.data_ptr() for t in results_of(got))
    assert values["k_pe_t"] == 256
    if case.op != "context":
        width = given["cache"].shape[2] * given["cache"].element_size()
        assert values["row_stride"] == width
        assert values["page_stride"] == 11 * width
        assert values["block_size"] == 8
        assert values["block_mul"] == -(2**31)  # 2**31 as the kernel reads it
        assert values["block_shift"] == 34
    if case.op == "decode":
        assert (values["ql_nope_t"], values["ql_nope_h"]) == (1024, 5 * 1024)


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_results_have_the_shapes_of_the_contract(device, case):
    got = ec.make(case).run(ops)
    want = {"query": 576, "q": 192, "k": 192, "v": 128}
    dtype = ec.E4M3 if case.format == "fp8" else torch.bfloat16
    for name, t in got.items():
        if name in want:
            assert tuple(t.shape) == (5, 3, want[name])
            assert t.dtype == dtype
            assert t.is_contiguous()


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_out_is_used_and_returned(device, case):
    call = ec.make(case)
    first = results_of(call.run(ops))
    given = [torch.empty_like(t) for t in first]
    second = results_of(call.run(ops, out=given[0] if len(given) == 1 else tuple(given)))
    assert all(a is b for a, b in zip(given, second, strict=True))
    pointers = {v for v in device.launches[-1].values(key_of(case).params).values() if isinstance(v, int)}
    assert {t.data_ptr() for t in given} <= pointers


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_no_tokens_no_launch(device, case):
    case = Case(case.op, case.format, rope=case.rope, tokens=0)
    got = ec.make(case).run(ops)
    assert all(t.shape[0] == 0 for t in results_of(got))
    assert device.launches == []
    assert device.kernels.asked == []


def test_one_object_serves_every_number_of_tokens(device):
    for tokens in (1, 2, 5, 64, 200):
        ec.make(Case("decode", "fp8", tokens=tokens, pages=40)).run(ops)
    assert len(device.kernels.asked) == 1
    assert [launch.values(EpilogueKey("decode", "fp8", "bf16", 3).params)["tokens"] for launch in device.launches] == [
        1, 2, 5, 64, 200,
    ]  # fmt: skip
    assert len({launch.grid for launch in device.launches}) > 1


def test_many_tokens_take_several_units_a_thread(device):
    case = Case("context", "plain", heads=64, tokens=100, strided=False)
    ec.make(case).run(ops)
    values = device.launches[-1].values(key_of(case).params)
    assert values["per_thread"] == 4
    assert device.launches[-1].grid == (100 * 64 * 24 // 1024, 1, 1)


def test_a_plan_is_used_again_with_new_addresses(device):
    case = Case("decode", "plain")
    first, second = ec.make(case), ec.make(case)
    first.run(ops)
    plans = dict(ops._plans)
    second.run(ops)
    assert ops._plans == plans
    values = [launch.values(key_of(case).params) for launch in device.launches]
    assert values[0]["ql_nope"] == first.args["ql_nope"].data_ptr()
    assert values[1]["ql_nope"] == second.args["ql_nope"].data_ptr()
    assert values[1]["cache"] == second.args["kv_cache"].data_ptr()


def test_plans_are_bounded(device, monkeypatch):
    monkeypatch.setattr(ops, "_MOST_PLANS", 4)
    for heads in range(1, 12):
        ec.make(Case("context", "plain", heads=heads)).run(ops)
    assert len(ops._plans) <= 4
    assert len(device.launches) == 11


# ---- capture ----------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_inside_a_capture(device):
    call = ec.make(Case("decode", "fp8"))
    with device.capture(STREAM), pytest.raises(CaptureError, match="prepare_epilogues"):
        call.run(ops)
    assert device.launches == []
    assert device.violations == []
    assert device.kernels.asked == []


def test_preparing_inside_a_capture_is_refused(device):
    keys = epilogue_keys(3)
    with device.capture(STREAM), pytest.raises(CaptureError, match="not loaded"):
        ops.prepare_epilogues(keys, "cuda:0")
    assert device.violations == []
    assert device.kernels.asked == []
    ops.prepare_epilogues(keys[:2], "cuda:0")
    with device.capture(STREAM):
        ops.prepare_epilogues(keys[:2], "cuda:0")  # all are there
    assert device.violations == []


def test_kernels_come_from_the_callers_cache(device):
    mine = Kernels()
    ops.prepare_epilogues(epilogue_keys(3)[:2], "cuda:0", cache=mine)
    ec.make(Case("context", "plain", heads=5)).run(ops)  # one that was not prepared, later
    assert len(mine.asked) == 3
    assert device.kernels.asked == []


def test_prepared_kernels_are_launched_inside_a_capture(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    case = Case("decode", "fp8")
    ops.prepare_epilogues(epilogue_keys(3), "cuda:0")
    assert len(device.kernels.asked) == len(epilogue_keys(3))
    with device.capture(STREAM):
        ec.make(case).run(ops)
    assert len(device.launches) == 1
    assert device.violations == []


def test_debug_is_refused_inside_a_capture(device):
    call = ec.make(Case("decode", "fp8"))
    call.run(ops)
    with device.capture(STREAM), pytest.raises(CaptureError, match="debug"):
        call.run(ops, debug=True)
    assert len(device.launches) == 1


# ---- refusals ---------------------------------------------------------------------------------------------------


def odd(t: torch.Tensor) -> torch.Tensor:
    """The tensor one element off 16-byte alignment."""
    store = torch.zeros(t.numel() + 8, dtype=t.dtype)
    return store[1 : 1 + t.numel()].view(t.shape)


REFUSED = [
    ("prefill", "plain", "k_nope", lambda t: t[..., :64], r"k_nope has shape \(5, 3, 64\), must be \(5, 3, 128\)"),
    ("prefill", "plain", "q", lambda t: t[:, :2], "q has shape"),
    ("prefill", "plain", "q", lambda t: t.half(), "q is torch.float16, must be torch.bfloat16"),
    ("prefill", "plain", "k_pe", lambda t: t[:4], "k_pe has shape"),
    ("prefill", "plain", "k_pe", lambda t: t[:, None], "k_pe has shape"),
    ("prefill", "plain", "k_pe", lambda t: torch.zeros(5, 65, dtype=t.dtype)[:, :64], "multiple of 8"),
    ("prefill", "plain", "k_nope", lambda t: odd(t.contiguous()), "k_nope starts at .* 16-byte aligned"),
    ("prefill", "plain", "k_nope", lambda t: torch.zeros(5, 3, 256, dtype=t.dtype)[..., ::2], "the last must be 1"),
    ("prefill", "plain", "kv_c_normed", lambda t: torch.zeros(5, 520, dtype=t.dtype)[:, :512], "contiguous"),
    ("prefill", "plain", "kv_cache", lambda t: t.half(), "kv_cache is torch.float16"),
    ("prefill", "plain", "kv_cache", lambda t: t[..., :512], r"must be \(\*, \*, 576\)"),
    ("prefill", "plain", "kv_cache", lambda t: torch.zeros(4, 8, 577, dtype=t.dtype)[..., :576], "multiples of 8"),
    ("prefill", "plain", "kv_cache", lambda t: t[:0], "0 pages"),
    ("prefill", "plain", "slot_mapping", lambda t: t.int(), "slot_mapping is torch.int32"),
    ("prefill", "plain", "slot_mapping", lambda t: t[:4], "slot_mapping has 4 entries, must have at least 5"),
    ("prefill", "plain", "slot_mapping", lambda t: torch.zeros(10, dtype=t.dtype)[::2], "slot_mapping has stride 2"),
    ("prefill", "fp8", "v", lambda t: t[..., :64], "v has shape"),
    ("prefill", "fp8", "kv_cache", lambda t: t.view(torch.uint8), "kv_cache is torch.uint8"),
    ("prefill", "fp8", "kv_cache", lambda t: torch.zeros(4, 8, 584).to(t.dtype)[..., :576], "multiples of 16"),
    ("prefill", "fp8", "v_scale_inv", lambda t: t.half(), "v_scale_inv is torch.float16"),
    ("prefill", "fp8", "k_scale_inv", lambda t: torch.ones(2), "k_scale_inv is torch.float32 of 2 elements"),
    ("prefill", "fp8_ds_mla", "kv_cache", lambda t: t[..., :576], r"must be \(\*, \*, 656\)"),
    ("decode", "plain", "q_pe", lambda t: t[..., :32], "q_pe has shape"),
    ("decode", "plain", "ql_nope", lambda t: t.float(), "ql_nope is torch.float32"),
    ("decode", "plain", "ql_nope", lambda t: t[0], "ql_nope has shape"),
    ("context", "fp8", "k_pe", lambda t: t.float(), "k_pe is torch.float32"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(("op", "kind", "name", "change", "says"), REFUSED)
def test_bad_tensors_are_named_before_a_launch(device, op, kind, name, change, says, warm):
    call = ec.make(Case(op, kind))
    if warm:  # plans of good layouts must not let bad tensors of the same layout through
        call.run(ops)
        device.launches.clear()
    where = call.args if name in call.args else call.kwargs
    where[name] = change(where[name])
    before = ec.clone(call.args["kv_cache"]) if op != "context" else None
    with pytest.raises(ConfigError, match=says):
        call.run(ops)
    assert device.launches == []
    if before is not None and name != "kv_cache":
        assert torch.equal(before.view(torch.uint8), call.args["kv_cache"].view(torch.uint8))


NO_TENSORS = [
    ("prefill", "plain", "q"),
    ("prefill", "plain", "k_nope"),
    ("prefill", "fp8", "v"),
    ("prefill", "fp8", "v_scale_inv"),
    ("decode", "plain", "kv_cache"),
    ("decode", "fp8", "ql_nope"),
    ("context", "plain", "k_pe"),
    ("context", "fp8", "v"),
]


@pytest.mark.parametrize("value", [None, [1.0]], ids=["None", "list"])
@pytest.mark.parametrize(("op", "kind", "name"), NO_TENSORS)
def test_what_is_no_tensor_is_named(device, op, kind, name, value):
    call = ec.make(Case(op, kind))
    where = call.args if name in call.args else call.kwargs
    where[name] = value
    with pytest.raises(ConfigError, match=f"{name} is {type(value).__name__}, must be a tensor"):
        call.run(ops)
    assert device.launches == []


@pytest.mark.parametrize("out", [5, (torch.zeros(1),), [torch.zeros(1)] * 3])
def test_an_out_of_another_kind_is_named(device, out):
    for op, kind in (("prefill", "fp8"), ("context", "fp8"), ("decode", "plain")):
        with pytest.raises(ConfigError, match=r"out(\[0\])? (is|has|starts)"):
            ec.make(Case(op, kind)).run(ops, out=out)
    assert device.launches == []


def test_what_cannot_be_prepared_is_named_and_changes_nothing(device):
    before = ops._cache
    for arguments, says in (
        ((epilogue_keys(3), "cpu"), "device='cpu' must be a CUDA device"),
        (([5], "cuda:0"), "keys has 5, must be EpilogueKeys"),
    ):
        with pytest.raises(ConfigError, match=says):
            ops.prepare_epilogues(*arguments)
    with pytest.raises(ConfigError, match="cache=5 must be a CompileCache"):
        ops.prepare_epilogues(epilogue_keys(3), "cuda:0", cache=5)
    assert ops._cache is before
    assert device.kernels.asked == []


def test_all_problems_come_in_one_error(device):
    call = ec.make(Case("decode", "fp8"))
    call.args["slot_mapping"] = call.args["slot_mapping"].int()
    call.args["k_pe"] = call.args["k_pe"].half()
    call.args["kv_c_normed"] = call.args["kv_c_normed"][:3]
    with pytest.raises(ConfigError, match="3 problems") as caught:
        call.run(ops)
    assert all(name in str(caught.value) for name in ("slot_mapping", "k_pe", "kv_c_normed"))


@pytest.mark.parametrize("heads", [0, 129])
def test_heads_are_bounded(device, heads):
    with pytest.raises(ConfigError, match="heads from 1 to 128"):
        ops.context_pack(torch.zeros(2, heads, 128).bfloat16(), torch.zeros(2, 64).bfloat16())


def test_out_is_checked(device):
    call = ec.make(Case("decode", "plain"))
    with pytest.raises(ConfigError, match="out has shape"):
        call.run(ops, out=torch.empty(5, 3, 512, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="out has strides"):
        call.run(ops, out=torch.empty(3, 5, 576, dtype=torch.bfloat16).transpose(0, 1))
    assert device.launches == []


def test_rope_arguments_come_together(device):
    call = ec.make(Case("decode", "plain", rope=True))
    table = call.args.pop("cos_sin_cache")
    with pytest.raises(ConfigError, match="given together"):
        call.run(ops)
    call.args |= {"cos_sin_cache": table[:, :32].contiguous()}
    with pytest.raises(ConfigError, match="cos_sin_cache has shape"):
        call.run(ops)
    call.args |= {"cos_sin_cache": table.double()}
    with pytest.raises(ConfigError, match=r"cos_sin_cache is torch\.float64"):
        call.run(ops)
    call.args |= {"cos_sin_cache": table, "positions": call.args["positions"].int()}
    with pytest.raises(ConfigError, match=r"positions is torch\.int32"):
        call.run(ops)


def test_a_q_that_is_rotated_in_place_must_not_be_expanded(device):
    call = ec.make(Case("prefill", "plain", rope=True))
    call.args["q"] = call.args["q"][:1].expand(5, 3, 192)
    with pytest.raises(ConfigError, match="rotated in place"):
        call.run(ops)


def test_scales_belong_to_an_fp8_cache(device):
    call = ec.make(Case("decode", "fp8"))
    call.kwargs.pop("q_scale_inv")
    with pytest.raises(ConfigError, match="both for an fp8 cache"):
        call.run(ops)
    call = ec.make(Case("decode", "plain"))
    call.kwargs |= {"q_scale_inv": torch.ones(1), "cache_scale_inv": torch.ones(1)}
    with pytest.raises(ConfigError, match="neither for another"):
        call.run(ops)


def test_tensors_must_be_on_a_cuda_device(device, monkeypatch):
    monkeypatch.setattr(ops, "_device_type", "cuda")
    with pytest.raises(ConfigError, match="k_nope is on cpu, must be on a CUDA device"):
        ec.make(Case("context", "plain")).run(ops)


def test_an_unserved_gpu_is_named(device):
    device.cuda.attributes[75] = 8
    with pytest.raises(ConfigError, match="sm_90a"):
        ec.make(Case("context", "plain")).run(ops)


@pytest.mark.parametrize("slot", [32, 10**12])
def test_debug_finds_slots_outside_the_cache(device, slot):
    call = ec.make(Case("decode", "plain"))
    call.args["slot_mapping"][2] = slot
    with pytest.raises(ConfigError, match=f"{slot}.* outside the cache of 4 x 8"):
        call.run(ops, debug=True)
    assert device.launches == []
    call.args["slot_mapping"][2] = 31
    call.run(ops, debug=True)
    assert len(device.launches) == 1


def test_debug_finds_positions_outside_the_table(device):
    call = ec.make(Case("prefill", "plain", rope=True))
    call.args["positions"][1] = 50
    with pytest.raises(ConfigError, match="positions \\[50\\]"):
        call.run(ops, debug=True)
    assert device.launches == []


def test_axes_of_one_may_have_any_stride(device):
    case = Case("decode", "plain", heads=1, tokens=1)
    call = ec.make(case)
    call.args["ql_nope"] = call.args["ql_nope"].as_strided((1, 1, 512), (3, 5, 1))
    call.args["k_pe"] = torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 64), (1, 1))
    call.run(ops)
    values = device.launches[-1].values(key_of(case).params)
    assert values["ql_nope_t"] == values["ql_nope_h"] == values["k_pe_t"] == 0
