"""The fused epilogues and the two context packs: copies, an optional rotation, quantization, cache insert.

The argument lists are those of `k3dsl.nvidia`, and so are the effects: the cache (and the rotated query of the 16-bit
families) is written in place, everything else is returned. T tokens, H heads; every tensor is bf16, or every tensor
is fp16. Slots < 0 skip the insert only.

Where values are rounded: a 16-bit destination takes the float32 rotation rounded once; an fp8 destination takes it
unrounded, multiplied by scale_inv, clamped (NaN to -448) and rounded once. Without rotation values are copied.
"""

import torch
from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.reference.paged import ROPE, write_entries
from k3dsl.reference.rounding import f8, f8_clamped


def rotate(
    x: Tensor,  # [T, ..., 64]
    positions: Tensor | None,  # int64 [T]
    cos_sin_cache: Tensor | None,  # float32 [max_position, 64]: 32 cosines, 32 sines
) -> Tensor:  # float32 [T, ..., 64]
    """Rotary embedding of interleaved pairs: (x, y) -> (x c - y s, x s + y c). Both None: x in float32, unrotated."""
    if positions is None and cos_sin_cache is None:
        return x.to(torch.float32)
    if positions is None or cos_sin_cache is None:
        raise ConfigError("positions and cos_sin_cache are given together or not at all")
    row = cos_sin_cache[positions].reshape(x.shape[0], *[1] * (x.dim() - 2), ROPE)
    c, s = row[..., : ROPE // 2], row[..., ROPE // 2 :]
    first, second = x[..., 0::2].to(torch.float32), x[..., 1::2].to(torch.float32)
    return torch.stack([first * c - second * s, first * s + second * c], dim=-1).flatten(-2)


def _keys(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """[k_nope | k_pe on every head]: [T, H, 192]."""
    tokens, heads, _ = k_nope.shape
    return torch.cat([k_nope, k_pe[:, None, :].expand(tokens, heads, ROPE)], dim=2)


def fused_mla_key_concat_kv_cache_insert(
    q: Tensor,  # [T, H, 192]; its last 64 are rotated in place
    k_nope: Tensor,  # [T, H, 128]
    k_pe: Tensor,  # [T, 64]
    kv_c_normed: Tensor,  # [T, 512]
    kv_cache: Tensor,  # 16-bit [pages, page_size, 576]
    slot_mapping: Tensor,  # int64 [T]
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> Tensor:  # k [T, H, 192]
    """Prefill with a 16-bit cache."""
    return _prefill16(q, k_nope, k_pe, kv_c_normed, kv_cache, slot_mapping, positions, cos_sin_cache, "bf16")


def fused_mla_key_concat_ds_mla_insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c_normed: Tensor,
    kv_cache: Tensor,  # uint8 [pages, page_size, 656]
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> Tensor:  # k [T, H, 192]
    """Prefill with a cache of 656-byte records; queries and keys stay 16-bit."""
    return _prefill16(q, k_nope, k_pe, kv_c_normed, kv_cache, slot_mapping, positions, cos_sin_cache, "fp8_ds_mla")


def _prefill16(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c_normed: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    kv_format: str,
) -> Tensor:
    rope = rotate(k_pe, positions, cos_sin_cache).to(k_pe.dtype)
    if positions is not None:
        q[..., -ROPE:] = rotate(q[..., -ROPE:], positions, cos_sin_cache).to(q.dtype)
    write_entries(kv_cache, slot_mapping, kv_c_normed, rope, kv_format)
    return _keys(k_nope, rope)


def fused_mla_qkv_quant_kv_cache_fp8_insert(
    q: Tensor,  # [T, H, 192]
    k_nope: Tensor,  # [T, H, 128]
    k_pe: Tensor,  # [T, 64]
    kv_c_normed: Tensor,  # [T, 512]
    v: Tensor,  # [T, H, 128]
    kv_cache: Tensor,  # e4m3 [pages, page_size, 576]
    slot_mapping: Tensor,  # int64 [T]
    q_scale_inv: Tensor,  # float32 [1], as the three below
    k_scale_inv: Tensor,
    v_scale_inv: Tensor,
    cache_scale_inv: Tensor,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # e4m3: q [T, H, 192], k [T, H, 192], v [T, H, 128]
    """Prefill with an fp8 cache: four independent scales."""
    rope = rotate(k_pe, positions, cos_sin_cache)
    q_rope = rotate(q[..., -ROPE:], positions, cos_sin_cache)
    q_full = torch.cat([q[..., :-ROPE].to(torch.float32), q_rope], dim=2)
    write_entries(kv_cache, slot_mapping, kv_c_normed.to(torch.float32), rope, "fp8", cache_scale_inv, f8_clamped)
    return (
        f8_clamped(q_full * q_scale_inv),
        f8_clamped(_keys(k_nope.to(torch.float32), rope) * k_scale_inv),
        f8_clamped(v.to(torch.float32) * v_scale_inv),
    )


def fused_mla_decode_q_concat_kv_cache_insert(
    ql_nope: Tensor,  # [B, H, 512]
    q_pe: Tensor,  # [B, H, 64]
    kv_c_normed: Tensor,  # [B, 512]
    k_pe: Tensor,  # [B, 64]
    kv_cache: Tensor,  # 16-bit or e4m3 [pages, page_size, 576], or uint8 [pages, page_size, 656]
    slot_mapping: Tensor,  # int64 [B]
    *,
    ds_mla: bool = False,
    q_scale_inv: Tensor | None = None,  # float32 [1]: both for an fp8 cache, else neither
    cache_scale_inv: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> Tensor:  # mqa_q [B, H, 576]: e4m3 for an fp8 cache, else 16-bit
    """Decode, after absorption and right before the core, for the three cache formats."""
    if (q_scale_inv is None) != (cache_scale_inv is None) or (ds_mla and q_scale_inv is not None):
        raise ConfigError("q_scale_inv and cache_scale_inv are given together, for an fp8 cache, and never with ds_mla")
    rope, q_rope = rotate(k_pe, positions, cos_sin_cache), rotate(q_pe, positions, cos_sin_cache)
    if q_scale_inv is not None and cache_scale_inv is not None:
        write_entries(kv_cache, slot_mapping, kv_c_normed.to(torch.float32), rope, "fp8", cache_scale_inv, f8_clamped)
        return f8_clamped(torch.cat([ql_nope.to(torch.float32), q_rope], dim=2) * q_scale_inv)
    kv_format = "fp8_ds_mla" if ds_mla else "bf16"
    write_entries(kv_cache, slot_mapping, kv_c_normed, rope.to(k_pe.dtype), kv_format)
    return torch.cat([ql_nope, q_rope.to(ql_nope.dtype)], dim=2)


def context_pack(
    k_nope: Tensor,  # [T, H, 128]
    k_pe: Tensor,  # [T, 64]
) -> Tensor:  # [T, H, 192], contiguous
    """Chunked-context prefill: keys of all heads. Never rotated, no cache."""
    return _keys(k_nope, k_pe)


def context_pack_fp8(
    k_nope: Tensor,  # [T, H, 128]
    v: Tensor,  # [T, H, 128]
    k_pe: Tensor,  # [T, 64], 16-bit, or e4m3: then its bytes are copied
) -> tuple[Tensor, Tensor]:  # e4m3 k [T, H, 192], v [T, H, 128]
    """As `context_pack`, with an unscaled saturating cast of keys and values; NaN becomes 0x7f."""
    rope = k_pe if k_pe.dtype == torch.float8_e4m3fn else f8(k_pe)
    key = _keys(f8(k_nope).view(torch.uint8), rope.contiguous().view(torch.uint8))
    return key.view(torch.float8_e4m3fn), f8(v)
