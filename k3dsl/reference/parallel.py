"""Decode context parallelism, the whole step: D ranks, each with a block of heads and a share of every context.

    rank d's queries [B, H, 576] -> every rank            (publish: the gathered queries are [B, D * H, 576])
    all heads over the rank's own keys                    (the core: a normalized partial and a base-2 LSE)
    partial and LSE of a head -> the rank of that head    (push: what a rank of no key sends counts as nothing)
    merge by LSE in the order of the ranks, one rounding to bf16, then W_UV and the gate of the rank's own heads

Positions and lengths are those of reference.context. `lengths` are a rank's own, `totals` those of the whole context:
the causal bound and the zeros of empty requests follow the totals.

Mailboxes are the memory in which a rank receives. A word that has not arrived holds a pattern that no sender writes:
query bytes never 0xff (f8 writes NaN as 0x7f), partials never a word 0x80000000 (-0 becomes +0), LSE never all ones
(every NaN becomes EMPTY).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.reference.attend import core, visible_keys
from k3dsl.reference.combine import merge, published, value
from k3dsl.reference.context import local_len, local_slots, owner
from k3dsl.reference.layer import gate_of, pad_metadata, scales
from k3dsl.reference.paged import LATENT, ROPE, entries_of
from k3dsl.reference.projection import insert, query
from k3dsl.weights import MlaWeights, Parameter

#: Rows of a mailbox.
MAILBOX_ROWS: Final = 64
#: What words hold that have not arrived: a byte of the queries, int32 words of partials and of LSE.
ARMED_QUERY: Final = 0xFF
ARMED_PARTIAL: Final = -(1 << 31)
ARMED_LSE: Final = -1


@dataclass
class Shard:
    """What one rank has of a step of B rows and R = B / q requests."""

    projected: Tensor  # bf16 [B, 2112 + H * 128]: the gate columns are those of the rank's heads
    attention: Any  # weights of the rank's H heads
    cache: Tensor  # [pages, page_size, width]: the rank's positions; written at `slots`
    slots: Tensor  # int64 [B]; -1: another rank's position, or none
    block_table: Tensor  # int [R, width]: a block is page_size * D positions, page_size of them here
    lengths: Tensor  # int [R]: keys on this rank, those of this step included


def head_block(attention: Any, dcp: int, rank: int) -> MlaWeights:
    """The weights of rank's heads out of those of all D * H heads: views, norms and scales shared.

    Raises ConfigError if D does not divide the heads.
    """
    every = attention.W_UK_T.shape[0]
    if every % dcp:
        raise ConfigError(f"dcp={dcp} must divide the {every} heads")
    heads = every // dcp
    mine = slice(rank * heads, (rank + 1) * heads)
    wide = attention.q_b_proj.weight.shape[0] // every
    return MlaWeights(
        W_UK_T=attention.W_UK_T[mine],
        W_UV=attention.W_UV[mine],
        q_a_layernorm=attention.q_a_layernorm,
        kv_a_layernorm=attention.kv_a_layernorm,
        q_b_proj=Parameter(attention.q_b_proj.weight[rank * heads * wide : (rank + 1) * heads * wide]),
        _q_scale_inv=attention._q_scale_inv,
        _k_scale_inv=attention._k_scale_inv,
        _q_scale_float=attention._q_scale_float,
        _k_scale_float=attention._k_scale_float,
        scale=attention.scale,
        rms_norm_eps=attention.rms_norm_eps,
    )


def projected_block(projected: Tensor, attention: Any, dcp: int, rank: int) -> Tensor:
    """A rank's projected rows out of those with the gate of all heads: the latents, then its own gate columns."""
    gate = gate_of(projected, attention)
    width = gate.shape[1] // dcp
    common = projected[:, : attention.q_a_layernorm.weight.shape[0] + LATENT + ROPE]
    return torch.cat([common, gate[:, rank * width : (rank + 1) * width]], dim=1)


