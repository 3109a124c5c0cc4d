"""What a gfx950 layer reads of its attention and of its decoder layer, and the check of an engine's own object."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3dsl.amd.checks import weight_problems
from k3dsl.amd.mla_pre.key import MlaPreBuild
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError
from k3dsl.reference.mla_pre import PreWeights
from k3dsl.reference.mxfp4 import quantize_w_uk
from k3dsl.weights import MlaWeights, check_attention


@dataclass(frozen=True)
class MlaPreWeights:
    """An attention layer with what `mla_pre` takes of its surroundings; any object with these attributes serves.

    The attributes of `mla` are reached through this object, so that it stands for an attention module itself.
    """

    mla: MlaWeights
    ares_nw: Tensor  # bf16 [7168]: norm of the residual mix
    ares_qk: Tensor  # bf16 [7168]: its score vector
    in_nw: Tensor  # bf16 [7168]: input norm
    w_qkv: Tensor  # bf16 [2112, 7168]: rows of q_a, kv_a and the rope key
    w_g: Tensor  # bf16 [1536, 7168]: rows of the output gate
    w_k: Tensor | None = None  # uint8 [12, 512, 64] MXFP4; by default made from W_UK_T
    w_k_scale: Tensor | None = None  # uint8 [12, 512, 4]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "mla":
            raise AttributeError(name)
        return getattr(self.mla, name)

    @classmethod
    def random(cls, dims: MlaDims, *, seed: int = 0, device: "torch.device | str" = "cpu") -> "MlaPreWeights":
        """Test weights: `MlaWeights.random`, norms 1 + N(0, 0.1), scores N(0, 0.05), projections N(0, 0.012).

        0.012 is 7168^-0.5: projections of a normalized row keep unit variance, as `MlaWeights.random` expects them.
        """
        generator = torch.Generator().manual_seed(seed + 7)

        def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * std + mean).to(torch.bfloat16).to(device)

        return cls(
            mla=MlaWeights.random(dims, seed=seed).to(device),
            ares_nw=normal(dims.hidden, std=0.1, mean=1.0),
            ares_qk=normal(dims.hidden, std=0.05),
            in_nw=normal(dims.hidden, std=0.1, mean=1.0),
            w_qkv=normal(dims.projected, dims.hidden, std=dims.hidden**-0.5),
            w_g=normal(dims.heads * dims.v, dims.hidden, std=dims.hidden**-0.5),
        )


def arguments_of(attention: Any, w_uk: str) -> dict[str, Any]:
    """The weight arguments of `mla_pre`. MXFP4 weights that `attention` lacks are made from its W_UK_T."""
    w_k, w_k_scale = attention.W_UK_T, None
    if w_uk == "mxfp4":
        w_k, w_k_scale = getattr(attention, "w_k", None), getattr(attention, "w_k_scale", None)
        if w_k is None and w_k_scale is None:
            w_k, w_k_scale = quantize_w_uk(attention.W_UK_T)
    return {
        "ares_nw": attention.ares_nw,
        "ares_qk": attention.ares_qk,
        "in_nw": attention.in_nw,
        "w_qkv": attention.w_qkv,
        "w_g": attention.w_g,
        "q_nw": attention.q_a_layernorm.weight,
        "kv_nw": attention.kv_a_layernorm.weight,
        "w_qb": attention.q_b_proj.weight,
        "w_k": w_k,
        "w_k_scale": w_k_scale,
    }


def oracle_weights(attention: Any, arguments: dict[str, Any]) -> PreWeights:
    """The same weights as the oracle takes them."""
    known = {name: value for name, value in arguments.items() if name not in ("w_k", "w_k_scale")}
    four = arguments["w_k_scale"] is not None
    nothing = torch.empty(0, dtype=torch.uint8)
    eps = float(attention.rms_norm_eps)
    return PreWeights(
        **known,
        w_uk_t=attention.W_UK_T,
        w_k=arguments["w_k"] if four else nothing,
        w_k_scale=arguments["w_k_scale"] if four else nothing,
        eps=eps,
        out_eps=eps,
        q_eps=eps,
        kv_eps=eps,
    )


def require_pre_attention(attention: Any, dims: MlaDims, w_uk: str, device: "torch.device | str | None" = None) -> None:
    """ConfigError with everything about `attention` that does not serve a gfx950 layer of `dims`."""
    bad = check_attention(attention, dims, device)
    for name in ("ares_nw", "ares_qk", "in_nw", "w_qkv", "w_g"):
        if not isinstance(getattr(attention, name, None), Tensor):
            bad.append(f"{name} is missing: a gfx950 layer starts at the residual seam (see k3dsl.amd.MlaPreWeights)")
    if not bad:
        where = attention.W_UK_T.device
        bad = weight_problems(MlaPreBuild(tokens=1, w_uk=w_uk), where, **arguments_of(attention, w_uk))
    for name in ("_q_scale_float", "_k_scale_float"):
        scale = getattr(attention, name, None)
        if isinstance(scale, float) and scale != 1.0:
            bad.append(f"{name}={scale!r} must be 1.0: the kernel converts queries and entries to fp8 unscaled")
    if bad:
        raise ConfigError.of(f"attention (weights of a gfx950 layer for {dims})", bad)
