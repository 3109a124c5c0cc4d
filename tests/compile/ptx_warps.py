"""Runs the PTX of a warp-specialised kernel on the CPU: warps that loop, branch apart and wait for each other.

Each warp has a program counter a lane (the lanes that are furthest behind run first) and is scheduled at random, so
that a different seed is a different interleaving. Modelled beside the machine of ptx_grid.py:

* mbarriers with phases and bytes, named barriers with and without a vote, TMA boxes through tensor maps with their
  swizzle and their zeros out of bounds, wgmma through its shared-memory descriptors, ldmatrix and stmatrix;
* registers of a wgmma are there at once, but shared memory that it reads must stay as it is until the warp has waited
  for it: a store or a TMA box into it is an error; so is a load from shared memory that nothing was written to;
* what the kernel before writes may only be touched by a warp that executed griddepcontrol.wait, or whose TMA did;
* a launch in which every warp waits is an error.

Not modelled: proxy fences, and what happens when warps of a warpgroup run a wgmma apart.
"""

import functools
import random
import re
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from ptx_cluster import SMEM_BASE, U64, Buffer, Program, bf16_values, bits32, e4m3_bits, f32, signed, wrap
from ptx_grid import Cta, Memory, f16_bits

#: Value of every byte of an e4m3.
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


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


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Where the byte of a linear address lies in a layout of `width`-byte swizzle: 16-byte chunks xor the row."""
    if width == 128:
        return address ^ ((address >> 3) & 0x70)
    assert width == 64
    return address ^ ((address >> 3) & 0x30)


@dataclass
class Map:
    """A tensor map: the arguments of driver.TensorMap, and the memory it describes."""

    buffer: Buffer
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    dtype: str
    l2_promotion: int = 128
    start: int = 0  # of element 0 in the buffer
    strict: bool = False  # a last coordinate out of bounds is an error

    def read(self, at: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(box bytes [rows, row bytes] with zeros out of bounds, offsets in the buffer of the bytes that were read)."""
        assert not self.strict or 0 <= at[-1] < self.dims[-1], f"coordinate {at[-1]} of {self.dims[-1]}"
        size = 1 if self.dtype in ("u8", "e4m3") else 2
        assert self.box[0] * size <= self.swizzle
        steps = (1, *self.strides_bytes)
        index, inside = np.zeros(1, np.int64), np.ones(1, bool)
        for dim in reversed(range(1, len(self.dims))):
            x = at[dim] + np.arange(self.box[dim])
            index = (index[:, None] + x * steps[dim]).reshape(-1)
            inside = (inside[:, None] & (x >= 0) & (x < self.dims[dim])).reshape(-1)
        x = at[0] + np.arange(self.box[0])
        columns = (x[:, None] * size + np.arange(size)).reshape(-1)
        inside = inside[:, None] & np.repeat((x >= 0) & (x < self.dims[0]), size)
        offsets = self.start + index[:, None] + columns
        rows = np.zeros(offsets.shape, np.uint8)
        rows[inside] = self.buffer.data[offsets[inside]]
        return rows, offsets[inside]


class Block:
    """What the warps of a CTA share."""

    def __init__(self, smem: int, maps: dict[int, Map], late: list[tuple[Buffer, np.ndarray]]):
        self.smem = np.zeros(smem, np.uint8)
        self.ready = np.zeros(smem, bool)
        self.mbarriers: dict[int, list[int]] = {}  # address -> [count, arrivals left, bytes to come, phase]
        self.named: dict[int, tuple[dict[int, bool], dict[int, bool]]] = {}
        self.maps, self.late = maps, late
        self.warps: list[Warp] = []

    def write(self, offsets: np.ndarray, data: np.ndarray) -> None:
        for warp in self.warps:
            for low, high in (r for group in warp.flying for r in group):
                assert not ((offsets >= low) & (offsets < high)).any(), "write to shared memory that a wgmma reads"
        self.smem[offsets] = data
        self.ready[offsets] = True

    def arrive(self, address: int, bytes_: int) -> None:
        barrier = self.mbarriers[address]
        assert barrier[1] > 0, "more arrivals than the barrier counts"
        barrier[1] -= 1
        barrier[2] += bytes_
        self.complete(address, 0)

    def complete(self, address: int, bytes_: int) -> None:
        barrier = self.mbarriers[address]
        barrier[2] -= bytes_
        if barrier[1] == 0 and barrier[2] == 0:
            barrier[1], barrier[3] = barrier[0], barrier[3] + 1


