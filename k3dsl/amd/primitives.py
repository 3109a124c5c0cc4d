"""What kernels for gfx950 are written with: memory, lanes, conversions and control flow, as plain functions.

FlyDSL rewrites the Python control flow of a kernel's own body only. Kernels here are made of stages in several files,
so branches and loops are built by `when` and `repeat` instead, and nothing depends on the rewriting. The names of
FlyDSL that are not promised to stay (`flydsl._mlir`) are used in this file; they were seen in version 0.5.0.

Values are `fx.Int32`, `fx.Int64` and `fx.Float32`, one a lane; words of packed values are Int32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm, rocdl, scf, vector
from flydsl._mlir.dialects import gpu as gpu_ops
from flydsl.expr.typing import T

# Cache policy of a buffer access.
PLAIN = 0  # data of earlier kernels, outputs for later ones
NT = 2  # nt: weights, read once
DEVICE = 16  # sc1: past the L2s of the eight dies
SYSTEM = 17  # sc0 sc1: past the device

LOG2E = 1.4426950408889634
FP8_MAX = 448.0


def raw(value: Any) -> ir.Value:
    """The IR value of an fx number; IR values pass through."""
    return value.ir_value() if hasattr(value, "ir_value") else value


def word(value: Any) -> ir.Value:
    """An i32."""
    return fx.Int32(value).ir_value() if isinstance(value, int) else raw(value)


def number(value: Any) -> ir.Value:
    """An f32."""
    return fx.Float32(value).ir_value() if isinstance(value, (int, float)) else raw(value)


# ------------------------------------------------------------------------------------------------------ control flow


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """A branch: what is traced inside runs in the lanes where `condition` holds."""
    op = scf.IfOp(raw(condition))
    with ir.InsertionPoint(op.then_block):
        yield
        scf.YieldOp([])


def repeat(
    values: Sequence[Any],
    condition: Callable[[list[ir.Value]], Any],
    body: Callable[[list[ir.Value]], Sequence[Any]],
) -> list[ir.Value]:
    """`while condition(values): values = body(values)`; the values after it."""
    start = [raw(v) for v in values]
    types = [v.type for v in start]
    op = scf.WhileOp(types, start)
    before = op.regions[0].blocks.append(*types)
    with ir.InsertionPoint(before):
        held = list(before.arguments)
        scf.ConditionOp(raw(condition(held)), held)
    after = op.regions[1].blocks.append(*types)
    with ir.InsertionPoint(after):
        scf.YieldOp([raw(v) for v in body(list(after.arguments))])
    return list(op.results)


def barrier() -> None:
    """All waves of the workgroup meet; LDS written before is seen after."""
    gpu_ops.barrier()


def keep_order() -> None:
    """No memory access is moved across this line by the compiler. No instruction."""
    llvm.inline_asm(None, [], "", "~{memory}", has_side_effects=True)


def schedule_fence() -> None:
    """No instruction is moved across this line by the compiler's scheduler. No instruction itself."""
    fx.rocdl.sched_barrier(0)


def drain() -> None:
    """Every load and store that this wave has issued is complete."""
    keep_order()
    rocdl.s_waitcnt(0x0F70)  # vmcnt(0), the other counters untouched
    keep_order()


def sleep(amount: int) -> None:
    """About 64 * amount cycles."""
    rocdl.s_sleep(amount)


def clock() -> fx.Int64:
    """s_memrealtime: 100 MHz, the same on all compute units of a device."""
    return fx.Int64(llvm.call_intrinsic(T.i64, "llvm.amdgcn.s.memrealtime", [], [], []))


# ------------------------------------------------------------------------------------------------------------ memory


def address(pointer: Any) -> fx.Int64:
    """The 64 bits of a pointer parameter."""
    return fx.Int64(llvm.ptrtoint(T.i64, pointer.llvm_ptr))


def resource(address: Any) -> ir.Value:
    """A buffer resource that starts at a 64-bit address, the same in all lanes of the wave. No bounds."""
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), raw(address))
    zero, size = fx.Int16(0).ir_value(), fx.Int64(0xFFFFFFFF).ir_value()
    flags = fx.Int32((7 << 12) | (4 << 15)).ir_value()
    return rocdl.make_buffer_rsrc(ir.Type.parse("!llvm.ptr<8>"), pointer, zero, size, flags)


