"""Arguments of mla_pre launches, on the CPU: for the host checks, the emulator and the prepared object."""

from typing import Any

import torch
from torch import Tensor

from k3dsl.amd.mla_pre.key import HEALTH_WORDS, MlaPreBuild, scratch_bytes
from k3dsl.reference.mla_pre import PreWeights

#: What `mla_pre` takes of a layer's weights, by name.
WEIGHTS = ("ares_nw", "ares_qk", "in_nw", "w_qkv", "w_g", "q_nw", "kv_nw", "w_qb")


def aligned(*shape: int, dtype: torch.dtype, fill: float | int = 0, align: int = 64) -> Tensor:
    """A filled tensor whose first byte is `align`-byte aligned."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = 1
    for n in shape:
        count *= n
    raw = torch.empty(count * size + align, dtype=torch.uint8)
    start = -raw.data_ptr() % align
    return raw[start : start + count * size].view(dtype).view(shape).fill_(fill)


def inputs(key: MlaPreBuild, seed: int = 0) -> dict[str, Tensor | None]:
    """prefix, delta and blocks of one step; blocks has a block more than the build reads, full of NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        out = aligned(*shape, dtype=torch.bfloat16)
        return out.copy_(torch.randn(*shape, generator=generator) * std)

    rows = key.tokens
    blocks = aligned(rows, key.nblocks + 1, 7168, dtype=torch.bfloat16, fill=torch.nan)
    blocks[:, : key.nblocks] = torch.randn(rows, key.nblocks, 7168, generator=generator) * 2
    return {
        "prefix": normal(rows, 7168, std=2.0),
        "delta": normal(rows, 7168, std=0.5) if key.delta else None,
        "blocks": blocks,
    }


def layer_weights(key: MlaPreBuild, weights: PreWeights) -> dict[str, Tensor | None]:
    """The weight arguments of a build."""
    four = key.w_uk == "mxfp4"
    return {
        **{name: getattr(weights, name) for name in WEIGHTS},
        "w_k": weights.w_k if four else weights.w_uk_t,
        "w_k_scale": weights.w_k_scale if four else None,
    }


def meta_weights() -> PreWeights:
    """Weights of the right shapes with nothing in them: for checks that look at metadata only."""
    empty = {
        "ares_nw": (7168,),
        "ares_qk": (7168,),
        "in_nw": (7168,),
        "w_qkv": (2112, 7168),
        "w_g": (1536, 7168),
        "q_nw": (1536,),
        "kv_nw": (512,),
        "w_qb": (2304, 1536),
        "w_uk_t": (12, 128, 512),
    }
    # torch.empty of large tensors touches no page until it is written.
    made: dict[str, Any] = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in empty.items()}
    made["w_k"] = torch.empty(512, 12, 64, dtype=torch.uint8).transpose(0, 1)
    made["w_k_scale"] = torch.empty(512, 12, 4, dtype=torch.uint8).transpose(0, 1)
    return PreWeights(**made)


def launch_arguments(key: MlaPreBuild, weights: PreWeights, seed: int = 0, pages: int = 4) -> dict[str, Any]:
    """Every keyword argument of `mla_pre` for one rank without peers (their table is a dummy)."""
    rows = key.tokens
    return {
        **inputs(key, seed),
        **layer_weights(key, weights),
        "kv_cache": aligned(pages, 16, 576, dtype=torch.uint8, fill=0xEE),
        "slots": torch.arange(rows, dtype=torch.int64) * 3,
        "gate_out": aligned(rows, 1536, dtype=torch.bfloat16, fill=torch.nan),
        "q_out": aligned(rows, key.q_heads, 576, dtype=torch.bfloat16 if key.qbf16 else torch.uint8, fill=0xEE),
        "scratch": aligned(scratch_bytes(key), dtype=torch.uint8),
        "peers": torch.zeros(key.ranks, dtype=torch.int64) if key.ranks > 1 else None,
        "rank": 0,
        "layer": 3,
        "epoch": torch.ones(1, dtype=torch.int32),
        "health": aligned(HEALTH_WORDS, dtype=torch.int32),
        "alarm": 0 if key.ranks == 1 else 256,
        "tl": aligned(256, 16, dtype=torch.int64) if key.timeline else None,
    }
