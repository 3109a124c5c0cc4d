"""MlaWeights: layouts, scale, and errors that say which attribute is wrong."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import k3dsl
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError
from k3dsl.reference import entry, query
from k3dsl.weights import MlaWeights, Parameter, check_attention, require_attention

DIMS = MlaDims.kimi_k3(16)


@pytest.fixture(scope="module")
def weights():
    return MlaWeights.random(DIMS, seed=3)


def test_absorbed_weights_are_views_of_kv_b():
    kv_b = torch.randn(6 * 256, 512).bfloat16()
    w = MlaWeights.from_kv_b(
        DIMS,
        q_b=torch.zeros(6 * 192, 1536).bfloat16(),
        kv_b=kv_b,
        q_a_norm=torch.ones(1536).bfloat16(),
        kv_a_norm=torch.ones(512).bfloat16(),
        q_scale=4.0,
        k_scale=0.5,
        eps=1e-6,
    )
    assert (w.W_UK_T.shape, w.W_UK_T.stride()) == ((6, 128, 512), (131072, 512, 1))
    assert (w.W_UV.shape, w.W_UV.stride()) == ((6, 512, 128), (131072, 1, 512))
    assert w.W_UK_T.data_ptr() == kv_b.data_ptr()
    assert w.W_UV.data_ptr() == kv_b[128:].data_ptr()
    assert torch.equal(w.W_UK_T[2, 5], kv_b[2 * 256 + 5])
    assert torch.equal(w.W_UV[3, :, 7], kv_b[3 * 256 + 128 + 7])
    assert w._q_scale_inv.tolist() == [0.25]
    assert w._k_scale_inv.tolist() == [2.0]
    assert (w._q_scale_float, w._k_scale_float, w.scale, w.rms_norm_eps) == (4.0, 0.5, 192**-0.5, 1e-6)


def test_random_is_repeatable_and_realistic(weights):
    again, other = MlaWeights.random(DIMS, seed=3), MlaWeights.random(DIMS, seed=4)
    assert torch.equal(weights.W_UV, again.W_UV)
    assert not torch.equal(weights.W_UV, other.W_UV)
    assert weights.rms_norm_eps == 1e-5
    p = torch.randn(64, DIMS.pitch, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = query(p, weights, "bf16").float()
    latent, k_pe = entry(p, weights)
    keys = torch.cat([latent, k_pe], dim=1).float()
    logits = torch.einsum("bhd,kd->bhk", q, keys) * weights.scale
    assert 0.7 < logits.std() < 1.4
    assert 0.8 < keys.std() < 1.2
    assert 0.8 < q[..., 512:].std() < 1.2
    values = torch.einsum("kl,hlv->khv", latent.float(), weights.W_UV.float())
    assert 0.8 < values.std() < 1.2


def test_to_keeps_strides_and_sharing(weights):
    assert weights.to("cpu") is weights
    moved = weights.to("meta")
    assert moved.W_UV.stride() == weights.W_UV.stride()
    assert moved.W_UK_T.stride() == weights.W_UK_T.stride()
    assert moved.W_UV.storage_offset() - moved.W_UK_T.storage_offset() == 128 * 512
    assert moved.W_UV.untyped_storage().nbytes() == 6 * 256 * 512 * 2
    assert {moved.q_b_proj.weight.device.type, moved._k_scale_inv.device.type} == {"meta"}
    separate = replace(weights, W_UV=torch.zeros(6, 128, 512).bfloat16().transpose(1, 2)).to("meta")
    assert separate.W_UV.stride() == (65536, 1, 512)


def test_good_attention_has_no_problems(weights):
    assert check_attention(weights, DIMS) == []
    assert check_attention(weights, DIMS, "cpu") == []
    own = SimpleNamespace(**vars(weights))  # any object with the attributes
    assert check_attention(own, DIMS) == []
    own.W_UK_T = own.W_UK_T.contiguous()
    own.W_UV = own.W_UV.transpose(1, 2).contiguous().transpose(1, 2)
    assert check_attention(own, DIMS) == []
    require_attention(own, DIMS)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("W_UK_T", None, "W_UK_T is missing, must be bfloat16 [6, 128, 512]"),
        ("W_UK_T", bf16(6, 128, 512).float(), "W_UK_T is float32 [6, 128, 512], must be bfloat16 [6, 128, 512]"),
        ("W_UK_T", bf16(6, 512, 128).transpose(1, 2), "W_UK_T has strides [65536, 1, 128]: axis 2 must have 1"),
        ("W_UV", bf16(6, 512, 128), "W_UV has strides [65536, 128, 1]: axis 1 must have 1 (latent contiguous)"),
        ("W_UV", bf16(12, 128, 512).transpose(1, 2), "W_UV is bfloat16 [12, 512, 128], must be bfloat16 [6, 512, 128]"),
        ("W_UV", bf16(6 * 128 * 520).view(6, 128, 520)[:, :, 4:516].transpose(1, 2), "must be 16-byte aligned"),
        ("W_UV", bf16(6, 128, 513)[:, :, :512].transpose(1, 2), "the others multiples of 8"),
        ("q_a_layernorm", Parameter(bf16(768)), "q_a_layernorm.weight is bfloat16 [768], must be bfloat16 [1536]"),
        ("q_a_layernorm", None, "q_a_layernorm.weight is missing"),
        ("kv_a_layernorm", SimpleNamespace(weight=[1.0]), "kv_a_layernorm.weight is list, must be bfloat16 [512]"),
        ("kv_a_layernorm", Parameter(bf16(512, 2)[:, 0]), "kv_a_layernorm.weight has strides [2], must be contiguous"),
        ("q_b_proj", Parameter(bf16(1536, 1152)), "q_b_proj.weight is bfloat16 [1536, 1152]"),
        ("q_b_proj", Parameter(bf16(1536, 1152).T), "q_b_proj.weight has strides [1, 1152], must be contiguous"),
        ("_q_scale_inv", torch.ones(1).double(), "_q_scale_inv is float64 [1], must be float32 [1]"),
        ("_k_scale_inv", torch.ones(()), "_k_scale_inv is float32 [], must be float32 [1]"),
        ("_k_scale_inv", torch.ones(1, device="meta"), "_k_scale_inv is on meta, must be on cpu"),
        ("_q_scale_float", 0.0, "_q_scale_float is 0.0, must be a positive number"),
        ("_k_scale_float", float("nan"), "_k_scale_float is nan, must be a positive number"),
        ("scale", None, "scale is missing, must be a positive number"),
        ("rms_norm_eps", True, "rms_norm_eps is True, must be a positive number"),
    ],
)
def test_each_problem_is_named_alone(weights, name, value, says):
    wrong = SimpleNamespace(**vars(weights))
    setattr(wrong, name, value)
    problems = check_attention(wrong, DIMS)
    assert len(problems) == 1
    assert says in problems[0]


def test_weights_of_another_model_give_one_error(weights):
    with pytest.raises(ConfigError) as error:
        require_attention(weights, MlaDims.kimi_k3(8))
    text = str(error.value)
    assert "heads=12" in text
    for line in ("W_UK_T is bfloat16 [6, 128, 512], must be bfloat16 [12, 128, 512]", "W_UV is", "q_b_proj.weight is"):
        assert line in text
    assert "layernorm" not in text
    with pytest.raises(ConfigError, match=r"W_UK_T is on cpu, must be on meta"):
        require_attention(weights, DIMS, "meta")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_b": bf16(6 * 192, 512)}, r"kv_b is bfloat16 \[1152, 512\].*must be bfloat16 \[1536, 512\]"),
        ({"kv_b": bf16(512, 6 * 256).T}, r"kv_b is .* with strides \[1, 1536\].*contiguous"),
        ({"q_scale": 0.0}, "q_scale=0.0 must be a positive number"),
        ({"k_scale": -1.0}, "k_scale=-1.0 must be a positive number"),
        ({"q_b": bf16(6 * 192, 768)}, r"q_b_proj.weight is bfloat16 \[1152, 768\]"),
    ],
)
def test_from_kv_b_refuses(change, says):
    good = {
        "q_b": bf16(6 * 192, 1536),
        "kv_b": bf16(6 * 256, 512),
        "q_a_norm": bf16(1536),
        "kv_a_norm": bf16(512),
    }
    with pytest.raises(ConfigError, match=says):
        MlaWeights.from_kv_b(DIMS, **{**good, **change})


def test_public_name():
    assert k3dsl.MlaWeights is MlaWeights


def test_from_kv_b_names_what_is_no_tensor_or_number():
    with pytest.raises(ConfigError, match=r"(?s)4 problems.*kv_b is NoneType.*q_scale='1'.*scale='x'.*eps=0"):
        MlaWeights.from_kv_b(DIMS, q_b=None, kv_b=None, q_a_norm=None, kv_a_norm=None, q_scale="1", scale="x", eps=0)


@pytest.mark.parametrize("seed", ["x", -1, 1 << 64, 1.0, None])
def test_random_takes_a_seed_of_64_bits(seed):
    with pytest.raises(ConfigError, match=r"seed=.* must be an int from 0"):
        MlaWeights.random(DIMS, seed=seed)


@pytest.mark.parametrize("tp", [8.0, "8", True, 4])
def test_ranks_are_an_int(tp):
    with pytest.raises(ConfigError, match=f"tp={tp!r}: "):
        MlaDims.kimi_k3(tp)
