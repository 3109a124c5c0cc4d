"""Decode context parallelism: which of D ranks holds a position, and where.

Positions go to the ranks in turns of I (the interleave). A block of the block table covers page_size * D positions,
page_size of them on each rank.
"""

import torch
from torch import Tensor


def local_len(total: Tensor, dcp: int, rank: int, interleave: int = 1) -> Tensor:
    """How many of the first `total` positions (int, any shape) lie on `rank`.

    floor(t / (D I)) I + clamp(t mod (D I) - rank I, 0, I).
    """
    turn = dcp * interleave
    return total // turn * interleave + (total % turn - rank * interleave).clamp(0, interleave)


def owner(position: Tensor, dcp: int, interleave: int = 1) -> Tensor:
    """The rank that holds each position (int, any shape)."""
    return position // interleave % dcp


def local_slots(
    position: Tensor,  # int [B]
    block_table: Tensor,  # int [B, width]: the blocks of each position's request
    page_size: int,
    dcp: int,
    rank: int,
    interleave: int = 1,
) -> Tensor:  # int64 [B]
    """The slot of each position in `rank`'s cache; -1 where another rank holds it."""
    position = position.to(torch.int64)
    block = block_table.to(torch.int64).gather(1, (position // (page_size * dcp))[:, None])[:, 0]
    inside = position % (page_size * dcp)
    offset = inside // (interleave * dcp) * interleave + inside % interleave
    return torch.where(owner(position, dcp, interleave) == rank, block * page_size + offset, -1)
