"""Lane exchanges, DPP, and local memory: every width, offsets, atomics, transposing reads."""

from __future__ import annotations

import numpy as np
import pytest
from assembly import probe
from edges import assert_same_words, integers

LANE = np.arange(64)


def one_wave(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, 1 << 32, (2, 64), dtype="<u4") for _ in range(count)]


def dpp_source(control: str) -> np.ndarray:
    """The lane that each lane reads, -1 for none."""
    row, i = LANE & ~15, LANE & 15
    kind, _, arg = control.partition(":")
    n = int(arg) if arg.isdigit() else 0
    if kind == "quad_perm":
        picks = [int(c) for c in arg.strip("[]").split(",")]
        return (LANE & ~3) | np.array(picks)[LANE & 3]
    return {
        "row_shl": np.where(i + n < 16, LANE + n, -1),
        "row_shr": np.where(i >= n, LANE - n, -1),
        "row_ror": row | ((i - n) & 15),
        "wave_shr": LANE - 1,
        "wave_shl": np.where(LANE < 63, LANE + 1, -1),
        "row_mirror": row | (15 - i),
        "row_half_mirror": (LANE & ~7) | (7 - (LANE & 7)),
        "row_bcast": np.where(LANE >= 16, row - 1, -1) if n == 15 else np.where(LANE >= 32, 31, -1),
        "row_newbcast": row | n,
        "wave_ror": (LANE - 1) & 63,
        "wave_rol": (LANE + 1) & 63,
    }[kind]


CONTROLS = [
    "quad_perm:[1,0,3,2]",
    "quad_perm:[0,0,0,0]",
    "row_shl:1",
    "row_shl:15",
    "row_shr:8",
    "row_ror:4",
    "wave_shl:1",
    "wave_shr:1",
    "wave_rol:1",
    "wave_ror:1",
    "row_mirror",
    "row_half_mirror",
    "row_bcast:15",
    "row_bcast:31",
    "row_newbcast:5",
]


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(
    "mask", ["row_mask:0xf bank_mask:0xf", "row_mask:0xa bank_mask:0x5", "row_mask:0xf bank_mask:0xf bound_ctrl:0"]
)
def test_dpp(control: str, mask: str) -> None:
    a, b, old = one_wave(3)
    got = probe(f"v_mov_b32 v128, v34\ns_nop 1\nv_add_u32_dpp v128, v32, v33 {control} {mask}", [a, b, old], 1)[0]
    source = dpp_source(control)
    valid = source >= 0
    value = np.where(valid, a[:, source], 0) + b
    rows, banks = (int(part.split(":")[1], 16) for part in mask.split()[:2])
    chosen = (rows >> (LANE >> 4) & 1).astype(bool) & (banks >> (LANE >> 2 & 3) & 1).astype(bool)
    writes = chosen & (valid | ("bound_ctrl" in mask))
    assert_same_words(got, np.where(writes, value, old), a, b, old)


def test_dpp_reads_no_inactive_lane() -> None:
    a, old = one_wave(2)
    code = """v_mov_b32 v128, v33
        s_mov_b64 s[24:25], exec
        s_mov_b64 exec, 0xfffffff0
        s_nop 4
        v_mov_b32_dpp v128, v32 row_shr:4 row_mask:0xf bank_mask:0xf
        s_mov_b64 exec, s[24:25]"""
    got = probe(code, [a, old], 1)[0]
    source = dpp_source("row_shr:4")
    active = (LANE >= 4) & (LANE < 32)
    writes = active & (source >= 4)
    assert_same_words(got, np.where(writes, a[:, source], old), a, old)


def test_permutes() -> None:
    a, to = one_wave(2)
    code = """v_and_b32 v40, 63, v33
        v_lshlrev_b32 v40, 2, v40
        ds_bpermute_b32 v128, v40, v32 offset:8
        v_xor_b32 v41, 21, v0
        v_lshlrev_b32 v41, 2, v41
        ds_permute_b32 v129, v41, v32
        ds_swizzle_b32 v130, v32 offset:swizzle(BITMASK_PERM, "01pip")
        ds_swizzle_b32 v131, v32 offset:swizzle(QUAD_PERM, 3, 2, 1, 0)
        ds_swizzle_b32 v132, v32 offset:swizzle(SWAP, 16)
        s_waitcnt lgkmcnt(0)"""
    got = probe(code, [a, to], 5)
    rows = np.arange(2)[:, None]
    assert_same_words(got[0], a[rows, ((to & 63) + 2) & 63], a, to)
    assert_same_words(got[1], a[:, LANE ^ 21], a)
    low = LANE & 31
    picked = ((low & 0b00111) | 0b01000) ^ 0b00010  # 0, 1, keep, invert, keep
    assert_same_words(got[2], a[:, (LANE & 32) | picked], a)
    assert_same_words(got[3], a[:, LANE ^ 3], a)
    assert_same_words(got[4], a[:, LANE ^ 16], a)


