"""Sparse MLA over fp8_ds_mla records in Triton, a program a token, two ways. For comparison only.

`rows` has heads as the rows of its products, as attention is usually written; `columns` has them as columns, so that
waves split the keys of one product and the columns of the other, and none computes what another does.
"""

import triton
import triton.language as tl


@triton.jit
def gather(codes, scales, ropes, slot, BLOCK: tl.constexpr):
    """Latents [BLOCK, 512] in bf16 and rope parts [BLOCK, 64] of records, read as e4m3, fp32 and bf16."""
    raw = tl.load(codes + slot[:, None] * 656 + tl.arange(0, 512)[None, :])
    four = tl.load(scales + slot[:, None] * 164 + 128 + tl.arange(0, 4)[None, :])
    rope = tl.load(ropes + slot[:, None] * 328 + 264 + tl.arange(0, 64)[None, :])
    wide = tl.reshape(raw.to(tl.float32), (BLOCK, 4, 128)) * four[:, :, None]
    return tl.reshape(wide, (BLOCK, 512)).to(tl.bfloat16), rope


@triton.jit
def rows(
    q, codes, scales, ropes, indices, indptr, out, q_t, q_h, out_t, out_h, scale,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """scale: times log2(e)."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, 16), tl.arange(0, 512)
    row = q + token * q_t + head[:, None] * q_h
    there = head[:, None] < H
    latent_q = tl.load(row + column[None, :], mask=there, other=0.0)
    rope_q = tl.load(row + 512 + tl.arange(0, 64)[None, :], mask=there, other=0.0)
    begin, end = tl.load(indptr + token), tl.load(indptr + token + 1)
    most = tl.full((16,), -float("inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    sums = tl.zeros((16, 512), tl.float32)
    for start in tl.range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        slot = tl.load(indices + tl.minimum(at, end - 1)).to(tl.int64)
        latent, rope = gather(codes, scales, ropes, slot, BLOCK)
        scores = tl.dot(latent_q, tl.trans(latent))
        scores = tl.dot(rope_q, tl.trans(rope), scores) * scale
        scores = tl.where(at[None, :] < end, scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        power = tl.exp2(scores - new[:, None])
        alpha = tl.exp2(most - new)
        total = total * alpha + tl.sum(power, 1)
        sums = tl.dot(power.to(tl.bfloat16), latent, sums * alpha[:, None])
        most = new
    result = sums / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + token * out_t + head[:, None] * out_h + column[None, :], result.to(tl.bfloat16), mask=there)


@triton.jit
def columns(
    q, codes, scales, ropes, indices, indptr, out, q_t, q_h, out_t, out_h, scale,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """scale: times log2(e)."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, 16), tl.arange(0, 512)
    place = q + token * q_t + head[None, :] * q_h
    there = head[None, :] < H
    latent_q = tl.load(place + column[:, None], mask=there, other=0.0)
    rope_q = tl.load(place + 512 + tl.arange(0, 64)[:, None], mask=there, other=0.0)
    begin, end = tl.load(indptr + token), tl.load(indptr + token + 1)
    most = tl.full((16,), -float("inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    sums = tl.zeros((512, 16), tl.float32)
    for start in tl.range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        slot = tl.load(indices + tl.minimum(at, end - 1)).to(tl.int64)
        latent, rope = gather(codes, scales, ropes, slot, BLOCK)
        scores = tl.dot(latent, latent_q)
        scores = tl.dot(rope, rope_q, scores) * scale
        scores = tl.where(at[:, None] < end, scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 0))
        power = tl.exp2(scores - new[None, :])
        alpha = tl.exp2(most - new)
        total = total * alpha + tl.sum(power, 0)
        sums = tl.dot(tl.trans(latent), power.to(tl.bfloat16), sums * alpha[None, :])
        most = new
    result = sums / tl.where(total == 0, 1.0, total)[None, :]
    tl.store(out + token * out_t + head[None, :] * out_h + column[:, None], result.to(tl.bfloat16), mask=there)
