"""What a process leaves behind while it runs: its counters, and the entries that it uses.

Each process appends to a file of its own, `<root>/sessions/<16 hex>.log`, on which it holds a lock for as long as it
lives: no two processes write one file, and whether its writer lives can be asked of the kernel. Files of the dead are
folded into `totals.json`. All of this may be lost or missing without any harm but to the figures.

Lines: "+digest" uses an entry, "-digest" no longer does, "{...}" counts since the last such line.
"""

import contextlib
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from k3dsl.cache.lock import Lock
from k3dsl.cache.trust import Trust, modes_like

SESSIONS: Final = "sessions"
_TOTALS: Final = "totals.json"
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


class Session:
    """This process's file. `root=None` keeps none, as a cache that must not write does."""

    def __init__(self, root: str | None, trust: Trust, counts: Counts | None = None) -> None:
        self.counts = counts or Counts()
        self._written: Counter[str] = Counter()
        self._listed: set[str] = set()
        self._root = root
        self._trust = trust
        self._file = -1
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

    def use(self, digest: str) -> None:
        """Lists an entry as in use by this process, unless it is listed already."""
        if digest in self._listed and self.mine:
            return
        self._after_fork()
        with self._guard:
            self._listed.add(digest)
            self._append(f"+{digest}\n")

    def drop(self, alive: set[str]) -> None:
        """Takes every entry that is not in `alive` off the list."""
        self._after_fork()
        with self._guard:
            gone = self._listed - alive
            if gone:
                self._listed -= gone
                self._append("".join(f"-{digest}\n" for digest in sorted(gone)))

    def flush(self) -> None:
        """Appends what was counted since the last time."""
        self._after_fork()
        with self._guard:
            now = self.counts.copy()
            news = now - self._written
            if news and self._append(json.dumps(news, sort_keys=True) + "\n"):
                self._written = now

    def close(self) -> None:
        """The last flush; the file is then one of the dead, for anybody to fold."""
        if self._pid != os.getpid():
            return
        self.flush()
        self._let_go()
        if self._root and len(_names(self._root)) > _FOLD_ABOVE:
            fold(self._root)

    def _append(self, lines: str) -> bool:
        """Whether the file has them now."""
        if self._root is None or not os.path.isdir(self._root):
            return False  # the folder is made when something is stored
        try:
            if self._file < 0:
                self._open()
            os.write(self._file, lines.encode())  # one write with O_APPEND: a killed process leaves whole lines
        except OSError:
            self._root = None  # no figures from this process, then
            return False
        return True

    def _open(self) -> None:
        assert self._root is not None
        folder_mode, file_mode = modes_like(os.stat(self._root), self._trust)
        folder = f"{self._root}/{SESSIONS}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, folder_mode)
            os.chmod(folder, folder_mode)
        for _ in range(8):
            path = f"{folder}/{secrets.token_hex(8)}.log"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(path, flags, file_mode)
            self._lock = Lock(path)
            try:
                held = self._lock.take()
            except OSError:
                return  # no locks here: age decides
            if held and os.fstat(self._file).st_nlink:
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

    def _after_fork(self) -> None:
        """A forked child counts from zero in a file of its own; its parent goes on with the old one."""
        if self._pid != os.getpid():
            self._let_go()
            self._pid, self._guard = os.getpid(), threading.RLock()
            self._written.clear()
            self._listed.clear()


def totals(root: str) -> Counter[str]:
    """The counts of all processes, living and dead, as far as they have been written."""
    folded, done = _read_totals(root)
    for name in _names(root):
        if name not in done:
            folded += _read(f"{root}/{SESSIONS}/{name}")[0]
    return folded


def in_use(root: str) -> set[str]:
    """Digests that a living process uses."""
    found: set[str] = set()
    for name in _names(root):
        path = f"{root}/{SESSIONS}/{name}"
        if not _dead(path):
            found |= _read(path)[1]
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
                    counts += _read(f"{root}/{SESSIONS}/{name}")[0]
            # The names go in with the counts: if we die before the files are gone, nobody adds them twice.
            content = json.dumps({"counts": counts, "folded": dead}, sort_keys=True)
            temp = f"{root}/{SESSIONS}/{_TOTALS}.{secrets.token_hex(8)}"
            descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, content.encode())
            finally:
                os.close(descriptor)
            os.replace(temp, f"{root}/{SESSIONS}/{_TOTALS}")
            for name in dead:
                os.unlink(f"{root}/{SESSIONS}/{name}")
        finally:
            guard.release()


def _names(root: str) -> list[str]:
    try:
        return [name for name in os.listdir(f"{root}/{SESSIONS}") if name.endswith(".log")]
    except OSError:
        return []


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
        with open(f"{root}/{SESSIONS}/{_TOTALS}", encoding="utf-8") as file:
            content = json.load(file)
        return Counter({str(name): int(count) for name, count in content["counts"].items()}), list(content["folded"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Counter(), []


def _read(path: str) -> tuple[Counter[str], set[str]]:
    """The counts of a session and what it uses. A line that cannot be read is skipped."""
    counts: Counter[str] = Counter()
    used: set[str] = set()
    for line in _lines(path):
        if line.startswith("+"):
            used.add(line[1:])
        elif line.startswith("-"):
            used.discard(line[1:])
        else:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                counts.update({name: int(count) for name, count in json.loads(line).items()})
    return counts, used


def _lines(path: str) -> Iterator[str]:
    with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            yield line.rstrip("\n")
