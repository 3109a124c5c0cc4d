"""What a process leaves behind while it runs: its counters, and the entries that it uses.

Each process appends to a file of its own, `<root>/sessions/<16 hex>.log`, on which it holds a lock for as long as it
lives: no two processes write one file, and whether its writer lives can be asked of the kernel. Files of the dead are
folded into `totals.json`. All of this may be lost or missing without any harm but to the figures.

`<name>.log` has a line of JSON for what was counted since the line before. `<name>.use` is a table of the digests that
are in use, 32 bytes each, zeros where none is. It changes with every hit from memory, which has no time for a system
call: so it is mapped, with its blocks allocated before, lest a full disk be met in the middle of a store.
"""

import contextlib
import mmap
import os
import threading
import time
from collections import Counter
from typing import Final

import msgspec

from k3dsl.cache.lock import Lock
from k3dsl.cache.store import OnError, ignore, listing
from k3dsl.cache.trust import Trust, make_folder, modes_like

SESSIONS: Final = "sessions"
_TOTALS: Final = "totals.json"
#: Bytes of a digest; digests that a process may list; what stands where none is listed.
_SLOT: Final = 32
_SLOTS: Final = 2048
_NONE: Final = bytes(_SLOT)
#: Where locks do not work, a session that wrote nothing for a day is taken for dead.
_UNLOCKED_SECONDS: Final = 86400.0
#: Files of the dead that may lie about before a process folds them on its way out.
_FOLD_ABOVE: Final = 32


class Counts:
    """What one cache did, by reason. Thread-safe; a forked child counts from zero."""

    __slots__ = ("_guard", "_pid", "values")

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        self._guard = threading.Lock()
        self._pid = os.getpid()

    def add(self, name: str, by: int = 1) -> None:
        """Counts."""
        if self._pid != os.getpid():
            self._pid, self._guard = os.getpid(), threading.Lock()
            self.values.clear()
        with self._guard:
            self.values[name] += by

    def copy(self) -> Counter[str]:
        """The counts as they are now."""
        self.add("", 0)
        with self._guard:
            return +self.values


class InUse:
    """The table of a process: which entries somebody in it holds. To be called by one thread at a time."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._pid = os.getpid()

    def hold(self, digest: str) -> None:
        """Lists an entry."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._slots.clear()
            self._free.clear()
        table = self._session.table()
        slot = self._free.pop() if self._free else len(self._slots)
        if table is not None and slot < _SLOTS:
            self._slots[digest] = slot
            table[slot * _SLOT : (slot + 1) * _SLOT] = bytes.fromhex(digest)

    def release(self, digest: str) -> None:
        """Takes an entry off the list, if it is on it."""
        slot = self._slots.pop(digest, None)
        if slot is None or self._pid != os.getpid():
            return
        self._free.append(slot)
        table = self._session.table()
        if table is not None:
            table[slot * _SLOT : (slot + 1) * _SLOT] = _NONE


class Session:
    """This process's file. `root=None` keeps none, as a cache that must not write does."""

    def __init__(self, root: str | None, trust: Trust, counts: Counts | None = None) -> None:
        self.counts = counts or Counts()
        self._written: Counter[str] = Counter()
        self._root = root
        self._trust = trust
        self._file = -1
        self._table: mmap.mmap | None = None
        self._lock: Lock | None = None
        self._pid = os.getpid()
        self._guard = threading.RLock()

    def pending(self) -> Counter[str]:
        """Counts that no file has: those since the last flush, all of them where none is kept."""
        self._after_fork()
        with self._guard:
            return self.counts.copy() - self._written

    @property
    def mine(self) -> bool:
        """Whether this is the process that began it, not a fork of it."""
        return self._pid == os.getpid()

    def table(self) -> mmap.mmap | None:
        """Where this process lists what is in use; None where it cannot."""
        if self._table is not None and self._pid == os.getpid():
            return self._table
        self._after_fork()
        with self._guard:
            return self._table if self._ready() else None

    def flush(self) -> None:
        """Appends what was counted since the last time."""
        self._after_fork()
        with self._guard:
            now = self.counts.copy()
            news = now - self._written
            if news and self._append(msgspec.json.encode(news).decode() + "\n"):
                self._written = now

    def close(self) -> None:
        """The last flush; the file is then one of the dead, for anybody to fold."""
        if self._pid != os.getpid():
            return
        self.flush()
        self._let_go()
        if self._root and len(_names(self._root)) > _FOLD_ABOVE:
            fold(self._root)

    def _append(self, line: str) -> bool:
        """Whether the file has it now."""
        if not self._ready():
            return False
        try:
            os.write(self._file, line.encode())  # one write with O_APPEND: a killed process leaves whole lines
        except OSError:
            self._root = None  # no figures from this process, then
            return False
        return True

    def _ready(self) -> bool:
        """Whether the files are open."""
        if self._root is None:
            return False
        if self._file < 0:
            if not os.path.isdir(self._root):
                return False  # the folder is made when something is stored
            try:
                self._open()
            except OSError:
                self._root = None
                return False
        return True

    def _open(self) -> None:
        assert self._root is not None
        folder_mode, file_mode = modes_like(os.stat(self._root), self._trust)
        folder = f"{self._root}/{SESSIONS}"
        make_folder(folder, folder_mode)
        for _ in range(8):
            path = f"{folder}/{os.urandom(8).hex()}"
            self._file = _new(f"{path}.log", os.O_WRONLY | os.O_APPEND, file_mode)
            self._lock = Lock(f"{path}.log")
            try:
                held = self._lock.take()
            except OSError:
                held = True  # no locks here: age decides
            if held and os.fstat(self._file).st_nlink:
                self._table = _map(_new(f"{path}.use", os.O_RDWR, file_mode))
                return
            self._let_go()  # a process that folds took it for dead before it was locked
        raise OSError("no session file could be kept")

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._table is not None:
            self._table.close()
            self._table = None

    def _after_fork(self) -> None:
        """A forked child counts from zero in a file of its own; its parent goes on with the old one."""
        if self._pid != os.getpid():
            self._let_go()
            self._pid, self._guard = os.getpid(), threading.RLock()
            self._written.clear()


