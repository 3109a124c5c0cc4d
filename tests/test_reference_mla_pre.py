"""The oracle of mla_pre against formulations that share nothing with it: loops over tokens in float64, the stock chain
with online softmax over tiles, matrix products of dequantized weights, byte-wise cache writes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from k3dsl import reference
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError
from k3dsl.reference import mla_pre as oracle
from k3dsl.reference.mxfp4 import mxfp4_dequantize, mxfp4_quantize
from k3dsl.weights import MlaWeights


@pytest.fixture(scope="module")
def weights() -> oracle.PreWeights:
    return oracle.PreWeights.random(seed=3)


def step_inputs(rows: int, nblocks: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "prefix": (torch.randn(rows, 7168, generator=generator) * 2).bfloat16(),
        "delta": (torch.randn(rows, 7168, generator=generator) * 0.5).bfloat16(),
        "blocks": (torch.randn(rows, nblocks + 1, 7168, generator=generator) * 2).bfloat16(),
    }


def ulp(x: Tensor) -> Tensor:
    """The distance of bf16 neighbours at x."""
    return torch.exp2(torch.floor(torch.log2(x.double().abs().clamp(min=2.0**-126))) - 7)


@pytest.mark.parametrize("nblocks", [1, 3, 8])
def test_the_residual_mix_is_the_stock_online_softmax(weights: oracle.PreWeights, nblocks: int) -> None:
    """One token at a time: sources in tiles of four with a running maximum, exp, then the input norm."""
    given = step_inputs(3, nblocks)
    step = oracle.mla_pre(weights, nblocks=nblocks, **given)
    nw, qk, in_nw = (t.double().numpy() for t in (weights.ares_nw, weights.ares_qk, weights.in_nw))
    for t in range(3):
        p = (given["prefix"][t].float() + given["delta"][t].float()).bfloat16()
        assert torch.equal(step.prefix[t], p)
        rows = [*given["blocks"][t, :nblocks], p]
        top, total, acc = -np.inf, 0.0, np.zeros(7168)
        for first in range(0, len(rows), 4):
            for row in rows[first : first + 4]:
                v = row.double().numpy()
                normed = v / np.sqrt((v * v).mean() + 1e-5) * nw
                logit = float(normed @ qk)
                new = max(top, logit)
                shrink = np.exp(top - new)
                acc, total, top = acc * shrink + np.exp(logit - new) * v, total * shrink + np.exp(logit - new), new
        m = acc / total
        x = m / np.sqrt((m * m).mean() + 1e-5) * in_nw
        assert ((step.x[t].double() - torch.from_numpy(x)).abs() <= 0.51 * ulp(torch.from_numpy(x)) + 1e-5).all()
        assert step.weights[t, :-1].max() == 1
        assert torch.isclose(step.weights[t, :-1].sum(), step.weights[t, -1])


def test_without_delta_the_prefix_is_kept(weights: oracle.PreWeights) -> None:
    given = step_inputs(2, 1)
    step = oracle.mla_pre(weights, nblocks=1, **(given | {"delta": None}))
    assert torch.equal(step.prefix, given["prefix"])
    assert not torch.equal(step.x, oracle.mla_pre(weights, nblocks=1, **given).x)


def test_projections_and_gate(weights: oracle.PreWeights) -> None:
    given = step_inputs(2, 2)
    step = oracle.mla_pre(weights, nblocks=2, **given)
    merged = torch.cat([weights.w_qkv, weights.w_g]).double()
    exact = step.x.double() @ merged.T
    assert ((step.qa.double() - exact[:, :2112]).abs() <= 0.51 * ulp(exact[:, :2112]) + 1e-5).all()
    g = exact[:, 2112:].bfloat16().double()
    near = (g - exact[:, 2112:]).abs() < 0.49 * ulp(exact[:, 2112:])  # where float32 rounds the gate alike
    want = 1 / (1 + torch.exp(-g))
    assert ((step.gate.double() - want).abs() <= 0.51 * ulp(want) + 1e-7)[near].all()
    assert near.double().mean() > 0.9


def test_the_gate_of_large_arguments() -> None:
    g = torch.tensor([-torch.inf, -1e30, -100.0, 0.0, 100.0, torch.inf]).bfloat16()
    assert oracle.gate(g)[[0, 1, 3, 4, 5]].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert 0 <= float(oracle.gate(g)[2]) < 1e-40


def test_norms_and_the_entry_agree_with_the_layer_reference(weights: oracle.PreWeights) -> None:
    """The NVIDIA half's oracle of the same norms, with scales of 1: same rounding points, so the same bytes."""
    dims = MlaDims()
    qa = (torch.randn(5, 2112, generator=torch.Generator().manual_seed(4)) * 3).bfloat16()
    qc, entry = oracle.norms(qa, weights)
    plain = MlaWeights.from_kv_b(
        dims,
        q_b=weights.w_qb,
        kv_b=torch.zeros(dims.heads * 256, 512, dtype=torch.bfloat16),
        q_a_norm=weights.q_nw,
        kv_a_norm=weights.kv_nw,
    )
    latent, rope = reference.entry(qa, plain)
    cache = torch.zeros(1, 8, 576, dtype=torch.uint8)
    reference.write_entries(cache, torch.arange(5), latent, rope, "fp8")
    assert torch.equal(entry, cache[0, :5])
    assert torch.equal(qc, reference.rms_norm(qa[:, :1536], weights.q_nw, 1e-5))


