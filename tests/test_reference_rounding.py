"""The number formats, against tables built from the definition of e4m3 and not from torch's casts."""

import math

import numpy as np
import pytest
import torch
from cases import bf16_steps, fp8_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dsl import reference as ref


def decode(byte: int) -> float:
    """The value of an e4m3fn byte: sign, 4 exponent bits of bias 7, 3 mantissa bits; S.1111.111 is NaN."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


POSITIVE = np.array([decode(b) for b in range(127)])  # bytes 0x00..0x7e in increasing order


def nearest(x: np.ndarray) -> np.ndarray:
    """Bytes nearest to float64 x by comparing with every e4m3 value; ties to the even byte; NaN to 0x7f."""
    size = np.abs(x)
    distance = np.abs(np.minimum(np.nan_to_num(size), 1e6)[:, None] - POSITIVE[None, :])
    best = distance.min(axis=1, keepdims=True)
    tied = distance == best
    low = tied.argmax(axis=1)
    high = tied.shape[1] - 1 - tied[:, ::-1].argmax(axis=1)
    byte = np.where(low % 2 == 0, low, high)
    byte = np.where(np.isnan(x), 0x7F, byte | np.where(np.signbit(x), 0x80, 0))
    return byte.astype(np.uint8)


def all_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_decode_agrees_with_torch():
    got = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(got, np.array([decode(b) for b in range(256)]), equal_nan=True)


def test_f8_of_every_bf16():
    x = all_bf16()
    want = nearest(x.double().numpy())
    got = ref.f8(x).view(torch.uint8).numpy()
    assert np.array_equal(got, np.where(x.isnan().numpy(), 0x7F, want))
    assert not (got == 0xFF).any()


def test_f8_clamped_differs_in_nan_only():
    x = all_bf16()
    plain, clamped = ref.f8(x).float(), ref.f8_clamped(x).float()
    nan = x.isnan()
    assert nan.sum() > 0
    assert bool((clamped[nan] == -448).all())
    assert torch.equal(plain[~nan], clamped[~nan])


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        st.floats(width=32),
        st.integers(0, 125).map(lambda i: float((POSITIVE[i] + POSITIVE[i + 1]) / 2)),  # exactly between two values
        st.floats(-500, 500, width=32),
    )
)
def test_f8_of_float32(x):
    single = torch.tensor([x], dtype=torch.float32)
    assert ref.f8(single).view(torch.uint8).item() == nearest(single.double().numpy())[0]


@pytest.mark.parametrize(
    ("x", "byte"),
    [(448.0, 0x7E), (464.0, 0x7E), (465.0, 0x7E), (math.inf, 0x7E), (-math.inf, 0xFE), (-1e30, 0xFE),
     (math.nan, 0x7F), (-math.nan, 0x7F), (2.0**-10, 0x00), (2.0**-10 * 1.001, 0x01), (-0.0, 0x80)],
)  # fmt: skip
def test_f8_at_the_ends(x, byte):
    assert ref.f8(torch.tensor([x])).view(torch.uint8).item() == byte


def test_bf_rounds_to_even():
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], dtype=torch.float64)
    assert ref.bf(x).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


def test_steps_count_values():
    f8 = torch.tensor([0x00, 0x80, 0x01, 0x81, 0x7E, 0x7F, 0xFF], dtype=torch.uint8)
    assert fp8_steps(f8, f8.roll(1)).tolist() == [256, 0, 1, 2, 127, 256, 0]
    assert fp8_steps(f8[:1], f8[1:2]).item() == 0  # +0 and -0
    assert fp8_steps(f8[2:3], f8[3:4]).item() == 2  # the smallest of each sign
    assert fp8_steps(f8[5:6], f8[6:7]).item() == 0  # NaN is NaN
    one = torch.tensor([1.0, 1.0, math.nan, math.nan]).bfloat16()
    other = torch.tensor([1 + 2**-7, -1.0, 1.0, math.nan]).bfloat16()
    assert bf16_steps(one, other).tolist() == [1, 2 * 0x3F80, 65536, 0]


def test_bits_compare_nan_as_equal():
    x = torch.tensor([math.nan, 1.0])
    assert torch.equal(ref.bits(x), ref.bits(x.clone()))
    assert ref.bits(x).shape == (8,)
