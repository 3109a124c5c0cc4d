"""Integer vector instructions against numpy, on edge values and random words; both encodings, scalars and constants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from assembly import probe
from edges import assert_same_words, half_bits, integers

U = np.uint32
Model = Callable[..., np.ndarray]


def i64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32).astype(np.int64)


def u64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint64)


def s24(x: np.ndarray) -> np.ndarray:
    return ((x.astype(np.int64) & 0xFFFFFF) ^ 0x800000) - 0x800000


def low(x: np.ndarray) -> np.ndarray:
    return (
        (np.asarray(x).astype(np.int64) & 0xFFFFFFFF).astype(U)
        if np.asarray(x).dtype != np.uint64
        else np.asarray(x).astype(U)
    )


def popcount(x: np.ndarray) -> np.ndarray:
    return np.array([bin(int(v)).count("1") for v in x.ravel()], U).reshape(x.shape)


def leading(x: np.ndarray) -> np.ndarray:
    return np.array([32 - int(v).bit_length() if v else 0xFFFFFFFF for v in x.ravel()], U).reshape(x.shape)


def trailing(x: np.ndarray) -> np.ndarray:
    return np.array([(int(v) & -int(v)).bit_length() - 1 if v else 0xFFFFFFFF for v in x.ravel()], U).reshape(x.shape)


def reverse(x: np.ndarray) -> np.ndarray:
    return np.array([int(f"{int(v):032b}"[::-1], 2) for v in x.ravel()], U).reshape(x.shape)


def bfe(a: np.ndarray, b: np.ndarray, c: np.ndarray, sign: bool) -> np.ndarray:
    offset, width = u64(b & 31), u64(c & 31)
    x = u64(a) >> offset & ((np.uint64(1) << width) - np.uint64(1))
    if sign:  # a field that reaches past bit 31 repeats the sign
        x = i64(a) >> offset.astype(np.int64)
        up = 64 - width.astype(np.int64)
        x = np.where(width == 0, 0, x << (up & 63) >> (up & 63))
    return low(x)


def perm(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for index in np.ndindex(a.shape):
        data = int(b[index]).to_bytes(4, "little") + int(a[index]).to_bytes(4, "little")
        picks = []
        for sel in int(c[index]).to_bytes(4, "little"):
            if sel < 8:
                picks.append(data[sel])
            elif sel < 12:
                picks.append(255 * (data[2 * (sel - 8) + 1] >> 7))
            else:
                picks.append(0 if sel == 12 else 255)
        out[index] = int.from_bytes(bytes(picks), "little")
    return out


def sad(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    total = c.astype(np.int64)
    for k in range(0, 32, 8):
        total = total + np.abs((a.astype(np.int64) >> k & 255) - (b.astype(np.int64) >> k & 255))
    return low(total)


UNARY: dict[str, Model] = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": reverse,
    "v_ffbh_u32": leading,
    "v_ffbl_b32": trailing,
    "v_ffbh_i32": lambda a: leading(np.where(a >> 31, ~a, a)),
    "v_prng_b32": lambda a: low(u64(a) << np.uint64(1)) ^ np.where(a >> 31, U(197), U(0)),
}
BINARY: dict[str, Model] = {
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_lshlrev_b32": lambda a, b: low(u64(b) << u64(a & 31)),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b: low(i64(b) >> (a & 31)),
    "v_mul_u32_u24": lambda a, b: low(u64(a & 0xFFFFFF) * u64(b & 0xFFFFFF)),
    "v_mul_hi_u32_u24": lambda a, b: low(u64(a & 0xFFFFFF) * u64(b & 0xFFFFFF) >> np.uint64(32)),
    "v_mul_i32_i24": lambda a, b: low(s24(a) * s24(b)),
    "v_mul_hi_i32_i24": lambda a, b: low(s24(a) * s24(b) >> 32),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_min_i32": lambda a, b: low(np.minimum(i64(a), i64(b))),
    "v_max_i32": lambda a, b: low(np.maximum(i64(a), i64(b))),
    "v_mul_lo_u32": lambda a, b: low(u64(a) * u64(b)),
    "v_mul_hi_u32": lambda a, b: low(u64(a) * u64(b) >> np.uint64(32)),
    "v_mul_hi_i32": lambda a, b: low(i64(a) * i64(b) >> 32),
    "v_bcnt_u32_b32": lambda a, b: popcount(a) + b,
    "v_bfm_b32": lambda a, b: low(((np.uint64(1) << u64(a & 31)) - np.uint64(1)) << u64(b & 31)),
    "v_cvt_pk_u16_u32": lambda a, b: np.minimum(a, 0xFFFF) | np.minimum(b, 0xFFFF) << 16,
    "v_cvt_pk_i16_i32": lambda a, b: (
        low(np.clip(i64(a), -32768, 32767) & 0xFFFF) | low((np.clip(i64(b), -32768, 32767) & 0xFFFF) << 16)
    ),
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
}
TERNARY: dict[str, Model] = {
    "v_mad_u32_u24": lambda a, b, c: low(u64(a & 0xFFFFFF) * u64(b & 0xFFFFFF) + u64(c)),
    "v_mad_i32_i24": lambda a, b, c: low(s24(a) * s24(b) + i64(c)),
    "v_lshl_or_b32": lambda a, b, c: low(u64(a) << u64(b & 31)) | c,
    "v_lshl_add_u32": lambda a, b, c: low(u64(a) << u64(b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: low(u64(a + b) << u64(c & 31)),
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32": lambda a, b, c: bfe(a, b, c, False),
    "v_bfe_i32": lambda a, b, c: bfe(a, b, c, True),
    "v_alignbit_b32": lambda a, b, c: low((u64(a) << np.uint64(32) | u64(b)) >> u64(c & 31)),
    "v_alignbyte_b32": lambda a, b, c: low((u64(a) << np.uint64(32) | u64(b)) >> u64(8 * (c & 3))),
    "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_i32": lambda a, b, c: low(np.maximum(np.maximum(i64(a), i64(b)), i64(c))),
    "v_med3_u32": lambda a, b, c: np.sort(np.stack([a, b, c]), 0)[1],
    "v_med3_i32": lambda a, b, c: low(np.sort(np.stack([i64(a), i64(b), i64(c)]), 0)[1]),
    "v_perm_b32": perm,
    "v_sad_u8": sad,
}


@pytest.mark.parametrize("name", UNARY)
def test_one_operand(name: str) -> None:
    (a,) = integers(1)
    assert_same_words(probe(f"{name} v128, v32", [a], 1)[0], UNARY[name](a), a)


@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name: str) -> None:
    a, b = integers(2)
    assert_same_words(probe(f"{name} v128, v32, v33", [a, b], 1)[0], BINARY[name](a, b), a, b)


@pytest.mark.parametrize("name", TERNARY)
def test_three_operands(name: str) -> None:
    a, b, c = integers(3)
    assert_same_words(probe(f"{name} v128, v32, v33, v34", [a, b, c], 1)[0], TERNARY[name](a, b, c), a, b, c)


@pytest.mark.parametrize("operand", ["7", "-3", "0x12345678", "s12", "0.5"])
def test_scalar_operands_and_constants(operand: str) -> None:
    value = {"7": 7, "-3": 0xFFFFFFFD, "0x12345678": 0x12345678, "s12": 0xCAFE, "0.5": 0x3F000000}[operand]
    (a,) = integers(1)
    got = probe(f"v_xor_b32 v128, {operand}, v32", [a], 1, setup="s_mov_b32 s12, 0xcafe")
    assert_same_words(got[0], a ^ U(value), a)


@pytest.mark.parametrize("table", range(256))
def test_every_truth_table(table: int) -> None:
    rng = np.random.default_rng(table)
    a, b, c = (rng.integers(0, 1 << 32, (1, 64), dtype="<u4") for _ in range(3))
    want = np.zeros_like(a)
    for k in range(8):
        if table >> k & 1:
            want |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    assert_same_words(probe(f"v_bitop3_b32 v128, v32, v33, v34 bitop3:{table}", [a, b, c], 1)[0], want, a, b, c)
    got = probe(f"v_bitop3_b16 v128, v32, v33, v34 bitop3:{table}", [a, b, c], 1)[0]
    assert_same_words(got, want & 0xFFFF, a, b, c)


SATURATING: dict[str, Model] = {
    "v_add_u32": lambda a, b: np.minimum(u64(a) + u64(b), 0xFFFFFFFF).astype(U),
    "v_sub_u32": lambda a, b: np.where(a < b, 0, a - b).astype(U),
    "v_add_i32": lambda a, b: low(np.clip(i64(a) + i64(b), -(1 << 31), (1 << 31) - 1)),
    "v_sub_i32": lambda a, b: low(np.clip(i64(a) - i64(b), -(1 << 31), (1 << 31) - 1)),
}


@pytest.mark.parametrize("name", SATURATING)
def test_clamp_saturates_integers(name: str) -> None:
    a, b = integers(2)
    assert_same_words(
        probe(f"{name}_e64 v128, v32, v33 clamp".replace("i32_e64", "i32"), [a, b], 1)[0], SATURATING[name](a, b), a, b
    )


def clipped(x: np.ndarray, bits: int, sign: bool) -> np.ndarray:
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if sign else (0, (1 << bits) - 1)
    return np.clip(x, least, most).astype(np.int64) & ((1 << bits) - 1)


SATURATING_SUMS: dict[str, Model] = {
    "v_mad_u32_u24": lambda a, b, c: clipped(
        (a & 0xFFFFFF).astype(object) * (b & 0xFFFFFF).astype(object) + c.astype(object), 32, False
    ),
    "v_mad_i32_i24": lambda a, b, c: clipped(s24(a) * s24(b) + i64(c), 32, True),
    "v_mad_u32_u16": lambda a, b, c: clipped(u64(a & 0xFFFF) * u64(b & 0xFFFF) + u64(c), 32, False),
    "v_mad_i32_i16": lambda a, b, c: clipped(i16(a) * i16(b) + i64(c), 32, True),
    "v_mad_u16": lambda a, b, c: clipped(u64(a & 0xFFFF) * u64(b & 0xFFFF) + u64(c & 0xFFFF), 16, False),
    "v_mad_i16": lambda a, b, c: clipped(i16(a) * i16(b) + i16(c), 16, True),
    "v_sad_u32": lambda a, b, c: clipped(np.abs(u64(a).astype(np.int64) - u64(b).astype(np.int64)) + c, 32, False),
}


@pytest.mark.parametrize("name", SATURATING_SUMS)
def test_clamp_saturates_sums_of_products(name: str) -> None:
    a, b, c = integers(3)
    got = probe(f"{name} v128, v32, v33, v34 clamp", [a, b, c], 1)[0]
    assert_same_words(got, low(SATURATING_SUMS[name](a, b, c)), a, b, c)


def test_clamp_saturates_a_sum_of_64_bits() -> None:
    a, b, c, d = integers(4)
    exact = a.astype(object) * b.astype(object) + (c.astype(object) + d.astype(object) * 2**32)
    want = np.minimum(exact, 2**64 - 1)
    got = probe("v_mad_u64_u32 v[128:129], vcc, v32, v33, v[34:35] clamp", [a, b, c, d], 2)
    assert_same_words(got[0], (want % 2**32).astype("<u4"), a, b, c, d)
    assert_same_words(got[1], (want // 2**32).astype("<u4"), a, b, c, d)


def i16(x: np.ndarray) -> np.ndarray:
    return (x & 0xFFFF).astype(np.uint16).astype(np.int16).astype(np.int64)


SHORT: dict[str, Model] = {
    "v_add_u16": lambda a, b: (a + b) & 0xFFFF,
    "v_sub_u16": lambda a, b: (a - b) & 0xFFFF,
    "v_subrev_u16": lambda a, b: (b - a) & 0xFFFF,
    "v_mul_lo_u16": lambda a, b: low(u64(a & 0xFFFF) * u64(b & 0xFFFF)) & 0xFFFF,
    "v_lshlrev_b16": lambda a, b: ((b & 0xFFFF) << (a & 15)) & 0xFFFF,
    "v_lshrrev_b16": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "v_ashrrev_i16": lambda a, b: low(i16(b) >> (a & 15)) & 0xFFFF,
    "v_max_u16": lambda a, b: np.maximum(a & 0xFFFF, b & 0xFFFF),
    "v_min_i16": lambda a, b: low(np.minimum(i16(a), i16(b))) & 0xFFFF,
}


@pytest.mark.parametrize("name", SHORT)
def test_sixteen_bits_clear_the_upper_half(name: str) -> None:
    a, b = half_bits(2)
    assert_same_words(probe(f"{name} v128, v32, v33", [a, b], 1)[0], SHORT[name](a, b), a, b)


def test_op_sel_takes_the_upper_halves_and_keeps_the_rest() -> None:
    a, b, c, d = (half_bits(2, seed)[seed % 2][:8] for seed in range(4))
    got = probe("v_mov_b32 v128, v35\nv_mad_u16 v128, v32, v33, v34 op_sel:[1,0,1,1]", [a, b, c, d], 1)[0]
    want = ((a >> 16) * (b & 0xFFFF) + (c >> 16)) & 0xFFFF
    assert_same_words(got, (d & 0xFFFF) | want << 16, a, b, c)


PACKED: dict[str, Model] = {
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_sub_i16": lambda a, b: a - b,
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_max_i16": lambda a, b: np.maximum(a, b),
    "v_pk_lshlrev_b16": lambda a, b: b << (a & 15),
    "v_pk_ashrrev_i16": lambda a, b: b >> (a & 15),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("select", ["", " op_sel:[1,0] op_sel_hi:[0,1]"])
def test_packed_shorts(name: str, select: str) -> None:
    a, b = half_bits(2)
    halves = lambda x: [i16(x), i16(x >> 16)]  # noqa: E731
    (a0, a1), (b0, b1) = halves(a), halves(b)
    if select:
        a0, a1 = a1, a0
    want = low(PACKED[name](a0, b0) & 0xFFFF) | low((PACKED[name](a1, b1) & 0xFFFF) << 16)
    assert_same_words(probe(f"{name} v128, v32, v33{select}", [a, b], 1)[0], want, a, b)


def test_carries_in_and_out() -> None:
    a, b = integers(2)
    code = (
        "v_add_co_u32 v128, vcc, v32, v33\nv_addc_co_u32 v129, vcc, v33, v32, vcc\n"
        "v_subb_co_u32 v130, s[20:21], v32, v33, vcc\n"
        "v_cndmask_b32 v131, 0, 1, s[20:21]"
    )
    got = probe(code, [a, b], 4)
    total = u64(a) + u64(b)
    carry = total >> np.uint64(32)
    second = total + carry
    carry2 = second >> np.uint64(32)
    borrow = u64(b) + carry2
    assert_same_words(got[0], low(total), a, b)
    assert_same_words(got[1], low(second), a, b)
    assert_same_words(got[2], low(u64(a) - borrow), a, b)
    assert_same_words(got[3], (borrow > u64(a)).astype(U), a, b)


def test_64_bit_arithmetic() -> None:
    a, b, c, d = integers(4)
    wide = u64(c) | u64(d) << np.uint64(32)
    code = """v_mad_u64_u32 v[128:129], s[20:21], v32, v33, v[34:35]
        v_mad_i64_i32 v[130:131], s[22:23], v32, v33, v[34:35]
        v_lshl_add_u64 v[132:133], v[34:35], 3, v[32:33]
        v_lshlrev_b64 v[134:135], v32, v[34:35]
        v_ashrrev_i64 v[136:137], v32, v[34:35]
        v_lshrrev_b64 v[138:139], v32, -1"""
    got = probe(code, [a, b, c, d], 12)
    pair = u64(a) | u64(b) << np.uint64(32)
    signed = (i64(a) * i64(b)).astype(np.uint64)
    want = [
        u64(a) * u64(b) + wide,
        signed + wide,
        (wide << np.uint64(3)) + pair,
        wide << u64(a & 63),
        (wide.astype(np.int64) >> (a & 63)).astype(np.uint64),
        np.uint64(0xFFFFFFFFFFFFFFFF) >> u64(a & 63),
    ]
    for k, w in enumerate(want):
        assert_same_words(got[2 * k], low(w), a, b, c, d)
        assert_same_words(got[2 * k + 1], low(w >> np.uint64(32)), a, b, c, d)


COMPARISONS = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("kind", ["u32", "i32", "u16", "i16", "u64", "i64"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str, kind: str) -> None:
    a, b = half_bits(2) if kind.endswith("16") else integers(2)
    if kind.endswith("64"):
        code = f"v_cmp_{name}_{kind} s[20:21], v[32:33], v[34:35]"
        inputs = [a, b, b, b]
        x, y = u64(a) | u64(b) << np.uint64(32), u64(b) | u64(b) << np.uint64(32)
        x, y = (x.astype(np.int64), y.astype(np.int64)) if kind[0] == "i" else (x, y)
    else:
        code, inputs = f"v_cmp_{name}_{kind} s[20:21], v32, v33", [a, b]
        x, y = {"u32": (a, b), "i32": (i64(a), i64(b)), "u16": (a & 0xFFFF, b & 0xFFFF), "i16": (i16(a), i16(b))}[kind]
    got = probe(f"{code}\nv_cndmask_b32 v128, 0, 1, s[20:21]", inputs, 1)[0]
    assert_same_words(got, COMPARISONS[name](x, y).astype(U), a, b)


def test_inactive_lanes_keep_their_value_and_compare_as_zero() -> None:
    a, b = (x[:4] for x in integers(2))
    code = """v_mov_b32 v128, v33
        s_mov_b64 s[24:25], exec
        s_mov_b64 exec, 0x00ff00ff
        v_add_u32 v128, v32, v32
        v_cmp_eq_u32 s[20:21], v32, v32
        s_mov_b64 exec, s[24:25]
        v_cndmask_b32 v129, 0, 1, s[20:21]"""
    got = probe(code, [a, b], 2)
    active = np.array([(0x00FF00FF >> lane & 1) == 1 if lane < 32 else False for lane in range(64)])
    assert_same_words(got[0], np.where(active, a + a, b), a, b)
    assert_same_words(got[1], np.broadcast_to(active, a.shape).astype(U))


def test_cmpx_writes_exec() -> None:
    a, b = (x[:4] for x in integers(2))
    code = """v_mov_b32 v128, 0
        s_mov_b64 s[24:25], exec
        v_cmpx_gt_u32 exec, v32, v33
        v_mov_b32 v128, 1
        s_mov_b64 exec, s[24:25]"""
    assert_same_words(probe(code, [a, b], 1)[0], (a > b).astype(U), a, b)
