"""Cores that other packages have: tokenspeed_mla and FlashInfer's trtllm-gen, called with memory that is owned here.

Both read e4m3 queries and caches and write bf16 latents; key = all 576 of an entry, value = the first 512; row t of a
request sees the keys below length - (q - 1) + t. Neither promises anything for an empty request: mask it afterwards.
"""

from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl.capture import guard
from k3dsl.errors import ConfigError, ToolchainError
from k3dsl.nvidia.device import device as facts
from k3dsl.nvidia.metadata import fill_splits

_LATENT: Final = 512
_NOPE: Final = 128
_ROPE: Final = 64
_MAX_ROWS: Final = 64
#: FlashInfer's own size for trtllm-gen; it must be zero before its first use.
_TRTLLM_BYTES: Final = 128 << 20


def stock_decode(
    query: Tensor,  # e4m3 [R, q, H, 576]
    cache: Tensor,  # e4m3 [pages, page, 576]
    block_table: Tensor,  # int32 [R, width], contiguous
    lengths: Tensor,  # int32 [R]
    max_seq: int,  # a bound of the lengths, for planning
    scales: tuple[float, float],  # softmax scale, output scale
    out: Tensor,  # bf16 [R, q, H, 512]
) -> Tensor:
    """tokenspeed_mla's decode. Raises ToolchainError where the package is missing."""
    decode = _function("tokenspeed_mla", "tokenspeed_mla_decode", "tokenspeed-mla")
    _check(query, cache, out)
    requests, q, heads, _ = query.shape
    device = query.device
    here = facts(device.index or 0)
    least = fill_splits(requests * q, device.index or 0)
    size = tokenspeed_bytes(requests, q, heads, max_seq, here.sm_count, here.capability == (10, 0), least)
    return decode(
        query,
        cache,
        _buffer("tokenspeed", device, max(size, here.sm_count * heads * (_LATENT + 1) * 4)),
        _LATENT,
        _ROPE,
        block_table,
        lengths,
        max_seq,
        scales[0],
        output_scale=scales[1],
        out=out,
        is_var_seq=True,
        causal_mask=True,
        enable_pdl=True,
        min_split_kv=least,
    )


def trtllm_decode(
    query: Tensor,  # e4m3 [R, q, H, 576]
    cache: Tensor,  # e4m3 [pages, page, 576]
    block_table: Tensor,  # int32 [R, width]
    lengths: Tensor,  # int32 [R]
    max_seq: int,  # a bound of the lengths, for planning
    scales: tuple[float, float],  # softmax scale, output scale
    out: Tensor,  # bf16 [R, q, H, 512]
) -> Tensor:
    """FlashInfer's trtllm-gen decode. Raises ToolchainError where the package is missing."""
    decode = _function("flashinfer.mla", "trtllm_batch_decode_with_kv_cache_mla", "flashinfer-python")
    _check(query, cache, out)
    heads, device = query.shape[2], query.device
    counter = 4 * _round_up(max(_MAX_ROWS * heads, facts(device.index or 0).sm_count), 8)
    return decode(
        query=query,
        kv_cache=cache.view(torch.float8_e4m3fn).unsqueeze(1),
        workspace_buffer=_buffer(f"trtllm {heads}", device, _TRTLLM_BYTES),
        qk_nope_head_dim=_NOPE,
        kv_lora_rank=_LATENT,
        qk_rope_head_dim=_ROPE,
        block_tables=block_table,
        seq_lens=lengths,
        max_seq_len=max_seq,
        out=out,
        bmm1_scale=scales[0],
        bmm2_scale=scales[1],
        enable_pdl=True,
        backend="trtllm-gen",
        multi_ctas_kv_counter_buffer=_buffer(f"trtllm counter {heads}", device, counter),
    )


def _check(query: Tensor, cache: Tensor, out: Tensor) -> None:
    bad = []
    if query.dim() != 4 or query.shape[3] != _LATENT + _ROPE or query.dtype != torch.float8_e4m3fn:
        bad.append(f"query is {query.dtype} {list(query.shape)}, must be float8_e4m3fn [R, q, H, 576]")
    if cache.dim() != 3 or cache.shape[2] != _LATENT + _ROPE or cache.element_size() != 1:
        bad.append(f"cache is {cache.dtype} {list(cache.shape)}, must be e4m3 [pages, page, 576]")
    if not bad and (tuple(out.shape) != (*query.shape[:3], _LATENT) or out.dtype != torch.bfloat16):
        bad.append(f"out is {out.dtype} {list(out.shape)}, must be bfloat16 {[*query.shape[:3], _LATENT]}")
    if bad:
        raise ConfigError.of("decode", bad)


def _function(module: str, name: str, package: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ToolchainError(f"{name} is not there ({error}): pip install {package}") from error


def _splits(q_eff: int, requests: int, max_seq: int, tile: int, sms: int, least: int) -> int:
    """The number of splits that tokenspeed_mla plans: its own choice or `least`, without empty ones at the end."""
    blocks = -(-max_seq // 128)
    if tile == 64:
        per_wave = min(blocks, max(1, sms // requests // q_eff))
        waves = -(-blocks // per_wave)
        auto = min(-(-blocks // waves), 64)
    else:
        auto = min(32, max(1, sms // requests // (2 * q_eff)))
    per = -(-blocks // max(auto, least))
    return -(-blocks // per)


def tokenspeed_bytes(requests: int, q: int, heads: int, max_seq: int, sms: int, m64: bool, least: int) -> int:
    """Workspace of tokenspeed_mla: float32 latents and an LSE for every row and split, none with one split.

    m64: whether the device is an SM100, which has the 64-row tile; least: the forced minimum of splits.
    """
    tile = 64 if m64 and heads * q <= 64 else 128
    fold = next(f for f in range(q, 0, -1) if q % f == 0 and heads * f <= tile)
    rows, q_eff = heads * fold, q // fold
    splits = _splits(q_eff, requests, max_seq, tile, sms, least)
    return 0 if splits == 1 else requests * rows * q_eff * splits * (_LATENT + 1) * 4


@cache
def _buffers() -> dict[tuple[str, torch.device], Tensor]:
    return {}


def _buffer(name: str, device: torch.device, size: int) -> Tensor:
    """int8 [>= size], zeroed once, shared by all layers of the device. Raises CaptureError if it has to grow."""
    found = _buffers().get((name, device))
    if found is None or found.numel() < size:
        guard(f"growing the workspace of {name.split()[0]}")
        found = torch.zeros(size, dtype=torch.int8, device=device)
        _buffers()[name, device] = found
    return found


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
