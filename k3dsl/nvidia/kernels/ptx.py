"""PTX that the kernels need and the DSL does not offer: one function an instruction, operands in plain registers.

Shared memory is addressed by 32-bit byte addresses (Int32), global memory by 64-bit addresses (Int64); `offset` is a
Python int that becomes part of the instruction. All goes through `emit`: statements that touch memory or order it
are volatile, arithmetic is not, so that the compiler may schedule or drop it.
"""

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_TYPE = {"f": lambda: T.f32(), "r": lambda: T.i32(), "l": lambda: T.i64()}
_WRAP = {"f": Float32, "r": Int32, "l": Int64}


def _value(x, loc, ip):
    return x.ir_value(loc=loc, ip=ip) if hasattr(x, "ir_value") else x


def emit(text, outs="", ins=(), tied=(), memory=False, volatile=True, loc=None, ip=None):
    """One inline-assembly statement.

    outs: a letter per result, f (Float32), r (Int32) or l (Int64); they are $0, $1, ... ins: (constraint letter, value)
    pairs, numbered after the results. tied: values that enter in the registers of results 0, 1, ... (read-write
    operands); they take no number of their own in `text`. memory: the statement reads or writes memory that others see.
    Gives None, one value or a list of values.
    """
    cons = ["=" + o for o in outs] + [c for c, _ in ins] + [str(i) for i in range(len(tied))]
    if memory:
        cons.append("~{memory}")
    args = [_value(x, loc, ip) for _, x in ins] + [_value(x, loc, ip) for x in tied]
    kind = None
    if len(outs) == 1:
        kind = _TYPE[outs]()
    elif outs:
        kind = llvm.StructType.get_literal([_TYPE[o]() for o in outs])
    res = llvm.inline_asm(
        kind,
        args,
        text,
        ",".join(cons),
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not outs:
        return None
    if len(outs) == 1:
        return _WRAP[outs](res)
    return [_WRAP[o](llvm.extractvalue(_TYPE[o](), res, [i], loc=loc, ip=ip)) for i, o in enumerate(outs)]


def _list(first, n):
    return "{" + ",".join(f"${i}" for i in range(first, first + n)) + "}"


# ---- shared memory


@dsl_user_op
def ldsm_x4_t(addr, offset=0, *, loc=None, ip=None):
    """ldmatrix.x4.trans of 16-bit units: 32 rows (an address a lane) of 16 bytes."""
    text = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
    return emit(text, "rrrr", [("r", addr)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def stsm_t(addr, regs, offset=0, *, loc=None, ip=None):
    """stmatrix.trans of 2 or 4 8x8 matrices of 16-bit units; lane 8k + i holds the address of column i of matrix k."""
    n = len(regs)
    text = f"stmatrix.sync.aligned.m8n8.x{n}.trans.shared.b16 [$0+{offset}], {_list(1, n)};"
    emit(text, ins=[("r", addr), *(("r", x) for x in regs)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def sts_b16(addr, v, offset=0, *, loc=None, ip=None):
    """Store the low half of a 32-bit register."""
    text = f"{{.reg .b16 l,h; mov.b32 {{l,h}}, $1; st.shared.b16 [$0+{offset}], l;}}"
    emit(text, ins=[("r", addr), ("r", v)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def sts_b32(addr, a, offset=0, *, loc=None, ip=None):
    emit(f"st.shared.b32 [$0+{offset}], $1;", ins=[("r", addr), ("r", a)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def sts_f32(addr, a, offset=0, *, loc=None, ip=None):
    emit(f"st.shared.f32 [$0+{offset}], $1;", ins=[("r", addr), ("f", a)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def sts_v2f(addr, a, b, offset=0, *, loc=None, ip=None):
    text = f"st.shared.v2.f32 [$0+{offset}], {{$1,$2}};"
    emit(text, ins=[("r", addr), ("f", a), ("f", b)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def sts_v4f(addr, a, b, c, d, *, loc=None, ip=None):
    ins = [("r", addr), ("f", a), ("f", b), ("f", c), ("f", d)]
    emit("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", ins=ins, memory=True, loc=loc, ip=ip)


@dsl_user_op
def sts_zero16(addr, offset=0, *, loc=None, ip=None):
    text = f"{{.reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$0+{offset}], {{z,z,z,z}};}}"
    emit(text, ins=[("r", addr)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds_b32(addr, offset=0, *, loc=None, ip=None):
    return emit(f"ld.shared.b32 $0, [$1+{offset}];", "r", [("r", addr)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds_f32(addr, offset=0, *, loc=None, ip=None):
    return emit(f"ld.shared.f32 $0, [$1+{offset}];", "f", [("r", addr)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds_v2f(addr, offset=0, *, loc=None, ip=None):
    return emit(f"ld.shared.v2.f32 {{$0,$1}}, [$2+{offset}];", "ff", [("r", addr)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds_v4f(addr, offset=0, *, loc=None, ip=None):
    text = f"ld.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{offset}];"
    return emit(text, "ffff", [("r", addr)], memory=True, loc=loc, ip=ip)


# ---- global memory


@dsl_user_op
def ldg_b32(addr, *, loc=None, ip=None):
    return emit("ld.global.b32 $0, [$1];", "r", [("l", addr)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def ldg_b32_below(addr, i, n, *, loc=None, ip=None):
    """A word if i < n, else 0 without touching memory."""
    text = "{.reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, 0; @p ld.global.b32 $0, [$1];}"
    return emit(text, "r", [("l", addr), ("r", i), ("r", n)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def ldg_v2f_below(addr, i, n, *, loc=None, ip=None):
    """Two floats if i < n, else zeros without touching memory."""
    text = "{.reg .pred p; setp.lt.s32 p, $3, $4; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.f32 {$0,$1}, [$2];}"
    return emit(text, "ff", [("l", addr), ("r", i), ("r", n)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def ldg_v2b_below(addr, i, n, *, loc=None, ip=None):
    """Two words if i < n, else zeros without touching memory."""
    text = "{.reg .pred p; setp.lt.s32 p, $3, $4; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.b32 {$0,$1}, [$2];}"
    return emit(text, "rr", [("l", addr), ("r", i), ("r", n)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def ldg_v4f_below(addr, i, n, *, loc=None, ip=None):
    """Four floats if i < n, else zeros without touching memory."""
    text = (
        "{.reg .pred p; setp.lt.s32 p, $5, $6; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @p ld.global.v4.f32 {$0,$1,$2,$3}, [$4];}"
    )
    return emit(text, "ffff", [("l", addr), ("r", i), ("r", n)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def stg_v2b(addr, a, b, *, loc=None, ip=None):
    emit("st.global.v2.b32 [$0], {$1,$2};", ins=[("l", addr), ("r", a), ("r", b)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def stg_b32(addr, a, offset=0, *, loc=None, ip=None):
    emit(f"st.global.b32 [$0+{offset}], $1;", ins=[("l", addr), ("r", a)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def stg_f32(addr, v, offset=0, *, loc=None, ip=None):
    emit(f"st.global.f32 [$0+{offset}], $1;", ins=[("l", addr), ("f", v)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def stg_v2f(addr, a, b, offset=0, *, loc=None, ip=None):
    text = f"st.global.v2.f32 [$0+{offset}], {{$1,$2}};"
    emit(text, ins=[("l", addr), ("f", a), ("f", b)], memory=True, loc=loc, ip=ip)


# ---- arithmetic


@dsl_user_op
def ex2(x, *, loc=None, ip=None):
    """2^x; 2^-inf is exactly 0."""
    return emit("ex2.approx.ftz.f32 $0, $1;", "f", [("f", x)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def lg2(x, *, loc=None, ip=None):
    return emit("lg2.approx.f32 $0, $1;", "f", [("f", x)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def rcp_or_zero(x, *, loc=None, ip=None):
    """1 / x to the last bit or two; 0 where x is 0."""
    text = (
        "{.reg .pred p; .reg .f32 t; rcp.approx.ftz.f32 t, $1; setp.eq.f32 p, $1, 0f00000000;"
        " selp.f32 $0, 0f00000000, t, p;}"
    )
    return emit(text, "f", [("f", x)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def fmax(a, b, *, loc=None, ip=None):
    """The larger one; of a number and a NaN the number."""
    return emit("max.f32 $0, $1, $2;", "f", [("f", a), ("f", b)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    return emit("fma.rn.f32 $0, $1, $2, $3;", "f", [("f", a), ("f", b), ("f", c)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def keep_below(x, row, limit, *, loc=None, ip=None):
    """x where row < limit, else -inf. A select, so that a NaN in x does not survive."""
    text = "{.reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p;}"
    return emit(text, "f", [("f", x), ("r", row), ("r", limit)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def prmt(a, b, sel, *, loc=None, ip=None):
    """Four bytes out of (a: bytes 0..3, b: bytes 4..7); sel: Python int, a hex digit a byte, lowest byte last."""
    text = f"prmt.b32 $0, $1, $2, {sel};"
    return emit(text, "r", [("r", a), ("r", b)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def cvt_e4m3x4_f16(x, *, loc=None, ip=None):
    """Four e4m3 of a register to (f16x2 of bytes 0 and 1, f16x2 of bytes 2 and 3). Exact."""
    text = "{.reg .b16 l,h; mov.b32 {l,h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
    return emit(text, "rr", [("r", x)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def cvt_f16x2(hi, lo, *, loc=None, ip=None):
    return emit("cvt.rn.f16x2.f32 $0, $1, $2;", "r", [("f", hi), ("f", lo)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def halves_f32(x, *, loc=None, ip=None):
    """Two f16 of a register, low half first, as Float32."""
    text = "{.reg .b16 l,h; mov.b32 {l,h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
    return emit(text, "ff", [("r", x)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def cvt_bf16x2(hi, lo, *, loc=None, ip=None):
    return emit("cvt.rn.bf16x2.f32 $0, $1, $2;", "r", [("f", hi), ("f", lo)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def cvt_e4m3x2(hi, lo, *, loc=None, ip=None):
    """Two e4m3 (saturating) in the low half of a register."""
    text = "{.reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $1, $2; mov.b32 $0, {t,t};}"
    return emit(text, "r", [("f", hi), ("f", lo)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def thread_x(*, loc=None, ip=None):
    """threadIdx.x, read where it is written: what is made of it is not kept in registers from the start."""
    return emit("mov.u32 $0, %tid.x;", "r", loc=loc, ip=ip)


@dsl_user_op
def block_x(*, loc=None, ip=None):
    """blockIdx.x, the same way."""
    return emit("mov.u32 $0, %ctaid.x;", "r", loc=loc, ip=ip)


@dsl_user_op
def block_y(*, loc=None, ip=None):
    """blockIdx.y, the same way."""
    return emit("mov.u32 $0, %ctaid.y;", "r", loc=loc, ip=ip)


@dsl_user_op
def scan_add(x, distance, *, loc=None, ip=None):
    """x + the x of the lane `distance` below (lanes without one keep theirs): a step of an inclusive prefix sum."""
    text = (
        f"{{.reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, {distance}, 0, -1;"
        " @!p mov.b32 t, 0; add.s32 $0, t, $1;}"
    )
    return emit(text, "r", [("r", x)], loc=loc, ip=ip)


@dsl_user_op
def lanes_at_most(x, bound, *, loc=None, ip=None):
    """How many lanes of the warp hold an x <= bound."""
    text = "{.reg .pred p; .reg .b32 t; setp.le.s32 p, $1, $2; vote.sync.ballot.b32 t, p, -1; popc.b32 $0, t;}"
    return emit(text, "r", [("r", x), ("r", bound)], loc=loc, ip=ip)


@dsl_user_op
def barrier_any(condition, which, threads, *, loc=None, ip=None):
    """A barrier (number, Python int of threads) that says whether the condition holds in any of the threads."""
    text = (
        f"{{.reg .pred p,q; setp.ne.s32 p, $1, 0; barrier.cta.red.or.pred q, $2, {threads}, p; selp.b32 $0, 1, 0, q;}}"
    )
    ins = [("r", Int32(condition)), ("r", Int32(which))]
    return emit(text, "r", ins, memory=True, loc=loc, ip=ip) != 0


# ---- wgmma
# A shared-memory descriptor is its low word (address / 16; the leading offset, which the layouts here do not use) and
# a constant high word: the offset between groups of 8 rows / 16, and the swizzle.
SW128 = (1024 >> 4) | (1 << 30)  # rows of 128 bytes, a group of 8 rows 1024 bytes after the other
SW64 = (512 >> 4) | (2 << 30)  # rows of 64 bytes, groups 512 bytes apart


def descriptor(addr):
    """Low descriptor word of a shared address (Int32). Steps inside an operand are additions of bytes / 16 to it."""
    return ((addr & 0x3FFFF) >> 4) | 0x10000


_KINDS = {  # instruction suffix, tail of the immediates (transpose bits, where the type has them)
    "e4m3": ("k32.f32.e4m3.e4m3", 0),
    "f16": ("k16.f32.f16.f16", 1),
    "bf16": ("k16.f32.bf16.bf16", 1),
}


@dsl_user_op
def wgmma_ss(kind, d, lo_a, hi_a, lo_b, hi_b, accumulate, a_mn_major=False, *, loc=None, ip=None):
    """d (+)= A B^T, both in shared memory: A 64 x k, B n x k with n = 2 len(d). d: list of Float32; hi_*, accumulate:
    Python ints."""
    k = len(d)
    suffix, transposable = _KINDS[kind]
    tail = f", {int(a_mn_major)}, 0" if transposable else ""
    text = (
        f"{{.reg .pred p; .reg .b64 da,db; .reg .b32 ha,hb; mov.b32 ha, {hi_a}; mov.b32 hb, {hi_b};"
        f" mov.b64 da, {{${k},ha}}; mov.b64 db, {{${k + 1},hb}}; setp.ne.b32 p, {int(accumulate)}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{2 * k}{suffix} {_list(0, k)}, da, db, p, 1, 1{tail};}}"
    )
    return emit(text, "f" * k, [("r", lo_a), ("r", lo_b)], tied=d, memory=True, loc=loc, ip=ip)


@dsl_user_op
def wgmma_rs(kind, d, a, lo_b, hi_b, accumulate=True, *, loc=None, ip=None):
    """d (+)= A B^T with A in registers (4 a lane), B (n x k) in shared memory. accumulate: a bool or an Int32."""
    k = len(d)
    suffix, transposable = _KINDS[kind]
    tail = ", 0" if transposable else ""
    fixed = isinstance(accumulate, bool)
    ins = [("r", x) for x in a] + [("r", lo_b)] + ([] if fixed else [("r", accumulate)])
    text = (
        f"{{.reg .pred p; .reg .b64 db; .reg .b32 hb; mov.b32 hb, {hi_b}; mov.b64 db, {{${k + 4},hb}};"
        f" setp.ne.b32 p, {int(accumulate) if fixed else f'${k + 5}'}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{2 * k}{suffix} {_list(0, k)}, {_list(k, 4)}, db, p, 1, 1{tail};}}"
    )
    return emit(text, "f" * k, ins, tied=d, memory=True, loc=loc, ip=ip)


@dsl_user_op
def settled(d, *, loc=None, ip=None):
    """The same registers after a wgmma wait: arithmetic on them cannot be moved before it. No instruction."""
    k = len(d)
    res = emit("", "f" * k, tied=d, memory=True, loc=loc, ip=ip)
    return [res] if k == 1 else res


# ---- tensor memory access


@dsl_user_op
def tma_2d(dst, tmap, x, y, bar, *, loc=None, ip=None):
    """One box of a 2-D map to shared memory; its bytes count on the mbarrier `bar` (a DSL pointer)."""
    text = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2,$3}], [$4];"
    ins = [("r", dst), ("l", tmap), ("r", Int32(x)), ("r", y), ("r", bar.toint())]
    emit(text, ins=ins, memory=True, loc=loc, ip=ip)


@dsl_user_op
def tma_3d(dst, tmap, x, y, z, bar, *, loc=None, ip=None):
    """One box of a 3-D map to shared memory; its bytes count on the mbarrier `bar` (a DSL pointer)."""
    text = (
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2,$3,$4}], [$5];"
    )
    ins = [("r", dst), ("l", tmap), ("r", Int32(x)), ("r", Int32(y)), ("r", z), ("r", bar.toint())]
    emit(text, ins=ins, memory=True, loc=loc, ip=ip)


@dsl_user_op
def prefetch_tmap(tmap, *, loc=None, ip=None):
    emit("prefetch.tensormap [$0];", ins=[("l", tmap)], memory=True, loc=loc, ip=ip)
