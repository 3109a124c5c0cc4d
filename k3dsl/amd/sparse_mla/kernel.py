"""Device code of sparse MLA: one workgroup a token, its waves independent until they merge.

A wave takes every W-th tile of 32 keys. Its tile comes by LDS-DMA, whole records and each byte once, one tile ahead of
the arithmetic; nothing of a tile is shared between waves, so that the loop has no barrier.

  S = K Q^T     MFMA 16x16x32 bf16: rows are keys, columns are heads. Latents are read as fp8 and converted with their
                scale; queries stay in registers.
  softmax       of 8 keys a lane; the maximum over a tile by two lane exchanges. The reference of the exponentials moves
                only where the maximum has outgrown it by 2^8, so that accumulators are rarely rescaled.
  O^T = V^T P^T the lane that has a key's probability is the lane that the MFMA wants it from, so P stays in registers.
                V is the latents in LDS, read transposed; a key's scales multiply its probability instead.

Rounding: K, V and scale * V are exact in bf16 (scales are powers of two), P is rounded to bf16, all sums are fp32.

LDS of a wave: latents [2][32 keys][32 pieces of 16 bytes], rope [32][8 pieces], scales [2][32]. Piece c of a key lies
at c ^ f(key), so that neither the reads of 16 keys at one column nor the transposing ones meet in a bank.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import rocdl
from flydsl.expr.typing import T

from k3dsl.amd import primitives as p
from k3dsl.amd.sparse_mla.device import (
    bounded,
    either,
    extract,
    finite,
    lds_words,
    load_lds,
    load_to_lds,
    permuted,
    splat,
    store_lds,
    times_pair,
    transposed,
    wait_for_lds,
    wait_for_loads,
    widen,
)
from k3dsl.amd.sparse_mla.key import (
    LATENT_BYTES,
    MAX_WAVES,
    RECORD,
    ROPE_AT,
    ROPE_BYTES,
    SCALE_BYTES,
    SCALES_AT,
    TILE,
    WAVE,
    WAVE_BYTES,
    SparseMlaKey,
)

#: log2 of how far the maximum may outgrow the exponentials' reference: sums stay far below fp32's limit, and P, which
#: is then up to 2^8, has the same relative precision in bf16.
SLACK = 8.0
LN2 = 0.6931471805599453
COLUMNS = 32  # tiles of 16 latent columns
#: Reads of LDS in flight while values, and keys, are multiplied: a wave has its SIMD for itself, no other hides them.
AHEAD, KEYS_AHEAD = 8, 4
#: Where in a wave's LDS, behind the two tiles of latents.
ROPE_BASE = 2 * LATENT_BYTES
SCALE_BASE = ROPE_BASE + ROPE_BYTES


def trace(key: SparseMlaKey, target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The launcher to compile and its placeholder arguments."""

    @flyc.kernel(name=key.symbol)
    def kernel(
        q: fx.Pointer,
        kv: fx.Pointer,
        indices: fx.Pointer,
        indptr: fx.Pointer,
        out: fx.Pointer,
        lse: fx.Pointer,
        q_stride0: fx.Int32,
        q_stride1: fx.Int32,
        out_stride0: fx.Int32,
        out_stride1: fx.Int32,
        scale: fx.Float32,
        index_bytes: fx.Int32,
        waves: fx.Int32,
    ):
        Token(key, dict(locals())).run()

    @flyc.jit
    def launch(
        q: fx.Pointer,
        kv: fx.Pointer,
        indices: fx.Pointer,
        indptr: fx.Pointer,
        out: fx.Pointer,
        lse: fx.Pointer,
        q_stride0: fx.Int32,
        q_stride1: fx.Int32,
        out_stride0: fx.Int32,
        out_stride1: fx.Int32,
        scale: fx.Float32,
        index_bytes: fx.Int32,
        waves: fx.Int32,
        stream: fx.Stream = fx.Stream(None),  # noqa: B008
    ):
        kernel(
            q, kv, indices, indptr, out, lse, q_stride0, q_stride1, out_stride0, out_stride1, scale, index_bytes, waves
        ).launch(grid=(1, 1, 1), block=(waves * WAVE, 1, 1), stream=stream)  # a size that is not known: up to 256

    pointer = flyc.from_c_void_p(fx.Int32, None, assumed_align=4)
    one = fx.Int32(1)
    arguments = (*[pointer] * 6, *[one] * 4, fx.Float32(1.0), one, one)
    return launch, arguments, {"waves_per_eu": 1}