def shard_cache(
    cache: Tensor,  # [pages, page_size, width]: one device's
    block_table: Tensor,  # int [R, width]
    keys: Tensor,  # int [R]: how many of each request's positions are in it
    shard: Tensor,  # [pages, page_size, width] of the same format: the rank's, written
    shard_table: Tensor,  # int [R, width]: the rank's blocks
    dcp: int,
    rank: int,
    interleave: int = 1,
    kv_format: str = "fp8",
) -> None:
    """Copies to `shard` the entries of the positions that `rank` holds, bit for bit; nothing else is written."""
    source, target = entries_of(cache, kv_format), entries_of(shard, kv_format)
    page, local_page = source.shape[1], target.shape[1]
    for r, count in enumerate(keys.tolist()):
        position = torch.arange(count, device=cache.device)
        position = position[owner(position, dcp, interleave) == rank]
        table = shard_table[r].expand(len(position), -1)
        slot = local_slots(position, table, local_page, dcp, rank, interleave)
        block = block_table[r].to(torch.int64)[position // page]
        target[slot // local_page, slot % local_page] = source[block, position % page]


def gathered(queries: Sequence[Tensor]) -> Tensor:
    """[B, D * H, 576]: the queries of all ranks, [B, H, 576] each; head h of rank d is head d * H + h."""
    return torch.cat(list(queries), dim=1)


def query_mailbox(queries: Sequence[Tensor], rows: int = MAILBOX_ROWS) -> Tensor:
    """uint8 [rows, D * H, bytes of an entry]: every rank's mailbox once all ranks have published; the rest armed."""
    whole = gathered(queries).contiguous().view(torch.uint8)
    box = torch.full((rows, *whole.shape[1:]), ARMED_QUERY, dtype=torch.uint8, device=whole.device)
    box[: whole.shape[0]] = whole
    return box


def partial_mailbox(
    sent: Sequence[tuple[Tensor, Tensor]],  # of each source, as `published` gives them: [B, D * H, 512], [B, D * H]
    rank: int,
    rows: int = MAILBOX_ROWS,
) -> tuple[Tensor, Tensor]:  # bf16 [D, rows, H, 512], float32 [D, rows, H]
    """What `rank` has received once all ranks have pushed, by source: the outputs of its own heads; the rest armed."""
    dcp = len(sent)
    count, every, _ = sent[0][0].shape
    heads = every // dcp
    mine = slice(rank * heads, (rank + 1) * heads)
    device = sent[0][0].device
    words = torch.full((dcp, rows, heads, LATENT // 2), ARMED_PARTIAL, dtype=torch.int32, device=device)
    lse = torch.full((dcp, rows, heads), ARMED_LSE, dtype=torch.int32, device=device).view(torch.float32)
    partial = words.view(torch.bfloat16)
    for s, (out, weight) in enumerate(sent):
        partial[s, :count] = out[:, mine]
        lse[s, :count] = weight[:, mine]
    return partial, lse


def partial_of(
    query_rows: Tensor,  # [B, D * H, 576]: the gathered queries
    shard: Shard,
    rank: int,
    dcp: int,
    totals: Tensor,  # int [R]
    q: int = 1,
    interleave: int = 1,
    kv_format: str = "fp8",
) -> tuple[Tensor, Tensor]:  # bf16 [B, D * H, 512], float32 [B, D * H]
    """What a rank sends: all heads over its own keys, with the causal bound of the whole context."""
    scale, out_scale = scales(shard.attention, kv_format)
    visible = visible_keys(shard.lengths, q, totals=totals, dcp=(dcp, rank, interleave))
    out, lse = core(
        query_rows,
        shard.cache,
        shard.block_table,
        shard.lengths,
        q,
        scale=scale,
        out_scale=out_scale,
        kv_format=kv_format,
        visible=visible,
    )
    return published(out.flatten(0, 1), lse.flatten(0, 1), shard.lengths, q)


def parallel_layer(
    shards: Sequence[Shard],
    totals: Tensor,  # int [R]: tokens of the whole context, those of this step included
    q: int = 1,
    interleave: int = 1,
    kv_format: str = "fp8",
) -> list[Tensor]:  # per rank bf16 [B, H * 128]
    """One step of D ranks: each rank's output, for its own heads. Writes each rank's cache at its slots.

    Metadata of fewer than R requests is padded with empty ones. Raises ConfigError if q does not divide the rows.
    """
    dcp, rows = len(shards), shards[0].projected.shape[0]
    if q < 1 or rows % q:
        raise ConfigError(f"q={q!r} must divide the {rows} rows")
    padded = [_padded(shard, rows // q) for shard in shards]
    _, totals = pad_metadata(rows // q, totals[:, None], totals)
    for shard in padded:
        insert(shard.projected, shard.attention, shard.cache, shard.slots, kv_format)
    whole = gathered([query(s.projected, s.attention, kv_format) for s in padded])
    sent = [partial_of(whole, s, d, dcp, totals, q, interleave, kv_format) for d, s in enumerate(padded)]
    return [received(*partial_mailbox(sent, d, rows), s, totals, q) for d, s in enumerate(padded)]


def received(
    partial: Tensor,  # bf16 [D, B, H, 512]: a rank's mailbox
    lse: Tensor,  # float32 [D, B, H]
    shard: Shard,
    totals: Tensor,  # int [>= B / q]
    q: int = 1,
) -> Tensor:  # bf16 [B, H * 128]
    """What a rank makes of its mailbox: merge, W_UV, gate; zeros where the whole context is empty."""
    latent, _ = merge(partial, lse)
    return value(latent, shard.attention.W_UV, gate_of(shard.projected, shard.attention), totals, q)


def _padded(shard: Shard, requests: int) -> Shard:
    table, lengths = pad_metadata(requests, shard.block_table, shard.lengths)
    return Shard(shard.projected, shard.attention, shard.cache, shard.slots, table, lengths)


def split_lengths(totals: Tensor, dcp: int, interleave: int = 1) -> list[Tensor]:
    """Per rank, the local lengths (dtype of `totals`)."""
    return [local_len(totals, dcp, rank, interleave).to(totals.dtype) for rank in range(dcp)]
