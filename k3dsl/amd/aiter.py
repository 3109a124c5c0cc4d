"""Decode attention of AMD's aiter package behind k3dsl's interface, and the facts about aiter that this rests on.

aiter is looked up at run time, never imported by k3dsl itself. Its decode is `aiter.mla.mla_decode_fwd`: queries
[B, H, 576] of e4m3 or bf16, a cache [pages, page, 1, 576], pages listed request by request (kv_indptr, kv_indices,
kv_last_page_lens), and the work list of its persistent kernel, made for a step by `get_mla_metadata_v1`. Pages have a
power of two of tokens; with context parallelism they have one token, placed round robin. Its LSE is a natural log.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl.errors import ConfigError, ToolchainError

LATENT: Final = 512
#: Heads that the decode takes on gfx950 with fp8 queries and cache: natively, or folded into groups of 16.
HEADS: Final = (16, 32, 48, 64, 80, 96, 112, 128)
#: aiter's commit whose source the facts below were read from, and the files.
SEEN_COMMIT: Final = "e4048607a535ace3a2b51ded31b1c8c2d45c0879"
#: Function -> (file, parameters that k3dsl passes, in the order in which the file declares them).
CONTRACT: Final = {
    "mla_decode_fwd": (
        "aiter/mla.py",
        (
            "q",
            "kv_buffer",
            "o",
            "qo_indptr",
            "kv_indptr",
            "kv_indices",
            "kv_last_page_lens",
            "max_seqlen_q",
            "page_size",
            "nhead_kv",
            "sm_scale",
            "work_meta_data",
            "work_indptr",
            "work_info_set",
            "reduce_indptr",
            "reduce_final_map",
            "reduce_partial_map",
            "q_scale",
            "kv_scale",
            "return_lse",
            "g_kv_indptr",
            "cp_world_size",
            "cp_rank",
        ),
    ),
    "get_mla_metadata_v1": (
        "aiter/ops/attention.py",
        (
            "seqlens_qo_indptr",
            "seqlens_kv_indptr",
            "kv_last_page_lens",
            "num_heads_per_head_k",
            "num_heads_k",
            "is_causal",
            "work_metadata_ptrs",
            "work_info_set",
            "work_indptr",
            "reduce_indptr",
            "reduce_final_map",
            "reduce_partial_map",
            "page_size",
            "kv_granularity",
            "max_seqlen_qo",
            "uni_seqlen_qo",
            "fast_mode",
            "is_cp_round_robin",
            "dtype_q_nope",
            "dtype_kv_nope",
        ),
    ),
    "get_mla_metadata_info_v1": (
        "aiter/ops/attention.py",
        ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse", "fast_mode"),
    ),
}
#: What get_mla_metadata_info_v1 sizes, in the order of its result.
_WORK: Final = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


def present() -> bool:
    """Whether aiter can be imported. Does not import it: aiter compiles and asks for a GPU when it is."""
    return importlib.util.find_spec("aiter") is not None


def signature_problems(name: str, parameters: "tuple[str, ...]") -> "list[str]":
    """What of `CONTRACT[name]` a function with these parameters lacks."""
    _, wanted = CONTRACT[name]
    missing = [p for p in wanted if p not in parameters]
    bad = [f"aiter's {name} has no parameter {p!r}" for p in missing]
    order = [parameters.index(p) for p in wanted if p in parameters]
    if order != sorted(order):
        bad.append(f"aiter's {name} has its parameters in another order: {', '.join(parameters)}")
    return bad


@dataclass
class _Shape:
    """Buffers of one (rows, q): aiter's work list and the lists of pages, at fixed addresses."""

    requests: int
    heads: int  # that aiter is given: padded
    qo_indptr: Tensor  # int32 [R + 1]
    kv_indptr: Tensor  # int32 [R + 1]
    kv_indices: Tensor  # int32 [R * units]
    last_page: Tensor  # int32 [R]
    totals_indptr: Tensor  # int32 [R + 1]: of the whole context
    empty: Tensor  # bool [B]
    work: "dict[str, Tensor]"
    query: Tensor | None  # where padding is needed
    out: Tensor | None
    units: Tensor  # int64 [R]: pages of each request
    place: Tensor  # int64 [R, units]
    source: Tensor  # int32 [R, units]
    column: Tensor  # int64 [units]


