"""A step of a context-parallel group, drawn for one device and dealt to D ranks. For tests and the bench.

Everything is drawn on the CPU from a seed and then moved: every process of a group makes the same step and takes its
part. What must not be read is poisoned: NaN in every cache slot that holds no position, a page beyond any pool in every
unused block-table entry, NaN in the rows of empty requests. The blocks of every rank lie in an order of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from k3dsl import reference as ref
from k3dsl.dims import MlaDims
from k3dsl.scenario import UNUSED_PAGE, poisoned
from k3dsl.weights import MlaWeights

INTERLEAVES: Final = (1, 16, 64)
K_SCALE: Final = 0.5
Q_SCALE: Final = 0.25
#: |ranks - one device| / |one device| of a row, for equal queries. The ranks round partials and their merge to bf16
#: where one device rounds a latent, and probabilities relative to another maximum; then both round the up-projection
#: and the output. The oracle's largest over D in {2, 4, 8}, all interleaves and q in {1, 4} is 4.5e-3, either being
#: within 3.7e-3 of float64.
MERGE_ERROR: Final = 6e-3


def edge_totals(dcp: int) -> tuple[int, ...]:
    """Requests of one step: one key, fewer than ranks, one a rank, an uneven few, thousands; none twice (padding)."""
    return (1, dcp - 1, dcp, 17, 4096 + 3, 0, 65, 0)


@dataclass(frozen=True)
class ParallelCase:
    """A step of D ranks with H heads each. totals: keys of each request on all ranks, this step's included."""

    dcp: int
    interleave: int = 1
    q: int = 1
    heads: int = 12
    totals: tuple[int, ...] = ()  # default: edge_totals(dcp)
    page: int = 64
    kv_format: str = "fp8"

    @property
    def requests(self) -> tuple[int, ...]:
        """`totals`, or what stands for them."""
        return self.totals or edge_totals(self.dcp)

    @property
    def rows(self) -> int:
        """B, the rows of the step."""
        return len(self.requests) * self.q

    @property
    def id(self) -> str:
        """A name for people."""
        kind = "" if self.kv_format == "fp8" else f"-{self.kv_format}"
        shape = f"d{self.dcp}-i{self.interleave}-q{self.q}-h{self.heads}{kind}"
        return shape + "".join(f"-{t}" for t in self.totals[:6])


@dataclass
class ParallelStep:
    """The step on one device that has all D * H heads, and what the ranks have of it."""

    case: ParallelCase
    attention: MlaWeights  # of all heads
    whole: ref.Shard  # one device's: its cache holds every request's past, its lengths are the totals
    shards: dict[int, ref.Shard]  # by rank

    @property
    def totals(self) -> Tensor:
        """int32 [R]: keys of the whole context."""
        return self.whole.lengths

    def expected(self) -> Tensor:
        """bf16 [B, D * H * 128]: the reference's layer on one device. Works on a copy of its cache."""
        x = self.whole
        cache = x.cache.clone()
        return ref.decode_layer(
            x.projected, self.attention, cache, x.slots, x.block_table, x.lengths, self.case.q, self.case.kv_format
        )

    def block(self, whole: Tensor, rank: int) -> Tensor:
        """The columns of `rank`'s heads out of an output of all heads."""
        width = whole.shape[1] // self.case.dcp
        return whole[:, rank * width : (rank + 1) * width]


@lru_cache(maxsize=4)
def weights(heads: int, seed: int = 0) -> MlaWeights:
    """Random weights of this many heads, on the CPU."""
    return MlaWeights.random(MlaDims(heads=heads), seed=seed, q_scale=Q_SCALE, k_scale=K_SCALE)


