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
from k3dsl.nvidia.core import tokenspeed
from k3dsl.nvidia.device import device as facts

#: Module, function and the package to install.
TOKENSPEED: Final = ("tokenspeed_mla", "tokenspeed_mla_decode", "tokenspeed-mla==2.0.4")
TRTLLM: Final = ("flashinfer.mla", "trtllm_batch_decode_with_kv_cache_mla", "flashinfer-python==0.7.4")
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
    decode = _function(*TOKENSPEED)
    _check(query, cache, out)
    requests, q, heads, _ = query.shape
    device = query.device
    here = facts(device.index or 0)
    target = here.target or "sm_100a"  # the package itself refuses other devices
    cut = tokenspeed.work(target, heads=heads, q=q, requests=requests, max_context=max_seq, sm_count=here.sm_count)
    size = cut.workspace
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
        min_split_kv=tokenspeed.fill(requests * q, here.sm_count),
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
    _check(query, cache, out)
    sm_count = facts(query.device.index or 0).sm_count
    decode, arguments = trtllm_call(query, max_seq, scales, out, sm_count)
    return decode(**arguments, kv_cache=trtllm_cache(cache), block_tables=block_table, seq_lens=lengths)


def trtllm_call(
    query: Tensor,  # e4m3 or its bytes [R, q, H, 576]
    max_seq: int,
    scales: tuple[float, float],
    out: Tensor,  # bf16 [R, q, H, 512]
    sm_count: int,
) -> tuple[Any, dict[str, Any]]:
    """The function, and all of its arguments but cache and metadata. Raises ToolchainError, CaptureError."""
    decode = _function(*TRTLLM)
    heads, device = query.shape[2], query.device
    return decode, {
        "query": query if query.dtype == torch.float8_e4m3fn else query.view(torch.float8_e4m3fn),
        "workspace_buffer": _buffer(f"trtllm {heads}", device, _TRTLLM_BYTES),
        "qk_nope_head_dim": _NOPE,
        "kv_lora_rank": _LATENT,
        "qk_rope_head_dim": _ROPE,
        "max_seq_len": max_seq,
        "out": out,
        "bmm1_scale": scales[0],
        "bmm2_scale": scales[1],
        "enable_pdl": True,
        "backend": "trtllm-gen",
        "multi_ctas_kv_counter_buffer": _buffer(f"trtllm counter {heads}", device, counter_bytes(heads, sm_count)),
    }


def trtllm_cache(cache: Tensor) -> Tensor:
    """A cache [pages, page, 576] as FlashInfer wants it: e4m3 [pages, 1, page, 576]."""
    return cache.view(torch.float8_e4m3fn).unsqueeze(1)


def counter_bytes(heads: int, sm_count: int) -> int:
    """Bytes of trtllm-gen's semaphores for up to 64 rows of `heads` heads: one each, or one an SM, in eights."""
    return 4 * _round_up(max(_MAX_ROWS * heads, sm_count), 8)


def trtllm_failed(error: Exception) -> ToolchainError:
    """What FlashInfer raised, with what it needs beside itself."""
    return ToolchainError(
        f"FlashInfer's trtllm-gen decode failed ({type(error).__name__}: {error}). Beside flashinfer-python it needs "
        "its kernels, flashinfer-cubin (flashinfer install-cubin-wheel), and its launcher, flashinfer-jit-cache "
        "(flashinfer install-jit-cache-wheel; or nvcc and ninja to build it); core='tokenspeed' needs neither"
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


@cache
def _buffers() -> dict[tuple[str, torch.device], list[Tensor]]:
    return {}


def _buffer(name: str, device: torch.device, size: int) -> Tensor:
    """int8 [>= size], zeroed once, shared by all layers of the device. Raises CaptureError if it has to grow.

    One that was outgrown is kept: a captured graph may still write to it.
    """
    owned = _buffers().setdefault((name, device), [])
    if not owned or owned[-1].numel() < size:
        guard(f"growing the workspace of {name.split()[0]}")
        owned.append(torch.zeros(size, dtype=torch.int8, device=device))
    return owned[-1]


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
