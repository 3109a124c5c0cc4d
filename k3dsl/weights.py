"""Weights of one MLA layer in the form that the kernels read, and the check of an engine's own object."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3dsl.checks import name as dtype_name
from k3dsl.checks import on_device
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError


@dataclass(frozen=True)
class Parameter:
    """Anything with a `.weight`, as an engine's norm or linear module has it."""

    weight: Tensor


@dataclass(frozen=True)
class MlaWeights:
    """What `prepare` reads of an attention layer; any object with these attributes serves as well.

    The names are those of the engines' attention modules, underscores included. All tensors lie on one device.
    """

    W_UK_T: Tensor  # bf16 [H, 128, 512]: head, nope, latent
    W_UV: Tensor  # bf16 [H, 512, 128]: head, latent, v; latent axis contiguous
    q_a_layernorm: Parameter  # bf16 [1536]
    kv_a_layernorm: Parameter  # bf16 [512]
    q_b_proj: Parameter  # bf16 [H * 192, 1536]
    _q_scale_inv: Tensor  # float32 [1]: queries are multiplied by it before they become fp8
    _k_scale_inv: Tensor  # float32 [1]: cache entries likewise
    _q_scale_float: float
    _k_scale_float: float
    scale: float  # softmax scale, 192^-0.5
    rms_norm_eps: float

    @classmethod
    def from_kv_b(
        cls,
        dims: MlaDims,
        *,
        q_b: Tensor,  # bf16 [H * 192, 1536]
        kv_b: Tensor,  # bf16 [H * 256, 512]: of each head 128 nope rows, then 128 v rows
        q_a_norm: Tensor,  # bf16 [1536]
        kv_a_norm: Tensor,  # bf16 [512]
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        scale: float | None = None,  # default: dims.scale
        eps: float | None = None,  # default: dims.eps
    ) -> "MlaWeights":
        """Weights as a checkpoint has them. The absorbed weights are views of `kv_b`: nothing is copied.

        Raises ConfigError with every tensor that does not fit `dims`.
        """
        rows = dims.heads * (dims.nope + dims.v)
        bad = []
        if not isinstance(kv_b, Tensor):
            bad.append(f"kv_b is {type(kv_b).__name__}, must be bfloat16 {[rows, dims.kv_lora]}")
        elif tuple(kv_b.shape) != (rows, dims.kv_lora) or not kv_b.is_contiguous():
            bad.append(
                f"kv_b is {dtype_name(kv_b.dtype)} {list(kv_b.shape)} with strides {list(kv_b.stride())}, "
                f"must be bfloat16 {[rows, dims.kv_lora]} and contiguous"
            )
        optional = {name: number for name, number in (("scale", scale), ("eps", eps)) if number is not None}
        for name, number in {"q_scale": q_scale, "k_scale": k_scale, **optional}.items():
            if not _positive(number):
                bad.append(f"{name}={number!r} must be a positive number")
        if bad:
            raise ConfigError.of("kv_b weights", bad)
        heads = kv_b.view(dims.heads, dims.nope + dims.v, dims.kv_lora)
        weights = cls(
            W_UK_T=heads[:, : dims.nope],
            W_UV=heads[:, dims.nope :].transpose(1, 2),
            q_a_layernorm=Parameter(q_a_norm),
            kv_a_layernorm=Parameter(kv_a_norm),
            q_b_proj=Parameter(q_b),
            _q_scale_inv=torch.tensor([1.0 / q_scale], dtype=torch.float32, device=kv_b.device),
            _k_scale_inv=torch.tensor([1.0 / k_scale], dtype=torch.float32, device=kv_b.device),
            _q_scale_float=float(q_scale),
            _k_scale_float=float(k_scale),
            scale=dims.scale if scale is None else float(scale),
            rms_norm_eps=dims.eps if eps is None else float(eps),
        )
        require_attention(weights, dims)
        return weights

    @classmethod
    def random(
        cls,
        dims: MlaDims,
        *,
        seed: int = 0,
        device: "torch.device | str" = "cpu",
        q_scale: float = 1.0,
        k_scale: float = 1.0,
    ) -> "MlaWeights":
        """Test weights, the same for the same seed on every device.

        Each matrix has a standard deviation of 1 / sqrt(inputs), so that for projected rows of unit variance queries,
        keys and values keep unit variance: logits have a standard deviation near 1, absorbed queries near 0.5.
        """
        if type(seed) is not int or not 0 <= seed < 2**64:
            raise ConfigError(f"seed={seed!r} must be an int from 0 to 2^64 - 1")
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * std + mean).to(torch.bfloat16)

        weights = cls.from_kv_b(
            dims,
            q_b=normal(dims.heads * dims.qk, dims.q_lora, std=dims.q_lora**-0.5),
            kv_b=normal(dims.heads * (dims.nope + dims.v), dims.kv_lora, std=dims.kv_lora**-0.5),
            q_a_norm=normal(dims.q_lora, std=0.1, mean=1.0),
            kv_a_norm=normal(dims.kv_lora, std=0.1, mean=1.0),
            q_scale=q_scale,
            k_scale=k_scale,
        )
        return weights.to(device)

    def to(self, device: "torch.device | str") -> "MlaWeights":
        """The same weights on `device`, strides kept; views of one allocation stay views of one allocation."""
        if self.W_UK_T.device == torch.device(device):
            return self
        w_uk_t, w_uv = _moved([self.W_UK_T, self.W_UV], device)
        return replace(
            self,
            W_UK_T=w_uk_t,
            W_UV=w_uv,
            q_a_layernorm=Parameter(self.q_a_layernorm.weight.to(device)),
            kv_a_layernorm=Parameter(self.kv_a_layernorm.weight.to(device)),
            q_b_proj=Parameter(self.q_b_proj.weight.to(device)),
            _q_scale_inv=self._q_scale_inv.to(device),
            _k_scale_inv=self._k_scale_inv.to(device),
        )


