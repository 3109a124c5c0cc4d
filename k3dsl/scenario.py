"""A decode loop as an engine runs it, in small: requests that grow in a paged pool, layers, steps. For demo and tests.

What no kernel may read is poisoned: NaN in every cache slot that no token was written to, a page number beyond any pool
in every unused block-table entry, NaN in the projected rows of the empty request that pads the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl import reference
from k3dsl.dims import KV_BYTES, MlaDims
from k3dsl.weights import MlaWeights

#: Lengths after the first step: one key, either side of a page, several pages, thousands; the last request is padding.
LENGTHS: Final = (1, 63, 64, 65, 129, 700, 2500, 0)
UNUSED_PAGE: Final = 1 << 30


def poisoned(pages: int, page: int, kv_format: str, device: "torch.device | str" = "cpu") -> Tensor:
    """A cache [pages, page, width] of NaN: every byte 0xff, a NaN of e4m3 and, in pairs, of bf16."""
    flat = torch.full((pages, page, KV_BYTES[kv_format]), 0xFF, dtype=torch.uint8, device=device)
    return flat.view(torch.bfloat16) if kv_format == "bf16" else flat


@dataclass
class Step:
    """The request metadata of one step, on the CPU. Rows of the padding request have slot -1 and length 0."""

    slots: Tensor  # int64 [B]
    block_table: Tensor  # int32 [R, width]
    lengths: Tensor  # int32 [R], this step's tokens included


class Requests:
    """R requests over one pool of pages, q tokens each a step; pages are taken as they are needed, in no order.

    lengths: tokens after the first step (0: a request that stays empty); with q > 1 a request starts with at least q.
    """

    def __init__(self, lengths: tuple[int, ...], q: int, page: int, steps: int, seed: int = 0) -> None:
        self.q, self.page = q, page
        self._generator = torch.Generator().manual_seed(seed)
        self.past = [max(length - q, 0) for length in lengths]  #: tokens in the cache before the coming step
        self.live = [length > 0 for length in lengths]
        most = [
            -(-(past + q * (steps + 1)) // page) if live else 0 for past, live in zip(self.past, self.live, strict=True)
        ]
        self.pages = sum(most) + 2  #: of the pool; page 0 belongs to nobody
        self.width = max(most) + 1
        free = torch.randperm(self.pages - 1, generator=self._generator) + 1
        self._free = free.tolist()
        self._owned: list[list[int]] = [[] for _ in lengths]

    def __len__(self) -> int:
        return len(self.past)

    def slots(self, request: int, start: int, stop: int) -> list[int]:
        """Slots of positions start..stop - 1; takes pages for them."""
        owned = self._owned[request]
        while len(owned) * self.page < stop:
            owned.append(self._free.pop())
        return [owned[p // self.page] * self.page + p % self.page for p in range(start, stop)]

    def step(self) -> Step:
        """Metadata of the coming step."""
        slots, lengths = [], []
        for r, (past, live) in enumerate(zip(self.past, self.live, strict=True)):
            slots += self.slots(r, past, past + self.q) if live else [-1] * self.q
            lengths.append(past + self.q if live else 0)
        table = torch.full((len(self.past), self.width), UNUSED_PAGE, dtype=torch.int32)
        for r, owned in enumerate(self._owned):
            table[r, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
        return Step(torch.tensor(slots), table, torch.tensor(lengths, dtype=torch.int32))

    def advance(self) -> None:
        """Ends a step: with q > 1 between 1 and q of each request's tokens are kept, the others written anew."""
        kept = torch.randint(1, self.q + 1, (len(self.past),), generator=self._generator).tolist()
        self.past = [past + k if live else past for past, k, live in zip(self.past, kept, self.live, strict=True)]


@dataclass
class Layer:
    """One layer of the stack: weights, its cache, and an equal cache for the reference."""

    weights: MlaWeights
    cache: Tensor  # [pages, page, width]
    twin: Tensor
    projected: Tensor  # bf16 [B, pitch]
    out: Tensor  # bf16 [B, H * 128]