def table_of(counts: Sequence[int], generator: torch.Generator) -> tuple[Tensor, int]:
    """(block table int32 [R, widest + 1], pages of the pool) for requests of so many pages. Page 0 is nobody's."""
    pages = sum(counts) + 2
    order = (torch.randperm(pages - 1, generator=generator) + 1).tolist()
    table = torch.full((len(counts), max(1, *counts) + 1), UNUSED_PAGE, dtype=torch.int32)
    for r, count in enumerate(counts):
        table[r, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return table, pages


def deal(
    case: ParallelCase,
    *,
    device: "torch.device | str" = "cpu",
    seed: int = 0,
    ranks: Sequence[int] | None = None,
) -> ParallelStep:
    """The step of `case`: the same for the same seed on every device. ranks: whose parts to make, by default all."""
    every = weights(case.dcp * case.heads, seed).to(device)
    whole = _whole(case, seed, device)
    chosen = range(case.dcp) if ranks is None else ranks
    return ParallelStep(case, every, whole, {rank: _part(case, every, whole, rank, seed) for rank in chosen})


def _whole(case: ParallelCase, seed: int, device: "torch.device | str") -> ref.Shard:
    generator = torch.Generator().manual_seed(seed)
    dims = MlaDims(heads=case.dcp * case.heads)
    table, pages = table_of([-(-t // case.page) for t in case.requests], generator)
    cache = poisoned(pages, case.page, case.kv_format)
    projected = torch.randn(case.rows, dims.pitch, generator=generator).to(torch.bfloat16)
    for r, total in enumerate(case.requests):
        if total == 0:
            projected[r * case.q : (r + 1) * case.q] = torch.nan
            continue
        position = torch.arange(max(total - case.q, 0))
        latent, rope = (
            torch.randn(len(position), n, generator=generator).to(torch.bfloat16) for n in (dims.kv_lora, dims.rope)
        )
        slots = ref.local_slots(position, table[r].expand(len(position), -1), case.page, 1, 0)
        ref.write_entries(cache, slots, latent, rope, case.kv_format, 1.0 / K_SCALE)
    lengths = torch.tensor(case.requests, dtype=torch.int32)
    slots = new_slots(lengths, table, case.q, case.page)
    projected, cache, slots, table, lengths = (t.to(device) for t in (projected, cache, slots, table, lengths))
    return ref.Shard(projected, None, cache, slots, table, lengths)


def _part(case: ParallelCase, every: MlaWeights, whole: ref.Shard, rank: int, seed: int) -> ref.Shard:
    dcp, page, device = case.dcp, case.page, whole.cache.device
    generator = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
    # A block covers page * D positions, however many of them lie on this rank.
    table, pages = table_of([-(-t // (page * dcp)) for t in case.requests], generator)
    table = table.to(device)
    cache = poisoned(pages, page, case.kv_format, device)
    past = (whole.lengths - case.q).clamp(min=0)
    ref.shard_cache(whole.cache, whole.block_table, past, cache, table, dcp, rank, case.interleave, case.kv_format)
    return ref.Shard(
        projected=ref.projected_block(whole.projected, every, dcp, rank).contiguous(),
        attention=ref.head_block(every, dcp, rank),
        cache=cache,
        slots=new_slots(whole.lengths, table, case.q, page, dcp, rank, case.interleave),
        block_table=table,
        lengths=ref.local_len(whole.lengths, dcp, rank, case.interleave).to(torch.int32),
    )


def new_slots(
    totals: Tensor,  # int [R], this step's tokens included
    table: Tensor,  # int [R, width]
    q: int,
    page: int,
    dcp: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> Tensor:  # int64 [R * q]
    """Where `rank` writes a step's tokens; -1 for another rank's, for positions below 0 and for empty requests."""
    step = torch.arange(q, device=totals.device)
    position = (totals.to(torch.int64)[:, None] - q + step).flatten()
    rows = table.repeat_interleave(q, dim=0)
    slots = ref.local_slots(position.clamp(min=0), rows, page, dcp, rank, interleave)
    return torch.where((position >= 0) & (totals > 0).repeat_interleave(q), slots, -1)