def words_type(count: int) -> ir.Type:
    """i32, or a vector of them."""
    return T.i32 if count == 1 else ir.VectorType.get([count], T.i32)


def load_vector(buffer: ir.Value, offset: Any, count: int = 1, policy: int = PLAIN) -> ir.Value:
    """`count` dwords (1, 2 or 4) at a byte offset, as one value."""
    aux = ir.IntegerAttr.get(T.i32, policy)
    return rocdl.raw_ptr_buffer_load(words_type(count), buffer, word(offset), word(0), aux=aux)


def load(buffer: ir.Value, offset: Any, count: int = 1, policy: int = PLAIN) -> list[fx.Int32]:
    """`count` dwords (1, 2 or 4) at a byte offset."""
    return split(load_vector(buffer, offset, count, policy), count)


def store(buffer: ir.Value, offset: Any, values: Sequence[Any], policy: int = PLAIN) -> None:
    """1, 2 or 4 dwords to a byte offset, by one instruction."""
    aux = ir.IntegerAttr.get(T.i32, policy)
    rocdl.raw_ptr_buffer_store(join(values), buffer, word(offset), word(0), aux=aux)


def scalar_load(address: Any, offset: Any = 0, count: int = 1) -> list[fx.Int32]:
    """`count` dwords (1 or 2) that nobody writes while the kernel runs, from an address that is the same in all lanes,
    through the scalar cache: they are in scalar registers, and no vector load has to be waited for.
    """
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<4>"), raw(address))
    place = llvm.getelementptr(pointer.type, pointer, [word(offset)], [-(2**31)], T.i8, llvm.GEPNoWrapFlags.none)
    return split(llvm.load(words_type(count), place, alignment=4 * count, invariant=True), count)


def split(value: ir.Value, count: int) -> list[fx.Int32]:
    """The dwords of a value."""
    if count == 1:
        return [fx.Int32(value)]
    return [fx.Int32(llvm.extractelement(value, word(i))) for i in range(count)]


def join(values: Sequence[Any]) -> ir.Value:
    """One value of several dwords."""
    if len(values) == 1:
        return word(values[0])
    return vector.from_elements(words_type(len(values)), [word(v) for v in values])


class Lds:
    """A workgroup's LDS as bytes."""

    def __init__(self, size: int) -> None:
        self.base = fx.SharedAllocator().allocate(fx.Array[fx.Uint8, size, 16]).peek().ptr.llvm_ptr

    def at(self, offset: Any) -> ir.Value:
        """A pointer to a byte."""
        pointer = ir.Type.parse("!llvm.ptr<3>")
        return llvm.getelementptr(pointer, self.base, [word(offset)], [-(2**31)], T.i8, llvm.GEPNoWrapFlags.none)

    def load_vector(self, offset: Any, count: int = 1) -> ir.Value:
        """`count` dwords, aligned to their size."""
        return llvm.load(words_type(count), self.at(offset), alignment=4 * count)

    def load(self, offset: Any, count: int = 1) -> list[fx.Int32]:
        """`count` dwords, aligned to their size."""
        return split(self.load_vector(offset, count), count)

    def store(self, offset: Any, values: Sequence[Any]) -> None:
        """Dwords, aligned to their size."""
        llvm.store(join(values), self.at(offset), alignment=4 * len(values))

    def store_vector(self, offset: Any, value: ir.Value, count: int) -> None:
        """The same for one value of several dwords."""
        llvm.store(value, self.at(offset), alignment=4 * count)

    def exchange(self, offset: Any, value: Any) -> fx.Int32:
        """Stores a dword and returns the one that was there."""
        kind, order = llvm.AtomicBinOp.xchg, llvm.AtomicOrdering.monotonic
        return fx.Int32(llvm.atomicrmw(kind, self.at(offset), word(value), order, syncscope="workgroup"))

    def store_long(self, offset: Any, value: fx.Int64) -> None:
        """An i64."""
        llvm.store(raw(value), self.at(offset), alignment=8)


# ------------------------------------------------------------------------------------------------- integers and lanes


def udiv(a: Any, b: Any) -> fx.Int32:
    """Quotient of unsigned dwords."""
    return fx.Int32(arith.divui(word(a), word(b)))


