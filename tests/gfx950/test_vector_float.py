"""Floating-point vector instructions against numpy: edge values of both signs, denormals, NaN, ties, modifiers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from assembly import probe
from edges import assert_same_floats, assert_same_words, float_bits, half_bits, integers

F = np.float32
Model = Callable[..., np.ndarray]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def f32(x: np.ndarray) -> np.ndarray:
    return x.view("<f4")


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c with one rounding: exact in integers, then rounded by hand."""
    from fractions import Fraction

    out = np.empty(a.shape, F)
    for i in np.ndindex(a.shape):
        x, y, z = float(a[i]), float(b[i]), float(c[i])
        if not all(map(math.isfinite, (x, y, z))):
            with np.errstate(all="ignore"):
                product = (
                    F(0)
                    if (x == 0 or y == 0) and math.isfinite(x) and math.isfinite(y)
                    else np.float64(x) * np.float64(y)
                )
                out[i] = np.float64(product) + z if not math.isnan(float(product)) else np.nan
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            out[i] = F(x) * F(y) + F(z) if Fraction(x) * Fraction(y) == 0 else F(0)
            continue
        out[i] = round_fraction(exact)
    return out


def round_fraction(x: object) -> np.float32:
    """The nearest single to an exact rational, ties to even."""
    from fractions import Fraction

    assert isinstance(x, Fraction)
    sign, x = (-1, -x) if x < 0 else (1, x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    if Fraction(2) ** e > x:
        e -= 1
    e = max(e, -126)
    units = x / Fraction(2) ** (e - 23)
    whole = units.numerator // units.denominator
    rest = units - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    result = math.ldexp(whole, e - 23)
    return F(sign * (result if result <= 3.4028234663852886e38 else math.inf))


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """maxNum: a number beats NaN, +0 beats -0."""
    out = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b)))
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), out)


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b)))
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), out)


def quiet_only(*words: np.ndarray) -> list[np.ndarray]:
    """Signalling NaNs made quiet, so that maxNum has one answer."""
    return [np.where((w & 0x7FFFFFFF) > 0x7F800000, w | 0x400000, w).astype("<u4") for w in words]


BINARY: dict[str, Model] = {
    "v_add_f32": lambda a, b: a + b,
    "v_sub_f32": lambda a, b: a - b,
    "v_subrev_f32": lambda a, b: b - a,
    "v_mul_f32": lambda a, b: a * b,
    "v_max_f32": maximum,
    "v_min_f32": minimum,
}


@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name: str) -> None:
    a, b = quiet_only(*float_bits(2))
    assert_same_floats(probe(f"{name} v128, v32, v33", [a, b], 1)[0], BINARY[name](f32(a), f32(b)), a, b)


def test_signalling_nan_wins_and_becomes_quiet_in_ieee_mode() -> None:
    a, b = np.full((1, 64), 0x7F800001, "<u4"), np.full((1, 64), 0x3F800000, "<u4")
    assert_same_words(probe("v_max_f32 v128, v32, v33", [a, b], 1)[0], np.full((1, 64), 0x7FC00001, "<u4"))


def test_fused_multiply_add_rounds_once() -> None:
    a, b, c = float_bits(3, random_rows=4)
    got = probe("v_fma_f32 v128, v32, v33, v34\nv_mov_b32 v129, v34\nv_fmac_f32 v129, v32, v33", [a, b, c], 2)
    want = fma(f32(a), f32(b), f32(c))
    assert_same_floats(got[0], want, a, b, c)
    assert_same_floats(got[1], want, a, b, c)


def test_literal_forms() -> None:
    a, b = float_bits(2, random_rows=2)
    got = probe("v_fmamk_f32 v128, v32, 0x40490fdb, v33\nv_fmaak_f32 v129, v32, v33, 0xbf000000", [a, b], 2)
    pi, half = np.full_like(f32(a), F(np.uint32(0x40490FDB).view(F))), np.full_like(f32(a), F(-0.5))
    assert_same_floats(got[0], fma(f32(a), pi, f32(b)), a, b)
    assert_same_floats(got[1], fma(f32(a), f32(b), half), a, b)


