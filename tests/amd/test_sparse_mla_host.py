"""Sparse MLA's host side without FlyDSL: what is served, what is refused and why, keys, geometry, the oracle."""

import math

import numpy as np
import pytest
import torch

import k3dsl.amd as amd
from k3dsl.amd import (
    PreparedSparseMla,
    SparseMlaKey,
    flydsl_sparse_mla_fp8ds_fwd,
    flydsl_sparse_mla_fp8ds_supported,
    flydsl_sparse_mla_fp8ds_warmup,
    fp8_ds_mla_pack,
    fp8_ds_mla_unpack,
    sparse_mla_problems,
)
from k3dsl.amd.launch import param_problems
from k3dsl.amd.sparse_mla.key import MAX_WAVES, PARAMS, RECORD, WAVE_BYTES, warm_keys, waves
from k3dsl.amd.toolchain import KERNELS, compile_key, kernel_key
from k3dsl.errors import ConfigError
from k3dsl.reference.sparse_mla import sparse_mla64


class NoRuntime:
    """Stands for a device: nothing that is refused may reach it."""

    target = "gfx950"


def arguments(tokens: int = 2, heads: int = 12, **changes):
    given = {
        "q": torch.zeros(tokens, heads, 576, dtype=torch.bfloat16),
        "kv_buffer": torch.zeros(8, RECORD, dtype=torch.uint8),
        "kv_indptr": torch.zeros(tokens + 1, dtype=torch.int32),
        "kv_indices": torch.zeros(4, dtype=torch.int32),
        "runtime": NoRuntime(),
    }
    return given | changes


