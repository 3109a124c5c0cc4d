"""What is wrong with the tensors of an epilogue call, as sentences. Metadata only, but for `check_values`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.nvidia.epilogue import ENTRY, LATENT, MAX_UNITS, NOPE, QK, RECORD, ROPE, EpilogueKey, V, scales, units

E4M3 = torch.float8_e4m3fn


class _Problems(list[str]):
    """What is wrong with the arguments of a call."""

    def tensor(self, name: str, t: Tensor, shape: Sequence[int | None], dtype: Any, *, align: int = 16) -> bool:
        """Shape (None: any size), dtype (or several) and alignment of the first element."""
        sizes, dtypes = tuple(t.shape), dtype if isinstance(dtype, tuple) else (dtype,)
        known = len(self)
        if len(sizes) != len(shape) or any(w is not None and s != w for s, w in zip(sizes, shape, strict=False)):
            want = ", ".join("*" if w is None else str(w) for w in shape)
            self.append(f"{name} has shape {sizes}, must be ({want})")
        if t.dtype not in dtypes:
            self.append(f"{name} is {t.dtype}, must be {' or '.join(map(str, dtypes))}")
        if t.data_ptr() % align:
            self.append(f"{name} starts at {t.data_ptr():#x}, must be {align}-byte aligned")
        return len(self) == known

    def rows(self, name: str, t: Tensor) -> None:
        """Last stride 1; every other stride keeps rows 16-byte aligned and fits 31 bits. An axis of one is free."""
        if t.stride(-1) != 1:
            self.append(f"{name} has strides {t.stride()}, the last must be 1")
        step = 16 // t.element_size()
        for axis in range(t.dim() - 1):
            stride = t.stride(axis)
            if t.shape[axis] > 1 and (stride % step or not 0 <= stride * t.element_size() < 2**31):
                self.append(f"{name} has strides {t.stride()}: {stride} must be a multiple of {step} below 2 GiB")

    def contiguous(self, name: str, t: Tensor) -> None:
        if not t.is_contiguous():
            self.append(f"{name} has strides {t.stride()}, must be contiguous")


def check(key: EpilogueKey, given: dict[str, Tensor], results: dict[str, Tensor], tokens: int) -> list[str]:
    """Problems of a call's tensors, empty if there are none."""
    bad, lead, heads = _Problems(), next(iter(given.values())), key.heads
    dtype = lead.dtype
    everything = {**given, **results}
    if tokens * units(key) > MAX_UNITS:
        bad.append(f"tokens={tokens}: at most {MAX_UNITS // units(key)} a call at {heads} heads")
    devices = {name: t.device for name, t in everything.items() if t.device != lead.device}
    if devices:
        bad.append(f"all tensors must be on {lead.device}: {', '.join(f'{n} is on {d}' for n, d in devices.items())}")
    for name, width in (("ql_nope", LATENT), ("q_pe", ROPE), ("k_nope", NOPE), ("q", QK), ("v", V)):
        if name in given and bad.tensor(name, given[name], (tokens, heads, width), dtype):
            bad.rows(name, given[name])
    pe = given["k_pe"]
    if bad.tensor("k_pe", pe, (tokens, ROPE), (dtype, E4M3) if (key.op, key.format) == ("context", "fp8") else dtype):
        bad.rows("k_pe", pe)
    for name, t in results.items():
        width = {"out": ENTRY, "v_out": V}.get(name, QK)
        if bad.tensor(name, t, (tokens, heads, width), E4M3 if key.format == "fp8" else dtype):
            bad.contiguous(name, t)
    if key.op == "prefill" and key.format != "fp8" and key.rope:
        q = given["q"]
        if any(n > 1 and s == 0 for n, s in zip(q.shape, q.stride(), strict=True)):
            bad.append(f"q has strides {q.stride()}: it is rotated in place, so no two elements may be one")
    if key.op == "context":
        return bad
    if bad.tensor("kv_c_normed", given["kv_c"], (tokens, LATENT), dtype):
        bad.contiguous("kv_c_normed", given["kv_c"])
    _check_cache(bad, key, given["cache"], dtype)
    integers = [("slot_mapping", given["slots"])] + ([("positions", given["positions"])] if key.rope else [])
    for name, t in integers:
        if bad.tensor(name, t, (None,), torch.int64, align=8):
            if t.shape[0] < tokens:
                bad.append(f"{name} has {t.shape[0]} entries, must have at least {tokens}")
            if t.shape[0] > 1 and t.stride(0) != 1:
                bad.append(f"{name} has stride {t.stride(0)}, must be contiguous")
    if key.rope and bad.tensor("cos_sin_cache", given["cos_sin"], (None, ROPE), torch.float32):
        bad.contiguous("cos_sin_cache", given["cos_sin"])
    for name in scales(key):
        t = given[name]
        if t.dtype != torch.float32 or t.numel() != 1:
            bad.append(f"{name}_inv is {t.dtype} of {t.numel()} elements, must be torch.float32 of one")
    return bad


def _check_cache(bad: _Problems, key: EpilogueKey, cache: Tensor, dtype: torch.dtype) -> None:
    want, width = {"plain": (dtype, ENTRY), "fp8": (E4M3, ENTRY), "fp8_ds_mla": (torch.uint8, RECORD)}[key.format]
    if not bad.tensor("kv_cache", cache, (None, None, width), want):
        return
    pages, page_size = cache.shape[:2]
    if pages < 1 or page_size < 1 or pages * page_size > 2**31:
        bad.append(f"kv_cache has {pages} pages of {page_size}: from 1 to 2**31 entries are served")
    step = 16 // cache.element_size()
    if cache.stride(2) != 1 or any(s % step or s < 0 for s in cache.stride()[:2]):
        bad.append(f"kv_cache has strides {cache.stride()}: the last must be 1, the others multiples of {step}")
    if cache.stride(1) * cache.element_size() >= 2**31:
        bad.append(f"kv_cache has strides {cache.stride()}: entries must lie less than 2 GiB apart")


def check_values(given: dict[str, Tensor], tokens: int) -> None:
    """The debug check: slots inside the cache and used once, positions inside the table."""
    bad = []
    pages, page_size = given["cache"].shape[:2]
    slots = given["slots"][:tokens]
    outside = slots[slots >= pages * page_size].tolist()
    if outside:
        bad.append(f"slots {outside[:8]} lie outside the cache of {pages} x {page_size} entries")
    if "positions" in given:
        positions, rows = given["positions"][:tokens], given["cos_sin"].shape[0]
        outside = positions[(positions < 0) | (positions >= rows)].tolist()
        if outside:
            bad.append(f"positions {outside[:8]} lie outside cos_sin_cache, which has {rows} rows")
    if bad:
        raise ConfigError.of("values", bad)
