"""Stage W_UK: the nope part of a query into the latent space, 16 latent rows of one head a wave.

Workgroups 208..255, 8 waves each: 384 tasks, 12 heads of 32 groups. One matrix instruction holds all of K = 128 in
MXFP4 (bf16: four), so nothing is reduced. The activations are quantized where they are: a lane holds one block of 32.

    e = exponent of (amax + 0x200000 as bits); code = max(e - 2, 1);  fp4 = e2m1(x / 2^(code - 127)), saturating
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.handoff import Spec, Step, poll
from k3dsl.amd.mla_pre.key import HEADS, NOPE
from k3dsl.amd.mla_pre.layout import UK_FIRST, UK_GROUPS, UK_PITCH, UK_TILE
from k3dsl.amd.mla_pre.query import put_query


def w_uk_stage(s: Step) -> None:
    """For workgroups 208..255."""
    task = ((s.block - UK_FIRST) << 3) + s.wave
    head, latents = p.shr(task, 5), task & (UK_GROUPS - 1)
    token = s.lane & 15
    row = (p.umin(token, s.key.tokens - 1) * HEADS + head) * (NOPE // 2)
    product = (_mxfp4 if s.key.w_uk == "mxfp4" else _bf16)(s, head, latents, row)
    with p.when(token < s.key.tokens):
        put_query(s, token, head, (latents << 2) + (s.lane >> 4), p.floats(product))


def _nope(s: Step, pair: fx.Int32, place: int) -> list[fx.Int32]:
    """A lane's 16 words of the nope query, in 8 parts of two pairs. All waves of the workgroup have the same head, so
    wave w polls part w, from `pair` on, and they meet in LDS: an eighth of the polling.
    """
    s.read_epoch()
    words = poll(s, [Spec("qn", pair, 2)])[0]
    at = s.lane * UK_PITCH + place
    s.memory.store(at + (s.wave << 3), words)
    p.barrier()
    return [w for part in range(4) for w in s.memory.load(at + 16 * part, 4)]


def _mxfp4(s: Step, head: fx.Int32, latents: fx.Int32, row: fx.Int32) -> Any:
    a = s.args
    block = s.lane >> 4  # of 32 elements of K
    n = (latents << 4) + (s.lane & 15)
    weight = p.load(p.resource(a.w_k), head * a.w_k_stride0 + n * a.w_k_stride1 + (block << 4), 4, p.NT)
    place = head * a.w_k_scale_stride0 + n * a.w_k_scale_stride1 + block * a.w_k_scale_stride2
    # bytes of any stride: cut out of the aligned dword around them
    around = p.load(p.resource(a.w_k_scale), place & -4)[0]
    weight_scale = p.shr(around, (place & 3) << 3) & 0xFF
    words = _nope(s, row + (block << 4) + (s.wave << 1), s.lds.body)
    largest = fx.Int32(0)
    for w in words:
        largest = p.umax(p.umax(largest, w & 0x7FFF), p.shr(w, 16) & 0x7FFF)
    exponent = p.shr((largest << 16) + 0x200000, 23) & 0xFF
    code = p.umax(p.umax(exponent, 2) - 2, 1)
    scale = p.as_float(code << 23)
    packed = []
    for start in range(0, 16, 4):
        four = fx.Int32(0)
        for byte in range(4):
            four = p.pack_fp4(four, words[start + byte], scale, byte)
        packed.append(four)
    return p.mfma_fp4(weight, weight_scale, packed, code)


def _bf16(s: Step, head: fx.Int32, latents: fx.Int32, row: fx.Int32) -> Any:
    """W_UK_T [12, 128, 512] has its latents together and the matrix unit wants K together: a wave's 128 x 16 tile is
    turned by the transposing reads of LDS.
    """
    a = s.args
    tile = s.wave * UK_TILE + s.lds.body
    buffer = p.resource(a.w_k)
    base = head * a.w_k_stride0 + (latents << 5)
    pieces = []
    for j in range(4):
        piece = s.lane + 64 * j
        offset = base + (piece >> 1) * a.w_k_stride1 + ((piece & 1) << 4)
        pieces.append((piece << 4, p.load_vector(buffer, offset, 4, p.NT)))
    group, inner = s.lane >> 4, s.lane & 15
    # part 2 q + j: words 4 group + 2 j.. of step q
    pair = row + ((s.wave >> 1) << 4) + (group << 2) + ((s.wave & 1) << 1)
    words = _nope(s, pair, s.lds.body + 8 * UK_TILE)
    for place, value in pieces:
        s.memory.store_vector(place + tile, value, 4)
    total = p.zeros()
    for q in range(4):
        halves = []
        for half in range(2):
            k = (group << 3) + (inner >> 2) + (32 * q + 4 * half)
            halves.append(p.lds_transposed(s.memory, tile + (k << 5) + ((inner & 3) << 3)))
        left = p.join([w for h in halves for w in h])
        total = p.mfma_bf16(left, p.join(words[4 * q : 4 * q + 4]), total)
    return total
