"""Ranks of prepared gfx950 layers on one emulator: every rank a device of its own, their launches run together."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from mla_pre_cases import aligned
from torch import Tensor

from k3dsl import reference
from k3dsl.amd.mla_pre.key import HEADS, MlaPreBuild
from k3dsl.amd.mla_pre.layout import Rows, regions
from k3dsl.amd.peers import Layout, PeerGroup
from k3dsl.amd.prepared import PreparedMlaPre
from k3dsl.amd.rank import MlaPreRank
from k3dsl.amd.weights import MlaPreWeights, arguments_of, oracle_weights
from k3dsl.cache import CompileCache
from k3dsl.dims import MlaDims
from k3dsl.reference import mla_pre as oracle
from tools.gfx950 import Memory
from tools.gfx950.runtime import EmulatorRuntime

PAGE, PAGES = 16, 24
_folder = tempfile.TemporaryDirectory(prefix="k3dsl-mla-pre-")


@cache
def kernels() -> CompileCache:
    """Objects of this test process."""
    return CompileCache(_folder.name)


@cache
def weights(rank: int = 0) -> MlaPreWeights:
    """Rank 0's weights, or another rank's: its own heads, the replicated projection shared."""
    first = MlaPreWeights.random(MlaDims(), seed=5) if rank == 0 else weights()
    if rank == 0:
        return first
    # Other heads, made without another draw: rolled by whole heads, with a sign.
    mla = replace(
        first.mla,
        W_UK_T=-first.mla.W_UK_T.roll(rank, 0).contiguous(),
        W_UV=first.mla.W_UV.transpose(1, 2).contiguous().roll(rank + 1, 0).transpose(1, 2),
        q_b_proj=replace(first.mla.q_b_proj, weight=first.mla.q_b_proj.weight.roll(192 * rank, 0)),
    )
    return replace(first, mla=mla, w_g=first.w_g.roll(128 * rank, 0))


@cache
def oracle_of(rank: int = 0, w_uk: str = "mxfp4") -> oracle.PreWeights:
    """The same weights for the oracle, both forms of W_UK at hand."""
    four = oracle_weights(weights(rank), arguments_of(weights(rank), "mxfp4"))
    return four


def step_inputs(rows: int, nblocks: int, seed: int, delta: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return aligned(*shape, dtype=torch.bfloat16).copy_(torch.randn(*shape, generator=generator) * std)

    return {
        "prefix": normal(rows, 7168, std=2.0),
        "delta": normal(rows, 7168, std=0.5) if delta else None,
        "blocks": normal(rows, nblocks, 7168, std=2.0),
    }


class Group:
    """`ranks` prepared layers of the same place in the model, their caches, and the emulator that they run on."""

    def __init__(
        self,
        ranks: int,
        batches: tuple[int, ...],
        *,
        queries: tuple[int, ...] = (1,),
        nblocks: tuple[int, ...] = (1,),
        deltas: tuple[bool, ...] = (True,),
        w_uk: str = "mxfp4",
        changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.ranks = ranks
        self.memory = Memory()
        self.runtime = EmulatorRuntime(self.memory, collect=True, **options)
        layout = Layout.of(batches, ranks)
        self.buffers = [aligned(layout.size, dtype=torch.uint8) for _ in range(ranks)]
        bases = [b.data_ptr() for b in self.buffers]
        self.caches = [aligned(PAGES, PAGE, 576, dtype=torch.uint8, fill=0) for _ in range(ranks)]
        self.layers: list[PreparedMlaPre] = []
        self.partial: list[tuple[Tensor, Tensor]] = []
        for r in range(ranks):
            peers = PeerGroup(bases, r) if ranks > 1 else None
            rank = MlaPreRank(batches, ranks=ranks, rank=r, peers=peers, w_uk=w_uk)
            layer = PreparedMlaPre(
                weights(r), batches=batches, queries=queries, rank=rank, w_uk=w_uk, nblocks=nblocks, deltas=deltas,
                cache=kernels(), runtime=self.runtime, combine=self._combiner(r) if ranks > 1 else None,
            )  # fmt: skip
            if changes:  # fields of the build that prepared layers never set: a short bound, a fault
                layer._keys = {shape: replace(key, **changes) for shape, key in layer._keys.items()}
            layer.prepare_cache(self.caches[r])
            self.layers.append(layer)
        self._register()

    def _combiner(self, r: int) -> Any:
        def combine(latent: Tensor, lse: Tensor) -> Tensor:
            """Called for rank 0 first: what the others hold is in their buffers by then."""
            mine = slice(r * HEADS, (r + 1) * HEADS)
            return reference.merge(
                torch.stack([p[0][:, mine] for p in self.partial]), torch.stack([p[1][:, mine] for p in self.partial])
            )[0]

        return combine

    def _register(self) -> None:
        for r, layer in enumerate(self.layers):
            rank = layer.rank
            for name in ("scratch", "epoch", "health", "_query", "_gate", "_flags"):
                self.memory.add(getattr(rank, name), f"{name} of {r}", device=r)
            self.memory.add(self.caches[r], f"cache of {r}", device=r)
            self.memory.add(self.buffers[r], f"peer buffer of {r}", device=r, peer=True)
            for rows in rank.widths:
                if (table := rank.table(rows)) is not None:
                    self.memory.add(table, f"peers of {r}", read_only=True)
            for name, value in layer._weights.items():
                if value is not None:
                    self.memory.add(value, name, read_only=True)

    def project(self, given: dict[str, Any], slots: list[Tensor]) -> list[Tensor]:
        """One step of every rank together; each rank's prefix afterwards."""
        prefixes = []
        for r, layer in enumerate(self.layers):
            prefix = aligned(*given["prefix"].shape, dtype=torch.bfloat16).copy_(given["prefix"])
            prefixes.append(prefix)
            for name, value in (("prefix", prefix), ("slots", slots[r])):
                self.memory.add(value, f"{name} of {r}", device=r)
            for name in ("delta", "blocks"):
                if given[name] is not None:
                    self.memory.add(given[name], name, read_only=True)
            self.runtime.device = r
            layer.project(
                prefix, blocks=given["blocks"], delta=given["delta"], cache=self.caches[r], slots=slots[r],
            )  # fmt: skip
        self.runtime.run()
        return prefixes

    def attend(self, table: Tensor, lengths: list[Tensor], totals: Tensor | None, rows: int, q: int) -> list[Tensor]:
        """Decode on every rank, then the combination, as two passes: there is no exchange between processes here."""
        outs = [torch.full((rows, HEADS * 128), torch.nan, dtype=torch.bfloat16) for _ in self.layers]
        if self.ranks > 1:
            self.partial = []
            for r, layer in enumerate(self.layers):
                latent = torch.empty(rows, layer.rank.q_heads, 512, dtype=torch.bfloat16)
                lse = torch.empty(rows, layer.rank.q_heads)
                assert layer.decode is not None
                query = layer.rank.query(rows)
                layer.decode.run(query, self.caches[r], table, lengths[r], totals, q, latent, lse)
                self.partial.append((latent, lse))
        for r, (layer, out) in enumerate(zip(self.layers, outs, strict=True)):
            layer.attend(
                out, cache=self.caches[r], block_table=table, lengths=lengths[r], totals=totals, rows=rows, q=q
            )
        return outs

    def expected(self, given: dict[str, Any], nblocks: int) -> list[oracle.PreStep]:
        """The oracle's step of every rank."""
        w_uk = self.layers[0].rank.w_uk
        return [oracle.mla_pre(oracle_of(r), nblocks=nblocks, w_uk=w_uk, **given) for r in range(self.ranks)]


class HandOffs:
    """What a launch left in a rank's scratch, read by the layout alone."""

    def __init__(self, layer: PreparedMlaPre, key: MlaPreBuild) -> None:
        self._scratch, self._regions, self.rows = layer.rank.scratch, regions(key), key.tokens

    def tags(self, name: str) -> list[int]:
        """The tags of a region's pairs."""
        found = self._pairs(name)[:, 1].unique().tolist()
        return [int(tag) for tag in found]

    def halves(self, name: str, *shape: int) -> Tensor:
        """A region of bf16 pairs."""
        return self._pairs(name)[:, 0].contiguous().view(torch.bfloat16).view(self.rows, *shape)

    def plain(self, row: Rows) -> Tensor:
        """Plain rows: bf16 [S, n]."""
        found = self._scratch[row.offset : row.offset + self.rows * row.pitch]
        return found.view(torch.bfloat16).view(self.rows, -1)

    def _pairs(self, name: str) -> Tensor:
        region = self._regions[name]
        found = self._scratch[region.offset : region.offset + region.pairs * 8]
        return found.view(torch.int32).view(-1, 2)
