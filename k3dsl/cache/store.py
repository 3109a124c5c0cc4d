"""One folder, one format: entries are read, checked, published, quarantined and removed here, and nowhere else.

    <root>/v1/<target>/<aa>/<digest>/{<payload>, manifest.json}      aa: the digest's first two digits

An entry appears by one rename of its whole folder, so it is there with all its files or not at all. The files are the
truth: there is no index, and no time stamp decides whether an entry is valid.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from k3dsl.cache.entry import MANIFEST, MANIFEST_LIMIT, PAYLOAD_LIMIT, SCHEMA, CorruptError, Entry, Manifest
from k3dsl.cache.key import CompileKey, is_digest, short
from k3dsl.cache.lock import Lock
from k3dsl.cache.trust import FOLDER_FLAGS, Trust, UntrustedError, make_folder, modes_like, read_checked

VERSION: Final = f"v{SCHEMA}"
QUARANTINE: Final = "quarantine"
#: Quarantined entries that are kept for a look; older ones go.
QUARANTINE_LIMIT: Final = 16
_TEMP: Final = re.compile(r"\.tmp-[0-9a-f]{16}")
#: A temporary folder younger than this may belong to a writer that has not locked it yet.
_TEMP_SECONDS: Final = 60.0
#: Where locks do not work, age alone tells that a writer is gone.
_TEMP_SECONDS_UNLOCKED: Final = 86400.0
#: Filesystems that cannot fsync a folder say so with one of these.
_NO_FOLDER_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
#: What is told of a folder that cannot be listed, before the walk goes on without it.
OnError: TypeAlias = Callable[[OSError], object]


class Place(NamedTuple):
    """Where an entry stands in a folder."""

    target: str
    digest: str
    path: str


class Folder:
    """A folder of entries. Reading needs no lock and writes nothing; every write is a rename."""

    def __init__(self, root: str | os.PathLike[str], *, name: str = "disk", trust: Trust | None = None) -> None:
        self.root = Path(root)
        self.name = name
        self.trust = trust or Trust()
        self._entries = os.path.join(self.root, VERSION)
        #: What the path of every entry here begins with.
        self.prefix = f"{self._entries}/"

    def path(self, target: str, digest: str) -> str:
        """The folder of an entry, whether it is there or not."""
        return f"{self._entries}/{target}/{digest[:2]}/{digest}"

    def check(self) -> None:
        """Raises OSError if the root is not there, UntrustedError if somebody else may write in it."""
        descriptor = os.open(self.root, FOLDER_FLAGS)
        try:
            self.trust.check(os.fstat(descriptor), str(self.root))
        finally:
            os.close(descriptor)

    def create(self) -> None:
        """Makes the root if it is not there. Raises OSError."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.root.mkdir(mode=0o755)

    def load(self, key: CompileKey) -> Entry | None:
        """The entry of `key`, its stored key compared and its payload checked; None if there is none.

        Raises CorruptError, UntrustedError, or OSError if it cannot be read.
        """
        return self._load(self.path(key.target, key.digest), key.digest, key)

    def open(self, place: Place) -> Entry:
        """The entry at `place`, its payload read and checked on first use.

        Raises CorruptError, UntrustedError or OSError.
        """
        entry = self._load(place.path, place.digest, None)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place.path)
        return entry

    def _load(self, path: str, digest: str, key: CompileKey | None) -> Entry | None:
        try:
            folder = os.open(path, FOLDER_FLAGS | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise CorruptError(f"{path} is not a folder") from None
        try:
            return self._load_from(folder, path, digest, key)
        except (FileNotFoundError, CorruptError) as error:
            # A folder that another process is just removing loses its files one by one: that is absence, no damage.
            if not _same_folder(folder, path):
                return None
            if isinstance(error, FileNotFoundError):
                raise CorruptError(f"{os.path.basename(error.filename or '')} is not there") from None
            raise
        finally:
            os.close(folder)

    def _load_from(self, folder: int, path: str, digest: str, key: CompileKey | None) -> Entry:
        manifest = Manifest.load(read_checked(MANIFEST, folder, self.trust, MANIFEST_LIMIT))
        stored = manifest.compile_key()
        if manifest.digest != digest or (key is not None and stored != key):
            raise CorruptError(f"it holds the key {stored.short}, not {short(digest)}")
        if not path.endswith(f"/{stored.target}/{digest[:2]}/{digest}"):
            raise CorruptError(f"it holds a key of the target {stored.target}")
        if key is None:
            return Entry(stored, manifest, source=self.name, read=lambda: self._payload(path, manifest), path=path)
        payload = read_checked(manifest.payload, folder, self.trust, PAYLOAD_LIMIT)
        manifest.check(payload)
        return Entry(key, manifest, source=self.name, payload=payload, path=path)

    def _payload(self, path: str, manifest: Manifest) -> bytes:
        folder = os.open(path, FOLDER_FLAGS | os.O_NOFOLLOW)
        try:
            payload = read_checked(manifest.payload, folder, self.trust, PAYLOAD_LIMIT)
            manifest.check(payload)
            return payload
        except FileNotFoundError:
            if _same_folder(folder, path):  # else another process is just removing it
                raise CorruptError(f"{manifest.payload} is not there") from None
            raise
        finally:
            os.close(folder)

    def has(self, key: CompileKey) -> bool:
        """Whether an entry of `key` stands here in files to be believed. Reads none: `load` tells what is sound."""
        path = self.path(key.target, key.digest)
        try:
            names = os.listdir(path)
            for name in names:
                self.trust.check(os.stat(f"{path}/{name}", follow_symlinks=False), name)
        except (OSError, UntrustedError):
            return False
        return MANIFEST in names and len(names) > 1

    def touch(self, path: str) -> None:
        """Stamps an entry as used now, for the order of eviction and for nothing else. Never raises."""
        with contextlib.suppress(OSError):
            os.utime(f"{path}/{MANIFEST}")

    def publish(self, manifest: Manifest, payload: bytes) -> bool:
        """Makes the entry appear, whole and durable. False if another process was first: its entry stays.

        Raises OSError (no space, read-only, ...) and then leaves nothing behind.
        """
        self.create()
        folder_mode, file_mode = modes_like(os.stat(self.root), self.trust)
        final = self.path(manifest.key["target"], manifest.digest)
        parent = os.path.dirname(final)
        self._make_folders(parent, folder_mode)
        temp = f"{parent}/.tmp-{unique()}"
        os.mkdir(temp, 0o700)
        lock = Lock(temp)
        try:
            with contextlib.suppress(OSError):
                lock.take()  # tells `sweep` that the writer lives
            _write(f"{temp}/{manifest.payload}", payload, file_mode)
            _write(f"{temp}/{MANIFEST}", manifest.dump(), file_mode)
            os.chmod(temp, folder_mode)
            _sync_folder(temp)
            try:
                os.rename(temp, final)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
            _sync_folder(parent)
            return True
        finally:
            lock.release()
            remove_tree(temp, ignore_errors=True)  # gone already if it was renamed

    def _make_folders(self, path: str, mode: int) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self._make_folders(parent, mode)
        if make_folder(path, mode):
            _sync_folder(parent)

    def places(self, *, onerror: OnError | None = None) -> Iterator[Place]:
        """Every entry that stands here, in the order of target and digest.

        A folder that cannot be listed raises OSError; with `onerror` it is told that and the walk goes on, as os.walk.
        """
        for name in listing(self._entries, onerror):
            for shard in listing(f"{self._entries}/{name}", onerror):
                for digest in listing(f"{self._entries}/{name}/{shard}", onerror):
                    if is_digest(digest) and digest[:2] == shard:
                        yield Place(name, digest, f"{self._entries}/{name}/{shard}/{digest}")

    def paths_of(self, digest: str) -> list[str]:
        """Where entries of `digest` stand: one, unless a key was forged."""
        paths = [self.path(target, digest) for target in listing(self._entries)]
        return [path for path in paths if os.path.lexists(path)]

    def remove(self, path: str) -> None:
        """Takes an entry away at once, then deletes its files. Raises OSError; FileNotFoundError if it is not there."""
        temp = f"{os.path.dirname(path)}/.tmp-{unique()}"
        os.rename(path, temp)
        remove_tree(temp)

    def quarantine(self, path: str, reason: str) -> str | None:
        """Moves an entry out of the way and keeps it for a look; where it is now, None if it could not be moved."""
        try:
            before = os.stat(path, follow_symlinks=False).st_ino
            mode, file_mode = modes_like(os.stat(self.root), self.trust)
            self._make_folders(f"{self.root}/{QUARANTINE}", mode)
            kept = f"{self.root}/{QUARANTINE}/{os.path.basename(path)}.{unique()}"
            os.rename(path, kept)
            moved = os.stat(kept, follow_symlinks=False).st_ino
        except OSError:
            return None
        if moved != before:
            # Another process has quarantined the bad one and published a sound one between our two steps.
            with contextlib.suppress(OSError):
                os.rename(kept, path)
            return None
        with contextlib.suppress(OSError):
            if os.path.isdir(kept):
                _write(f"{kept}/REASON", f"{reason}\n".encode(), file_mode)
            for old in self.quarantined()[:-QUARANTINE_LIMIT]:
                delete(old)
        return kept

    def quarantined(self, *, onerror: OnError | None = None) -> list[str]:
        """What is in quarantine, oldest first. Raises OSError as `places` does."""
        folder = f"{self.root}/{QUARANTINE}"
        found = []
        for name in listing(folder, onerror):
            with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
                found.append((os.stat(f"{folder}/{name}", follow_symlinks=False).st_ctime_ns, f"{folder}/{name}"))
        return [path for _, path in sorted(found)]

    def empty_quarantine(self) -> None:
        """Deletes what is in quarantine. Raises OSError."""
        for path in self.quarantined():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                delete(path)

    def sweep(self) -> int:
        """Removes what killed writers left: temporary folders that nobody holds. Their number. Never raises."""
        removed = 0
        for target in listing(self._entries, ignore):
            for shard in listing(f"{self._entries}/{target}", ignore):
                for name in listing(f"{self._entries}/{target}/{shard}", ignore):
                    if _TEMP.fullmatch(name):
                        removed += _sweep_one(f"{self._entries}/{target}/{shard}/{name}")
        return removed


def unique() -> str:
    """A name that no other process makes."""
    return os.urandom(8).hex()


def remove_tree(path: str, *, ignore_errors: bool = False) -> None:
    """shutil.rmtree, whose import a process that only reads can do without."""
    if ignore_errors and not os.path.lexists(path):
        return
    import shutil

    shutil.rmtree(path, ignore_errors=ignore_errors)


def allocated(path: str) -> int:
    """Bytes of disk that a file or folder takes: allocated blocks, its own and those beneath. 0 if it is not there."""
    try:
        total = os.stat(path, follow_symlinks=False).st_blocks * 512
        with os.scandir(path) as listing:
            for item in listing:
                if item.is_dir(follow_symlinks=False):
                    total += allocated(item.path)
                else:
                    total += item.stat(follow_symlinks=False).st_blocks * 512
    except NotADirectoryError:
        pass
    except OSError:
        return 0
    return total


def listing(path: str, onerror: OnError | None = None) -> list[str]:
    """What is in a folder, nothing if there is none. What else is wrong is raised, or told to `onerror`."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if onerror is None:
            raise
        onerror(error)
        return []


def ignore(error: OSError) -> None:
    """An `onerror` for what may be left undone."""


def _same_folder(descriptor: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _write(path: str, content: bytes, mode: int) -> None:
    """A new file with exactly `content`, on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, FOLDER_FLAGS)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _sweep_one(path: str) -> int:
    try:
        age = time.time() - os.stat(path, follow_symlinks=False).st_mtime
        if age < _TEMP_SECONDS:
            return 0
        lock = Lock(path)
        try:
            if not lock.take():
                return 0
        except OSError:
            if age < _TEMP_SECONDS_UNLOCKED:
                return 0
        finally:
            lock.release()
        remove_tree(path)
    except OSError:
        return 0
    return 1


def delete(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        remove_tree(path)
    else:
        os.unlink(path)
