"""Kernels in FlyDSL for the emulator's tests: small, and each around one group of instructions."""

# mypy: ignore-errors
# ruff: noqa: B008

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl._mlir.dialects import rocdl as raw
from flydsl.expr.typing import T

DEVICE, SYSTEM = 16, 17  # cache policy of a buffer access: sc1, sc0 sc1


def pointer(dtype, tensor):
    """A typed pointer to a CPU tensor."""
    return flyc.from_c_void_p(dtype, tensor.data_ptr(), assumed_align=16)


def at(base, index, scale, extra=0):
    """base + index * scale + extra elements; the factor keeps wide accesses aligned."""
    moved = fx.add_offset(base, fx.int_tuple_mul(fx.make_int_tuple(index), scale))
    return moved if extra == 0 else fx.add_offset(moved, extra)


def buffer(base, size):
    return fx.rocdl.get_buffer_rsrc(fx.rocdl.make_buffer_ptr(base, num_records_bytes=size))


def put(value, resource, offset, policy=0):
    value = value.ir_value() if hasattr(value, "ir_value") else value
    word = lambda x: fx.Int32(x).ir_value()  # noqa: E731
    raw.raw_ptr_buffer_store(value, resource, word(offset), word(0), aux=ir.IntegerAttr.get(T.i32, policy))


@flyc.kernel(name="add")
def add_kernel(a: fx.Pointer, b: fx.Pointer, c: fx.Pointer, n: fx.Int32):
    i = fx.block_idx.x * 256 + fx.thread_idx.x
    if i < n:
        c[i] = a[i] + b[i]


