"""Cases as data, for the oracle here and for the kernels on a GPU, and the inputs that belong to them.

Everything is drawn on the CPU from a seed and then moved, so that a case is the same on every device. What must not be
read is poisoned: NaN in every cache slot that no length covers, a huge page id in every unused block-table entry.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from k3dsl import reference as ref
from k3dsl.dims import KV_BYTES, MlaDims

FORMATS = tuple(KV_BYTES)
#: (bytes or elements) of an entry's last axis in each format.
WIDTH = {"bf16": 576, "fp8": 576, "fp8_ds_mla": 656}
#: What unused block-table entries hold: no pool has so many pages, and 64 * 576 * HUGE_PAGE passes 2^32.
HUGE_PAGE = 1 << 30
#: Rows around every schedule boundary of the query kernel and around tiles of 16 and 32 rows.
QUERY_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64)
HEADS = (6, 12)
#: (size, interleave) of context-parallel groups.
DCP = tuple((d, i) for d in (2, 8) for i in (1, 16, 64))


@dataclass(frozen=True)
class CoreCase:
    """Requests of one call of the core."""

    lengths: tuple[int, ...]
    q: int = 1
    heads: int = 12
    page: int = 64
    kv_format: str = "fp8"
    spare_columns: int = 0  # block-table columns beyond the longest request
    table_slice: bool = False  # the table is a slice of a wider one: row stride > width
    page_gap: int = 0  # tokens between one page's end and the next page's start
    low: bool = False  # every logit near -6e4
    spike: float = 1.0  # factor of the query: sharper softmax
    name: str = ""

    @property
    def id(self) -> str:
        shape = f"{self.kv_format}-h{self.heads}-q{self.q}-p{self.page}"
        return f"{shape}-{self.name or 'x'.join(map(str, self.lengths))}"

    def of(self, kv_format: str) -> "CoreCase":
        return replace(self, kv_format=kv_format)


#: Lengths at which something changes: none, one key, a page, a tile, two and three tiles, thousands.
EDGE_LENGTHS = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193)

#: Each case is here for one way in which cores go wrong; the grid of formats, heads and pages is not repeated for each.
CORE_CASES = (
    *(CoreCase(EDGE_LENGTHS, page=page, name="edges") for page in (32, 64, 128)),
    *(CoreCase((1, 5, 64, 130, 777), q=q, name="causal") for q in (2, 3, 4, 5, 8)),
    *(CoreCase((64, 65, 300), q=q, heads=heads, name="heads") for heads in (6, 96) for q in (1, 4)),
    CoreCase((0, 0, 0), name="all_empty"),
    CoreCase((0,), q=4, name="one_empty"),
    CoreCase((700, 0, 3, 0), q=4, name="empty_between"),
    CoreCase((1, 2, 3), q=4, name="q_above_length"),
    CoreCase((4500,), name="long"),
    CoreCase((4097, 1, 2048), q=4, name="uneven"),
    CoreCase((100, 64, 129), spare_columns=5, name="wide_table"),
    CoreCase((100, 64, 129), spare_columns=3, table_slice=True, name="sliced_table"),
    CoreCase((100, 64, 129), page_gap=64, name="page_gap"),
    CoreCase((3, 64, 1000), low=True, name="low_logits"),
    CoreCase((65, 1000), spike=12.0, name="sharp"),
    CoreCase((65, 1000), q=4, spike=12.0, name="sharp_wide"),
)


@dataclass
class CoreInputs:
    """Tensors of a case. `keys`: per request the entries as they were before their format, bf16 [length, 576]."""

    query: Tensor  # [B, H, 576] e4m3 for fp8, else bf16
    cache: Tensor  # [pages, page, width]
    block_table: Tensor  # int32 [R, width]
    lengths: Tensor  # int32 [R]
    q: int
    scale: float
    out_scale: float
    kv_format: str
    keys: list[Tensor] = field(default_factory=list)
    spike: float = 1.0  # of the case

    def call(self, function=ref.core, **changes):
        """`function` (core, core64 or one of that signature) on these inputs."""
        named = {k: getattr(self, k) for k in ("scale", "out_scale", "kv_format")}
        positional = [changes.pop(k, getattr(self, k)) for k in ("query", "cache", "block_table", "lengths", "q")]
        return function(*positional, **{**named, **changes})


def empty_cache(pages: int, page: int, kv_format: str, *, gap: int = 0, poison: bool = True) -> Tensor:
    """A cache of NaN in every element of every format (bytes 0xff), or of zeros; pages `gap` tokens apart."""
    width = WIDTH[kv_format] * (2 if kv_format == "bf16" else 1)
    flat = torch.full((pages, page + gap, width), 0xFF if poison else 0, dtype=torch.uint8)
    return (flat.view(torch.bfloat16) if kv_format == "bf16" else flat)[:, :page]


def page_table(lengths: tuple[int, ...], page: int, generator: torch.Generator, spare: int = 0, poison: bool = True):
    """(block table int32 [R, widest + spare], pages of the pool). Pages are shuffled; page 0 belongs to nobody."""
    counts = [-(-length // page) for length in lengths]
    pages = sum(counts) + 3
    shuffled = (torch.randperm(pages - 1, generator=generator) + 1).tolist()
    table = torch.full((len(lengths), max(1, *counts) + spare), HUGE_PAGE if poison else 0, dtype=torch.int32)
    for r, count in enumerate(counts):
        table[r, :count] = torch.tensor([shuffled.pop() for _ in range(count)], dtype=torch.int32)
    return table, pages


def slots_of(block_table: Tensor, request: int, positions: Tensor, page: int) -> Tensor:
    """int64 slots of `positions` of a request."""
    return block_table[request].to(torch.int64)[positions // page] * page + positions % page


def core_inputs(case: CoreCase, *, device: str = "cpu", seed: int = 0, poison: bool = True) -> CoreInputs:
    """Inputs of a case. poison=False: the same live data, zeros everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    table, pages = page_table(case.lengths, case.page, generator, case.spare_columns, poison)
    if case.table_slice:
        table = torch.cat([table, torch.full_like(table, HUGE_PAGE if poison else 0)], dim=1)[:, : table.shape[1]]
    # As if this cache had a scale of 0.5: what the core returns shows whether it applies its output scale.
    fp8 = case.kv_format == "fp8"
    k_scale, q_scale = (0.5, 0.25) if fp8 else (1.0, 1.0)
    cache = empty_cache(pages, case.page, case.kv_format, gap=case.page_gap, poison=poison)
    keys = []
    for r, length in enumerate(case.lengths):
        key = torch.randn(length, 576, generator=generator).bfloat16()
        if case.low:
            key[:, 512:] = 32.0 * k_scale
        keys.append(key)
        slots = slots_of(table, r, torch.arange(length), case.page)
        ref.write_entries(cache, slots, key[:, :512], key[:, 512:], case.kv_format, 1.0 / k_scale)
    rows = len(case.lengths) * case.q
    query = torch.randn(rows, case.heads, 576, generator=generator) * 0.5 * case.spike
    if case.low:
        # 64 rope products of -416 * 32 in the units of the formats: -851968, exact in every partial sum of the 64.
        query[..., 512:] = -416.0 * q_scale
    query = ref.f8(query / q_scale) if fp8 else query.bfloat16()
    return CoreInputs(
        query=query.to(device),
        cache=_to(cache, device),
        block_table=_to(table, device),
        lengths=torch.tensor(case.lengths, dtype=torch.int32, device=device),
        q=case.q,
        # -851968 * 192^-0.5 is -6.1e4; with q_scale * k_scale it would be eight times less.
        scale=MlaDims().scale * (1.0 if case.low else q_scale * k_scale),
        out_scale=k_scale,
        kv_format=case.kv_format,
        keys=[key.to(device) for key in keys],
        spike=case.spike,
    )


