"""A whole layer through the oracle: the parts chained, in every format, as a step of an engine would."""

import pytest
import torch
from cases import FORMATS, layer_inputs, slots_of

from k3dsl import reference as ref
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError
from k3dsl.weights import MlaWeights

DIMS = MlaDims.kimi_k3(16)
LENGTHS = (1, 63, 64, 65, 1500, 0)


@pytest.fixture(scope="module")
def weights():
    return MlaWeights.random(DIMS, seed=1, q_scale=0.5, k_scale=0.25)


def run(x, weights, **changes):
    named = {k: changes.get(k, getattr(x, k)) for k in ("projected", "cache", "slots", "block_table", "lengths", "q")}
    return ref.decode_layer(attention=weights, kv_format=x.kv_format, out=changes.get("out"), **named)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("q", [1, 4])
def test_distance_from_exact(kv_format, q, weights):
    x = layer_inputs(DIMS, LENGTHS, q=q, kv_format=kv_format, k_scale=0.25)
    out = run(x, weights)
    exact = ref.decode_layer64(x.projected, weights, x.cache, x.block_table, x.lengths, q, kv_format)
    assert out.shape == (len(LENGTHS) * q, 6 * 128)
    assert out.dtype == torch.bfloat16
    assert bool((out[-q:] == 0).all())  # the empty request, whose rows are NaN
    assert not out.isnan().any()
    # Relative rms. The query in e4m3 is 2.6 % off, and so are logits of deviation 1; it moves probabilities by so
    # much, and outputs by less where several keys share the weight. Without it, five bf16 roundings are left.
    for r, length in enumerate(LENGTHS[:-1]):
        rows = slice(r * q + max(0, q - length), (r + 1) * q)
        error = ((out[rows].double() - exact[rows]).norm() / exact[rows].norm()).item()
        assert error < (4e-2 if kv_format == "fp8" and length > 1 else 8e-3), (length, error)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_new_tokens_are_attended(kv_format, weights):
    """A request of one token returns that token's own value: it was inserted before the core read it."""
    x = layer_inputs(DIMS, (1,), kv_format=kv_format, k_scale=0.25)
    out = run(x, weights)
    page, offset = divmod(int(x.slots[0]), 64)
    entry = ref.read_entries(x.cache, torch.tensor([page]), torch.tensor([offset]), kv_format)
    latent = (entry[:, None, :512] * (0.25 if kv_format == "fp8" else 1)).bfloat16().expand(1, 6, 512)
    gate = ref.gate_of(x.projected, weights)
    assert torch.equal(out, ref.value(latent, weights.W_UV, gate, x.lengths))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_four_tokens_equal_four_steps(kv_format, weights):
    """The cache ends up the same to the bit; outputs may differ by the order of float32 sums."""
    lengths = (9, 64, 300)
    together = layer_inputs(DIMS, lengths, q=4, kv_format=kv_format, k_scale=0.25, seed=2)
    steps = layer_inputs(DIMS, lengths, q=4, kv_format=kv_format, k_scale=0.25, seed=2)
    whole = run(together, weights).unflatten(0, (3, 4))
    for t in range(4):
        rows = torch.arange(3) * 4 + t
        one = run(
            steps, weights, projected=steps.projected[rows], slots=steps.slots[rows], lengths=steps.lengths - 3 + t, q=1
        )
        assert torch.allclose(one.float(), whole[:, t].float(), rtol=2**-6, atol=2e-3)
    assert torch.equal(ref.bits(steps.cache), ref.bits(together.cache))


def test_skipped_slots_leave_the_cache(weights):
    x = layer_inputs(DIMS, (5, 70), kv_format="fp8", k_scale=0.25)
    before = x.cache.clone()
    written = slots_of(x.block_table, 0, torch.tensor([4]), 64)
    run(x, weights, slots=torch.tensor([int(written), -1]))
    changed = (before != x.cache).any(dim=2).nonzero().tolist()
    assert changed == [list(divmod(int(written), 64))]


def test_short_metadata_is_padded_with_empty_requests(weights):
    x = layer_inputs(DIMS, (5, 70, 3), kv_format="fp8", k_scale=0.25)
    want = run(x, weights)
    out = torch.full_like(want, torch.nan)
    got = run(x, weights, lengths=x.lengths[:2], out=out)
    assert got is out
    assert torch.equal(out[:2], want[:2])
    assert bool((out[2] == 0).all())
    table, lengths = ref.pad_metadata(4, x.block_table[:1], x.lengths)
    assert lengths.tolist() == [5, 0, 0, 0]
    assert bool((table[1:] == 0).all())
    assert ref.pad_metadata(2, x.block_table, x.lengths) == (x.block_table, x.lengths)


def test_scales_of_each_format(weights):
    assert ref.scales(weights) == (pytest.approx(192**-0.5 * 0.5 * 0.25), 0.25)
    for kv_format in ("bf16", "fp8_ds_mla"):
        assert ref.scales(weights, kv_format) == (192**-0.5, 1.0)


def test_rows_must_divide(weights):
    x = layer_inputs(DIMS, (5, 70, 3), kv_format="fp8")
    with pytest.raises(ConfigError, match="q=2 must divide the 3 rows"):
        run(x, weights, q=2)
