"""The fused MLA epilogues on the device: concatenate, rotate, quantize, insert into the paged cache, in one launch.

The work of a token is a list of rows (its heads' keys or queries, its cache entry), cut into units of one 16-byte
store: 8 elements where the destination has 16 bits an element, 16 where it is e4m3. All units of all tokens form one
flat list; a thread takes one of them (few tokens) or several (many), a CTA a contiguous stretch, so that a copy is as
coalesced as memory likes whatever the head count. What a unit reads and writes is chosen by selects, not branches: a
warp that holds a cache entry's end and the first key still has all its loads in flight together.

The 656-byte records of fp8_ds_mla need a maximum over 128 latents; they have CTAs of their own (the first ones, as
they take longest), one warp a record.

Before the grid dependency wait there is address arithmetic alone; every load follows it. Dependents are released at
once: their own wait is what protects what is written here.
"""

from types import SimpleNamespace
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute, select_
from cutlass.cute.runtime import make_fake_stream
from cutlass.cutlass_dsl import dsl_user_op

from k3dsl.nvidia import epilogue as facts
from k3dsl.nvidia.kernels.primitives import (
    ldg_if,
    ldg_pair_if,
    mul,
    pack_bf16,
    pack_e4m3x4,
    stg32_if,
    stg128_if,
    unpack_bf16,
)
from k3dsl.nvidia.kernels.ptx import emit

LATENT, ROPE, NOPE, V = 512, 64, 128, 128


