"""What is wrong with tensors that a caller hands to a prepared layer, as sentences; for every kind of prepared object.

Functions return every problem they find. They read metadata only: no device is synchronized.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError, NotPrepared

#: Element type and last axis of a cache tensor in each format; bytes may come as uint8, int8 or e4m3.
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_FORMATS: dict[str, tuple[tuple[torch.dtype, ...], int]] = {
    "fp8": (_BYTES, 576),
    "fp8_ds_mla": (_BYTES, 656),
    "bf16": ((torch.bfloat16,), 576),
}
_ALIGN = 16  # bytes: the widest access of every kernel


def name(dtype: torch.dtype) -> str:
    """float8_e4m3fn, int32, ... without the module's name."""
    return str(dtype).removeprefix("torch.")


def not_prepared(shapes: Iterable[tuple[int, int]], rows: int, q: int) -> NotPrepared:
    """The error for a (rows, q) that is not among `shapes`: the nearest that are, and the argument that adds it."""
    known = sorted(set(shapes))
    near = sorted(known, key=lambda s: (abs(s[0] - rows) + 64 * (s[1] != q), s))[:3]
    add = []
    if type(q) is not int or q < 1 or rows % q:
        add.append(f"no argument can: the {rows} rows must be a multiple of q={q!r}")
    else:
        if rows not in {r for r, _ in known}:
            add.append(f"batches=(..., {rows})")
        if q not in {k for _, k in known}:
            add.append(f"queries=(..., {q})")
    return NotPrepared(
        f"(rows, q)=({rows}, {q}) is not prepared. Nearest prepared: {', '.join(map(str, near)) or 'none'}. "
        f"To add it: {' and '.join(add)}"
    )


def kv_format_of(cache: Tensor) -> str | None:
    """The format that a cache tensor is in by its dtype and last axis; None if in none."""
    for kv_format, (dtypes, width) in _FORMATS.items():
        if cache.dtype in dtypes and cache.dim() == 3 and cache.shape[2] == width:
            return kv_format
    return None


def cache_problems(cache: Any, *, kv_format: str, page_size: int | None, device: torch.device) -> list[str]:
    """What keeps `cache` from being a paged cache [pages, page_size, width] of `kv_format` on `device`."""
    dtypes, width = _FORMATS[kv_format]
    want = f"[pages, {page_size or 'page_size'}, {width}]"
    if not isinstance(cache, Tensor):
        return [f"cache is {type(cache).__name__}, must be a tensor {want}"]
    bad = []
    if cache.dtype not in dtypes:
        bad.append(f"cache is {name(cache.dtype)}, must be {' or '.join(map(name, dtypes))} ({kv_format})")
    if cache.dim() != 3 or cache.shape[2] != width or (page_size is not None and cache.shape[1] != page_size):
        bad.append(f"cache has shape {list(cache.shape)}, must be {want} ({kv_format})")
    elif cache.stride(2) != 1:
        bad.append(f"cache has strides {list(cache.stride())}, the last must be 1")
    elif cache.shape[0] < 1:
        bad.append("cache has no page")
    if not on_device(cache, device):
        bad.append(f"cache is on {cache.device}, must be on {device}")
    if not bad:
        size = cache.element_size()
        odd = [s * size for s in cache.stride()[:2] if s * size % _ALIGN or s <= 0]
        if odd:
            bad.append(f"cache has page and token strides of {[s * size for s in cache.stride()[:2]]} bytes, "
                       f"must be positive multiples of {_ALIGN}")  # fmt: skip
        if cache.data_ptr() % _ALIGN:
            bad.append(f"cache starts at {cache.data_ptr():#x}, must be {_ALIGN}-byte aligned")
    return bad


def tensor_problems(optional: dict[str, Any] | None = None, **given: Any) -> list[str]:
    """Which of these are no tensors, or have no axis: for what failed before `step_problems` could look at it.

    optional: those that may be None.
    """
    given |= {what: value for what, value in (optional or {}).items() if value is not None}
    return [
        f"{what} is {type(value).__name__}, must be a tensor"
        if not isinstance(value, Tensor)
        else f"{what} has shape [], must have an axis"
        for what, value in given.items()
        if not isinstance(value, Tensor) or value.dim() == 0
    ]


def q_problems(q: Any) -> list[str]:
    """Why that is no number of tokens."""
    return [] if type(q) is int else [f"q={q!r} must be an int"]


def metadata_problems(**given: Tensor | None) -> list[str]:
    """What keeps request metadata from being padded: block_table has two axes, all else one."""
    return [
        f"{what} has shape {list(value.shape)}, must have {axes} {'axis' if axes == 1 else 'axes'}"
        for what, value in given.items()
        for axes in [2 if what == "block_table" else 1]
        if value is not None and value.dim() != axes
    ]


