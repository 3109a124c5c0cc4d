"""The fused MLA epilogues as torch functions, drop-in for engines that call them by these names and argument lists.

T tokens, H heads. All 16-bit tensors of a call are bf16, or all are fp16; fp8 is torch.float8_e4m3fn. A slot below 0
skips the cache insert of its token and nothing else. Given `positions` and `cos_sin_cache`, the last 64 of every query
and k_pe are rotated (GPT-J pairs: x' = x c - y s, y' = x s + y c, in float32). Zero tokens: nothing is launched.

Every bad argument raises one ConfigError that lists all problems, before anything is launched or written. `out=` takes
the memory of what is returned, so that a call allocates nothing. `debug=True` also reads the slots (and positions) back
and checks that they lie inside the cache (the table): it waits for the device, so never inside a capture.

Kernels come from the compile cache on first use; `prepare_epilogues` fetches them ahead, which a capture needs.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from k3dsl.cache.arguments import kernel_cache_problems
from k3dsl.checks import require, tensor_problems, torch_device
from k3dsl.errors import CaptureError, ConfigError, K3Error
from k3dsl.nvidia import driver as cuda
from k3dsl.nvidia.device import TARGETS, read
from k3dsl.nvidia.epilogue import ENTRY, MAX_HEADS, QK, EpilogueKey, V, division, geometry, share, supports
from k3dsl.nvidia.epilogue_checks import E4M3, check, check_values
from k3dsl.nvidia.toolchain import build, compile_key

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Plans of argument layouts; an engine has a handful, so a full table means that something else varies: start anew.
_MOST_PLANS = 512
_HERE: AbstractContextManager[Any] = nullcontext()


_Call = TypeVar("_Call", bound=Callable[..., Any])


def _tensors_only(call: _Call) -> _Call:
    """`call`, whose errors for what is no tensor where one belongs say so. 0.3 us of host time."""
    signature = inspect.signature(call)
    optional = {name for name, parameter in signature.parameters.items() if parameter.default is None}
    several = "tuple" in str(signature.parameters["out"].annotation)
    others = {name for name, parameter in signature.parameters.items() if parameter.default is False}

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, K3Error):
                raise
            found = dict(signature.bind(*args, **kwargs).arguments)
            out = found.pop("out", None)
            found = {name: value for name, value in found.items() if name not in others}
            maybe = {name: found.pop(name) for name in optional & found.keys()}
            many = several and isinstance(out, tuple)
            outs = {f"out[{i}]": one for i, one in enumerate(out)} if many else {"out": out}
            require(call.__name__, tensor_problems(maybe | outs, **found))
            raise

    return cast(_Call, checked)


# ---- public functions -------------------------------------------------------------------------------------------


@_tensors_only
def fused_mla_key_concat_kv_cache_insert(
    q: Tensor,  # [T, H, 192]; its last 64 are rotated in place
    k_nope: Tensor,  # [T, H, 128]
    k_pe: Tensor,  # [T, 64]
    kv_c_normed: Tensor,  # [T, 512]
    kv_cache: Tensor,  # 16-bit [pages, page_size, 576]
    slot_mapping: Tensor,  # int64 [>= T]
    positions: Tensor | None = None,  # int64 [>= T]
    cos_sin_cache: Tensor | None = None,  # float32 [max_position, 64]: 32 cosines, 32 sines
    *,
    out: Tensor | None = None,
    debug: bool = False,
) -> Tensor:
    """Prefill with a 16-bit cache. Returns k [T, H, 192] = [k_nope, k_pe on every head]; q changes only by rotation."""
    rope = (positions, cos_sin_cache)
    return _prefill16("plain", q, k_nope, k_pe, kv_c_normed, kv_cache, slot_mapping, rope, out, debug)


@_tensors_only
def fused_mla_key_concat_ds_mla_insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c_normed: Tensor,
    kv_cache: Tensor,  # uint8 [pages, page_size, 656]
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    *,
    out: Tensor | None = None,
    debug: bool = False,
) -> Tensor:
    """As fused_mla_key_concat_kv_cache_insert, with a cache of 656-byte records: 512 latents in e4m3, a power-of-two
    scale for each 128 of them, 64 rope values in 16 bits."""
    rope = (positions, cos_sin_cache)
    return _prefill16("fp8_ds_mla", q, k_nope, k_pe, kv_c_normed, kv_cache, slot_mapping, rope, out, debug)


def _prefill16(
    kind: str,
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    cache: Tensor,
    slots: Tensor,
    rope: tuple[Tensor | None, Tensor | None],
    out: Tensor | None,
    debug: bool,
) -> Tensor:
    if out is None:
        out = torch.empty((*k_nope.shape[:2], QK), dtype=k_nope.dtype, device=k_nope.device)
    given = {"k_nope": k_nope, "q": q, "k_pe": k_pe, "kv_c": kv_c, "cache": cache, "slots": slots}
    _launch("prefill", kind, given, {"k_out": out}, {}, *rope, debug)
    return out


@_tensors_only
def fused_mla_qkv_quant_kv_cache_fp8_insert(
    q: Tensor,  # [T, H, 192]
    k_nope: Tensor,  # [T, H, 128]
    k_pe: Tensor,  # [T, 64]
    kv_c_normed: Tensor,  # [T, 512]
    v: Tensor,  # [T, H, 128]
    kv_cache: Tensor,  # e4m3 [pages, page_size, 576]
    slot_mapping: Tensor,  # int64 [>= T]
    q_scale_inv: Tensor,  # float32 [1] on the device, as the three below: values are multiplied by it
    k_scale_inv: Tensor,
    v_scale_inv: Tensor,
    cache_scale_inv: Tensor,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    debug: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill with an fp8 cache. Returns e4m3 (q [T, H, 192], k [T, H, 192], v [T, H, 128]), clamped to +-448; a NaN
    becomes -448. Rotated values are not rounded to 16 bits on the way."""
    if out is None:
        shapes = ((*k_nope.shape[:2], n) for n in (QK, QK, V))
        out = tuple(torch.empty(s, dtype=E4M3, device=k_nope.device) for s in shapes)
    assert out is not None
    given = {"k_nope": k_nope, "q": q, "k_pe": k_pe, "kv_c": kv_c_normed, "v": v, "cache": kv_cache}
    inverse = {"q_scale": q_scale_inv, "k_scale": k_scale_inv, "v_scale": v_scale_inv, "cache_scale": cache_scale_inv}
    results = _results(("q_out", "k_out", "v_out"), out)
    given["slots"] = slot_mapping
    _launch("prefill", "fp8", given, results, inverse, positions, cos_sin_cache, debug)
    return out


