"""The memory that a kernel may touch: registered buffers of the host, each owned by a device or by nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Buffer(Protocol):
    """A torch tensor on the CPU, a numpy array, or anything else that has one of their two address attributes."""


@dataclass(frozen=True)
class Region:
    """Bytes [low, high). `device` None is host memory, open to all; `peer` opens a device's memory to the others."""

    low: int
    high: int
    name: str
    device: int | None = None
    peer: bool = False
    read_only: bool = False
    known: np.ndarray | None = None
    keep: Any = None  # what owns the bytes

    def joined(self, other: Region) -> Region:
        """This region and a later one that overlaps it, as one. Bytes of both stay as known as they were here."""
        mine, its = ((r.device, r.peer, r.read_only) for r in (self, other))
        if mine != its:
            raise ValueError(
                f"{other.name} overlaps {self.name}: (device, peer, read_only) is {its}, must be {mine} as there"
            )
        low, high = min(self.low, other.low), max(self.high, other.high)
        known = None
        if self.known is not None or other.known is not None:
            known = np.ones(high - low, np.uint8)
            for r in (other, self):
                known[r.low - low : r.high - low] = 1 if r.known is None else r.known
        whole = (other.low, other.high) == (low, high)
        name = other.name if whole else f"{self.name} with {other.name}"
        return Region(low, high, name, *mine, known, (self.keep, other.keep))


def extent(buffer: Any) -> tuple[int, int]:
    """First and past-the-last address of a tensor or an array."""
    if hasattr(buffer, "data_ptr"):
        if buffer.device.type != "cpu":
            raise ValueError(f"the emulator's memory is host memory; a tensor on {buffer.device} is not")
        storage = buffer.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    array = buffer
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.ctypes.data, array.ctypes.data + array.nbytes


class Memory:
    """Registered regions. `strict` off lets kernels touch every address of the process, registered or not."""

    def __init__(self, *buffers: Any, strict: bool = True, **named: Any) -> None:
        self.strict = strict
        self.regions: list[Region] = []
        for k, buffer in enumerate(buffers):
            self.add(buffer, name=f"buffer {k}")
        for name, buffer in named.items():
            self.add(buffer, name=name)

    def add(
        self,
        buffer: Any,
        name: str = "",
        *,
        device: int | None = None,
        peer: bool = False,
        read_only: bool = False,
        uninitialised: bool = False,
    ) -> Any:
        """Opens a tensor's or array's memory to kernels and returns the buffer. With `uninitialised`, reads of bytes
        that no kernel has written are reported. Memory that is registered already stays as it is; where only a part of
        it is, the rest joins that part, and ValueError is raised if the two were to be opened in different ways."""
        low, high = extent(buffer)
        if high > low and not any(r.low <= low and high <= r.high for r in self.regions):
            known = np.zeros(high - low, np.uint8) if uninitialised else None
            region = Region(low, high, name or f"0x{low:x}", device, peer, read_only, known, buffer)
            apart = []
            for other in self.regions:  # the core looks for one region at an address: they must not overlap
                if other.high <= low or high <= other.low:
                    apart.append(other)
                else:
                    region = other.joined(region)
            self.regions = sorted([*apart, region], key=lambda r: r.low)
        return buffer

    def find(self, address: int) -> Region | None:
        """The region that holds an address."""
        for region in self.regions:
            if region.low <= address < region.high:
                return region
        return None

    def describe(self, address: int) -> str:
        """An address in words: which buffer, how far in or beyond."""
        region = self.find(address)
        if region:
            return f"{region.name} + {address - region.low} of {region.high - region.low}"
        near = [r for r in self.regions if abs(address - r.high) < 1 << 20 or abs(r.low - address) < 1 << 20]
        if near:
            best = min(near, key=lambda r: min(abs(address - r.high), abs(r.low - address)))
            if address >= best.high:
                return f"{address - best.high} bytes past the end of {best.name} ({best.high - best.low} bytes)"
            return f"{best.low - address} bytes before {best.name}"
        return "no registered buffer is near"
