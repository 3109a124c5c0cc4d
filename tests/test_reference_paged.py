"""Cache formats: what is written, where, and that nothing else is."""

import struct

import numpy as np
import pytest
import torch
from cases import FORMATS, WIDTH, empty_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference_rounding import nearest

from k3dsl import reference as ref
from k3dsl.errors import ConfigError


def record_by_hand(latent: np.ndarray, rope_bits: np.ndarray) -> bytes:
    """One 656-byte record from 512 float32 latents and 64 rope values' bits, in scalar arithmetic."""
    codes, scales = b"", b""
    for tile in latent.astype(np.float64).reshape(4, 128):
        t = max(float(np.float32(np.abs(tile).max()) / np.float32(448)), float(np.float32(1e-4)))
        scale = 2.0**-13  # nothing smaller is possible
        while scale < t:
            scale *= 2
        codes += nearest(tile / scale).tobytes()
        scales += struct.pack("<f", scale)
    return codes + scales + rope_bits.astype("<u2").tobytes()


def half_bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.05, 1.0, 30.0, 6e4])
def test_record_bytes(size, dtype):
    g = torch.Generator().manual_seed(1)
    latent = (torch.randn(5, 512, generator=g) * size).clamp(-6.5e4, 6.5e4).to(dtype)
    latent[1, 128:256] = 0  # a tile of zeros: the floor 2^-13 and bytes 0
    latent[2, 0] = 448.0  # the maximum is exactly 448 * 2^k: the scale is 2^k and not the next
    latent[3, 300] = -224.0
    rope = torch.randn(5, 64, generator=g).to(dtype) * 100  # larger than the latents: it has no part in the scales
    got = ref.ds_mla_pack(latent, rope)
    for i in range(5):
        assert got[i].numpy().tobytes() == record_by_hand(latent[i].float().numpy(), half_bits(rope[i])), i
    scales = ref.ds_mla_scales(latent)
    assert bool((torch.log2(scales) == torch.log2(scales).round()).all())
    assert scales.min() >= 2.0**-13
    assert scales[1, 1] == 2.0**-13


@settings(deadline=None, max_examples=60)
@given(st.integers(-20, 15), st.integers(128, 255))
def test_scale_of_every_magnitude(exponent, mantissa):
    """Around every power of two of max|x| / 448, where a scale could fall on the wrong side."""
    latent = torch.zeros(1, 512, dtype=torch.bfloat16)
    latent[0, 7] = mantissa * 2.0**exponent
    t = max(np.float32(mantissa * 2.0**exponent) / np.float32(448), np.float32(1e-4))
    scale = float(ref.ds_mla_scales(latent)[0, 0])
    assert scale >= t > scale / 2
    assert np.log2(scale).is_integer()


def test_unpack_inverts_pack_within_a_step():
    g = torch.Generator().manual_seed(2)
    latent, rope = torch.randn(9, 512, generator=g).bfloat16(), torch.randn(9, 64, generator=g).bfloat16()
    back, back_rope = ref.ds_mla_unpack(ref.ds_mla_pack(latent, rope))
    assert torch.equal(back_rope, rope)
    scale = ref.ds_mla_scales(latent).repeat_interleave(128, dim=1)
    # Half a step: 2^-4 of a normal value, 2^-10 of the scale below the smallest normal one.
    assert bool(((back - latent.float()).abs() <= torch.maximum(latent.float().abs() * 2**-4, scale * 2**-10)).all())
    assert torch.equal(back, ref.ds_mla_unpack(ref.ds_mla_pack(back.bfloat16(), rope))[0]), "exact in bf16"


def test_unpack_reads_any_scale():
    """Other writers of the format do not round scales to powers of two."""
    record = ref.ds_mla_pack(torch.ones(1, 512).bfloat16(), torch.zeros(1, 64).bfloat16())
    record[0, :512] = torch.tensor([0x38], dtype=torch.uint8)  # 1.0
    record[0, 512:528] = torch.tensor([0.1, 0.3, 7.0, 1e-3]).view(torch.uint8)
    latent, _ = ref.ds_mla_unpack(record)
    assert torch.equal(latent[0, ::128], torch.tensor([0.1, 0.3, 7.0, 1e-3]))


