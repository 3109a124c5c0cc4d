"""Runs the PTX of a kernel for one thread-block cluster on the CPU, all threads at once (numpy lanes).

For kernels that branch forward only: statements run in program order, each for the threads that reach it, in all CTAs
of the cluster together. So barriers need no scheduling; what they must protect is checked instead:

* cp.async data appears at the thread's wait_group, st.async data at the wait on its mbarrier: not a statement earlier;
* an mbarrier must have got exactly the bytes that it expects when it is waited for, and nothing before a cluster
  barrier that followed its setup;
* a shared word that another thread wrote, or read, since the last block barrier may not be read, or written;
* global accesses must be aligned and lie in a buffer that the caller gave, and stores in a writable one; buffers that
  an earlier kernel writes may be touched only after griddepcontrol.wait.

Not modelled: MMA rounding (sums of exact products in float64, rounded once), caches, timing.
"""

import re
from dataclasses import dataclass, field

import numpy as np
from ptx_values import U64, bf16_bits, bf16_values, bits32, e4m3_bits, f32, signed, wrap

SMEM_BASE = 1024  # of a CTA's dynamic shared memory in its own window
RANK_SHIFT = 24  # shared::cluster address = rank << 24 | shared address


@dataclass
class Buffer:
    """A global allocation: `data` is uint8, changed in place if `writable`; `address` is invented, 256-byte aligned."""

    data: np.ndarray
    writable: bool = False
    address: int = 0
    constant: bool = True  # no earlier kernel of the stream writes it
    written: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.written = np.zeros(self.data.shape, bool)


class Program:
    """The statements of the only kernel of a PTX module, and its parameters' kinds."""

    def __init__(self, text: str):
        text = re.sub(r"//[^\n]*", "", text)
        entry = text[text.index(".entry") :]
        self.params = re.findall(r"\.param \.(\w+) (\w+)", entry[: entry.index("{")])
        self.threads = int(re.search(r"\.reqntid (\d+)", entry)[1])
        body = entry[entry.index("{") + 1 : entry.rindex("}")]
        body = re.sub(
            r"\{[^{}]*WAIT: mbarrier\.try_wait\.parity\.(\S+) p, \[(\S+)\], 0;[^{}]*\}", r"mbarrier.wait.\1 [\2];", body
        )
        body = re.sub(r"(\$\w+):", r"label \1;", body)
        # Braces of a scope stand before a statement or after a ';', those of a vector inside a statement.
        body = re.sub(r"(^|;)\s*(?:[{}]\s*)+", r"\1 ", body.replace("\n", " "))
        body = re.sub(r";\s*(?:[{}]\s*)+", "; ", body)
        self.statements = []
        for raw in body.split(";"):
            raw = raw.strip()
            if not raw or raw.startswith(".reg"):
                continue
            guard = re.match(r"@(!?)(\S+)\s+", raw)
            rest = raw[guard.end() :] if guard else raw
            op, _, operands = rest.partition(" ")
            split = [o.strip() for o in re.split(r",(?![^{\[]*[}\]])", operands)] if operands.strip() else []
            self.statements.append((raw, (guard[2], guard[1] == "!") if guard else None, op.split("."), split))
        self.labels = {s[3][0]: i for i, s in enumerate(self.statements) if s[2] == ["label"]}


