"""Single flight: of all threads and processes that miss one key at once, one builds and the others wait for it.

The wait is bounded, and it ends as soon as the entry is there, whoever put it there. What it cannot do is end in
nothing: where the lock is not to be had in time, or at all, the caller builds for itself.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final
from weakref import WeakValueDictionary

from k3dsl.cache.lock import Lock
from k3dsl.cache.trust import Trust, make_folder, modes_like

LOCKS: Final = "locks"
#: How a filesystem says that it has no locks.
NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
#: Seconds between two looks; a build takes seconds, so half a poll lost is little.
_POLL: Final = 0.02


class _Gate:
    """A thread lock that a weak dictionary can hold."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()


_gates: "WeakValueDictionary[tuple[str, str], _Gate]" = WeakValueDictionary()
_gates_guard = threading.Lock()


def _forget() -> None:
    """A child of fork has none of the threads that are through a gate."""
    global _gates, _gates_guard
    _gates, _gates_guard = WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget)


class Flight:
    """Entered by one thread of one process at a time, for one digest, at most `timeout` seconds after asking.

    where    which cache it is: threads wait for each other by it, also where there is no folder to lock in
    root     the folder whose locks keep other processes out; None where there is none
    outcome  "locked": the lock is held; "ready": `ready()` turned true meanwhile; "timeout"; or "unlocked": there are
             no locks here, `error` says why
    """

    def __init__(
        self, where: str, root: str | None, digest: str, *, timeout: float, ready: Callable[[], bool], trust: Trust
    ) -> None:
        self.outcome = ""
        self.error: OSError | None = None
        self._where = where
        self._root = root
        self._digest = digest
        self._deadline = time.monotonic() + timeout
        self._ready = ready
        self._trust = trust
        self._gate: _Gate | None = None
        self._lock: Lock | None = None

    def __enter__(self) -> "Flight":
        with _gates_guard:
            gate = _gates.setdefault((self._where, self._digest), _Gate())
        try:
            if not gate.lock.acquire(timeout=max(self._deadline - time.monotonic(), 0)):
                self.outcome = "timeout"
                return self
            self._gate = gate
            self.outcome = self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait(self) -> str:
        if self._root is None:
            return "unlocked"
        try:
            folder = f"{self._root}/{LOCKS}"
            if not os.path.isdir(folder):
                make_folder(folder, modes_like(os.stat(self._root), self._trust)[0])
            self._lock = Lock(f"{folder}/{self._digest}.lock", create=True)
            while not self._lock.take():
                if self._ready():
                    return "ready"
                if time.monotonic() > self._deadline:
                    return "timeout"
                time.sleep(_POLL)
        except OSError as error:
            self.error = error
            return "unlocked"
        return "locked"

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()
        if self._gate is not None:
            self._gate.lock.release()
            self._gate = None
