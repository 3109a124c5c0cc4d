"""Request metadata of a step, and the split count of cores that take one from the host."""

from typing import Any

import torch
from torch import Tensor

from k3dsl.checks import metadata_problems, require
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
    require("run", metadata_problems(block_table=block_table, lengths=lengths, totals=totals))
    more = batch - rows
    table = torch.cat([block_table[:rows], block_table.new_zeros(more, block_table.shape[1])])
    padded = [
        None if t is None else torch.cat([t[:rows], t.new_zeros(batch - len(t[:rows]))]) for t in (lengths, totals)
    ]
    assert padded[0] is not None
    return table, padded[0], padded[1]


def parity_problems(parity: Any) -> list[str]:
    """Why that is no parity of a layer; empty if it is."""
    if type(parity) is int and parity in (0, 1):
        return []
    return [f"parity={parity!r} must be 0 or 1: the layer's ordinal among MLA layers modulo 2"]


def table_problems(step: Any, table: Tensor) -> list[str]:
    """Why a core cannot read tables of that width; empty if it can. step: has `entries`."""
    if table.shape[1] % step.entries:
        return [
            f"block_table has {table.shape[1]} entries a row, must be a multiple of {step.entries}: the core reads the "
            "table by tiles of 128 keys (what is beyond a request's pages may be any page)"
        ]
    return []


def fill_splits(batch: int, device: "torch.device | str | int | None" = None) -> int:
    """Splits of each row's keys that fill the device: min(256, max(1, SMs // (2 batch))), batch in rows."""
    if type(batch) is not int or batch < 1:
        raise ConfigError(f"batch={batch!r} must be a positive int")
    from k3dsl.nvidia.device import device as facts

    return min(256, max(1, facts(device_index(device)).sm_count // (2 * batch)))