class Cluster:
    """One cluster of `ctas` CTAs along x. run() executes the program and returns nothing: see the buffers."""

    def __init__(self, program: Program, ctas: int, smem: int, grid: tuple[int, int, int], y: int, z: int):
        self.program, self.ctas, self.size = program, ctas, program.threads
        self.lanes = ctas * program.threads
        self.rank = np.repeat(np.arange(ctas), program.threads)
        self.tid = np.tile(np.arange(program.threads), ctas)
        self.special = {
            "%tid.x": self.tid, "%ctaid.x": self.rank, "%ctaid.y": np.full(self.lanes, y),
            "%ctaid.z": np.full(self.lanes, z), "%nctaid.y": np.full(self.lanes, grid[1]),
        }  # fmt: skip
        self.smem = np.zeros((ctas, smem), np.uint8)
        self.ready = np.zeros((ctas, smem), bool)
        self.writer = np.full((ctas, smem), -1)
        self.reader = np.full((ctas, smem), -1)  # -2: several
        self.barriers: dict[tuple[int, int], list[int]] = {}  # (rank, offset) -> [expected, arrived]
        self.in_flight: dict[tuple[int, int], list] = {}
        self.copies: list = []
        self.announced: set[tuple[int, int]] = set()  # barriers set up before the last cluster arrive
        self.visible: set[tuple[int, int]] = set()  # ... before the last cluster wait
        self.waited = False  # griddepcontrol.wait
        self.uninitialized = 0

    def run(self, arguments: list[int], buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.regs: dict[str, np.ndarray] = {}
        self.arguments = {name: value for (_, name), value in zip(self.program.params, arguments, strict=True)}
        resume = np.zeros(self.lanes, int)
        for index, (raw, guard, op, operands) in enumerate(self.program.statements):
            active = resume <= index
            if guard and active.any():  # a predicate of a branch that nobody took was never set
                active = active & ((self.regs[guard[0]] != 0) ^ guard[1])
            if not active.any() or op[0] == "label":
                continue
            if op[0] == "bra":
                resume[active] = self.program.labels[operands[0]]
                continue
            if op[0] == "ret":
                resume[active] = 1 << 30
                continue
            self.active = active
            try:
                with np.errstate(all="ignore"):
                    getattr(self, "op_" + op[0])(op, operands)
            except Exception as e:
                raise AssertionError(f"statement {index}: {raw}: {e}") from e
        assert not any(self.in_flight.values()), "a store to a peer that nobody waited for"

    # ---- operands -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> np.ndarray:
        if name in self.regs:
            return self.regs[name]
        if name in self.special:
            return self.special[name].astype(U64)
        if name.startswith("__dynamic"):
            return np.full(self.lanes, SMEM_BASE, U64)
        if name.startswith("0f"):
            return np.full(self.lanes, int(name[2:], 16), U64)
        return np.full(self.lanes, int(name, 0) & (1 << 64) - 1, U64)

    def put(self, name: str, bits: np.ndarray) -> None:
        old = self.regs.get(name)
        self.regs[name] = np.where(self.active, bits, U64(0) if old is None else old)

    @staticmethod
    def vector(operand: str) -> list[str]:
        return [x.strip() for x in operand.strip("{}").split(",")]

    def where(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return self.get(base.strip()) + U64(int(offset or "0", 0) & (1 << 64) - 1)

    # ---- memory -------------------------------------------------------------------------------------------------

    def find(self, address: np.ndarray, size: int, store: bool):
        """(lanes, buffer, offsets) of the active lanes, a buffer at a time."""
        wanted = address[self.active]
        assert not (wanted % U64(size)).any(), f"misaligned {size}-byte access"
        left = self.active.copy()
        for buffer in self.buffers:
            low, high = U64(buffer.address), U64(buffer.address + buffer.data.size - size)
            mine = left & (address >= low) & (address <= high)
            if mine.any():
                assert buffer.writable or not store, "store to a buffer that is only read"
                assert buffer.constant or self.waited, "access before the grid dependency wait"
                yield np.flatnonzero(mine), buffer, (address[mine] - low).astype(int)
                left &= ~mine
        assert not left.any(), f"out of bounds: {[hex(int(a)) for a in address[left][:4]]}"

    def load_global(self, address: np.ndarray, size: int) -> np.ndarray:
        out = np.zeros((self.lanes, size), np.uint8)
        for lanes, buffer, offsets in self.find(address, size, store=False):
            out[lanes] = buffer.data[offsets[:, None] + np.arange(size)]
        return out

    def local(self, address: np.ndarray):
        """Rank and offset of own (no rank bits) or cluster addresses."""
        rank = (address >> U64(RANK_SHIFT)).astype(int)
        offset = (address & U64((1 << RANK_SHIFT) - 1)).astype(int) - SMEM_BASE
        return rank, offset

    def shared_index(self, address: np.ndarray, size: int):
        lanes = np.flatnonzero(self.active)
        offset = address[lanes].astype(int) - SMEM_BASE
        inside = (offset >= 0) & (offset + size <= self.smem.shape[1])
        assert inside.all(), "out of shared memory"
        assert not (offset % size).any(), f"misaligned {size}-byte shared access"
        return lanes, self.rank[lanes][:, None], offset[:, None] + np.arange(size)

    def load_shared(self, address: np.ndarray, size: int) -> np.ndarray:
        lanes, rank, offsets = self.shared_index(address, size)
        writer = self.writer[rank, offsets]
        assert ((writer < 0) | (writer == lanes[:, None])).all(), "race: read of another thread's write, no barrier"
        self.uninitialized += int((~self.ready[rank, offsets]).sum())
        reader = self.reader[rank, offsets]
        self.reader[rank, offsets] = np.where((reader == -1) | (reader == lanes[:, None]), lanes[:, None], -2)
        # Two lanes of this statement that read one byte: the later overwrote the earlier. Mark such bytes as shared.
        again = self.reader[rank, offsets]
        self.reader[rank, offsets] = np.where(again == lanes[:, None], again, -2)
        out = np.zeros((self.lanes, size), np.uint8)
        out[lanes] = self.smem[rank, offsets]
        return out

    def store_shared(self, address: np.ndarray, data: np.ndarray) -> None:
        lanes, rank, offsets = self.shared_index(address, data.shape[1])
        for what, owner in (("write", self.writer), ("read", self.reader)):
            seen = owner[rank, offsets]
            assert ((seen == -1) | (seen == lanes[:, None])).all(), f"race: write after another thread's {what}"
        self.smem[rank, offsets] = data[lanes]
        self.ready[rank, offsets] = True
        self.writer[rank, offsets] = lanes[:, None]
        assert (self.writer[rank, offsets] == lanes[:, None]).all(), "race: two lanes write one byte"

    def bytes_of(self, names: list[str], width: int) -> np.ndarray:
        words = np.stack([self.get(n) for n in names], 1)
        raw = words.astype({2: np.uint16, 4: np.uint32, 8: np.uint64}[width])
        return np.ascontiguousarray(raw).view(np.uint8)

    def spread(self, names: list[str], data: np.ndarray, width: int) -> None:
        words = np.ascontiguousarray(data).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[width])
        for i, name in enumerate(names):
            self.put(name, words[:, i].astype(U64))

    def op_ld(self, op, operands):
        width = int(op[-1][1:]) // 8
        if op[1] == "param":
            self.put(operands[0], np.full(self.lanes, self.arguments[operands[1].strip("[]")], U64))
            return
        names = self.vector(operands[0])
        load = self.load_global if op[1] == "global" else self.load_shared
        self.spread(names, load(self.where(operands[1]), width * len(names)), width)

    def op_st(self, op, operands):
        width = int(op[-1][1:]) // 8
        names = self.vector(operands[1])
        data = self.bytes_of(names, width)
        address = self.where(operands[0])
        if op[1] == "async":
            self.send(address, data, self.where(operands[2]))
        elif op[1] == "shared":
            self.store_shared(address, data)
        else:
            assert op[1] == "global"
            for lanes, buffer, offsets in self.find(address, data.shape[1], store=True):
                index = offsets[:, None] + np.arange(data.shape[1])
                assert np.unique(index).size == index.size, "two lanes store to one byte"
                assert not buffer.written[index].any(), "a byte stored twice"
                buffer.data[index] = data[lanes]
                buffer.written[index] = True

    def send(self, address, data, barrier) -> None:
        rank, offset = self.local(address)
        barrier_rank, barrier_offset = self.local(barrier)
        for lane in np.flatnonzero(self.active):
            assert rank[lane] == barrier_rank[lane], "data and barrier in different CTAs"
            key = (int(rank[lane]), int(barrier_offset[lane]))
            assert key in self.visible, "store on a barrier whose setup no cluster barrier made visible"
            assert offset[lane] % data.shape[1] == 0
            self.barriers[key][1] += data.shape[1]
            self.in_flight.setdefault(key, []).append((int(offset[lane]), data[lane]))

    def op_mbarrier(self, op, operands):
        if op[1] == "wait":
            for rank in np.unique(self.rank[self.active]):
                offsets = np.unique(self.local(self.where(operands[0]))[1][self.active & (self.rank == rank)])
                assert offsets.size == 1
                key = (int(rank), int(offsets[0]))
                expected, arrived = self.barriers[key]
                assert expected == arrived, f"barrier {key}: {arrived} of {expected} bytes"
                for offset, data in self.in_flight.pop(key, []):
                    where = slice(offset, offset + data.size)
                    for owner in (self.writer, self.reader):
                        assert (owner[rank, where] == -1).all(), "race: a peer's store after an access, no barrier"
                    self.smem[rank, where] = data
                    self.ready[rank, where] = True
            return
        address = self.where(operands[0] if op[1] == "init" else operands[1])
        for lane in np.flatnonzero(self.active):
            key = (int(self.rank[lane]), int(address[lane]) - SMEM_BASE)
            if op[1] == "init":
                assert key not in self.barriers
                self.barriers[key] = [0, 0]
            else:
                self.barriers[key][0] += int(operands[2])

    def op_cp(self, op, operands):
        assert op[1] == "async"
        if op[2] == "cg":
            self.copies.append((self.active, self.where(operands[0]), self.load_global(self.where(operands[1]), 16)))
        elif op[2] == "wait_group":
            active = self.active
            for mask, address, data in self.copies:
                assert not (mask & ~active).any()
                self.active = mask
                self.store_shared(address, data)
            self.active, self.copies = active, []

    def op_bar(self, op, operands):
        assert self.active.all(), "a barrier that not all threads reach"
        self.writer[:] = -1
        self.reader[:] = -1

    def op_barrier(self, op, operands):
        assert op[1] == "cluster"
        assert self.active.all()
        if op[2] == "arrive":
            self.announced = set(self.barriers)
        else:
            self.visible, self.announced = self.announced, set()

    def op_griddepcontrol(self, op, operands):
        assert self.active.all()
        self.waited = self.waited or op[1] == "wait"

    def op_nothing(self, op, operands):
        pass

    op_fence = op_createpolicy = op_nothing

    def op_mapa(self, op, operands):
        own, rank = self.get(operands[1]), self.get(operands[2])
        assert (rank[self.active] < U64(self.ctas)).all()
        self.put(operands[0], own | (rank << U64(RANK_SHIFT)))

    # ---- warps --------------------------------------------------------------------------------------------------

    def op_shfl(self, op, operands):
        value = self.get(operands[1]).reshape(-1, 32)
        lane = int(operands[2])
        assert (self.active.reshape(-1, 32).sum(1) % 32 == 0).all(), "shuffle in a divergent warp"
        source = np.arange(32) ^ lane if op[2] == "bfly" else np.full(32, lane)
        self.put(operands[0].split("|")[0], value[:, source].reshape(-1))

    def op_ldmatrix(self, op, operands):
        assert {"trans", "x4"} <= set(op)
        assert self.active.all()
        rows = self.load_shared(self.where(operands[1]), 16).view(np.uint16).reshape(-1, 4, 8, 8)  # warp, matrix, row
        lane = np.arange(32)
        g, c = lane // 4, lane % 4
        for i, name in enumerate(self.vector(operands[0])):
            lo, hi = rows[:, i, 2 * c, g].astype(U64), rows[:, i, 2 * c + 1, g].astype(U64)
            self.put(name, (lo | (hi << U64(16))).reshape(-1))

    def op_mma(self, op, operands):
        assert op[3] == "m16n8k16"
        assert self.active.all()
        d, a, b, c = (self.vector(o) for o in operands)

        def halves(name):
            """[warp][g][c][low or high half]"""
            bits = self.get(name)
            return np.stack([bf16_values(bits), bf16_values(bits >> U64(16))], -1).reshape(-1, 8, 4, 2)

        A = np.zeros((self.lanes // 32, 16, 16))
        for i, name in enumerate(a):  # [warp][g][c][half] -> row g + 8 (i & 1), k = 2c + half + 8 (i >> 1)
            A[:, 8 * (i & 1) : 8 * (i & 1) + 8, 8 * (i >> 1) : 8 * (i >> 1) + 8] = halves(name).reshape(-1, 8, 8)
        B = np.zeros((self.lanes // 32, 16, 8))
        for i, name in enumerate(b):
            B[:, 8 * i : 8 * i + 8] = halves(name).reshape(-1, 8, 8).transpose(0, 2, 1)
        # A NaN in one row or column must not reach another: einsum over k keeps them apart.
        D = np.einsum("wmk,wkn->wmn", A, B)
        lane = np.arange(32)
        for i, name in enumerate(d):
            row, column = lane // 4 + 8 * (i >> 1), 2 * (lane % 4) + (i & 1)
            total = (D[:, row, column] + f32(self.get(c[i])).astype(np.float64).reshape(-1, 32)).astype(np.float32)
            self.put(name, bits32(total.reshape(-1)))

    # ---- arithmetic ---------------------------------------------------------------------------------------------

    def op_mov(self, op, operands):
        width = int(op[-1][1:])
        if operands[0].startswith("{"):
            names = self.vector(operands[0])
            part = width // len(names)
            for i, name in enumerate(names):
                self.put(name, wrap(self.get(operands[1]) >> U64(i * part), part))
        elif operands[1].startswith("{"):
            names = self.vector(operands[1])
            part = width // len(names)
            self.put(operands[0], sum(wrap(self.get(n), part) << U64(i * part) for i, n in enumerate(names)))
        else:
            self.put(operands[0], wrap(self.get(operands[1]), 1 if op[-1] == "pred" else width))

    def lanes2(self, name):
        bits = self.get(name)
        return f32(bits), f32(bits >> U64(32))

    def op_fma(self, op, operands):
        if op[-1] == "f32x2":
            (al, ah), (bl, bh), (cl, ch) = (self.lanes2(n) for n in operands[1:])
            low, high = self.fused(al, bl, cl), self.fused(ah, bh, ch)
            self.put(operands[0], bits32(low) | (bits32(high) << U64(32)))
        else:
            self.put(operands[0], bits32(self.fused(*(f32(self.get(n)) for n in operands[1:]))))

    @staticmethod
    def fused(a, b, c):
        # The product is exact in float64; of the sum's second rounding float32 sees a tie at most: not modelled.
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def op_mul(self, op, operands):
        kind = op[-1]
        if kind == "f32x2":
            (al, ah), (bl, bh) = (self.lanes2(n) for n in operands[1:])
            self.put(operands[0], bits32(al * bl) | (bits32(ah * bh) << U64(32)))
        elif kind == "f32":
            self.put(operands[0], bits32(f32(self.get(operands[1])) * f32(self.get(operands[2]))))
        else:
            self.put(operands[0], self.product(op, operands))

    def product(self, op, operands):
        kind, width = op[-1][0], int(op[-1][1:])
        a, b = (signed(self.get(n), width) if kind == "s" else wrap(self.get(n), width) for n in operands[1:3])
        if op[1] == "hi":
            assert width <= 32
            return wrap((a.astype(np.int64) * b.astype(np.int64)) >> width, width)
        return wrap(a * b, 2 * width if op[1] == "wide" else width)

    def op_mad(self, op, operands):
        width = int(op[-1][1:])
        self.put(operands[0], wrap(self.product(op, operands) + self.get(operands[3]), width))

    def binary(self, op, operands, f):
        width = int(op[-1][1:])
        if op[-1][0] == "s":
            a, b = (signed(self.get(n), width) for n in operands[1:3])
        else:
            a, b = (wrap(self.get(n), width) for n in operands[1:3])
        self.put(operands[0], wrap(f(a, b), width))

    def op_add(self, op, operands):
        if op[-1] == "f32":
            self.put(operands[0], bits32(f32(self.get(operands[1])) + f32(self.get(operands[2]))))
        else:
            self.binary(op, operands, lambda a, b: a + b)

    def op_sub(self, op, operands):
        self.binary(op, operands, lambda a, b: a - b)

    def op_min(self, op, operands):
        self.binary(op, operands, np.minimum)

    def op_shl(self, op, operands):
        width = int(op[-1][1:])
        count = self.get(operands[2]) & U64(0xFFFFFFFF)
        bits = wrap(self.get(operands[1]), width) << np.minimum(count, U64(63))
        self.put(operands[0], np.where(count >= width, U64(0), wrap(bits, width)))

    def op_shr(self, op, operands):
        width = int(op[-1][1:])
        count = np.minimum(self.get(operands[2]) & U64(0xFFFFFFFF), U64(width - 1 if op[-1][0] == "s" else 63))
        if op[-1][0] == "s":
            self.put(operands[0], wrap(signed(self.get(operands[1]), width) >> count.astype(np.int64), width))
        else:
            self.put(operands[0], wrap(self.get(operands[1]), width) >> count)

    def logic(self, op, operands, f):
        width = 1 if op[-1] == "pred" else int(op[-1][1:])
        self.put(operands[0], wrap(f(*(self.get(n) for n in operands[1:])), width))

    def op_and(self, op, operands):
        self.logic(op, operands, lambda a, b: a & b)

    def op_or(self, op, operands):
        self.logic(op, operands, lambda a, b: a | b)

    def op_not(self, op, operands):
        self.logic(op, operands, lambda a: ~a)

    def op_setp(self, op, operands):
        width = int(op[-1][1:])
        a, b = (signed(self.get(n), width) if op[-1][0] == "s" else wrap(self.get(n), width) for n in operands[1:])
        compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                   "ge": np.greater_equal}[op[1]]  # fmt: skip
        self.put(operands[0], compare(a, b).astype(U64))

    def op_selp(self, op, operands):
        chosen = np.where(self.get(operands[3]) != 0, self.get(operands[1]), self.get(operands[2]))
        self.put(operands[0], wrap(chosen, int(op[-1][1:])))

    def op_div(self, op, operands):
        self.put(operands[0], bits32(f32(self.get(operands[1])) / f32(self.get(operands[2]))))

    def op_rsqrt(self, op, operands):
        self.put(operands[0], bits32(1.0 / np.sqrt(f32(self.get(operands[1])).astype(np.float64))))

    def op_cvt(self, op, operands):
        if op[-2] == "bf16x2":
            hi, lo = (bf16_bits(f32(self.get(n))) for n in operands[1:])
            self.put(operands[0], lo | (hi << U64(16)))
        elif op[-2] == "e4m3x2":
            assert "satfinite" in op
            hi, lo = (e4m3_bits(f32(self.get(n))) for n in operands[1:])
            self.put(operands[0], lo | (hi << U64(8)))
        else:
            width = int(op[-1][1:])
            value = signed(self.get(operands[1]), width) if op[-1][0] == "s" else wrap(self.get(operands[1]), width)
            self.put(operands[0], wrap(value, int(op[-2][1:])))
