"""Runs the PTX of a warp-specialised kernel on the CPU: warps that loop, branch apart and wait for each other.

Each warp has a program counter a lane (the lanes that are furthest behind run first) and is scheduled at random, so
that a different seed is a different interleaving. Modelled beside the machine of ptx_grid.py:

* mbarriers with phases and bytes, named barriers with and without a vote, TMA boxes through tensor maps with their
  swizzle and their zeros out of bounds, wgmma through its shared-memory descriptors, ldmatrix and stmatrix;
* registers of a wgmma are there at once, but shared memory that it reads must stay as it is until the warp has waited
  for it: a store or a TMA box into it is an error; so is a load from shared memory that nothing was written to;
* what the kernel before writes may only be touched by a warp that executed griddepcontrol.wait, or whose TMA did;
* a launch in which every warp waits is an error; so are accesses to shared memory that nothing orders, though this
  order of the warps gives right values (ptx_races.py).

Not modelled: what happens when warps of a warpgroup run a wgmma apart.
"""

import functools
import random
import re
import tempfile
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from ptx_cluster import SMEM_BASE, Buffer, Program
from ptx_grid import Memory
from ptx_lanes import E4M3, Lanes
from ptx_races import Races, words_of
from ptx_tma import Map, swizzled
from ptx_values import U64, bf16_values, bits32, f32, signed


class WarpProgram(Program):
    """A Program whose waits loop and whose tensor maps are parameters."""

    def __init__(self, text: str):
        text = re.sub(r"\.param \.align \d+ \.b8 (\w+)\[128\]", r".param .tmap \1", text)
        text = re.sub(
            r"\{[^{}]*LAB_WAIT:\s*mbarrier\.try_wait\.parity\.(\S+) P1, \[(\S+)\], (\S+), \d+;[^{}]*DONE:\s*\}",
            r"mbarrier.wait.\1 [\2], \3;",
            text,
        )
        text = re.sub(r"\.pragma[^;]*;", "", text)
        assert "LAB_WAIT" not in text
        super().__init__(text)


@functools.cache
def program(key: Any, target: str = "sm_90a") -> WarpProgram:
    """The PTX of a kernel key, parsed."""
    import cutlass.cute as cute

    function, arguments = import_module(key.device_module).trace(key, target)
    with tempfile.TemporaryDirectory() as scratch:
        options = f"--gpu-arch {target} --opt-level 3 --keep-ptx --dump-dir {scratch}"
        return WarpProgram(cute.compile(function, *arguments, options=options).artifacts.PTX)