@_tensors_only
def fused_mla_decode_q_concat_kv_cache_insert(
    ql_nope: Tensor,  # [B, H, 512], any token and head stride
    q_pe: Tensor,  # [B, H, 64]
    kv_c_normed: Tensor,  # [B, 512]
    k_pe: Tensor,  # [B, 64]
    kv_cache: Tensor,  # 16-bit or e4m3 [pages, page_size, 576], or uint8 [pages, page_size, 656]
    slot_mapping: Tensor,  # int64 [>= B]
    *,
    ds_mla: bool = False,
    q_scale_inv: Tensor | None = None,  # float32 [1]: both for an fp8 cache, else neither
    cache_scale_inv: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    out: Tensor | None = None,
    debug: bool = False,
) -> Tensor:
    """Decode, between absorption and the attention core. Returns mqa_q [B, H, 576] = [ql_nope, q_pe]: e4m3 for an fp8
    cache, else 16-bit. The cache's dtype and `ds_mla` choose the format."""
    kind = "fp8_ds_mla" if ds_mla else "fp8" if kv_cache.dtype == E4M3 else "plain"
    inverse = {n: t for n, t in (("q_scale", q_scale_inv), ("cache_scale", cache_scale_inv)) if t is not None}
    if len(inverse) != (2 if kind == "fp8" else 0):
        raise ConfigError(
            "q_scale_inv and cache_scale_inv: both for an fp8 cache, neither for another; the cache is "
            f"{kv_cache.dtype} with ds_mla={ds_mla}, given: {', '.join(inverse) or 'neither'}"
        )
    if out is None:
        dtype = E4M3 if kind == "fp8" else ql_nope.dtype
        out = torch.empty((*ql_nope.shape[:2], ENTRY), dtype=dtype, device=ql_nope.device)
    given = {"ql_nope": ql_nope, "q_pe": q_pe, "k_pe": k_pe, "kv_c": kv_c_normed, "cache": kv_cache}
    given["slots"] = slot_mapping
    _launch("decode", kind, given, {"out": out}, inverse, positions, cos_sin_cache, debug)
    return out


