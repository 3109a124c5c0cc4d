"""The paged cache: three formats of an entry, written by slot and read by (page, offset).

A cache is [pages, page_size, width]; only its last stride must be 1. Pages may lie apart (interleaved layers) or be
padded. An entry is 512 latents, then 64 rope values that take part in the dot product but not in the output.

format        element  width  content
bf16          16 bits   576   as is (float16 where the inputs are float16)
fp8           e4m3      576   value * scale_inv, one scale per tensor
fp8_ds_mla    byte      656   512 e4m3 latents | 4 float32 scales, one per 128 latents | 64 16-bit rope values
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from k3dsl.dims import KV_BYTES
from k3dsl.errors import ConfigError
from k3dsl.reference.rounding import E4M3_MAX, divide, f8

LATENT: Final = 512
ROPE: Final = 64
ENTRY: Final = LATENT + ROPE
RECORD: Final = 656
#: Latents that share a scale in a record.
TILE: Final = 128
#: Smallest max|x| / 448 that a record's scale is taken from; with the rounding up, scales are at least 2^-13.
TILE_FLOOR: Final = 1e-4


def check_format(kv_format: str) -> None:
    """ConfigError unless `kv_format` names a cache format."""
    if kv_format not in KV_BYTES:
        raise ConfigError(f"kv_format={kv_format!r} must be one of {', '.join(KV_BYTES)}")


def entries_of(cache: Tensor, kv_format: str) -> Tensor:
    """`cache` as the element that an entry is made of: uint8 for fp8 and fp8_ds_mla, 16-bit for bf16. Same memory.

    cache [pages, page_size, width]: 16-bit floats, or bytes. Raises ConfigError for another dtype, rank or width.
    """
    check_format(kv_format)
    view = cache
    if kv_format == "bf16":
        if view.dtype == torch.uint8 and view.dim() == 3 and view.stride(-1) == 1:
            view = view.view(torch.bfloat16)
        ok = view.dtype in (torch.bfloat16, torch.float16)
    else:
        if view.dtype in (torch.float8_e4m3fn, torch.int8):
            view = view.view(torch.uint8)
        ok = view.dtype == torch.uint8
    width = RECORD if kv_format == "fp8_ds_mla" else ENTRY
    if not ok or view.dim() != 3 or view.shape[2] != width or view.stride(2) != 1:
        raise ConfigError(
            f"cache is {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()}: a {kv_format} cache is "
            f"[pages, page_size, {width}] of {'16-bit floats' if kv_format == 'bf16' else 'bytes'} with last stride 1"
        )
    return view


def write_entries(
    cache: Tensor,  # [pages, page_size, width]
    slots: Tensor,  # int64 [B]; negative: this row is not written
    latent: Tensor,  # [B, 512], 16-bit (or float32 for fp8)
    rope: Tensor,  # [B, 64]
    kv_format: str,
    scale_inv: Tensor | float = 1.0,  # fp8 only: what values are multiplied by before they are rounded
    to_f8: Callable[[Tensor], Tensor] = f8,
) -> None:
    """Write row b at page slots[b] // page_size, offset slots[b] % page_size, in place."""
    view = entries_of(cache, kv_format)
    if kv_format == "bf16":
        rows = torch.cat([latent, rope], dim=1).to(view.dtype)
    elif kv_format == "fp8":
        rows = to_f8(torch.cat([latent, rope], dim=1).to(torch.float32) * scale_inv).view(torch.uint8)
    else:
        rows = ds_mla_pack(latent, rope)
    live = slots >= 0
    slot = slots[live]
    page_size = view.shape[1]
    view[slot // page_size, slot % page_size] = rows[live]


def read_entries(
    cache: Tensor,  # [pages, page_size, width]
    page: Tensor,  # int [n]
    offset: Tensor,  # int [n]
    kv_format: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # [n, 576] of `dtype`
    """The entries at (page[i], offset[i]) and no others. Without the fp8 scale: the cores fold that into theirs."""
    rows = entries_of(cache, kv_format)[page.long(), offset.long()]
    if kv_format == "bf16":
        return rows.to(dtype)
    if kv_format == "fp8":
        return rows.view(torch.float8_e4m3fn).to(torch.float32).to(dtype)
    latent, rope = ds_mla_unpack(rows, dtype=dtype)
    return torch.cat([latent, rope.to(dtype)], dim=1)


def ds_mla_scales(
    latent: Tensor,  # [n, 512]
) -> Tensor:  # float32 [n, 4]
    """A record's scales: 2^ceil(log2(max(max|x| / 448, 1e-4))) over each 128 latents.

    ceil(log2 t) is read off t's exponent. A float32 log2 agrees: from 16-bit values, max|x| / 448 is a power of two
    exactly or at least 1 part in 1792 away from one. NaN takes no part in the maximum, as fmax has it.
    """
    tiles = latent.to(torch.float32).abs().nan_to_num(nan=0.0, posinf=torch.inf).unflatten(1, (-1, TILE))
    floor = torch.full((), TILE_FLOOR, dtype=torch.float32, device=latent.device)
    t = torch.maximum(divide(tiles.amax(dim=2), E4M3_MAX), floor)
    mantissa, exponent = torch.frexp(t)  # t = mantissa * 2^exponent with mantissa in [0.5, 1)
    up = torch.where(mantissa == 0.5, exponent - 1, exponent)
    power = ((up.to(torch.int32) + 127) << 23).view(torch.float32)  # 2^up to the bit: torch.ldexp goes through pow
    return torch.where(t.isinf(), t, power)  # frexp has no exponent for infinity


def ds_mla_pack(
    latent: Tensor,  # [n, 512]
    rope: Tensor,  # [n, 64] bfloat16 or float16
) -> Tensor:  # uint8 [n, 656]
    """Records of n entries."""
    scales = ds_mla_scales(latent)
    tiles = latent.to(torch.float32).unflatten(1, (-1, TILE))
    codes = f8(tiles / scales[:, :, None]).flatten(1)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8), rope.contiguous().view(torch.uint8)], dim=1)


def ds_mla_unpack(
    records: Tensor,  # uint8 [n, 656]
    rope_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # latent [n, 512] of dtype, rope [n, 64] of rope_dtype
    """Latents (code * scale, exact for scales that are powers of two) and rope values of n records."""
    codes = records[:, :LATENT].contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(dtype)
    scales = records[:, LATENT : LATENT + 16].contiguous().view(torch.float32).to(dtype)
    latent = (codes.unflatten(1, (-1, TILE)) * scales[:, :, None]).flatten(1)
    return latent, records[:, LATENT + 16 :].contiguous().view(rope_dtype)