def _moved(tensors: list[Tensor], device: "torch.device | str") -> list[Tensor]:
    """`tensors` on `device`, strides kept: those of one allocation move as one copy of what they span."""
    if len({t.untyped_storage().data_ptr() for t in tensors}) > 1:
        return [_moved([t], device)[0] for t in tensors]
    start = min(t.storage_offset() for t in tensors)
    stop = max(t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors)
    flat = tensors[0].as_strided((stop + 1 - start,), (1,), start).to(device)
    return [flat.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in tensors]


def check_attention(attention: Any, dims: MlaDims, device: "torch.device | str | None" = None) -> list[str]:
    """Everything about `attention` that does not serve a layer of `dims`; empty if it serves.

    Each line names the attribute, what it is and what it must be. `device`: where the tensors must lie; by default
    where W_UK_T lies. Reads metadata only: no device is synchronized.
    """
    bf16 = torch.bfloat16
    want: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "W_UK_T": (bf16, (dims.heads, dims.nope, dims.kv_lora)),
        "W_UV": (bf16, (dims.heads, dims.kv_lora, dims.v)),
        "q_a_layernorm.weight": (bf16, (dims.q_lora,)),
        "kv_a_layernorm.weight": (bf16, (dims.kv_lora,)),
        "q_b_proj.weight": (bf16, (dims.heads * dims.qk, dims.q_lora)),
        "_q_scale_inv": (torch.float32, (1,)),
        "_k_scale_inv": (torch.float32, (1,)),
    }
    bad: list[str] = []
    where = None if device is None else torch.device(device)
    for name, (dtype, shape) in want.items():
        tensor = attention
        for part in name.split("."):
            tensor = getattr(tensor, part, None)
        expected = f"must be {dtype_name(dtype)} {list(shape)}"
        if not isinstance(tensor, Tensor):
            bad.append(f"{name} is {'missing' if tensor is None else type(tensor).__name__}, {expected}")
            continue
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            bad.append(f"{name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, {expected}")
        elif problem := _layout(name, tensor):
            bad.append(f"{name} {problem}")
        where = tensor.device if where is None else where
        if not on_device(tensor, where):
            bad.append(f"{name} is on {tensor.device}, must be on {where}")
    for name in ("_q_scale_float", "_k_scale_float", "scale", "rms_norm_eps"):
        number = getattr(attention, name, None)
        if not _positive(number):
            bad.append(f"{name} is {'missing' if number is None else repr(number)}, must be a positive number")
    return bad


def _positive(number: Any) -> bool:
    return not isinstance(number, bool) and isinstance(number, int | float) and math.isfinite(number) and number > 0


def _layout(name: str, tensor: Tensor) -> str | None:
    """What about the strides or the address of `tensor` keeps the kernels from reading it 16 bytes at a time."""
    if tensor.dtype == torch.float32:
        return None
    if tensor.is_meta or tensor.data_ptr() % 16:
        return f"starts at {0 if tensor.is_meta else tensor.data_ptr():#x}, must be 16-byte aligned memory"
    strides = tensor.stride()
    axis = 1 if name == "W_UV" else tensor.dim() - 1
    if name.startswith("W_"):
        rest = [s for i, s in enumerate(strides) if i != axis]
        if strides[axis] != 1 or any(s <= 0 or s % 8 for s in rest):
            return (
                f"has strides {list(strides)}: axis {axis} must have 1 (latent contiguous), the others multiples of 8"
            )
    elif not tensor.is_contiguous():
        return f"has strides {list(strides)}, must be contiguous"
    return None


def require_attention(attention: Any, dims: MlaDims, device: "torch.device | str | None" = None) -> None:
    """ConfigError with every line of `check_attention`, if there is one."""
    if bad := check_attention(attention, dims, device):
        raise ConfigError.of(f"attention (weights for {dims})", bad)
