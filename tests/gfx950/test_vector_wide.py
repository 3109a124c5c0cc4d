"""Double-precision division and parts, integer and half dot products, stochastic rounding to bfloat."""

from __future__ import annotations

import math

import numpy as np
import pytest
from assembly import probe
from edges import assert_same_words, half_bits, integers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DIVIDE = """
    v_div_scale_f64 v[40:41], s[20:21], v[34:35], v[34:35], v[32:33]
    v_div_scale_f64 v[42:43], vcc, v[32:33], v[34:35], v[32:33]
    v_rcp_f64 v[44:45], v[40:41]
    v_fma_f64 v[46:47], -v[40:41], v[44:45], 1.0
    v_fma_f64 v[44:45], v[44:45], v[46:47], v[44:45]
    v_fma_f64 v[46:47], -v[40:41], v[44:45], 1.0
    v_fma_f64 v[44:45], v[44:45], v[46:47], v[44:45]
    v_mul_f64 v[46:47], v[42:43], v[44:45]
    v_fma_f64 v[48:49], -v[40:41], v[46:47], v[42:43]
    v_div_fmas_f64 v[48:49], v[48:49], v[44:45], v[46:47]
    v_div_fixup_f64 v[128:129], v[48:49], v[34:35], v[32:33]
    v_frexp_exp_i32_f64 v130, v[32:33]
    v_fract_f64 v[132:133], v[32:33]
    v_frexp_mant_f64 v[134:135], v[32:33]"""


def split(x: np.ndarray) -> list[np.ndarray]:
    raw = x.view("<u8")
    return [raw.astype("<u4"), (raw >> 32).astype("<u4")]


def joined(got: np.ndarray, k: int) -> np.ndarray:
    return (got[k].astype("<u8") | got[k + 1].astype("<u8") << 32).view("<f8")


def test_double_division_and_parts() -> None:
    rng = np.random.default_rng(1)
    edges = np.array([0.0, 1.0, 3.0, 1e308, 2.3e-308, 5e-324, 1e-310, np.inf, np.nan, 0.1])
    edges = np.concatenate([edges, -edges])
    grid = [g.ravel() for g in np.meshgrid(edges, edges)]
    spread = [np.ldexp(rng.standard_normal(624), rng.integers(-1020, 1020, 624)) for _ in range(2)]
    x, y = (np.concatenate(p).reshape(-1, 64) for p in zip(grid, spread, strict=True))
    got = probe(DIVIDE, [*split(x), *split(y)], 8)
    quotient, want = joined(got, 0), x / y
    normal = (np.abs(want) >= 2.3e-308) | (want == 0) | np.isnan(want)
    np.testing.assert_array_equal(quotient[normal], want[normal])
    np.testing.assert_allclose(quotient[~normal], want[~normal], rtol=0, atol=5e-324)  # a denormal may round twice
    finite = np.isfinite(x)
    np.testing.assert_array_equal(got[2].view("<i4")[finite], np.frexp(x)[1][finite])
    np.testing.assert_array_equal(joined(got, 4)[finite], np.minimum(x - np.floor(x), math.nextafter(1.0, 0.0))[finite])
    np.testing.assert_array_equal(joined(got, 6)[finite], np.frexp(x)[0][finite])


def fields(x: np.ndarray, width: int, is_signed: bool) -> np.ndarray:
    parts = np.stack([x.astype(np.int64) >> k & ((1 << width) - 1) for k in range(0, 32, width)])
    return np.where(parts >> (width - 1) & 1, parts - (1 << width), parts) if is_signed else parts


@pytest.mark.parametrize(("name", "width", "is_signed"), [
    ("v_dot2_i32_i16", 16, True), ("v_dot2_u32_u16", 16, False), ("v_dot4_i32_i8", 8, True),
    ("v_dot4_u32_u8", 8, False),
    ("v_dot8_i32_i4", 4, True), ("v_dot8_u32_u4", 4, False), ("v_dot4c_i32_i8", 8, True), ("v_dot2c_i32_i16", 16, True),
])  # fmt: skip
def test_integer_dot_products(name: str, width: int, is_signed: bool) -> None:
    a, b, c = integers(3)
    code = f"v_mov_b32 v128, v34\n{name} v128, v32, v33" + ("" if "c_" in name else ", v34")
    want = (fields(a, width, is_signed) * fields(b, width, is_signed)).sum(0) + c.astype(np.int64)
    assert_same_words(probe(code, [a, b, c], 1)[0], (want & 0xFFFFFFFF).astype("<u4"), a, b, c)


