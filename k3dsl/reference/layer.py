"""A whole MLA decode layer: query and cache insert, core, value. What `target="reference"` runs."""

from typing import Any

from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.metadata import pad_requests
from k3dsl.reference.attend import core, core64
from k3dsl.reference.combine import value, value64
from k3dsl.reference.paged import LATENT, ROPE
from k3dsl.reference.projection import insert, query, query64


def scales(attention: Any, kv_format: str = "fp8") -> tuple[float, float]:
    """(softmax scale, output scale) of the core. Only an fp8 cache carries scales; the others have factors of 1."""
    if kv_format != "fp8":
        return float(attention.scale), 1.0
    return float(attention.scale * attention._q_scale_float * attention._k_scale_float), float(attention._k_scale_float)


def gate_of(projected: Tensor, attention: Any) -> Tensor:
    """The gate columns of the packed projection: a view [B, H * 128]."""
    start = attention.q_a_layernorm.weight.shape[0] + LATENT + ROPE
    heads, _, v = attention.W_UV.shape
    return projected[:, start : start + heads * v]


def pad_metadata(requests: int, block_table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Request metadata of at least `requests` rows: missing ones have length 0 on page 0."""
    return pad_requests(requests, block_table, lengths)[:2]


def decode_layer(
    projected: Tensor,  # bf16 [B, pitch]: q latent, kv latent, rope key, gate
    attention: Any,
    cache: Tensor,  # [pages, page_size, width]; written at `slots`
    slots: Tensor,  # int64 [B]; -1: not written
    block_table: Tensor,  # int [R, width]
    lengths: Tensor,  # int [R], the tokens of this call included
    q: int = 1,
    kv_format: str = "fp8",
    out: Tensor | None = None,  # bf16 [B, H * 128]
) -> Tensor:  # bf16 [B, H * 128]
    """One layer for B = R * q rows. Metadata of fewer than R rows is padded with empty requests."""
    rows = projected.shape[0]
    if q < 1 or rows % q:
        raise ConfigError(f"q={q!r} must divide the {rows} rows")
    block_table, lengths = pad_metadata(rows // q, block_table, lengths)
    insert(projected, attention, cache, slots, kv_format)
    scale, out_scale = scales(attention, kv_format)
    latent, _ = core(
        query(projected, attention, kv_format),
        cache,
        block_table,
        lengths,
        q,
        scale=scale,
        out_scale=out_scale,
        kv_format=kv_format,
    )
    result = value(latent, attention.W_UV, gate_of(projected, attention), lengths, q)
    return result if out is None else out.copy_(result)


def decode_layer64(
    projected: Tensor,
    attention: Any,
    cache: Tensor,  # already holding the tokens of this call; only read
    block_table: Tensor,
    lengths: Tensor,
    q: int = 1,
    kv_format: str = "fp8",
) -> Tensor:  # float64 [B, H * 128]
    """`decode_layer` in float64 with no rounding but that of the cache entries: not even the query's to fp8."""
    block_table, lengths = pad_metadata(projected.shape[0] // q, block_table, lengths)
    scale, out_scale = scales(attention, kv_format)
    latent, _ = core64(
        query64(projected, attention, kv_format),
        cache,
        block_table,
        lengths,
        q,
        scale=scale,
        out_scale=out_scale,
        kv_format=kv_format,
    )
    return value64(latent, attention.W_UV, gate_of(projected, attention), lengths, q)
