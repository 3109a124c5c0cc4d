"""Request metadata of a step: what an engine may leave out."""

import torch
from torch import Tensor

from k3dsl.checks import metadata_problems, require, tensor_problems


def pad_requests(
    batch: int, block_table: Tensor, lengths: Tensor, totals: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Request metadata of at least `batch` requests: what is missing has length 0 on page 0.

    block_table int32 [n, width], lengths (and totals) int32 [m]; rows beyond min(n, m) are missing. Returned as they
    are if there are enough.
    """
    require("pad_requests", tensor_problems({"totals": totals}, block_table=block_table, lengths=lengths))
    rows = min(block_table.shape[0], lengths.shape[0])
    if rows >= batch:
        return block_table, lengths, totals
    require("pad_requests", metadata_problems(block_table=block_table, lengths=lengths, totals=totals))
    table = torch.cat([block_table[:rows], block_table.new_zeros(batch - rows, block_table.shape[1])])
    return table, _padded(lengths, rows, batch), None if totals is None else _padded(totals, rows, batch)


def _padded(t: Tensor, rows: int, batch: int) -> Tensor:
    kept = t[:rows]
    return torch.cat([kept, t.new_zeros(batch - len(kept))])