def bf(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


SERVED = {
    "plain": {},
    "one head": {"q": bf(2, 1, 576)},
    "sixteen": {"q": bf(2, 16, 576)},
    "no token": arguments(0),
    "int64": {"kv_indptr": torch.zeros(3, dtype=torch.int64), "kv_indices": torch.zeros(0, dtype=torch.int64)},
    "strided lists": {"kv_indices": torch.zeros(8, dtype=torch.int32)[::2]},
    "three axes": {"kv_buffer": torch.zeros(8, 1, RECORD, dtype=torch.uint8)},
    "four axes": {"kv_buffer": torch.zeros(8, 1, 1, RECORD, dtype=torch.int8)},
    "paged": {"kv_buffer": torch.zeros(2, 4, RECORD, dtype=torch.uint8).view(torch.float8_e4m3fn)},
    "strided q": {"q": bf(12, 2, 600).transpose(0, 1)[:, :, 2:578]},
    "wide out": {"out": bf(2, 12, 576)},
    "strided out": {"out": bf(12, 2, 600).transpose(0, 1)[:, :, 2:578]},
    "all options left": {
        **dict.fromkeys(["kv_scale", "q_scale", "attn_sink", "kv_splits", "out_mxfp8", "extra_kv", "inv_rope_cos"]),
        "skip_reduce": False,
        "dot_precision": "bf16",
        "has_invalid": True,
        "return_lse": True,
    },
}
REFUSED = {
    "q no tensor": ({"q": None}, "q is a NoneType"),
    "q of fp16": ({"q": bf(2, 12, 576).half()}, r"q is float16 \(2, 12, 576\), must be bfloat16"),
    "q of two axes": ({"q": bf(2, 576)}, "must be bfloat16"),
    "q of 512": ({"q": bf(2, 12, 512)}, "must be bfloat16"),
    "no head": ({"q": bf(2, 0, 576)}, "q has 0 heads, must have 1 to 16"),
    "17 heads": ({"q": bf(2, 17, 576)}, "q has 17 heads, must have 1 to 16"),
    "odd stride": ({"q": bf(2, 12, 577)[:, :, :576]}, "must be even"),
    "odd base": ({"q": bf(2, 12, 578)[:, :, 1:577]}, "aligned to 4 bytes"),
    "transposed": ({"q": bf(2, 576, 12).transpose(1, 2)}, "the last must be 1"),
    "rank": ({"kv_lora_rank": 256}, "kv_lora_rank=256 must be 512"),
    "rope": ({"qk_rope_head_dim": 32}, "qk_rope_head_dim=32 must be 64"),
    "576 bytes": ({"kv_buffer": torch.zeros(8, 576, dtype=torch.uint8)}, "must be one-byte"),
    "two-byte": ({"kv_buffer": torch.zeros(8, RECORD, dtype=torch.int16)}, "must be one-byte"),
    "padded pages": ({"kv_buffer": torch.zeros(2, 5, RECORD, dtype=torch.uint8)[:, :4]}, "pages not padded"),
    "apart": ({"kv_buffer": torch.zeros(8, 672, dtype=torch.uint8)[:, :RECORD]}, "656 bytes apart"),
    "four axes": ({"kv_buffer": torch.zeros(2, 2, 1, RECORD, dtype=torch.uint8)}, "the middle two must be 1"),
    "no record": ({"kv_buffer": torch.zeros(0, RECORD, dtype=torch.uint8)}, "must hold a record"),
    "unaligned": (
        {"kv_buffer": torch.zeros(RECORD + 8, dtype=torch.uint8)[8:].view(1, RECORD)},
        "kv_buffer must be aligned to 16 bytes",
    ),
    "float list": ({"kv_indices": torch.zeros(4)}, "kv_indices is float32"),
    "short indptr": ({"kv_indptr": torch.zeros(2, dtype=torch.int32)}, r"must have T \+ 1 = 3"),
    "two axes": ({"kv_indices": torch.zeros(2, 2, dtype=torch.int32)}, "of one axis"),
    "too many": (
        {"kv_indices": torch.zeros(1, dtype=torch.int32).expand(1 << 29)},
        "kv_indices has 536870912 entries, must have fewer than 536870912",
    ),
    "narrow out": ({"out": bf(2, 12, 511)}, "out is bfloat16"),
    "float out": ({"out": torch.zeros(2, 12, 512)}, "out is float32"),
    "other out": ({"out": bf(3, 12, 512)}, r"must be bfloat16 \[2, 12, 512 or more\]"),
    "out overlaps": ({"out": bf(2, 1, 512).expand(2, 12, 512)}, "its rows overlap"),
    "out overlaps across": ({"out": bf(40, 512).as_strided((2, 12, 512), (512, 512, 1))}, "its rows overlap"),
    "out overlaps a little": ({"out": bf(40, 512).as_strided((2, 12, 512), (5632, 512, 1))}, "its rows overlap"),
    "flag": ({"return_lse": 1}, "return_lse=1 must be a bool"),
    "text flag": ({"has_invalid": "no"}, "has_invalid='no' must be a bool"),
    "rank of tensors": ({"kv_lora_rank": torch.zeros(2)}, "kv_lora_rank=.* must be 512"),
    "rank of an array": ({"kv_lora_rank": np.arange(3)}, r"kv_lora_rank=array\(.* must be 512"),
    "scale of an array": ({"kv_scale": np.arange(3)}, r"kv_scale=array\(.* must be None"),
    "no runtime": ({"runtime": 5}, "runtime=5 must be None for HIP, or what has the methods"),
    "sink": ({"attn_sink": torch.zeros(12)}, "attn_sink=a tensor must be None"),
    "scale": ({"kv_scale": 1.0}, "kv_scale=1.0 must be None"),
    "extra": ({"extra_kv": 1}, "extra_kv=1 must be None"),
    "inverse rope": ({"inv_rope_cos": 1}, "inv_rope_cos=1 must be None"),
    "reduce": ({"skip_reduce": True}, "skip_reduce=True must be False"),
    "fp8 dots": ({"dot_precision": "fp8"}, "dot_precision='fp8' must be 'bf16'"),
    "unknown": ({"nonsense": 1}, "nonsense is no option"),
}


@pytest.mark.parametrize("changes", SERVED.values(), ids=SERVED)
def test_what_is_served(changes) -> None:
    assert sparse_mla_problems(**arguments(**changes)) == []
    assert flydsl_sparse_mla_fp8ds_supported(**arguments(**changes))


@pytest.mark.parametrize(("changes", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_and_why(changes, why) -> None:
    assert not flydsl_sparse_mla_fp8ds_supported(**arguments(**changes))
    with pytest.raises(ValueError, match=why):
        flydsl_sparse_mla_fp8ds_fwd(softmax_scale=1.0, **arguments(**changes))


def test_the_question_takes_the_arguments_of_the_call() -> None:
    given = arguments()
    tensors = [given[name] for name in ("q", "kv_buffer", "kv_indptr", "kv_indices")]
    assert flydsl_sparse_mla_fp8ds_supported(*tensors, 0.5, runtime=given["runtime"])
    assert not flydsl_sparse_mla_fp8ds_supported(*tensors, math.inf, runtime=given["runtime"])


@pytest.mark.parametrize(
    "scale", [0, 1, -0.05, 1e38, np.float64(0.07), np.float32(0.07), np.float16(0.07), np.int32(2)]
)
def test_scales_are_numbers_of_any_type(scale) -> None:
    assert sparse_mla_problems(softmax_scale=scale, **arguments()) == []
    PreparedSparseMla(4, scale)


@pytest.mark.parametrize(
    "scale", [math.nan, -math.inf, 1e300, 2.5e38, 10**400, True, "1", None, torch.tensor(1.0)], ids=range(9)
)
def test_scales_that_the_kernel_cannot_take(scale) -> None:
    """It takes scale times log2(e), in float32."""
    says = r"softmax_scale=.* must be a finite number, from -2\.3586\d*e\+38 to 2\.3586\d*e\+38"
    with pytest.raises(ConfigError, match=says):
        flydsl_sparse_mla_fp8ds_fwd(softmax_scale=scale, **arguments())
    with pytest.raises(ConfigError, match=says):
        PreparedSparseMla(4, scale)


def test_every_reason_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        flydsl_sparse_mla_fp8ds_fwd(
            softmax_scale=math.nan, **arguments(q=bf(2, 17, 576), kv_lora_rank=1, attn_sink=1, out=bf(1, 1, 1))
        )
    for piece in ("sparse MLA: 5 problems", "17 heads", "kv_lora_rank=1", "attn_sink=1", "out is", "softmax_scale=nan"):
        assert piece in str(error.value)


def test_without_a_runtime_the_tensors_must_be_on_a_gfx950_gpu() -> None:
    given = arguments()
    del given["runtime"]
    assert not flydsl_sparse_mla_fp8ds_supported(**given)
    with pytest.raises(ConfigError, match="q is on cpu, must be on a gfx950 GPU"):
        flydsl_sparse_mla_fp8ds_fwd(softmax_scale=1.0, **given)
    with pytest.raises(ConfigError, match="kv_buffer is on cpu, must be on a gfx950 GPU"):
        PreparedSparseMla(12, 1.0).prepare_cache(given["kv_buffer"])
    if torch.version.hip is None:
        with pytest.raises(ConfigError, match="must be a gfx950 GPU of torch with HIP"):
            flydsl_sparse_mla_fp8ds_warmup()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"heads": 5}, "heads=5 must be a tuple"),
        ({"device": "foo"}, "device='foo' must be a device of torch: Expected one of cpu, cuda"),
        ({"runtime": 5}, "runtime=5 must be None for HIP"),
    ],
)
def test_a_warm_up_names_what_is_wrong(given, says) -> None:
    with pytest.raises(ConfigError, match=says):
        flydsl_sparse_mla_fp8ds_warmup(**given)


