"""What the weak memory model must show: a missing scope, a missing wait, a missing barrier each become visible, and the
right program stays right under every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from assembly import assemble

from tools.gfx950 import Emulator, ExecutionError, Launch, Memory

SEEDS = range(1, 9)

# Workgroup 0 writes 64 words and raises a flag; workgroup 1 (another XCD) waits for the flag and copies the words.
# s[4:5] data, s[6:7] flag, s[8:9] result.
HANDOFF = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[0:1], 0x10
    v_lshlrev_b32 v1, 2, v0
    v_mov_b32 v2, 0
    s_waitcnt lgkmcnt(0)
    s_cmp_lg_u32 s2, 0
    s_cbranch_scc1 .Lconsumer
    v_add_u32 v3, 1000, v0
    global_store_dword v1, v3, s[4:5] {store}
    {wait}
    v_mov_b32 v4, 1
    global_store_dword v2, v4, s[6:7] {flag}
    {after}
    s_endpgm
.Lconsumer:
    {before}
.Lpoll:
    global_load_dword v5, v2, s[6:7] {poll}
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s12, v5
    s_cmp_eq_u32 s12, 0
    s_cbranch_scc1 .Lpoll
    {acquire}
    global_load_dword v6, v1, s[4:5] {load}
    s_waitcnt vmcnt(0)
    global_store_dword v1, v6, s[8:9]
    s_endpgm
"""
RIGHT = {
    "store": "sc1",
    "wait": "s_waitcnt vmcnt(0)",
    "flag": "sc1",
    "after": "",
    "before": "",
    "poll": "sc1",
    "acquire": "",
    "load": "sc1",
}

LINGER = """s_movk_i32 s20, 0x800
.Llinger:
    s_sleep 1
    s_sub_u32 s20, s20, 1
    s_cmp_lg_u32 s20, 0
    s_cbranch_scc1 .Llinger"""


def handoff(seed: int, model: str = "weak", template: str = HANDOFF, **changes: str) -> np.ndarray:
    """The words that the consumer copied."""
    parts = RIGHT | changes  # `LINGER` keeps the writer alive: the end of its kernel would write everything back
    data, flag, result = np.zeros(64, "<u4"), np.zeros(32, "<u4"), np.zeros(64, "<u4")
    memory = Memory()
    for name, array in (("data", data), ("flag", flag), ("result", result)):
        memory.add(array, name)
    emulator = Emulator(memory, model=model, seed=seed, quantum=6, deadlock_after=50_000)
    code = assemble(template.format(**parts), arguments=3)
    emulator.launch(code, "k", 2, 64, [data, flag, result])
    return result


WANT = np.arange(1000, 1064)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_handoff_is_right_under_every_schedule(seed: int) -> None:
    np.testing.assert_array_equal(handoff(seed), WANT)


def test_release_and_acquire_fences_serve_instead_of_scopes() -> None:
    fences = {"store": "", "wait": "buffer_wbl2 sc1\ns_waitcnt vmcnt(0)", "load": "", "acquire": "buffer_inv sc1"}
    for seed in SEEDS:
        np.testing.assert_array_equal(handoff(seed, **fences), WANT)
        assert not np.array_equal(handoff(seed, **(fences | {"wait": "s_waitcnt vmcnt(0)"})), WANT)  # no write-back


def test_a_data_store_without_scope_is_not_seen() -> None:
    wrong = [seed for seed in SEEDS if not np.array_equal(handoff(seed, store=""), WANT)]
    assert wrong == list(SEEDS)
    np.testing.assert_array_equal(handoff(1, "flat", store=""), WANT)  # the flat model hides it


def test_a_stale_copy_in_the_readers_cache_is_returned_to_a_plain_load() -> None:
    early = "global_load_dword v7, v1, s[4:5]\ns_waitcnt vmcnt(0)"  # brings the old words into the reader's L2
    got = [handoff(seed, before=early, load="") for seed in range(1, 33)]
    assert any((g == 0).all() for g in got)
    for seed in SEEDS:
        np.testing.assert_array_equal(handoff(seed, before=early), WANT)


def test_a_missing_wait_before_the_flag_is_found_by_some_schedule() -> None:
    wrong = [seed for seed in range(1, 33) if not np.array_equal(handoff(seed, wait=""), WANT)]
    assert wrong
    assert all(np.array_equal(handoff(seed, "flat", wait=""), WANT) for seed in SEEDS)