def rows(n: int, seed: int = 3):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 512, generator=g).bfloat16(), torch.randn(n, 64, generator=g).bfloat16()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("gap", [0, 3])
def test_only_live_slots_change(kv_format, gap):
    cache = empty_cache(4, 8, kv_format, gap=gap)
    whole = cache.as_strided((4, 8 + gap, WIDTH[kv_format]), cache.stride())
    before = ref.bits(whole).clone()
    latent, rope = rows(5)
    slots = torch.tensor([-1, 0, -1, 31, 9])
    ref.write_entries(cache, slots, latent, rope, kv_format, 2.0)
    changed = (ref.bits(whole) != before).any(dim=2).nonzero().tolist()
    assert changed == [[0, 0], [1, 1], [3, 7]]
    back = ref.read_entries(cache, torch.tensor([0, 3, 1]), torch.tensor([0, 7, 1]), kv_format)
    want = torch.cat([latent, rope], dim=1)[[1, 3, 4]].float() * (2.0 if kv_format == "fp8" else 1.0)
    assert bool(((back - want).abs() <= want.abs() * 2**-4 + 2**-10).all())
    if kv_format == "bf16":
        assert torch.equal(back, want)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_token_stride(kv_format):
    """Entries apart from one another, as where two layers share a page."""
    pair = torch.stack([empty_cache(3, 4, kv_format), empty_cache(3, 4, kv_format)], dim=2)
    mine, other = pair[:, :, 0], pair[:, :, 1]
    before = ref.bits(other).clone()
    latent, rope = rows(12)
    ref.write_entries(mine, torch.arange(12), latent, rope, kv_format)
    assert torch.equal(ref.bits(other), before)
    assert not ref.read_entries(mine, torch.arange(12) // 4, torch.arange(12) % 4, kv_format).isnan().any()


@pytest.mark.parametrize("passes", [31, 32])
def test_far_slots(passes):
    """A slot whose byte offset passes 2^31 and 2^32. The memory in between is never touched."""
    page_bytes = 64 * 576
    stride = 2**passes // 2 + page_bytes
    flat = torch.empty(2 * stride + page_bytes, dtype=torch.uint8)
    cache = flat.as_strided((3, 64, 576), (stride, 576, 1))
    latent, rope = rows(1)
    ref.write_entries(cache, torch.tensor([2 * 64 + 63]), latent, rope, "fp8")
    assert 2 * stride > 2**passes
    want = ref.f8(torch.cat([latent, rope], dim=1)).view(torch.uint8)[0]
    assert torch.equal(flat[2 * stride + 63 * 576 :][:576], want)


def test_dtypes_of_a_cache():
    latent, rope = rows(3)
    as_bytes, as_f8 = torch.zeros(1, 4, 576, dtype=torch.uint8), torch.zeros(1, 4, 576).to(torch.float8_e4m3fn)
    for cache in (as_bytes, as_f8):
        ref.write_entries(cache, torch.arange(3), latent, rope, "fp8")
    assert torch.equal(as_bytes, as_f8.view(torch.uint8))
    typed, raw = torch.zeros(1, 4, 576, dtype=torch.bfloat16), torch.zeros(1, 4, 1152, dtype=torch.uint8)
    for cache in (typed, raw):
        ref.write_entries(cache, torch.arange(3), latent, rope, "bf16")
    assert torch.equal(typed.view(torch.uint8), raw)


@pytest.mark.parametrize(
    ("cache", "kv_format", "says"),
    [
        (torch.zeros(1, 4, 576), "bf16", r"float32 \(1, 4, 576\).*16-bit floats"),
        (torch.zeros(1, 4, 656, dtype=torch.uint8), "fp8", r"\[pages, page_size, 576\] of bytes"),
        (torch.zeros(4, 656, dtype=torch.uint8), "fp8_ds_mla", r"\[pages, page_size, 656\]"),
        (torch.zeros(1, 576, 4, dtype=torch.uint8).transpose(1, 2), "fp8", "last stride 1"),
        (torch.zeros(1, 4, 576, dtype=torch.uint8), "fp4", "kv_format='fp4' must be one of bf16, fp8, fp8_ds_mla"),
    ],
)
def test_wrong_caches_are_named(cache, kv_format, says):
    with pytest.raises(ConfigError, match=says):
        ref.entries_of(cache, kv_format)