@_tensors_only
def context_pack(k_nope: Tensor, k_pe: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Chunked-context prefill: k [T, H, 192] = [k_nope [T, H, 128], k_pe [T, 64] on every head]. Never rotated."""
    if out is None:
        out = torch.empty((*k_nope.shape[:2], QK), dtype=k_nope.dtype, device=k_nope.device)
    _launch("context", "plain", {"k_nope": k_nope, "k_pe": k_pe}, {"k_out": out}, {}, None, None, False)
    return out


@_tensors_only
def context_pack_fp8(
    k_nope: Tensor, v: Tensor, k_pe: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """As `context_pack`, with k [T, H, 192] and v [T, H, 128] as e4m3 by an unscaled saturating cast (NaN: 0x7F). A
    k_pe that is e4m3 already is copied."""
    if out is None:
        shapes = ((*k_nope.shape[:2], n) for n in (QK, V))
        out = tuple(torch.empty(s, dtype=E4M3, device=k_nope.device) for s in shapes)
    assert out is not None
    results = _results(("k_out", "v_out"), out)
    _launch("context", "fp8", {"k_nope": k_nope, "v": v, "k_pe": k_pe}, results, {}, None, None, False)
    return out


def _results(names: tuple[str, ...], out: tuple[Tensor, ...]) -> dict[str, Tensor]:
    if not isinstance(out, tuple) or len(out) != len(names):
        what = f"{len(out)} tensors" if isinstance(out, tuple) else type(out).__name__
        raise ConfigError(f"out is {what}, must be a tuple of {len(names)}")
    return dict(zip(names, out, strict=True))


# ---- launch -----------------------------------------------------------------------------------------------------


def _key(op: str, kind: str, given: dict[str, Tensor], rope: bool) -> EpilogueKey:
    """The key of a call; its heads and dtype are those of the first tensor. Raises ConfigError."""
    name, lead = next(iter(given.items()))
    if lead.dim() != 3 or not 1 <= lead.shape[1] <= MAX_HEADS:
        raise ConfigError(f"{name} has shape {tuple(lead.shape)}, must be (tokens, heads from 1 to {MAX_HEADS}, *)")
    if lead.dtype not in _DTYPES:
        raise ConfigError(f"{name} is {lead.dtype}, must be torch.bfloat16 or torch.float16")
    pe_fp8 = op == "context" and kind == "fp8" and given["k_pe"].dtype == E4M3
    return EpilogueKey(op, kind, _DTYPES[lead.dtype], lead.shape[1], rope, pe_fp8)


class _Plan:
    """A launch for one layout of arguments and any number of tokens."""

    def __init__(self, key: EpilogueKey, launch: cuda.LaunchPlan, names: Iterable[str]) -> None:
        self.key = key
        self._launch = launch
        self._lock = threading.Lock()
        self._tokens = -1
        self._addresses = [(launch.slot(p.name), p.name) for p in key.params if p.kind == "ptr"]
        # What of an argument its layout does not say, by what it must be.
        lists, tables = ("slots", "positions"), ("cache", "cos_sin")
        self._scales = [n for n in names if n.endswith("_scale")]
        self._lists = [n for n in names if n in lists]
        self._tables = [n for n in names if n in tables]
        self._rows = [n for n in names if n not in (*self._scales, *lists, *tables)]

    def fits(self, tensors: dict[str, Tensor], device: torch.device, tokens: int) -> bool:
        """Whether tensors of the plan's layout are right in sizes, devices and alignment too."""
        bits = 0
        for name in self._rows:
            t = tensors[name]
            if t.shape[0] != tokens:
                return False
            bits |= t.data_ptr()
        for name in self._tables:
            bits |= tensors[name].data_ptr()
        return (
            bits & 15 == 0
            and all(tensors[n].shape[0] >= tokens for n in self._lists)
            and all(tensors[n].numel() == 1 for n in self._scales)
            and all(t.device == device for t in tensors.values())
        )

    def launch(self, tensors: dict[str, Tensor], tokens: int, stream: int) -> None:
        """Launches for these tensors. One thread at a time."""
        with self._lock:
            for slot, name in self._addresses:
                slot.value = tensors[name].data_ptr()
            if tokens != self._tokens:
                self._launch.set("tokens", tokens)
                self._launch.set("per_thread", share(self.key, tokens))
                self._launch.set_grid(geometry(self.key, tokens=tokens).grid)
                self._tokens = tokens
            self._launch.launch(stream)


_plans: dict[Any, _Plan] = {}
_functions: dict[tuple[EpilogueKey, int], cuda.Function] = {}
_lock = threading.RLock()
_cache: Any = None
_device_type = "cuda"


def prepare_epilogues(keys: Iterable[EpilogueKey], device: Any = None, *, cache: Any = None) -> None:
    """Builds or fetches and loads `keys` (of `epilogue_keys`) for `device`, so that their calls may be captured.

    cache: the CompileCache that kernels come from, these and later ones; by default the user's. Raises what its
    `get_or_build` does, CacheMiss where it is sealed; CaptureError inside a capture, unless all are there already.
    """
    global _cache
    where, keys = torch_device("cuda" if device is None else device), list(keys)
    bad = [f"keys has {key!r}, must be EpilogueKeys" for key in keys if not isinstance(key, EpilogueKey)]
    if where is None or where.type != "cuda":
        bad.append(f"device={device!r} must be a CUDA device")
    bad += kernel_cache_problems(cache)
    require("prepare_epilogues", bad)
    if cache is not None:
        with _lock:
            _cache = cache
    assert where is not None
    index = torch.cuda.current_device() if where.index is None else where.index
    for key in keys:
        _function(key, index, _stream(index))


def _function(key: EpilogueKey, device: int, stream: int) -> cuda.Function:
    """The loaded kernel. Raises CaptureError where that would compile or load inside a capture."""
    with _lock:
        found = _functions.get((key, device))
        if found is not None:
            return found
        driver = cuda.driver()
        if driver.is_capturing(stream):
            raise CaptureError(f"{key} is not loaded: call prepare_epilogues([key]) before the capture")
        here = read(device, driver)
        target = here.target
        if target is None:
            served = ", ".join(f"{t.name} ({t.capability[0]}.{t.capability[1]})" for t in TARGETS.values())
            raise ConfigError(
                f"device {device} ({here.name}) has compute capability {here.capability}, served: {served}"
            )
        reasons = supports(key, target)
        if reasons:
            raise ConfigError.of("epilogue", reasons)
        entry = _the_cache().get_or_build(compile_key(key, target), build)
        found = cuda.Module.load(driver, entry.payload).function(device)
        _functions[key, device] = found
        return found


def _the_cache() -> Any:
    global _cache
    if _cache is None:
        from k3dsl.cache import CompileCache

        _cache = CompileCache()
    return _cache


def _layout(name: str, t: Tensor) -> tuple[Any, ...]:
    """What of a tensor a plan depends on: all but its address and how many tokens (or rows of a table) it has."""
    return name, t.shape if name == "cache" else t.shape[1:], t.stride(), t.dtype


def _launch(
    op: str,
    kind: str,
    given: dict[str, Tensor],
    results: dict[str, Tensor],
    inverse: dict[str, Tensor],
    positions: Tensor | None,
    cos_sin: Tensor | None,
    debug: bool,
) -> None:
    """Checks, then launches on the current stream of the tensors' device."""
    if (positions is None) != (cos_sin is None):
        raise ConfigError("positions and cos_sin_cache are given together or not at all")
    given = {**given, **inverse}
    if positions is not None and cos_sin is not None:
        given |= {"positions": positions, "cos_sin": cos_sin}
    lead = next(iter(given.values()))
    tokens = lead.shape[0] if lead.dim() else 0
    everything = {**given, **results}
    device = lead.device
    layout = (op, kind, tokens > 1, device, *[_layout(n, t) for n, t in everything.items()])
    plan = _plans.get(layout)
    if plan is None or not plan.fits(everything, device, tokens):
        key = _key(op, kind, given, positions is not None)
        bad = check(key, given, results, tokens)
        if device.type != _device_type:
            bad.insert(0, f"{next(iter(given))} is on {device}, must be on a CUDA device")
        if bad:
            raise ConfigError.of(f"fused MLA epilogue ({op}, {kind})", bad)
    if tokens == 0:
        return
    index = device.index or 0
    stream = _stream(index)
    if debug and op != "context":
        if cuda.driver().is_capturing(stream):
            raise CaptureError("debug=True reads the slots back, which a capture cannot hold")
        check_values(given, tokens)
    if plan is None:
        plan = _make_plan(key, everything, tokens, index, stream)
        with _lock:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[layout] = plan
    with _on(index):
        plan.launch(everything, tokens, stream)


def _make_plan(key: EpilogueKey, everything: dict[str, Tensor], tokens: int, device: int, stream: int) -> _Plan:
    launch = geometry(key, tokens=tokens)
    function = _function(key, device, stream)
    plan = cuda.LaunchPlan(function, launch, key.params, **arguments(key, everything, tokens))
    return _Plan(key, plan, list(everything))


def arguments(key: EpilogueKey, tensors: dict[str, Tensor], tokens: int) -> dict[str, int]:
    """Values of the kernel's parameters for checked tensors, by the names of `key.params`."""
    values = {"tokens": tokens, "per_thread": share(key, tokens)}
    for name, t in tensors.items():
        values[name] = t.data_ptr()
        for axis, suffix in ((0, "t"), (1, "h")):
            if t.dim() > axis + 1:
                # The stride of an axis of one is only ever multiplied by 0.
                values[f"{name}_{suffix}"] = t.stride(axis) * t.element_size() if t.shape[axis] > 1 else 0
    if key.op != "context":
        cache = tensors["cache"]
        values["page_stride"] = cache.stride(0) * cache.element_size()
        values["row_stride"] = cache.stride(1) * cache.element_size()
        values["block_size"] = cache.shape[1]
        mul, values["block_shift"] = division(cache.shape[1])
        values["block_mul"] = mul - (mul >> 31 << 32)  # the same bits as a signed int
    return {p.name: values[p.name] for p in key.params}


def _on(device: int) -> AbstractContextManager[Any]:
    """`device` as the current one: a default stream belongs to whichever is."""
    return _HERE if torch.cuda.current_device() == device else torch.cuda.device(device)


def _stream(device: int) -> int:
    """The handle of torch's current stream. The raw accessor takes 0.14 us, the public one 7."""
    return int(torch._C._cuda_getCurrentRawStream(device))
