"""Request metadata of a step, and the split count of cores that take one from the host."""

import torch
from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.preparing import device_index


def pad_requests(
    batch: int, block_table: Tensor, lengths: Tensor, totals: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Request metadata of at least `batch` requests: what is missing has length 0 on page 0.

    block_table int32 [n, width], lengths (and totals) int32 [m]; rows beyond min(n, m) are missing. Returned as they
    are if there are enough.
    """
    rows = min(block_table.shape[0], lengths.shape[0])
    if rows >= batch:
        return block_table, lengths, totals
    more = batch - rows
    table = torch.cat([block_table[:rows], block_table.new_zeros(more, block_table.shape[1])])
    padded = [
        None if t is None else torch.cat([t[:rows], t.new_zeros(batch - len(t[:rows]))]) for t in (lengths, totals)
    ]
    assert padded[0] is not None
    return table, padded[0], padded[1]


def fill_splits(batch: int, device: "torch.device | str | int | None" = None) -> int:
    """Splits of each row's keys that fill the device: min(256, max(1, SMs // (2 batch))), batch in rows."""
    if type(batch) is not int or batch < 1:
        raise ConfigError(f"batch={batch!r} must be a positive int")
    from k3dsl.nvidia.device import device as facts

    return min(256, max(1, facts(device_index(device)).sm_count // (2 * batch)))