def test_a_missing_wait_behind_a_write_back_or_an_atomic_is_found_by_some_schedule() -> None:
    fences = {"store": "", "wait": "buffer_wbl2 sc1", "load": "", "acquire": "buffer_inv sc1"}
    assert not all(np.array_equal(handoff(seed, **fences), WANT) for seed in range(1, 33))
    template = HANDOFF.replace("global_store_dword v1, v3, s[4:5] {store}", "global_atomic_swap v1, v3, s[4:5]")
    for wait, right in (("s_waitcnt vmcnt(0)", True), ("", False)):
        got = [handoff(seed, template=template, wait=wait) for seed in range(1, 33)]
        assert all(np.array_equal(g, WANT) for g in got) == right


RESULTS = {
    "loads": ("global_load_dword v9, v1, s[4:5] offset:1024", 256),
    "an atomic": ("global_atomic_add v9, v1, v2, s[4:5] offset:1024 sc0", 256),
    "a half": ("global_load_short_d16_hi v9, v1, s[4:5] offset:1024", 256 << 16 | 5),
}


@pytest.mark.parametrize("second", RESULTS)
def test_results_in_one_register_return_in_order(second: str) -> None:
    instruction, want = RESULTS[second]
    body = f"""s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        v_mov_b32 v2, 1
        s_waitcnt lgkmcnt(0)
        global_load_dword v9, v1, s[4:5]
        {instruction}
        s_waitcnt vmcnt(0)
        global_store_dword v1, v9, s[6:7]
        s_endpgm"""
    for seed in range(1, 41):
        data, result = np.full(320, 5, "<u4"), np.zeros(64, "<u4")
        data[256:] = 256
        memory = Memory(data, result)
        Emulator(memory, model="weak", seed=seed, quantum=1).launch(assemble(body), "k", 1, 64, [data, result])
        assert (result == want).all(), seed


def test_loads_into_the_same_bytes_of_lds_keep_their_order() -> None:
    body = """s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        v_add_u32 v2, 0x100, v1
        s_mov_b32 m0, 0
        s_waitcnt lgkmcnt(0)
        global_load_lds_dword v1, s[4:5]
        global_load_lds_dword v2, s[4:5]
        s_waitcnt vmcnt(0)
        ds_read_b32 v9, v1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v9, s[6:7]
        s_endpgm"""
    data = np.repeat(np.arange(2, dtype="<u4"), 64)
    code = assemble(body, lds=256)
    for seed in range(1, 41):
        result = np.zeros(64, "<u4")
        Emulator(Memory(data, result), model="weak", seed=seed, quantum=1).launch(code, "k", 1, 64, [data, result])
        assert (result == 1).all(), seed


def test_a_fault_of_a_delayed_operation_names_its_instruction() -> None:
    body = """s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v0, s[4:5]
        v_mov_b32 v2, 1
        v_mov_b32 v3, 1
        s_waitcnt vmcnt(0)
        s_endpgm"""
    x, small = np.zeros(64, "<u4"), np.zeros(8, "<u4")
    for seed in range(1, 9):
        with pytest.raises(ExecutionError, match="out of bounds") as stop:
            Emulator(Memory(x, small), model="weak", seed=seed, quantum=1).launch(
                assemble(body), "k", 1, 64, [small, x]
            )
        assert stop.value.pc == 0x10


def test_a_flag_without_scope_ends_in_a_report_that_names_the_store() -> None:
    with pytest.raises(ExecutionError) as stop:
        handoff(1, flag="")
    assert stop.value.kind == "deadlock"
    assert "workgroup 1 wave 0: running" in str(stop.value)
    assert "flag + 0" in str(stop.value)
    assert "still in the L2 of device 0 XCD 0: it lacks sc1" in str(stop.value)


def test_a_poll_without_scope_keeps_its_old_copy() -> None:
    late = (
        "s_movk_i32 s20, 0x80\n.Llate:\ns_sleep 1\ns_sub_u32 s20, s20, 1\ns_cmp_lg_u32 s20, 0\ns_cbranch_scc1 .Llate\n"
    )
    with pytest.raises(ExecutionError, match="holds an old copy: a reader there needs sc1"):
        handoff(1, poll="", wait=late + "s_waitcnt vmcnt(0)")


