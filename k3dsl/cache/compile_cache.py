"""The cache that users hold: memory, one folder, layers, and at last a build, each key built once."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final
from weakref import finalize

from k3dsl import env
from k3dsl.cache import session
from k3dsl.cache.arguments import check_bytes, check_key, check_seconds, digest_of, digests_of
from k3dsl.cache.entry import Build, Built, CorruptError, Entry, Manifest, manifest_of
from k3dsl.cache.flight import Flight
from k3dsl.cache.home import Home, find_root
from k3dsl.cache.key import CompileKey, is_digest
from k3dsl.cache.layers import FolderLayer, Layer, open_layers
from k3dsl.cache.memory import Memory, stamp
from k3dsl.cache.session import Counts, InUse, Session
from k3dsl.cache.store import Folder, allocated
from k3dsl.cache.trust import Trust, UntrustedError
from k3dsl.capture import guard
from k3dsl.errors import CacheMiss, ConfigError

# What a process does not need that only reads entries is imported where it is used.
if TYPE_CHECKING:
    from k3dsl.cache.bound import PruneReport
    from k3dsl.cache.bundle import ExportReport, ImportReport
    from k3dsl.cache.explain import Explanation
    from k3dsl.cache.stats import Stats
    from k3dsl.cache.verify import BuilderFor, VerifyReport

#: The slowest kernel builds in seconds; a holder that takes this long hangs.
LOCK_SECONDS: Final = 300.0
#: A process that has stored this part of the bound counts again what others have stored meanwhile.
_PARTS: Final = 64


class CompileCache:
    """Compiled kernels by CompileKey.

    root          the folder; by default K3DSL_CACHE_DIR, else the user's cache folder
    layers        absolute folders and http(s) URLs, asked after it in order; by default K3DSL_CACHE_LAYERS, () for none
    max_bytes     bound of the folder in allocated bytes; by default K3DSL_CACHE_MAX_BYTES, else none
    frozen        sealed from the start: a miss raises CacheMiss
    read_only     writes nothing, anywhere
    allow_shared  believe folders that others own or can write to: their code then runs in this process
    lock_timeout  seconds to wait for another process that builds the same key, before it is built here too

    Whatever is wrong with the folder (not there, read-only, full, damaged, somebody else's), the cache says so once and
    goes on from memory: it never raises for that and never returns a kernel that it did not check. Thread-safe.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        layers: Sequence[str | os.PathLike[str]] | None = None,
        max_bytes: int | None = None,
        frozen: bool = False,
        read_only: bool = False,
        allow_shared: bool = False,
        lock_timeout: float = LOCK_SECONDS,
    ) -> None:
        settings = env.settings()
        self.max_bytes = max_bytes if max_bytes is not None else settings.max_bytes
        check_bytes(self.max_bytes)
        check_seconds("lock_timeout", lock_timeout)
        off = settings.mode == "off"
        self.read_only = read_only or off or settings.mode == "ro"
        self.lock_timeout = lock_timeout
        self._sealed = frozen or settings.mode == "frozen"
        self._counts = Counts()
        self._home = Home(
            find_root(root, settings.cache_dir),
            off=off,
            read_only=self.read_only,
            trust=Trust(shared=allow_shared),
            counts=self._counts,
        )
        self._notices = self._home.notices
        named = settings.layers if layers is None else layers
        self.layers: list[Layer] = [] if off else open_layers(named, shared=allow_shared)
        self._swept = False
        self._usage: int | None = None
        self._added = 0
        self._session = Session(str(self.root) if self._home.writes else None, self._home.trust, self._counts)
        own = self._home.folder.prefix if self._home.folder is not None and self._home.writes else None
        self._memory = Memory(InUse(self._session), own)
        # With the memory and not with the cache: entries that outlive the cache are still in use.
        finalize(self._memory, _leave, self._session, self._memory.used)

    # Looking up

    def get(self, key: CompileKey) -> Entry | None:
        """The entry of `key` from memory, the folder or a layer, checked; None if there is none.

        Raises CacheMiss instead of returning None once the cache is sealed.
        """
        entry = self._find(key)
        if entry is None:
            self._miss(key)
        return entry

    def get_or_build(self, key: CompileKey, build: Build) -> Entry:
        """The entry of `key`; where there is none, `build(key)` makes it, once among all threads and processes.

        What `build` raises comes through, and nothing is stored. Raises CacheMiss once the cache is sealed, and
        CaptureError instead of building inside a stream capture.
        """
        if not callable(build):
            raise ConfigError(f"build={build!r} must be a function that makes a Built of a key")
        entry = self._find(key)
        if entry is not None:
            return entry
        self._miss(key)
        guard(f"building {key!r}")
        found: list[Entry] = []

        def ready() -> bool:
            entry = self._from_disk(key)
            found.extend([entry] if entry else [])
            return entry is not None

        folder = self._home.writable()
        root = str(folder.root) if folder is not None else None
        where = str(self.root)  # not `root`: a folder that turns out unwritable meanwhile must not part the threads
        with Flight(where, root, key.digest, timeout=self.lock_timeout, ready=ready, trust=self.trust) as flight:
            if flight.outcome == "timeout":
                self._counts.add("lock_timeout")
                self._notices.say(
                    "lock_timeout",
                    f"{key!r} was being built elsewhere for more than {self.lock_timeout:g} s: it is built here too",
                )
            elif flight.error is not None:
                self._home.note_lock(flight.error)
            # Another may have built it while we came here; a cache that only reads finds what another one wrote.
            entry = found[0] if found else self._from_memory(key) or self._from_disk(key)
            return entry if entry is not None else self._build(key, build)

    def reread(self, key: CompileKey) -> Entry | None:
        """The entry of `key` as another process would find it, not from memory; None if it would find none.

        What a warm-up asks after a build: that it is stored and sound, not merely that it was built.
        """
        check_key(key)
        return self._from_disk(key) or self._from_layers(key)

    def __contains__(self, key: object) -> bool:
        """Whether `get` would find `key` without asking a server. Counts nothing, checks no payload, never raises."""
        if not isinstance(key, CompileKey):
            return False
        return key.digest in self._memory or any(folder.has(key) for folder in self.folders())

    def seal(self) -> None:
        """From now on a miss raises CacheMiss, with the key and what differs from the nearest entry."""
        self._sealed = True

    @property
    def sealed(self) -> bool:
        """Whether a miss is an error."""
        return self._sealed

    @property
    def root(self) -> "os.PathLike[str] | None":
        """Where the folder is; None where the user has no home and no folder was named."""
        return self._home.root

    @property
    def folder(self) -> Folder | None:
        """The entries of the folder; None where there is no folder or it is not believed."""
        return self._home.folder

    @property
    def degraded(self) -> dict[str, str]:
        """What does not work as it should, by code; empty if all is well."""
        return dict(self._notices.degraded)

    # How a key is found

    def _find(self, key: CompileKey) -> Entry | None:
        check_key(key)
        return self._from_memory(key) or self._from_disk(key) or self._from_layers(key)

    def _from_memory(self, key: CompileKey) -> Entry | None:
        entry = self._memory.get(key.digest)
        if entry is not None:
            self._counts.add("memory_hit")
        return entry

    def _from_disk(self, key: CompileKey) -> Entry | None:
        folder = self._home.folder
        entry = self._load(folder, key) if folder is not None else None
        if entry is None:
            return None
        self._counts.add("disk_hit")
        if self._home.writes and folder is not None and entry.path is not None:
            folder.touch(entry.path)
        return self._memory.put(entry)

    def _from_layers(self, key: CompileKey) -> Entry | None:
        for layer in self.layers:
            entry = self._load(layer, key)
            if entry is not None:
                self._counts.add("layer_hit")
                if layer.remote:
                    entry.path = self._store(entry.manifest, entry.payload)
                self._memory.put(entry)  # in use from here on, so that the bound spares it
                if layer.remote and entry.path is not None:
                    self._enforce(allocated(entry.path))
                return entry
        return None

    def _load(self, place: Folder | Layer, key: CompileKey) -> Entry | None:
        """The entry of `key` there, or None with the reason counted: what is not sound is as good as absent."""
        try:
            return place.load(key)
        except (CorruptError, UntrustedError) as error:
            self.reject(place, place.path(key.target, key.digest) if isinstance(place, Folder) else None, error)
        except OSError as error:
            self._counts.add("read_failed")
            self._notices.say(f"read_failed {place.name}", f"{place.name} cannot be read: {error}")
        return None

    def _miss(self, key: CompileKey) -> None:
        self._counts.add("miss")
        if self._sealed:
            self._session.flush()
            raise CacheMiss(f"the cache is sealed and has no {key!r}\n{self.explain(key)}")

    # How a key is built and stored

    def _build(self, key: CompileKey, build: Build) -> Entry:
        started = time.monotonic()
        try:
            built = build(key)
        except BaseException:
            self._counts.add("build_failed")
            raise
        if not isinstance(built, Built):
            raise ConfigError(f"build({key!r}) returned {type(built).__qualname__}, not k3dsl.cache.Built")
        manifest = manifest_of(key, built, time.monotonic() - started)
        self._counts.add("built")
        path = self._store(manifest, built.payload)
        self._give(manifest, built.payload)
        entry = self._memory.put(Entry(key, manifest, source="built", payload=built.payload, path=path))
        self._session.flush()
        if path is not None:
            self._enforce(allocated(path))
        return entry

    def _store(self, manifest: Manifest, payload: bytes) -> str | None:
        """Publishes an entry in the folder; its path, or None if that did not work or another stands there unsound."""
        outcome: list[bool] = []
        target, digest = manifest.key["target"], manifest.digest

        def publish(folder: Folder) -> None:
            if not self._swept:
                self._swept = True
                folder.sweep()
            outcome.append(folder.publish(manifest, payload))

        folder = self._home.folder
        if not self._home.write(publish) or folder is None:
            return None
        self._counts.add("stored" if outcome[0] else "raced")
        if not outcome[0] and self._load(folder, manifest.compile_key()) is None:
            return None  # what was there first serves nobody: it was damaged, or cannot be read
        return folder.path(target, digest)

    def _give(self, manifest: Manifest, payload: bytes) -> None:
        """Offers what was built here to the layers that take it."""
        for layer in self.layers:
            if layer.takes and not self.read_only:
                try:
                    layer.give(manifest, payload)
                except OSError as error:
                    self._counts.add("give_failed")
                    self._notices.say(f"give_failed {layer.name}", f"{layer.name} does not take entries: {error}")

    def _enforce(self, added: int) -> None:
        """Keeps the folder within its bound after `added` bytes were stored.

        Counts anew only when it may be over, by what is stored here or elsewhere.
        """
        if self.max_bytes is None:
            return
        self._added += added
        if self._usage is not None and self._added <= min(self.max_bytes // _PARTS, self.max_bytes - self._usage):
            return
        try:
            self._usage, self._added = self.prune().kept_bytes, 0
        except OSError as error:  # what was built is built and stored, whatever becomes of the bound
            self._notices.say("prune_failed", f"{self.root} may outgrow its bound: {error}")

    # The folder as a whole

    def explain(self, key: CompileKey) -> "Explanation":
        """Where `key` is, or which entry is nearest and in which fields it differs. Asks no server, counts nothing."""
        from k3dsl.cache import explain

        check_key(key)
        return explain.explain(self, key, in_memory=key.digest in self._memory)

    def entries(self) -> Iterator[Entry]:
        """Every sound entry of the folder, then of the folder layers; payloads are read and checked on first use."""
        from k3dsl.cache import explain

        return explain.entries_of(self)

    def pin(self, keys: Iterable[CompileKey | str]) -> None:
        """Keeps `keys` (or digests) from eviction, also those that are yet to be built. Pins outlive the process."""
        from k3dsl.cache import bound

        digests = digests_of(keys)
        self._home.write(lambda folder: bound.pin(folder, digests))

    def unpin(self, keys: Iterable[CompileKey | str]) -> None:
        """Takes pins away."""
        from k3dsl.cache import bound

        digests = digests_of(keys)
        self._home.write(lambda folder: bound.unpin(folder, digests))

    def prune(
        self, max_bytes: int | None = None, *, older_than: float | None = None, dry_run: bool = False
    ) -> "PruneReport":
        """Evicts what was not used for `older_than` seconds, then the least recently used down to `max_bytes`.

        `max_bytes` is the cache's own bound by default. Pinned entries and those in use stay. Also clears away what
        killed writers left. A cache that must not write reports as with `dry_run`. Raises OSError where it cannot be
        read what is pinned or in use: then nothing goes.
        """
        from k3dsl.cache import bound

        check_bytes(max_bytes)
        if older_than is not None:
            check_seconds("older_than", older_than)
        dry_run = dry_run or not self._home.writes
        limit = self.max_bytes if max_bytes is None else max_bytes
        folder = self._home.folder
        if folder is None:
            return bound.PruneReport([], [], 0, 0, 0, 0, dry_run)
        alive = self._memory.alive()
        if not dry_run:
            folder.sweep()
            stamp(self._memory.used)
        exempt = alive | bound.pinned(folder) | session.in_use(str(folder.root))
        report = bound.prune(
            folder, max_bytes=limit, older_than=older_than, exempt=exempt, dry_run=dry_run, onerror=self.unreadable
        )
        if not dry_run:
            self._counts.add("evicted", sum(item.target != bound.QUARANTINE for item in report.removed))
            self._session.flush()
        return report

    def remove(self, key: CompileKey | str) -> bool:
        """Removes an entry from memory and folder; whether it was there. Raises OSError if its files stay."""
        digest = digest_of(key)
        paths = self._home.folder.paths_of(digest) if self._home.folder is not None else []
        if paths and self.read_only:
            raise OSError(errno.EROFS, "this cache only reads", paths[0])
        removed = self._memory.drop(digest)
        if self._home.folder is not None:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):  # another process was faster: it is gone
                    self._home.folder.remove(path)
                removed = True
        return removed

    def quarantined_keys(self) -> list[CompileKey]:
        """The keys of entries in quarantine, as far as they can be read."""
        from k3dsl.cache import explain

        return [key for folder in self.folders() for key in explain.quarantined_keys(folder)]

    def stats(self) -> "Stats":
        """Counters of all processes by reason, what is stored, and the degraded states: see `Stats`."""
        from k3dsl.cache import stats

        self._session.flush()
        if self._home.writes:
            session.fold(str(self.root))
        return stats.collect(self, self._counts.copy(), self._session.pending())

    def verify(self, recompile: bool = False, *, builder_for: "BuilderFor | None" = None) -> "VerifyReport":
        """Reads and checks every entry; a corrupt one is quarantined. `recompile` also builds each again and compares.

        `builder_for(key)` gives the `build` of a key, or None where it cannot be built here; by default the package's.
        """
        from k3dsl.cache import verify

        return verify.verify(self, recompile=recompile, builder_for=builder_for)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        keys: Iterable[CompileKey | str] | None = None,
        target: str | Sequence[str] | None = None,
    ) -> "ExportReport":
        """Writes one file with the entries of `keys` and of `target` (all by default), each of them checked.

        Raises CacheMiss if one of `keys` is not there, BundleError if nothing is left to write, CorruptError, OSError.
        """
        from k3dsl.cache import bundle

        return bundle.export(self, path, keys=None if keys is None else digests_of(keys), target=target)

    def import_bundle(
        self,
        path: str | os.PathLike[str],
        *,
        target: str | Sequence[str] | None = None,
        sha256: str | None = None,
        accept: Callable[[Manifest], str | None] | None = None,
    ) -> "ImportReport":
        """Takes the entries of a bundle, after every one of them was checked.

        `target` and `accept` (a reason to skip, or None) choose; what this machine's CPU cannot run is skipped too.
        Raises BundleError if the file is not the bundle that was exported (`sha256`: of the whole file), and then
        nothing of it is kept; OSError if it cannot be read or stored.
        """
        from k3dsl.cache import bundle

        if sha256 is not None and not (isinstance(sha256, str) and is_digest(sha256.lower())):
            raise ConfigError(f"sha256={sha256!r} must be 64 hex digits")
        return bundle.import_bundle(self, path, target=target, sha256=sha256, accept=accept)

    # For the modules of this package

    @property
    def trust(self) -> Trust:
        """What is asked of the cache's own folder, and of files that bring host code."""
        return self._home.trust

    def writable_folder(self) -> Folder | None:
        """The folder, made if it was not there; None where nothing may or can be stored."""
        return self._home.writable()

    def folders(self) -> list[Folder]:
        """The folder and the folder layers that are read, in the order in which they are asked."""
        layers = [layer.folder for layer in self.layers if isinstance(layer, FolderLayer) and self._reads(layer)]
        return [*([self._home.folder] if self._home.folder is not None else []), *layers]

    def _reads(self, layer: FolderLayer) -> bool:
        """Whether a lookup would read the layer. Why not is said once."""
        try:
            layer.probe()
        except FileNotFoundError:
            return False
        except UntrustedError as error:
            self._notices.say(f"untrusted {layer.name}", f"{layer.name} is not used: {error}")
            return False
        except OSError as error:
            self._notices.say(f"read_failed {layer.name}", f"{layer.name} cannot be read: {error}")
            return False
        return True

    def sound(self, key: CompileKey) -> bool:
        """Whether the folder holds `key`, payload and all; a corrupt entry is quarantined."""
        return self._home.folder is not None and self._load(self._home.folder, key) is not None

    def unreadable(self, error: OSError) -> None:
        """Says that entries cannot be listed: those are neither counted nor shown nor evicted."""
        self._notices.say("unreadable", f"entries in {error.filename} are passed over: {error.strerror or error}")

    def imported(self, count: int) -> None:
        """Counts entries that a bundle brought, and keeps the bound."""
        self._counts.add("imported", count)
        self._session.flush()
        self._usage = None
        self._enforce(0)

    def reject(self, origin: Folder | Layer, path: str | None, error: CorruptError | UntrustedError) -> None:
        """Counts an entry that is not to be used, and quarantines it where this cache may."""
        reason = "corrupt" if isinstance(error, CorruptError) else "untrusted"
        self._counts.add(reason)
        if reason == "untrusted":
            self._notices.say(f"untrusted {origin.name}", f"an entry of {origin.name} is not used: {error}")
        kept = None
        if isinstance(origin, Folder) and origin is self._home.folder and self._home.writes and path:
            kept = origin.quarantine(path, str(error))
        where = f"kept in {kept}" if kept else "left where it is"
        env.logger().info("compile cache: %s entry of %s not used: %s; %s", reason, origin.name, error, where)
        self._session.flush()


def _leave(log: Session, used: dict[str | None, int]) -> None:
    """What a cache does when it goes, at the latest at the end of the process. A fork leaves that to its parent."""
    if log.mine:
        stamp(used)
    log.close()
