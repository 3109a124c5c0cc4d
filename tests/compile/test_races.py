"""The race detector of the CPU machine: finds what nothing orders in every order of the warps, and nothing else."""

import copy
import random
import re

import ptx_warps
import pytest
from cases import CoreCase, core_inputs
from ptx_warps import Block, WarpProgram
from test_hopper import Machine

pytestmark = pytest.mark.compile

#: Two warps. First each thread writes its word; then warp 0 does one thing, warp 1 another. %low: the words of warp 0,
#: by lane. %lead: lane 0. An mbarrier for one arrival is at byte 256.
TINY = """
.visible .entry tiny()
.reqntid 64, 1, 1
{
    mov.b32 %base, __dynamic;
    mov.b32 %t, %tid.x;
    and.b32 %lane, %t, 31;
    shl.b32 %at, %lane, 2;
    add.s32 %low, %base, %at;
    shl.b32 %at, %t, 2;
    add.s32 %mine, %base, %at;
    setp.eq.u32 %lead, %lane, 0;
    setp.eq.u32 %first, %t, 0;
    setp.lt.u32 %zero, %t, 32;
    st.shared.b32 [%mine], %t;
    @%first mbarrier.init.shared.b64 [%base+256], 1;
    bar.sync 0;
    @%zero bra $zero;
    WARP_1
    ret;
    $zero:
    WARP_0
    ret;
}
"""
STORE, LOAD = "st.shared.b32 [%low], %lane;", "ld.shared.b32 %x, [%low];"
ARRIVE = "@%lead mbarrier.arrive.shared.b64 %s, [%base+256];"
WAIT = "mbarrier.wait.shared.b64 [%base+256], {};".format
SYNC, POST = "bar.sync {}, 64;".format, "bar.arrive {}, 64;".format


def run(warp_0: str, warp_1: str, seed: int) -> None:
    code = WarpProgram(TINY.replace("WARP_0", warp_0).replace("WARP_1", warp_1))
    Block(code, 512, {}, []).run(code, (0, 0, 0), (1, 1, 1), [], [], random.Random(seed))


ORDERED = [
    (STORE + SYNC(1), SYNC(1) + LOAD),
    (STORE + POST(1), SYNC(1) + LOAD),
    (STORE + ARRIVE, WAIT(0) + LOAD),
    (LOAD + POST(1), SYNC(1) + STORE),
    (LOAD + ARRIVE, WAIT(0) + STORE),
    (STORE + ARRIVE, WAIT(0) + STORE),
    (LOAD, LOAD),
    # several phases or rounds, each known to be over before the next
    (2 * (STORE + POST(1) + SYNC(2)), 2 * (SYNC(1) + LOAD + POST(2))),
    (2 * (STORE + ARRIVE + SYNC(1)), WAIT(0) + LOAD + SYNC(1) + WAIT(1) + LOAD + SYNC(1)),
    # warp 1 leaves phase 1 out: warp 0 tells it that this one is over
    (ARRIVE + SYNC(2) + ARRIVE + WAIT(1) + SYNC(1) + STORE + ARRIVE, WAIT(0) + SYNC(2) + SYNC(1) + WAIT(0) + LOAD),
]
RACES = [
    (STORE, LOAD),
    (STORE, STORE),  # the same value
    (STORE + POST(1), LOAD + SYNC(1)),  # too early
    (SYNC(1) + STORE, POST(1) + LOAD),  # the wrong way round
    (STORE + SYNC(1), POST(1) + LOAD),
    (ARRIVE + STORE, WAIT(0) + LOAD),
    (ARRIVE + LOAD, WAIT(0) + STORE),
]
MISTAKEN = [
    # phase 0 ends the second wait as well as phase 2
    (ARRIVE + SYNC(2) + ARRIVE + WAIT(1) + STORE + ARRIVE, WAIT(0) + SYNC(2) + WAIT(0) + LOAD),
    # phase 1 may be over too when phase 0 is waited for
    (ARRIVE + WAIT(0) + ARRIVE, WAIT(0)),
    (ARRIVE + ARRIVE, WAIT(0) + WAIT(1)),
    (POST(1) + POST(1), SYNC(1) + SYNC(1)),
    # no phase has parity 1 yet
    (STORE + ARRIVE, WAIT(1) + LOAD),
]