@dataclass
class LayerInputs:
    """One step of one layer: a cache holding each request's past, and the rows of its new tokens."""

    projected: Tensor  # bf16 [B, pitch]
    cache: Tensor
    slots: Tensor  # int64 [B]; -1 for rows of empty requests
    block_table: Tensor
    lengths: Tensor  # int32 [R], new tokens included
    q: int
    kv_format: str


def layer_inputs(
    dims: MlaDims,
    lengths: tuple[int, ...],
    *,
    q: int = 1,
    page: int = 64,
    kv_format: str = "fp8",
    k_scale: float = 1.0,
    device: str = "cpu",
    seed: int = 0,
) -> LayerInputs:
    """Poisoned inputs of a layer. Rows of empty requests (length 0) are NaN throughout, as padding may be."""
    generator = torch.Generator().manual_seed(seed)
    table, pages = page_table(lengths, page, generator)
    cache = empty_cache(pages, page, kv_format)
    projected = torch.randn(len(lengths) * q, dims.pitch, generator=generator).bfloat16()
    slots = torch.full((len(lengths) * q,), -1, dtype=torch.int64)
    for r, length in enumerate(lengths):
        if length == 0:
            projected[r * q : (r + 1) * q] = torch.nan
            continue
        past = max(length - q, 0)
        latent, rope = (torch.randn(past, n, generator=generator).bfloat16() for n in (512, 64))
        old = slots_of(table, r, torch.arange(past), page)
        ref.write_entries(cache, old, latent, rope, kv_format, 1.0 / k_scale)
        new = torch.arange(length - q, length)
        live = new >= 0
        slots[r * q : (r + 1) * q][live] = slots_of(table, r, new[live], page)
    return LayerInputs(
        projected=projected.to(device),
        cache=_to(cache, device),
        slots=slots.to(device),
        block_table=table.to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        q=q,
        kv_format=kv_format,
    )


def _to(tensor: Tensor, device: str) -> Tensor:
    """`tensor` on `device` with its strides: `.to` makes gaps disappear."""
    if str(device) == "cpu":
        return tensor
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset()).to(device)
    return flat.as_strided(tensor.shape, tensor.stride())


def fp8_steps(a: Tensor, b: Tensor) -> Tensor:
    """How many representable e4m3 values lie between a and b, elementwise (int32); 256 where just one is NaN.

    a, b: e4m3, or their bytes. +0 and -0 are the same value.
    """
    return _steps(
        a.contiguous().view(torch.int8).to(torch.int32), b.contiguous().view(torch.int8).to(torch.int32), 0x7F, 0x7F
    )


def bf16_steps(a: Tensor, b: Tensor) -> Tensor:
    """How many representable bf16 values lie between a and b, elementwise (int32); 65536 where just one is NaN."""
    wide = [x.contiguous().view(torch.int16).to(torch.int32) for x in (a, b)]
    return _steps(*wide, 0x7FFF, 0x7F81)


def _steps(a: Tensor, b: Tensor, magnitude: int, nan_from: int) -> Tensor:
    size = [x & magnitude for x in (a, b)]
    order = [torch.where(x < 0, -m, m) for x, m in zip((a, b), size, strict=True)]
    nan = [m >= nan_from for m in size]
    steps = (order[0] - order[1]).abs()
    steps = torch.where(nan[0] & nan[1], torch.zeros_like(steps), steps)
    return torch.where(nan[0] ^ nan[1], torch.full_like(steps, 2 * (magnitude + 1)), steps)
