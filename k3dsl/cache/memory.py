"""What a process has read or built, ready in microseconds, and what of it somebody still holds."""

import threading
from collections import OrderedDict
from typing import Final, NamedTuple
from weakref import ref

from k3dsl.cache.entry import Entry, Manifest
from k3dsl.cache.key import CompileKey
from k3dsl.cache.session import Session

#: Bytes of payloads that a process keeps. All kernels of a deployment are a few MB.
LIMIT: Final = 256 * 2**20


class _Kept(NamedTuple):
    """What memory keeps of an entry: not the Entry itself, whose life says that somebody uses it."""

    key: CompileKey
    manifest: Manifest
    payload: bytes
    path: str | None


class Memory:
    """Entries by digest, the least recently used dropped beyond `limit` bytes of payload. Thread-safe.

    Entries of the folder (`own`) are listed with `session` as in use from when they are handed out until the last
    holder lets go.
    """

    def __init__(self, session: Session, own: str | None, limit: int = LIMIT) -> None:
        self._session = session
        self._own = own
        self._limit = limit
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0
        self._latest: dict[str, ref[Entry]] = {}
        self._watched: dict[str, set[ref[Entry]]] = {}
        # Reentrant: a collection may run the callback of a dead entry while this very thread holds it.
        self._guard = threading.RLock()

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def get(self, digest: str, owner: object) -> Entry | None:
        """The entry that is kept, as the very object that others hold if any does."""
        with self._guard:
            kept = self._kept.get(digest)
            if kept is None:
                return None
            self._kept.move_to_end(digest)
            latest = self._latest.get(digest)
            entry = latest() if latest is not None else None
            if entry is None:
                entry = Entry(kept.key, kept.manifest, source="memory", payload=kept.payload, path=kept.path)
                self._watch(entry, owner)
            return entry

    def put(self, entry: Entry, owner: object) -> Entry:
        """Keeps an entry; returns it. `owner` (the cache) lives for as long as the entry does."""
        payload = entry.payload
        with self._guard:
            self._drop(entry.digest)
            self._kept[entry.digest] = _Kept(entry.key, entry.manifest, payload, entry.path)
            self._bytes += len(payload)
            while self._bytes > self._limit and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))
            self._watch(entry, owner)
        return entry

    def drop(self, digest: str) -> bool:
        """Forgets an entry; whether it was kept."""
        with self._guard:
            return self._drop(digest)

    def alive(self) -> set[str]:
        """Digests of entries that somebody in this process holds."""
        with self._guard:
            return set(self._watched)

    def _watch(self, entry: Entry, owner: object) -> None:
        digest = entry.digest
        entry.owner = owner
        latest = self._latest[digest] = ref(entry, lambda dead: self._gone(digest, dead))
        self._watched.setdefault(digest, set()).add(latest)
        if self._own is not None and entry.path is not None and entry.path.startswith(self._own):
            self._session.use(digest)

    def _gone(self, digest: str, dead: "ref[Entry]") -> None:
        with self._guard:
            if self._latest.get(digest) is dead:
                del self._latest[digest]
            watched = self._watched.get(digest)
            if watched is not None:
                watched.discard(dead)
                if not watched:
                    del self._watched[digest]
                    self._session.release(digest)

    def _drop(self, digest: str) -> bool:
        kept = self._kept.pop(digest, None)
        self._bytes -= len(kept.payload) if kept else 0
        return kept is not None