class AiterDecode:
    """`Decode` on aiter. Everything that depends on lengths or tables is computed on the device by `plan`, so that a
    captured step replays with other ones.

    scale         softmax scale
    width         columns of the widest block table
    ranks, rank   context parallelism, keys round robin
    functions     aiter's functions, for tests; by default those of the installed package

    Raises ToolchainError where aiter is missing or of another interface.
    """

    name = "aiter"

    def __init__(self, scale: float, width: int, ranks: int = 1, rank: int = 0, functions: Any = None) -> None:
        self._scale, self._width, self._ranks, self._rank = scale, width, ranks, rank
        self._aiter = functions if functions is not None else _functions()
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._unit = 0
        self._one: Tensor | None = None

    def problems(self, cache: Tensor) -> "list[str]":
        """What about a one-byte cache [blocks, page, 576] keeps aiter from reading it."""
        _, page, entry = cache.shape
        bad = []
        if page > 1 and cache.stride(1) != entry:
            bad.append(
                f"kv_cache has a slot stride of {cache.stride(1)} bytes, must be {entry}: aiter reads dense pages"
            )
        if self._unit_of(page) == 1 and page > 1 and cache.shape[0] > 1 and cache.stride(0) != page * entry:
            why = "context parallelism" if self._ranks > 1 else f"a page of {page} tokens"
            bad.append(f"kv_cache has a block stride of {cache.stride(0)} bytes, must be {page * entry} for {why}: "
                       "aiter is then given single tokens")  # fmt: skip
        return bad

    def warm(self, cache: Tensor, shapes: "tuple[tuple[int, int], ...]", heads: int) -> None:
        """Allocates the buffers of each (rows, q) and runs each once over block 0, which compiles aiter's modules."""
        device, page = cache.device, cache.shape[1]
        unit = self._unit_of(page)
        if self._unit not in (0, unit):
            raise ConfigError(f"this decode was made for pages of {self._unit} tokens, not {unit}")
        self._unit = unit
        self._one = torch.ones(1, dtype=torch.float32, device=device)
        # Another layer of the rank may have come first: its buffers are in use and stay.
        missing = [shape for shape in shapes if shape not in self._shapes]
        for rows, q in missing:
            self._shapes[(rows, q)] = self._shape(rows, q, heads, page, device)
            table = torch.zeros(rows // q, 1, dtype=torch.int32, device=device)
            lengths = torch.full((rows // q,), min(q, page), dtype=torch.int32, device=device)
            query = torch.zeros(rows, heads, cache.shape[2], dtype=torch.uint8, device=device)
            out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=device)
            lse = torch.empty(rows, heads, dtype=torch.float32, device=device) if self._ranks > 1 else None
            self.plan(cache, table, lengths, lengths * self._ranks, rows, q)
            self.run(query, cache, table, lengths, lengths * self._ranks, q, out, lse)

    def plan(
        self,
        cache: Tensor,
        block_table: Tensor,  # int32 [R, width]
        lengths: Tensor,  # int32 [R]
        totals: Tensor | None,  # int32 [R]; needed with ranks
        rows: int,
        q: int,
    ) -> None:
        """The lists and the work of a step, on the current stream. Layers of one step may share it."""
        shape = self._shapes[(rows, q)]
        if self._ranks > 1 and totals is None:
            raise ConfigError("totals is needed with context-parallel ranks: lengths are one rank's")
        keys = lengths[: shape.requests].clamp(min=0)
        self._list(shape, block_table[: shape.requests], keys, cache.shape[1])
        whole = keys if totals is None else totals[: shape.requests].clamp(min=0)
        torch.cumsum(whole, 0, out=shape.totals_indptr[1:])
        shape.empty.view(-1, q).copy_((keys <= 0)[:, None].expand(-1, q))
        work = shape.work
        self._aiter.get_mla_metadata_v1(
            shape.qo_indptr,
            shape.kv_indptr,
            shape.last_page,
            shape.heads,
            1,
            self._ranks == 1,  # round robin: causality is not the metadata's business, see aiter's own test of it
            *(work[name] for name in ("work_metadata_ptrs", "work_info_set", "work_indptr")),
            *(work[name] for name in ("reduce_indptr", "reduce_final_map", "reduce_partial_map")),
            page_size=self._unit,
            kv_granularity=max(self._unit, 32 if shape.heads == 64 else 16),
            max_seqlen_qo=q,
            uni_seqlen_qo=q,
            fast_mode=True,
            is_cp_round_robin=self._ranks > 1,
            dtype_q_nope=torch.float8_e4m3fn,
            dtype_kv_nope=torch.float8_e4m3fn,
        )

    def run(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        totals: Tensor | None,
        q: int,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See `Decode.run`; tables and lengths are those of the last `plan`."""
        rows, heads = query.shape[:2]
        shape = self._shapes[(rows, q)]
        e4m3 = torch.float8_e4m3fn
        given, target = query.view(e4m3), out
        if shape.query is not None and shape.out is not None:
            # Padding heads repeat the first ones; what they give is dropped.
            shape.query[:, :heads].copy_(query.view(torch.uint8))
            shape.query[:, heads:].copy_(query.view(torch.uint8)[:, : shape.heads - heads])
            given, target = shape.query.view(e4m3), shape.out
        blocks, page, entry = cache.shape
        pages = cache.view(e4m3)
        pages = pages.unsqueeze(2) if self._unit == page else pages.reshape(blocks * page, 1, 1, entry)
        parallel = {}
        if self._ranks > 1:
            parallel = {"g_kv_indptr": shape.totals_indptr, "cp_world_size": self._ranks, "cp_rank": self._rank}
        work = {("work_meta_data" if name == _WORK[0] else name): buffer for name, buffer in shape.work.items()}
        _, natural = self._aiter.mla_decode_fwd(
            given,
            pages,
            target,
            shape.qo_indptr,
            shape.kv_indptr,
            shape.kv_indices,
            shape.last_page,
            q,
            page_size=self._unit,
            nhead_kv=1,
            sm_scale=self._scale,
            q_scale=self._one,
            kv_scale=self._one,
            return_lse=lse is not None,
            **work,
            **parallel,
        )
        if target is not out:
            out.copy_(target[:, :heads])
        if lse is not None:
            torch.mul(natural.view(rows, -1)[:, :heads], 1 / math.log(2), out=lse)
            lse.masked_fill_(shape.empty[:, None], -torch.inf)

    def _unit_of(self, page: int) -> int:
        """Tokens of what aiter is told is a page."""
        return page if self._ranks == 1 and page & (page - 1) == 0 else 1

    def _shape(self, rows: int, q: int, heads: int, page: int, device: torch.device) -> _Shape:
        requests, padded = rows // q, _padded(heads)
        e4m3 = torch.float8_e4m3fn
        sizes = self._aiter.get_mla_metadata_info_v1(requests, q, padded, e4m3, e4m3, is_sparse=False, fast_mode=True)
        units = self._width * page // self._unit

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        more = padded > heads
        return _Shape(
            requests=requests,
            heads=padded,
            qo_indptr=torch.arange(0, rows + 1, q, dtype=torch.int32, device=device),
            kv_indptr=ints(requests + 1),
            kv_indices=ints(requests * units),
            last_page=ints(requests),
            totals_indptr=ints(requests + 1),
            empty=ints(rows, dtype=torch.bool),
            work={
                name: torch.zeros(size, dtype=dtype, device=device)
                for name, (size, dtype) in zip(_WORK, sizes, strict=True)
            },
            query=ints(rows, padded, 576, dtype=torch.uint8) if more else None,
            out=torch.zeros(rows, padded, LATENT, dtype=torch.bfloat16, device=device) if more else None,
            units=ints(requests, dtype=torch.int64),
            place=ints(requests, units, dtype=torch.int64),
            source=ints(requests, units),
            column=torch.arange(units, dtype=torch.int64, device=device),
        )

    def _list(self, shape: _Shape, block_table: Tensor, keys: Tensor, page: int) -> None:
        """kv_indptr, kv_indices and last_page from a block table: one request's pages after the other's."""
        unit, inside = self._unit, page // self._unit
        shape.units.copy_((keys + (unit - 1)) // unit)
        torch.cumsum(shape.units, 0, out=shape.kv_indptr[1:])
        shape.last_page.copy_(torch.where(keys > 0, (keys - 1) % unit + 1, 0))
        columns = min(block_table.shape[1], self._width)
        source, place = (t[:, : columns * inside] for t in (shape.source, shape.place))
        column = shape.column[: columns * inside]
        source.unflatten(1, (columns, inside)).copy_(
            block_table[:, :columns, None] * inside + shape.column[:inside].to(torch.int32)
        )
        # Columns past a request's pages go to the very last place, which is free while there is any such column.
        place.copy_(shape.kv_indptr[:-1, None] + column)
        place.masked_fill_(column >= shape.units[:, None], shape.kv_indices.numel() - 1)
        shape.kv_indices.scatter_(0, place.flatten(), source.flatten())


def _padded(heads: int) -> int:
    """The smallest number of heads that aiter takes and that holds `heads`."""
    for padded in HEADS:
        if heads <= padded <= 2 * heads:
            return padded
    raise ConfigError(f"heads={heads!r} fit none of aiter's {', '.join(map(str, HEADS))}")


def _functions() -> Any:
    """aiter's functions, their signatures checked. Raises ToolchainError."""
    import inspect
    from types import SimpleNamespace

    if not present():
        raise ToolchainError("the decode attention needs the package amd-aiter, which is not installed")
    import aiter
    from aiter.mla import mla_decode_fwd

    found = SimpleNamespace(
        mla_decode_fwd=mla_decode_fwd,
        get_mla_metadata_v1=aiter.get_mla_metadata_v1,
        get_mla_metadata_info_v1=aiter.get_mla_metadata_info_v1,
    )
    bad = [
        line
        for name in CONTRACT
        for line in signature_problems(name, tuple(inspect.signature(getattr(found, name)).parameters))
    ]
    if bad:
        raise ToolchainError("\n  - ".join([f"aiter is not the one of commit {SEEN_COMMIT[:12]}", *bad]))
    return found
