"""What comes after the query: decode attention, the combination over ranks, value projection and gate.

A decode is an object with a `name`, `warm()` and `run()`; `AiterDecode` (see aiter.py) is the GPU's, `ReferenceDecode`
stands in where there is no aiter or no GPU.
"""

from typing import Any, Final, Protocol

import torch
from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.reference.attend import core, visible_keys
from k3dsl.reference.combine import finite_lse, merge

LATENT: Final = 512


class Decode(Protocol):
    """Decode attention over this rank's cache: H queries a token, key = entry, value = its first 512."""

    name: str

    def problems(self, cache: Tensor) -> "list[str]":
        """What keeps a one-byte cache [blocks, block_size, 576] from being read."""

    def warm(self, cache: Tensor, shapes: "tuple[tuple[int, int], ...]", heads: int) -> None:
        """Sizes and compiles whatever `run` needs for these (rows, q). Before any capture."""

    def plan(
        self, cache: Tensor, block_table: Tensor, lengths: Tensor, totals: Tensor | None, rows: int, q: int
    ) -> None:
        """What a step's layers have in common, on the current stream: before `run`, again whenever tables change."""

    def run(
        self,
        query: Tensor,  # [B, H, 576]: e4m3 bytes or bf16
        cache: Tensor,  # one-byte [blocks, block_size, 576]
        block_table: Tensor,  # int32 [R, width]
        lengths: Tensor,  # int32 [R]: keys in this cache
        totals: Tensor | None,  # int32 [R]: keys on all ranks
        q: int,
        out: Tensor,  # bf16 [B, H, 512], written
        lse: Tensor | None,  # float32 [B, H], base 2, written if given
    ) -> None:
        """Attends on the current stream. Token t of a request sees its first length - (q - 1) + t keys.

        Rows of a request with no key here get an LSE of -inf; their latents may be anything.
        """


class ReferenceDecode:
    """The oracle's core in plain torch: any device, no capture, as slow as it is right."""

    name = "reference"

    def __init__(self, scale: float, ranks: int = 1, rank: int = 0) -> None:
        self._scale = scale
        self._dcp = (ranks, rank, 1)  # keys round robin, as aiter's decode has them

    def problems(self, cache: Tensor) -> "list[str]":
        """None: every paged cache is read."""
        return []

    def warm(self, cache: Tensor, shapes: "tuple[tuple[int, int], ...]", heads: int) -> None:
        """Nothing to prepare."""

    def plan(
        self, cache: Tensor, block_table: Tensor, lengths: Tensor, totals: Tensor | None, rows: int, q: int
    ) -> None:
        """Nothing to plan."""

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
        """See `Decode.run`. Empty rows give zeros and an LSE of -inf."""
        requests = query.shape[0] // q
        visible = visible_keys(
            lengths[:requests], q, totals=None if totals is None else totals[:requests], dcp=self._dcp
        )
        latent, found = core(query, cache, block_table, lengths, q, scale=self._scale, kv_format="fp8", visible=visible)
        out.copy_(latent.flatten(0, 1))
        if lse is not None:
            lse.copy_(found.flatten(0, 1))


class GroupCombine:
    """Partial outputs of all heads on every rank -> whole outputs of this rank's heads, over torch.distributed.

    Every rank attended with all heads over its share of the keys. One all-to-all hands each rank the partials of its
    own heads, which it merges by their LSE in rank order. Both collectives can be captured.
    """

    def __init__(self, group: Any, *, heads: int, rows: int, device: "torch.device | str") -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.ranks = dist.get_world_size(group)
        shape = (self.ranks, rows, heads)
        self._heads = heads
        self._sent = torch.empty(*shape, LATENT, dtype=torch.bfloat16, device=device)
        self._got = torch.empty_like(self._sent)
        self._sent_lse = torch.empty(*shape, dtype=torch.float32, device=device)
        self._got_lse = torch.empty_like(self._sent_lse)

    def __call__(self, latent: Tensor, lse: Tensor) -> Tensor:
        """latent bf16 [B, >= ranks * heads, 512], lse float32 [B, ...] base 2 -> bf16 [B, heads, 512]."""
        rows, every = latent.shape[0], self.ranks * self._heads
        sent, got = (
            t.flatten(0, 1)[: self.ranks * rows].unflatten(0, (self.ranks, rows)) for t in (self._sent, self._got)
        )
        sent_lse, got_lse = (
            t.flatten(0, 1)[: self.ranks * rows].unflatten(0, (self.ranks, rows))
            for t in (self._sent_lse, self._got_lse)
        )
        # Heads past ranks * heads are padding.
        sent.copy_(latent[:, :every].unflatten(1, (self.ranks, self._heads)).transpose(0, 1))
        sent_lse.copy_(finite_lse(lse[:, :every]).unflatten(1, (self.ranks, self._heads)).transpose(0, 1))
        self._dist.all_to_all_single(got, sent, group=self._group)
        self._dist.all_to_all_single(got_lse, sent_lse, group=self._group)
        return merge(got, got_lse)[0]


class GatedValue:
    """bf(f32(bf(latent W_UV)) * gate) into `out`: a batched product and a product, both torch's, nothing allocated."""

    def __init__(self, w_uv: Tensor, rows: int) -> None:
        heads, _, v = w_uv.shape
        if w_uv.dtype != torch.bfloat16:
            raise ConfigError(f"W_UV is {w_uv.dtype}, must be bfloat16")
        self._w_uv = w_uv
        self._up = torch.empty(heads, rows, v, dtype=torch.bfloat16, device=w_uv.device)

    def __call__(self, latent: Tensor, gate: Tensor, out: Tensor) -> None:
        """latent bf16 [B, H, 512], gate bf16 [B, H * 128], out bf16 [B, H * 128]."""
        heads, _, v = self._up.shape
        rows = latent.shape[0]
        # A prefix of the buffer as [H, B, v]: contiguous, so that the product writes into it as it is.
        up = self._up.view(-1)[: heads * rows * v].view(heads, rows, v)
        torch.bmm(latent.transpose(0, 1), self._w_uv, out=up)
        shape = (rows, heads, v)
        torch.mul(up.transpose(0, 1), gate.view(shape), out=out.view(shape))
