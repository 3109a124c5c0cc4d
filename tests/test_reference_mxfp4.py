"""MXFP4 on the host against its definitions: every bf16 magnitude, every midpoint, search for the nearest code."""

import math

import numpy as np
import pytest
import torch

from k3dsl.errors import ConfigError
from k3dsl.reference.mxfp4 import E2M1, even_code, mxfp4_dequantize, mxfp4_quantize, quantize_w_uk, scale_of

FINITE = torch.arange(0x7F80, dtype=torch.int32)  # the 15 bits of every finite bf16 magnitude


def test_the_even_scale_of_every_magnitude() -> None:
    """Against floats and logarithms: round max|x| to its quarter binade upwards, take floor(log2) - 2, clamp."""
    magnitude = FINITE.to(torch.int16).view(torch.bfloat16).double().numpy()
    mantissa, exponent = np.frexp(magnitude)  # mantissa in [0.5, 1)
    floor_log2 = np.where(mantissa >= 0.875, exponent, exponent - 1).astype(np.int64)
    subnormal = magnitude < 2.0**-126  # float32 has no smaller exponent: the addend acts on the bits there
    floor_log2[subnormal] = np.where(magnitude[subnormal] >= 1.5 * 2.0**-127, -126, -127)
    want = np.clip(floor_log2 - 2, -127, 127) + 127
    got = even_code(FINITE)
    assert isinstance(got, torch.Tensor)
    below = magnitude < 1.75 * 2.0**127
    assert (got.numpy()[below] == want[below]).all()
    assert set(got.numpy()[~below]) == {253}  # where a float would have gone to infinity
    assert torch.equal(even_code(FINITE.to(torch.int16).view(torch.bfloat16)), got)  # type: ignore[arg-type]


def test_single_magnitudes() -> None:
    assert even_code(1.0) == 125
    assert even_code(1.75) == 126
    assert even_code(0.0) == 0
    assert even_code(0x3F80) == 125
    assert even_code(float("inf")) == 253
    for bad in (-1, 0x8000, True, "1"):
        with pytest.raises(ConfigError, match="amax="):
            even_code(bad)  # type: ignore[arg-type]


def test_the_largest_value_lands_between_three_and_a_half_and_seven() -> None:
    magnitude = FINITE[FINITE >= 0x0180].to(torch.int16).view(torch.bfloat16)  # from 2^-124 on
    code = even_code(magnitude)
    assert isinstance(code, torch.Tensor)
    ratio = magnitude.double() / scale_of(code, torch.float64)
    inside = magnitude.double() < 1.75 * 2.0**127
    assert float(ratio[inside].min()) >= 3.5
    assert float(ratio[inside].max()) < 7.0


def test_codes_are_the_nearest_with_ties_to_even() -> None:
    """Blocks whose scale is 1: amax 4 brings exponent 2 to the byte 127."""
    grid = np.array(E2M1)
    steps = torch.arange(-224, 225, dtype=torch.float32) / 32  # -7 .. 7, all bf16
    for first in range(0, len(steps), 31):
        part = steps[first : first + 31]
        top = 4.0 if part.abs().max() < 4 else float(part.abs().max())
        block = torch.zeros(32)
        block[: len(part)], block[31] = part, top
        packed, scale = mxfp4_quantize(block)
        values = mxfp4_dequantize(packed, scale)
        unit = float(scale_of(scale)[0])
        for x, y in zip(block.tolist(), values.tolist(), strict=True):
            distance = np.abs(grid - min(abs(x) / unit, 6.0))
            nearest = np.flatnonzero(distance == distance.min())
            code = nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1]
            assert abs(y) == grid[code] * unit, (x, unit)
            assert y == 0 or math.copysign(1, y) == math.copysign(1, x)


def test_packing_puts_the_even_element_low() -> None:
    block = torch.zeros(64)
    block[0], block[1], block[33] = 4.0, -1.0, 4.0
    packed, scale = mxfp4_quantize(block)
    assert packed.shape == (32,)
    assert scale.tolist() == [127, 127]
    assert packed[0] == 6 | (10 << 4)
    assert packed[16] == 6 << 4
    assert int(packed.sum()) == int(packed[0]) + int(packed[16])


def test_small_blocks_are_divided_by_a_normal_scale() -> None:
    block = torch.full((32,), 2.0**-127, dtype=torch.bfloat16)
    packed, scale = mxfp4_quantize(block)
    assert scale.tolist() == [1]  # even_code is 0
    assert even_code(2.0**-127) == 0
    assert mxfp4_dequantize(packed, scale, torch.float64).tolist() == [2.0**-127] * 32  # 0.5 * 2^-126
    zeros, scale = mxfp4_quantize(torch.zeros(32))
    assert not zeros.any()
    assert not mxfp4_dequantize(zeros, scale).any()


def test_scales_are_powers_of_two_to_the_bit() -> None:
    every = torch.arange(255, dtype=torch.uint8)
    want = np.exp2(np.arange(255) - 127.0)
    assert (scale_of(every, torch.float64).numpy() == want).all()
    assert bool(scale_of(torch.tensor([255], dtype=torch.uint8)).isnan())


def test_values_that_have_a_code_return_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (5, 3, 32), dtype=torch.uint8, generator=generator)
    codes[..., 0::16] = 0x77  # a largest code in every block, so that the scale is kept
    scales = torch.randint(100, 150, (5, 3, 2), dtype=torch.uint8, generator=generator)
    values = mxfp4_dequantize(codes, scales)
    again, same = mxfp4_quantize(values)
    assert torch.equal(same, scales)
    assert torch.equal(mxfp4_dequantize(again, same), values)


def test_weights_have_the_stock_strides() -> None:
    w = torch.randn(12, 128, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    w_k, scale = quantize_w_uk(w)
    assert w_k.shape == (12, 512, 64)
    assert w_k.stride() == (64, 768, 1)
    assert scale.shape == (12, 512, 4)
    assert scale.stride() == (4, 48, 1)
    back = mxfp4_dequantize(w_k, scale).transpose(1, 2)
    assert float((back - w.float()).abs().max()) <= float(w.abs().max()) / 4  # half a step of the widest binade
    packed, one = mxfp4_quantize(w[7, :, 311])
    assert torch.equal(w_k[7, 311], packed)
    assert torch.equal(scale[7, 311], one)


def test_a_last_axis_that_is_no_multiple_of_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        mxfp4_quantize(torch.zeros(4, 48))
