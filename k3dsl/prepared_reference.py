"""The prepared object of `target="reference"`: the oracle behind the same interface as the kernels'."""

from typing import Any

import torch
from torch import Tensor

from k3dsl.checks import (
    cache_problems,
    metadata_problems,
    not_prepared,
    place,
    require,
    step_problems,
    tensor_problems,
)
from k3dsl.deployment import Deployment
from k3dsl.errors import ConfigError
from k3dsl.reference import decode_layer, pad_metadata
from k3dsl.weights import require_attention


class PreparedReference:
    """One layer in plain torch, on any device.

    attention: as in k3dsl.MlaWeights. `shapes` are the prepared (rows, q). Raises ConfigError for weights of another
    model or on another device.
    """

    def __init__(self, plan: Deployment, attention: Any, device: "torch.device | str | int | None" = None) -> None:
        require_attention(attention, plan.dims, device)
        self.shapes = plan.shapes()
        self.device: torch.device = attention.W_UK_T.device
        self._plan = plan
        self._attention = attention
        self._prepared = frozenset(self.shapes)
        self._cache: Tensor | None = None

    def prepare_cache(self, kv: Tensor) -> None:
        """Binds the paged cache [pages, page_size, width]; safe to call again, with it or with another."""
        plan = self._plan
        require(
            "prepare_cache",
            cache_problems(kv, kv_format=plan.kv_format, page_size=plan.page_size, device=self.device),
        )
        self._cache = kv

    def run(
        self,
        projected: Tensor,  # bf16 [B, pitch]
        out: Tensor,  # bf16 [B, H * 128], written
        *,
        cache: Tensor,  # the one that prepare_cache was given; written at `slots`
        slots: Tensor,  # int64 [B]; -1: not written
        block_table: Tensor,  # int32 [R, width]
        lengths: Tensor,  # int32 [R], the tokens of this call included
        totals: Tensor | None = None,
        q: int = 1,
    ) -> None:
        """One step of the layer for B = R * q rows. Raises NotPrepared for a (B, q) that is not in `shapes`.

        Raises ConfigError, with nothing written, for what the kernels refuse and for slots, lengths and pages that do
        not exist, which they cannot see.
        """
        given = {"block_table": block_table, "lengths": lengths}
        require(
            "run", tensor_problems({"totals": totals}, projected=projected, out=out, cache=cache, slots=slots, **given)
        )
        rows = projected.shape[0]
        if type(q) is not int or (rows, q) not in self._prepared:
            raise not_prepared(self.shapes, rows, q)
        bound_cache(self._cache, cache)
        require("run", metadata_problems(totals=totals, **given))
        block_table, lengths = pad_metadata(rows // q, block_table, lengths)
        require(
            "run",
            step_problems(
                self._plan.dims,
                rows,
                q,
                self.device,
                projected=projected,
                out=out,
                slots=slots,
                block_table=block_table,
                lengths=lengths,
            ),
        )
        require("run", range_problems(cache, slots[:rows], block_table[: rows // q], lengths[: rows // q]))
        decode_layer(
            projected, self._attention, cache, slots[:rows], block_table, lengths, q, self._plan.kv_format, out=out
        )


def bound_cache(bound: Tensor | None, cache: Tensor) -> None:
    """Raises ConfigError unless `cache` is the tensor that prepare_cache bound, or another view of the same memory."""
    if bound is None:
        raise ConfigError("run: no cache is bound, call prepare_cache(kv_cache) first")
    if cache is not bound and place(cache) != place(bound):
        raise ConfigError(
            f"run: cache starts at {cache.data_ptr():#x} with strides {list(cache.stride())}, prepared was "
            f"{bound.data_ptr():#x} with {list(bound.stride())}: call prepare_cache(kv_cache) when the cache moves"
        )


def range_problems(cache: Tensor, slots: Tensor, block_table: Tensor, lengths: Tensor) -> list[str]:
    """The slots, lengths and pages in use that do not exist. Reads values: for a layer that is in no hurry."""
    pages, page = cache.shape[:2]
    width = block_table.shape[1]
    used = torch.arange(width, device=lengths.device) * page < lengths[:, None]
    bad = {
        f"slots: {{}} must be below {pages * page}: {pages} pages of {page}": slots[slots >= pages * page],
        f"lengths: {{}} must be from 0 to {width * page}: {width} pages of {page}": lengths[
            (lengths < 0) | (lengths > width * page)
        ],
        f"block_table: page {{}} of a request must be from 0 to {pages - 1}": block_table[
            used & ((block_table < 0) | (block_table >= pages))
        ],
    }
    return [text.format(wrong.tolist()[0]) for text, wrong in bad.items() if len(wrong)]