class Block:
    """What the warps of a CTA share."""

    def __init__(self, code: WarpProgram, smem: int, maps: dict[int, Map], late: list[tuple[Buffer, np.ndarray]]):
        self.smem = np.zeros(smem, np.uint8)
        self.ready = np.zeros(smem, bool)
        self.mbarriers: dict[int, list[int]] = {}  # address -> [count, arrivals left, bytes to come, phase]
        self.named: dict[int, tuple[dict[int, bool], dict[int, bool]]] = {}
        self.maps, self.late = maps, late
        self.warps: list[Warp] = []
        self.races = Races(code.statements, code.threads // 32, smem)

    def run(
        self, code: WarpProgram, cta: tuple[int, int, int], grid: tuple[int, ...], arguments: list[int],
        buffers: list[Buffer], rnd: random.Random,
    ) -> int:  # fmt: skip
        """Runs all warps to their ends; the statements executed."""
        self.warps = [Warp(code, self, i, cta, grid) for i in range(code.threads // 32)]
        for warp in self.warps:
            warp.start(arguments, buffers)
        left, total = list(self.warps), 0
        while left:
            rnd.shuffle(left)
            steps = sum(warp.advance(rnd.choice((5, 50, 500, 5000))) for warp in left)
            left = [warp for warp in left if not warp.done]
            waits = {w.index: w.blocked for w in left}
            assert steps or not left, f"every warp waits: {waits}, barriers {self.mbarriers}"
            total += steps
        return total

    def mbarrier(self, address: int) -> list[int]:
        assert address in self.mbarriers, "mbarrier used before its setup"
        return self.mbarriers[address]

    def write(self, offsets: np.ndarray, data: np.ndarray) -> None:
        for warp in self.warps:
            for low, high, at, _ in (r for group in (*warp.flying, warp.open) for r in group):
                assert not ((offsets >= low) & (offsets < high)).any(), (
                    f"race: write to what a wgmma of warp {warp.index} reads, statement {at}: {self.races.text(at)}"
                )
        self.smem[offsets] = data
        self.ready[offsets] = True

    def arrive(self, address: int, bytes_: int, warp: int) -> None:
        barrier = self.mbarrier(address)
        assert barrier[1] > 0, "more arrivals than the barrier counts"
        self.races.arrive(address, warp)
        barrier[1] -= 1
        barrier[2] += bytes_
        self.complete(address, 0)

    def complete(self, address: int, bytes_: int) -> None:
        barrier = self.mbarrier(address)
        barrier[2] -= bytes_
        if barrier[1] == 0 and barrier[2] == 0:
            barrier[1], barrier[3] = barrier[0], barrier[3] + 1
            self.races.phase_over(address)


class Warp(Lanes):
    """32 lanes with a program counter each."""

    def __init__(self, code: WarpProgram, block: Block, index: int, cta: tuple[int, int, int], grid: tuple[int, ...]):
        super().__init__(code, 1, 1, grid, cta[1], cta[2])
        self.block, self.index, self.lanes = block, index, 32
        self.special = {"%tid.x": index * 32 + np.arange(32), "%laneid": np.arange(32)}
        self.special |= {f"%ctaid.{d}": np.full(32, v) for d, v in zip("xyz", cta, strict=True)}
        self.pc = np.zeros(32, int)
        # Shared ranges that wgmma groups read, with the statement and the words: committed ones, and the one to be.
        self.flying: deque[list[tuple[int, int, int, np.ndarray]]] = deque()
        self.open: list[tuple[int, int, int, np.ndarray]] = []
        self.statement = 0
        self.waited, self.blocked, self.done = False, None, False
        self.instructions = 0
        self.regs = {}

    # ---- control

    def start(self, arguments: list[int], buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.arguments = {name: value for (_, name), value in zip(self.program.params, arguments, strict=True)}

    def advance(self, steps: int) -> int:
        """Runs until the warp blocks or has done `steps` statements; how many it did."""
        statements, labels, everything = self.program.statements, self.program.labels, np.ones(32, bool)
        for n in range(steps):
            index = int(self.pc.min())
            if index >= len(statements):
                self.done = True
                return n + 1
            self.statement = index
            raw, guard, op, operands = statements[index]
            here = self.pc == index
            active = here
            if guard and op[0] != "label":
                active = here & ((self.regs[guard[0]] != 0) ^ guard[1])
            self.whole = active.all()
            self.active = everything if self.whole else active
            if op[0] == "bra":
                self.pc[here] += 1
                self.pc[active] = labels[operands[0]]
                continue
            if op[0] == "ret":
                self.pc[active] = 1 << 30
                self.pc[here & ~active] += 1
                continue
            if op[0] != "label" and active.any():
                self.blocked = None
                try:
                    with np.errstate(all="ignore"):
                        getattr(self, "op_" + op[0])(op, operands)
                except Exception as e:
                    raise AssertionError(f"warp {self.index}, statement {index}: {raw}: {e}") from e
                if self.blocked:
                    return n
            self.pc[here] += 1
        return steps

    def get(self, name):
        if name in self.regs:
            return self.regs[name]
        if name in self.arguments:
            return np.full(32, self.arguments[name], U64)
        return super().get(name)

    def put(self, name, bits):
        if self.whole:
            self.regs[name] = bits
        else:
            super().put(name, bits)

    def one(self, operand: str) -> int:
        """An operand that all active lanes agree on."""
        values = np.unique(self.get(operand)[self.active])
        assert values.size == 1
        return int(values[0])

    def place(self, operand: str) -> int:
        """An address that all active lanes agree on."""
        values = np.unique(self.where(operand)[self.active])
        assert values.size == 1
        return int(values[0])

    # ---- shared memory

    def shared(self, address, size):
        lanes = np.flatnonzero(self.active)
        offset = address[lanes].astype(int) - SMEM_BASE
        assert ((offset >= 0) & (offset + size <= self.block.smem.size)).all(), "out of shared memory"
        assert not (offset % size).any(), f"misaligned {size}-byte shared access"
        return lanes, offset[:, None] + np.arange(size)

    def load_shared(self, address, size):
        lanes, offsets = self.shared(address, size)
        assert self.block.ready[offsets].all(), "load of shared memory that nothing was written to"
        self.block.races.load(self.index, self.statement, words_of(offsets))
        out = np.zeros((32, size), np.uint8)
        out[lanes] = self.block.smem[offsets]
        return out

    def store_shared(self, address, data):
        lanes, offsets = self.shared(address, data.shape[1])
        self.block.races.store(self.index, self.statement, words_of(offsets))
        self.block.write(offsets, data[lanes])

    def op_stmatrix(self, op, operands):
        assert self.active.all()
        assert "trans" in op
        names = self.vector(operands[1])
        address = self.where(operands[0])
        lane = np.arange(32)
        for i, name in enumerate(names):
            words = self.get(name)
            tile = np.zeros((8, 8), np.uint16)  # [fragment row][fragment column]
            tile[lane // 4, 2 * (lane % 4)] = (words & U64(0xFFFF)).astype(np.uint16)
            tile[lane // 4, 2 * (lane % 4) + 1] = (words >> U64(16)).astype(np.uint16)
            rows = address[8 * i : 8 * i + 8].astype(int) - SMEM_BASE
            assert not (rows % 16).any()
            assert (rows + 16 <= self.block.smem.size).all()
            offsets = rows[:, None] + np.arange(16)
            self.block.races.store(self.index, self.statement, words_of(offsets))
            self.block.write(offsets, np.ascontiguousarray(tile.T).view(np.uint8))

    # ---- barriers

    def op_mbarrier(self, op, operands):
        if op[1] == "wait":
            address = self.place(operands[0])
            if self.block.mbarrier(address)[3] & 1 == self.one(operands[1]) & 1:
                self.blocked = operands
            else:
                self.block.races.wait(address, self.index)
            return
        if op[1] == "init":
            address = self.place(operands[0])
            assert address not in self.block.mbarriers
            assert address % 8 == 0
            assert address + 8 <= SMEM_BASE + self.block.smem.size
            count = self.one(operands[1])
            self.block.mbarriers[address] = [count, count, 0, 0]
            self.block.races.setup(address, self.index)
            return
        assert self.active.sum() == 1
        assert op[1] == "arrive"
        bytes_ = self.one(operands[2]) if op[2] == "expect_tx" else 0
        self.block.arrive(self.place(operands[1]), bytes_, self.index)

    def rendezvous(self, which: int, threads: int, vote: bool = False, *, stay: bool = True) -> bool | None:
        """Arrives at a named barrier; None until it is complete, then the vote. stay: whether the warp waits for it."""
        waiting, results = self.block.named.setdefault(which, ({}, {}))
        if stay and self.index in results:
            return results.pop(self.index)
        assert stay or self.index not in waiting, "a warp arrives for the next round before this one is complete"
        if self.index not in waiting:  # else it is here again, to see whether it may go on
            self.block.races.meet(which, self.index)
        waiting[self.index] = vote, stay
        if 32 * len(waiting) < threads:
            return None
        assert 32 * len(waiting) == threads, "barrier of another size"
        outcome = any(vote for vote, _ in waiting.values())
        waiters = [index for index, (_, stay) in waiting.items() if stay]
        self.block.races.met(which, waiters)
        results.update(dict.fromkeys(waiters, outcome))
        waiting.clear()
        return results.pop(self.index, None)

    def op_bar(self, op, operands):
        assert self.active.all(), "a barrier in a divergent warp"
        if op[1] == "warp":
            return
        threads = int(operands[1]) if len(operands) > 1 else self.size
        stay = op[1] != "arrive"
        if self.rendezvous(self.one(operands[0]), threads, stay=stay) is None and stay:
            self.blocked = operands

    def op_barrier(self, op, operands):
        assert self.active.all(), "a barrier in a divergent warp"
        assert op[1:4] == ["cta", "red", "or"]
        vote = bool((self.get(operands[3]) != 0).any())
        got = self.rendezvous(self.one(operands[1]), int(operands[2]), vote)
        if got is None:
            self.blocked = operands
        else:
            self.put(operands[0], np.full(32, int(got), U64))

    def op_griddepcontrol(self, op, operands):
        self.waited = self.waited or op[1] == "wait"

    op_setmaxnreg = Lanes.op_nothing

    def op_fence(self, op, operands):
        if op[1] == "proxy":
            assert op[2:] == ["async", "shared::cta"]
            self.block.races.fence(self.index)

    def op_prefetch(self, op, operands):
        assert self.place(operands[0]) in self.block.maps

    def op_cvta(self, op, operands):
        self.put(operands[0], self.get(operands[1]))

    # ---- tensor memory access

    def op_cp(self, op, operands):
        assert op[1:4] == ["async", "bulk", "tensor"]
        assert self.active.sum() == 1
        target, barrier, source = operands[0], operands[-1], ",".join(operands[1:-1])
        dst = self.place(target)
        name, _, coordinates = source.strip("[]").partition(",")
        map_ = self.block.maps[self.one(name.strip())]
        at = [int(signed(np.array([self.one(c)], U64), 32)[0]) for c in self.vector(coordinates.strip())]
        rows, read = map_.read(at)
        for buffer, offsets in self.block.late:
            if buffer is map_.buffer and not self.waited:
                assert not np.isin(read, offsets).any(), "TMA of what the kernel before writes, before the wait"
        width = map_.swizzle
        assert rows.shape[1] == width
        assert dst % (width * 8) == 0
        where = swizzled(dst + np.arange(rows.size), width) - SMEM_BASE
        assert (where < self.block.smem.size).all()
        assert where.min() >= 0
        address = self.place(barrier)
        self.block.races.box(self.index, self.statement, words_of(where), address)
        self.block.write(where, rows.reshape(-1))
        self.block.complete(address, rows.size)

    # ---- wgmma

    def tile(self, descriptor: int, rows: np.ndarray, k_bytes: int, mn_major: bool) -> np.ndarray:
        """Bytes [rows, k_bytes] of an operand; mn_major: 16-bit elements of 64-element columns."""
        start = (descriptor & 0x3FFF) << 4
        group = ((descriptor >> 32) & 0x3FFF) << 4
        width = {1: 128, 2: 64}[descriptor >> 62]
        assert group == width * 8
        if mn_major:
            k = np.arange(k_bytes // 2)
            at = start + (k // 8) * group + (k % 8) * width
            address = at[None, :, None] + rows[:, None, None] * 2 + np.arange(2)
        else:
            address = start + (rows // 8)[:, None] * group + (rows % 8)[:, None] * width + np.arange(k_bytes)
        offsets = swizzled(address.reshape(rows.size, k_bytes), width) - SMEM_BASE
        assert self.block.ready[offsets].all(), "wgmma on shared memory that nothing was written to"
        words = offsets[::2, ::2] >> 2 if mn_major else words_of(offsets)
        self.block.races.wgmma(self.index, words)
        self.open.append((int(offsets.min()), int(offsets.max()) + 1, self.statement, words))
        return self.block.smem[offsets]

    def op_wgmma(self, op, operands):
        assert self.active.all()
        if op[1] == "fence":
            return
        if op[1] == "commit_group":
            self.flying.append(self.open)
            self.open = []
            return
        if op[1] == "wait_group":
            while len(self.flying) > int(operands[0]):
                self.block.races.wgmma_over(self.index, [x[2:] for x in self.flying.popleft()])
            return
        shape = re.fullmatch(r"m64n(\d+)k(\d+)", op[4])
        n, k, kind = int(shape[1]), int(shape[2]), op[-1]
        decode = {
            "e4m3": lambda raw: E4M3[raw],
            "f16": lambda raw: np.ascontiguousarray(raw).view(np.float16).astype(np.float32),
            "bf16": lambda raw: bf16_values(np.ascontiguousarray(raw).view(np.uint16).astype(U64)),
        }[kind]
        size = 1 if kind == "e4m3" else 2
        d = self.vector(operands[0])
        assert len(d) == n // 2
        w = self.index % 4
        if operands[1].startswith("{"):
            a = self.fragment([self.get(x) for x in self.vector(operands[1])], size, decode)
        else:
            mn_major = len(operands) > 6 and operands[6] == "1"
            a = decode(self.tile(self.one(operands[1]), 16 * w + np.arange(16), k * size, mn_major))
        b = decode(self.tile(self.one(operands[2]), np.arange(n), k * size, False))
        keep = self.one(operands[3]) != 0
        # Rows and columns stay apart: a NaN in one must not reach another.
        total = (a.astype(np.float64)[:, None, :] * b.astype(np.float64)).sum(-1)
        lane = np.arange(32)
        for i, name in enumerate(d):
            row, column = lane // 4 + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)
            more = f32(self.get(name)).astype(np.float64) if keep else 0.0
            self.put(name, bits32((total[row, column] + more).astype(np.float32)))

    @staticmethod
    def fragment(regs, size, decode):
        """A of 16 rows from 4 registers a lane: register i has row lane / 4 + 8 (i & 1), 4 bytes of K."""
        per = 4 // size
        a = np.zeros((16, 16 if size == 2 else 32), np.float32)
        lane = np.arange(32)
        for i, words in enumerate(regs):
            raw = words.astype(np.uint32).view(np.uint8).reshape(32, 4)
            k = (lane % 4) * per + (4 * per) * (i >> 1)
            a[(lane // 4 + 8 * (i & 1))[:, None], k[:, None] + np.arange(per)] = decode(raw)
        return a


def launch(
    key: Any, shape: Any, values: Mapping[str, Any], memory: Memory, late: list | None = None, seed: int = 0
) -> int:
    """Launches `key` over its grid, CTA after CTA, warps interleaved by `seed`; gives the statements executed.

    values: an int for each parameter, a Map for a tensor map. late: (buffer, offsets) that the kernel before writes.
    """
    code, rnd = program(key), random.Random(seed)
    assert shape.block == (code.threads, 1, 1)
    arguments, maps = [], {}
    for i, p in enumerate(key.params):
        value = values[p.name]
        if p.kind == "tmap":
            maps[0x100 * (i + 1)] = value
            value = 0x100 * (i + 1)
        elif p.kind == "f32":
            value = int(np.float32(value).view(np.uint32))
        arguments.append(value & ((1 << 64) - 1))
    total = 0
    for z in range(shape.grid[2]):
        for y in range(shape.grid[1]):
            for x in range(shape.grid[0]):
                block = Block(code, shape.smem, maps, late or [])
                total += block.run(code, (x, y, z), shape.grid, arguments, memory.buffers, rnd)
                assert any(warp.waited for warp in block.warps), "a CTA that never waits for the kernel before"
    return total