class Token:
    """One workgroup's token. Compile-time facts in the key, traced values in the attributes."""

    def __init__(self, key: SparseMlaKey, arguments: dict[str, Any]) -> None:
        self.key = key
        self.a = {
            name: p.address(value) if isinstance(value, fx.Pointer) else value
            for name, value in arguments.items()
            if name not in ("key", "self")
        }
        thread = fx.Int32(fx.thread_idx.x)
        self.token = fx.Int32(fx.block_idx.x)
        self.lane = thread % WAVE
        self.wave = p.uniform(p.shr(thread, 6))
        self.head = self.lane % 16  # of a column of S and O^T
        self.group = p.shr(self.lane, 4)  # rows 4 * group.. of an accumulator, elements 8 * group.. of K
        self.base = self.wave * WAVE_BYTES  # in LDS
        self.places()

    def places(self) -> None:
        """What of a lane's addresses is the same for every tile."""
        lane, head, group = self.lane, self.head, self.group
        half = p.shr(lane, 5)
        kv = self.a["kv"]
        # sources of the DMA: load j of the latents brings keys 2j and 2j + 1, its bytes in LDS at 1024 j
        piece = (lane % 32) ^ half
        self.latent_source = [kv + p.long((piece ^ (2 * k)) * 16) - fx.Int64(1024 * (k % 4)) for k in range(8)]
        self.latent_lane = half * 4
        # load r of the rope parts brings keys 8r..8r + 7
        piece = (lane % 8) ^ group
        self.rope_source = [kv + p.long((piece ^ (4 * (r % 2))) * 16) + fx.Int64(ROPE_AT - 1024 * r) for r in range(4)]
        self.rope_lane = p.shr(lane, 3) * 4
        self.scale_source = kv + fx.Int64(SCALES_AT)
        # QK: lane reads piece 4c + group of key `head`, then of key 16 + head
        self.key_place = self.base + head * 512 + (head ^ group) * 16
        self.rope_place = self.base + ROPE_BASE + head * 128 + ((p.shr(head, 1) % 8) ^ group) * 16
        # PV: lanes 2r, 2r + 1 of a group read the halves of a piece of its r-th key: 4 group + r, then 16 + 4 group + r
        row = p.shr(head, 1)
        near = group * 4 + (row % 4)
        late = p.shr(row, 2)  # rows 4 to 7 are keys of the second block
        self.value_place = self.base + (near + late * 16) * 512 + (near ^ (late * 8)) * 16 + (head % 2) * 8

    # ---- the keys of a tile

    def load_index(self, position: fx.Int32) -> fx.Int32:
        """Entry `position + lane % 32` of the index list, the list's last one past its end."""
        at = p.umin(position + self.lane % 32, self.end - 1)
        return p.load(self.index_buffer, at * 4)[0]

    def choose_keys(self, index: fx.Int32) -> tuple[fx.Int32, fx.Int32]:
        """The records to load, and the lanes (of 32) whose entry is a key. Masked entries are replaced by the first key
        of the tile: what is gathered is a key of the list or nothing."""
        if not self.key.has_invalid:
            return index, fx.Int32(-1)
        valid = index >= fx.Int32(0)
        found = p.lanes(valid)
        some = p.truncate(found)
        first = p.first_lane(found | fx.Int64(1 << 32)) & 31
        substitute = fx.Int32(rocdl.readlane(T.i32, p.word(index), p.word(first)))
        return p.choose(valid, index, substitute), some

    def request(self, slots: fx.Int32, buffer: fx.Int32) -> None:
        """Issues the loads of a tile, 32 records, into LDS: 656 bytes each, none twice."""
        size = fx.Int64(RECORD)
        near = permuted(self.latent_lane, slots, [8 * j for j in range(16)])
        latents = self.base + buffer * LATENT_BYTES
        for j in range(0, 16, 4):
            # key 2j has its pieces permuted by f(2j) = 2j & 15 ^ (16 & 2j) / 2
            shuffle = [((2 * i) & 15) ^ ((2 * i & 16) >> 1) for i in range(j, j + 4)]
            addresses = [p.long(near[j + i]) * size + self.latent_source[shuffle[i] // 2] for i in range(4)]
            load_to_lds(latents + j * 1024, addresses)
        near = permuted(self.rope_lane, slots, [32 * r for r in range(4)])
        load_to_lds(self.base + ROPE_BASE, [p.long(near[r]) * size + self.rope_source[r] for r in range(4)])
        own = p.long(slots) * size + self.scale_source
        load_to_lds(self.base + SCALE_BASE + buffer * SCALE_BYTES, [own], lanes=32)

    # ---- one token

    def run(self) -> None:
        a = self.a
        begin, self.end = (p.scalar_load(a["indptr"], (self.token + k) * 4)[0] for k in range(2))
        bounds = fx.Int32(a["index_bytes"])
        self.index_buffer = bounded(a["indices"], bounds)
        self.load_query()
        step = fx.Int32(a["waves"]) * TILE
        start = begin + self.wave * TILE
        index = self.load_index(start)

        def begin_tile() -> list[Any]:
            slots, mask = self.choose_keys(index)
            when_any(mask, self.key, lambda: self.request(slots, fx.Int32(0)))
            return [mask, self.load_index(start + step)]

        none = [fx.Int32(0), fx.Int32(0)]
        mask, following = either(start < self.end, begin_tile, none)
        zero = p.zeros()
        state = [start, fx.Int32(0), mask, following, fx.Float32(float("-inf")), fx.Float32(0.0), *[zero] * COLUMNS]
        final = p.repeat(state, lambda s: fx.Int32(s[0]) < self.end, lambda s: self.tile(s, step))
        self.finish(fx.Float32(final[4]), fx.Float32(final[5]), final[6:])

    def load_query(self) -> None:
        """Queries in the order of the keys' pieces: 16 columns at 64 c + 16 group, and the rope part in order. Columns
        past the last head repeat the first one's query; they are not stored."""
        a = self.a
        row = a["q"] + fx.Int64(fx.Int32(self.token)) * fx.Int64(fx.Int32(a["q_stride0"])) * fx.Int64(2)
        buffer = p.resource(row)
        head = self.head if self.key.heads == 16 else p.choose(self.head < self.key.heads, self.head, fx.Int32(0))
        at = head * fx.Int32(a["q_stride1"]) * 2
        offsets = [at + self.group * 32 + 128 * c + 16 * half for c in range(8) for half in range(2)]
        offsets += [at + self.group * 16 + 1024 + 64 * c for c in range(2)]
        self.query = [p.load_vector(buffer, offset, 4) for offset in offsets]

    def tile(self, state: Sequence[ir.Value], step: fx.Int32) -> list[Any]:
        """One tile; the next one is requested before this one's arithmetic."""
        start, buffer, mask, following = (fx.Int32(v) for v in state[:4])
        wait_for_loads()
        rope = [lds_words(self.rope_place ^ (64 * c), 2048 * b) for b in range(2) for c in range(2)]
        wait_for_lds()

        def request_next() -> list[Any]:
            slots, some = self.choose_keys(following)
            when_any(some, self.key, lambda: self.request(slots, buffer ^ 1))
            return [some, self.load_index(start + step * 2)]

        next_mask, after = either(start + step < self.end, request_next, [fx.Int32(0), fx.Int32(0)])

        left = self.end - start
        inside = p.choose(left < TILE, (fx.Int32(1) << (left % 32)) - 1, fx.Int32(-1))
        present = mask & inside
        attend = lambda: self.attend(state[4:], present, buffer, rope)  # noqa: E731
        done = either(present != 0, attend, state[4:]) if self.key.has_invalid else attend()
        return [start + step, buffer ^ 1, next_mask, after, *done]

    def attend(self, state: Sequence[Any], present: fx.Int32, buffer: fx.Int32, rope: list) -> list[Any]:
        """Scores, softmax and the weighted sum of the keys in LDS."""
        scores = self.scores(buffer, rope)
        # on their way while the softmax is computed: the scales of its keys, and the first values
        scale_place = self.base + SCALE_BASE + buffer * SCALE_BYTES + self.group * 64
        key_scales = [lds_words(scale_place, 256 * b + 16 * i) for b in range(2) for i in range(4)]
        place = self.value_place + buffer * LATENT_BYTES
        values = [transposed(place ^ (16 * n), 0) for n in range(AHEAD)]
        p.schedule_fence()
        factor = fx.Float32(self.a["scale"])
        scores = [s * factor for s in scores]
        scores = either(present != -1, lambda: self.masked(scores, present), scores)
        scores = [fx.Float32(s) for s in scores]

        reference, total = fx.Float32(state[0]), fx.Float32(state[1])
        most = scores[0]
        for s in scores[1:]:
            most = p.larger(most, s)
        most = p.butterfly(most, (16, 32), p.larger)

        def rescale() -> list[Any]:
            new = p.larger(reference, most)
            alpha = p.exp2(reference - finite(new))
            wide = splat(alpha)
            return [new, total * alpha, *(fx.Vector(v) * fx.Vector(wide) for v in state[2:])]

        outgrown = p.lanes(most > reference + fx.Float32(SLACK)) != fx.Int64(0)
        reference, total, *sums = either(outgrown, rescale, state)
        base = finite(fx.Float32(reference))
        powers = [p.exp2(s - base) for s in scores]
        total = fx.Float32(total)
        for value in powers:
            total = total + value

        # two quarters at once, whose scales lie side by side
        scaled = [times_pair(v, key_scales[i], pair) for i, v in enumerate(powers) for pair in range(2)]
        weights = []
        for quarter in range(4):
            mine = [scaled[2 * i + quarter // 2][quarter % 2] for i in range(8)]
            weights.append(p.join([p.pack_bf16(mine[i], mine[i + 1]) for i in range(0, 8, 2)]))
        ready = None
        for n in range(COLUMNS):  # reads run AHEAD, conversions one step ahead of the products
            if n + AHEAD < COLUMNS:
                values.append(transposed(place ^ (16 * ((n + AHEAD) % 16)), 256 * ((n + AHEAD) // 16)))
            wide = widen(p.split(values[n], 2), fx.Float32(1.0))
            p.schedule_fence()
            if ready is not None:
                sums[n - 1] = p.mfma_bf16(ready, weights[(n - 1) // 8], sums[n - 1])
            ready = wide
        sums[-1] = p.mfma_bf16(ready, weights[-1], sums[-1])
        return [reference, total, *sums]

    def scores(self, buffer: fx.Int32, rope: list) -> list[fx.Float32]:
        """Products of the tile's keys and the queries: score 4 b + i is that of key 16 b + 4 group + i."""
        latents, scale_place = buffer * LATENT_BYTES, self.base + SCALE_BASE + buffer * SCALE_BYTES + self.head * 16
        scales = [lds_words(scale_place, 256 * b) for b in range(2)]
        order = [(block, c) for c in range(8) for block in range(2)]  # two sums in turn

        def read(block: int, c: int) -> ir.Value:
            return lds_words((self.key_place + latents) ^ (16 * (4 * c ^ 8 * block)), 8192 * block)

        raw = [read(*place) for place in order[:KEYS_AHEAD]]
        totals = [p.zeros(), p.zeros()]
        for block in range(2):
            for c in range(2):
                totals[block] = p.mfma_bf16(rope[2 * block + c], self.query[16 + c], totals[block])
        p.schedule_fence()
        ready: tuple[Any, ...] | None = None
        for c in range(8):
            for half in range(2):
                for block in range(2):
                    k = 2 * c + block
                    if half == 0 and k + KEYS_AHEAD < len(order):
                        raw.append(read(*order[k + KEYS_AHEAD]))
                    words = p.split(raw[k], 4)[2 * half : 2 * half + 2]
                    wide = widen(words, extract(scales[block], c // 2))
                    p.schedule_fence()
                    if ready is not None:
                        a, which, at = ready
                        totals[at] = p.mfma_bf16(a, self.query[which], totals[at])
                    ready = (wide, 2 * c + half, block)
        assert ready is not None
        a, which, at = ready
        totals[at] = p.mfma_bf16(a, self.query[which], totals[at])
        return [s for total in totals for s in p.floats(total)]

    def masked(self, scores: list[fx.Float32], present: fx.Int32) -> list[fx.Float32]:
        """Scores of keys that are not there become -inf."""
        mine = p.shr(present, self.group * 4)
        return [
            p.choose((mine & (1 << (16 * (k // 4) + k % 4))) != 0, s, fx.Float32(float("-inf")))
            for k, s in enumerate(scores)
        ]

    def finish(self, reference: fx.Float32, total: fx.Float32, sums: Sequence[ir.Value]) -> None:
        """Merges the waves through LDS, each wave a part of the columns, and stores."""
        lane, key, waves = self.lane, self.key, fx.Int32(self.a["waves"])
        total = p.butterfly(total, (16, 32), p.add)
        for n in range(COLUMNS):
            store_lds(self.base + lane * 16, sums[n], 1024 * n)
        store_lds(self.base + lane * 4, reference, 2 * LATENT_BYTES)
        store_lds(self.base + lane * 4, total, 2 * LATENT_BYTES + 256)
        p.barrier()
        stats = []
        for w in range(MAX_WAVES):  # a wave that is not there counts nothing
            here = fx.Int32(w) < waves
            at = p.choose(here, fx.Int32(w * WAVE_BYTES), fx.Int32(0)) + lane * 4
            m = fx.Float32(load_lds(at, T.f32, 2 * LATENT_BYTES))
            n = fx.Float32(load_lds(at, T.f32, 2 * LATENT_BYTES + 256))
            none = fx.Float32(float("-inf"))
            stats.append((p.choose(here, m, none), p.choose(here, n, fx.Float32(0.0))))
        top = stats[0][0]
        for m, _ in stats[1:]:
            top = p.larger(top, m)
        safe = finite(top)
        factors = [p.exp2(m - safe) for m, _ in stats]
        whole = fx.Float32(0.0)
        for (_, n), f in zip(stats, factors, strict=True):
            whole = whole + n * f
        empty = whole == fx.Float32(0.0)
        inverse = p.choose(empty, fx.Float32(0.0), fx.Float32(rocdl.rcp(T.f32, p.number(whole))))
        factors = [f * inverse for f in factors]

        a = self.a
        row = a["out"] + fx.Int64(self.token) * fx.Int64(fx.Int32(a["out_stride0"])) * fx.Int64(2)
        buffer = p.resource(row)
        offset = self.head * fx.Int32(a["out_stride1"]) * 2 + self.group * 8
        share = p.udiv(fx.Int32(COLUMNS), waves)  # of the column tiles

        def merge(values: list[ir.Value]) -> list[Any]:
            n = fx.Int32(values[0])
            parts = [fx.Float32(0.0)] * 4
            for w in range(MAX_WAVES):
                at = p.choose(fx.Int32(w) < waves, fx.Int32(w * WAVE_BYTES), fx.Int32(0)) + lane * 16 + n * 1024
                for i, value in enumerate(p.floats(load_lds(at, T.f32x4, 0))):
                    parts[i] = parts[i] + value * factors[w]
            words = [p.pack_bf16(parts[0], parts[1]), p.pack_bf16(parts[2], parts[3])]
            with p.when(self.head < key.heads):
                p.store(buffer, offset + n * 32, words)
            return [n + 1]

        p.repeat([share * self.wave], lambda v: fx.Int32(v[0]) < share * (self.wave + 1), merge)
        if key.lse:
            value = (top + fx.Float32(rocdl.log(T.f32, p.number(whole)))) * fx.Float32(LN2)
            value = p.choose(empty, fx.Float32(float("-inf")), value)
            target = p.resource(a["lse"] + fx.Int64(self.token) * fx.Int64(4 * key.heads))
            with p.when((self.wave == 0) & (lane < key.heads)):
                p.store(target, lane * 4, [p.bits(value)])


def when_any(mask: fx.Int32, key: SparseMlaKey, body: Callable[[], None]) -> None:
    """`body` unless no entry of a tile is a key."""
    if not key.has_invalid:
        body()
        return
    with p.when(mask != 0):
        body()