class Stack:
    """Layers that share the metadata of their requests, with static tensors, as a captured step needs them."""

    def __init__(
        self,
        dims: MlaDims,
        *,
        layers: int = 2,
        lengths: tuple[int, ...] = LENGTHS,
        q: int = 1,
        page: int = 64,
        kv_format: str = "fp8",
        steps: int = 8,
        k_scale: float = 1.0,
        q_scale: float = 1.0,
        device: "torch.device | str" = "cpu",
        seed: int = 0,
    ) -> None:
        self.dims, self.q, self.page, self.kv_format = dims, q, page, kv_format
        self.device = torch.device(device)
        self.requests = Requests(lengths, q, page, steps, seed)
        self.rows = len(lengths) * q
        self._generator = torch.Generator().manual_seed(seed + 1)
        self.layers = [self._layer(seed + i, k_scale, q_scale) for i in range(layers)]
        first = self.requests.step()
        self.slots, self.block_table, self.lengths = (
            t.to(self.device) for t in (first.slots, first.block_table, first.lengths)
        )
        self.refill()

    def _layer(self, seed: int, k_scale: float, q_scale: float) -> Layer:
        weights = MlaWeights.random(self.dims, seed=seed, k_scale=k_scale, q_scale=q_scale)
        cache = poisoned(self.requests.pages, self.page, self.kv_format)
        for r, past in enumerate(self.requests.past):
            if self.requests.live[r]:
                latent, rope = (self._random(past, n) for n in (self.dims.kv_lora, self.dims.rope))
                slots = torch.tensor(self.requests.slots(r, 0, past), dtype=torch.int64)
                reference.write_entries(cache, slots, latent, rope, self.kv_format, 1.0 / k_scale)
        return Layer(
            weights.to(self.device),
            cache.to(self.device),
            cache.to(self.device).clone(),
            torch.zeros(self.rows, self.dims.pitch, dtype=torch.bfloat16, device=self.device),
            torch.full((self.rows, self.dims.heads * self.dims.v), torch.nan, dtype=torch.bfloat16, device=self.device),
        )

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(torch.bfloat16)

    def refill(self) -> None:
        """The coming step's metadata and projected rows, written into the static tensors."""
        step = self.requests.step()
        self.slots.copy_(step.slots)
        self.block_table.copy_(step.block_table)
        self.lengths.copy_(step.lengths)
        empty = (step.lengths == 0).repeat_interleave(self.q)
        for layer in self.layers:
            rows = self._random(self.rows, self.dims.pitch)
            rows[empty] = torch.nan
            layer.projected.copy_(rows)
            layer.out.fill_(torch.nan)

    def advance(self) -> None:
        """On to the next step."""
        self.requests.advance()
        self.refill()

    def run(self, prepared: list[Any], requests: int | None = None) -> None:
        """One step of every layer. requests: rows of metadata to pass, fewer than there are to have the rest padded."""
        for layer, one in zip(self.layers, prepared, strict=True):
            one.run(
                layer.projected,
                layer.out,
                cache=layer.cache,
                slots=self.slots,
                block_table=self.block_table[:requests],
                lengths=self.lengths[:requests],
                q=self.q,
            )

    def expected(self, exact: bool = False) -> list[Tensor]:
        """What the step must give, per layer, from the twin caches. exact: in float64 from the rounded queries on."""
        found = []
        for layer in self.layers:
            if exact:
                found.append(self._exact(layer))
            else:
                found.append(
                    reference.decode_layer(
                        layer.projected,
                        layer.weights,
                        layer.twin,
                        self.slots,
                        self.block_table,
                        self.lengths,
                        self.q,
                        self.kv_format,
                    )
                )
        return found

    def _exact(self, layer: Layer) -> Tensor:
        reference.insert(layer.projected, layer.weights, layer.twin, self.slots, self.kv_format)
        scale, out_scale = reference.scales(layer.weights, self.kv_format)
        latent, _ = reference.core64(
            reference.query(layer.projected, layer.weights, self.kv_format),
            layer.twin,
            self.block_table,
            self.lengths,
            self.q,
            scale=scale,
            out_scale=out_scale,
            kv_format=self.kv_format,
        )
        gate = reference.gate_of(layer.projected, layer.weights)
        return reference.value64(latent, layer.weights.W_UV, gate, self.lengths, self.q)

    def entry_error(self) -> float:
        """The largest relative error of the entries that this step wrote, against the twin's."""
        live = self.slots >= 0
        page, offset = self.slots[live] // self.page, self.slots[live] % self.page
        pairs = [
            [reference.read_entries(c, page, offset, self.kv_format) for c in (layer.cache, layer.twin)]
            for layer in self.layers
        ]
        return max(relative_error(mine, theirs) for mine, theirs in pairs)

    def strays(self) -> int:
        """Bytes in which a cache and its twin differ in slots that this step does not write."""
        count = 0
        for layer in self.layers:
            differ = reference.bits(layer.cache).flatten(0, 1) != reference.bits(layer.twin).flatten(0, 1)
            differ[self.slots[self.slots >= 0]] = False
            count += int(differ.sum())
        return count

    def adopt(self) -> None:
        """Makes each twin equal to its cache, so that what one step left over is not counted in the next."""
        for layer in self.layers:
            layer.twin.copy_(layer.cache)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The largest |result - expected| / |expected| of a row; inf for a NaN, or where a row of zeros is not zero."""
    mine, theirs = result.to(torch.float64), expected.to(torch.float64)
    difference, size = (mine - theirs).norm(dim=-1), theirs.norm(dim=-1)
    error = torch.where(difference == 0, 0.0, difference / size)
    return float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def captured(run: Callable[[], None]) -> "torch.cuda.CUDAGraph":
    """A graph of `run`, captured on a stream of its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