def test_insert_writes_live_slots_only() -> None:
    entry = torch.randint(0, 255, (4, 576), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    pool = torch.full((6, 3, 16, 576), 0xEE, dtype=torch.uint8)
    cache = pool[:, 1]  # interleaved layers
    oracle.insert(entry, cache, torch.tensor([5 * 16 + 3, -1, 0, 17]))
    want = np.full((6, 3, 16, 576), 0xEE, np.uint8)
    for row, (block, at) in {0: (5, 3), 2: (0, 0), 3: (1, 1)}.items():
        want[block, 1, at] = entry[row].numpy()
    assert (pool.numpy() == want).all()


def test_absorption_in_mxfp4_is_the_product_of_dequantized_values(weights: oracle.PreWeights) -> None:
    qn = torch.randn(2, 12, 128, generator=torch.Generator().manual_seed(6)).bfloat16()
    got = oracle.absorb_mxfp4(qn, weights.w_k, weights.w_k_scale)
    for s, h in ((0, 0), (1, 5), (1, 11)):
        a = mxfp4_dequantize(*mxfp4_quantize(qn[s, h]))
        w = mxfp4_dequantize(weights.w_k[h], weights.w_k_scale[h])
        blocks = (w * a).view(512, 4, 32).sum(2)  # a float32 sum is exact within a block
        assert torch.equal(got[s, h], (blocks[:, 0] + blocks[:, 1] + blocks[:, 2] + blocks[:, 3]).bfloat16())
    plain = oracle.absorb_bf16(qn, weights.w_uk_t)
    error = (got.double() - plain.double()).norm() / plain.double().norm()
    assert 0.02 < error < 0.25  # MXFP4 is lossy; the bf16 variant is what it stands for


def test_absorption_in_bf16_is_the_layer_references(weights: oracle.PreWeights) -> None:
    qn = torch.randn(3, 12, 128, generator=torch.Generator().manual_seed(7)).bfloat16()
    got = oracle.absorb_bf16(qn, weights.w_uk_t, torch.float64)
    want = torch.stack([qn[:, h].double() @ weights.w_uk_t[h].double() for h in range(12)], dim=1)
    assert torch.equal(got, want.float().bfloat16())


def test_queries_saturate_and_gather_with_padding() -> None:
    ranks = [torch.full((2, 12, 576), float(r + 1), dtype=torch.bfloat16) for r in range(2)]
    ranks[1][0, 3, 7] = 1000.0
    eight = [oracle.query(q[..., :512], q[..., 512:]) for q in ranks]
    assert eight[1].view(torch.uint8)[0, 3, 7] == 0x7E  # 448
    every = oracle.gather_heads(eight, 32)
    assert every.shape == (2, 32, 576)
    assert (every[:, :12].float() == 1).all()
    assert torch.equal(every[:, 12:24].view(torch.uint8), eight[1].view(torch.uint8))
    assert torch.equal(every[:, 24:].view(torch.uint8), every[:, :8].view(torch.uint8))
    assert torch.equal(oracle.query(ranks[0][..., :512], ranks[0][..., 512:], qbf16=True), ranks[0])
    with pytest.raises(ConfigError, match="q_heads=23"):
        oracle.gather_heads(eight, 23)


@pytest.mark.parametrize("w_uk", ["bf16", "mxfp4"])
def test_a_step_stays_near_float64(weights: oracle.PreWeights, w_uk: str) -> None:
    given = step_inputs(4, 5, seed=8)
    step = oracle.mla_pre(weights, nblocks=5, w_uk=w_uk, **given)
    exact = oracle.mla_pre64(weights, nblocks=5, w_uk=w_uk, **given)

    def error(mine: Tensor, theirs: Tensor) -> float:
        return float((mine.double() - theirs).norm() / theirs.norm())

    assert error(step.x, exact.x) < 5e-3
    assert error(step.gate, exact.gate) < 5e-3
    assert error(step.entry.view(torch.float8_e4m3fn).float(), exact.entry) < 0.04
    limit = 0.01 if w_uk == "bf16" else 0.2  # the activation in four bits
    assert error(step.query(qbf16=True), exact.query) < limit
    assert error(step.query().float(), exact.query) < limit + 0.04


def test_the_order_of_sums_hardly_matters(weights: oracle.PreWeights) -> None:
    """float32 and float64 sums round a few values to the other neighbour; through the chain that stays small."""
    given = step_inputs(2, 8, seed=9)
    one, two = (oracle.mla_pre(weights, nblocks=8, accumulate=a, **given) for a in (torch.float32, torch.float64))
    for name in ("x", "qa", "qc", "gate", "qn"):
        a, b = getattr(one, name).double(), getattr(two, name).double()
        assert float((a - b).norm() / b.norm()) < 1e-3, name


def test_ranks_share_what_is_replicated() -> None:
    first = oracle.PreWeights.random(seed=1, rank=0)
    second = oracle.PreWeights.random(seed=1, rank=1, shared=first)
    assert second.w_qkv is first.w_qkv
    assert not torch.equal(second.w_g, first.w_g)
    assert torch.equal(second.w_qb, oracle.PreWeights.random(seed=1, rank=1).w_qb)


def test_the_gated_value() -> None:
    generator = torch.Generator().manual_seed(11)
    latent, w_uv = torch.randn(2, 12, 512, generator=generator), torch.randn(12, 512, 128, generator=generator) * 0.05
    latent, w_uv = latent.bfloat16(), w_uv.bfloat16()
    gated = oracle.gate(torch.randn(2, 1536, generator=generator).bfloat16())
    got = oracle.gated_value(latent, w_uv, gated)
    up = torch.stack([latent[:, h].double() @ w_uv[h].double() for h in range(12)], dim=1).flatten(1)
    want = up.float().bfloat16().double() * gated.double()
    assert ((got.double() - want).abs() <= 1.01 * ulp(want)).all()