@pytest.mark.parametrize(
    ("modifier", "model"),
    [
        ("-v32, v33", lambda a, b: -a + b),
        ("|v32|, v33", lambda a, b: np.abs(a) + b),
        ("-|v32|, -v33", lambda a, b: -np.abs(a) - b),
        ("v32, v33 mul:2", lambda a, b: (a + b) * F(2)),
        ("v32, v33 div:2", lambda a, b: (a + b) * F(0.5)),
        ("v32, v33 clamp", lambda a, b: np.where(np.isnan(a + b), 0, np.clip(a + b, 0, 1))),
    ],
)
def test_modifiers(modifier: str, model: Model) -> None:
    a, b = quiet_only(*float_bits(2))
    assert_same_floats(
        probe(f"v_add_f32_e64 v128, {modifier}", [a, b], 1)[0], model(f32(a), f32(b)).astype(F) + F(0), a, b
    ) if "clamp" in modifier else assert_same_floats(
        probe(f"v_add_f32_e64 v128, {modifier}", [a, b], 1)[0], model(f32(a), f32(b)), a, b
    )


def test_denormals_can_be_flushed() -> None:
    a, b = quiet_only(*float_bits(2))
    flush = lambda x: np.where(np.abs(x) < F(1.1754944e-38), np.copysign(F(0), x), x)  # noqa: E731
    got = probe("v_mul_f32 v128, v32, v33", [a, b], 1, denormals=0)[0]
    assert_same_floats(got, flush(flush(f32(a)) * flush(f32(b))), a, b)
    moved = probe("v_mov_b32 v128, v32", [a], 1, denormals=0)[0]
    assert_same_words(moved, a)  # a move is not arithmetic


TERNARY: dict[str, Model] = {
    "v_max3_f32": lambda a, b, c: maximum(maximum(a, b), c),
    "v_min3_f32": lambda a, b, c: minimum(minimum(a, b), c),
    "v_med3_f32": lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b) | np.isnan(c), minimum(minimum(a, b), c), np.sort(np.stack([a, b, c]), 0)[1]
    ),
    "v_maximum3_f32": lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b) | np.isnan(c), np.nan, maximum(maximum(a, b), c)
    ),
    "v_minimum3_f32": lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b) | np.isnan(c), np.nan, minimum(minimum(a, b), c)
    ),
}


@pytest.mark.parametrize("name", TERNARY)
def test_three_operands(name: str) -> None:
    a, b, c = quiet_only(*float_bits(3))
    got = probe(f"{name} v128, v32, v33, v34", [a, b, c], 1)[0]
    want = TERNARY[name](f32(a), f32(b), f32(c)).astype(F)
    if name == "v_med3_f32":  # equal zeros may come in either order
        got, want = (got.view(F) + F(0)).view("<u4"), want + F(0)
    assert_same_floats(got, want, a, b, c)


UNARY: dict[str, Model] = {
    "v_rndne_f32": np.rint,
    "v_floor_f32": np.floor,
    "v_ceil_f32": np.ceil,
    "v_trunc_f32": np.trunc,
    "v_frexp_mant_f32": lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a).astype(F),
    "v_fract_f32": lambda a: np.where(
        np.isfinite(a), np.minimum((a - np.floor(a)).astype(F), F(0.99999994)), np.nan
    ).astype(F),
}


@pytest.mark.parametrize("name", UNARY)
def test_rounding_and_parts(name: str) -> None:
    (a,) = float_bits(1)
    assert_same_floats(probe(f"{name} v128, v32", [a], 1)[0], UNARY[name](f32(a)).astype(F), a)


TRANSCENDENTAL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "v_exp_f32": np.exp2,
    "v_log_f32": np.log2,
    "v_rcp_f32": lambda a: 1 / a,
    "v_rsq_f32": lambda a: 1 / np.sqrt(a),
    "v_sqrt_f32": np.sqrt,
}


@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_transcendentals_take_denormals_as_zero(name: str) -> None:
    (a,) = float_bits(1)
    flush = lambda x: np.where(np.abs(x) < 1.1754943508222875e-38, np.copysign(0.0, x), x)  # noqa: E731
    want = flush(TRANSCENDENTAL[name](flush(f32(a).astype(np.float64))).astype(F))
    assert_same_floats(probe(f"{name} v128, v32", [a], 1)[0], want, a, ulps=1)


def test_sine_counts_turns() -> None:
    a = np.linspace(-4, 4, 64, dtype=F).reshape(1, 64)
    got = probe("v_sin_f32 v128, v32\nv_cos_f32 v129, v32", [a.view("<u4")], 2)
    np.testing.assert_allclose(got[0].view(F), np.sin(2 * np.pi * a.astype(float)), atol=1e-6)
    np.testing.assert_allclose(got[1].view(F), np.cos(2 * np.pi * a.astype(float)), atol=1e-6)


