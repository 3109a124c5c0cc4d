"""Device helpers that two or more kernels use. One helper, one PTX idea; global addresses are Int64, shared ones Int32.

Conventions: a bf16 pair is one 32-bit word (Int32), low half first; a 16-byte vector is a list of four words.
"""

from cutlass import Int32, cute
from cutlass.cutlass_dsl import dsl_user_op

from k3dsl.nvidia.kernels.ptx import emit

#: Targets whose FP32 pipe takes two lanes an instruction (`fma.rn.f32x2`: IEEE per lane, bit-identical to two of one).
PACKED_F32 = ("sm_100a", "sm_103a")

_EVICT_FIRST = ".reg .b64 pol; createpolicy.fractional.L2::evict_first.b64 pol, 1.0;"


# ---- global memory ----------------------------------------------------------------------------------------------


@dsl_user_op
def ldg_weight(address, *, loc=None, ip=None):
    """16 bytes of a weight: read-only path, not kept in L1, first to leave L2 (a step reads a weight once)."""
    return emit(
        "{ " + _EVICT_FIRST + " ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4], pol; }",
        "rrrr",
        [("l", address)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def ldg_const(address, *, loc=None, ip=None):
    """16 bytes that no kernel of the stream writes (a norm weight): read-only path."""
    return emit("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", [("l", address)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def ldg_if(address, live, *, loc=None, ip=None):
    """16 bytes if `live` (a Boolean), else zeros without touching memory. By the ordinary path: a kernel wrote them."""
    return emit(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "rrrr",
        [("l", address), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def ldg_f32(address, *, loc=None, ip=None):
    return emit("ld.global.f32 $0, [$1];", "f", [("l", address)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def ldg_pair_if(address, live, other, *, loc=None, ip=None):
    """Two words if `live`, else `other` (an immediate) twice, without touching memory."""
    return emit(
        f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, {other}; mov.b32 $1, {other};"
        " @p ld.global.v2.b32 {$0, $1}, [$2]; }",
        "rr",
        [("l", address), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def stg16_if(address, word, live, *, loc=None, ip=None):
    """The low half of a word, if `live`."""
    emit(
        "{ .reg .pred p; .reg .b16 l, h; setp.ne.s32 p, $2, 0; mov.b32 {l, h}, $1; @p st.global.b16 [$0], l; }",
        ins=[("l", address), ("r", word), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def stg32_if(address, word, live, *, loc=None, ip=None):
    """A word, if `live`."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.b32 [$0], $1; }",
        ins=[("l", address), ("r", word), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def stg64_if(address, a, b, live, *, loc=None, ip=None):
    """Two words, if `live`."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.v2.b32 [$0], {$1, $2}; }",
        ins=[("l", address), ("r", a), ("r", b), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def stg128_if(address, words, live, *, loc=None, ip=None):
    """Four words, if `live`."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
        ins=[("l", address), *(("r", w) for w in words), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def cp_async_weight(shared, address, *, loc=None, ip=None):
    """16 bytes of a weight to shared memory, asynchronously (see cute.arch.cp_async_commit_group)."""
    emit(
        "{ " + _EVICT_FIRST + " cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, pol; }",
        ins=[("r", shared), ("l", address)],
        memory=True,
        loc=loc,
        ip=ip,
    )


# ---- shared memory ----------------------------------------------------------------------------------------------


@dsl_user_op
def lds32(shared, *, loc=None, ip=None):
    return emit("ld.shared.b32 $0, [$1];", "r", [("r", shared)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds64(shared, *, loc=None, ip=None):
    return emit("ld.shared.v2.b32 {$0, $1}, [$2];", "rr", [("r", shared)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds128(shared, *, loc=None, ip=None):
    return emit("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", [("r", shared)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds_f32(shared, *, loc=None, ip=None):
    return emit("ld.shared.f32 $0, [$1];", "f", [("r", shared)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds_f32x2(shared, *, loc=None, ip=None):
    return emit("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", [("r", shared)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def lds_f32x4(shared, *, loc=None, ip=None):
    return emit("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", [("r", shared)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def sts_f32_if(shared, x, live, *, loc=None, ip=None):
    """A float, if `live`."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.f32 [$0], $1; }",
        ins=[("r", shared), ("f", x), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def sts128(shared, words, *, loc=None, ip=None):
    emit(
        "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
        ins=[("r", shared), *(("r", w) for w in words)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def sts128_if(shared, words, live, *, loc=None, ip=None):
    """Four words, if `live`."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.shared.v4.b32 [$0], {$1, $2, $3, $4}; }",
        ins=[("r", shared), *(("r", w) for w in words), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def ldmatrix_x4_trans(shared, *, loc=None, ip=None):
    """Four 8x8 b16 matrices, transposed; lane i names row i % 8 (16 bytes) of matrix i // 8. Lane 4g + c gets rows
    2c, 2c + 1 of column g of each."""
    return emit(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
        "rrrr",
        [("r", shared)],
        memory=True,
        loc=loc,
        ip=ip,
    )


# ---- clusters: mbarriers and stores to a peer's shared memory ---------------------------------------------------


@dsl_user_op
def mbarrier_expect(barrier, bytes_, *, loc=None, ip=None):
    """Set up a barrier of one phase that completes when `bytes_` (a Python int) have arrived. One thread."""
    emit(
        f"{{ .reg .b64 s; mbarrier.init.shared.b64 [$0], 1; mbarrier.arrive.expect_tx.shared.b64 s, [$0], {bytes_}; }}",
        ins=[("r", barrier)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def mbarrier_wait_cluster(barrier, *, loc=None, ip=None):
    """Wait for phase 0, and see what peers of the cluster stored with it."""
    emit(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0;"
        " @p bra DONE; bra WAIT; DONE: }",
        ins=[("r", barrier)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def map_to_peer(shared, rank, *, loc=None, ip=None):
    """The shared::cluster address of `shared` in the CTA of rank `rank`."""
    ins = [("r", shared), ("r", Int32(rank))]
    return emit("mapa.shared::cluster.u32 $0, $1, $2;", "r", ins, volatile=False, loc=loc, ip=ip)


@dsl_user_op
def st_async32(peer, word, peer_barrier, *, loc=None, ip=None):
    """A word to a peer's shared memory; its 4 bytes count on the peer's barrier."""
    emit(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];",
        ins=[("r", peer), ("r", word), ("r", peer_barrier)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def st_async64(peer, a, b, peer_barrier, *, loc=None, ip=None):
    emit(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [$0], {$1, $2}, [$3];",
        ins=[("r", peer), ("r", a), ("r", b), ("r", peer_barrier)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def st_async_f32(peer, x, peer_barrier, *, loc=None, ip=None):
    emit(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];",
        ins=[("r", peer), ("f", x), ("r", peer_barrier)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def st_async_f32x4(peer, x, peer_barrier, *, loc=None, ip=None):
    emit(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];",
        ins=[("r", peer), *(("f", v) for v in x), ("r", peer_barrier)],
        memory=True,
        loc=loc,
        ip=ip,
    )


# ---- conversions ------------------------------------------------------------------------------------------------


@dsl_user_op
def unpack_bf16(word, *, loc=None, ip=None):
    """The two bf16 of a word as float32, low half first. Exact."""
    return emit("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "ff", [("r", word)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def pack_bf16(lo, hi, *, loc=None, ip=None):
    """Two float32 rounded to nearest even, `lo` in the low half."""
    return emit("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", [("f", lo), ("f", hi)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def pack_e4m3(lo, hi, *, loc=None, ip=None):
    """Two float32 as e4m3 in the low 16 bits, nearest even, saturating to +-448; NaN is 0x7F, so 0xFF never comes."""
    return emit(
        "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }",
        "r",
        [("f", lo), ("f", hi)],
        volatile=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def pack_e4m3x4(a, b, c, d, *, loc=None, ip=None):
    """Four float32 as the e4m3 bytes of a word, `a` lowest; as pack_e4m3."""
    return emit(
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
        " mov.b32 $0, {l, h}; }",
        "r",
        [("f", a), ("f", b), ("f", c), ("f", d)],
        volatile=False,
        loc=loc,
        ip=ip,
    )


# ---- arithmetic -------------------------------------------------------------------------------------------------


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    return emit("fma.rn.f32 $0, $1, $2, $3;", "f", [("f", a), ("f", b), ("f", c)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def mul(a, b, *, loc=None, ip=None):
    return emit("mul.rn.f32 $0, $1, $2;", "f", [("f", a), ("f", b)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def div(a, b, *, loc=None, ip=None):
    """IEEE division."""
    return emit("div.rn.f32 $0, $1, $2;", "f", [("f", a), ("f", b)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def rsqrt(x, *, loc=None, ip=None):
    """The hardware's approximation, 2 ulp."""
    return emit("rsqrt.approx.f32 $0, $1;", "f", [("f", x)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def _fma_f32x2(a, b, c, *, loc=None, ip=None):
    return emit(
        "{ .reg .b64 a, b, c; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; mov.b64 c, {$6, $7};"
        " fma.rn.f32x2 a, a, b, c; mov.b64 {$0, $1}, a; }",
        "ff",
        [("f", x) for x in (*a, *b, *c)],
        volatile=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _mul_f32x2(a, b, *, loc=None, ip=None):
    return emit(
        "{ .reg .b64 a, b; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; mul.rn.f32x2 a, a, b; mov.b64 {$0, $1}, a; }",
        "ff",
        [("f", x) for x in (*a, *b)],
        volatile=False,
        loc=loc,
        ip=ip,
    )


def fma2(a, b, c, packed: bool):
    """Two lanes of a * b + c, one rounding each; `packed`: the target is in PACKED_F32."""
    return _fma_f32x2(a, b, c) if packed else [fma(a[0], b[0], c[0]), fma(a[1], b[1], c[1])]


def mul2(a, b, packed: bool):
    """Two lanes of a * b; as fma2."""
    return _mul_f32x2(a, b) if packed else [mul(a[0], b[0]), mul(a[1], b[1])]


def warp_sum(x):
    """The sum over the 32 lanes of a warp, in every lane: a butterfly, so that the order is fixed."""
    for distance in (16, 8, 4, 2, 1):
        x = x + cute.arch.shuffle_sync_bfly(x, distance)
    return x


@dsl_user_op
def mma_bf16(acc, a, b, *, loc=None, ip=None):
    """acc + A B, m16n8k16, bf16 in, float32 out, as a new list of four. Lane 4g + c holds
    acc: (g, 2c), (g, 2c+1), (g+8, 2c), (g+8, 2c+1) as (row, column);
    a: rows g, g+8 at k = 2c, 2c+1, then g, g+8 at k = 2c+8, 2c+9; b: column g at k = 2c, 2c+1, then 2c+8, 2c+9."""
    return emit(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9},"
        " {$0, $1, $2, $3};",
        "ffff",
        [*(("r", w) for w in a), *(("r", w) for w in b)],
        tied=list(acc),
        volatile=False,
        loc=loc,
        ip=ip,
    )