@pytest.mark.parametrize(("warp_0", "warp_1"), ORDERED)
def test_what_is_ordered_is_no_race(warp_0, warp_1):
    for seed in range(20):
        run(warp_0, warp_1, seed)


@pytest.mark.parametrize(("warp_0", "warp_1"), RACES)
def test_races_are_found_in_every_order(warp_0, warp_1):
    for seed in range(20):
        with pytest.raises(
            AssertionError, match=r"warp (\d), statement \d+: .* race: .* warp (?!\1)\d .*, statement \d+: "
        ):
            run(warp_0, warp_1, seed)


@pytest.mark.parametrize(("warp_0", "warp_1"), MISTAKEN)
def test_barriers_that_may_be_mistaken_are_found_in_every_order(warp_0, warp_1):
    for seed in range(20):
        with pytest.raises(AssertionError):
            run(warp_0, warp_1, seed)


def test_setup_of_an_mbarrier_must_be_known():
    made = "@%first mbarrier.init.shared.b64 [%base+264], 1;"
    wait = "mbarrier.wait.shared.b64 [%base+264], 1;"
    for seed in range(20):
        run(made + SYNC(1), SYNC(1) + wait, seed)
        with pytest.raises(AssertionError, match="before its setup"):
            run(made, wait, seed)


# ---- the cores

#: A small launch of each kind of core, and those of its barriers that others make redundant, in program order.
CORES = {
    # the tile whose scores the other warpgroup worked out: that one has waited for it
    "together": (CoreCase((400, 1, 70), heads=6), ["mbarrier.wait"]),
    "bf16": (CoreCase((200, 1, 70), heads=6, kv_format="bf16"), ["mbarrier.wait"]),
    # a warp clears the rows of V that it alone has read as keys; P comes from a warpgroup that has waited for the tile
    "apart": (CoreCase((400, 1, 70, 65), heads=12, q=4), ["bar.sync", "mbarrier.wait"]),
}
#: What the detector says.
FOUND = re.compile(
    "race: |an arrival that|arrives for the next round|a wait that|a phase of an mbarrier|before its setup"
)


def without(code: WarpProgram, statement: int) -> WarpProgram:
    """The program with nothing in place of a statement."""
    other = copy.copy(code)
    other.statements = list(code.statements)
    other.statements[statement] = ("nothing", None, ["label"], [])
    return other


@pytest.mark.parametrize("which", CORES)
def test_a_core_without_one_of_its_barriers_is_found(which, monkeypatch):
    # An access that comes too early is to be found as a race, not as one to memory that nothing was written to.
    setup = Block.__init__

    def all_written(block, *arguments):
        setup(block, *arguments)
        block.ready[:] = True

    monkeypatch.setattr(Block, "__init__", all_written)
    case, redundant = CORES[which]
    given = core_inputs(case)
    whole = Machine(given, sm_count=1)
    whole.core()
    code, silent, found = ptx_warps.program(whole.key), [], []
    for i, (_, _, op, _) in enumerate(code.statements):
        if op[:2] not in (["bar", "sync"], ["fence", "proxy"], ["mbarrier", "wait"]):
            continue
        monkeypatch.setattr(ptx_warps, "program", lambda key, i=i: without(code, i))
        try:
            Machine(given, sm_count=1).core()
            silent.append(".".join(op[:2]))
        except AssertionError as e:
            found.append(str(e))
    assert silent == redundant
    assert len(found) >= 10
    assert not [x for x in found if not FOUND.search(x)]