def test_ldexp_and_exponents() -> None:
    (a,), (n,) = float_bits(1), integers(1, random_rows=9)
    n = n[: a.shape[0]]
    got = probe("v_ldexp_f32 v128, v32, v33\nv_frexp_exp_i32_f32 v129, v32", [a, n], 2)
    scale = np.clip(n.view("<i4"), -400, 400)
    assert_same_floats(got[0], np.ldexp(f32(a).astype(np.float64), scale).astype(F), a, n)
    exponents = np.where(np.isfinite(f32(a)), np.frexp(f32(a))[1], 0).astype("<i4").view("<u4")
    assert_same_words(got[1], exponents, a)


DIVIDE = """
    v_div_scale_f32 v40, s[20:21], v33, v33, v32
    v_div_scale_f32 v41, vcc, v32, v33, v32
    v_rcp_f32 v42, v40
    v_fma_f32 v43, -v40, v42, 1.0
    v_fma_f32 v42, v43, v42, v42
    v_mul_f32 v44, v41, v42
    v_fma_f32 v45, -v40, v44, v41
    v_fma_f32 v44, v45, v42, v44
    v_fma_f32 v45, -v40, v44, v41
    v_div_fmas_f32 v45, v45, v42, v44
    v_div_fixup_f32 v128, v45, v33, v32"""


def test_the_division_sequence_rounds_correctly() -> None:
    a, b = float_bits(2, random_rows=64)
    got = probe(DIVIDE, [a, b], 1)[0]
    want = f32(a) / f32(b)
    tiny = np.abs(want) < F(1.1754944e-38)  # a denormal quotient may be rounded twice by the sequence
    assert_same_floats(np.where(tiny, 0, got), np.where(tiny, F(0), want), a, b)
    assert_same_floats(np.where(tiny, got, 0), np.where(tiny, want, F(0)), a, b, ulps=1)


CLASSES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_class_bits() -> None:
    (a,) = float_bits(1)
    e, m, s = a >> 23 & 255, a & 0x7FFFFF, a >> 31
    which = np.select(
        [(e == 255) & (m != 0), e == 255, e != 0, m != 0],
        [np.where(m >> 22, 1, 0), np.where(s, 2, 9), np.where(s, 3, 8), np.where(s, 4, 7)],
        np.where(s, 5, 6),
    )
    code = "\n".join(
        f"v_mov_b32 v40, {c}\nv_cmp_class_f32 s[20:21], v32, v40\nv_cndmask_b32 v{128 + k}, 0, 1, s[20:21]"
        for k, c in enumerate(CLASSES)
    )
    got = probe(code, [a], 10)
    for k in range(10):
        assert_same_words(got[k], (which == k).astype("<u4"), a)


ORDERED: dict[str, Model] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}


@pytest.mark.parametrize("name", ORDERED)
def test_comparisons(name: str) -> None:
    a, b = float_bits(2)
    got = probe(f"v_cmp_{name}_f32 s[20:21], v32, v33\nv_cndmask_b32 v128, 0, 1, s[20:21]", [a, b], 1)[0]
    assert_same_words(got, ORDERED[name](f32(a), f32(b)).astype("<u4"), a, b)
    h, g = half_bits(2)
    x, y = ((v & 0xFFFF).astype("<u2").view("<f2") for v in (h, g))
    got = probe(f"v_cmp_{name}_f16 s[20:21], v32, v33\nv_cndmask_b32 v128, 0, 1, s[20:21]", [h, g], 1)[0]
    assert_same_words(got, ORDERED[name](x, y).astype("<u4"), h, g)


def half(x: np.ndarray) -> np.ndarray:
    return (x & 0xFFFF).astype("<u2").view("<f2")


def same_halves(got: np.ndarray, want: np.ndarray, *inputs: np.ndarray) -> None:
    g, w = got.astype("<u2").view("<f2"), want.astype("<f2")
    bad = ~((np.isnan(g) & np.isnan(w)) | (g.view("<u2") == w.view("<u2")))
    assert not bad.any(), (np.argwhere(bad)[0], g[bad][0], w[bad][0], [hex(int(i[bad][0])) for i in inputs])


HALF: dict[str, Model] = {
    "v_add_f16": lambda a, b: a + b,
    "v_sub_f16": lambda a, b: a - b,
    "v_mul_f16": lambda a, b: a * b,
    "v_max_f16": maximum,
    "v_min_f16": minimum,
}