def shr(a: Any, b: Any) -> fx.Int32:
    """Logical shift right."""
    return fx.Int32(arith.shrui(word(a), word(b)))


def umin(a: Any, b: Any) -> fx.Int32:
    """Smaller of unsigned dwords."""
    return fx.Int32(arith.minui(word(a), word(b)))


def umax(a: Any, b: Any) -> fx.Int32:
    """Larger of unsigned dwords."""
    return fx.Int32(arith.maxui(word(a), word(b)))


def choose(condition: Any, a: Any, b: Any) -> Any:
    """`a` where `condition` holds, else `b`; both of one type."""
    kind = type(a) if hasattr(a, "ir_value") else type(b)
    first, second = kind(a), kind(b)
    return kind(arith.select(raw(condition), raw(first), raw(second)))


def long(value: Any) -> fx.Int64:
    """An unsigned dword as 64 bits."""
    return fx.Int64(arith.extui(T.i64, word(value)))


def truncate(value: fx.Int64) -> fx.Int32:
    """The low dword."""
    return fx.Int32(arith.trunci(T.i32, raw(value)))


def uniform(value: fx.Int32) -> fx.Int32:
    """The first active lane's value, in a scalar register."""
    return fx.Int32(rocdl.readfirstlane(T.i32, word(value)))


def join_long(low: fx.Int32, high: fx.Int32) -> fx.Int64:
    """64 bits of two dwords."""
    return long(low) + (long(high) << 32)


def lanes(condition: Any) -> fx.Int64:
    """A bit for every active lane in which `condition` holds; uniform."""
    return fx.Int64(rocdl.ballot(T.i64, raw(condition)))


def first_lane(mask: fx.Int64) -> fx.Int32:
    """Number of the lowest set bit."""
    return fx.Int32(arith.trunci(T.i32, llvm.intr_cttz(raw(mask), ir.BoolAttr.get(False))))


def from_xor(value: ir.Value, mask: int) -> tuple[ir.Value, ir.Value]:
    """Two dwords of which one is the lane's own and the other that of lane ^ mask, in an order that does not matter
    to a sum or a maximum. `mask` is a power of two below 64; all 2 * mask lanes concerned must be active.
    """
    zero = word(0)

    def dpp(old: ir.Value, control: int, banks: int = 0xF) -> ir.Value:
        return rocdl.update_dpp(T.i32, old, value, control, 0xF, banks, False)

    if mask in (1, 2):
        return value, dpp(zero, {1: 0xB1, 2: 0x4E}[mask])  # quad_perm [1,0,3,2], [2,3,0,1]
    if mask == 4:
        return value, dpp(dpp(zero, 0x104, 0x5), 0x114, 0xA)  # row_shl:4 into banks 0, 2; row_shr:4 into 1, 3
    if mask == 8:
        return value, dpp(zero, 0x128)  # row_ror:8
    swap = rocdl.permlane16_swap if mask == 16 else rocdl.permlane32_swap
    both = swap(ir.Type.parse("!llvm.struct<(i32, i32)>"), value, value, False, False)
    return llvm.extractvalue(T.i32, both, [0]), llvm.extractvalue(T.i32, both, [1])


def butterfly(value: fx.Float32, masks: Sequence[int], join: Callable[[fx.Float32, fx.Float32], fx.Float32]) -> Any:
    """`join` over the lanes whose numbers differ in `masks`, in that order; every lane has the result."""
    for mask in masks:
        a, b = from_xor(bits(value).ir_value(), mask)
        value = join(as_float(fx.Int32(a)), as_float(fx.Int32(b)))
    return value


def add(a: fx.Float32, b: fx.Float32) -> fx.Float32:
    """For `butterfly`."""
    return a + b


def larger(a: fx.Float32, b: fx.Float32) -> fx.Float32:
    """For `butterfly`: the larger number; a NaN loses."""
    return fx.Float32(arith.maxnumf(number(a), number(b)))


def smaller(a: fx.Float32, b: fx.Float32) -> fx.Float32:
    """The smaller number; a NaN loses."""
    return fx.Float32(arith.minnumf(number(a), number(b)))


# -------------------------------------------------------------------------------------------------------- conversions


def bits(value: fx.Float32) -> fx.Int32:
    """The bits of a float."""
    return value.bitcast(fx.Int32)