@flyc.jit
def add(a: fx.Pointer, b: fx.Pointer, c: fx.Pointer, n: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    add_kernel(a, b, c, n).launch(grid=((n + 255) // 256, 1, 1), block=(256, 1, 1), stream=stream)


@fx.struct
class Tiles:
    a: fx.Array[fx.BFloat16, 1024, 16]
    b: fx.Array[fx.BFloat16, 1024, 16]
    c: fx.Array[fx.Float32, 256, 16]


@flyc.kernel(name="product")
def product_kernel(A: fx.Pointer, B: fx.Pointer, C: fx.Pointer):
    """C[16, 16] = A[16, 64] @ B[16, 64]^T in bf16: two waves take half of K each and meet in LDS."""
    thread = fx.thread_idx.x
    lane, wave = thread % 64, thread // 64
    row, group = lane % 16, lane // 16
    shared = fx.SharedAllocator().allocate(Tiles).peek()
    at(shared.a.ptr, thread, 8).store(at(A, thread, 8).load(fx.BFloat16x8))
    at(shared.b.ptr, thread, 8).store(at(B, thread, 8).load(fx.BFloat16x8))
    fx.barrier()
    offset = row * 8 + wave * 4 + group
    left = at(shared.a.ptr, offset, 8).load(fx.BFloat16x8)
    right = at(shared.b.ptr, offset, 8).load(fx.BFloat16x8)
    part = fx.Vector(fx.rocdl.mfma_f32_16x16x32_bf16(T.f32x4, [left, right, fx.Vector.filled(4, 0.0, fx.Float32)]))
    if wave == 0:
        for i in fx.range_constexpr(4):
            fx.add_offset(at(shared.c.ptr, group, 64), fx.make_int_tuple(i * 16 + row)).store(part[i])
    fx.barrier()
    if wave == 1:
        for i in fx.range_constexpr(4):
            place = fx.make_int_tuple(group * 64 + i * 16 + row)
            fx.add_offset(C, place).store(part[i] + fx.add_offset(shared.c.ptr, place).load())


@flyc.jit
def product(A: fx.Pointer, B: fx.Pointer, C: fx.Pointer, stream: fx.Stream = fx.Stream(None)):
    product_kernel(A, B, C).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


@flyc.kernel(name="reductions")
def reductions_kernel(x: fx.Pointer, out: fx.Pointer):
    """The sum of a wave by LDS permute, by shuffle, by DPP, and by DPP with the row and half swaps; and its maximum."""
    lane = fx.thread_idx.x
    value = x[lane]
    total = value
    for step in fx.range_constexpr(6):
        other = fx.rocdl.ds_bpermute(T.i32, (lane ^ (1 << step)) * 4, total.bitcast(fx.Int32))
        total = total + fx.Float32(fx.Int32(other).bitcast(fx.Float32))
    out[lane] = total
    total = value
    for step in fx.range_constexpr(6):
        total = total + fx.shuffle_xor(total, 1 << step, 64)
    out[lane + 64] = total
    out[lane + 128] = fx.coop.warp_sum(value)
    total = value
    for control in fx.range_constexpr(4):
        code = [0xB1, 0x4E, 0x141, 0x128][control]  # quad_perm twice, row_half_mirror, row_ror:8
        moved = fx.rocdl.update_dpp(T.f32, fx.Float32(0.0).ir_value(), total.ir_value(), code, 0xF, 0xF, True)
        total = total + fx.Float32(moved)
    pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
    for swap in fx.range_constexpr(2):
        word = total.bitcast(fx.Int32).ir_value()
        both = (fx.rocdl.permlane16_swap if swap == 0 else fx.rocdl.permlane32_swap)(pair, word, word, False, False)
        halves = [fx.Int32(llvm.extractvalue(T.i32, both, [k])).bitcast(fx.Float32) for k in range(2)]
        total = halves[0] + halves[1]
    out[lane + 192] = total
    out[lane + 256] = fx.coop.warp_max(value)


@flyc.jit
def reductions(x: fx.Pointer, out: fx.Pointer, stream: fx.Stream = fx.Stream(None)):
    reductions_kernel(x, out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


@flyc.kernel(name="scaled")
def scaled_kernel(
    A: fx.Pointer, B: fx.Pointer, SA: fx.Pointer, SB: fx.Pointer, D: fx.Pointer, Q: fx.Pointer, S: fx.Pointer
):
    """D[16, 16] = scaled fp4 A @ scaled fp4 B^T over K = 128; Q: D packed to fp8, fp4 and bf16; S: sums by atomics."""
    lane = fx.thread_idx.x
    row, group = lane % 16, lane // 16
    zero = fx.Vector.filled(4, 0, fx.Int32)
    wide = lambda v: fx.Vector.from_elements([v[i] for i in range(4)] + [zero[i] for i in range(4)])  # noqa: E731
    left = fx.Vector(fx.rocdl.raw_ptr_buffer_load(T.i32x4, buffer(A, 1024), row * 64 + group * 16, 0, 0))
    right = fx.Vector(fx.rocdl.raw_ptr_buffer_load(T.i32x4, buffer(B, 1024), row * 64 + group * 16, 0, 2))
    sa, sb = fx.Int32(fx.Uint8(SA[row * 4 + group])), fx.Int32(fx.Uint8(SB[row * 4 + group]))
    acc = fx.Vector.filled(4, 0.0, fx.Float32)
    d = fx.Vector(fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(T.f32x4, [wide(left), wide(right), acc, 4, 4, 0, sa, 0, sb]))
    target = buffer(D, 1024)
    for i in fx.range_constexpr(4):
        put(d[i], target, (group * 4 + i) * 64 + row * 4, [SYSTEM, DEVICE, 2, 0][i])
    packed = buffer(Q, 768)
    word = fx.rocdl.cvt_pk_fp8_f32(T.i32, d[0], d[1], fx.Int32(0), False)
    put(fx.rocdl.cvt_pk_fp8_f32(T.i32, d[2], d[3], word, True), packed, lane * 4)
    word = fx.rocdl.cvt_scalef32_pk_fp4_f32(T.i32, fx.Int32(0), d[0], d[1], fx.Float32(2.0), 0)
    put(fx.rocdl.cvt_scalef32_pk_fp4_f32(T.i32, word, d[2], d[3], fx.Float32(2.0), 1), packed, lane * 4 + 256)
    put(fx.Vector.from_elements([d[0], d[1]]).to(fx.BFloat16).bitcast(fx.Int32)[0], packed, lane * 4 + 512)
    fx.rocdl.raw_ptr_buffer_atomic_fadd(d[0], buffer(S, 128), row * 4, 0, 0)
    fx.atomic_add(fx.add_offset(S, fx.make_int_tuple(16 + row)), d[1], syncscope="agent")


@flyc.jit
def scaled(
    A: fx.Pointer,
    B: fx.Pointer,
    SA: fx.Pointer,
    SB: fx.Pointer,
    D: fx.Pointer,
    Q: fx.Pointer,
    S: fx.Pointer,
    stream: fx.Stream = fx.Stream(None),
):
    scaled_kernel(A, B, SA, SB, D, Q, S).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


@fx.struct
class Scratch:
    words: fx.Array[fx.Int32, 256, 16]
    counts: fx.Array[fx.Int32, 4, 16]
    halves: fx.Array[fx.Float16, 256, 16]


@flyc.kernel(name="local")
def local_kernel(X: fx.Pointer, H: fx.Pointer, OUT: fx.Pointer, n: fx.Int32):
    """Buffer loads into LDS, LDS atomics, scalar buffer loads, a loop of unknown length, a transposing read."""
    lane = fx.thread_idx.x
    shared = fx.SharedAllocator().allocate(Scratch).peek()
    if lane < 4:
        shared.counts[lane] = fx.Int32(0)
    fx.rocdl.buffer_load_to_lds(buffer(X, 1024), shared.words.ptr.llvm_ptr, lane * 16, 16)
    at(shared.halves.ptr, lane, 4).store(at(H, lane, 4).load(fx.Float16x4))
    fx.rocdl.s_waitcnt(vmcnt=0)
    fx.barrier()
    at(OUT, lane, 4).store(at(shared.words.ptr, 63 - lane, 4).load(fx.Int32x4))
    fx.atomic_add(fx.add_offset(shared.counts.ptr, fx.make_int_tuple(lane % 4)), fx.Int32(lane), syncscope="workgroup")
    fx.barrier()
    OUT[lane + 256] = shared.counts[lane % 4]
    q = fx.rocdl.s_buffer_load(fx.rocdl.make_buffer_ptr(X), 8, count=4)
    OUT[lane + 320] = q[0] + q[1] * 3 + q[2] * 5 + q[3] * 7
    total = fx.Int32(0)
    for i in range(n):
        total = total + X[(lane + i) % 256]
    OUT[lane + 384] = total
    column = fx.Vector(raw.ds_read_tr16_b64_(T.f16x4, at(shared.halves.ptr, lane, 4).llvm_ptr))
    at(OUT, lane, 2, 448).store(column.bitcast(fx.Int32))


@flyc.jit
def local(X: fx.Pointer, H: fx.Pointer, OUT: fx.Pointer, n: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    local_kernel(X, H, OUT, n).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


def gather_kernel(policy, ranks):
    """Every rank puts its 64 words, tagged, into every rank's buffer, then polls its own until all tags are there."""

    @flyc.kernel(name=f"gather_{policy}_{ranks}")
    def kernel(mine: fx.Pointer, peers: fx.Pointer, out: fx.Pointer, rank: fx.Int32, tag: fx.Int32):
        lane = fx.thread_idx.x
        value = mine[lane]
        pair = fx.Vector.from_elements([value, tag])
        for r in fx.range_constexpr(ranks):
            base = fx.inttoptr(fx.PointerType.get(T.i32, 1, 8), peers[r])
            put(pair, buffer(base, ranks * 512), (rank * 64 + lane) * 8, policy)
        home = buffer(fx.inttoptr(fx.PointerType.get(T.i32, 1, 8), peers[rank]), ranks * 512)
        for r in fx.range_constexpr(ranks):
            got = fx.Vector(fx.rocdl.raw_ptr_buffer_load(T.i32x2, home, (r * 64 + lane) * 8, 0, policy))
            seen, word = got[1], got[0]
            while seen != tag:
                fx.rocdl.s_sleep(1)
                again = fx.Vector(fx.rocdl.raw_ptr_buffer_load(T.i32x2, home, (r * 64 + lane) * 8, 0, policy))
                word = again[0]
                seen = again[1]
            out[r * 64 + lane] = word

    @flyc.jit
    def launch(
        mine: fx.Pointer,
        peers: fx.Pointer,
        out: fx.Pointer,
        rank: fx.Int32,
        tag: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):
        kernel(mine, peers, out, rank, tag).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch
