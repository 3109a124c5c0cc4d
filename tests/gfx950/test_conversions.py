"""Conversions: every code of the narrow formats, ties, saturation, NaN; scales of the full exponent range."""

from __future__ import annotations

import numpy as np
import pytest
import small_floats as small
from assembly import probe
from edges import assert_same_floats, assert_same_words, float_bits, half_bits, integers

F = np.float32
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EIGHT = np.arange(256, dtype="<u4").reshape(4, 64)


def clip(x: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(np.float64)), low, high)).astype(np.int64)


def test_integers() -> None:
    (a,), (n,) = float_bits(1), integers(1)
    x = a.view(F)
    got = probe("v_cvt_u32_f32 v128, v32\nv_cvt_i32_f32 v129, v32\nv_cvt_flr_i32_f32 v130, v32", [a], 3)
    assert_same_words(got[0], clip(x, 0, 0xFFFFFFFF).astype("<u4"), a)
    assert_same_words(got[1], clip(x, -(1 << 31), (1 << 31) - 1).astype("<u4"), a)
    assert_same_words(got[2], clip(np.floor(x), -(1 << 31), (1 << 31) - 1).astype("<u4"), a)
    got = probe(
        "v_cvt_f32_u32 v128, v32\nv_cvt_f32_i32 v129, v32\nv_cvt_f32_ubyte2 v130, v32\nv_cvt_f64_u32 v[132:133], v32",
        [n],
        6,
    )
    assert_same_floats(got[0], n.astype(F), n)
    assert_same_floats(got[1], n.view("<i4").astype(F), n)
    assert_same_floats(got[2], (n >> 16 & 255).astype(F), n)
    np.testing.assert_array_equal((got[4].astype("<u8") | got[5].astype("<u8") << 32).view("<f8"), n.astype("<f8"))


def test_halves_and_bfloats_round_to_even() -> None:
    a, b = float_bits(2)
    got = probe(
        "v_cvt_f16_f32 v128, v32\nv_cvt_pk_bf16_f32 v129, v32, v33\n"
        "v_cvt_pk_f16_f32 v130, v32, v33\nv_cvt_pkrtz_f16_f32 v131, v32, v33",
        [a, b],
        4,
    )
    h = lambda x: x.view(F).astype("<f2")  # noqa: E731
    nan = lambda x: np.isnan(x.view(F))  # noqa: E731
    same = (got[0].astype("<u2").view("<f2").view("<u2") == h(a).view("<u2")) | nan(a)
    assert same.all(), hex(int(a[~same][0]))
    assert_same_words(
        np.where(nan(a) | nan(b), 0, got[1]), np.where(nan(a) | nan(b), 0, small.bf16(a) | small.bf16(b) << 16), a, b
    )
    want = h(a).view("<u2").astype("<u4") | h(b).view("<u2").astype("<u4") << 16
    assert_same_words(np.where(nan(a) | nan(b), 0, got[2]), np.where(nan(a) | nan(b), 0, want), a, b)
    x, r = a.view(F).astype(np.float64), (got[3] & 0xFFFF).astype("<u2").view("<f2").astype(np.float64)
    toward = np.isnan(x) | (np.abs(r) <= np.abs(x)) & (np.isinf(r) == np.isinf(x))
    closest = np.isnan(x) | (np.abs(x) >= 65504) | (np.abs(x - r) < np.maximum(np.abs(r) * 2.0**-10, 2.0**-24))
    assert toward.all()
    assert closest.all()


