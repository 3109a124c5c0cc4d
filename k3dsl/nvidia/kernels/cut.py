"""The work split on the device: what core/hopper.py's `cut` specifies, found by every warp for itself.

A warp holds two requests a lane (lane and lane + 32). Its prefix sums stay in registers, so that finding the request of
a tile is two ballots and needs no memory. The whole warp calls each of these functions together.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from k3dsl.nvidia.core.hopper import SINGLE_TILES, TILE
from k3dsl.nvidia.kernels import ptx


class Split(NamedTuple):
    """Of the requests `lane` and `lane + 32`: lengths, and the tiles of all requests up to and with them. Of all: the
    tiles of a CTA, and of the call."""

    low_length: Int32
    high_length: Int32
    low_end: Int32
    high_end: Int32
    share: Int32
    tiles: Int32


def _tiles(length):
    return (cutlass.max(length, Int32(0)) + (TILE - 1)) // TILE


def load_lengths(lengths, requests, lane):
    """The lengths (Int64 address) of requests `lane` and `lane + 32`, 0 beyond the last."""
    return [ptx.ldg_b32_below(lengths + Int64(lane * 4 + 128 * i), lane + 32 * i, requests) for i in range(2)]


def split(loaded, requests, splits):
    """The Split of `load_lengths`' result."""
    ends = []
    for length in loaded:
        end = _tiles(length)
        for distance in (1, 2, 4, 8, 16):
            end = ptx.scan_add(end, distance)
        ends.append(end)
    ends[1] = ends[1] + cute.arch.shuffle_sync(ends[0], 31)
    tiles = cute.arch.shuffle_sync(ends[1], 31)
    least = cutlass.select_(tiles > SINGLE_TILES * requests, Int32(2), Int32(1))
    share = cutlass.max((tiles + splits - 1) // splits, least)
    return Split(*loaded, *ends, share, tiles)


def store(work, at, lane):
    """The requests' part of a Split to shared memory, 512 bytes: for warps that have no registers to keep it in."""
    for i, word in enumerate((work.low_length, work.high_length, work.low_end, work.high_end)):
        ptx.sts_b32(at + lane * 4, word, offset=128 * i)


def stored(at, lane):
    """The Split that `store` put there, for `locate`."""
    words = [ptx.lds_b32(at + lane * 4, offset=128 * i) for i in range(4)]
    return Split(*words, Int32(0), Int32(0))


def run(work, cta):
    """(first tile, one past the last tile) of a CTA."""
    start = cutlass.min(cta * work.share, work.tiles)
    return start, cutlass.min(start + work.share, work.tiles)


def _of(low, high, r):
    low, high = (cute.arch.shuffle_sync(x, r & 31) for x in (low, high))
    return cutlass.select_(r < 32, low, high)


def _request(work, r):
    length = _of(work.low_length, work.high_length, r)
    end = _of(work.low_end, work.high_end, r)
    return length, end - _tiles(length), end


def locate(work, tile):
    """(request, its length, its first tile, one past its last) of a tile number < tiles."""
    r = ptx.lanes_at_most(work.low_end, tile) + ptx.lanes_at_most(work.high_end, tile)
    return (r, *_request(work, r))


def ctas(work, r):
    """(first CTA, CTAs) that hold request r."""
    _, start, end = _request(work, r)
    first = start // work.share
    return first, cutlass.select_(end > start, (end - 1) // work.share - first + 1, Int32(0))