def step_problems(dims: MlaDims, rows: int, q: int, device: torch.device, **tensors: Tensor) -> list[str]:
    """What keeps these tensors from being those of one step of `rows` rows, q a request. Any of

    projected     bf16 [rows, >= dims.pitch]
    out           bf16 [rows, heads * v], contiguous
    slots         int64 [>= rows], contiguous
    block_table   int32 [>= rows / q, width]
    lengths       int32 [>= rows / q], contiguous
    totals        int32 [>= rows / q], contiguous
    """
    requests, columns = rows // q, dims.heads * dims.v
    # Element type, what people read, the least of each axis, and which axes may not be longer.
    facts: dict[str, tuple[torch.dtype, str, tuple[int, ...], tuple[bool, ...]]] = {
        "projected": (torch.bfloat16, f"[{rows}, {dims.pitch}]", (rows, dims.pitch), (True, False)),
        "out": (torch.bfloat16, f"[{rows}, {columns}]", (rows, columns), (True, True)),
        "slots": (torch.int64, f"[{rows}]", (rows,), (False,)),
        "block_table": (torch.int32, f"[{requests}, width]", (requests, 1), (False, False)),
        "lengths": (torch.int32, f"[{requests}]", (requests,), (False,)),
        "totals": (torch.int32, f"[{requests}]", (requests,), (False,)),
    }
    bad = []
    for what, tensor in tensors.items():
        dtype, shape, least, _ = facts[what]
        if not isinstance(tensor, Tensor):
            bad.append(f"{what} is {type(tensor).__name__}, must be a {name(dtype)} tensor {shape}")
            continue
        if tensor.dtype != dtype:
            bad.append(f"{what} is {name(tensor.dtype)}, must be {name(dtype)}")
        if not on_device(tensor, device):
            bad.append(f"{what} is on {tensor.device}, must be on {device}")
        if tensor.dim() != len(least):
            bad.append(f"{what} has shape {list(tensor.shape)}, must be {shape}")
        elif tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            bad.append(f"{what} has strides {list(tensor.stride())}, the last must be 1")
    if bad:
        return bad
    for what, tensor in tensors.items():
        _, _, least, exact = facts[what]
        for axis, (n, must) in enumerate(zip(least, exact, strict=True)):
            if tensor.shape[axis] != n and (must or tensor.shape[axis] < n):
                bad.append(
                    f"{what} has shape {list(tensor.shape)}, axis {axis} must be {n}{'' if must else ' or more'}"
                )
        if what == "projected" and rows > 1 and tensor.stride(0) % 8:
            bad.append(f"projected has a row stride of {tensor.stride(0)} elements, must be a multiple of 8")
        if what in ("projected", "block_table") and tensor.shape[0] > 1 and not 0 <= tensor.stride(0) < 1 << 31:
            bad.append(f"{what} has a row stride of {tensor.stride(0)} elements, must be below 2^31")
        if what == "out" and not tensor.is_contiguous():
            bad.append(f"out has strides {list(tensor.stride())}, must be contiguous")
        align = {"projected": _ALIGN, "out": 4}.get(what, 1)
        if tensor.data_ptr() % align:
            bad.append(f"{what} starts at {tensor.data_ptr():#x}, must be {align}-byte aligned")
    return bad


def torch_device(device: "torch.device | str | int | None") -> "torch.device | None":
    """What `device` names; a number is a CUDA device. Raises ConfigError where torch knows no such device."""
    if device is None:
        return None
    try:
        return torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device={device!r} must be a device of torch, such as cpu, cuda or cuda:0") from None


def on_device(tensor: Tensor, device: torch.device) -> bool:
    """Whether `tensor` is there; a device without an index is any of its type."""
    return tensor.device.type == device.type and (device.index is None or tensor.device.index == device.index)


def require(what: str, problems: list[str]) -> None:
    """ConfigError with every line of `problems`, if there is one."""
    if problems:
        raise ConfigError.of(what, problems)


def place(t: Tensor) -> tuple[Any, ...]:
    """What makes two cache tensors the same to every kernel."""
    return t.device, t.data_ptr(), t.shape, t.stride(), t.element_size()


def lies_at(cache: Tensor, known: Tensor | None, where: tuple[Any, ...]) -> bool:
    """Whether `cache` lies at `where`, a `place`. known: a tensor that did, whose memory may be another now."""
    return cache.data_ptr() == where[1] and (cache is known or place(cache) == where)


def layout(t: Tensor) -> tuple[Any, ...]:
    """What the checks of a step's tensor depend on, but its address: a layout that passed is not looked at again."""
    return t.dtype, t.get_device(), t.shape, t.stride()
