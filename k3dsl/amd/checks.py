"""What is wrong with the arguments of a `mla_pre` launch, as sentences. Reads metadata only, no device waits."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from k3dsl.amd.mla_pre.key import (
    ENTRY,
    GATE,
    GRID,
    HEADS,
    HEALTH_WORDS,
    HIDDEN,
    KV_LORA,
    MAX_BLOCKS,
    MAX_TOKENS,
    NOPE,
    POINTS,
    Q_LORA,
    QKV_A,
    ROPE,
    TAG_SLOTS,
    q_heads,
    scratch_bytes,
)
from k3dsl.checks import name
from k3dsl.errors import ConfigError

if TYPE_CHECKING:
    from k3dsl.amd.mla_pre.key import MlaPreBuild

BYTES: Final = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_INT32: Final = 1 << 31


class _Fact(NamedTuple):
    """A tensor whose layout is fixed: contiguous, of this element type and shape."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    align: int = 16


def _fixed(key: "MlaPreBuild") -> dict[str, _Fact]:
    bf16 = (torch.bfloat16,)
    rows = key.tokens
    return {
        "prefix": _Fact(bf16, (rows, HIDDEN)),
        "delta": _Fact(bf16, (rows, HIDDEN)),
        "ares_nw": _Fact(bf16, (HIDDEN,)),
        "ares_qk": _Fact(bf16, (HIDDEN,)),
        "in_nw": _Fact(bf16, (HIDDEN,)),
        "w_qkv": _Fact(bf16, (QKV_A, HIDDEN)),
        "w_g": _Fact(bf16, (GATE, HIDDEN)),
        "q_nw": _Fact(bf16, (Q_LORA,)),
        "kv_nw": _Fact(bf16, (KV_LORA,)),
        "w_qb": _Fact(bf16, (HEADS * (NOPE + ROPE), Q_LORA)),
        "slots": _Fact((torch.int64,), (rows,), 8),
        "gate_out": _Fact(bf16, (rows, GATE)),
        "q_out": _Fact(bf16 if key.qbf16 else BYTES, (rows, q_heads(key), ENTRY)),
        "epoch": _Fact((torch.int32,), (1,), 4),
        "health": _Fact((torch.int32,), (HEALTH_WORDS,)),
    }


def weight_problems(key: "MlaPreBuild", device: torch.device, **weights: Any) -> list[str]:
    """What keeps these from being the weights of a layer: any of ares_nw ... w_qb, w_k and w_k_scale."""
    fixed = _fixed(key)
    bad = [
        line for what, value in weights.items() if what in fixed for line in _tensor(what, value, fixed[what], device)
    ]
    if "w_k" in weights:
        bad += _w_k_problems(key, weights["w_k"], weights.get("w_k_scale"), device)
    return bad


def each(**values: Any) -> list[tuple[Any, ...]]:
    """The values as tuples. Raises ConfigError for those that cannot be."""
    bad = [
        f"{what}={value!r} must be a tuple, or what one can be made of"
        for what, value in values.items()
        if not isinstance(value, Iterable) or isinstance(value, str | bytes)
    ]
    if bad:
        raise ConfigError.of("shapes", bad)
    return [tuple(value) for value in values.values()]


def require_numbers(
    batches: tuple[int, ...],
    queries: tuple[int, ...],
    nblocks: tuple[int, ...],
    deltas: tuple[bool, ...],
    max_context: int,
    page_size: int | None,
) -> None:
    """ConfigError with everything that keeps these from being the shapes of a PreparedMlaPre."""
    bad = []
    for what, values, most in (
        ("batches", batches, MAX_TOKENS),
        ("queries", queries, 8),
        ("nblocks", nblocks, MAX_BLOCKS),
    ):
        bad += [f"{what} is empty"] if not values else []
        bad += [
            f"{what}: {v!r} must be an int from 1 to {most}" for v in values if type(v) is not int or not 1 <= v <= most
        ]
    bad += [f"deltas: {d!r} must be True or False" for d in deltas if type(d) is not bool]
    bad += ["deltas is empty"] if not deltas else []
    if type(max_context) is not int or max_context < 1:
        bad.append(f"max_context={max_context!r} must be a positive int")
    if page_size is not None and (type(page_size) is not int or page_size < 1):
        bad.append(f"page_size={page_size!r} must be a positive int, or None for any")
    if not bad:
        idle = [q for q in queries if all(b % q for b in batches)]
        bad += [f"queries: {q} divides none of batches={batches}, so it has no shape" for q in idle]
    if bad:
        raise ConfigError.of("PreparedMlaPre", bad)