def test_keys() -> None:
    keys = warm_keys()
    assert len(set(keys)) == 28
    assert len({compile_key(k, "gfx950").digest for k in keys}) == 28
    key = compile_key(keys[5], "gfx950")
    assert kernel_key(key.kernel, key.params) == keys[5]
    assert "sparse_mla" in KERNELS
    assert len({k.symbol for k in keys}) == 28
    with pytest.raises(ConfigError) as error:
        SparseMlaKey(17, 1, "yes")  # type: ignore[arg-type]
    for piece in ("heads=17 must be an int from 1 to 16", "has_invalid=1 must be a bool", "lse='yes' must be a bool"):
        assert piece in str(error.value)


def test_geometry() -> None:
    assert [waves(t, 256) for t in (1, 256, 257)] == [4, 4, 2]
    assert MAX_WAVES * WAVE_BYTES <= 160 * 1024
    assert 2 * 2 * WAVE_BYTES <= 160 * 1024
    sizes = {"ptr": 8, "i32": 4, "f32": 4}

    class Facts:
        params = tuple((8 * i, 8) for i in range(6)) + tuple((48 + 4 * i, 4) for i in range(7))
        hidden = ()

    assert [sizes[kind] for _, kind in PARAMS] == [size for _, size in Facts.params]
    assert param_problems(Facts(), PARAMS) == []  # type: ignore[arg-type]


