"""The number formats: every rounding that the kernels make, spelled once.

Rounding is to nearest, ties to even. e4m3 is float8_e4m3fn: no infinity, largest finite value 448, NaN 0x7f or 0xff.
"""

from typing import Final

import torch
from torch import Tensor

#: Largest finite e4m3 value.
E4M3_MAX: Final = 448.0
#: The NaN byte that the hardware's conversion writes. 0xff is never written, which the query mailbox relies on.
E4M3_NAN: Final = 0x7F


def bf(x: Tensor) -> Tensor:
    """x rounded to bfloat16. float64 goes through float32: wrong by one step for about one value in 2^29."""
    return x.to(torch.float32).to(torch.bfloat16)


def f8(x: Tensor) -> Tensor:
    """x (16-bit or float32, any shape) rounded to float8_e4m3fn, saturating at +-448; every NaN becomes byte 0x7f.

    This is the hardware's saturating conversion. The clamp comes first because torch's own cast may turn an overflow
    into NaN; it moves no result, since 448 is representable.
    """
    wide = x.to(torch.float32)
    byte = wide.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return byte.masked_fill(wide.isnan(), E4M3_NAN).view(torch.float8_e4m3fn)


def f8_clamped(x: Tensor) -> Tensor:
    """The epilogues' conversion: as `f8`, but NaN becomes -448.

    They clamp by min(max(x, -448), 448) before converting, and IEEE maxNum(NaN, -448) is -448.
    """
    wide = x.to(torch.float32)
    return wide.masked_fill(wide.isnan(), -E4M3_MAX).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def divide(x: Tensor, by: float) -> Tensor:
    """x / by, correctly rounded in x's dtype. Not `x / by`: on a GPU torch multiplies by the reciprocal of a number."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def bits(x: Tensor) -> Tensor:
    """The bytes of `x` as uint8; the last axis grows by the element size. For comparing to the bit: NaN equals NaN."""
    return x.contiguous().view(torch.uint8)