@dsl_user_op
def _mad_wide(a, b, c, *, loc=None, ip=None):
    """c + a * b in 64 bits, a and b unsigned 32-bit."""
    return emit("mad.wide.u32 $0, $1, $2, $3;", "l", [("r", a), ("r", b), ("l", c)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def _entry_address(slot, a, *, loc=None, ip=None):
    """Address of cache entry `slot`. slot / block_size is a product and a shift that are exact below 2**31."""
    return emit(
        "{ .reg .b64 page, at; .reg .b32 p, off;"
        " mul.wide.u32 page, $1, $2; shr.u64 page, page, $3; cvt.u32.u64 p, page;"
        " mul.lo.u32 off, p, $4; sub.u32 off, $1, off; mad.wide.u32 at, off, $5, $6; mad.lo.u64 $0, page, $7, at; }",
        "l",
        [
            ("r", slot),
            ("r", a.block_mul),
            ("r", a.block_shift),
            ("r", a.block_size),
            ("r", a.row_stride),
            ("l", a.cache),
            ("l", a.page_stride),
        ],
        volatile=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _prefetch_if(address, live, *, loc=None, ip=None):
    """Ask L2 for a line if `live`. L2 is where all SMs meet, so it may be asked before the grid dependency wait; and as
    a memory operation it keeps the arithmetic of its address there too, which ptxas would otherwise move below."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p prefetch.global.L2 [$0]; }",
        ins=[("l", address), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _load_low_if(address, live, *, loc=None, ip=None):
    """The low word of a 64-bit integer if `live`, else 0."""
    return emit(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
        "r",
        [("l", address), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _load_floats_if(address, live, *, loc=None, ip=None):
    """Four float32 if `live`, else zeros."""
    return emit(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.f32 $0, 0f00000000; mov.f32 $1, $0; mov.f32 $2, $0; mov.f32 $3, $0;"
        " @p ld.global.v4.f32 {$0, $1, $2, $3}, [$4]; }",
        "ffff",
        [("l", address), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _load_scale(address, *, loc=None, ip=None):
    return emit("ld.global.f32 $0, [$1];", "f", [("l", address)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def _unpack_f16(word, *, loc=None, ip=None):
    return emit(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
        "ff",
        [("r", word)],
        volatile=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _pack_f16(lo, hi, *, loc=None, ip=None):
    return emit("cvt.rn.f16x2.f32 $0, $2, $1;", "r", [("f", lo), ("f", hi)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def _add(a, b, *, loc=None, ip=None):
    """Never contracted with a product: the rotation rounds as the definition in float32 does."""
    return emit("add.rn.f32 $0, $1, $2;", "f", [("f", a), ("f", b)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def _sub(a, b, *, loc=None, ip=None):
    return emit("sub.rn.f32 $0, $1, $2;", "f", [("f", a), ("f", b)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def _at_least(x, floor, *, loc=None, ip=None):
    """max(x, floor) where a NaN counts as missing."""
    return emit("max.f32 $0, $1, $2;", "f", [("f", x), ("f", floor)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def _larger_size(m, x, *, loc=None, ip=None):
    """max(m, |x|) where a NaN counts as missing."""
    return emit(
        "{ .reg .f32 t; abs.f32 t, $2; max.f32 $0, $1, t; }", "f", [("f", m), ("f", x)], volatile=False, loc=loc, ip=ip
    )


@dsl_user_op
def _tile_scale(amax, *, loc=None, ip=None):
    """(scale, 1 / scale) of a tile: the smallest power of two that is at least max(amax / 448, 1e-4).

    448 = 1.75 * 2**8, so 2**ceil(log2(amax / 448)) has amax's exponent less 8, and one more if the mantissa exceeds
    1.75: adding 0x1FFFFF to the bits carries into the exponent exactly then. The floor is 2**-13 = 2**ceil(log2(1e-4)).
    An infinite maximum keeps an infinite scale, as the formula has it.
    """
    return emit(
        "{ .reg .b32 e, i; .reg .pred p; add.u32 e, $2, 0x1FFFFF; shr.u32 e, e, 23; sub.s32 e, e, 8; max.s32 e, e, 114;"
        " sub.s32 i, 254, e; shl.b32 e, e, 23; shl.b32 i, i, 23; setp.eq.u32 p, $2, 0x7F800000;"
        " selp.b32 e, 0x7F800000, e, p; selp.b32 i, 0, i, p; mov.b32 $0, e; mov.b32 $1, i; }",
        "ff",
        [("r", amax)],
        volatile=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _bits(x, *, loc=None, ip=None):
    return emit("mov.b32 $0, $1;", "r", [("f", x)], volatile=False, loc=loc, ip=ip)


class Source(NamedTuple):
    """Where rows are read: address, bytes from token to token, bytes from row to row."""

    address: Int64
    token: Int32
    row: Int32


class Rows(NamedTuple):
    """A kind of row: `count` a token, `main` elements as they are, then `rope` ones, rotated if the key says so."""

    count: int
    main: int
    rope: int
    main_from: Source
    rope_from: Source
    out: Int64 | None  # address, rows one after another; None: in place
    scale: int = 0  # index of its inverse scale


class Unit(NamedTuple):
    """One thread's share: a store of 16 bytes and what it needs."""

    live: Boolean
    token: Uint32
    source: Int64
    target: Int64  # of a cache unit: what is added to the address of the entry
    cached: Boolean | None  # None: the key has no cache units in its list
    rope: Boolean
    pair: Uint32  # number of the unit's first pair of rotated elements
    scale: list  # [(condition, index)], the last true one holds


def pick(condition, yes, no):
    """`yes` if `condition` else `no`, as a select; of two sequences, the list of it."""
    if condition is True or yes is no:
        return yes
    if condition is False:
        return no
    if isinstance(yes, tuple | list):
        return [pick(condition, y, n) for y, n in zip(yes, no, strict=True)]
    return type(yes)(select_(condition, yes, no))


class Epilogue:
    """Compile-time facts of one key."""

    def __init__(self, key: facts.EpilogueKey):
        self.key = key
        self.fp8 = key.format == "fp8"
        self.records = key.format == "fp8_ds_mla"
        self.names = [p.name for p in key.params]
        self.unpack = unpack_bf16 if key.dtype == "bf16" else _unpack_f16
        self.pack = pack_bf16 if key.dtype == "bf16" else _pack_f16

    @cute.jit
    def __call__(self, args: tuple, stream: cuda.CUstream):
        self.kernel(args).launch(grid=(1, 1, 1), block=(facts.THREADS, 1, 1), smem=0, stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, args: tuple):
        a = SimpleNamespace(**dict(zip(self.names, args, strict=True)))
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = Int32(0)
        if cutlass.const_expr(self.records):
            first = (a.tokens + (facts.WARPS - 1)) // facts.WARPS
        if block < first:
            if cutlass.const_expr(self.records):
                self.record(a, Uint32(block * facts.WARPS + thread // 32), Uint32(thread % 32))
        else:
            at = Uint32(block - first) * (Uint32(a.per_thread) * facts.THREADS) + Uint32(thread)
            if a.per_thread == 1:
                self.copy(a, at, 1)
            else:
                self.copy(a, at, facts.most_per_thread(self.key))

    # ---- rows to units ------------------------------------------------------------------------------------------

    def rows(self, a) -> list[Rows]:
        """The rows of a token, the cache entry first."""
        key, none = self.key, Int32(0)
        rows = []
        if key.op != "context" and not self.records:
            entry = Source(a.kv_c, Int32(LATENT * 2), none)
            rows.append(Rows(1, LATENT, ROPE, entry, Source(a.k_pe, a.k_pe_t, none), None, 0))
        if key.op == "decode":
            main, rope = Source(a.ql_nope, a.ql_nope_t, a.ql_nope_h), Source(a.q_pe, a.q_pe_t, a.q_pe_h)
            rows.append(Rows(key.heads, LATENT, ROPE, main, rope, a.out, 1))
            return rows
        nope, k_pe = Source(a.k_nope, a.k_nope_t, a.k_nope_h), Source(a.k_pe, a.k_pe_t, none)
        rows.append(Rows(key.heads, NOPE, ROPE, nope, k_pe, a.k_out, 1))
        if self.fp8:
            v = Source(a.v, a.v_t, a.v_h)
            rows.append(Rows(key.heads, V, 0, v, v, a.v_out, 2))
        if key.op == "prefill" and (self.fp8 or key.rope):
            q_rope = Source(a.q + NOPE * 2, a.q_t, a.q_h)
            if self.fp8:
                rows.append(Rows(key.heads, NOPE, ROPE, Source(a.q, a.q_t, a.q_h), q_rope, a.q_out, 3))
            else:
                rows.append(Rows(key.heads, 0, ROPE, q_rope, q_rope, None, 3))
        return rows

    def decode(self, a, number: Uint32) -> Unit:
        """What unit `number` of the call is."""
        size, out_bytes = facts.unit(self.key), 16
        in_bytes = Uint32(2 * size)
        rope_bytes = Uint32(size) if self.key.pe_fp8 else in_bytes
        per_token = facts.units(self.key)
        token = number // per_token
        u = number - token * per_token
        start, chosen, scale, cached = 0, None, [], None
        for rows in self.rows(a):
            past = u >= start if start else True
            width, main = (rows.main + rows.rope) // size, rows.main // size
            v = u - start
            row = v // width if rows.count > 1 else Uint32(0)
            j = v - row * width
            rope = j >= main if 0 < main < width else main == 0
            where = pick(rope, rows.rope_from, rows.main_from)
            step = pick(rope, rope_bytes, in_bytes)
            k = pick(rope, j - main, j)
            entry = not start and rows.out is None
            target, stride = (Int64(0), 0) if rows.out is None else (rows.out, rows.count * width * out_bytes)
            in_place = Boolean(rows.out is None and not entry)
            this = (where, row, k, step, Boolean(rope), target, Uint32(stride), v, in_place)
            chosen = this if chosen is None else pick(past, this, chosen)
            scale.append((past, rows.scale))
            if entry:
                cached = u < width
            start += rows.count * width
        where, row, k, step, rope, target, stride, v, in_place = chosen
        source = _mad_wide(k, step, _mad_wide(row, where[2], _mad_wide(token, where[1], where[0])))
        target = _mad_wide(v, Uint32(out_bytes), _mad_wide(token, stride, target))
        if self.key.op == "prefill" and self.key.rope and not self.fp8:
            target = pick(in_place, source, target)
        live = number < Uint32(a.tokens) * per_token
        return Unit(live, token, source, target, cached, rope, k * (size // 2), scale)

    # ---- units --------------------------------------------------------------------------------------------------

    def copy(self, a, at: Uint32, count: int):
        """Units at, at + THREADS, ...: `count` of them, all loads before all stores."""
        units = [self.decode(a, at + i * facts.THREADS) for i in range(count)]
        if count == 1:
            _prefetch_if(units[0].source, units[0].live)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        raw = [self.load(u) for u in units]
        slots = [
            None if u.cached is None else ldg_pair_if(_mad_wide(u.token, Uint32(8), a.slots), u.live & u.cached, -1)
            for u in units
        ]
        scales = [_load_scale(getattr(a, name)) for name in facts.scales(self.key)]
        angles = [None] * count
        if self.key.rope:
            positions = [_load_low_if(_mad_wide(u.token, Uint32(8), a.positions), u.live & u.rope) for u in units]
            angles = [self.load_angles(a, u, p) for u, p in zip(units, positions, strict=True)]
        for unit, words, slot, angle in zip(units, raw, slots, angles, strict=True):
            live, target = unit.live, unit.target
            if slot is not None:
                target = pick(unit.cached, _entry_address(slot[0], a) + target, target)
                live = live & (~unit.cached | (slot[1] == 0))
            stg128_if(target, self.convert(unit, words, angle, scales), live)

    def load(self, unit: Unit) -> list:
        """The words of a unit: four, or eight where 16 elements become e4m3."""
        words = ldg_if(unit.source, unit.live)
        if self.fp8:
            more = unit.live & ~unit.rope if self.key.pe_fp8 else unit.live
            words = [*words, *ldg_if(unit.source + 16, more)]
        return words

    def load_angles(self, a, unit: Unit, position) -> tuple[list, list]:
        """Cosines and sines of the unit's pairs, from a row of 32 of each; zeros where it is not rotated."""
        address = _mad_wide(unit.pair, Uint32(4), _mad_wide(position, Uint32(ROPE * 4), a.cos_sin))
        needed = unit.live & unit.rope
        cos, sin = [], []
        for i in range(facts.unit(self.key) // 8):
            cos += _load_floats_if(address + 16 * i, needed)
            sin += _load_floats_if(address + ROPE * 2 + 16 * i, needed)
        return cos, sin

    def convert(self, unit: Unit, words: list, angles, scales: list) -> list:
        """The four words to store."""
        if not self.fp8:
            if angles is None:
                return words
            turned = [self.pack(*self.rotate(self.unpack(w), c, s)) for w, c, s in zip(words, *angles, strict=True)]
            return [pick(unit.rope, t, w) for t, w in zip(turned, words, strict=True)]
        pairs = [self.unpack(w) for w in words]
        if angles is not None:
            turned = [self.rotate(p, c, s) for p, c, s in zip(pairs, *angles, strict=True)]
            pairs = [
                [pick(unit.rope, t, x) for t, x in zip(*tp, strict=True)] for tp in zip(turned, pairs, strict=True)
            ]
        values = [x for pair in pairs for x in pair]
        if scales:
            scale = scales[0]
            for past, index in unit.scale:
                scale = pick(past, scales[index], scale)
            values = [_at_least(mul(x, scale), Float32(-448.0)) for x in values]
        out = [pack_e4m3x4(*values[i : i + 4]) for i in range(0, 16, 4)]
        if self.key.pe_fp8:  # already e4m3: its bytes are copied
            out = [pick(unit.rope, w, o) for w, o in zip(words, out)]  # noqa: B905 (the first four of eight)
        return out

    @staticmethod
    def rotate(pair, cos, sin) -> list:
        x, y = pair
        return [_sub(mul(x, cos), mul(y, sin)), _add(mul(x, sin), mul(y, cos))]

    # ---- 656-byte records ---------------------------------------------------------------------------------------

    def record(self, a, token: Uint32, lane: Uint32):
        """One warp, one cache entry: lane l quantizes latents 16l..16l+15, eight lanes share a scale; the first eight
        lanes also move the 64 rope elements."""
        live = token < Uint32(a.tokens)
        roped = live & (lane < 8)
        source = _mad_wide(lane, Uint32(32), _mad_wide(token, Uint32(LATENT * 2), a.kv_c))
        rope_source = _mad_wide(lane, Uint32(16), _mad_wide(token, a.k_pe_t, a.k_pe))
        _prefetch_if(source, live)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        slot, high = ldg_pair_if(_mad_wide(token, Uint32(8), a.slots), live, -1)
        words = [*ldg_if(source, live), *ldg_if(source + 16, live)]
        rope = ldg_if(rope_source, roped)
        if self.key.rope:
            position = _load_low_if(_mad_wide(token, Uint32(8), a.positions), roped)
            unit = Unit(live, token, source, source, None, roped, lane * 4, [])
            cos, sin = self.load_angles(a, unit, position)
            rope = [self.pack(*self.rotate(self.unpack(w), c, s)) for w, c, s in zip(rope, cos, sin, strict=True)]
        entry = _entry_address(slot, a)
        live = live & (high == 0)
        stg128_if(_mad_wide(lane, Uint32(16), entry + LATENT + 16), rope, live & (lane < 8))
        values = [x for w in words for x in self.unpack(w)]
        amax = Float32(0.0)
        for x in values:
            amax = _larger_size(amax, x)
        for distance in (4, 2, 1):
            amax = _larger_size(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        scale, inverse = _tile_scale(_bits(amax))
        values = [mul(x, inverse) for x in values]
        packed = [pack_e4m3x4(*values[i : i + 4]) for i in range(0, 16, 4)]
        stg128_if(_mad_wide(lane, Uint32(16), entry), packed, live)
        stg32_if(_mad_wide(lane // 8, Uint32(4), entry + LATENT), _bits(scale), live & (lane % 8 == 0))


def trace(key: facts.EpilogueKey, target: str):
    """The jitted launcher and arguments of the right types, to be traced and compiled."""
    kinds = {"ptr": Int64, "i64": Int64, "i32": Int32}
    return Epilogue(key), (tuple(kinds[p.kind](1) for p in key.params), make_fake_stream())
