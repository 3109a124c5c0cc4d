"""After the core: merging of partial outputs by their base-2 LSE, and MlaValue (W_UV, then the output gate)."""

from typing import Final

import torch
from torch import Tensor

#: LSE of a shard with no key, in place of -inf: finite, so that no difference of two LSEs is a NaN.
EMPTY: Final = -3.0e38
_HUGE: Final = 3.0e38


def finite_lse(lse: Tensor) -> Tensor:
    """`lse` as it is published to other ranks: NaN, +-inf and anything at or beyond +-3e38 become EMPTY."""
    usable = lse.isfinite() & (lse > EMPTY) & (lse < _HUGE)
    return torch.where(usable, lse, torch.full_like(lse, EMPTY))


def published(
    partial: Tensor,  # bf16 [B, H, 512]
    lse: Tensor,  # float32 [B, H]
    lengths: Tensor,  # int [>= B / q]: this rank's
    q: int = 1,
) -> tuple[Tensor, Tensor]:
    """A rank's partial output as the others see it: zeros and EMPTY for requests it holds no key of, no -0.

    -0 becomes +0 because a pair of halves 0x8000'0000 marks a word that has not arrived.
    """
    rows = partial.shape[0]
    empty = (lengths[: rows // q] <= 0).repeat_interleave(q)
    clean = torch.where(partial == 0, torch.zeros_like(partial), partial)
    return clean.masked_fill(empty[:, None, None], 0.0), finite_lse(lse).masked_fill(empty[:, None], EMPTY)


def merge(
    partials: Tensor,  # [S, ..., 512]: outputs of S sources, each already normalized by its own sum
    lse: Tensor,  # [S, ...], base 2
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:  # [..., 512] of dtype, [...] of lse's dtype
    """sum_s 2^(lse_s - m) o_s / sum_s 2^(lse_s - m), accumulated in source order in lse's dtype, rounded once.

    A source whose LSE is EMPTY or not finite counts as nothing, even if its output is NaN. With no source left the
    result is zeros and -inf.
    """
    lse = finite_lse(lse)
    live = lse > EMPTY
    top = lse.amax(dim=0)
    weight = torch.where(live, torch.exp2(lse - top), torch.zeros_like(lse))
    total = weight.sum(dim=0)
    some = total > 0
    factor = torch.where(some, weight / torch.where(some, total, 1.0), torch.zeros_like(weight))
    out = torch.zeros(partials.shape[1:], dtype=lse.dtype, device=lse.device)
    for s in range(partials.shape[0]):
        part = partials[s].to(lse.dtype).masked_fill(~live[s][..., None], 0.0)
        out = out + factor[s][..., None] * part
    return out.to(dtype), torch.where(some, total.log2() + top, torch.full_like(top, -torch.inf))


def value(
    latent: Tensor,  # bf16 [B, H, 512] (or [R, q, H, 512])
    w_uv: Tensor,  # bf16 [H, 512, 128]
    gate: Tensor,  # bf16 [B, H * 128], any row stride
    lengths: Tensor,  # int [>= B / q]
    q: int = 1,
    accumulate: torch.dtype = torch.float32,
) -> Tensor:  # bf16 [B, H * 128]
    """bf(f32(bf(latent W_UV)) * sigmoid(gate)), and exact zeros for requests of no key, whatever their rows hold.

    Two roundings: the up-projection, then the product. Zeros are selected, not multiplied: a padded row may hold NaN.
    With context parallelism `lengths` are those of the whole context.
    """
    latent = latent.reshape(-1, *latent.shape[-2:])
    up = up_project(latent, w_uv, accumulate).to(torch.float32)
    out = (up * torch.sigmoid(gate.to(torch.float32))).to(torch.bfloat16)
    return _zero_rule(out, lengths, q)


def up_project(latent: Tensor, w_uv: Tensor, accumulate: torch.dtype = torch.float32) -> Tensor:
    """bf(latent W_UV): bf16 [B, H * 128], the output before the gate."""
    up = torch.einsum("bhl,hlv->bhv", latent.to(accumulate), w_uv.to(accumulate))
    return up.flatten(1).to(torch.float32).to(torch.bfloat16)


def value64(latent: Tensor, w_uv: Tensor, gate: Tensor, lengths: Tensor, q: int = 1) -> Tensor:
    """`value` in float64 with no rounding: float64 [B, H * 128]. latent of any float dtype."""
    wide = torch.float64
    latent = latent.reshape(-1, *latent.shape[-2:])
    up = torch.einsum("bhl,hlv->bhv", latent.to(wide), w_uv.to(wide)).flatten(1)
    return _zero_rule(up * torch.sigmoid(gate.to(wide)), lengths, q)


def _zero_rule(out: Tensor, lengths: Tensor, q: int) -> Tensor:
    empty = (lengths[: out.shape[0] // q] <= 0).repeat_interleave(q)
    return out.masked_fill(empty[:, None], 0.0)
