"""What the fused epilogues are compared with: the same work in separate torch ops, and in one Triton kernel.

Every slot is valid here: torch has no op that skips rows without a synchronization. Not rotated.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
Run = Callable[[], Any]


# ---- separate torch ops -----------------------------------------------------------------------------------------


def _quantize(x: Tensor, scale_inv: Tensor) -> Tensor:
    return (x * scale_inv).clamp_(-448, 448).to(E4M3)


def _keys(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    return torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], -1)


def _records(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    tiles = kv_c.view(-1, 4, 128).float()
    scales = torch.exp2(torch.ceil(torch.log2((tiles.abs().amax(-1) / 448).clamp_(min=1e-4))))
    codes = (tiles / scales[..., None]).to(E4M3).view(-1, 512)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8), k_pe.contiguous().view(torch.uint8)], -1)


def torch_ops(op: str, kind: str, a: dict[str, Tensor]) -> Run:
    """The call in torch ops, as an engine without a fused kernel writes it."""

    def insert() -> None:
        cache, slots = a["cache"], a["slots"]
        if kind == "fp8_ds_mla":
            rows = _records(a["kv_c"], a["k_pe"])
        else:
            rows = torch.cat([a["kv_c"], a["k_pe"]], -1)
            if kind == "fp8":
                rows, cache = _quantize(rows, a["cache_scale"]).view(torch.uint8), cache.view(torch.uint8)
        cache.view(-1, cache.shape[-1]).index_copy_(0, slots, rows)

    def decode() -> Any:
        insert()
        query = torch.cat([a["ql_nope"], a["q_pe"]], -1)
        return _quantize(query, a["q_scale"]) if kind == "fp8" else query

    def prefill() -> Any:
        insert()
        if kind != "fp8":
            return _keys(a["k_nope"], a["k_pe"])
        keys = _quantize(_keys(a["k_nope"], a["k_pe"]), a["k_scale"])
        return _quantize(a["q"], a["q_scale"]), keys, _quantize(a["v"], a["v_scale"])

    def context() -> Any:
        if kind == "plain":
            return _keys(a["k_nope"], a["k_pe"])
        return _keys(a["k_nope"].to(E4M3).view(torch.uint8), a["k_pe"].to(E4M3).view(torch.uint8)), a["v"].to(E4M3)

    return {"decode": decode, "prefill": prefill, "context": context}[op]


# ---- one Triton kernel ------------------------------------------------------------------------------------------


def triton_kernel() -> Any:
    """The kernel of epilogue_triton.py, None without Triton."""
    try:
        return import_module(f"{__package__}.epilogue_triton" if __package__ else "epilogue_triton").kernel
    except ImportError:
        return None


def triton_one(kernel: Any, op: str, kind: str, a: dict[str, Tensor], outs: dict[str, Tensor]) -> Run:
    """The call as one launch of `triton_kernel`, into the given outputs."""
    fp8, cached = kind == "fp8", op != "context"
    decode = op == "decode"
    lead = a["ql_nope"] if decode else a["k_nope"]
    tokens, heads, width = lead.shape
    rope = a["q_pe"] if decode else a["k_pe"]
    strides = (rope.stride(0), rope.stride(1) if decode else 0)
    out = outs["out" if decode else "k_out"]
    nothing = lead
    q, v = a.get("q", nothing), a.get("v", nothing)
    quantized_q = op == "prefill" and fp8
    cache = a.get("cache", nothing)
    views = (cache, cache, cache)
    page, row = cache.stride()[:2]
    if kind == "fp8_ds_mla" and cached:
        storage = torch.tensor([], dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        views = (storage.view(E4M3), storage.view(torch.float32), storage.view(lead.dtype))
    arguments = [
        lead, lead.stride(0), lead.stride(1), rope, *strides, out,
        q, q.stride(0), q.stride(1), outs.get("q_out", nothing),
        v, v.stride(0), v.stride(1), outs.get("v_out", nothing),
        a.get("kv_c", nothing), a["k_pe"], a["k_pe"].stride(0), *views, page, row,
        a.get("slots", nothing), cache.shape[1],
        a.get("q_scale", nothing), a.get("q_scale" if decode else "k_scale", nothing), a.get("v_scale", nothing),
        a.get("cache_scale", nothing),
    ]  # fmt: skip
    facts = {
        "H": heads, "MAIN": width, "FP8": fp8, "RECORD": kind == "fp8_ds_mla", "CACHE": cached, "QV": quantized_q,
        "V": fp8 and not decode, "SCALED": fp8 and cached, "num_warps": 1 if width == 128 else 2,
    }  # fmt: skip
    return lambda: kernel[(tokens, heads + cached)](*arguments, **facts)