def launch_problems(key: "MlaPreBuild", **given: Any) -> list[str]:
    """Everything that keeps `given`, the keyword arguments of `mla_pre`, from being a launch of `key`."""
    prefix = given["prefix"]
    device = prefix.device if isinstance(prefix, Tensor) else torch.device("cpu")
    bad = []
    for what, fact in _fixed(key).items():
        value = given[what]
        if what == "delta" and not key.delta:
            if value is not None:
                bad.append("delta is given, must be None for a build with delta=False")
        else:
            bad += _tensor(what, value, fact, device)
    bad += _blocks_problems(key, given["blocks"], device)
    bad += _w_k_problems(key, given["w_k"], given["w_k_scale"], device)
    bad += cache_problems(given["kv_cache"], device)
    bad += _buffer_problems(key, given, device)
    bad += _number_problems(key, given["rank"], given["layer"], given["alarm"])
    return bad or _overlaps(given)


def require_launch(key: "MlaPreBuild", **given: Any) -> None:
    """ConfigError with every line of `launch_problems`, if there is one."""
    if bad := launch_problems(key, **given):
        raise ConfigError.of(f"mla_pre for {key}", bad)


def cache_problems(cache: Any, device: torch.device) -> list[str]:
    """What keeps `cache` from being the paged cache: one-byte [blocks, block_size, 576], entries dense."""
    want = f"a one-byte tensor [blocks, block_size, {ENTRY}]"
    if not isinstance(cache, Tensor):
        return [f"kv_cache is {type(cache).__name__}, must be {want}"]
    bad = _on("kv_cache", cache, device)
    if cache.element_size() != 1:
        bad.append(f"kv_cache is {name(cache.dtype)}, must be {want}")
    if cache.dim() != 3 or cache.shape[2] != ENTRY or 0 in cache.shape:
        return [*bad, f"kv_cache has shape {list(cache.shape)}, must be {want}"]
    if cache.stride(2) != 1:
        bad.append(f"kv_cache has strides {list(cache.stride())}, the last must be 1")
    for axis, least in ((0, 0), (1, ENTRY)):
        stride = cache.stride(axis)
        if cache.shape[axis] > 1 and (stride % 4 or not least <= stride < _INT32 or stride == 0):
            bad.append(
                f"kv_cache has a {('block', 'slot')[axis]} stride of {stride} bytes, must be a multiple of 4 from "
                f"{max(least, 4)} to 2^31 - 1"
            )
    return bad + _aligned("kv_cache", cache, 4)


def _tensor(what: str, value: Any, fact: _Fact, device: torch.device) -> list[str]:
    types = " or ".join(map(name, fact.dtypes))
    if not isinstance(value, Tensor):
        return [f"{what} is {type(value).__name__}, must be a tensor of {types} {list(fact.shape)}"]
    bad = _on(what, value, device)
    if value.dtype not in fact.dtypes:
        bad.append(f"{what} is {name(value.dtype)}, must be {types}")
    if tuple(value.shape) != fact.shape:
        bad.append(f"{what} has shape {list(value.shape)}, must be {list(fact.shape)}")
    elif not value.is_contiguous():
        bad.append(f"{what} has strides {list(value.stride())}, must be contiguous")
    return bad + _aligned(what, value, fact.align)


def _on(what: str, value: Tensor, device: torch.device) -> list[str]:
    return [] if value.device == device else [f"{what} is on {value.device}, must be on {device} as prefix is"]


def _aligned(what: str, value: Tensor, align: int) -> list[str]:
    if value.is_meta or value.data_ptr() % align == 0:
        return []
    return [f"{what} starts at {value.data_ptr():#x}, must be {align}-byte aligned"]


def _blocks_problems(key: "MlaPreBuild", blocks: Any, device: torch.device) -> list[str]:
    want = f"a tensor of bfloat16 [{key.tokens}, {key.nblocks} or more, {HIDDEN}]"
    if not isinstance(blocks, Tensor):
        return [f"blocks is {type(blocks).__name__}, must be {want}"]
    bad = _on("blocks", blocks, device)
    if blocks.dtype != torch.bfloat16:
        bad.append(f"blocks is {name(blocks.dtype)}, must be bfloat16")
    shape = tuple(blocks.shape)
    if len(shape) != 3 or shape[0] != key.tokens or shape[1] < key.nblocks or shape[2] != HIDDEN:
        return [*bad, f"blocks has shape {list(shape)}, must be {want}"]
    if blocks.stride(2) != 1:
        return [*bad, f"blocks has strides {list(blocks.stride())}, the last must be 1"]
    for axis in (0, 1):
        stride = blocks.stride(axis)
        if shape[axis] > 1 and (stride % 8 or not 0 <= stride < _INT32):
            bad.append(f"blocks has a stride({axis}) of {stride} elements, must be a multiple of 8 from 0 to 2^31 - 1")
    span = 2 * (sum((n - 1) * s for n, s in zip(shape, blocks.stride(), strict=True)) + 1)
    if span >= _INT32:
        bad.append(f"blocks spans {span} bytes, must span fewer than 2^31")
    return bad + _aligned("blocks", blocks, 16)


