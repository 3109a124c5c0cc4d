"""What is wrong with the arguments of sparse MLA, as sentences. Reads metadata only: a capture goes on."""

from numbers import Number, Rational, Real
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl.amd.sparse_mla.key import LATENT, MAX_HEADS, MAX_WAVES, QK, RECORD, ROPE, WAVE
from k3dsl.checks import name

_INTS: Final = (torch.int32, torch.int64)
#: Tokens of a launch: HIP counts the threads of a dimension in 32 bits.
MAX_TOKENS: Final = (2**32 - 1) // (WAVE * MAX_WAVES)
#: Entries of an index list: their bytes must fit 31 bits.
MOST_INDICES: Final = 1 << 29
_INT32: Final = 1 << 31
LOG2E: Final = 1.4426950408889634
#: Largest softmax scale: the kernel takes it times log2(e), in fp32.
MAX_SCALE: Final = torch.finfo(torch.float32).max / LOG2E
#: What other sparse attention functions take and this one does not serve: each must be left at this value.
UNSERVED: Final[dict[str, Any]] = {
    **dict.fromkeys(["kv_scale", "q_scale", "attn_sink", "kv_splits"]),
    "out_mxfp8": None,
    "skip_reduce": False,
    "dot_precision": "bf16",
}
_UNSERVED_PREFIXES: Final = ("extra_", "inv_rope_")


def option_problems(options: dict[str, Any]) -> list[str]:
    """Options that are not served, or that nobody knows."""
    bad = []
    for option, value in options.items():
        if option in UNSERVED:
            allowed = UNSERVED[option]
        elif option.startswith(_UNSERVED_PREFIXES):
            allowed = None
        else:
            bad.append(f"{option} is no option: {', '.join([*UNSERVED, *(f'{p}*' for p in _UNSERVED_PREFIXES)])} are")
            continue
        if not _same(value, allowed):
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            bad.append(f"{option}={shown} must be {allowed!r}: sparse MLA on gfx950 does not serve it")
    return bad


def _same(value: Any, allowed: Any) -> bool:
    """Whether `value` is this plain value. Tensors and arrays are none, and are not compared."""
    return value is allowed or (isinstance(value, Number | str) and value == allowed)


def scale_problems(scale: Any) -> list[str]:
    """Why this is no softmax scale: a number whose product with log2(e) float32 holds."""
    if isinstance(scale, Real) and not isinstance(scale, bool):
        number = scale if isinstance(scale, Rational) else float(scale)  # integers may be past float's range
        if -MAX_SCALE <= number <= MAX_SCALE:
            return []
    return [f"softmax_scale={scale!r} must be a finite number, from {-MAX_SCALE} to {MAX_SCALE}"]


def query_problems(q: Any, heads: int | None = None) -> list[str]:
    """Why `q` is no query: bf16 [T, H, 576], rows aligned to 4 bytes."""
    if not isinstance(q, Tensor):
        return [f"q is a {type(q).__name__}, must be a tensor"]
    if q.dim() != 3 or q.dtype != torch.bfloat16 or q.shape[2] != QK:
        return [f"q is {name(q.dtype)} {tuple(q.shape)}, must be bfloat16 [T, H, {QK}]"]
    bad = []
    if not 1 <= q.shape[1] <= MAX_HEADS:
        bad.append(f"q has {q.shape[1]} heads, must have 1 to {MAX_HEADS}")
    elif heads is not None and q.shape[1] != heads:
        bad.append(f"q has {q.shape[1]} heads, {heads} were prepared")
    if q.shape[0] > MAX_TOKENS:
        bad.append(f"q has {q.shape[0]} tokens, must have {MAX_TOKENS} at most")
    return bad + _rows("q", q)


def _rows(what: str, x: Tensor) -> list[str]:
    """A last axis of stride 1 and rows that begin at whole dwords, near enough for 32-bit strides."""
    bad: list[str] = []
    if x.numel() == 0:
        return bad
    if x.stride(2) != 1:
        bad.append(f"{what} has strides {x.stride()}, the last must be 1")
    wrong = [d for d in (0, 1) if x.shape[d] > 1 and x.stride(d) % 2]
    if wrong:
        bad.append(f"{what} has strides {x.stride()}, the first two must be even")
    far = [d for d in (0, 1) if not 0 <= x.stride(d) < _INT32 or (d == 1 and x.stride(1) * 2 * MAX_HEADS >= _INT32)]
    if far:
        bad.append(f"{what} has strides {x.stride()}, too far apart")
    if x.data_ptr() % 4:
        bad.append(f"{what} must be aligned to 4 bytes")
    return bad


