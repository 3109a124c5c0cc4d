"""The scalar unit: arithmetic with its carry, bit operations, comparisons, exec saving, branches and calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from assembly import assemble, probe
from edges import INTEGERS

from tools.gfx950 import Emulator, Memory

M = 0xFFFFFFFF


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def fits(x: int) -> bool:
    return -(1 << 31) <= x < 1 << 31


def ones(x: int) -> int:
    return bin(x).count("1")


BINARY: dict[str, Callable[[int, int], tuple[int, int | None]]] = {
    "s_add_u32": lambda a, b: (a + b & M, int(a + b > M)),
    "s_sub_u32": lambda a, b: (a - b & M, int(b > a)),
    "s_add_i32": lambda a, b: (a + b & M, int(not fits(signed(a) + signed(b)))),
    "s_sub_i32": lambda a, b: (a - b & M, int(not fits(signed(a) - signed(b)))),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)) & M, int(signed(a) < signed(b))),
    "s_max_u32": lambda a, b: (max(a, b), int(a > b)),
    "s_and_b32": lambda a, b: (a & b, int(a & b != 0)),
    "s_andn2_b32": lambda a, b: (a & ~b & M, int(a & ~b & M != 0)),
    "s_nor_b32": lambda a, b: (~(a | b) & M, int(~(a | b) & M != 0)),
    "s_xnor_b32": lambda a, b: (~(a ^ b) & M, int(~(a ^ b) & M != 0)),
    "s_lshl_b32": lambda a, b: (a << (b & 31) & M, int(a << (b & 31) & M != 0)),
    "s_lshr_b32": lambda a, b: (a >> (b & 31), int(a >> (b & 31) != 0)),
    "s_ashr_i32": lambda a, b: (signed(a) >> (b & 31) & M, int(signed(a) >> (b & 31) != 0)),
    "s_mul_i32": lambda a, b: (a * b & M, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32 & M, None),
    "s_bfm_b32": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31) & M, None),
    "s_pack_lh_b32_b16": lambda a, b: (a & 0xFFFF | b & 0xFFFF0000, None),
    "s_lshl3_add_u32": lambda a, b: ((a << 3) + b & M, int((a << 3) + b > M)),
    "s_absdiff_i32": lambda a, b: (abs(signed(a) - signed(b)) & M, int(a != b)),
    "s_bfe_u32": lambda a, b: _bfe(a, b, False),
    "s_bfe_i32": lambda a, b: _bfe(a, b, True),
}


def _bfe(a: int, b: int, sign: bool) -> tuple[int, int]:
    offset, width = b & 31, b >> 16 & 127
    x = (signed(a) if sign else a) >> offset
    if width < 64:
        x &= (1 << width) - 1
    if sign and width and x >> (width - 1) & 1 and width < 64:
        x -= 1 << width
    return x & M, int(x & M != 0)


def pairs() -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(1)
    values = [*INTEGERS, *map(int, rng.integers(0, 1 << 32, 28))]
    return values, [values[(7 * k + 3) % 64] for k in range(64)]


def scalar_probe(code: str, results: int) -> np.ndarray:
    """Runs `code` on s20, s21 = each of 64 pairs; returns s30, s31 ... for each."""
    a, b = pairs()
    lines = ""
    for lane in range(64):
        lines += f"v_readlane_b32 s20, v32, {lane}\nv_readlane_b32 s21, v33, {lane}\n{code}\n"
        lines += "".join(f"v_writelane_b32 v{128 + k}, s{30 + k}, {lane}\n" for k in range(results))
    inputs = [np.array(x, "<u4").reshape(1, 64) for x in (a, b)]
    return probe(lines, inputs, results)[:, 0]


@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name: str) -> None:
    got = scalar_probe(f"s_cmp_eq_u32 s20, s20\n{name} s30, s20, s21\ns_cselect_b32 s31, 1, 0", 2)
    for lane, (a, b) in enumerate(zip(*pairs(), strict=True)):
        value, scc = BINARY[name](a, b)
        assert (int(got[0][lane]), int(got[1][lane])) == (value, 1 if scc is None else scc), (hex(a), hex(b))


UNARY: dict[str, Callable[[int], int]] = {
    "s_not_b32": lambda a: ~a & M,
    "s_brev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "s_bcnt1_i32_b32": ones,
    "s_bcnt0_i32_b32": lambda a: 32 - ones(a),
    "s_ff1_i32_b32": lambda a: (a & -a).bit_length() - 1 & M,
    "s_ff0_i32_b32": lambda a: (~a & M & -(~a & M)).bit_length() - 1 & M,
    "s_flbit_i32_b32": lambda a: 32 - a.bit_length() if a else M,
    "s_sext_i32_i8": lambda a: (a & 255 ^ 128) - 128 & M,
    "s_sext_i32_i16": lambda a: (a & 0xFFFF ^ 0x8000) - 0x8000 & M,
    "s_abs_i32": lambda a: abs(signed(a)) & M,
    "s_flbit_i32": lambda a: (32 - (a if a < 1 << 31 else ~a & M).bit_length()) if a not in (0, M) else M,
}


@pytest.mark.parametrize("name", UNARY)
def test_one_operand(name: str) -> None:
    got = scalar_probe(f"{name} s30, s20", 1)
    assert [int(x) for x in got[0]] == [UNARY[name](a) for a in pairs()[0]]


RELATIONS = {"eq": "__eq__", "lg": "__ne__", "gt": "__gt__", "ge": "__ge__", "lt": "__lt__", "le": "__le__"}


@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons(relation: str) -> None:
    got = scalar_probe(
        f"s_cmp_{relation}_u32 s20, s21\ns_cselect_b32 s30, 1, 0\n"
        f"s_cmp_{relation}_i32 s20, s21\ns_cselect_b32 s31, 1, 0\n"
        f"s_cmpk_{relation}_i32 s20, 0xff80\ns_cselect_b32 s32, 1, 0\n"
        f"s_cmpk_{relation}_u32 s20, 0xffff\ns_cselect_b32 s33, 1, 0",
        4,
    )
    method = RELATIONS[relation]
    for lane, (a, b) in enumerate(zip(*pairs(), strict=True)):
        want = [
            getattr(a, method)(b),
            getattr(signed(a), method)(signed(b)),
            getattr(signed(a), method)(-128),
            getattr(a, method)(0xFFFF),
        ]
        assert [int(g[lane]) for g in got] == want, (hex(a), hex(b))


def test_64_bits() -> None:
    code = """s_mov_b32 s22, s21
        s_mov_b32 s23, s20
        s_lshl_b64 s[30:31], s[20:21], s21
        s_ashr_i64 s[32:33], s[20:21], s20
        s_bcnt1_i32_b64 s34, s[20:21]
        s_ff1_i32_b64 s35, s[20:21]
        s_andn2_b64 s[36:37], s[20:21], s[22:23]
        s_mov_b64 s[38:39], -5
        s_bfe_i64 s[40:41], s[20:21], 0x180014
        s_cmp_lg_u64 s[20:21], s[22:23]
        s_cselect_b32 s42, 1, 0"""
    got = scalar_probe(code, 13)
    w = (1 << 64) - 1
    for lane, (a, b) in enumerate(zip(*pairs(), strict=True)):
        x, y = a | b << 32, b | a << 32
        sx = x - (1 << 64) if x >> 63 else x
        wide = lambda k: int(got[k][lane]) | int(got[k + 1][lane]) << 32  # noqa: B023, E731
        assert wide(0) == x << (b & 63) & w
        assert wide(2) == sx >> (a & 63) & w
        assert int(got[4][lane]) == ones(x)
        assert int(got[5][lane]) == (x & -x).bit_length() - 1 & M
        assert wide(6) == x & ~y & w
        assert wide(8) == w - 4
        field = x >> 20 & 0xFFFFFF
        assert wide(10) == (field - (1 << 24) if field >> 23 else field) & w
        assert int(got[12][lane]) == (x != y)


def test_exec_is_saved_and_narrowed() -> None:
    code = """s_mov_b64 s[24:25], 0xff00ff
        v_mov_b32 v128, 1
        s_and_saveexec_b64 s[26:27], s[24:25]
        v_mov_b32 v128, 2
        s_xor_b64 exec, exec, s[26:27]
        v_mov_b32 v129, 3
        s_or_b64 exec, exec, s[26:27]
        v_cndmask_b32 v130, 0, 1, s[26:27]"""
    x = np.zeros((1, 64), "<u4")
    got = probe(code, [x], 3, setup="v_mov_b32 v129, 0")[:, 0]
    inside = np.array([lane < 32 and 0xFF00FF >> lane & 1 for lane in range(64)], bool)
    np.testing.assert_array_equal(got[0], np.where(inside, 2, 1))
    np.testing.assert_array_equal(got[1], np.where(inside, 0, 3))
    assert (got[2] == 1).all()


def test_a_waterfall_loop_visits_every_value() -> None:
    """The loop that compilers make of a resource that differs between lanes."""
    rng = np.random.default_rng(2)
    keys = rng.integers(0, 5, (1, 64), dtype="<u4")
    code = """v_mov_b32 v128, 0
        s_mov_b32 s30, 0
        s_mov_b64 s[24:25], exec
    .Lnext:
        v_readfirstlane_b32 s20, v32
        v_cmp_eq_u32 vcc, s20, v32
        s_and_saveexec_b64 s[26:27], vcc
        s_mul_i32 s21, s20, 100
        v_mov_b32 v128, s21
        s_add_u32 s30, s30, 1
        s_xor_b64 exec, exec, s[26:27]
        s_cbranch_execnz .Lnext
        s_mov_b64 exec, s[24:25]
        v_mov_b32 v129, s30"""
    got = probe(code, [keys], 2)[:, 0]
    np.testing.assert_array_equal(got[0], keys[0] * 100)
    assert (got[1] == len(np.unique(keys))).all()


def test_calls_return() -> None:
    code = """s_mov_b32 s30, 1
        s_getpc_b64 s[40:41]
        s_add_u32 s40, s40, 12
        s_addc_u32 s41, s41, 0
        s_branch .Lcall
        s_add_u32 s30, s30, 41
        s_setpc_b64 s[42:43]
    .Lcall:
        s_swappc_b64 s[42:43], s[40:41]
        v_mov_b32 v128, s30"""
    x = np.zeros((1, 64), "<u4")
    assert (probe(code, [x], 1) == 42).all()  # 12 bytes from the end of s_getpc to the function


def test_the_clock_runs_and_s_sleep_lets_others_go_first() -> None:
    result = np.zeros(64, "<u4")
    body = """s_load_dwordx4 s[4:7], s[0:1], 0x0
        s_memrealtime s[20:21]
        s_waitcnt lgkmcnt(0)
        s_movk_i32 s22, 200
    .Lloop:
        s_sleep 100
        s_sub_u32 s22, s22, 1
        s_cmp_lg_u32 s22, 0
        s_cbranch_scc1 .Lloop
        s_memrealtime s[24:25]
        s_waitcnt lgkmcnt(0)
        s_sub_u32 s26, s24, s20
        v_mov_b32 v1, s26
        v_lshlrev_b32 v2, 2, v0
        global_store_dword v2, v1, s[6:7]
        s_endpgm"""
    Emulator(Memory(result)).launch(assemble(body), "k", 1, 64, [result, result])
    assert result[0] >= 200 * 100 * 64 // 21 // 2  # s_sleep counts 64 cycles a unit; the counter runs at 100 MHz