def test_use_before_wait_is_reported_with_the_register() -> None:
    code = """s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        global_load_dword v3, v1, s[4:5]
        global_load_dword v4, v1, s[4:5] offset:256
        s_waitcnt vmcnt(1)
        v_add_u32 v5, v3, v3
        v_add_u32 v6, v4, v5
        s_endpgm"""
    x = np.zeros(128, "<u4")
    with pytest.raises(ExecutionError, match="v4 is used before a wait covers the load") as stop:
        Emulator(Memory(x)).launch(assemble(code), "k", 1, 64, [x, x])
    assert stop.value.kind == "missing wait"
    early = code.replace("s_waitcnt lgkmcnt(0)\n", "\n")
    with pytest.raises(ExecutionError, match="a scalar register is used before a wait"):
        Emulator(Memory(x)).launch(assemble(early), "k", 1, 64, [x, x])


@pytest.mark.parametrize(
    "code",
    [
        "s_load_dword s8, s[4:5], 0x10\ns_load_dword s9, s[4:5], s8",
        "s_load_dword s8, s[4:5], 0x10\ns_buffer_load_dword s9, s[12:15], s8",
        "s_load_dwordx2 vcc, s[4:5], 0x10\ns_cbranch_vccz over\nover:",
        "s_load_dwordx2 vcc, s[4:5], 0x10\ns_cbranch_vccnz over\nover:",
        "s_load_dwordx2 vcc, s[4:5], 0x10\ns_mov_b32 s9, src_vccz",
    ],
)
def test_offsets_and_branches_wait_for_their_scalars(code: str) -> None:
    head = """s_load_dwordx4 s[4:7], s[0:1], 0x0
        s_mov_b32 s14, 512
        s_mov_b32 s15, 0x27000
        s_waitcnt lgkmcnt(0)
        s_mov_b64 s[12:13], s[4:5]
        """
    x = np.zeros(128, "<u4")
    first, rest = code.split("\n", 1)
    with pytest.raises(ExecutionError, match="a scalar register is used before a wait covers the load"):
        Emulator(Memory(x)).launch(assemble(f"{head}{code}\ns_endpgm"), "k", 1, 64, [x, x])
    waits = f"{head}{first}\ns_waitcnt lgkmcnt(0)\n{rest}\ns_endpgm"
    Emulator(Memory(x)).launch(assemble(waits), "k", 1, 64, [x, x])


# Two waves exchange a word through LDS.
EXCHANGE = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_xor_b32 v2, 0x100, v1
    v_add_u32 v3, 7, v0
    s_waitcnt lgkmcnt(0)
    ds_write_b32 v1, v3
    {wait}
    {barrier}
    ds_read_b32 v4, v2
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v4, s[6:7]
    s_endpgm