def test_every_half_and_bfloat_widens_exactly() -> None:
    codes = np.arange(1 << 16, dtype="<u4").reshape(-1, 64)
    got = probe(
        "v_cvt_f32_f16 v128, v32\nv_cvt_f32_bf16 v129, v32\nv_cvt_f32_f16_sdwa v130, v32 dst_sel:DWORD src0_sel:WORD_1",
        [codes | codes << 16],
        3,
    )
    assert_same_floats(got[0], codes.astype("<u2").view("<f2").astype(F), codes)
    assert_same_floats(got[1], (codes << 16).view(F), codes)
    assert_same_floats(got[2], codes.astype("<u2").view("<f2").astype(F), codes)


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_all_256_codes_widen(name: str) -> None:
    want = small.values(name)[EIGHT].astype(F)
    other = EIGHT[::-1]
    words = other | EIGHT << 8 | other << 16 | EIGHT << 24
    code = f"""v_cvt_f32_{name}_sdwa v128, v32 src0_sel:BYTE_1
        v_cvt_pk_f32_{name}_sdwa v[130:131], v32 src0_sel:WORD_1
        v_cvt_pk_f32_{name} v[132:133], v32
        v_cvt_scalef32_pk_f32_{name} v[134:135], v32, 1.0 op_sel:[1,0,0]
        v_cvt_scalef32_f32_{name} v136, v32, 2.0 op_sel:[1,1,0]"""
    got = probe(code, [words], 9)
    opposite = small.values(name)[other].astype(F)
    for k, w in (
        (0, want),
        (2, opposite),
        (3, want),
        (4, opposite),
        (5, want),
        (6, opposite),
        (7, want),
        (8, want * F(2)),
    ):
        assert_same_floats(got[k], w, words)


@pytest.mark.parametrize("overflow", [0, 1])
@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_narrowing_to_eight_bits(name: str, overflow: int) -> None:
    """Halfway points between all neighbours, everything just beside them, and the edge values."""
    table = small.values(name)
    finite = np.sort(table[np.isfinite(table)]).astype(np.float64)
    middles = ((finite[1:] + finite[:-1]) / 2).astype(F)
    points = np.concatenate(
        [
            finite.astype(F),
            middles,
            np.nextafter(middles, F(np.inf)),
            np.nextafter(middles, F(-np.inf)),
            float_bits(1)[0].view(F).ravel(),
        ]
    )
    points = np.concatenate([points, points[: -len(points) % 64]]).reshape(-1, 64)
    a, b = points.view("<u4"), points[::-1].copy().view("<u4")
    got = probe(f"v_mov_b32 v128, -1\nv_cvt_pk_{name}_f32 v128, v32, v33 op_sel:[0,0,1]", [a, b], 1, overflow=overflow)[
        0
    ]
    want = small.encode(name, a.view(F), bool(overflow)) | small.encode(name, b.view(F), bool(overflow)) << 8
    assert_same_words(got, want << 16 | 0xFFFF, a, b)


@pytest.mark.parametrize("scale", [0, 1, 100, 126, 127, 128, 150, 254])
def test_all_16_fp4_codes_with_scales(scale: int) -> None:
    words = EIGHT | EIGHT << 16
    s = np.full_like(words, scale << 23)
    code = """v_cvt_scalef32_pk_f32_fp4 v[128:129], v32, v33 op_sel:[0,1,0]
        v_cvt_scalef32_pk_bf16_fp4 v130, v32, v33
        v_cvt_scalef32_pk_f16_fp4 v131, v32, v33"""
    got = probe(code, [words, s], 4)
    factor = np.float64(2.0) ** (scale - 127)
    table = small.values("fp4") * factor
    low, high = table[EIGHT & 15].astype(F), table[EIGHT >> 4].astype(F)
    assert_same_floats(got[0], low, words)
    assert_same_floats(got[1], high, words)
    assert_same_words(got[2], small.bf16(low.view("<u4")) | small.bf16(high.view("<u4")) << 16, words)
    assert_same_words(
        got[3], low.astype("<f2").view("<u2").astype("<u4") | high.astype("<f2").view("<u2").astype("<u4") << 16, words
    )


