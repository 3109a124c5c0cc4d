"""Scalar, global, flat and buffer memory: widths, offsets, bounds, atomics, loads into LDS."""

from __future__ import annotations

import numpy as np
import pytest
from assembly import assemble
from edges import integers

from tools.gfx950 import Emulator, ExecutionError, Memory

HEAD = """s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_lshlrev_b32 v2, 3, v0
    v_lshlrev_b32 v3, 4, v0
    s_waitcnt lgkmcnt(0)
"""
RESOURCE = "s_and_b32 s13, s5, 0xffff\ns_mov_b32 s12, s4\ns_mov_b32 s14, {records}\ns_mov_b32 s15, 0x27000\n"


def run(body: str, source: np.ndarray, result: np.ndarray, lds: int = 0, **options: object) -> np.ndarray:
    memory = Memory(source=source, result=result)
    Emulator(memory, **options).launch(assemble(HEAD + body + "\ns_endpgm", lds=lds), "k", 1, 64, [source, result])  # type: ignore[arg-type]
    return result


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype="<u4")


@pytest.mark.parametrize("model", ["flat", "weak"])
@pytest.mark.parametrize(("n", "shift"), [(1, 1), (2, 2), (4, 3)])
def test_global_widths(n: int, shift: int, model: str) -> None:
    source = words(64 * n + 4)
    regs = f"v[10:{9 + n}]" if n > 1 else "v10"
    suffix = f"x{n}" if n > 1 else ""
    code = f"""global_load_dword{suffix} {regs}, v{shift}, s[4:5] offset:16
        s_waitcnt vmcnt(0)
        v_mov_b32 v4, s6
        v_mov_b32 v5, s7
        v_add_co_u32 v4, vcc, v4, v{shift}
        v_addc_co_u32 v5, vcc, 0, v5, vcc
        global_store_dword{suffix} v[4:5], {regs}, off offset:-8"""
    result = np.zeros(64 * n + 2, "<u4")
    shifted = result[2:]  # the store's offset of -8 bytes starts in front of what the kernel is given
    memory = Memory(source=source, result=result)
    Emulator(memory, model=model, seed=1).launch(assemble(HEAD + code + "\ns_endpgm"), "k", 1, 64, [source, shifted])  # type: ignore[arg-type]
    np.testing.assert_array_equal(result[: 64 * n], source[4:])


