"""Inputs that hit the corners: every pair of the interesting values, then random bits, as rows of 64 lanes."""

from __future__ import annotations

import numpy as np

INTEGERS = [
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    15,
    16,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    0x7FFF,
    0x8000,
    0x8001,
    0xFFFF,
    0x10000,
    0x123456,
    0x7FFFFF,
    0x800000,
    0xFFFFFF,
    0x1000000,
    0x7FFFFFFE,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xAAAAAAAA,
    0xFFFFFF80,
    0xFFFFFFFE,
    0xFFFFFFFF,
]
FLOATS = [
    0.0,
    1.0,
    0.5,
    2.0,
    3.0,
    1.5,
    2.5,
    1e-3,
    1e10,
    3.4028235e38,
    1.1754944e-38,
    1.1754942e-38,
    1e-40,
    1.4e-45,
    float("inf"),
    float("nan"),
    16777217.0,
    0.333333343,
    65504.0,
    65519.0,
    65520.0,
    6e-8,
    448.0,
    464.0,
    57344.0,
    61440.0,
    4294967040.0,
    2147483648.0,
    255.5,
    254.5,
]
HALVES = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3555, 0x3BFF, 0x3C00, 0x3C01, 0x4000, 0x4248, 0x7BFF, 0x7C00, 0x7E00]


def _rows(values: np.ndarray) -> np.ndarray:
    return np.resize(values, (-(-len(values) // 64), 64))


def integers(count: int, seed: int = 0, random_rows: int = 8) -> list[np.ndarray]:
    return _grid(np.array(INTEGERS, "<u4"), count, seed, random_rows)


def float_bits(count: int, seed: int = 0, random_rows: int = 8) -> list[np.ndarray]:
    """Single-precision edge values of both signs as words, then random words of every exponent."""
    positive = np.array(FLOATS, "<f4").view("<u4")
    return _grid(np.concatenate([positive, positive | 0x80000000]), count, seed, random_rows)


def half_bits(count: int, seed: int = 0, random_rows: int = 8) -> list[np.ndarray]:
    """Half-precision edge values in the low half; the high half is random."""
    positive = np.array(HALVES, "<u4")
    rows = _grid(np.concatenate([positive, positive | 0x8000]), count, seed, random_rows)
    rng = np.random.default_rng(seed + 1)
    return [(r & 0xFFFF) | rng.integers(0, 1 << 16, r.shape, dtype="<u4") << 16 for r in rows]


def _grid(values: np.ndarray, count: int, seed: int, random_rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    if count == 1:
        columns = [values]
    elif count == 2:
        columns = [a.ravel() for a in np.meshgrid(values, values)]
    else:  # all triples are too many: every value meets a random pair of others
        columns = [rng.permutation(np.tile(values, 12)) for _ in range(count)]
    return [
        np.concatenate([_rows(c.astype("<u4")), rng.integers(0, 1 << 32, (random_rows, 64), dtype="<u4")])
        for c in columns
    ]


def assert_same_words(got: np.ndarray, want: np.ndarray, *inputs: np.ndarray) -> None:
    """Bitwise equality, with the inputs of the first difference."""
    bad = np.argwhere(got != want)
    if len(bad):
        at = tuple(bad[0])
        shown = ", ".join(f"0x{int(x[at]):08x}" for x in inputs)
        raise AssertionError(
            f"{len(bad)} of {got.size} differ, first at {at}: got 0x{int(got[at]):08x}, "
            f"want 0x{int(want[at]):08x}, inputs {shown}"
        )


def assert_same_floats(got: np.ndarray, want: np.ndarray, *inputs: np.ndarray, ulps: int = 0) -> None:
    """As above for single precision: any NaN equals any NaN; finite values may differ by `ulps`."""
    g, w = got.view("<f4"), want.astype("<f4", copy=False)
    order = lambda x: np.where(x.view("<i4") < 0, -(x.view("<i4").astype("<i8") & 0x7FFFFFFF), x.view("<i4"))  # noqa: E731
    same = (np.isnan(g) & np.isnan(w)) | (g.view("<u4") == w.view("<u4"))
    near = np.isfinite(g) & np.isfinite(w) & (np.abs(order(g) - order(w)) <= ulps) if ulps else False
    bad = np.argwhere(~(same | near))
    if len(bad):
        at = tuple(bad[0])
        shown = ", ".join(f"0x{int(x[at]):08x}" for x in inputs)
        raise AssertionError(
            f"{len(bad)} of {g.size} differ, first at {at}: got {g[at]!r}, want {w[at]!r}, inputs {shown}"
        )
