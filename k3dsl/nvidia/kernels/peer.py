"""Words that say themselves whether they have arrived: stores to other ranks' memory, and waits for what they store.

A mailbox is armed with a word that no data has. Who writes stores 16 bytes at once, relaxed and at system scope; who
reads loads until none of the words is the armed one. There is no flag and no fence: a word is its own flag. Every wait
gives up after a set time, or as soon as another wait of the device has, and says so in `poison` (once a device) and in
`alarm` (host memory).
"""

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from k3dsl.nvidia.kernels.ptx import emit

#: Failed reads between two looks at the clock.
PATIENCE = 64


@dsl_user_op
def ldg_address(address, *, loc=None, ip=None):
    """An 8-byte word that no kernel writes."""
    return emit("ld.global.nc.b64 $0, [$1];", "l", [("l", address)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def ldg_address_if(address, live, *, loc=None, ip=None):
    """The same if `live`, else 0 without touching memory."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b64 $0, 0; @p ld.global.nc.b64 $0, [$1]; }"
    return emit(text, "l", [("l", address), ("r", Int32(live))], memory=True, loc=loc, ip=ip)


@dsl_user_op
def as_float(bits, *, loc=None, ip=None):
    return emit("mov.b32 $0, $1;", "f", [("r", bits)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def sts32_if(shared, word, live, *, loc=None, ip=None):
    """A word to shared memory, if `live`."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.b32 [$0], $1; }",
        ins=[("r", shared), ("r", word), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def send128(address, words, live, *, loc=None, ip=None):
    """16 bytes to any rank's memory, if `live`. Each of the four words arrives whole."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
        ins=[("l", address), *(("r", w) for w in words), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def send64(address, words, live, *, loc=None, ip=None):
    """8 bytes, as send128."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.v2.b32 [$0], {$1, $2}; }",
        ins=[("l", address), *(("r", w) for w in words), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def send32(address, word, live, *, loc=None, ip=None):
    """A word, as send128."""
    emit(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.relaxed.sys.global.b32 [$0], $1; }",
        ins=[("l", address), ("r", word), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def send_all128(address, words, live, *, loc=None, ip=None):
    """16 bytes to a multicast address: the same place on every rank."""
    emit(
        "{ .reg .pred p; .reg .f32 a, b, c, d; setp.ne.s32 p, $5, 0; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3;"
        " mov.b32 d, $4; @p multimem.st.relaxed.sys.global.v4.f32 [$0], {a, b, c, d}; }",
        ins=[("l", address), *(("r", w) for w in words), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def send_all64(address, words, live, *, loc=None, ip=None):
    """8 bytes, as send_all128."""
    emit(
        "{ .reg .pred p; .reg .b64 t; setp.ne.s32 p, $3, 0; mov.b64 t, {$1, $2};"
        " @p multimem.st.relaxed.sys.global.b64 [$0], t; }",
        ins=[("l", address), *(("r", w) for w in words), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def await_words(addresses, live, armed, limit, poison, width=4, *, loc=None, ip=None):
    """`width` (1 or 4) words at each of the live addresses, once none of them is `armed`: (words, missing).

    armed: -1 or -2**31, a Python int. All reads of a round are in flight together. Words of dead addresses are 0.
    missing: a bit for each address that was given up, after `limit` nanoseconds or because `poison` (an 8-byte word of
    this device) is not 0.
    """
    n = len(addresses)
    flag, first = n * width, n * width + 1
    words = [[f"${i * width + j}" for j in range(width)] for i in range(n)]
    text = [".reg .pred k3any, k3e, " + ", ".join(f"k3m{i}" for i in range(n)) + "; .reg .b64 k3s, k3t;"]
    text.append(".reg .b32 k3n, k3v;")
    text += [f"setp.ne.s32 k3m{i}, ${first + n + i}, 0;" for i in range(n)]
    text += [f"mov.b32 {w}, 0;" for group in words for w in group]
    text.append("mov.b32 k3n, 0; mov.b64 k3s, 0; POLL:")
    kind = f"v{width}.b32" if width > 1 else "b32"
    for i, group in enumerate(words):
        names = "{" + ", ".join(group) + "}" if width > 1 else group[0]
        text.append(f"@k3m{i} ld.relaxed.sys.global.{kind} {names}, [${first + i}];")
    # The armed word is the largest unsigned or the smallest signed one: one comparison says whether any word is it.
    fold = "max.u32" if armed == -1 else "min.s32"
    for i, group in enumerate(words):
        text.append(f"mov.b32 k3v, {group[0]};")
        text += [f"{fold} k3v, k3v, {w};" for w in group[1:]]
        text.append(f"setp.eq.and.b32 k3m{i}, k3v, {armed & 0xFFFFFFFF}, k3m{i};")
    text.append("or.pred k3any, k3m0, k3m0;")
    text += [f"or.pred k3any, k3any, k3m{i};" for i in range(1, n)]
    text.append("@!k3any bra POLLED;")
    text.append(f"add.s32 k3n, k3n, 1; and.b32 k3v, k3n, {PATIENCE - 1}; setp.ne.s32 k3e, k3v, 0; @k3e bra POLL;")
    text.append("mov.u64 k3t, %globaltimer; setp.eq.s64 k3e, k3s, 0; @k3e mov.b64 k3s, k3t;")
    text.append(f"sub.s64 k3t, k3t, k3s; setp.gt.s64 k3e, k3t, ${first + 2 * n}; @k3e bra POLLED;")
    text.append(f"ld.relaxed.gpu.global.b64 k3t, [${first + 2 * n + 1}]; setp.eq.s64 k3e, k3t, 0; @k3e bra POLL;")
    text.append(f"POLLED: mov.b32 ${flag}, 0;")
    text += [f"@k3m{i} or.b32 ${flag}, ${flag}, {1 << i};" for i in range(n)]
    ins = [*(("l", a) for a in addresses), *(("r", Int32(x)) for x in live), ("l", Int64(limit)), ("l", poison)]
    found = emit("{ " + " ".join(text) + " }", "r" * (flag + 1), ins, memory=True, loc=loc, ip=ip)
    return [found[i * width : (i + 1) * width] for i in range(n)], found[flag]


@dsl_user_op
def lowest(mask, *, loc=None, ip=None):
    """The number of the lowest bit that is set."""
    text = "{ .reg .b32 t; sub.s32 t, $1, 1; not.b32 $0, $1; and.b32 t, t, $0; popc.b32 $0, t; }"
    return emit(text, "r", [("r", mask)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def report(poison, alarm, low, high, *, loc=None, ip=None):
    """A wait was given up: the 64-bit record to `poison` if it is the device's first, and then to `alarm` as well."""
    emit(
        "{ .reg .pred p; .reg .b64 r, t; mov.b64 r, {$2, $3}; atom.relaxed.gpu.global.cas.b64 t, [$0], 0, r;"
        " setp.eq.s64 p, t, 0; @p st.relaxed.sys.global.b64 [$1], r; }",
        ins=[("l", poison), ("l", alarm), ("r", low), ("r", high)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def without_minus_zero(word, *, loc=None, ip=None):
    """A pair of bf16 in which -0 became +0; all else as it was (a NaN may change its payload)."""
    text = "{ .reg .b32 one, zero; mov.b32 one, 0x3F803F80; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, one, zero; }"
    return emit(text, "r", [("r", word)], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def st_async128(peer, words, peer_barrier, *, loc=None, ip=None):
    """16 bytes to the shared memory of a CTA of the cluster; they count on its barrier."""
    emit(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0], {$1, $2, $3, $4}, [$5];",
        ins=[("r", peer), *(("r", w) for w in words), ("r", peer_barrier)],
        memory=True,
        loc=loc,
        ip=ip,
    )