"""


def exchange(
    seed: int,
    model: str = "weak",
    wait: str = "s_waitcnt lgkmcnt(0)",
    barrier: str = "s_barrier",
    template: str = EXCHANGE,
) -> bool:
    result = np.zeros(128, "<u4")
    memory = Memory(result)
    code = assemble(template.format(wait=wait, barrier=barrier), lds=1024)
    Emulator(memory, model=model, seed=seed, quantum=4).launch(code, "k", 1, 128, [result, result])
    return bool(np.array_equal(result, (np.arange(128) ^ 64) + 7))


def test_lds_needs_the_wait_and_the_barrier() -> None:
    assert all(exchange(seed) for seed in range(1, 17))
    assert not all(exchange(seed, wait="") for seed in range(1, 33))
    two = EXCHANGE.replace("ds_write_b32 v1, v3", "ds_write2_b32 v1, v3, v3 offset1:128")
    assert all(exchange(seed, template=two) for seed in range(1, 17))
    assert not all(exchange(seed, wait="", template=two) for seed in range(1, 33))
    assert not all(exchange(seed, barrier="") for seed in range(1, 33))


def test_a_load_into_lds_lands_no_later_than_its_wait() -> None:
    body = """s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        s_mov_b32 m0, 0
        s_waitcnt lgkmcnt(0)
        global_load_lds_dword v1, s[4:5]
        {wait}
        ds_read_b32 v4, v1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v4, s[6:7]
        s_endpgm"""
    source = np.arange(64, dtype="<u4") + 5

    def ok(seed: int, wait: str) -> bool:
        result = np.zeros(64, "<u4")
        Emulator(Memory(source, result), model="weak", seed=seed).launch(
            assemble(body.format(wait=wait), lds=256), "k", 1, 64, [source, result]
        )
        return bool(np.array_equal(result, source))

    assert all(ok(seed, "s_waitcnt vmcnt(0)") for seed in SEEDS)
    assert not all(ok(seed, "") for seed in SEEDS)


# ---- several devices ----


@pytest.mark.parametrize("seed", SEEDS)
def test_devices_hand_over_at_system_scope_only(seed: int) -> None:
    """Device 1 reads what device 0 wrote; device scope (sc1) is not enough, system scope (sc0 sc1) is."""
    body = HANDOFF.replace(
        "s_cmp_lg_u32 s2, 0", "s_load_dword s13, s[0:1], 0x18\ns_waitcnt lgkmcnt(0)\ns_cmp_lg_u32 s13, 0"
    )

    def run(**changes: str) -> np.ndarray:
        parts = RIGHT | dict.fromkeys(("store", "flag", "poll", "load"), "sc0 sc1") | {"after": LINGER} | changes
        data, flag, result = np.zeros(64, "<u4"), np.zeros(32, "<u4"), np.zeros(64, "<u4")
        memory = Memory()
        memory.add(data, "data", device=0, peer=True)
        memory.add(flag, "flag", device=0, peer=True)
        memory.add(result, "result", device=1)
        code = assemble(body.format(**parts), arguments=4)
        emulator = Emulator(memory, model="weak", seed=seed, quantum=6, deadlock_after=50_000)
        pointers = [data, flag, result]
        emulator.run([Launch(code, "k", 1, 64, [*pointers, rank], device=rank) for rank in (0, 1)])
        return result

    np.testing.assert_array_equal(run(), WANT)
    assert not np.array_equal(run(store="sc1"), WANT)
    with pytest.raises(ExecutionError, match="stops at device scope on device 0: its reader needs system scope"):
        run(
            flag="sc1",
            after=LINGER.replace("s_sub_u32 s20, s20, 1", "s_load_dword s21, s[0:1], 0x0\ns_waitcnt lgkmcnt(0)"),
        )


def test_a_device_may_not_touch_anothers_private_memory() -> None:
    x = np.zeros(64, "<u4")
    memory = Memory()
    memory.add(x, "x", device=0)
    body = """s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v0, s[4:5]
        s_endpgm"""
    Emulator(memory).run([Launch(assemble(body), "k", 1, 64, [x, x], device=0)])
    assert list(x) == list(range(64))
    with pytest.raises(ExecutionError, match="device 1"):
        Emulator(memory).run([Launch(assemble(body), "k", 1, 64, [x, x], device=1)])


# ---- deadlocks ----


def test_a_barrier_that_not_all_waves_reach() -> None:
    body = """v_readfirstlane_b32 s8, v0
        s_cmp_lg_u32 s8, 0
        s_cbranch_scc1 .Lout
    .Lwait:
        s_load_dword s9, s[0:1], 0x0
        s_waitcnt lgkmcnt(0)
        s_cmp_lg_u32 s9, 0
        s_cbranch_scc1 .Lwait
    .Lout:
        s_barrier
        s_endpgm"""
    x = np.zeros(64, "<u4")
    with pytest.raises(ExecutionError) as stop:
        Emulator(Memory(x), deadlock_after=10_000).launch(assemble(body), "k", 1, 128, [x, x])
    assert stop.value.kind == "deadlock"
    assert "wave 0: running" in str(stop.value)
    assert "wave 1: at a barrier" in str(stop.value)


@pytest.mark.parametrize("apart", [4, 8, 64, 4096])
def test_many_words_that_nobody_will_change(apart: int) -> None:
    polls = "\n".join(f"s_load_dword s{20 + k}, s[0:1], {apart * k}" for k in range(40))
    body = f"s_load_dwordx2 s[0:1], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n.Lpoll:\n{polls}\ns_waitcnt lgkmcnt(0)\n"
    x = np.zeros(40 * 1024, "<u4")
    with pytest.raises(ExecutionError, match="deadlock") as stop:
        Emulator(Memory(x), deadlock_after=10_000, budget=1_000_000).launch(
            assemble(body + "s_branch .Lpoll\ns_endpgm"), "k", 1, 64, [x, x]
        )
    assert "in 10000 instructions" in str(stop.value)


def test_workgroups_beyond_the_resident_ones_cannot_be_waited_for() -> None:
    """Every workgroup waits for the next one's flag: fine when all are resident, a deadlock when they are not."""
    body = """s_load_dwordx2 s[4:5], s[0:1], 0x0
        s_add_u32 s8, s2, 1
        s_lshl_b32 s9, s8, 2
        v_mov_b32 v1, s9
        v_mov_b32 v2, 1
        s_waitcnt lgkmcnt(0)
    .Lpoll:
        global_load_dword v3, v1, s[4:5] sc1
        s_sleep 1
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s10, v3
        s_cmp_eq_u32 s10, 0
        s_cbranch_scc1 .Lpoll
        global_store_dword v1, v2, s[4:5] offset:-4 sc1
        s_endpgm"""
    flags = np.zeros(65, "<u4")
    flags[64] = 1
    Emulator(Memory(flags), model="weak", seed=3).launch(assemble(body), "k", 64, 64, [flags, flags])
    assert flags.all()
    flags[:64] = 0
    with pytest.raises(ExecutionError, match="deadlock"):
        Emulator(Memory(flags), resident=8, deadlock_after=100_000).launch(assemble(body), "k", 64, 64, [flags, flags])


