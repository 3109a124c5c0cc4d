"""Why a key hits or misses: where it is, or which entry is nearest to it and in what it differs."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3dsl.cache.entry import MANIFEST, CorruptError, Entry, Manifest
from k3dsl.cache.key import CompileKey, Difference, is_digest, short
from k3dsl.cache.store import Folder
from k3dsl.cache.trust import UntrustedError

if TYPE_CHECKING:
    from k3dsl.cache.compile_cache import CompileCache


@dataclass(frozen=True)
class Explanation:
    """What the cache knows of a key.

    present      whether it is there
    where        "memory", "disk" or the layer that has it; None if it is not there
    nearest      of the entries that are there, the one that differs least; None if it is there or there are none
    differences  between the key (`mine`) and the nearest entry (`theirs`)
    notes        what else matters: a quarantined entry of this key, whatever does not work as it should
    """

    key: CompileKey
    present: bool
    where: str | None = None
    nearest: Entry | None = None
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        if self.present:
            lines.append(f"{self.key!r} is there: {self.where}")
        elif self.nearest is None:
            lines.append(f"{self.key!r} is not there, and no other entry is")
        elif self.nearest.key.kernel != self.key.kernel:  # its fields are others: to list them would tell nothing
            lines.append(f"{self.key!r} is not there, and no entry of {self.key.kernel} is")
        else:
            count = len(self.differences)
            lines.append(
                f"{self.key!r} is not there; nearest is {self.nearest.key!r}, "
                f"which differs in {count} field{'s' if count != 1 else ''}:"
            )
            lines.extend(f"  {difference.field}: {_pair(difference)}" for difference in self.differences)
        return "\n".join([*lines, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The same in JSON types; values of fields as text."""
        return {
            "digest": self.key.digest,
            "kernel": self.key.kernel,
            "target": self.key.target,
            "present": self.present,
            "where": self.where,
            "nearest": self.nearest.digest if self.nearest else None,
            "differences": [
                {"field": item.field, "wanted": repr(item.mine), "nearest": repr(item.theirs)}
                for item in self.differences
            ],
            "notes": self.notes,
        }


def explain(cache: "CompileCache", key: CompileKey, *, in_memory: bool) -> Explanation:
    """The work of `CompileCache.explain`."""
    folders = cache.folders()
    notes = [note for folder in folders for note in quarantine_notes(key, folder)]
    notes += [f"note: {message}" for message in cache.degraded.values()]
    if in_memory:
        return Explanation(key, True, "memory", notes=notes)
    for folder in folders:
        if folder.has(key):
            return Explanation(key, True, folder.name, notes=notes)
    found, differences = nearest(key, entries_of(cache))
    return Explanation(key, False, None, found, differences, notes)


def entries_of(cache: "CompileCache") -> Iterator[Entry]:
    """Every entry whose manifest is sound; of two of one key, the first."""
    seen: set[str] = set()
    for folder in cache.folders():
        for place in folder.places(onerror=cache.unreadable):
            if place.digest in seen:
                continue
            with contextlib.suppress(CorruptError, UntrustedError, OSError):
                yield folder.open(place)
                seen.add(place.digest)


def nearest(key: CompileKey, entries: Iterable[Entry]) -> tuple[Entry | None, list[Difference]]:
    """The entry that differs least from `key`: same kernel first, then same target, then the fewest fields."""
    best: tuple[tuple[bool, bool, int, str], Entry, list[Difference]] | None = None
    for entry in entries:
        if best is not None and (entry.key.kernel != key.kernel) > best[0][0]:
            continue  # saves the comparison: it could not win
        differences = key.diff(entry.key)
        rank = (entry.key.kernel != key.kernel, entry.key.target != key.target, len(differences), entry.digest)
        if best is None or rank < best[0]:
            best = rank, entry, differences
    return (best[1], best[2]) if best else (None, [])


def quarantine_notes(key: CompileKey, folder: Folder) -> list[str]:
    """What became of earlier entries of `key`."""
    notes = []
    with contextlib.suppress(OSError):
        for path in folder.quarantined():
            if path.rpartition("/")[2].startswith(key.digest):
                with contextlib.suppress(OSError), open(f"{path}/REASON", encoding="utf-8") as file:
                    notes.append(f"an entry of this key was quarantined: {file.read().strip()} ({path})")
    return notes


def quarantined_keys(folder: Folder) -> list[CompileKey]:
    """The keys of entries in quarantine whose manifest is sound."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.quarantined():
            with contextlib.suppress(CorruptError, OSError), open(f"{path}/{MANIFEST}", "rb") as file:
                found.append(Manifest.load(file.read()).compile_key())
    return found


def _pair(difference: Difference) -> str:
    mine, theirs = (_brief(value) for value in (difference.mine, difference.theirs))
    return f"{mine} wanted, {theirs} there"


def _brief(value: Any) -> str:
    """A value for people: a digest by its first digits."""
    if isinstance(value, str) and is_digest(value):
        return short(value)
    return repr(value)