def cache_problems(kv: Any, device: torch.device | None) -> list[str]:
    """Why `kv` holds no records: one-byte [N, 656], [N, 1, 656], [N, 1, 1, 656] or [blocks, block, 656], dense."""
    if not isinstance(kv, Tensor):
        return [f"kv_buffer is a {type(kv).__name__}, must be a tensor"]
    shape, strides = tuple(kv.shape), kv.stride()
    if kv.element_size() != 1 or kv.dim() not in (2, 3, 4) or shape[-1] != RECORD:
        return [f"kv_buffer is {name(kv.dtype)} {shape}, must be one-byte [N, {RECORD}] or [blocks, block, {RECORD}]"]
    bad = []
    if kv.dim() == 4 and shape[1:3] != (1, 1):
        bad.append(f"kv_buffer has shape {shape}, of four axes the middle two must be 1")
    if shape[0] < 1 or min(shape) < 1:
        bad.append(f"kv_buffer has shape {shape}, must hold a record")
    pitch, dense = 1, []
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        dense.append(size == 1 or stride == pitch)
        pitch *= size
    if not all(dense):
        bad.append(f"kv_buffer {shape} has strides {strides}: records must lie {RECORD} bytes apart, pages not padded")
    if kv.data_ptr() % 16:
        bad.append("kv_buffer must be aligned to 16 bytes")
    if device is not None and kv.device != device:
        bad.append(f"kv_buffer is on {kv.device}, q on {device}")
    return bad


def list_problems(indptr: Any, indices: Any, tokens: int, device: torch.device, *, packed: bool = False) -> list[str]:
    """Why these are no index lists in CSR form. packed: they must be contiguous int32 already."""
    bad = []
    for what, x in (("kv_indptr", indptr), ("kv_indices", indices)):
        if not isinstance(x, Tensor):
            bad.append(f"{what} is a {type(x).__name__}, must be a tensor")
            continue
        if x.dim() != 1 or x.dtype not in _INTS:
            bad.append(f"{what} is {name(x.dtype)} {tuple(x.shape)}, must be int32 or int64 of one axis")
            continue
        if x.device != device:
            bad.append(f"{what} is on {x.device}, q on {device}")
        if packed and (x.dtype != torch.int32 or (x.numel() > 1 and x.stride(0) != 1)):
            bad.append(f"{what} is {name(x.dtype)} of stride {x.stride(0)}, must be contiguous int32")
        if what == "kv_indptr" and x.numel() != tokens + 1:
            bad.append(f"kv_indptr has {x.numel()} entries, must have T + 1 = {tokens + 1}")
        if what == "kv_indices" and x.numel() >= MOST_INDICES:
            bad.append(f"kv_indices has {x.numel()} entries, must have fewer than {MOST_INDICES}")
    return bad


def out_problems(out: Any, tokens: int, heads: int, device: torch.device) -> list[str]:
    """Why `out` cannot take the output: bf16 [T, H, >= 512], rows aligned to 4 bytes."""
    if not isinstance(out, Tensor):
        return [f"out is a {type(out).__name__}, must be a tensor"]
    if (
        out.dim() != 3
        or out.dtype != torch.bfloat16
        or out.shape[2] < LATENT
        or tuple(out.shape[:2]) != (tokens, heads)
    ):
        return [f"out is {name(out.dtype)} {tuple(out.shape)}, must be bfloat16 [{tokens}, {heads}, {LATENT} or more]"]
    bad = _rows("out", out)
    if out.numel() and _overlap(out):
        bad.append(f"out has strides {out.stride()}: its rows overlap")
    if out.device != device:
        bad.append(f"out is on {out.device}, q on {device}")
    return bad


def _overlap(out: Tensor) -> bool:
    """Whether two rows of `out` may share elements of their first 512."""
    axes = sorted((out.stride(d), out.shape[d]) for d in (0, 1) if out.shape[d] > 1)
    end = LATENT  # one past the last element of what the axes so far reach
    for stride, size in axes:
        if stride < end:
            return True
        end += (size - 1) * stride
    return False


def lse_problems(lse: Any, tokens: int, heads: int, device: torch.device) -> list[str]:
    """Why `lse` cannot take the log-sum-exp: contiguous fp32 [T, H]."""
    if not isinstance(lse, Tensor) or lse.dtype != torch.float32 or tuple(lse.shape) != (tokens, heads):
        shown = f"{name(lse.dtype)} {tuple(lse.shape)}" if isinstance(lse, Tensor) else repr(lse)
        return [f"lse is {shown}, must be float32 [{tokens}, {heads}]"]
    bad = [] if lse.is_contiguous() else [f"lse has strides {lse.stride()}, must be contiguous"]
    return bad if lse.device == device else [*bad, f"lse is on {lse.device}, q on {device}"]


def problems(
    q: Any,
    kv_buffer: Any,
    kv_indptr: Any,
    kv_indices: Any,
    *,
    kv_lora_rank: Any = LATENT,
    qk_rope_head_dim: Any = ROPE,
    out: Any = None,
    options: dict[str, Any] | None = None,
) -> list[str]:
    """Everything that keeps these from being a launch, the device aside; [] if nothing does."""
    bad = option_problems(options or {})
    for what, value, want in (("kv_lora_rank", kv_lora_rank, LATENT), ("qk_rope_head_dim", qk_rope_head_dim, ROPE)):
        if not _same(value, want):
            bad.append(f"{what}={value!r} must be {want}")
    wrong = query_problems(q)
    bad += wrong
    if not isinstance(q, Tensor) or q.dim() != 3:
        return bad + cache_problems(kv_buffer, None)
    tokens, heads = q.shape[:2]
    bad += cache_problems(kv_buffer, q.device)
    bad += list_problems(kv_indptr, kv_indices, tokens, q.device)
    if out is not None:
        bad += out_problems(out, tokens, heads, q.device)
    return bad
