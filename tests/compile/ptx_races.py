"""Finds accesses to shared memory that nothing orders, in whatever order the machine of ptx_warps.py ran the warps.

Happens-before by vector clocks: a warp has one entry for each warp, what it knows the other to have done. Program order
of a warp; an arrival at an mbarrier -> a wait that sees its phase complete; all that arrive at a named barrier -> all
that wait at it. Every 4-byte word keeps its last write and the last read by each warp. An error, with both statements:

* a read whose last write does not come before it, a write whose last write or reads do not;
* a wgmma that reads, or a TMA box over, what ld/st's side of memory wrote, without a proxy fence between the two;
* a wait at an mbarrier that could take one phase for another of the same parity: the warp does not know whether the
  phase before is over, or the phase after may end before the warp has looked;
* an arrival that could count for the phase of an mbarrier, or the round of a named barrier, before the one it is meant
  for: the warp does not know whether that one is complete;
* the use of an mbarrier whose setup does not come before it.

A wgmma reads until the warp has waited for it. A TMA box writes from its issue on, until the phase of its mbarrier is
complete: each mbarrier has an entry of the clocks too, its phases known to be complete. So have the named barriers.

As no wait and no arrival may be taken for that of another phase or round, the order of the warps in a run does not
matter: what is ordered in one run is ordered in all that branch alike. Keeping only the last accesses loses nothing:
those before them were ordered with them.

Not modelled: the lanes of a warp (their accesses count as ordered, with or without a bar.warp), global memory, parts of
a word (two warps that write one are reported). A warp that waits for a wgmma has read 16 rows of A and all of B; the
other rows of A are those of the other warps, until these have waited.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

MBARRIERS, NAMED = 64, 16
#: Rows of a warp's clocks: what happened before, and the part of it that the async proxy sees.
ALL, FENCED = 0, 1


def words_of(offsets: np.ndarray) -> np.ndarray:
    """The 4-byte words of the bytes at `offsets` [..., bytes in a row]: aligned, 1, 2 or whole words of them."""
    return offsets[..., ::4] >> 2


class Races:
    """The clocks of a CTA's warps and the accesses to its shared memory. `statements`: those of its program.

    Warps are given by number, words by index: shared byte / 4. A word may come several times in one access.
    """

    def __init__(self, statements: Sequence[tuple[Any, ...]], warps: int, smem: int):
        self.statements, self.warps = statements, warps
        entries = warps + MBARRIERS + NAMED
        self.clocks = np.zeros((warps, 2, entries), np.int32)
        self.clocks[range(warps), ALL, range(warps)] = 1
        self.arrived: dict[Any, np.ndarray] = {}  # barrier -> clocks of what arrived in this phase or round
        self.complete: dict[int, np.ndarray] = {}  # mbarrier -> clocks of all phases that are complete
        self.phases: dict[int, int] = {}  # mbarrier -> how many these are
        self.looked: dict[int, np.ndarray] = {}  # mbarrier -> clock of each warp when it last waited here
        self.made: dict[int, tuple[int, int]] = {}  # mbarrier -> (warp, its clock) of the setup
        self.entry: dict[int, int] = {}  # of the clocks that counts the phases of an mbarrier that are complete
        words = -(-smem // 4)
        # Of each word: entry of the writer (a warp or an mbarrier), its clock, its statement; of reads by each warp.
        self.writer, self.written, self.write_at = (np.zeros(words, np.int32) for _ in range(3))
        self.read, self.read_at = (np.zeros((words, warps), np.int32) for _ in range(2))

    # ---- accesses

    def load(self, warp: int, statement: int, words: np.ndarray) -> None:
        """ld, ldmatrix."""
        self.expect_written(warp, words, ALL, "load of")
        self.read[words, warp] = self.clocks[warp, ALL, warp]
        self.read_at[words, warp] = statement

    def store(self, warp: int, statement: int, words: np.ndarray) -> None:
        """st, stmatrix."""
        self.expect_written(warp, words, ALL, "store over")
        self.expect_read(warp, words)
        self.wrote(words, warp, self.clocks[warp, ALL, warp], statement)

    def box(self, warp: int, statement: int, words: np.ndarray, mbarrier: int) -> None:
        """A TMA box. It is part of the phase that its mbarrier is in."""
        self.expect_setup(mbarrier, warp)
        self.expect_written(warp, words, FENCED, "TMA over")
        self.expect_read(warp, words)
        self.wrote(words, self.entry[mbarrier], self.phases[mbarrier] + 1, statement)

    def wgmma(self, warp: int, words: np.ndarray) -> None:
        """The issue of a wgmma: the earliest that it can read these."""
        self.expect_written(warp, words, FENCED, "wgmma on")

    def wgmma_over(self, warp: int, reads: list[tuple[int, np.ndarray]]) -> None:
        """The warp has waited for wgmmas: (statement, words) that they may have read until now."""
        for statement, words in reads:
            self.read[words, warp] = self.clocks[warp, ALL, warp]
            self.read_at[words, warp] = statement

    def wrote(self, words: np.ndarray, entry: int, clock: int, statement: int) -> None:
        self.writer[words], self.written[words], self.write_at[words] = entry, clock, statement

    def expect_written(self, warp: int, words: np.ndarray, proxy: int, what: str) -> None:
        """The last writes of these words come before what the warp does now."""
        writer, written = self.writer[words], self.written[words]
        bad = written > self.clocks[warp, proxy][writer]
        if bad.any():
            i = tuple(x[0] for x in np.nonzero(bad))
            fence = written[i] <= self.clocks[warp, ALL][writer[i]]
            by = f"warp {writer[i]}" if writer[i] < self.warps else "TMA"
            how = f"{by} wrote, without a proxy fence" if fence else f"{by} writes, unordered"
            self.fail(f"{what} what {how}", words[i], self.write_at[words[i]])

    def expect_read(self, warp: int, words: np.ndarray) -> None:
        """The reads of these words so far come before what the warp does now."""
        bad = self.read[words] > self.clocks[warp, ALL, : self.warps]
        if bad.any():
            *i, reader = (x[0] for x in np.nonzero(bad))
            word = words[tuple(i)]
            self.fail(f"write over what warp {reader} reads, unordered", word, self.read_at[word, reader])

    def fail(self, what: str, word: int, statement: int) -> None:
        raise AssertionError(f"race: {what}: shared byte {4 * word}, statement {statement}: {self.text(statement)}")

    def text(self, statement: int) -> str:
        return " ".join(self.statements[statement][0].split())

    # ---- order

    def fence(self, warp: int) -> None:
        """A proxy fence: what the warp knows of is seen by wgmma and TMA; what it writes from now on is not."""
        mine = self.clocks[warp]
        np.maximum(mine[FENCED], mine[ALL], out=mine[FENCED])
        mine[ALL, warp] += 1

    def release(self, barrier: Any, warp: int) -> None:
        """The warp arrives at a barrier."""
        mine, there = self.clocks[warp], self.arrived.get(barrier)
        self.arrived[barrier] = mine.copy() if there is None else np.maximum(there, mine)
        mine[ALL, warp] += 1

    def setup(self, mbarrier: int, warp: int) -> None:
        assert len(self.made) < MBARRIERS
        self.entry[mbarrier] = self.warps + len(self.made)
        self.made[mbarrier] = warp, int(self.clocks[warp, ALL, warp])
        self.complete[mbarrier] = np.zeros(self.clocks.shape[1:], np.int32)
        self.phases[mbarrier], self.looked[mbarrier] = 0, np.zeros(self.warps, np.int32)

    def expect_setup(self, mbarrier: int, warp: int) -> None:
        by, clock = self.made[mbarrier]
        assert clock <= self.clocks[warp, ALL, by], f"mbarrier used before its setup, by warp {by}, is known to be over"

    def arrive(self, mbarrier: int, warp: int) -> None:
        self.expect_setup(mbarrier, warp)
        known, phases = self.clocks[warp, ALL, self.entry[mbarrier]], self.phases[mbarrier]
        assert known == phases, f"an arrival that phase {known} of the mbarrier may take, meant for {phases}"
        self.release(mbarrier, warp)

    def phase_over(self, mbarrier: int) -> None:
        """The mbarrier has completed a phase."""
        seen, there = self.complete[mbarrier], self.arrived.pop(mbarrier)
        early = np.flatnonzero(self.looked[mbarrier] > there[ALL, : self.warps])
        assert not early.size, f"a phase of an mbarrier that may end before warps {early} see that the last one did"
        np.maximum(seen, there, out=seen)
        self.phases[mbarrier] += 1
        seen[:, self.entry[mbarrier]] = self.phases[mbarrier]

    def wait(self, mbarrier: int, warp: int) -> None:
        """The warp has waited at an mbarrier."""
        self.expect_setup(mbarrier, warp)
        mine, phases = self.clocks[warp], self.phases[mbarrier]
        known = mine[ALL, self.entry[mbarrier]]
        assert known >= phases - 1, f"a wait that phase {known} of its mbarrier may end as well as phase {phases - 1}"
        np.maximum(mine, self.complete[mbarrier], out=mine)
        self.looked[mbarrier][warp] = mine[ALL, warp]

    def meet(self, named: int, warp: int) -> None:
        """The warp arrives at a named barrier."""
        key, entry = ("named", named), self.warps + MBARRIERS + named
        rounds = self.arrived.setdefault(("rounds", named), np.zeros(1, np.int32))
        known = self.clocks[warp, ALL, entry]
        assert known == rounds[0], f"an arrival that round {known} of barrier {named} may take, meant for {rounds[0]}"
        self.release(key, warp)

    def met(self, named: int, warps: list[int]) -> None:
        """A round of a named barrier is complete, at which these warps waited."""
        rounds = self.arrived["rounds", named]
        rounds += 1
        there = self.arrived.pop(("named", named))
        there[:, self.warps + MBARRIERS + named] = rounds[0]
        for warp in warps:
            np.maximum(self.clocks[warp], there, out=self.clocks[warp])