class Warp(Cta):
    """32 lanes with a program counter each."""

    def __init__(self, code: WarpProgram, block: Block, index: int, cta: tuple[int, int, int], grid: tuple[int, ...]):
        super().__init__(code, 1, 1, grid, cta[1], cta[2])
        self.block, self.index, self.lanes = block, index, 32
        self.special = {"%tid.x": index * 32 + np.arange(32), "%laneid": np.arange(32)}
        self.special |= {f"%ctaid.{d}": np.full(32, v) for d, v in zip("xyz", cta, strict=True)}
        self.pc = np.zeros(32, int)
        self.flying: deque[list[tuple[int, int]]] = deque()  # shared ranges that committed wgmma groups read
        self.open: list[tuple[int, int]] = []
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
        out = np.zeros((32, size), np.uint8)
        out[lanes] = self.block.smem[offsets]
        return out

    def store_shared(self, address, data):
        lanes, offsets = self.shared(address, data.shape[1])
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
            self.block.write(rows[:, None] + np.arange(16), np.ascontiguousarray(tile.T).view(np.uint8))

    # ---- barriers

    def op_mbarrier(self, op, operands):
        if op[1] == "wait":
            if self.block.mbarriers[self.place(operands[0])][3] & 1 == self.one(operands[1]) & 1:
                self.blocked = operands
            return
        if op[1] == "init":
            address = self.place(operands[0])
            assert address not in self.block.mbarriers
            assert address % 8 == 0
            assert address + 8 <= SMEM_BASE + self.block.smem.size
            count = self.one(operands[1])
            self.block.mbarriers[address] = [count, count, 0, 0]
            return
        assert self.active.sum() == 1
        assert op[1] == "arrive"
        bytes_ = self.one(operands[2]) if op[2] == "expect_tx" else 0
        self.block.arrive(self.place(operands[1]), bytes_)

    def rendezvous(self, which: int, threads: int, vote: bool = False, *, stay: bool = True) -> bool | None:
        """Arrives at a named barrier; None until it is complete, then the vote. stay: whether the warp waits for it."""
        waiting, results = self.block.named.setdefault(which, ({}, {}))
        if stay and self.index in results:
            return results.pop(self.index)
        assert stay or self.index not in waiting, "a warp arrives for the next round before this one is complete"
        waiting[self.index] = vote, stay
        if 32 * len(waiting) < threads:
            return None
        assert 32 * len(waiting) == threads, "barrier of another size"
        outcome = any(vote for vote, _ in waiting.values())
        results.update({index: outcome for index, (_, stay) in waiting.items() if stay})
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

    op_setmaxnreg = op_fence = Cta.op_nothing

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
        self.block.write(where, rows.reshape(-1))
        self.block.complete(self.place(barrier), rows.size)

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
        self.open.append((int(offsets.min()), int(offsets.max()) + 1))
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
                self.flying.popleft()
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

    # ---- lanes

    def op_shfl(self, op, operands):
        assert self.active.all(), "a shuffle in a divergent warp"
        value, lane = self.get(operands[1]), np.arange(32)
        by = self.get(operands[2]).astype(int)
        source = {"bfly": lane ^ by, "idx": by & 31, "up": lane - by}[op[2]]
        inside = source >= 0
        name, _, predicate = operands[0].partition("|")
        self.put(name, np.where(inside, value[source], value))
        if predicate:
            self.put(predicate, inside.astype(U64))

    def op_vote(self, op, operands):
        assert self.active.all()
        vote = self.get(operands[1]) != 0
        if op[2] == "ballot":
            self.put(operands[0], np.full(32, sum(1 << i for i in range(32) if vote[i]), U64))
        else:
            self.put(operands[0], np.full(32, int(vote.any() if op[2] == "any" else vote.all()), U64))

    def op_popc(self, op, operands):
        self.put(operands[0], np.array([int(x & U64(0xFFFFFFFF)).bit_count() for x in self.get(operands[1])], U64))

    def op_prmt(self, op, operands):
        a, b, select = (self.get(x) for x in operands[1:])
        both = (a & U64(0xFFFFFFFF)) | (b << U64(32))
        out = np.zeros(32, U64)
        for i in range(4):
            chosen = (select >> U64(4 * i)) & U64(15)
            assert (chosen < 8).all()
            out |= ((both >> (chosen * U64(8))) & U64(0xFF)) << U64(8 * i)
        self.put(operands[0], out)

    def op_lg2(self, op, operands):
        self.put(operands[0], bits32(np.log2(f32(self.get(operands[1])).astype(np.float64))))

    def op_setp(self, op, operands):
        kind = op[-1]
        if kind == "f32":
            a, b = (f32(self.get(x)) for x in operands[1:])
        elif kind[0] == "s":
            a, b = (signed(self.get(x), int(kind[1:])) for x in operands[1:])
        else:
            a, b = (wrap(self.get(x), int(kind[1:])) for x in operands[1:])
        base = op[1].removesuffix("u") if op[1] not in ("eq", "ne") and kind == "f32" else op[1]
        compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                   "ge": np.greater_equal}[base]  # fmt: skip
        result = compare(a, b)
        if kind == "f32":
            nan = np.isnan(a) | np.isnan(b)
            result = np.where(nan, op[1].endswith("u"), result)
        self.put(operands[0], result.astype(U64))

    def op_div(self, op, operands):
        if op[-1] == "s32":
            a, b = (signed(self.get(x), 32) for x in operands[1:])
            quotient = np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))
            self.put(operands[0], wrap(quotient, 32))
        else:
            super().op_div(op, operands)

    def op_cvt(self, op, operands):
        if op[-1] == "e4m3x2":
            raw = self.get(operands[1])
            low, high = (f16_bits(E4M3[((raw >> U64(8 * i)) & U64(0xFF)).astype(int)]) for i in range(2))
            self.put(operands[0], low | (high << U64(16)))
        elif op[-2] == "e4m3x2":
            hi, lo = (e4m3_bits(f32(self.get(n))) for n in operands[1:])
            self.put(operands[0], lo | (hi << U64(8)))
        else:
            super().op_cvt(op, operands)


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
                block = Block(shape.smem, maps, late or [])
                block.warps = [Warp(code, block, i, (x, y, z), shape.grid) for i in range(code.threads // 32)]
                for warp in block.warps:
                    warp.start(arguments, memory.buffers)
                left = list(block.warps)
                while left:
                    rnd.shuffle(left)
                    steps = [warp.advance(rnd.choice((5, 50, 500, 5000))) for warp in left]
                    total += sum(steps)
                    left = [warp for warp in left if not warp.done]
                    waits = {w.index: w.blocked for w in left}
                    assert sum(steps) or not left, f"every warp waits: {waits}, barriers {block.mbarriers}"
                assert any(warp.waited for warp in block.warps), "a CTA that never waits for the kernel before"
    return total