def test_half_and_bfloat_dot_products() -> None:
    rng = np.random.default_rng(2)
    halves = rng.integers(-8, 9, (4, 2, 64, 2)).astype("<f2")  # exact in every order
    a, b = (np.ascontiguousarray(halves[:, k]).view("<u4")[..., 0] for k in range(2))
    c = rng.integers(-8, 9, (4, 64)).astype("<f4")
    exact = (halves[:, 0].astype(float) * halves[:, 1].astype(float)).sum(-1) + c
    brain = [(h.astype("<f4").view("<u4") >> 16) for h in (halves[:, 0], halves[:, 1])]
    e, f = (x[..., 0] | x[..., 1] << 16 for x in brain)
    code = """v_dot2_f32_f16 v128, v32, v33, v34
        v_dot2_f32_bf16 v129, v35, v36, v34
        v_mov_b32 v130, v34
        v_dot2c_f32_bf16 v130, v35, v36
        v_mov_b32 v131, v34
        v_dot2c_f32_f16 v131, v32, v33"""
    got = probe(code, [a, b, c.view("<u4"), e, f], 4)
    for k in range(4):
        np.testing.assert_array_equal(got[k].view("<f4"), exact)


def test_packed_half_accumulation() -> None:
    a, b, c = half_bits(3)
    got = probe("v_mov_b32 v128, v34\nv_pk_fmac_f16 v128, v32, v33", [a, b, c], 1)[0]
    for shift in (0, 16):
        x, y, z, g = ((w >> shift & 0xFFFF).astype("<u2").view("<f2") for w in (a, b, c, got))
        want = (x.astype(float) * y.astype(float) + z.astype(float)).astype("<f2")
        same = (np.isnan(want) & np.isnan(g)) | (want.view("<u2") == g.view("<u2"))
        assert same.all()


def test_stochastic_bfloat_keeps_the_other_half() -> None:
    x = np.full((64, 64), np.float32(1 + 2.0**-9).view("<u4"))  # a quarter of the way from 1 to the next bfloat
    r = np.random.default_rng(3).integers(0, 1 << 32, (64, 64), dtype="<u4")
    got = probe("v_mov_b32 v128, -1\nv_cvt_sr_bf16_f32 v128, v32, v33 op_sel:[0,0,1]", [x, r], 1)[0]
    assert ((got & 0xFFFF) == 0xFFFF).all()
    assert set(np.unique(got >> 16)) == {0x3F80, 0x3F81}
    assert abs(((got >> 16) == 0x3F81).mean() - 0.25) < 0.03


def test_lanes_are_routed_in_both_halves_of_a_double() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 64)) * 100
    code = """v_mov_b64_dpp v[128:129], v[32:33] row_newbcast:3 row_mask:0xf bank_mask:0xf
        v_floor_f64_dpp v[130:131], v[32:33] row_newbcast:5 row_mask:0xf bank_mask:0xf
        v_cvt_f32_f64_dpp v132, v[32:33] row_newbcast:0 row_mask:0xf bank_mask:0xf"""
    got = probe(code, split(x), 5)
    row = np.arange(64) & ~15
    np.testing.assert_array_equal(joined(got, 0), x[:, row + 3])
    np.testing.assert_array_equal(joined(got, 2), np.floor(x[:, row + 5]))
    np.testing.assert_array_equal(got[4].view("<f4"), x[:, row].astype("<f4"))


@pytest.mark.parametrize("name", ["max", "min"])
def test_a_signalling_nan_wins_and_is_quieted(name: str) -> None:
    lanes = np.ones((1, 64))
    signalling = np.full((1, 64), 0x7FF0000000000001, "<u8")
    for first, second in ((signalling.view("<f8"), lanes), (lanes, signalling.view("<f8"))):
        got = probe(f"v_{name}_f64 v[128:129], v[32:33], v[34:35]", [*split(first), *split(second)], 2)
        assert (got[0] == 1).all()
        assert (got[1] == 0x7FF80000).all()


@pytest.mark.parametrize("overflow", [0, 1])
def test_the_mode_bit_for_overflow_holds_for_every_half(overflow: int) -> None:
    big, two = np.full((1, 64), 0x7BFF7BFF, "<u4"), np.full((1, 64), 0x40004000, "<u4")  # 65504, 2
    code = """v_pk_mul_f16 v128, v32, v33
        v_pk_fma_f16 v129, v32, v33, v33
        v_mov_b32 v130, 0
        v_fma_mixlo_f16 v130, v32, v33, v33 op_sel_hi:[1,1,1]
        v_mov_b32 v40, -1
        v_cvt_f16_u16 v131, v40
        v_mul_f16 v132, v32, v33"""
    want = 0x7BFF if overflow else 0x7C00
    got = probe(code, [big, two], 5, overflow=overflow)
    assert (got[:2] == want * 0x10001).all()
    assert (got[2:] & 0xFFFF == want).all()
