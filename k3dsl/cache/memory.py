"""What a process has read or built, ready in microseconds, and who still uses it."""

import threading
from collections import OrderedDict
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from k3dsl.cache.entry import Entry, Manifest
from k3dsl.cache.key import CompileKey

#: Bytes of payloads that a process keeps. All kernels of a deployment are a few MB.
LIMIT: Final = 256 * 2**20


class _Kept(NamedTuple):
    """What memory keeps of an entry: not the Entry itself, whose life says that somebody uses it."""

    key: CompileKey
    manifest: Manifest
    payload: bytes
    path: str | None


class Memory:
    """Entries by digest, the least recently used dropped beyond `limit` bytes of payload. Thread-safe."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0
        self._live: WeakValueDictionary[str, Entry] = WeakValueDictionary()
        self._guard = threading.Lock()

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def get(self, digest: str) -> Entry | None:
        """The entry that is kept, as the very object that others hold if any does."""
        with self._guard:
            kept = self._kept.get(digest)
            if kept is None:
                return None
            self._kept.move_to_end(digest)
            entry = self._live.get(digest)
            if entry is None:
                entry = Entry(kept.key, kept.manifest, source="memory", payload=kept.payload, path=kept.path)
                self._live[digest] = entry
            return entry

    def put(self, entry: Entry) -> Entry:
        """Keeps an entry; returns it."""
        payload = entry.payload
        with self._guard:
            self._drop(entry.digest)
            self._kept[entry.digest] = _Kept(entry.key, entry.manifest, payload, entry.path)
            self._bytes += len(payload)
            while self._bytes > self._limit and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))
            self._live[entry.digest] = entry
        return entry

    def drop(self, digest: str) -> bool:
        """Forgets an entry; whether it was kept."""
        with self._guard:
            return self._drop(digest)

    def clear(self) -> None:
        """Forgets all."""
        with self._guard:
            self._kept.clear()
            self._bytes = 0

    def alive(self) -> set[str]:
        """Digests of entries that somebody in this process holds."""
        return set(self._live.keys())

    def _drop(self, digest: str) -> bool:
        kept = self._kept.pop(digest, None)
        self._bytes -= len(kept.payload) if kept else 0
        return kept is not None