def test_swaps_between_rows_and_halves() -> None:
    a, b = one_wave(2)
    code = """v_mov_b32 v128, v32
        v_mov_b32 v129, v33
        v_permlane16_swap_b32 v128, v129
        v_mov_b32 v130, v32
        v_mov_b32 v131, v33
        v_permlane32_swap_b32 v130, v131"""
    got = probe(code, [a, b], 4)
    odd = (LANE >> 4 & 1) == 1
    assert_same_words(got[0], np.where(odd, b[:, LANE ^ 16], a))
    assert_same_words(got[1], np.where(odd, b, a[:, LANE ^ 16]))
    high = LANE >= 32
    assert_same_words(got[2], np.where(high, b[:, LANE ^ 32], a))
    assert_same_words(got[3], np.where(high, b, a[:, LANE ^ 32]))


def test_lanes_to_scalars_and_back() -> None:
    a, b = one_wave(2)
    code = """s_mov_b64 s[24:25], exec
        s_mov_b64 exec, 0xff00
        v_readfirstlane_b32 s20, v32
        s_mov_b64 exec, s[24:25]
        v_readlane_b32 s21, v32, 63
        v_mov_b32 v128, s20
        v_mov_b32 v129, v33
        v_writelane_b32 v129, s21, 5
        v_mbcnt_lo_u32_b32 v130, -1, 0
        v_mbcnt_hi_u32_b32 v130, -1, v130"""
    got = probe(code, [a, b], 3)
    assert_same_words(got[0], np.repeat(a[:, 8:9], 64, 1))
    want = b.copy()
    want[:, 5] = a[:, 63]
    assert_same_words(got[1], want)
    assert_same_words(got[2], np.broadcast_to(LANE.astype("<u4"), a.shape))


# ---- local memory ----


@pytest.mark.parametrize("words", [1, 2, 3, 4])
def test_every_width(words: int) -> None:
    data = one_wave(words)
    bits = 32 * words
    src = f"v[32:{31 + words}]" if words > 1 else "v32"
    dst = f"v[128:{127 + words}]" if words > 1 else "v128"
    code = f"""v_lshlrev_b32 v40, 4, v0
        ds_write_b{bits} v40, {src} offset:64
        v_xor_b32 v41, 63, v0
        v_lshlrev_b32 v41, 4, v41
        s_waitcnt lgkmcnt(0)
        ds_read_b{bits} {dst}, v41 offset:64
        s_waitcnt lgkmcnt(0)"""
    got = probe(code, data, words, lds=2048)
    for k in range(words):
        assert_same_words(got[k], data[k][:, ::-1])


def test_two_addresses_and_small_elements() -> None:
    a, b, c = one_wave(3)
    code = """v_lshlrev_b32 v40, 3, v0
        ds_write2_b32 v40, v32, v33 offset0:0 offset1:1
        s_waitcnt lgkmcnt(0)
        ds_read2_b32 v[128:129], v40 offset0:1 offset1:0
        ds_read2st64_b32 v[130:131], v1 offset0:0 offset1:1
        ds_write_b8 v1, v34 offset:1025
        ds_write_b16 v1, v34 offset:1026
        ds_write_b8_d16_hi v1, v34 offset:1024
        s_waitcnt lgkmcnt(0)
        ds_read_u8 v132, v1 offset:1025
        ds_read_i16 v133, v1 offset:1026
        v_mov_b32 v134, v32
        ds_read_u16_d16_hi v134, v1 offset:1026
        ds_read_i8 v135, v1 offset:1024
        s_waitcnt lgkmcnt(0)"""
    got = probe(code, [a, b, c], 8, lds=2048)
    assert_same_words(got[0], b)
    assert_same_words(got[1], a)
    flat = np.stack([a, b], 2).reshape(2, 128)
    assert_same_words(got[2], flat[:, :64])
    assert_same_words(got[3], flat[:, 64:])
    assert_same_words(got[4], c & 255)
    assert_same_words(got[5], ((c & 0xFFFF) ^ 0x8000) - np.uint32(0x8000))
    assert_same_words(got[6], (a & 0xFFFF) | c << 16)
    assert_same_words(got[7], ((c >> 16 & 255) ^ 0x80) - np.uint32(0x80))


