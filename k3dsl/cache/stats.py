"""What the caches of all processes did, by reason, and what is stored now."""

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from k3dsl.cache import bound, session

if TYPE_CHECKING:
    from k3dsl.cache.compile_cache import CompileCache

#: Every counter, with what it counts.
COUNTERS: Final = {
    "memory_hit": "found in the process",
    "disk_hit": "found in the folder, checked",
    "layer_hit": "found in a layer, checked",
    "miss": "found nowhere when asked for",
    "built": "builds that came to an end",
    "build_failed": "builds that raised",
    "stored": "entries published in the folder",
    "imported": "entries that came in bundles",
    "raced": "builds whose entry another process had published first",
    "corrupt": "entries that were not what was stored: quarantined or passed over",
    "untrusted": "entries that somebody else may have written: not used",
    "evicted": "entries removed for the bound",
    "lock_timeout": "waits for another process's build that lasted too long",
    "lock_unsupported": "builds without a lock, for want of one",
    "read_failed": "reads that failed: a disk or a server",
    "write_failed": "writes that failed: full, read-only, ...",
    "give_failed": "entries that a layer did not take",
}


class Stats(dict[str, Any]):
    """What `stats` found: a dict, whose items are attributes too.

    Every counter of COUNTERS, over all processes that have used the folder; `session` has those of this cache alone.
    entries, bytes (allocated), quarantined, quarantined_bytes, pinned, max_bytes, root, layers, sealed, read_only, and
    degraded: what does not work as it should, by code.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"stats has no {name!r}; it has {', '.join(self)}") from None


def collect(cache: "CompileCache", own: Counter[str], pending: Counter[str]) -> Stats:
    """The work of `CompileCache.stats`; `own` are the counts of the cache, `pending` those that no file has."""
    folder = cache.folder
    counts = (session.totals(str(folder.root)) if folder is not None else Counter[str]()) + pending
    items = bound.usage(folder, cache.unreadable) if folder is not None else []
    rejected = bound.quarantine_usage(folder, cache.unreadable) if folder is not None else []
    return Stats(
        {name: counts.get(name, 0) for name in COUNTERS},
        session={name: own.get(name, 0) for name in COUNTERS},
        entries=len(items),
        bytes=sum(item.bytes for item in items),
        quarantined=len(rejected),
        quarantined_bytes=sum(item.bytes for item in rejected),
        pinned=len(bound.pinned(folder, cache.unreadable)) if folder is not None else 0,
        max_bytes=cache.max_bytes,
        root=str(cache.root) if cache.root is not None else None,
        layers=[layer.name for layer in cache.layers],
        sealed=cache.sealed,
        read_only=cache.read_only,
        degraded=cache.degraded,
    )
