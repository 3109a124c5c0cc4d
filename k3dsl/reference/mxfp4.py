"""MXFP4 on the host: blocks of 32 values, each an e2m1 code, sharing one power-of-two scale (e8m0, "even" rounding).

A scale byte c stands for 2^(c - 127). "Even": max|x| is rounded to a power of two times [1, 1.75) before its exponent
is taken, so max|x| / scale lies in [3.5, 7) and values above 6 saturate. Element 2j is the low nibble of byte j.
"""

from typing import Final

import torch
from torch import Tensor

from k3dsl.errors import ConfigError

#: Elements that share a scale.
BLOCK: Final = 32
#: e2m1 magnitudes by code; bit 3 is the sign.
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: A quarter of a binade in float32 bits: adding it moves the exponent up from a mantissa of 1.75 on.
_UP: Final = 0x200000


def even_code(amax: "Tensor | float | int") -> "Tensor | int":
    """The e8m0 byte of a block whose largest magnitude is `amax`: max(exponent(amax, rounded up from 1.75) - 2, 0).

    amax: bf16-representable magnitudes as a float or a tensor of floats, or their 15 bits as an int or a tensor of
    ints. Returns an int for a number, else uint8 of the same shape. 0 stands for blocks below 2^-125, which are
    quantized by 2^-126 (see `mxfp4_quantize`). For amax >= 1.75 * 2^127 and infinity the byte is 253.
    """
    if not isinstance(amax, Tensor):
        if isinstance(amax, bool) or not isinstance(amax, int | float):
            raise ConfigError(f"amax={amax!r} must be a number or a tensor")
        if isinstance(amax, int) and not 0 <= amax <= 0x7FFF:
            raise ConfigError(f"amax={amax!r} must be the 15 bits of a bf16 magnitude, 0 to 0x7fff")
        dtype = torch.int32 if isinstance(amax, int) else torch.float32
        return int(even_code(torch.tensor([amax], dtype=dtype))[0])  # type: ignore[index]
    if amax.dtype.is_floating_point:
        bits = amax.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0x7FFF
    else:
        bits = amax.to(torch.int32)
    exponent = (((bits << 16) + _UP) >> 23) & 0xFF  # at most 0x7fff << 16, so the addition never passes bit 31
    return (exponent - 2).clamp(min=0).to(torch.uint8)


def e2m1(x: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of float32 values: to nearest, ties to the even code, saturating at +-6. NaN has no code."""
    a = x.abs()
    # Midpoints between neighbours; a tie goes up where the upper code is even.
    code = (a > 0.25).to(torch.uint8)
    for midpoint, tie_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += ((a >= midpoint) if tie_up else (a > midpoint)).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def mxfp4_quantize(
    x: Tensor,  # [..., K], K a multiple of 32; rounded to bf16 first if it is not
) -> tuple[Tensor, Tensor]:  # uint8 [..., K / 2], uint8 [..., K / 32]
    """Packed e2m1 codes and their scale bytes, one scale for 32 consecutive elements of the last axis.

    The byte returned is the one that was divided by: max(even_code, 1), so that the scale is a normal float32. Raises
    ConfigError for a last axis that is not a multiple of 32.
    """
    if x.dim() == 0 or x.shape[-1] % BLOCK or x.shape[-1] == 0:
        raise ConfigError(f"x has shape {list(x.shape)}: the last axis must be a multiple of {BLOCK}")
    blocks = x.to(torch.bfloat16).unflatten(-1, (-1, BLOCK))
    code = even_code(blocks.abs().amax(dim=-1))
    assert isinstance(code, Tensor)
    used = code.clamp(min=1)
    # Division by a power of two: exact, but for results below 2^-126, which are far below half of the smallest code.
    codes = e2m1(blocks.to(torch.float32) / scale_of(used)[..., None]).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), used


def scale_of(byte: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127) to the bit, for uint8 bytes 0 to 254; 255 is NaN."""
    e = byte.to(torch.int32)
    bits = torch.where(e == 0, torch.full_like(e, 0x00400000), e << 23)
    bits = torch.where(e == 255, torch.full_like(e, 0x7FC00000), bits)
    return bits.view(torch.float32).to(dtype)


def mxfp4_dequantize(
    packed: Tensor,  # uint8 [..., K / 2]
    scales: Tensor,  # uint8 [..., K / 32]
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # [..., K] of `dtype`
    """The values that codes and scales stand for; exact in float32 for scales of 2^-125 and more."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=dtype, device=packed.device)[codes]
    return (values.unflatten(-1, (-1, BLOCK)) * scale_of(scales, dtype)[..., None]).flatten(-2)


def quantize_w_uk(w_uk_t: Tensor) -> tuple[Tensor, Tensor]:
    """Absorbed key weights in MXFP4, in blocks along nope.

    w_uk_t  bf16 [H, 128, 512] (head, nope, latent), any strides
    w_k     uint8 [H, 512, 64], a transposed view of [512, H, 64]: strides (64, 64 H, 1)
    scale   uint8 [H, 512, 4], a transposed view of [512, H, 4]
    """
    codes, scales = mxfp4_quantize(w_uk_t.permute(2, 0, 1))
    return codes.contiguous().transpose(0, 1), scales.contiguous().transpose(0, 1)
