"""Query and cache entry: rounding points one by one, and how far they may lie from exact."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import empty_cache, fp8_steps

from k3dsl import reference as ref
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError
from k3dsl.weights import MlaWeights, Parameter

DIMS = MlaDims(heads=2)


@pytest.fixture(scope="module")
def weights():
    return MlaWeights.random(DIMS, seed=5, q_scale=0.125, k_scale=0.5)


def projected(rows: int, seed: int = 6, dims: MlaDims = DIMS) -> torch.Tensor:
    return torch.randn(rows, dims.pitch, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bf(x: np.ndarray) -> np.ndarray:
    """float32 to bf16 by bit arithmetic."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def by_hand(row: np.ndarray, w: MlaWeights) -> tuple[np.ndarray, np.ndarray]:
    """(query [2, 576] before its format, latent [512]) of one row, stage by stage; sums in float64."""
    f32 = np.float32
    g_q, g_kv = (p.weight.float().numpy() for p in (w.q_a_layernorm, w.kv_a_layernorm))
    q_b, w_uk = w.q_b_proj.weight.double().numpy(), w.W_UK_T.double().numpy()
    c_q, c_kv = row[:1536], row[1536:2048]
    r = f32(1) / np.sqrt(f32((c_q.astype(np.float64) ** 2).sum()) / f32(1536) + f32(w.rms_norm_eps), dtype=f32)
    x = bf((c_q * r) * g_q)
    u = bf((q_b @ x.astype(np.float64)).astype(f32)).reshape(2, 192)
    a = np.stack([bf((u[h, :128].astype(np.float64) @ w_uk[h]).astype(f32)) for h in range(2)])
    m = f32((c_kv.astype(np.float64) ** 2).sum())
    r = f32(1) / np.sqrt(f32(m * f32(1 / 512) + f32(w.rms_norm_eps)), dtype=f32)
    return np.concatenate([a, u[:, 128:]], axis=1), bf((c_kv * r) * g_kv)


def test_against_scalar_arithmetic(weights):
    rows = projected(7)
    plain, fp8 = ref.query(rows, weights, "bf16", torch.float64), ref.query(rows, weights, "fp8", torch.float64)
    latent, k_pe = ref.entry(rows, weights, torch.float64)
    assert torch.equal(k_pe, rows[:, 2048:2112])
    for b in range(7):
        query, entry = by_hand(rows[b].float().numpy(), weights)
        want = torch.from_numpy(query)
        # 1 / sqrt and rsqrt may differ by one float32 step, which moves a bf16 rounding now and then: a bf16 step.
        assert torch.allclose(plain[b].float(), want, rtol=2**-7, atol=1e-3)
        assert (plain[b].float() == want).float().mean() > 0.95
        assert (latent[b].float() == torch.from_numpy(entry)).float().mean() > 0.99
        steps = fp8_steps(fp8[b], ref.f8(want * 8.0))
        assert steps.max() <= 1
        assert (steps == 0).float().mean() > 0.97


def test_value_is_rounded_to_bf16_before_the_scale(weights):
    odd = SimpleNamespace(**vars(weights))
    odd._q_scale_inv = torch.tensor([3.7])
    rows = projected(16)
    assert torch.equal(
        ref.query(rows, odd, "fp8").view(torch.uint8),
        ref.f8(ref.query(rows, odd, "bf16").float() * 3.7).view(torch.uint8),
    )


def test_formats_without_scales_are_equal(weights):
    rows = projected(3)
    assert torch.equal(ref.query(rows, weights, "bf16"), ref.query(rows, weights, "fp8_ds_mla"))
    with pytest.raises(ConfigError, match="kv_format='int8' must be one of"):
        ref.query(rows, weights, "int8")


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_distance_from_exact(weights, rows):
    """Three bf16 roundings in a row, each of relative rms 2^-8 / sqrt(3) at most; then e4m3's 2^-4 / sqrt(3)."""
    p = projected(rows)
    exact = ref.query64(p, weights, "bf16")
    error = (ref.query(p, weights, "bf16").double() - exact).norm() / exact.norm()
    assert error < 2**-8  # sqrt(3) stages
    exact8 = ref.query64(p, weights, "fp8")
    assert torch.allclose(exact8, exact * 8, rtol=1e-12)
    error8 = (ref.query(p, weights, "fp8").double() - exact8).norm() / exact8.norm()
    assert 0.01 < error8 < 2**-4 / 3**0.5 + 2**-8
    entry64 = ref.entry64(p, weights)
    latent, k_pe = ref.entry(p, weights)
    assert bool(((latent.double() - entry64[:, :512]).abs() <= entry64[:, :512].abs() * (2**-8 + 2**-20)).all())
    assert torch.equal(k_pe.double(), entry64[:, 512:])


def test_order_of_summation_moves_few_bytes(weights):
    """What a kernel with another order may show: one e4m3 step, in a small fraction."""
    p = projected(64)
    steps = fp8_steps(ref.query(p, weights), ref.query(p, weights, accumulate=torch.float64))
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 0.01


def test_rows_do_not_depend_on_each_other(weights):
    p = projected(8)
    clean = ref.query(p, weights, accumulate=torch.float64)
    p[3] = torch.nan
    p[5] = torch.inf
    got = ref.query(p, weights, accumulate=torch.float64)
    keep = [0, 1, 2, 4, 6, 7]
    assert fp8_steps(got[keep], clean[keep]).max() == 0


def test_nan_is_the_canonical_byte(weights):
    p = projected(2)
    p[0] = -torch.nan
    query = ref.query(p, weights).view(torch.uint8)
    assert bool((query[0] == 0x7F).all())
    assert not bool((query == 0xFF).any())
    cache = empty_cache(1, 4, "fp8", poison=False)
    ref.insert(p, weights, cache, torch.tensor([2, 3]))
    assert bool((cache[0, 2] == 0x7F).all())


def test_only_the_projection_and_not_the_gate_is_read(weights):
    wide = projected(4)
    narrow = wide[:, :2112].contiguous()
    assert torch.equal(ref.query(wide, weights, "bf16"), ref.query(narrow, weights, "bf16"))


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_ds_mla"])
def test_insert(weights, kv_format):
    p = projected(3)
    cache = empty_cache(2, 4, kv_format)
    ref.insert(p, weights, cache, torch.tensor([6, -1, 0]), kv_format)
    latent, k_pe = ref.entry(p, weights)
    values = torch.cat([latent, k_pe], dim=1)
    for row, page, offset in ((0, 1, 2), (2, 0, 0)):
        got = cache[page, offset]
        if kv_format == "bf16":
            assert torch.equal(got, values[row])
        elif kv_format == "fp8":
            assert torch.equal(got, ref.f8(values[row].float() * 2.0).view(torch.uint8))
        else:
            assert torch.equal(got, ref.ds_mla_pack(latent, k_pe)[row])
    untouched = ref.bits(cache).reshape(8, -1)[[1, 2, 3, 4, 5, 7]]
    assert bool((untouched == 0xFF).all())


def test_eps_matters_where_the_input_is_small():
    """Traps: eps is the layer's, and it is added to the mean, not to the sum."""
    w = MlaWeights.random(DIMS, seed=5)
    one = SimpleNamespace(**{**vars(w), "q_a_layernorm": Parameter(torch.ones(1536).bfloat16()), "rms_norm_eps": 0.25})
    x = torch.full((1, 1536), 0.5).bfloat16()
    got = ref.rms_norm(x, one.q_a_layernorm.weight, one.rms_norm_eps)
    assert torch.equal(got, torch.full_like(got, (0.5 / 0.5**0.5)))
