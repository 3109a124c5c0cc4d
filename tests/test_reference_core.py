"""The attention core, against a loop over keys, and every way in which cores go wrong."""

import math

import numpy as np
import pytest
import torch
from cases import CORE_CASES, FORMATS, HUGE_PAGE, CoreCase, core_inputs

from k3dsl import reference as ref
from k3dsl.errors import ConfigError

CASES = [pytest.param(case.of(f), id=case.of(f).id) for case in CORE_CASES for f in FORMATS]


def by_hand(x, r: int, t: int, h: int, seen: int):
    """(out [512], base-2 lse) of one row by Python's own arithmetic over keys, one at a time."""
    page = x.cache.shape[1]
    query = x.query.double() if x.query.dtype != torch.float8_e4m3fn else x.query.float().double()
    row = query[r * x.q + t, h].numpy()
    keys = []
    for position in range(seen):
        where = torch.tensor([x.block_table[r, position // page]]), torch.tensor([position % page])
        keys.append(ref.read_entries(x.cache, *where, x.kv_format, torch.float64)[0].numpy())
    if not keys:
        return np.zeros(512), -math.inf
    logits = [x.scale * math.fsum(row * key) for key in keys]
    top = max(logits)
    weights = [math.exp(v - top) for v in logits]
    total = math.fsum(weights)
    out = sum(w * key[:512] for w, key in zip(weights, keys, strict=True)) / total * x.out_scale
    return out, (math.log(total) + top) / math.log(2)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("lengths", "q"), [((1, 33, 5), 1), ((3, 34), 4), ((2, 7), 8)])
def test_core64_against_a_loop(kv_format, lengths, q):
    x = core_inputs(CoreCase(lengths, q=q, heads=2, page=32, kv_format=kv_format), seed=1)
    out, lse = x.call(ref.core64)
    for r, length in enumerate(lengths):
        for t in range(q):
            for h in range(2):
                want, want_lse = by_hand(x, r, t, h, max(0, length - (q - 1) + t))
                assert np.allclose(out[r, t, h].numpy(), want, rtol=1e-11, atol=1e-12)
                assert lse[r, t, h].item() == pytest.approx(want_lse, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_core_against_core64(case):
    """Sources of error, each with its bound: 2^-8 of the output for bf16; 2^-11 (fp16) or 2^-8 (bf16) of each
    probability, and 2^-25 below fp16's normal range; a float32 logit of size s, whose 576 products sum up with an
    error of 2^-18 s (seen: 2^-21). The error of all elements together is smaller, as most cancel or lie mid-step.
    """
    x = core_inputs(case)
    out, lse = x.call()
    exact, exact_lse = x.call(ref.core64)
    assert out.dtype == torch.bfloat16
    assert out.shape == exact.shape == (len(case.lengths), case.q, case.heads, 512)
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert bool((out[empty] == 0).all())
    assert not out.isnan().any()
    largest = max((k.float().abs().max().item() * 17 / 16 for k in x.keys if len(k)), default=0.0)
    p_bits = 2**-11 if case.kv_format == "fp8" else 2**-8
    # Logits in units of 1: about 12 standard deviations of 0.5 * spike, or 6.2e4.
    logit = 6.2e4 * 2**-21 if case.low else 12 * case.spike * 2**-18
    bound = exact.abs() * 2**-8 + largest * (p_bits + max(case.lengths) * 2**-25 + 2 * logit) + 1e-6
    assert bool(((out.double() - exact).abs() <= bound).all())
    error = (out.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    assert error < 4e-3
    slack = exact_lse.abs() * 2**-22 + 2 * logit + 1e-6
    assert bool(((lse.double() - exact_lse).abs() <= slack)[~empty].all())


@pytest.mark.parametrize("case", CASES)
def test_poison_changes_no_bit(case):
    poisoned, clean = core_inputs(case, poison=True), core_inputs(case, poison=False)
    assert torch.equal(poisoned.query.view(torch.uint8), clean.query.view(torch.uint8))
    for a, b in zip(poisoned.call(), clean.call(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("q", [2, 3, 4, 5, 8])
def test_q_tokens_equal_q_calls(q, kv_format):
    lengths = (8, 64, 65, 300)
    x = core_inputs(CoreCase(lengths, q=q, heads=6, kv_format=kv_format), seed=2)
    out, lse = x.call(ref.core64)
    for t in range(q):
        alone, alone_lse = x.call(
            ref.core64,
            query=x.query.unflatten(0, (-1, q))[:, t].contiguous(),
            lengths=x.lengths - (q - 1) + t,
            q=1,
        )
        assert torch.allclose(out[:, t], alone[:, 0], rtol=1e-12, atol=1e-13)
        assert torch.allclose(lse[:, t], alone_lse[:, 0], rtol=1e-13)


def test_not_causal_sees_every_key():
    x = core_inputs(CoreCase((5, 70), q=3, heads=2), seed=3)
    out, lse = x.call(ref.core64, causal=False)
    for t in range(3):
        alone, alone_lse = x.call(ref.core64, query=x.query.unflatten(0, (-1, 3))[:, t].contiguous(), q=1)
        assert torch.allclose(out[:, t], alone[:, 0], rtol=1e-12, atol=1e-13)
        assert torch.allclose(lse[:, t], alone_lse[:, 0], rtol=1e-13)
    assert not torch.allclose(out[:, 0], x.call(ref.core64)[0][:, 0])


def test_q_above_length_masks_the_first_rows():
    x = core_inputs(CoreCase((1, 2, 3), q=4, heads=2))
    assert ref.visible_keys(x.lengths, 4).tolist() == [[0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3]]
    out, lse = x.call()
    for r, unseen in enumerate((3, 2, 1)):
        assert bool((out[r, :unseen] == 0).all())
        assert bool((lse[r, :unseen] == -torch.inf).all())
        assert bool(lse[r, unseen:].isfinite().all())
        assert bool((out[r, unseen:] != 0).any(dim=-1).all())


def test_empty_rows_leave_the_others_alone():
    with_empty = core_inputs(CoreCase((64, 0, 65), heads=6), seed=4)
    keep = [0, 2]
    alone = with_empty.call(
        query=with_empty.query[keep].contiguous(),
        block_table=with_empty.block_table[keep],
        lengths=with_empty.lengths[keep],
    )
    out, lse = with_empty.call()
    assert torch.equal(out[keep], alone[0])
    assert torch.equal(lse[keep], alone[1])
    assert bool((out[1] == 0).all() and (lse[1] == -torch.inf).all())


def test_table_shapes():
    """Exactly as wide as needed, wider, a slice of a wider one, int64; more metadata rows than requests."""
    x = core_inputs(CoreCase((100, 64, 129), spare_columns=4, table_slice=True), seed=5)
    want = x.call()[0]
    assert x.block_table.stride(0) > x.block_table.shape[1] > 3
    assert int((x.block_table == HUGE_PAGE).sum()) > 0
    for table in (x.block_table[:, :3], x.block_table.contiguous(), x.block_table.long()):
        assert torch.equal(x.call(block_table=table)[0], want)
    more = torch.cat([x.block_table, torch.full_like(x.block_table, HUGE_PAGE)])
    assert torch.equal(x.call(block_table=more, lengths=torch.cat([x.lengths, x.lengths + 999]))[0], want)


def test_lse_is_base_2_without_the_output_scale():
    cache = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    query = torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    query[..., 0] = 1.0
    cache[0, :8, 0] = 3.0
    table = torch.zeros(1, 1, dtype=torch.int32)
    for scale, out_scale in ((1.0, 1.0), (0.5, 7.0)):
        _, lse = ref.core(query, cache, table, torch.tensor([8]), scale=scale, out_scale=out_scale, kv_format="bf16")
        assert lse.item() == pytest.approx(3.0 + 3.0 * scale * math.log2(math.e), rel=1e-6)


@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
def test_low_logits_still_are_a_softmax(kv_format):
    x = core_inputs(CoreCase((300,), heads=2, low=True, kv_format=kv_format), seed=6)
    out, lse = x.call(ref.core64)
    assert -6.3e4 * math.log2(math.e) < lse.min() < lse.max() < -6.0e4 * math.log2(math.e)
    # The common -6.1e4 cancels: without the rope part the output is the same.
    query = x.query.float()
    query[..., 512:] = 0
    plain, _ = x.call(ref.core64, query=query)
    assert torch.allclose(out, plain, rtol=1e-7, atol=1e-8)
    assert (x.call()[0].double() - out).norm() / out.norm() < 2e-2


def test_scales_are_applied():
    x = core_inputs(CoreCase((70,), heads=2), seed=7)
    out, lse = x.call(ref.core64)
    twice, lse2 = x.call(ref.core64, out_scale=2 * x.out_scale)
    assert torch.allclose(twice, 2 * out, rtol=1e-14)
    assert torch.equal(lse, lse2)
    # fp8 with scales is the exact computation on dequantized values.
    key = ref.f8(x.keys[0].float() * 2.0).double() * 0.5
    query = x.query.float().double() * 0.25
    p = torch.softmax(query[0] @ key.T * 192**-0.5, dim=1)
    assert torch.allclose(out[0, 0], p @ key[:, :512], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("probabilities", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_rounding_of_probabilities(probabilities):
    x = core_inputs(CoreCase((2000,), heads=4), seed=8)
    exact = x.call(ref.core64)[0]
    error = ((x.call(probabilities=probabilities)[0].double() - exact).norm() / exact.norm()).item()
    # bf16 output alone has an rms of 2^-8 / sqrt(3) at most; e4m3 rounds by up to 2^-4, averaged over many keys.
    assert error < (3e-2 if probabilities == torch.float8_e4m3fn else 2**-8 / 3**0.5)


def test_inputs_as_bytes_and_shapes():
    x = core_inputs(CoreCase((9, 70), q=2, heads=2), seed=9)
    want = x.call()[0]
    assert torch.equal(x.call(query=x.query.view(torch.uint8))[0], want)
    assert torch.equal(x.call(query=x.query.unflatten(0, (2, 2)))[0], want)
    assert torch.equal(x.call(cache=x.cache.view(torch.float8_e4m3fn))[0], want)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": 3}, "q=3 dividing B"),
        ({"lengths": torch.ones(1, dtype=torch.int32)}, "lengths has 1 rows and block_table 2, must have 2 or more"),
        ({"kv_format": "fp4"}, "kv_format='fp4' must be one of"),
        ({"kv_format": "bf16"}, "a bf16 cache is"),
    ],
)
def test_errors(change, says):
    x = core_inputs(CoreCase((9, 70), q=2, heads=2))
    with pytest.raises(ConfigError, match=says):
        x.call(**change)
