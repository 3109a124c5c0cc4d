"""Kernel locks: they die with their holder, whatever kills it.

`flock` itself and not the `filelock` package: where a filesystem has no locks, that package falls back to a marker
file, which outlives a holder that dies and then stops everybody. Here such a filesystem is an error for the caller to
handle. A lock file is never unlinked: two processes could hold "the" lock on two files of one name.
"""

import contextlib
import errno
import fcntl
import os
from typing import Final

#: Somebody else holds it. EACCES is how some network filesystems say so.
_HELD: Final = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)


class Lock:
    """An exclusive lock on a file or folder that is there, or on a file that it makes (`create=True`).

    Such a file is as open as its folder, whatever the umask says: all who may make one there may take it.
    """

    __slots__ = ("_create", "_descriptor", "_flags", "path")

    def __init__(self, path: str, *, create: bool = False) -> None:
        self.path = path
        self._create = create
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
        self._descriptor = -1

    def take(self) -> bool:
        """Takes the lock without waiting; whether it is held now. Raises OSError where there are no locks."""
        if self._descriptor < 0:
            mode = os.stat(os.path.dirname(self.path)).st_mode & 0o666 if self._create else 0
            self._descriptor = os.open(self.path, self._flags, mode)
            if self._create and os.fstat(self._descriptor).st_nlink == 1:  # not another name of another file
                with contextlib.suppress(OSError):  # another user's: he has seen to it
                    os.fchmod(self._descriptor, mode)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            self.release()
            raise
        return True

    def release(self) -> None:
        """Lets go. Never raises; safe to call again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