@pytest.mark.parametrize("name", HALF)
def test_halves(name: str) -> None:
    a, b = half_bits(2)
    got = probe(f"{name} v128, v32, v33", [a, b], 1)[0]
    assert not (got >> 16).any()
    same_halves(got, HALF[name](half(a), half(b)), a, b)
    if name == "v_sub_f16":
        return  # there is no packed subtraction
    got = probe(f"v_pk_{name[2:]} v128, v32, v33", [a, b], 1)[0]
    same_halves(got & 0xFFFF, HALF[name](half(a), half(b)), a, b)
    same_halves(got >> 16, HALF[name](half(a >> 16), half(b >> 16)), a, b)


def test_half_fma_and_inline_constants() -> None:
    a, b, c = half_bits(3)
    got = probe(
        "v_fma_f16 v128, v32, v33, v34\nv_add_f16 v129, 1.0, v32\n"
        "v_pk_fma_f16 v130, v32, v33, v34 neg_lo:[1,0,0] neg_hi:[0,1,0]",
        [a, b, c],
        3,
    )
    exact = lambda x, y, z: x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)  # noqa: E731
    same_halves(got[0], exact(half(a), half(b), half(c)), a, b, c)
    same_halves(got[1], half(a) + np.float16(1), a)
    same_halves(got[2] & 0xFFFF, exact(-half(a), half(b), half(c)), a, b, c)
    same_halves(got[2] >> 16, exact(half(a >> 16), -half(b >> 16), half(c >> 16)), a, b, c)


def test_mixed_precision() -> None:
    (a,), (b,), (c,) = half_bits(1, 1), float_bits(1, 2), half_bits(1, 3)
    rows = min(len(a), len(b), len(c))
    a, b, c = a[:rows], quiet_only(b)[0][:rows], c[:rows]
    got = probe(
        "v_fma_mix_f32 v128, v32, v33, v34 op_sel:[1,0,0] op_sel_hi:[1,0,1]\n"
        "v_mov_b32 v129, 0\nv_fma_mixhi_f16 v129, v32, v33, v34 op_sel_hi:[1,0,1]",
        [a, b, c],
        2,
    )
    assert_same_floats(got[0], fma(half(a >> 16).astype(F), f32(b), half(c).astype(F)), a, b, c)
    same_halves(got[1] >> 16, fma(half(a).astype(F), f32(b), half(c).astype(F)).astype("<f2"), a, b, c)
    assert not (got[1] & 0xFFFF).any()


def test_packed_singles_select_registers() -> None:
    words = quiet_only(*float_bits(4))
    a0, a1, b0, b1 = (f32(w) for w in words)
    code = """v_pk_add_f32 v[128:129], v[32:33], v[34:35]
        v_pk_mul_f32 v[130:131], v[32:33], v[34:35] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[0,1] neg_hi:[1,0]
        v_pk_mul_f32 v[132:133], v[32:33], s[20:21] op_sel_hi:[1,0]
        v_pk_mov_b32 v[134:135], v[32:33], v[34:35] op_sel:[1,0]"""
    got = probe(code, words, 8, setup="s_mov_b32 s20, 2.0\ns_mov_b32 s21, 4.0")
    want = [a0 + b0, a1 + b1, a1 * -b0, -a0 * b1, a0 * F(2), a1 * F(2)]
    for k, w in enumerate(want):
        assert_same_floats(got[k], w, *words)
    assert_same_words(got[6], words[1])
    assert_same_words(got[7], words[2])


def test_doubles() -> None:
    rng = np.random.default_rng(5)
    x, y, z = (np.ldexp(rng.standard_normal((4, 64)), rng.integers(-1000, 1000, (4, 64))) for _ in range(3))
    x[0, :4], y[0, :4] = [0.0, -0.0, np.inf, np.nan], [1.0, np.inf, -np.inf, 2.0]
    words = [p for d in (x, y, z) for p in (d.view("<u8").astype("<u4"), (d.view("<u8") >> 32).astype("<u4"))]
    code = """v_add_f64 v[128:129], v[32:33], v[34:35]
        v_mul_f64 v[130:131], v[32:33], -v[34:35]
        v_fma_f64 v[132:133], v[32:33], v[34:35], v[36:37]
        v_add_f64 v[134:135], v[32:33], 1.0
        v_cvt_f32_f64 v136, v[32:33]
        v_rndne_f64 v[138:139], v[32:33]"""
    got = probe(code, words, 12)
    double = lambda k: (got[k].astype("<u8") | got[k + 1].astype("<u8") << 32).view("<f8")  # noqa: E731
    for k, want in ((0, x + y), (2, x * -y), (6, x + 1.0), (10, np.rint(x))):
        np.testing.assert_array_equal(double(k), want)
    np.testing.assert_allclose(double(4), x * y + z, rtol=1e-15)
    assert_same_floats(got[8], x.astype(F))
