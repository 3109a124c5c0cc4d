"""The attention core: R requests of q tokens, H heads, over a paged cache. Key = all 576 of an entry, value = 512.

    out = out_scale * softmax(scale * Q K^T) V        lse = log2(sum exp(scale * Q K^T))

Token t of a request sees the keys below length - (q - 1) + t. A row that sees no key gives exact zeros and an LSE of
-inf. Only positions that some row sees are read: whatever lies in the rest of the page, in other pages or in the rest
of the block table has no part in the result.
"""

import math
from typing import Final

import torch
from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.reference.context import local_len
from k3dsl.reference.paged import LATENT, read_entries

LOG2E: Final = math.log2(math.e)

#: What probabilities are rounded to before they meet the values. Their sum is taken before that rounding.
PROBABILITIES: Final = {"fp8": torch.float16, "bf16": torch.bfloat16, "fp8_ds_mla": torch.bfloat16}


def visible_keys(
    lengths: Tensor,  # int [R]: keys in this cache
    q: int,
    causal: bool = True,
    totals: Tensor | None = None,  # int [R]: keys on all ranks, for dcp > 1
    dcp: tuple[int, int, int] = (1, 0, 1),  # ranks D, this rank, interleave I
) -> Tensor:  # int64 [R, q]
    """How many keys each row sees, 0 to its length: min(length, length - (q - 1) + t) clamped at 0.

    With context parallelism the bound is taken on the whole context and then mapped to this rank's share of it.
    """
    lengths = lengths.to(torch.int64)
    if not causal:
        return lengths.clamp(min=0)[:, None].expand(-1, q)
    step = torch.arange(q, device=lengths.device) - (q - 1)
    if dcp[0] > 1:
        if totals is None:
            raise ConfigError(f"totals is needed with {dcp[0]} context-parallel ranks: lengths are one rank's")
        bound = local_len((totals.to(torch.int64)[:, None] + step).clamp(min=0), *dcp)
    else:
        bound = lengths[:, None] + step
    return torch.minimum(bound, lengths[:, None]).clamp(min=0)


def core(
    query: Tensor,  # [B, H, 576] or [R, q, H, 576]: e4m3 (or its bytes), bf16, fp16
    cache: Tensor,  # [pages, page_size, width], see reference.paged
    block_table: Tensor,  # int [>= R, width], any row stride
    lengths: Tensor,  # int [>= R]
    q: int = 1,
    *,
    scale: float,  # softmax scale with the scales of query and cache folded in
    out_scale: float = 1.0,
    kv_format: str = "fp8",
    causal: bool = True,
    visible: Tensor | None = None,  # int [R, q]: overrides causal, see visible_keys
    probabilities: torch.dtype | None = None,  # default: PROBABILITIES[kv_format]; float32 rounds nothing
) -> tuple[Tensor, Tensor]:  # bf16 [R, q, H, 512], float32 [R, q, H]
    """Output and base-2 LSE in float32, rounded where the kernels round. The LSE does not contain out_scale."""
    rounded = PROBABILITIES.get(kv_format, torch.float32) if probabilities is None else probabilities
    out, lse = _attend(
        query, cache, block_table, lengths, q, scale, out_scale, kv_format, causal, visible, torch.float32, rounded
    )
    return out.to(torch.bfloat16), lse


def core64(
    query: Tensor,  # as for core, or float64
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    q: int = 1,
    *,
    scale: float,
    out_scale: float = 1.0,
    kv_format: str = "fp8",
    causal: bool = True,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # float64 [R, q, H, 512], float64 [R, q, H]
    """`core` in float64 from the same bytes, with no rounding at all."""
    wide = torch.float64
    return _attend(query, cache, block_table, lengths, q, scale, out_scale, kv_format, causal, visible, wide, wide)


def _attend(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    q: int,
    scale: float,
    out_scale: float,
    kv_format: str,
    causal: bool,
    visible: Tensor | None,
    dtype: torch.dtype,
    rounded: torch.dtype,
) -> tuple[Tensor, Tensor]:
    if query.dim() == 3 and q >= 1 and query.shape[0] % q == 0:
        query = query.unflatten(0, (-1, q))
    if query.dim() != 4 or query.shape[1] != q:
        raise ConfigError(f"query has shape {tuple(query.shape)}: [B, H, 576] with q={q} dividing B, or [R, q, H, 576]")
    if query.dtype in (torch.uint8, torch.int8):
        query = query.view(torch.float8_e4m3fn)
    if query.dtype == torch.float8_e4m3fn:
        query = query.to(torch.float32)
    requests, _, heads, _ = query.shape
    if lengths.shape[0] < requests or block_table.shape[0] < requests:
        raise ConfigError(
            f"lengths has {lengths.shape[0]} rows and block_table {block_table.shape[0]}, must have {requests} or more"
        )
    if visible is None:
        visible = visible_keys(lengths[:requests], q, causal)
    page_size = cache.shape[1]
    base2 = scale * LOG2E  # logits in base 2, so that exp2 and log2 are the only transcendentals
    out = torch.zeros(requests, q, heads, LATENT, dtype=dtype, device=query.device)
    lse = torch.full((requests, q, heads), -torch.inf, dtype=dtype, device=query.device)
    for r, most in enumerate(visible.amax(dim=1).tolist()):
        if most == 0:
            continue
        position = torch.arange(most, device=query.device)
        page = block_table[r].to(torch.int64)[: -(-most // page_size)].index_select(0, position // page_size)
        keys = read_entries(cache, page, position % page_size, kv_format, dtype)
        score = query[r].to(dtype) @ keys.T  # [q, H, most]
        unseen = position[None, None, :] >= visible[r][:, None, None]
        score = score.masked_fill(unseen, -torch.inf)
        top = score.amax(dim=2, keepdim=True)
        # The difference first: scores near -6e4 lose nothing to the scale that way.
        p = torch.exp2((score - top) * base2).masked_fill(unseen, 0.0)
        total = p.sum(dim=2, keepdim=True)
        latent = (p.to(rounded).to(dtype) @ keys[:, :LATENT]) * (out_scale / total)
        some = visible[r] > 0
        out[r] = latent.masked_fill(~some[:, None, None], 0.0)
        lse[r] = (total.log2() + top * base2)[..., 0].masked_fill(~some[:, None], -torch.inf)
    return out, lse
