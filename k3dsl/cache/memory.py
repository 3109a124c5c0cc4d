"""What a process has read or built, ready in a microsecond, and what of it somebody still holds."""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from typing import Final
from weakref import ref

from k3dsl.cache.entry import MANIFEST, Entry, Manifest
from k3dsl.cache.key import CompileKey
from k3dsl.cache.session import InUse

#: Bytes of payloads that a process keeps. All kernels of a deployment are a few MB.
LIMIT: Final = 256 * 2**20


class _Kept:
    """What memory keeps of an entry: not the Entry itself, whose life says that somebody uses it."""

    __slots__ = ("key", "latest", "manifest", "own", "path", "payload")

    def __init__(self, entry: Entry, payload: bytes, own: bool) -> None:
        self.key: CompileKey = entry.key
        self.manifest: Manifest = entry.manifest
        self.payload = payload
        self.path = entry.path
        #: Whether it stands in the folder that this cache writes to.
        self.own = own
        self.latest = ref(entry)


class Memory:
    """Entries by digest, the least recently used dropped beyond `limit` bytes of payload. Thread-safe.

    An entry whose path begins with `own` is listed in `in_use` from its handing out until its last holder lets go.
    """

    def __init__(self, in_use: InUse, own: str | None, limit: int = LIMIT) -> None:
        self._in_use = in_use
        self._own = own
        self._limit = limit
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0
        #: path -> when it was last used from memory, in ns: not yet written down.
        self.used: dict[str | None, int] = {}
        self._held: dict[str, int] = {}  # digest -> how many Entry objects of it live
        # Reentrant: a collection may end an entry's life while this very thread is in here.
        self._guard = threading.RLock()

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def get(self, digest: str) -> Entry | None:
        """The entry that is kept, as the very object that others hold if any does."""
        kept = self._kept.get(digest)
        if kept is None:
            return None
        with self._guard:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            if kept.own:
                self.used[kept.path] = time.time_ns()
            entry = kept.latest()
            if entry is None:
                entry = Entry(kept.key, kept.manifest, "memory", kept.payload, None, kept.path)
                kept.latest = ref(entry)
                self._hand_out(digest, entry, kept.own)
            return entry

    def put(self, entry: Entry) -> Entry:
        """Keeps an entry; returns it."""
        payload, digest = entry.payload, entry.digest
        own = self._own is not None and entry.path is not None and entry.path.startswith(self._own)
        with self._guard:
            self._drop(digest)
            self._kept[digest] = _Kept(entry, payload, own)
            self._bytes += len(payload)
            while self._bytes > self._limit and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))
            self._hand_out(digest, entry, own)
        return entry

    def drop(self, digest: str) -> bool:
        """Forgets an entry; whether it was kept."""
        with self._guard:
            return self._drop(digest)

    def alive(self) -> set[str]:
        """Digests of entries that somebody in this process holds."""
        with self._guard:
            return set(self._held)

    def gone(self, digest: str) -> None:
        """Says that an Entry object that was handed out is no more."""
        with self._guard:
            left = self._held.get(digest, 1) - 1
            if left:
                self._held[digest] = left
            else:
                self._held.pop(digest, None)
                self._in_use.release(digest)

    def _hand_out(self, digest: str, entry: Entry, own: bool) -> None:
        entry.keeper = self
        held = self._held.get(digest, 0)
        self._held[digest] = held + 1
        if own and not held:
            self._in_use.hold(digest)

    def _drop(self, digest: str) -> bool:
        kept = self._kept.pop(digest, None)
        self._bytes -= len(kept.payload) if kept else 0
        return kept is not None


def stamp(used: dict[str | None, int]) -> None:
    """Writes down when entries were used from memory; only the order of eviction depends on it. Never raises."""
    with contextlib.suppress(KeyError):  # another thread took the last
        while used:
            path, at = used.popitem()
            with contextlib.suppress(OSError):
                os.utime(f"{path}/{MANIFEST}", ns=(at, at))
