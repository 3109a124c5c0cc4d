"""The decode loop of scenario.py for gfx950: layers start at the residual seam. For `k3dsl demo` and tests."""

from typing import Any

import torch
from torch import Tensor

from k3dsl import reference
from k3dsl.amd.mla_pre.key import MAX_BLOCKS
from k3dsl.amd.weights import MlaPreWeights, arguments_of, oracle_weights
from k3dsl.dims import MlaDims
from k3dsl.reference import mla_pre as oracle
from k3dsl.scenario import LENGTHS, Layer, Stack


class SeamStack(Stack):
    """Layers that take prefix, delta and residual blocks; layer i has 1 + i mod 8 blocks.

    `Layer.projected` is the prefix, bf16 [B, 7168], set anew by each run, since a step updates it in place.
    """

    def __init__(
        self,
        dims: MlaDims,
        *,
        layers: int = 2,
        lengths: tuple[int, ...] = LENGTHS,
        q: int = 1,
        page: int = 64,
        steps: int = 8,
        w_uk: str = "mxfp4",
        device: "torch.device | str" = "cpu",
        seed: int = 0,
    ) -> None:
        self.w_uk = w_uk
        self.prefixes: list[Tensor] = []  # what each step starts from
        self.deltas: list[Tensor] = []
        self.blocks: list[Tensor] = []
        super().__init__(
            dims, layers=layers, lengths=lengths, q=q, page=page, kv_format="fp8", steps=steps, device=device, seed=seed
        )

    def _layer(self, seed: int, k_scale: float, q_scale: float) -> Layer:
        plain = super()._layer(seed, k_scale, q_scale)
        weights = MlaPreWeights.random(self.dims, seed=seed, device=self.device)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, self.dims.hidden, dtype=torch.bfloat16, device=self.device)

        self.prefixes.append(zeros(self.rows))
        self.deltas.append(zeros(self.rows))
        self.blocks.append(zeros(self.rows, 1 + len(self.blocks) % MAX_BLOCKS))
        return Layer(weights, plain.cache, plain.twin, zeros(self.rows), plain.out)  # type: ignore[arg-type]

    def refill(self) -> None:
        """The coming step's metadata and activations; NaN in the rows of empty requests, which must give zeros."""
        step = self.requests.step()
        for mine, coming in (
            (self.slots, step.slots),
            (self.block_table, step.block_table),
            (self.lengths, step.lengths),
        ):
            mine.copy_(coming)
        empty = (step.lengths == 0).repeat_interleave(self.q)
        for prefix, delta, blocks in zip(self.prefixes, self.deltas, self.blocks, strict=True):
            for tensor, scale in ((prefix, 2.0), (delta, 0.5), (blocks, 2.0)):
                values = self._random(*tensor.shape) * scale
                values[empty] = torch.nan
                tensor.copy_(values)
        for layer in self.layers:
            layer.out.fill_(torch.nan)

    def run(self, prepared: "list[Any]", requests: int | None = None) -> None:
        """One step of every layer, from the step's own prefixes."""
        for i, (layer, one) in enumerate(zip(self.layers, prepared, strict=True)):
            layer.projected.copy_(self.prefixes[i])
            one.run(
                layer.projected,
                layer.out,
                blocks=self.blocks[i],
                delta=self.deltas[i],
                cache=layer.cache,
                slots=self.slots,
                block_table=self.block_table[:requests],
                lengths=self.lengths[:requests],
                q=self.q,
            )

    def expected(self, exact: bool = False) -> "list[Tensor]":
        """What the step must give, per layer, from the twin caches. exact: attention and value in float64."""
        found = []
        for i, layer in enumerate(self.layers):
            attention: Any = layer.weights
            step = oracle.mla_pre(
                oracle_weights(attention, arguments_of(attention, self.w_uk)),
                prefix=self.prefixes[i],
                delta=self.deltas[i],
                blocks=self.blocks[i],
                nblocks=self.blocks[i].shape[1],
                w_uk=self.w_uk,
            )
            oracle.insert(step.entry, layer.twin, self.slots)
            core = reference.core64 if exact else reference.core
            latent, _ = core(
                step.query(), layer.twin, self.block_table, self.lengths, self.q, scale=float(attention.scale)
            )
            latent = latent.flatten(0, 1)
            if exact:
                up = torch.einsum("bhl,hlv->bhv", latent, attention.W_UV.to(torch.float64)).flatten(1)
                out = up * step.gate.to(torch.float64)
            else:
                out = oracle.gated_value(latent, attention.W_UV, step.gate)
            found.append(out.masked_fill((self.lengths == 0).repeat_interleave(self.q)[:, None], 0.0))
        return found