def test_strided_pairs_of_doublewords() -> None:
    a, b, c, d = one_wave(4)
    code = """v_lshlrev_b32 v40, 3, v0
        ds_write2st64_b64 v40, v[32:33], v[34:35] offset0:0 offset1:1
        s_waitcnt lgkmcnt(0)
        ds_read2_b64 v[128:131], v40 offset0:64 offset1:0
        s_waitcnt lgkmcnt(0)"""
    got = probe(code, [a, b, c, d], 4, lds=2048)
    for k, want in enumerate((c, d, a, b)):
        assert_same_words(got[k], want)


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("add_rtn_u32", lambda m, x: m + x),
        ("sub_rtn_u32", lambda m, x: m - x),
        ("max_rtn_u32", np.maximum),
        ("min_rtn_u32", np.minimum),
        ("and_rtn_b32", lambda m, x: m & x),
        ("or_rtn_b32", lambda m, x: m | x),
        ("xor_rtn_b32", lambda m, x: m ^ x),
        ("max_rtn_i32", lambda m, x: np.maximum(m.view("<i4"), x.view("<i4")).view("<u4")),
        ("wrxchg_rtn_b32", lambda m, x: x),
        ("inc_rtn_u32", lambda m, x: np.where(m >= x, 0, m + 1)),
        ("dec_rtn_u32", lambda m, x: np.where((m == 0) | (m > x), x, m - 1)),
    ],
)
def test_atomics(name: str, f: object) -> None:
    m, x = (v[:18] for v in integers(2))
    code = f"""ds_write_b32 v1, v32
        s_waitcnt lgkmcnt(0)
        ds_{name} v128, v1, v33
        s_waitcnt lgkmcnt(0)
        ds_read_b32 v129, v1
        s_waitcnt lgkmcnt(0)"""
    got = probe(code, [m, x], 2, lds=256)
    assert_same_words(got[0], m)
    assert_same_words(got[1], np.asarray(f(m, x)).astype("<u4"), m, x)  # type: ignore[operator]


def test_atomics_of_one_address_add_up() -> None:
    (a,) = one_wave(1)
    a &= 0xFFFF
    code = """v_mov_b32 v40, 0
        ds_write_b32 v40, v40
        ds_write_b32 v40, v40 offset:4
        s_waitcnt lgkmcnt(0)
        ds_add_u32 v40, v32
        v_cvt_f32_u32 v41, v32
        ds_add_f32 v40, v41 offset:4
        s_waitcnt lgkmcnt(0)
        ds_read_b64 v[128:129], v40
        s_waitcnt lgkmcnt(0)"""
    got = probe(code, [a], 2, lds=64)
    total = a.sum(1, keepdims=True)
    assert_same_words(got[0], np.repeat(total, 64, 1).astype("<u4"))
    assert_same_words(got[1], np.repeat(total.astype("<f4"), 64, 1).view("<u4"))


def test_compare_and_swap() -> None:
    a, b = one_wave(2)
    same = np.where(LANE % 2, a, b)
    code = """ds_write_b32 v1, v32
        s_waitcnt lgkmcnt(0)
        ds_cmpst_rtn_b32 v128, v1, v33, v34
        s_waitcnt lgkmcnt(0)
        ds_read_b32 v129, v1
        s_waitcnt lgkmcnt(0)"""
    got = probe(code, [a, same, b], 2, lds=256)
    assert_same_words(got[0], a)
    assert_same_words(got[1], np.where(a == same, b, a))


@pytest.mark.parametrize(("bits", "count", "words"), [(16, 4, 2), (8, 8, 2), (4, 16, 2), (6, 16, 3)])
def test_transposing_reads(bits: int, count: int, words: int) -> None:
    """Sixteen lanes' elements, laid end to end, are a matrix 16 wide; lane i gets its column i."""
    rng = np.random.default_rng(bits)
    elements = rng.integers(0, 1 << bits, (64, count))
    packed = np.zeros((64, words), object)
    for k in range(count):
        word, at = divmod(k * bits, 32)
        value = elements[:, k].astype(object) << at
        packed[:, word] |= value & 0xFFFFFFFF
        if word + 1 < words:
            packed[:, word + 1] |= value >> 32
    data = [packed[:, w].astype("<u4").reshape(1, 64) for w in range(words)]
    pitch = 16 if words == 3 else 8
    code = f"""v_mul_u32_u24 v40, {pitch}, v0
        ds_write_b{32 * words} v40, v[32:{31 + words}]
        s_waitcnt lgkmcnt(0)
        ds_read_b{32 * words}_tr_b{bits} v[128:{127 + words}], v40
        s_waitcnt lgkmcnt(0)"""
    got = probe(code, data, words, lds=1024)[:, 0]
    for group in range(4):
        matrix = elements[16 * group : 16 * group + 16].reshape(count, 16)
        for i in range(16):
            value = sum(int(matrix[k, i]) << (k * bits) for k in range(count))
            for w in range(words):
                assert int(got[w, 16 * group + i]) == value >> (32 * w) & 0xFFFFFFFF