def test_a_prepared_layer_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="softmax_scale=inf"):
        PreparedSparseMla(12, math.inf)
    with pytest.raises(ConfigError, match="heads=0"):
        PreparedSparseMla(0, 1.0)
    with pytest.raises(ConfigError, match="runtime=5 must be None for HIP"):
        PreparedSparseMla(12, 1.0, runtime=5)  # type: ignore[arg-type]
    layer = PreparedSparseMla(12, 1.0, runtime=NoRuntime())  # type: ignore[arg-type]
    given = arguments()
    with pytest.raises(ConfigError, match=r"before prepare_cache"):
        layer.run(given["q"], given["kv_indptr"], given["kv_indices"], bf(2, 12, 512))
    layer._launcher, layer._kv = object(), given["kv_buffer"]  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="8 heads, 12 were prepared"):
        layer.run(bf(2, 8, 576), given["kv_indptr"], given["kv_indices"], bf(2, 8, 512))
    with pytest.raises(ConfigError, match="must be contiguous int32"):
        layer.run(given["q"], given["kv_indptr"].long(), given["kv_indices"], bf(2, 12, 512))
    with pytest.raises(ConfigError, match="lse is given"):
        layer.run(given["q"], given["kv_indptr"], given["kv_indices"], bf(2, 12, 512), torch.zeros(2, 12))
    launched: list[object] = []

    class Recorder:
        def launch(self, *given) -> None:
            launched.append(given)

    layer._launcher = Recorder()  # type: ignore[assignment]
    q, indptr, indices = given["q"], given["kv_indptr"], given["kv_indices"]
    for out in (bf(2, 12, 512), bf(2, 12, 512), bf(2, 12, 576)):
        layer.run(q, indptr, indices, out)
        assert launched[-1] == (q, given["kv_buffer"], indices, indptr, out, None, 1.0)
    assert len(layer._checked) == 2  # the second looked like the first
    with pytest.raises(ConfigError, match="aligned to 4 bytes"):
        layer.run(bf(2, 12, 578)[:, :, 1:577], indptr, indices, bf(2, 12, 512))
    assert len(launched) == 3
    with pytest.raises(ConfigError, match="kv_indices has no entries"):
        layer.run(given["q"], given["kv_indptr"], given["kv_indices"][:0], bf(2, 12, 512))


def test_the_oracle_on_what_can_be_said_by_hand() -> None:
    latent = torch.zeros(3, 512)
    latent[1], latent[2] = 1.0, 3.0
    records = fp8_ds_mla_pack(latent, torch.zeros(3, 64, dtype=torch.bfloat16))
    records[0] = 0xFF  # NaN bytes, which nobody lists
    q = torch.zeros(4, 2, 576)
    q[3] = 1 / 512
    lists = torch.tensor([1, 2, -1, 2, 2, 1, -3, 1, 2], dtype=torch.int32)
    out, lse = sparse_mla64(q, records, torch.tensor([0, 3, 6, 7, 9]), lists, 2.0)
    assert torch.allclose(out[0], torch.full((2, 512), 2.0, dtype=torch.float64))
    assert torch.allclose(out[1], torch.full((2, 512), 7 / 3, dtype=torch.float64))  # twice the second
    assert (out[2] == 0).all()
    weight = math.exp(2 * 3) / (math.exp(2) + math.exp(6))
    assert torch.allclose(out[3], torch.full((2, 512), 1 + 2 * weight, dtype=torch.float64))
    assert lse[0].tolist() == pytest.approx([math.log(2)] * 2)
    assert lse[1].tolist() == pytest.approx([math.log(3)] * 2)
    assert lse[2].tolist() == [-math.inf] * 2
    assert lse[3].tolist() == pytest.approx([math.log(math.exp(2) + math.exp(6))] * 2)


def test_records_and_back() -> None:
    latent = torch.randn(5, 512) * torch.tensor([1e-5, 1.0, 30.0, 1e3, 1e4])[:, None]
    rope = torch.randn(5, 64).bfloat16()
    records = fp8_ds_mla_pack(latent, rope)
    assert records.shape == (5, RECORD)
    assert latent.abs().max() < 57344
    scales = records[:, 512:528].contiguous().view(torch.float32)
    assert (scales.log2() == scales.log2().round()).all()
    assert scales.min() >= 2**-13
    assert scales.max() <= 2**7
    back, same = fp8_ds_mla_unpack(records)
    assert torch.equal(same, rope)
    tiles = latent.view(5, 4, 128)
    error = (back.view(5, 4, 128) - tiles).abs().amax(-1)
    assert (error <= tiles.abs().amax(-1) / 16 + 2**-13).all()


def test_public_names() -> None:
    for name in ("PreparedSparseMla", "SparseMlaKey", "fp8_ds_mla_pack", "flydsl_sparse_mla_fp8ds_warmup"):
        assert name in amd.__all__
        assert getattr(amd, name) is not None
