"""Tensor maps for the machine of ptx_warps.py: what a TMA box reads, and where its bytes go in shared memory."""

from dataclasses import dataclass

import numpy as np
from ptx_cluster import Buffer


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Where the byte of a linear address lies in a layout of `width`-byte swizzle: 16-byte chunks xor the row."""
    if width == 128:
        return address ^ ((address >> 3) & 0x70)
    assert width == 64
    return address ^ ((address >> 3) & 0x30)


@dataclass
class Map:
    """A tensor map: the arguments of driver.TensorMap, and the memory it describes."""

    buffer: Buffer
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    dtype: str
    l2_promotion: int = 128
    start: int = 0  # of element 0 in the buffer
    strict: bool = False  # a last coordinate out of bounds is an error

    def read(self, at: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(box bytes [rows, row bytes] with zeros out of bounds, offsets in the buffer of the bytes that were read)."""
        assert not self.strict or 0 <= at[-1] < self.dims[-1], f"coordinate {at[-1]} of {self.dims[-1]}"
        size = 1 if self.dtype in ("u8", "e4m3") else 2
        assert self.box[0] * size <= self.swizzle
        steps = (1, *self.strides_bytes)
        index, inside = np.zeros(1, np.int64), np.ones(1, bool)
        for dim in reversed(range(1, len(self.dims))):
            x = at[dim] + np.arange(self.box[dim])
            index = (index[:, None] + x * steps[dim]).reshape(-1)
            inside = (inside[:, None] & (x >= 0) & (x < self.dims[dim])).reshape(-1)
        x = at[0] + np.arange(self.box[0])
        columns = (x[:, None] * size + np.arange(size)).reshape(-1)
        inside = inside[:, None] & np.repeat((x >= 0) & (x < self.dims[0]), size)
        offsets = self.start + index[:, None] + columns
        rows = np.zeros(offsets.shape, np.uint8)
        rows[inside] = self.buffer.data[offsets[inside]]
        return rows, offsets[inside]