@pytest.mark.parametrize("scale", [64, 126, 127, 129, 190])
@pytest.mark.parametrize("name", ["fp4", "fp8", "bf8"])
def test_narrowing_with_a_scale(name: str, scale: int) -> None:
    table = small.values(name)
    finite = np.unique(np.abs(table[np.isfinite(table)]))
    middles = (finite[1:] + finite[:-1]) / 2
    points = np.concatenate(
        [
            finite,
            middles,
            middles * (1 + 2.0**-20),
            middles * (1 - 2.0**-20),
            [finite[-1] * 1.03, finite[-1] * 1.5, 1e9],
        ]
    )
    points = np.concatenate([points, -points]) * 2.0 ** (scale - 127)
    x = np.resize(points.astype(F), (-(-len(points) // 64), 64))
    a, b = x.view("<u4"), x[::-1, ::-1].copy().view("<u4")
    s = np.full_like(a, scale << 23)
    got = probe(f"v_mov_b32 v128, 0\nv_cvt_scalef32_pk_{name}_f32 v128, v32, v33, v34 op_sel:[0,0,0,1]", [a, b, s], 1)[
        0
    ]
    down = lambda w: w.view(F).astype(np.float64) * 2.0 ** (127 - scale)  # noqa: E731
    saturate = name == "fp4"
    want = small.encode(name, down(a), saturate) | small.encode(name, down(b), saturate) << small.width(name)
    assert_same_words(got, want << 16, a, b)
    pair = small.bf16(a) | small.bf16(b) << 16
    got = probe(f"v_mov_b32 v128, 0\nv_cvt_scalef32_pk_{name}_bf16 v128, v32, v33", [pair, s], 1)[0]
    wide = lambda w: (small.bf16(w) << 16).view(F).astype(np.float64) * 2.0 ** (127 - scale)  # noqa: E731
    want = small.encode(name, wide(a), saturate) | small.encode(name, wide(b), saturate) << small.width(name)
    assert_same_words(got, want, a, b)


@pytest.mark.parametrize("name", ["fp6", "bf6"])
def test_thirty_two_six_bit_values(name: str) -> None:
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 64, (2, 32, 64))
    codes[0, :, :2] = np.arange(64).reshape(2, 32).T
    packed = np.zeros((2, 6, 64), "<u4")
    for k in range(32):
        for bit in range(6):
            at = 6 * k + bit
            packed[:, at // 32] |= ((codes[:, k] >> bit & 1) << (at % 32)).astype("<u4")
    words = [packed[:, k] for k in range(6)] + [np.full((2, 64), 130 << 23, "<u4")]
    got = probe(f"v_cvt_scalef32_pk32_f32_{name} v[128:159], v[32:37], v38", words, 32)
    for k in range(32):
        assert_same_floats(got[k], (small.values(name)[codes[:, k]] * 8).astype(F))
    got = probe(
        f"""v_cvt_scalef32_pk32_f32_{name} v[160:191], v[32:37], v38
        v_cvt_scalef32_2xpk16_{name}_f32 v[128:133], v[160:175], v[176:191], v38""",
        words,
        6,
    )
    order = np.empty_like(codes)
    order[:, 0::2], order[:, 1::2] = codes[:, :16], codes[:, 16:]  # the two sources are interleaved
    again = np.zeros((2, 6, 64), "<u4")
    for k in range(32):
        for bit in range(6):
            at = 6 * k + bit
            again[:, at // 32] |= ((order[:, k] >> bit & 1) << (at % 32)).astype("<u4")
    for k in range(6):
        assert_same_words(got[k], again[:, k])


def test_stochastic_rounding_is_unbiased_and_bounded() -> None:
    rng = np.random.default_rng(3)
    a = np.full((64, 64), F(1.03125).view("<u4"))  # a quarter of the way from 1 to 1.125
    r = rng.integers(0, 1 << 32, (64, 64), dtype="<u4")
    got = probe("v_mov_b32 v128, 0\nv_cvt_sr_fp8_f32 v128, v32, v33", [a, r], 1)[0]
    x = small.values("fp8")[got & 255]
    assert set(np.unique(x)) == {1.0, 1.125}
    assert abs((x == 1.125).mean() - 0.25) < 0.03


def test_byte_selects_of_sdwa() -> None:
    a, b = half_bits(2)
    code = """v_mov_b32 v128, v33
        v_add_u32_sdwa v128, v32, v33 dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_1 src1_sel:WORD_1
        v_add_u32_sdwa v129, sext(v32), v33 dst_sel:WORD_0 dst_unused:UNUSED_SEXT src0_sel:BYTE_0 src1_sel:DWORD
        v_add_u32_sdwa v130, v32, v33 dst_sel:BYTE_3 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_3"""
    got = probe(code, [a, b], 3)
    one = ((a >> 8 & 255) + (b >> 16)) & 255
    assert_same_words(got[0], (b & 0xFF00FFFF) | one << 16, a, b)
    two = ((a & 255) ^ 0x80) - np.uint32(0x80) + b
    assert_same_words(got[1], ((two & 0xFFFF) ^ 0x8000) - np.uint32(0x8000), a, b)
    assert_same_words(got[2], ((a + (b >> 24)) & 255) << 24, a, b)
