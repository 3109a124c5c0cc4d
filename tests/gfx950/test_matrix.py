"""Every MFMA form against a matrix product in numpy. Small integers make the results exact, so layout errors cannot
hide in a tolerance."""

from __future__ import annotations

import re

import numpy as np
import pytest
import small_floats as small
from assembly import probe

LANES = 64


def lane_k(m: int, k: int, blocks: int, split: bool) -> np.ndarray:
    """[lane, element] -> (block, row, k): which element of its operand a lane's j-th value is."""
    groups = LANES // m // blocks
    run = k // groups
    out = np.zeros((LANES, run, 3), int)
    for lane in range(LANES):
        block, rest = divmod(lane, m * groups)
        group, row = divmod(rest, m)
        for j in range(run):
            kk = (j // 16) * (k // 2) + 16 * group + j % 16 if split and run == 32 else group * run + j
            out[lane, j] = block, row, kk
    return out


def result_place(m: int, blocks: int) -> np.ndarray:
    """[register, lane] -> (block, row, column) of the result."""
    count = m * m * blocks // LANES
    out = np.zeros((count, LANES, 3), int)
    for v in range(count):
        for lane in range(LANES):
            if m == 4:
                out[v, lane] = lane // 4, v, lane % 4
            else:
                per = m * m // LANES
                block, q = divmod(v, per)
                row = 4 * (lane // 16) + q if m == 16 else 8 * (q // 4) + 4 * (lane // 32) + q % 4
                out[v, lane] = block, row, lane % m
    return out


def pack(codes: np.ndarray, bits: int) -> list[np.ndarray]:
    """[lane, element] codes -> registers."""
    words = -(-codes.shape[1] * bits // 32)
    out = np.zeros((words, LANES), object)
    for j in range(codes.shape[1]):
        word, at = divmod(j * bits, 32)
        for lane in range(LANES):
            value = int(codes[lane, j]) << at
            out[word, lane] |= value & 0xFFFFFFFF
            if value >> 32:
                out[word + 1, lane] |= value >> 32
    return [w.astype("<u4").reshape(1, LANES) for w in out]


def encode(kind: str, x: np.ndarray) -> tuple[np.ndarray, int]:
    if kind == "f32":
        return x.astype("<f4").view("<u4"), 32
    if kind == "f16":
        return x.astype("<f2").view("<u2"), 16
    if kind == "bf16":
        return x.astype("<f4").view("<u4") >> 16, 16
    if kind == "i8":
        return x.astype("i1").view("u1"), 8
    return small.encode(kind, x, True), small.width(kind)


def choose(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values that the format holds exactly and whose products sum exactly."""
    if kind == "i8":
        return rng.integers(-128, 128, shape).astype(float)
    return rng.choice([-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0], shape)


def operands(kind: str, m: int, k: int, blocks: int, seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    x = choose(kind, (blocks, m, k), np.random.default_rng(seed))
    place = lane_k(m, k, blocks, kind in ("fp8", "bf8"))
    codes, bits = encode(kind, x[place[..., 0], place[..., 1], place[..., 2]])
    return x, pack(codes, bits)


def run(
    code: str, a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray], extra: list[np.ndarray] | None = None
) -> np.ndarray:
    inputs = a + [a[0]] * (8 - len(a)) + b + [b[0]] * (8 - len(b)) + c + (extra or [])
    return probe(code, inputs, len(c), first_in=32, first_out=128)[:, 0]


FORMS = [
    "f32_32x32x1_2b_f32", "f32_16x16x1_4b_f32", "f32_4x4x1_16b_f32", "f32_32x32x2_f32", "f32_16x16x4_f32",
    "f32_32x32x4_2b_f16", "f32_16x16x4_4b_f16", "f32_4x4x4_16b_f16", "f32_32x32x8_f16", "f32_16x16x16_f16",
    "f32_16x16x32_f16", "f32_32x32x16_f16", "f32_32x32x4_2b_bf16", "f32_16x16x4_4b_bf16", "f32_4x4x4_16b_bf16",
    "f32_32x32x8_bf16", "f32_16x16x16_bf16", "f32_16x16x32_bf16", "f32_32x32x16_bf16", "f32_16x16x32_fp8_fp8",
    "f32_16x16x32_fp8_bf8", "f32_16x16x32_bf8_fp8", "f32_16x16x32_bf8_bf8", "f32_32x32x16_fp8_fp8",
    "f32_32x32x16_fp8_bf8", "f32_32x32x16_bf8_fp8", "f32_32x32x16_bf8_bf8", "i32_32x32x4_2b_i8", "i32_16x16x4_4b_i8",
    "i32_4x4x4_16b_i8", "i32_32x32x16_i8", "i32_16x16x32_i8", "i32_16x16x64_i8", "i32_32x32x32_i8",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str) -> None:
    match = re.fullmatch(r"(f32|i32)_(\d+)x\d+x(\d+)(?:_(\d+)b)?_(\w+)", form)
    assert match
    m, k, blocks = int(match[2]), int(match[3]), int(match[4] or 1)
    kinds = match[5].split("_")
    a, ra = operands(kinds[0], m, k, blocks, 1)
    b, rb = operands(kinds[-1], m, k, blocks, 2)
    count = m * m * blocks // LANES
    place = result_place(m, blocks)
    c = np.random.default_rng(3).integers(-9, 9, (blocks, m, m)).astype(float)
    spread = c[place[..., 0], place[..., 1], place[..., 2]]
    rc = [(s.astype("<i4") if match[1] == "i32" else s.astype("<f4")).view("<u4").reshape(1, LANES) for s in spread]
    last = lambda first, n: f"v[{first}:{first + n - 1}]" if n > 1 else f"v{first}"  # noqa: E731
    code = f"v_mfma_{form} {last(128, count)}, {last(32, len(ra))}, {last(40, len(rb))}, {last(48, count)}"
    got = run(code, ra, rb, rc)
    want = (a @ b.transpose(0, 2, 1) + c)[place[..., 0], place[..., 1], place[..., 2]]
    np.testing.assert_array_equal(got.view("<i4" if match[1] == "i32" else "<f4"), want)


KINDS = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4}


@pytest.mark.parametrize("shape", [(16, 128), (32, 64)])
@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS], ids="-".join)
def test_f8f6f4_with_and_without_scales(kinds: tuple[str, str], shape: tuple[int, int]) -> None:
    m, k = shape
    a, ra = operands(kinds[0], m, k, 1, 4)
    b, rb = operands(kinds[1], m, k, 1, 5)
    place = result_place(m, 1)
    count = m * m // LANES
    rng = np.random.default_rng(6)
    c = rng.integers(-9, 9, (m, m)).astype(float)
    rc = [s.astype("<f4").view("<u4").reshape(1, LANES) for s in c[place[..., 1], place[..., 2]]]
    ea, eb = (rng.integers(124, 131, (m, k // 32)) for _ in range(2))
    # A lane holds the scale of its row and of the slice of K with its group's number, in the byte that op_sel names.
    words = [
        np.array(
            [int(e[lane % m, lane // m]) << (8 * byte) | 0x55 << (8 * (byte ^ 1)) for lane in range(LANES)], "<u4"
        ).reshape(1, LANES)
        for e, byte in ((ea, 2), (eb, 1))
    ]
    regs = lambda first, n: f"v[{first}:{first + n - 1}]"  # noqa: E731
    forms = f"cbsz:{KINDS[kinds[0]]} blgp:{KINDS[kinds[1]]}"
    args = f"{regs(128, count)}, {regs(32, len(ra))}, {regs(40, len(rb))}, {regs(48, count)}"
    scales = f"v{48 + count}, v{49 + count}"
    plain = run(f"v_mfma_f32_{m}x{m}x{k}_f8f6f4 {args} {forms}", ra, rb, rc, words)
    where = (place[0, ..., 0] * 0 + place[..., 1], place[..., 2])
    np.testing.assert_array_equal(plain.view("<f4"), (a[0] @ b[0].T + c)[where])
    got = run(
        f"v_mfma_scale_f32_{m}x{m}x{k}_f8f6f4 {args}, {scales} op_sel:[0,1,0] op_sel_hi:[1,0,0] {forms}",
        ra,
        rb,
        rc,
        words,
    )
    factor = lambda e: np.repeat(2.0 ** (e.astype(float) - 127), 32, 1)  # noqa: E731
    np.testing.assert_array_equal(got.view("<f4"), ((a[0] * factor(ea)) @ (b[0] * factor(eb)).T + c)[where])


def test_a_scale_of_255_is_nan() -> None:
    m, k = 16, 128
    _, ra = operands("fp4", m, k, 1, 1)
    _, rb = operands("fp4", m, k, 1, 2)
    scale = np.full((1, LANES), 127, "<u4")
    scale[0, 3] = 255  # row 3, the first 32 of K
    ones = np.full((1, LANES), 127, "<u4")
    zero = [np.zeros((1, LANES), "<u4")] * 4
    got = run(
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[128:131], v[32:35], v[40:43], v[48:51], v52, v53 "
        "op_sel_hi:[0,0,0] cbsz:4 blgp:4",
        ra,
        rb,
        zero,
        [scale, ones],
    ).view("<f4")
    place = result_place(m, 1)
    np.testing.assert_array_equal(np.isnan(got), place[..., 1] == 3)


def test_accumulation_registers_and_inline_constants() -> None:
    a, ra = operands("bf16", 16, 32, 1, 1)
    b, rb = operands("bf16", 16, 32, 1, 2)
    move = "\n".join(f"v_accvgpr_write_b32 a{k}, v{32 + k}\nv_accvgpr_write_b32 a{4 + k}, v{40 + k}" for k in range(4))
    back = "\n".join(f"v_accvgpr_read_b32 v{128 + k}, a{8 + k}" for k in range(4))
    got = run(f"{move}\nv_mfma_f32_16x16x32_bf16 a[8:11], a[0:3], a[4:7], 1.0\n{back}", ra, rb, [ra[0]] * 4)
    place = result_place(16, 1)
    np.testing.assert_array_equal(got.view("<f4"), (a[0] @ b[0].T + 1)[place[..., 1], place[..., 2]])


def test_doubles() -> None:
    rng = np.random.default_rng(8)
    a, b, c = (
        rng.integers(-99, 99, (16, 4)).astype("<f8"),
        rng.integers(-99, 99, (16, 4)).astype("<f8"),
        rng.integers(-9, 9, (16, 16)).astype("<f8"),
    )
    lanes = np.arange(64)
    halves = lambda d: [d.view("<u8").astype("<u4").reshape(1, 64), (d.view("<u8") >> 32).astype("<u4").reshape(1, 64)]  # noqa: E731
    ra, rb = (
        halves(np.ascontiguousarray(a[lanes % 16, lanes // 16])),
        halves(np.ascontiguousarray(b[lanes % 16, lanes // 16])),
    )
    rc = [w for v in range(4) for w in halves(np.ascontiguousarray(c[4 * v + lanes // 16, lanes % 16]))]
    got = run("v_mfma_f64_16x16x4_f64 v[128:135], v[32:33], v[40:41], v[48:55]", ra, rb, rc)
    for v in range(4):
        value = (got[2 * v].astype("<u8") | got[2 * v + 1].astype("<u8") << 32).view("<f8")
        np.testing.assert_array_equal(value, (a @ b.T + c)[4 * v + lanes // 16, lanes % 16])
