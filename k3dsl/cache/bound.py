"""The bound of a folder: the least recently used entries go first, counted in allocated blocks.

Never taken: an entry that is pinned, and one that a living process uses. Quarantined entries go before any sound one.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

import msgspec

from k3dsl.cache.store import MANIFEST, QUARANTINE, Folder, OnError, Place, allocated, delete, listing
from k3dsl.cache.trust import make_folder, modes_like

PINS: Final = "pins"


class Removed(msgspec.Struct, frozen=True):
    """An entry that was evicted, or would be: target "quarantine" for one that was in quarantine."""

    digest: str
    target: str
    bytes: int
    idle_seconds: float


class Failure(msgspec.Struct, frozen=True):
    """An entry that should have gone and is still there."""

    digest: str
    reason: str


class PruneReport(msgspec.Struct, frozen=True):
    """What `prune` did, or with `dry_run` would do."""

    removed: list[Removed]
    failed: list[Failure]
    freed_bytes: int
    kept: int
    kept_bytes: int
    exempt: int
    """Of those kept: pinned or in use, and for that alone."""
    dry_run: bool


class Usage(NamedTuple):
    """One entry, what it takes, and when it was last used (ns since the epoch; for the order alone)."""

    place: Place
    bytes: int
    used: int


def usage(folder: Folder, onerror: OnError) -> list[Usage]:
    """Every entry, least recently used first. What cannot be listed is told to `onerror`."""
    found = []
    for place in folder.places(onerror=onerror):
        with contextlib.suppress(OSError):
            status = os.stat(place.path)
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(f"{place.path}/{MANIFEST}")
            found.append(Usage(place, allocated(place.path), status.st_mtime_ns))
    return sorted(found, key=lambda item: (item.used, item.place.digest))


def quarantine_usage(folder: Folder, onerror: OnError) -> list[Usage]:
    """What is in quarantine, oldest first. What cannot be listed is told to `onerror`."""
    found = []
    for path in folder.quarantined(onerror=onerror):
        with contextlib.suppress(OSError):
            digest = os.path.basename(path).partition(".")[0]
            used = os.stat(path, follow_symlinks=False).st_ctime_ns
            found.append(Usage(Place(QUARANTINE, digest, path), allocated(path), used))
    return found


def prune(
    folder: Folder,
    *,
    max_bytes: int | None,
    older_than: float | None = None,
    exempt: Collection[str] = (),
    dry_run: bool = False,
    onerror: OnError,
) -> PruneReport:
    """Removes entries that were not used for `older_than` seconds, then the oldest until `max_bytes` are kept."""
    now = time.time_ns()
    rejected, entries = quarantine_usage(folder, onerror), usage(folder, onerror)
    total = sum(item.bytes for item in (*rejected, *entries))
    removed: list[Removed] = []
    failed: list[Failure] = []
    spared = 0
    for item in (*rejected, *entries):
        idle = (now - item.used) / 1e9
        over = max_bytes is not None and total > max_bytes
        if not over and (older_than is None or idle <= older_than):
            continue
        place = item.place
        sound = place.target != QUARANTINE
        if sound and place.digest in exempt:
            spared += 1
            continue
        if not dry_run:
            try:
                folder.remove(place.path) if sound else delete(place.path)
            except FileNotFoundError:
                pass  # another process was faster
            except OSError as error:
                failed.append(Failure(place.digest, str(error)))
                continue
        total -= item.bytes
        removed.append(Removed(place.digest, place.target, item.bytes, round(idle, 3)))
    return PruneReport(
        removed=removed,
        failed=failed,
        freed_bytes=sum(item.bytes for item in removed),
        kept=len(entries) - sum(item.target != QUARANTINE for item in removed),
        kept_bytes=total,
        exempt=spared,
        dry_run=dry_run,
    )


def pin(folder: Folder, digests: Iterable[str]) -> None:
    """Keeps entries from eviction, also those that are yet to come. Raises OSError."""
    folder.create()
    mode, file_mode = modes_like(os.stat(folder.root), folder.trust)
    place = f"{folder.root}/{PINS}"
    make_folder(place, mode)
    for digest in digests:
        with contextlib.suppress(FileExistsError):  # pinned, perhaps by another user
            os.close(os.open(f"{place}/{digest}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode))


def unpin(folder: Folder, digests: Iterable[str]) -> None:
    """Takes pins away, those that are there. Raises OSError."""
    for digest in digests:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder.root}/{PINS}/{digest}")


def pinned(folder: Folder, onerror: OnError | None = None) -> set[str]:
    """Digests that are pinned. Where that cannot be read it raises OSError, or tells `onerror`."""
    return set(listing(f"{folder.root}/{PINS}", onerror))
