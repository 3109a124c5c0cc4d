"""Tensor maps (the 128-byte descriptors of TMA), encoded on the host and passed to kernels by value."""

import ctypes
from collections.abc import Sequence
from ctypes import addressof, c_uint32, c_uint64
from typing import Any, Final

from k3dsl.errors import ConfigError

#: CUtensorMapDataType and bytes. TMA moves bytes: e4m3 has no code of its own.
DTYPES: Final = {"u8": (0, 1), "e4m3": (0, 1), "bf16": (9, 2), "f16": (6, 2), "f32": (7, 4), "i32": (3, 4)}
#: Bytes of the swizzle's span -> CUtensorMapSwizzle. 0 is none.
SWIZZLES: Final = {0: 0, 32: 1, 64: 2, 128: 3}
#: Bytes of a promoted L2 read -> CUtensorMapL2promotion. 0 is none.
PROMOTIONS: Final = {0: 0, 64: 1, 128: 2, 256: 3}
BYTES: Final = 128
_ALIGN: Final = 64


class TensorMap:
    """A tensor map in its own 64-aligned host memory. A launch copies it, so it may be encoded anew between launches.

    dims, box: elements, innermost first; strides_bytes: of every dim but the innermost. Raises ConfigError with
    everything that the hardware does not take. Source of the rules: cuTensorMapEncodeTiled in the CUDA driver API.
    """

    def __init__(
        self,
        driver: Any,
        *,
        dtype: str,
        address: int,
        dims: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        swizzle: int = 128,
        l2_promotion: int = 128,
    ) -> None:
        _check(dtype, dims, strides_bytes, box, swizzle, l2_promotion)
        rank = len(dims)
        self._driver = driver
        self._memory = (ctypes.c_uint8 * (BYTES + _ALIGN))()
        self.at = -(-addressof(self._memory) // _ALIGN) * _ALIGN  #: address of the 128 bytes
        self.address = 0  #: the base address encoded last
        self._dims = (c_uint64 * rank)(*dims)
        self._strides = (c_uint64 * max(rank - 1, 1))(*strides_bytes)
        self._box = (c_uint32 * rank)(*box)
        self._steps = (c_uint32 * rank)(*[1] * rank)
        self._head = (DTYPES[dtype][0], rank)
        self._modes = (0, SWIZZLES[swizzle], PROMOTIONS[l2_promotion], 0)
        self.encode(address)

    def encode(self, address: int) -> None:
        """Points the map at another base address, a multiple of 16."""
        if type(address) is not int or address <= 0 or address % 16:
            raise ConfigError(f"tensor map: address={address!r} must be a positive multiple of 16")
        shapes = (addressof(self._dims), addressof(self._strides), addressof(self._box), addressof(self._steps))
        self._driver.encode_tensor_map(self.at, *self._head, address, *shapes, *self._modes)
        self.address = address

    def bytes(self) -> bytes:
        """The encoded map."""
        return ctypes.string_at(self.at, BYTES)


def _check(
    dtype: str, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int, promotion: int
) -> None:
    bad = []
    if dtype not in DTYPES:
        bad.append(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    if swizzle not in SWIZZLES:
        bad.append(f"swizzle={swizzle!r} must be one of {', '.join(map(str, SWIZZLES))} (bytes)")
    if promotion not in PROMOTIONS:
        bad.append(f"l2_promotion={promotion!r} must be one of {', '.join(map(str, PROMOTIONS))} (bytes)")
    if not 1 <= len(dims) <= 5 or len(strides) != len(dims) - 1 or len(box) != len(dims):
        bad.append(
            f"{len(dims)} dims, {len(strides)} strides, {len(box)} box sizes: must be n, n - 1, n; n from 1 to 5"
        )
    bad += [f"dims[{i}]={d!r} must be from 1 to 2**32" for i, d in enumerate(dims) if not 1 <= d <= 2**32]
    bad += [
        f"strides_bytes[{i}]={s!r} must be a multiple of 16 from 16 to 2**40 - 16"
        for i, s in enumerate(strides)
        if s % 16 or not 16 <= s < 2**40
    ]
    bad += [f"box[{i}]={b!r} must be from 1 to 256" for i, b in enumerate(box) if not 1 <= b <= 256]
    if dtype in DTYPES and box:
        row = box[0] * DTYPES[dtype][1]
        if row % 16:
            bad.append(f"a box row of {row} bytes (box[0]={box[0]}) must be a multiple of 16 bytes")
        if swizzle in SWIZZLES and swizzle and row > swizzle:
            bad.append(f"a box row of {row} bytes (box[0]={box[0]}) must fit the swizzle of {swizzle} bytes")
    if bad:
        raise ConfigError.of("tensor map", bad)
