"""An independent model of the narrow float formats, from their definitions: values of all codes, and rounding as a
search for the nearest value with ties to the even code."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

FORMATS = {
    "fp8": (4, 3, 7),
    "bf8": (5, 2, 15),
    "fp6": (2, 3, 1),
    "bf6": (3, 2, 3),
    "fp4": (2, 1, 1),
}  # exponent, mantissa, bias


def width(name: str) -> int:
    return 1 + FORMATS[name][0] + FORMATS[name][1]


def value(name: str, code: int) -> float:
    e_bits, m_bits, bias = FORMATS[name]
    sign = -1.0 if code >> (e_bits + m_bits) & 1 else 1.0
    e, m = code >> m_bits & ((1 << e_bits) - 1), code & ((1 << m_bits) - 1)
    if name == "fp8" and e == 15 and m == 7:
        return float("nan")
    if name == "bf8" and e == 31:
        return sign * float("inf") if m == 0 else float("nan")
    fraction = Fraction(m, 1 << m_bits) + (1 if e else 0)
    return sign * float(fraction * Fraction(2) ** ((e or 1) - bias))


def values(name: str) -> np.ndarray:
    return np.array([value(name, c) for c in range(1 << width(name))])


def encode(name: str, x: np.ndarray, saturate: bool) -> np.ndarray:
    """Codes of `x` (double) rounded to nearest even. Overflow: the largest value when saturating or when the format has
    neither infinity nor NaN; else NaN (fp8) or infinity (bf8)."""
    table = values(name)
    half = len(table) // 2
    codes = np.array([c for c in range(half) if np.isfinite(table[c])])
    grid = table[codes]
    x = np.asarray(x, np.float64)
    a = np.abs(x)
    high = np.clip(np.searchsorted(grid, a), 1, len(grid) - 1)
    below, above = grid[high - 1], grid[high]
    to_above = (a - below > above - a) | ((a - below == above - a) & (codes[high] % 2 == 0))
    out = codes[np.where(to_above, high, high - 1)]
    step = grid[-1] - grid[-2]
    over = (
        a >= grid[-1] + step / 2
    )  # the largest code is even in its last place for all five formats or has no neighbour
    if name in ("fp8",):
        over = a > grid[-1] + step / 2
    tied = a == grid[-1] + step / 2
    if name == "fp8":
        over = over | (tied & (codes[-1] % 2 == 1))
    top = codes[-1]
    special = {"fp8": 0x7F, "bf8": 0x7C}.get(name, top)
    out = np.where(over, top if saturate else special, out)
    out = np.where(np.isnan(x), {"fp8": 0x7F, "bf8": 0x7F}.get(name, top), out)
    return (out + half * np.signbit(x)).astype(np.uint32)


def bf16(x: np.ndarray) -> np.ndarray:
    """Single-precision words to bfloat words, nearest even; NaN stays NaN."""
    w = x.astype("<u8")
    rounded = (w + 0x7FFF + (w >> 16 & 1)) >> 16
    nan = (w & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, w >> 16 | 0x40, rounded).astype("<u4")