def totals(root: str) -> Counter[str]:
    """The counts of all processes, living and dead, as far as they have been written."""
    folded, done = _read_totals(root)
    for name in _names(root):
        if name not in done:
            folded += _read(f"{root}/{SESSIONS}/{name}")
    return folded


def in_use(root: str) -> set[str]:
    """Digests that a living process uses. Raises OSError where that cannot be read: it may be any."""
    found: set[str] = set()
    for name in _names(root, None):
        path = f"{root}/{SESSIONS}/{name}"
        if not _dead(path):
            found |= _table(path)
    return found


def fold(root: str) -> None:
    """Adds the files of dead processes to the totals, removes them. Never raises; nothing if another is at it."""
    with contextlib.suppress(OSError):
        guard = Lock(f"{root}/{SESSIONS}/totals.lock", create=True)
        try:
            if not guard.take():
                return
            counts, done = _read_totals(root)
            dead = [name for name in _names(root) if name in done or _dead(f"{root}/{SESSIONS}/{name}")]
            for name in dead:
                if name not in done:
                    counts += _read(f"{root}/{SESSIONS}/{name}")
            # The names go in with the counts: if we die before the files are gone, nobody adds them twice.
            content = msgspec.json.encode({"counts": counts, "folded": dead})
            temp = f"{root}/{SESSIONS}/{_TOTALS}.{os.urandom(8).hex()}"
            mode = os.stat(f"{root}/{SESSIONS}").st_mode & 0o666  # whoever may write there folds next time
            try:
                with os.fdopen(_new(temp, os.O_WRONLY, mode), "wb") as file:  # it writes all, or raises
                    file.write(content)
                os.replace(temp, f"{root}/{SESSIONS}/{_TOTALS}")
            except BaseException:
                os.unlink(temp)
                raise
            for name in dead:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_use_of(f"{root}/{SESSIONS}/{name}"))
                os.unlink(f"{root}/{SESSIONS}/{name}")
        finally:
            guard.release()


def _names(root: str, onerror: OnError | None = ignore) -> list[str]:
    return [name for name in listing(f"{root}/{SESSIONS}", onerror) if name.endswith(".log")]


def _new(path: str, flags: int, mode: int) -> int:
    """Opens a new file with exactly `mode`, whatever the umask says."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, mode)
    return descriptor


def _dead(path: str) -> bool:
    lock = Lock(path)
    try:
        return lock.take()
    except FileNotFoundError:
        return True
    except OSError:
        try:
            return time.time() - os.stat(path).st_mtime > _UNLOCKED_SECONDS
        except OSError:
            return True
    finally:
        lock.release()


def _read_totals(root: str) -> tuple[Counter[str], list[str]]:
    try:
        with open(f"{root}/{SESSIONS}/{_TOTALS}", "rb") as file:
            content = msgspec.json.decode(file.read())
        return Counter({str(name): int(count) for name, count in content["counts"].items()}), list(content["folded"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Counter(), []


def _read(path: str) -> Counter[str]:
    """The counts of a session. A line that cannot be read is skipped."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                counts.update({name: int(count) for name, count in msgspec.json.decode(line).items()})
    return counts


def _table(path: str) -> set[str]:
    """What a session uses. Raises OSError where that cannot be read."""
    with contextlib.suppress(FileNotFoundError), open(_use_of(path), "rb") as file:
        content = file.read()
        slots = (content[at : at + _SLOT] for at in range(0, len(content), _SLOT))
        return {slot.hex() for slot in slots if len(slot) == _SLOT and any(slot)}
    return set()


def _map(descriptor: int) -> mmap.mmap | None:
    """The table, mapped; None where its blocks cannot be had. Closes the descriptor."""
    try:
        os.posix_fallocate(descriptor, 0, _SLOT * _SLOTS)
        return mmap.mmap(descriptor, _SLOT * _SLOTS)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _use_of(path: str) -> str:
    return path.removesuffix(".log") + ".use"
