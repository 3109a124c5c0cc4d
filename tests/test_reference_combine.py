"""Merging by LSE, and the value kernel: gate, roundings, zeros."""

import math

import pytest
import torch
from cases import bf16_steps

from k3dsl import reference as ref


def test_shards_of_two_and_eight_equal_keys():
    """The base of the LSE: with natural logarithms the weights would be 0.275 and 0.725."""
    partials = torch.stack([torch.full((1, 1, 512), 1.0), torch.full((1, 1, 512), 11.0)])
    lse = torch.tensor([math.log2(2), math.log2(8)])[:, None, None]
    out, total = ref.merge(partials, lse, torch.float32)
    assert torch.allclose(out, torch.full_like(out, 0.2 * 1 + 0.8 * 11))
    assert total.item() == pytest.approx(math.log2(10))


@pytest.mark.parametrize("empty", [ref.EMPTY, -math.inf, math.nan, math.inf, -3.2e38, 3.2e38])
def test_an_empty_source_never_counts(empty):
    g = torch.Generator().manual_seed(1)
    partials = torch.randn(3, 2, 512, generator=g)
    lse = torch.tensor([[1.0, 2.0], [empty, empty], [-4.0, 9.0]])
    want, want_lse = ref.merge(partials[[0, 2]], lse[[0, 2]])
    partials[1] = torch.nan
    out, total = ref.merge(partials, lse)
    assert torch.equal(out, want)
    assert torch.equal(total, want_lse)


def test_all_sources_empty():
    out, lse = ref.merge(torch.full((2, 1, 512), torch.nan), torch.tensor([[ref.EMPTY], [-math.inf]]))
    assert bool((out == 0).all())
    assert lse.item() == -math.inf


def test_merge_far_below_zero():
    """Logits near -6e4 differ by little, and only their difference counts."""
    g = torch.Generator().manual_seed(2)
    partials, lse = torch.randn(4, 3, 512, generator=g).double(), torch.randn(4, 3, generator=g).double()
    near, far = ref.merge(partials, lse, torch.float64), ref.merge(partials, lse - 8.6e4, torch.float64)
    assert torch.allclose(near[0], far[0], rtol=1e-9)
    assert torch.allclose(near[1], far[1] + 8.6e4)


def test_merge_rounds_once():
    g = torch.Generator().manual_seed(3)
    partials, lse = torch.randn(8, 5, 512, generator=g).bfloat16(), torch.randn(8, 5, generator=g)
    exact, _ = ref.merge(partials, lse.double(), torch.float64)
    out, _ = ref.merge(partials, lse)
    # Half a bf16 step, plus the float32 sum of eight terms.
    assert bool(((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all())
    assert bf16_steps(out, exact.bfloat16()).max() <= 1


def test_finite_lse():
    given = torch.tensor([0.0, -1e5, 2.9e38, math.nan, math.inf, -math.inf, -3e38, 3e38, -3.3e38])
    want = torch.tensor([0.0, -1e5, 2.9e38, *[ref.EMPTY] * 6])
    assert torch.equal(ref.finite_lse(given), want)
    assert bool((ref.finite_lse(given).view(torch.int32) != -1).all())


def test_published_partials_hold_no_sentinel():
    partial = torch.tensor([-0.0, 0.0, 1.5, -2.0] * 128).bfloat16().repeat(4, 2, 1)
    partial[2:] = torch.nan  # what a core may leave for an empty request
    lse = torch.zeros(4, 2)
    out, sent = ref.published(partial, lse, torch.tensor([3, 0]), q=2)
    assert torch.equal(out[:2], partial[:2])
    assert bool((out[2:] == 0).all())
    assert not bool((out.view(torch.int16) == -32768).any())
    assert torch.equal(sent, torch.tensor([[0.0, 0.0], [0.0, 0.0], [ref.EMPTY] * 2, [ref.EMPTY] * 2]))


def value_inputs(rows: int = 6, heads: int = 2, seed: int = 4):
    g = torch.Generator().manual_seed(seed)
    kv_b = (torch.randn(heads, 256, 512, generator=g) * 512**-0.5).bfloat16()
    latent = torch.randn(rows, heads, 512, generator=g).bfloat16()
    gate = torch.randn(rows, 2112 + heads * 128, generator=g).bfloat16()[:, 2112:]
    return latent, kv_b[:, 128:].transpose(1, 2), gate


def test_value_rounds_twice():
    latent, w_uv, gate = value_inputs()
    lengths = torch.ones(6, dtype=torch.int32)
    out = ref.value(latent, w_uv, gate, lengths)
    for b in range(6):
        for h in range(2):
            up = (latent[b, h].double() @ w_uv[h].double()).float().bfloat16().double()
            want = (up / (1 + torch.exp(-gate[b, h * 128 : h * 128 + 128].double()))).bfloat16()
            # The float32 sum may fall on the other side of a rounding: a step, and seldom.
            steps = bf16_steps(out[b, h * 128 : h * 128 + 128], want)
            assert steps.max() <= 1
            assert (steps == 0).float().mean() > 0.95
    exact = ref.value64(latent, w_uv, gate, lengths)
    assert bool(((out.double() - exact).abs() <= exact.abs() * (2 * 2**-8 + 2**-16) + 1e-6).all())
    assert bool((ref.value(latent.unflatten(0, (3, 2)), w_uv, gate, lengths[:3], q=2) == out).all())


@pytest.mark.parametrize("q", [1, 2, 3])
def test_rows_of_empty_requests_are_zero_by_selection(q):
    latent, w_uv, gate = value_inputs()
    lengths = torch.ones(6 // q, dtype=torch.int32)
    lengths[1] = 0
    lengths[-1] = -1 if q < 3 else 0
    clean = ref.value(latent, w_uv, gate, torch.ones_like(lengths), q)
    empty = (lengths <= 0).repeat_interleave(q)
    latent[empty] = torch.nan
    gate = gate.clone()
    gate[empty] = torch.inf
    out = ref.value(latent, w_uv, gate, lengths, q)
    assert bool((out[empty] == 0).all())
    assert not bool(torch.signbit(out[empty]).any())
    assert torch.equal(out[~empty], clean[~empty])
    assert bool((ref.value64(latent, w_uv, gate, lengths, q)[empty] == 0).all())


def test_extreme_gates():
    latent, w_uv, gate = value_inputs(4)
    gate = gate.clone()
    gate[0], gate[1], gate[2] = -1e4, 1e4, -torch.inf
    out = ref.value(latent, w_uv, gate, torch.ones(4))
    assert bool((out[[0, 2]] == 0).all())
    assert torch.equal(out[1], ref.up_project(latent, w_uv)[1])