def as_float(value: fx.Int32) -> fx.Float32:
    """A float of these bits."""
    return value.bitcast(fx.Float32)


def low(pair: fx.Int32) -> fx.Float32:
    """The even one of two packed bf16 values."""
    return as_float(pair << 16)


def high(pair: fx.Int32) -> fx.Float32:
    """The odd one."""
    return as_float(pair & fx.Int32(-65536))


def unpack(words: Sequence[fx.Int32]) -> list[fx.Float32]:
    """The bf16 values of packed words."""
    return [f for w in words for f in (low(w), high(w))]


def pack_bf16(a: fx.Float32, b: fx.Float32) -> fx.Int32:
    """Two floats rounded to nearest-even bf16, the first in the low half."""
    pair = vector.from_elements(ir.VectorType.get([2], T.f32), [number(a), number(b)])
    half = arith.truncf(ir.VectorType.get([2], T.bf16), pair)
    return fx.Int32(llvm.bitcast(T.i32, half))


def pack_fp8(values: Sequence[fx.Float32]) -> fx.Int32:
    """Four floats, clamped to +-448 and rounded to nearest-even e4m3, the first in the low byte."""
    held = [raw(smaller(larger(v, fx.Float32(-FP8_MAX)), fx.Float32(FP8_MAX))) for v in values]
    half = rocdl.cvt_pk_fp8_f32(T.i32, held[0], held[1], word(0), False)
    return fx.Int32(rocdl.cvt_pk_fp8_f32(T.i32, held[2], held[3], half, True))


def pack_fp4(old: Any, pair: fx.Int32, scale: fx.Float32, byte: int) -> fx.Int32:
    """Two packed bf16 values divided by a power of two and rounded to e2m1, saturating, into one byte of `old`."""
    source = llvm.bitcast(ir.VectorType.get([2], T.bf16), word(pair))
    return fx.Int32(rocdl.cvt_scalef32_pk_fp4_bf16(T.i32, word(old), source, number(scale), byte))


def rsq(value: fx.Float32) -> fx.Float32:
    """The hardware's reciprocal square root, about 1 ulp."""
    return fx.Float32(rocdl.rsq(T.f32, number(value)))


def exp2(value: fx.Float32) -> fx.Float32:
    """The hardware's 2 ** x, about 1 ulp."""
    return fx.Float32(rocdl.exp2(T.f32, number(value)))


# ------------------------------------------------------------------------------------------------------------- matrix


def mfma_bf16(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """c + a b over K = 32. Lane l holds row (a) or column (b) l % 16, elements 8 (l / 16)..+7 of K, as four dwords; of
    c column l % 16, rows 4 (l / 16)..+3.
    """
    wide = ir.VectorType.get([8], T.bf16)
    left, right = llvm.bitcast(wide, a), llvm.bitcast(wide, b)
    return fx.rocdl.mfma_f32_16x16x32_bf16(T.f32x4, [left, right, c])


def mfma_fp4(a: Sequence[Any], a_scale: Any, b: Sequence[Any], b_scale: Any) -> ir.Value:
    """a b over K = 128 in MXFP4. Lane l holds row (column) l % 16, elements 32 (l / 16)..+31 as four dwords, and in the
    low byte of the scale their e8m0 exponent.
    """
    left, right = (join([*x, *([0] * 4)]) for x in (a, b))
    return fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(
        T.f32x4, [left, right, zeros(), 4, 4, 0, word(a_scale), 0, word(b_scale)]
    )


def lds_transposed(memory: Lds, offset: Any) -> list[fx.Int32]:
    """Four bf16 of a column as two dwords: each 16 lanes read a 4 x 16 block, lane i giving the address of 4 columns
    (i % 4) of row i / 4 and getting column i.
    """
    value = rocdl.ds_read_tr16_b64_(ir.VectorType.get([4], T.bf16), memory.at(offset))
    return split(llvm.bitcast(words_type(2), value), 2)


def zeros() -> ir.Value:
    """An accumulator of zeros."""
    return arith.constant(T.f32x4, ir.DenseElementsAttr.get_splat(T.f32x4, ir.FloatAttr.get(T.f32, 0.0)))


def floats(value: ir.Value) -> list[fx.Float32]:
    """The four numbers of an accumulator."""
    return [fx.Float32(llvm.extractelement(value, word(i))) for i in range(4)]