def test_a_wave_that_watches_the_clock_is_given_time() -> None:
    """A bounded wait (one second of the 100 MHz counter) ends by itself, quickly."""
    body = """s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_mov_b32 v1, 0
        s_memrealtime s[20:21]
        s_waitcnt lgkmcnt(0)
    .Lpoll:
        global_load_dword v3, v1, s[4:5] sc1
        s_memrealtime s[22:23]
        s_waitcnt vmcnt(0) lgkmcnt(0)
        s_sub_u32 s24, s22, s20
        s_cmp_lt_u32 s24, 0x5f5e100
        s_cbranch_scc1 .Lpoll
        v_mov_b32 v4, 77
        global_store_dword v1, v4, s[6:7]
        s_endpgm"""
    flag, result = np.zeros(1, "<u4"), np.zeros(1, "<u4")
    done = Emulator(Memory(flag, result), deadlock_after=10_000).launch(assemble(body), "k", 1, 64, [flag, result])
    assert result[0] == 77
    assert done.instructions < 1_000_000


# ---- uninitialised, misaligned ----


def reports(body: str, **options: object) -> list[str]:
    x = np.zeros(256, "<u4")
    memory = Memory()
    memory.add(x, "x", uninitialised=True)
    head = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\n"
    result = Emulator(memory, uninitialised=True, **options).launch(
        assemble(head + body + "\ns_endpgm", lds=512), "k", 1, 64, [x, x]
    )  # type: ignore[arg-type]
    return [r.kind for r in result.reports]


def test_uninitialised_reads_are_reported_by_place() -> None:
    assert (
        reports(
            "v_add_u32 v2, v1, v1\nglobal_store_dword v1, v2, s[4:5]\ns_waitcnt vmcnt(0)\n"
            "global_load_dword v3, v1, s[4:5]\ns_waitcnt vmcnt(0)"
        )
        == []
    )
    assert reports("v_add_u32 v2, v1, v9") == ["uninitialised register"]
    assert reports("global_load_dword v3, v1, s[4:5]\ns_waitcnt vmcnt(0)") == ["uninitialised memory"]
    assert reports("ds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)") == ["uninitialised LDS"]
    assert reports("ds_write_b32 v1, v1\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)") == []


def test_misaligned_accesses_are_reported() -> None:
    assert reports("v_add_u32 v2, 2, v1\nv_mov_b32 v3, 0\nglobal_store_dword v2, v3, s[4:5]") == ["misaligned"]
    assert reports("v_mov_b32 v2, 0\nv_mov_b32 v3, 0\nds_write_b64 v1, v[2:3]\ns_waitcnt lgkmcnt(0)") == ["misaligned"]


def test_a_seed_gives_one_schedule() -> None:
    def trace(seed: int) -> tuple[int, int]:
        flags = np.zeros(65, "<u4")
        flags[64] = 1
        body = """s_load_dwordx2 s[4:5], s[0:1], 0x0
            s_lshl_b32 s9, s2, 2
            v_mov_b32 v1, s9
            v_mov_b32 v2, 1
            s_waitcnt lgkmcnt(0)
        .Lpoll:
            global_load_dword v3, v1, s[4:5] offset:4 sc1
            s_waitcnt vmcnt(0)
            v_readfirstlane_b32 s10, v3
            s_cmp_eq_u32 s10, 0
            s_cbranch_scc1 .Lpoll
            global_store_dword v1, v2, s[4:5] sc1
            s_endpgm"""
        done = Emulator(Memory(flags), model="weak", seed=seed, quantum=50).launch(
            assemble(body), "k", 64, 64, [flags, flags]
        )
        return done.instructions, done.rounds

    assert trace(5) == trace(5)
    assert len({trace(seed) for seed in range(1, 6)}) > 1
