"""Whether a folder may be believed: a kernel loaded from where others can write is their code in our process.

What is checked is the open file (owner and mode of the descriptor that is then read), never a path looked at before.
"""

import errno
import os
import stat
from typing import Final

from k3dsl.errors import K3Error

#: A read that would follow a link, wait for a pipe or leak into a child is not one that the cache makes.
READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(K3Error):
    """A file or folder that somebody else may have written. The message says why."""


class Trust:
    """Who may own what is read, and whether others may write beside it.

    Always believed: this user and root. `owners` adds uids; `shared` believes every owner and mode, for a folder that a
    group shares and trusts.
    """

    __slots__ = ("owners", "shared")

    def __init__(self, *, owners: frozenset[int] = frozenset(), shared: bool = False) -> None:
        self.owners = owners | {0, os.geteuid()}
        self.shared = shared

    def check(self, status: os.stat_result, what: str) -> None:
        """Raises UntrustedError if `what`, whose descriptor has `status`, is not to be believed."""
        if self.shared:
            return
        if status.st_uid not in self.owners:
            raise UntrustedError(f"{what} belongs to uid {status.st_uid}, not to uid {os.geteuid()}: chown it")
        if status.st_mode & _OTHERS_WRITE:
            raise UntrustedError(f"{what} can be written by others (mode {status.st_mode & 0o7777:o}): chmod go-w it")


def read_checked(name: str, folder: int, trust: Trust, limit: int) -> bytes:
    """The bytes of the regular file `name` in the open folder, after a look at the very descriptor that is read.

    Raises UntrustedError, for a link too, or OSError.
    """
    try:
        descriptor = os.open(name, READ_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedError(f"{name} is a link, not a regular file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{name} is not a regular file")
        trust.check(status, name)
        if status.st_size > limit:
            raise UntrustedError(f"{name} has {status.st_size} bytes, more than the {limit} that any entry has")
        # One byte more than it has: a read that fills the buffer of st_size + 1 means that it grew meanwhile.
        pieces, left = [], status.st_size + 1
        while left and (piece := os.read(descriptor, left)):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def modes_like(folder: os.stat_result, trust: Trust) -> tuple[int, int]:
    """Modes for new folders and files beneath `folder`: as readable as it is, whatever the umask says."""
    others = 0o077 if trust.shared else 0o055
    group = folder.st_mode & stat.S_ISGID
    return 0o700 | folder.st_mode & others | group, 0o600 | folder.st_mode & others & 0o066


def make_folder(path: str, mode: int) -> bool:
    """Makes a folder with exactly `mode`, whatever the umask says; one that is there is left as it is, and False."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return False
    os.chmod(path, mode)
    return True