@pytest.mark.parametrize("model", ["flat", "weak"])
@pytest.mark.parametrize("lanes", [(1 << 64) - 1, 0x8000_F00F_0000_00FF], ids=hex)
@pytest.mark.parametrize("flip", [0, 63, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_lanes_in_order_and_out_of_order(n: int, flip: int, lanes: int, model: str) -> None:
    """Pieces of n dwords that lie behind each other in memory, in the order of the lanes or not; all lanes or some."""
    source = words(64 * n)
    regs = f"v[10:{9 + n}]" if n > 1 else "v10"
    suffix = f"x{n}" if n > 1 else ""
    code = f"""v_xor_b32 v4, {flip}, v0
        v_mul_u32_u24 v4, {4 * n}, v4
        v_mul_u32_u24 v5, {4 * n}, v0
        s_mov_b32 exec_lo, {lanes & 0xFFFFFFFF:#x}
        s_mov_b32 exec_hi, {lanes >> 32:#x}
        global_load_dword{suffix} {regs}, v4, s[4:5]
        s_waitcnt vmcnt(0)
        global_store_dword{suffix} v5, {regs}, s[6:7]
        global_store_dword{suffix} v4, {regs}, s[6:7] offset:{256 * n}"""
    straight, back = run(code, source, np.zeros(128 * n, "<u4"), model=model, seed=1).reshape(2, 64, n)
    active = np.array([lanes >> lane & 1 for lane in range(64)], bool)
    order = np.arange(64) ^ flip
    pieces = source.reshape(64, n)
    np.testing.assert_array_equal(straight, np.where(active[:, None], pieces[order], 0))
    np.testing.assert_array_equal(back, np.where(active[order][:, None], pieces, 0))


@pytest.mark.parametrize("model", ["flat", "weak"])
def test_more_operations_than_a_counter_holds(model: str) -> None:
    source = words(64)
    loads = "\n".join(f"s_load_dword s{20 + k}, s[4:5], {4 * (k % 64)}" for k in range(70))
    code = loads + "\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v10, s89\nglobal_store_dword v1, v10, s[6:7]"
    assert (run(code, source, np.zeros(64, "<u4"), model=model, seed=1) == source[5]).all()
    loads = "\n".join(f"s_load_dword s{20 + k}, s[4:5], {4 * k}" for k in range(14))
    writes = "\n".join(f"ds_write_b32 v1, v{10 + k % 2} offset:{256 * (k % 2)}" for k in range(100))
    code = f"v_mov_b32 v10, v0\nv_not_b32 v11, v0\n{loads}\n{writes}\ns_dcache_wb\ns_waitcnt lgkmcnt(0)\n"
    code += "ds_read_b32 v12, v1 offset:256\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v12, s[6:7]"
    want = ~np.arange(64, dtype="<u4")
    np.testing.assert_array_equal(run(code, source, np.zeros(64, "<u4"), lds=512, model=model, seed=1), want)
    code = "s_dcache_wb\n" * 70 + "s_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v0, s[6:7]"
    np.testing.assert_array_equal(run(code, source, np.zeros(64, "<u4"), model=model, seed=1), np.arange(64))


def test_a_flat_atomic_on_lds_is_refused() -> None:
    code = """s_mov_b64 s[20:21], src_shared_base
        v_mov_b32 v6, v1
        v_mov_b32 v7, s21
        flat_atomic_add v[6:7], v0"""
    with pytest.raises(ExecutionError, match="a flat atomic on LDS"):
        run(code, words(64), np.zeros(64, "<u4"), lds=256)


def test_small_loads_and_stores() -> None:
    source = words(64)
    code = """global_load_ubyte v10, v1, s[4:5] offset:1
        global_load_sbyte v11, v1, s[4:5] offset:2
        global_load_ushort v12, v1, s[4:5]
        global_load_sshort v13, v1, s[4:5] offset:2
        v_mov_b32 v14, -1
        v_mov_b32 v15, 0
        s_nop 0
        global_load_short_d16 v14, v1, s[4:5]
        global_load_ubyte_d16_hi v15, v1, s[4:5] offset:3
        s_waitcnt vmcnt(0)"""
    for k in range(6):
        code += f"\nglobal_store_dword v1, v{10 + k}, s[6:7] offset:{256 * k}"
    code += """
        global_store_byte v1, v10, s[6:7] offset:1536
        global_store_byte_d16_hi v1, v12, s[6:7] offset:1537
        global_store_short_d16_hi v1, v14, s[6:7] offset:1538"""
    got = run(code, source, np.zeros(64 * 7, "<u4")).reshape(7, 64)
    byte = lambda k: source >> (8 * k) & 255  # noqa: E731
    np.testing.assert_array_equal(got[0], byte(1))
    np.testing.assert_array_equal(got[1], (byte(2) ^ 0x80) - np.uint32(0x80))
    np.testing.assert_array_equal(got[2], source & 0xFFFF)
    np.testing.assert_array_equal(got[3], ((source >> 16) ^ 0x8000) - np.uint32(0x8000))
    np.testing.assert_array_equal(got[4], (source & 0xFFFF) | 0xFFFF0000)
    np.testing.assert_array_equal(got[5], byte(3) << 16)
    np.testing.assert_array_equal(got[6], byte(1) | 0xFFFF0000)


def test_flat_reaches_memory_and_lds() -> None:
    source = words(64)
    code = """v_mov_b32 v4, s4
        v_mov_b32 v5, s5
        v_add_co_u32 v4, vcc, v4, v1
        v_addc_co_u32 v5, vcc, 0, v5, vcc
        flat_load_dword v10, v[4:5]
        s_mov_b64 s[20:21], src_shared_base
        v_mov_b32 v6, v1
        v_mov_b32 v7, s21
        s_waitcnt vmcnt(0) lgkmcnt(0)
        flat_store_dword v[6:7], v10
        s_waitcnt vmcnt(0) lgkmcnt(0)
        v_xor_b32 v8, 0xfc, v1
        ds_read_b32 v11, v8
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v11, s[6:7]"""
    np.testing.assert_array_equal(run(code, source, np.zeros(64, "<u4"), lds=256), source[::-1])


def test_scalar_loads() -> None:
    source = words(64)
    code = """s_load_dwordx8 s[16:23], s[4:5], 0x20
        s_mov_b32 s30, 0x10
        s_load_dwordx2 s[24:25], s[4:5], s30
        s_and_b32 s13, s5, 0xffff
        s_mov_b32 s12, s4
        s_mov_b32 s14, 72
        s_mov_b32 s15, 0x27000
        s_buffer_load_dwordx4 s[40:43], s[12:15], 0x40
        s_waitcnt lgkmcnt(0)"""
    for k, r in enumerate([*range(16, 24), 24, 25, 40, 41, 42, 43]):
        code += f"\nv_writelane_b32 v10, s{r}, {k}"
    got = run(code + "\nglobal_store_dword v1, v10, s[6:7]", source, np.zeros(64, "<u4"))
    np.testing.assert_array_equal(got[:14], [*source[8:16], *source[4:6], source[16], source[17], 0, 0])


@pytest.mark.parametrize("model", ["flat", "weak"])
def test_buffer_bounds_are_checked_dword_by_dword(model: str) -> None:
    source = words(256)
    code = (
        RESOURCE.format(records=64 * 16 - 24)
        + """
        buffer_load_dwordx4 v[10:13], v3, s[12:15], 0 offen
        s_mov_b32 s20, 16
        buffer_load_dword v14, v1, s[12:15], s20 offen offset:4
        s_waitcnt vmcnt(0)
        global_store_dwordx4 v3, v[10:13], s[6:7]
        global_store_dword v1, v14, s[6:7] offset:1024"""
    )
    got = run(code, source, np.zeros(320, "<u4"), model=model, seed=1)
    np.testing.assert_array_equal(got[:250], source[:250])
    np.testing.assert_array_equal(got[250:256], 0)
    np.testing.assert_array_equal(got[256:], source[5:69])


def test_buffer_stores_outside_are_dropped_and_structures_are_bounded_in_records() -> None:
    source = words(64)
    code = """s_and_b32 s13, s7, 0xffff
        s_or_b32 s13, s13, 0x80000
        s_mov_b32 s12, s6
        s_mov_b32 s14, 40
        s_mov_b32 s15, 0x27000
        global_load_dword v10, v1, s[4:5]
        s_waitcnt vmcnt(0)
        buffer_store_dword v10, v0, s[12:15], 0 idxen offset:4"""
    got = run(code, source, np.zeros(128, "<u4")).reshape(64, 2)
    np.testing.assert_array_equal(got[:40, 1], source[:40])
    assert not got[:, 0].any()
    assert not got[40:].any()


@pytest.mark.parametrize("model", ["flat", "weak"])
@pytest.mark.parametrize(
    "instruction",
    [
        "buffer_load_dword v1, s[12:15], 0 offen lds",
        "buffer_load_dwordx4 v3, s[12:15], 0 offen lds",
        "global_load_lds_dword v1, s[4:5]",
        "global_load_lds_dwordx4 v3, s[4:5]",
    ],
)
def test_loads_into_lds(instruction: str, model: str) -> None:
    source = words(256)
    n = 4 if "x4" in instruction else 1
    code = (
        RESOURCE.format(records=1024)
        + f"""
        s_mov_b32 m0, 64
        {instruction}
        s_waitcnt vmcnt(0)
        v_xor_b32 v5, 0xfc, v1
        ds_read_b32 v10, v5 offset:64
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v10, s[6:7]"""
    )
    got = run(code, source, np.zeros(64, "<u4"), lds=2048, model=model, seed=2)
    assert n in (1, 4)
    np.testing.assert_array_equal(got, source[:64][::-1])


ATOMICS = {
    "add": lambda m, x: m + x,
    "sub": lambda m, x: m - x,
    "smin": lambda m, x: np.minimum(m.view("<i4"), x.view("<i4")).view("<u4"),
    "umax": np.maximum,
    "smax": lambda m, x: np.maximum(m.view("<i4"), x.view("<i4")).view("<u4"),
    "umin": np.minimum,
    "and": lambda m, x: m & x,
    "or": lambda m, x: m | x,
    "xor": lambda m, x: m ^ x,
    "swap": lambda m, x: x,
    "inc": lambda m, x: np.where(m >= x, 0, m + 1).astype("<u4"),
    "dec": lambda m, x: np.where((m == 0) | (m > x), x, m - 1).astype("<u4"),
}


@pytest.mark.parametrize("model", ["flat", "weak"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name: str, model: str) -> None:
    m, x = (v[:1].ravel().copy() for v in integers(2, random_rows=0))
    m, x = np.roll(m, 7), words(64, 9) if name != "inc" else m.copy()
    code = f"""global_load_dword v10, v1, s[4:5]
        s_waitcnt vmcnt(0)
        global_atomic_{name} v11, v1, v10, s[6:7] sc0
        s_waitcnt vmcnt(0)
        global_store_dword v1, v11, s[6:7] offset:256"""
    result = np.concatenate([m, np.zeros(64, "<u4")])
    got = run(code, x, result, model=model, seed=3)
    np.testing.assert_array_equal(got[64:], m)
    np.testing.assert_array_equal(got[:64], ATOMICS[name](m, x))


def test_float_and_compare_atomics() -> None:
    source = np.arange(64, dtype="<f4").view("<u4")
    code = (
        RESOURCE.replace("s5", "s7").replace("s4", "s6").format(records=1024)
        + """
        global_load_dword v10, v1, s[4:5]
        v_mov_b32 v4, 0
        s_waitcnt vmcnt(0)
        global_atomic_add_f32 v4, v10, s[6:7]
        buffer_atomic_add_f32 v10, v4, s[12:15], 0 offen offset:4
        v_mov_b32 v11, 0x3f804000
        global_atomic_pk_add_bf16 v4, v11, s[6:7] offset:8
        v_mov_b32 v12, v0
        v_mov_b32 v13, 0
        global_atomic_cmpswap v14, v4, v[12:13], s[6:7] offset:12 sc0
        v_mov_b32 v16, 0
        v_mov_b32 v17, 1
        global_atomic_add_x2 v4, v[16:17], s[6:7] offset:16
        s_waitcnt vmcnt(0)"""
    )
    got = run(code, source, np.zeros(8, "<u4"))
    assert got[0] == got[1] == np.float32(2016).view("<u4")
    assert got[2] == 0x4280_4300 or got[2] == 0x42804300  # 64 times (2, 1) in bfloat: low half 2, high half 1
    assert got[3] == 1  # only the first lane with a value other than 0 finds 0 there
    assert list(got[4:6]) == [0, 64]


@pytest.mark.parametrize(
    ("code", "kind", "words_in_message"),
    [
        (
            "v_mov_b32 v10, 0\nglobal_store_dword v1, v10, s[6:7] offset:4",
            "out of bounds",
            ["lane 63", "past the end of result", "global_store_dword"],
        ),
        ("global_load_dword v10, v1, s[4:5] offset:-4", "out of bounds", ["lane 0", "before source"]),
        ("v_mov_b32 v9, 1\nglobal_atomic_add v9, v0, s[6:7]", "misaligned", ["atomic", "global_atomic_add"]),
        ("ds_read_b32 v10, v1 offset:1000", "out of bounds", ["LDS load", "ds_read_b32"]),
        ("s_trap 2", "trap", ["aborted"]),
    ],
)
def test_faults_say_where(code: str, kind: str, words_in_message: list[str]) -> None:
    with pytest.raises(ExecutionError) as stop:
        run(code, words(64), np.zeros(64, "<u4"), lds=1024)
    assert stop.value.kind == kind
    for part in words_in_message:
        assert part in str(stop.value)


def test_a_read_only_region_refuses_stores() -> None:
    source, result = words(64), np.zeros(64, "<u4")
    memory = Memory()
    memory.add(source, "source")
    memory.add(result, "result", read_only=True)
    with pytest.raises(ExecutionError, match="out of bounds"):
        Emulator(memory).launch(
            assemble(HEAD + "global_store_dword v1, v1, s[6:7]\ns_endpgm"), "k", 1, 64, [source, result]
        )


def store_to_all_of(whole: np.ndarray, memory: Memory, **options: object) -> list[str]:
    """A kernel reads and writes `whole`, 128 words; returns the kinds of its reports."""
    body = """global_load_dwordx2 v[10:11], v2, s[4:5]
        s_waitcnt vmcnt(0)
        global_store_dword v1, v0, s[4:5]
        global_store_dword v1, v0, s[4:5] offset:256
        s_endpgm"""
    done = Emulator(memory, **options).launch(assemble(HEAD + body), "k", 1, 64, [whole, whole])  # type: ignore[arg-type]
    assert list(whole) == [*range(64), *range(64)]
    return [report.kind for report in done.reports]


@pytest.mark.parametrize("order", ["inside first", "whole first", "halves first"])
def test_registrations_may_overlap(order: str) -> None:
    raw = bytearray(512)
    whole = np.frombuffer(raw, "<u4")
    inside = np.frombuffer(raw, "<u4", 16, 128)
    left, right = np.frombuffer(raw, "<u4", 80), np.frombuffer(raw, "<u4", 80, 192)
    buffers = {"inside first": (inside, whole), "whole first": (whole, inside), "halves first": (left, right)}[order]
    memory = Memory(*buffers)
    assert len(memory.regions) == 1
    region = memory.regions[0]
    assert (region.low, region.high) == (whole.ctypes.data, whole.ctypes.data + 512)
    name = {"inside first": "buffer 1", "whole first": "buffer 0", "halves first": "buffer 0 with buffer 1"}[order]
    assert memory.describe(region.low + 4) == f"{name} + 4 of 512"
    assert store_to_all_of(whole, memory) == []


def test_what_was_registered_as_uninitialised_stays_so() -> None:
    raw = bytearray(512)
    whole, inside = np.frombuffer(raw, "<u4"), np.frombuffer(raw, "<u4", 16, 128)
    memory = Memory()
    memory.add(inside, "inside", uninitialised=True)
    memory.add(whole, "whole")
    assert memory.regions[0].known is not None
    assert list(np.flatnonzero(memory.regions[0].known == 0)) == list(range(128, 192))
    assert store_to_all_of(whole, memory, uninitialised=True) == ["uninitialised memory"]


@pytest.mark.parametrize("how", [{"device": 1}, {"device": 0, "peer": True}, {"device": 0, "read_only": True}])
def test_overlapping_registrations_open_memory_in_one_way(how: dict[str, int]) -> None:
    raw = bytearray(512)
    memory = Memory()
    memory.add(np.frombuffer(raw, "<u4", 16, 128), "inside", device=0)
    before = list(memory.regions)
    with pytest.raises(
        ValueError, match=r"whole overlaps inside: \(device, peer, read_only\) is .*, must be \(0, False"
    ):
        memory.add(np.frombuffer(raw, "<u4"), "whole", **how)  # type: ignore[arg-type]
    assert memory.regions == before
