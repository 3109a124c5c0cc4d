"""MlaQuery: from one row of the packed projection to H queries and one cache entry.

row = [q latent 1536 | kv latent 512 | rope key 64 | gate H * 128]. Nothing is rotated: rope queries and rope keys are
used as projected. float32 throughout, rounded where the kernels round; the sums may be taken in float64 instead
(`accumulate`), which tells the error of an order of summation from an error of the kernel. The `64` functions round
nowhere at all.

`attention` is anything with the attributes of `k3dsl.MlaWeights`.
"""

from typing import Any

import torch
from torch import Tensor

from k3dsl.reference.paged import LATENT, ROPE, check_format, write_entries
from k3dsl.reference.rounding import bf, divide, f8


def _split(projected: Tensor, attention: Any) -> tuple[Tensor, Tensor, Tensor]:
    q_lora = attention.q_a_layernorm.weight.shape[0]
    return (
        projected[:, :q_lora],
        projected[:, q_lora : q_lora + LATENT],
        projected[:, q_lora + LATENT : q_lora + LATENT + ROPE],
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, accumulate: torch.dtype = torch.float32) -> Tensor:
    """bf((x * rsqrt(mean(x^2) + eps)) * weight), the two products in float32 and in this order. x [B, n], weight [n].

    The kernels divide by 1536 for the query and use fma(sum, 1 / 512, eps) for the key. Both are a division and a
    rounded sum here: dividing by 512 is exact, so the fma rounds at the same place.
    """
    wide = x.to(torch.float32)
    square = wide.to(accumulate).square().sum(dim=1, keepdim=True).to(torch.float32)
    inverse = torch.rsqrt(divide(square, x.shape[1]) + eps)
    return bf((wide * inverse) * weight.to(torch.float32))


def query(
    projected: Tensor,  # bf16 [B, >= 2112]
    attention: Any,
    kv_format: str = "fp8",
    accumulate: torch.dtype = torch.float32,
) -> Tensor:  # [B, H, 576]: float8_e4m3fn for fp8, else bf16
    """Absorbed queries, latent part first.

    Rounding points: x after the norm, u = q_b x, a = u W_UK_T, each to bf16; then f8(a * q_scale_inv) and
    f8(u_rope * q_scale_inv) for an fp8 cache. The other caches take a and u_rope as they are.
    """
    check_format(kv_format)
    c_q, _, _ = _split(projected, attention)
    heads, nope, _ = attention.W_UK_T.shape
    x = rms_norm(c_q, attention.q_a_layernorm.weight, attention.rms_norm_eps, accumulate)
    u = bf(x.to(accumulate) @ attention.q_b_proj.weight.to(accumulate).T).unflatten(1, (heads, nope + ROPE))
    absorbed = bf(torch.einsum("bhp,hpl->bhl", u[..., :nope].to(accumulate), attention.W_UK_T.to(accumulate)))
    out = torch.cat([absorbed, u[..., nope:]], dim=2)
    return f8(out.to(torch.float32) * attention._q_scale_inv) if kv_format == "fp8" else out


def query64(projected: Tensor, attention: Any, kv_format: str = "fp8") -> Tensor:
    """float64 [B, H, 576]: what `query` rounds, with no rounding on the way. fp8: times q_scale_inv."""
    check_format(kv_format)
    wide = torch.float64
    c_q = _split(projected, attention)[0].to(wide)
    heads, nope, _ = attention.W_UK_T.shape
    inverse = torch.rsqrt(c_q.square().mean(dim=1, keepdim=True) + attention.rms_norm_eps)
    x = c_q * inverse * attention.q_a_layernorm.weight.to(wide)
    u = (x @ attention.q_b_proj.weight.to(wide).T).unflatten(1, (heads, nope + ROPE))
    absorbed = torch.einsum("bhp,hpl->bhl", u[..., :nope], attention.W_UK_T.to(wide))
    out = torch.cat([absorbed, u[..., nope:]], dim=2)
    return out * attention._q_scale_inv.to(wide) if kv_format == "fp8" else out


def entry(
    projected: Tensor,  # bf16 [B, >= 2112]
    attention: Any,
    accumulate: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # bf16 [B, 512], bf16 [B, 64]
    """The cache entry before its format: normalized latent and rope key."""
    _, c_kv, k_pe = _split(projected, attention)
    return rms_norm(c_kv, attention.kv_a_layernorm.weight, attention.rms_norm_eps, accumulate), k_pe


def entry64(projected: Tensor, attention: Any) -> Tensor:
    """float64 [B, 576]: `entry` with no rounding, unscaled."""
    _, c_kv, k_pe = (part.to(torch.float64) for part in _split(projected, attention))
    inverse = torch.rsqrt(c_kv.square().mean(dim=1, keepdim=True) + attention.rms_norm_eps)
    return torch.cat([c_kv * inverse * attention.kv_a_layernorm.weight.to(torch.float64), k_pe], dim=1)


def insert(
    projected: Tensor,  # bf16 [B, >= 2112]
    attention: Any,
    cache: Tensor,  # [pages, page_size, width], see reference.paged
    slots: Tensor,  # int64 [B]; -1: not written
    kv_format: str = "fp8",
    accumulate: torch.dtype = torch.float32,
) -> None:
    """Write each row's entry at its slot, in place. fp8: f8(bf16 value * k_scale_inv); NaN becomes 0x7f."""
    latent, k_pe = entry(projected, attention, accumulate)
    write_entries(cache, slots, latent, k_pe, kv_format, attention._k_scale_inv)
