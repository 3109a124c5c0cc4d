"""Stage norm: workgroup t < S normalizes token t's q and kv latents and writes its cache entry.

Thread i owns columns 4 i..+3 of the projection: q latent below 384, kv latent from there on; every thread also polls
4 columns of the rope part, which threads 0..15 use.

    qn = bf16(v * rsq(sum_q / 1536 + q_eps) * q_nw);  kn = bf16(v * rsq(sum_kv / 512 + kv_eps) * kv_nw)

The cache entry is e4m3 of kn and of the rope part as it is, with a scale of 1.
"""

from __future__ import annotations

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.handoff import Spec, Step, poll, publish, store_row
from k3dsl.amd.mla_pre.key import KV_LORA, Q_LORA, QKV_A
from k3dsl.amd.mla_pre.layout import QC_ROWS

Q_THREADS = Q_LORA // 4
SUMS = 4096  # bytes into the reduction area of LDS
WAVE = (32, 16, 8, 4, 2, 1)


def norm_stage(s: Step) -> None:
    """For workgroups below S."""
    key, a = s.key, s.args
    token, thread = s.block, s.thread
    is_q = s.wave < Q_THREADS // 64
    slot = p.scalar_load(a.slots, token * 8)[0]
    base = p.choose(is_q, a.q_nw, a.kv_nw)
    start = p.choose(is_q, fx.Int32(0), fx.Int32(Q_LORA * 2))
    norm = p.load(p.resource(base), thread * 8 - start, 2)
    row = token * (QKV_A // 2)
    s.read_epoch()
    own, rope = poll(
        s, [Spec("qa", row + thread * 2, 2), Spec("qa", row + (Q_LORA + KV_LORA) // 2 + p.umin(thread, 15) * 2, 2)]
    )
    values = p.unpack(own)
    square = fx.Float32(0.0)
    for v in values:
        square = square + v * v
    square = p.butterfly(square, WAVE, p.add)
    with p.when(s.lane == 0):
        s.memory.store(s.wave * 4 + SUMS, [p.bits(square)])
    p.barrier()
    sums = [p.as_float(w) for half in range(2) for w in s.memory.load(fx.Int32(SUMS + 16 * half), 4)]
    q_sum = fx.Float32(0.0)
    for x in sums[:6]:
        q_sum = q_sum + x
    q_scale = p.rsq(q_sum * fx.Float32(1.0 / Q_LORA) + fx.Float32(key.q_eps))
    kv_scale = p.rsq((sums[6] + sums[7]) * fx.Float32(1.0 / KV_LORA) + fx.Float32(key.kv_eps))
    scale = p.choose(is_q, q_scale, kv_scale)
    normed = [v * scale * w for v, w in zip(values, p.unpack(norm), strict=True)]
    words = [p.pack_bf16(normed[0], normed[1]), p.pack_bf16(normed[2], normed[3])]
    with p.when(is_q):
        store_row(s, QC_ROWS, token * QC_ROWS.pitch + thread * 8, words)
    publish(s, "qcr", token)  # before the cache entry: q_b is waiting
    with p.when(slot >= 0):
        block = p.udiv(slot, a.block_size)
        inner = slot - block * a.block_size
        place = p.long(block) * p.long(a.kv_block_stride) + p.long(inner) * p.long(a.kv_slot_stride)
        entry = p.resource(a.kv_cache + place)
        with p.when(thread >= Q_THREADS):
            p.store(entry, (thread - Q_THREADS) * 4, [p.pack_fp8(p.unpack(words))])
        with p.when(thread < 16):
            p.store(entry, thread * 4 + KV_LORA, [p.pack_fp8(p.unpack(rope))])