def _w_k_problems(key: "MlaPreBuild", w_k: Any, scale: Any, device: torch.device) -> list[str]:
    """w_k, and the scales that MXFP4 weights have. Strides are free: w_k is loaded by dwords, its scales by bytes."""
    four = key.w_uk == "mxfp4"
    dtype, shape = (torch.uint8, (HEADS, KV_LORA, NOPE // 2)) if four else (torch.bfloat16, (HEADS, NOPE, KV_LORA))
    bad = _free("w_k", w_k, dtype, shape, device, fixed=(2,), step=4)
    if not four:
        return bad + ([] if scale is None else ["w_k_scale is given, must be None for w_uk='bf16'"])
    return bad + _free("w_k_scale", scale, torch.uint8, (HEADS, KV_LORA, NOPE // 32), device, fixed=(), step=1)


def _free(
    what: str,
    value: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    fixed: tuple[int, ...],
    step: int,
) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"{what} is {type(value).__name__}, must be a tensor of {name(dtype)} {list(shape)}"]
    bad = _on(what, value, device)
    if value.dtype != dtype:
        bad.append(f"{what} is {name(value.dtype)}, must be {name(dtype)}")
    if tuple(value.shape) != shape:
        return [*bad, f"{what} has shape {list(value.shape)}, must be {list(shape)}"]
    for axis in range(len(shape)):
        stride = value.stride(axis) * value.element_size()
        if axis in fixed:
            if value.stride(axis) != 1:
                bad.append(f"{what} has strides {list(value.stride())}, axis {axis} must have 1")
        elif stride % step or not 0 < stride < _INT32:
            bad.append(
                f"{what} has a stride({axis}) of {stride} bytes, must be a positive multiple of {step} below 2^31"
            )
    span = (sum((n - 1) * s for n, s in zip(shape, value.stride(), strict=True)) + 1) * value.element_size()
    if span >= _INT32:
        bad.append(f"{what} spans {span} bytes, must span fewer than 2^31")
    return bad + _aligned(what, value, 4)


def _buffer_problems(key: "MlaPreBuild", given: dict[str, Any], device: torch.device) -> list[str]:
    bad = []
    scratch, least = given["scratch"], scratch_bytes(key)
    if not isinstance(scratch, Tensor) or scratch.dtype != torch.uint8 or not scratch.is_contiguous():
        bad.append(f"scratch is {_what(scratch)}, must be a contiguous tensor of uint8, {least} bytes or more")
    else:
        bad += _on("scratch", scratch, device)
        if scratch.numel() < least:
            bad.append(f"scratch has {scratch.numel()} bytes, must have {least} or more")
        bad += _aligned("scratch", scratch, 16)
    peers = given["peers"]
    if peers is not None or key.ranks > 1:
        bad += _tensor("peers", peers, _Fact((torch.int64,), (key.ranks,), 8), device)
    tl = given["tl"]
    if key.timeline:
        bad += _tensor("tl", tl, _Fact((torch.int64,), (GRID, POINTS)), device)
    elif tl is not None:
        bad.append("tl is given, must be None for a build with timeline=False")
    return bad


def _what(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{name(value.dtype)} {list(value.shape)} with strides {list(value.stride())}"


def _number_problems(key: "MlaPreBuild", rank: Any, layer: Any, alarm: Any) -> list[str]:
    bad = []
    if type(rank) is not int or not 0 <= rank < key.ranks:
        bad.append(f"rank={rank!r} must be an int from 0 to {key.ranks - 1}")
    if type(layer) is not int or not 0 <= layer < TAG_SLOTS:
        bad.append(f"layer={layer!r} must be an int from 0 to {TAG_SLOTS - 1}: it is a tag slot")
    if type(alarm) is not int or alarm < 0 or alarm % 4 or (alarm == 0 and key.ranks > 1):
        bad.append(
            f"alarm={alarm!r} must be the address of an int32 word" + ("" if key.ranks > 1 else ", or 0 for none")
        )
    return bad


#: Written by a launch while others of its arguments are read.
_WRITTEN: Final = ("prefix", "kv_cache", "gate_out", "q_out", "scratch", "health", "tl")


def _overlaps(given: dict[str, Any]) -> list[str]:
    """Tensors that a launch writes and that share bytes with another argument. Padding inside a pitch counts not."""
    spans = {what: _span(value) for what, value in given.items() if isinstance(value, Tensor) and not value.is_meta}
    bad = []
    names = list(spans)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            if one not in _WRITTEN and other not in _WRITTEN:
                continue
            a, b = spans[one], spans[other]
            # Caches and residual blocks of many layers are interleaved in one allocation: extents alone say little.
            dense = all(_dense(given[w]) for w in (one, other))
            if dense and a[0] < b[1] and b[0] < a[1]:
                bad.append(f"{one} and {other} overlap in memory")
    return bad


def _dense(value: Tensor) -> bool:
    return value.is_contiguous()


def _span(value: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()
