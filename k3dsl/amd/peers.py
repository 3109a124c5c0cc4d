"""Memory that every rank of a group can write: one buffer a rank, opened by all the others.

The gathered query travels through it inside the kernel, so it is uncached device memory, shared by IPC handles. The
first 256 bytes of a buffer are flags (on rank 0: one alarm word a rank), the rest the hand-offs of each width. Nothing
here knows a GPU: allocation and handles are the `Memory` that is given, by default HIP's.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from k3dsl.amd.hip import hip_library
from k3dsl.amd.mla_pre.key import PEER_HEAD, peer_pairs
from k3dsl.errors import LaunchError, PeerError, ToolchainError

HANDLE: Final = 64  # bytes of an IPC handle
_PAGE: Final = 4096
_UNCACHED: Final = 0x3  # hipDeviceMallocUncached
_LAZY: Final = 0x1  # hipIpcMemLazyEnablePeerAccess
_TO_HOST: Final = 2  # hipMemcpyDeviceToHost


class Memory(Protocol):
    """Device memory that other processes can open."""

    def allocate(self, size: int) -> int:
        """Address of `size` zeroed bytes that are not cached across ranks."""

    def free(self, address: int) -> None:
        """Gives an allocation back."""

    def handle(self, address: int) -> bytes:
        """What another process opens the allocation by."""

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation in this one."""

    def close(self, address: int) -> None:
        """Ends a mapping."""

    def read(self, address: int, size: int) -> bytes:
        """Bytes of an allocation, on the host; waits for the device."""

    def clear(self, address: int, size: int) -> None:
        """Zeroes bytes of an allocation; waits for the device."""


class HipMemory:
    """Uncached device memory of a HIP device, by ctypes. Never run on hardware. Raises ToolchainError without HIP."""

    def __init__(self, device: int = 0, library: Any = None) -> None:
        self._device = device
        self._lib = library if library is not None else hip_library()

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._lib, name)(*arguments):
            raise LaunchError(f"{name} returned {status} on device {self._device}")

    def allocate(self, size: int) -> int:
        """Address of zeroed bytes, uncached, on the device."""
        self._call("hipSetDevice", ctypes.c_int(self._device))
        address = ctypes.c_void_p()
        self._call("hipExtMallocWithFlags", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(_UNCACHED))
        self.clear(int(address.value or 0), size)
        return int(address.value or 0)

    def free(self, address: int) -> None:
        """Gives an allocation back."""
        self._call("hipFree", ctypes.c_void_p(address))

    def handle(self, address: int) -> bytes:
        """The 64-byte IPC handle of an allocation."""
        handle = _Handle()
        self._call("hipIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Maps another rank's allocation."""
        address = ctypes.c_void_p()
        given = _Handle(reserved=(ctypes.c_ubyte * HANDLE)(*handle))
        self._call("hipIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_LAZY))
        return int(address.value or 0)

    def close(self, address: int) -> None:
        """Ends a mapping."""
        self._call("hipIpcCloseMemHandle", ctypes.c_void_p(address))

    def read(self, address: int, size: int) -> bytes:
        """Copies bytes to the host."""
        out = (ctypes.c_ubyte * size)()
        self._call("hipMemcpy", out, ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_TO_HOST))
        return bytes(out)

    def clear(self, address: int, size: int) -> None:
        """Zeroes bytes and waits."""
        self._call("hipMemset", ctypes.c_void_p(address), ctypes.c_int(0), ctypes.c_size_t(size))
        self._call("hipDeviceSynchronize")


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE)]


@dataclass(frozen=True)
class Layout:
    """Where the hand-offs of each width lie in a peer buffer: the same on every rank.

    Every width has its own room. Two copies alternate by the epoch's parity, and copies of different sizes in one
    place would let one width's odd copy lie on another's even one.
    """

    ranks: int
    offsets: "dict[int, int]" = field(hash=False)  # rows -> bytes
    size: int = 0

    @classmethod
    def of(cls, widths: Iterable[int], ranks: int) -> "Layout":
        """Room for `widths`, rounded up to whole pages."""
        offsets, end = {}, PEER_HEAD
        for rows in sorted(set(widths)):
            offsets[rows] = end
            end += 2 * 8 * peer_pairs(rows, ranks)
        return cls(ranks, offsets, -(-end // _PAGE) * _PAGE)


class PeerGroup:
    """This rank's view of all buffers: `bases[r]` is the address here of rank r's."""

    def __init__(self, bases: "list[int]", rank: int, memory: Memory | None = None) -> None:
        self.bases, self.rank = list(bases), rank
        self._memory = memory

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.bases)

    @classmethod
    def open(cls, size: int, exchange: Callable[[Any], "list[Any]"], rank: int, memory: Memory) -> "PeerGroup":
        """Allocates this rank's buffer and opens the others'. Collective: every rank must call it.

        exchange: all-gathers one picklable object a rank over the host, in rank order. Every step is agreed on: if a
        rank cannot allocate or open, all ranks close what they had and raise PeerError naming it.
        """
        own, why = 0, ""
        try:
            own = memory.allocate(size)
            mine = memory.handle(own)
        except (LaunchError, ToolchainError, OSError) as error:
            mine, why = b"", str(error)
        handles = exchange((mine, why))
        if failed := {r: w for r, (_, w) in enumerate(handles) if w}:
            if own:
                memory.free(own)
            raise PeerError(_told("could not allocate their peer buffer", failed))
        bases, opened, why = [0] * len(handles), [], ""
        bases[rank] = own
        try:
            for r, (handle, _) in enumerate(handles):
                if r != rank:
                    bases[r] = memory.open(handle)
                    opened.append(bases[r])
        except (LaunchError, OSError) as error:
            why = str(error)
        group = cls(bases, rank, memory)
        if failed := {r: w for r, w in enumerate(exchange(why)) if w}:
            for address in opened:
                memory.close(address)
            exchange(None)  # nobody frees what another still has open
            memory.free(own)
            raise PeerError(_told("could not open the others' peer buffers", failed))
        return group

    @property
    def alarm(self) -> int:
        """Address of this rank's alarm word, which lies on rank 0."""
        return self.bases[0] + 4 * self.rank

    def alarms(self) -> "list[int]":
        """Ranks that have raised an alarm. Read on rank 0; waits for the device."""
        if self._memory is None:
            words = (ctypes.c_int32 * self.size).from_address(self.bases[0])
        else:
            words = (ctypes.c_int32 * self.size).from_buffer_copy(self._memory.read(self.bases[0], 4 * self.size))
        return [r for r, word in enumerate(words) if word]

    def clear_alarms(self) -> None:
        """Zeroes the alarm words. On rank 0, with no launch on its way."""
        if self._memory is None:
            ctypes.memset(self.bases[0], 0, PEER_HEAD)
        else:
            self._memory.clear(self.bases[0], PEER_HEAD)

    def close(self, barrier: Callable[[], None]) -> None:
        """Unmaps and frees. Only when no rank's kernel can touch the buffers any more: `barrier` waits for all."""
        if self._memory is None or not self.bases:
            return
        for r, address in enumerate(self.bases):
            if r != self.rank:
                self._memory.close(address)
        barrier()
        self._memory.free(self.bases[self.rank])
        self.bases = []


def _told(what: str, failed: "dict[int, str]") -> str:
    lines = [f"{len(failed)} ranks {what}", *(f"rank {r}: {why}" for r, why in failed.items())]
    return "\n  - ".join(lines)
