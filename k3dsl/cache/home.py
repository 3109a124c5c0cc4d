"""The user's own folder: where it is, whether it is believed, and what becomes of it when writing fails.

Nothing that is wrong with it may stop a run. What is wrong is said once, and the cache goes on without.
"""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from k3dsl.cache.flight import NO_LOCKS
from k3dsl.cache.notice import Notices
from k3dsl.cache.session import Counts
from k3dsl.cache.store import Folder
from k3dsl.cache.trust import Trust, UntrustedError
from k3dsl.errors import ConfigError

#: Errors that no later write will be spared: no use in trying again.
_FINAL: Final = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP)
_MEMORY: Final = "kernels stay in memory"


class _Turn:
    """A lock for one thread at a time. The same thread may come again, from a log or signal handler; a child of fork,
    which has none of its parent's threads, begins anew."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    def take(self) -> "threading.RLock":
        """The lock, for a `with`."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
        return self._lock


class Home:
    """The folder that a cache reads first and writes to.

    root     where it is, None where nobody knows
    folder   its entries; None where there is no folder or it is not believed
    writes   whether entries are stored there
    """

    def __init__(self, root: Path | None, *, off: bool, read_only: bool, trust: Trust, counts: Counts) -> None:
        self.root = root
        self.trust = trust
        self.notices = Notices(str(root))
        self._counts = counts
        self.folder: Folder | None = None
        if off:
            pass
        elif root is None:
            self.notices.say(
                "no_folder", f"no home folder was found: {_MEMORY}. Set K3DSL_CACHE_DIR to a folder that can be written"
            )
        else:
            folder = Folder(root, trust=trust)
            self.folder = folder if self._believed(folder) else None
        self.writes = self.folder is not None and not read_only
        self._prepared = False
        self._preparing = _Turn()

    def writable(self) -> Folder | None:
        """The folder, made if it was not there; None where nothing may or can be stored."""
        if self.writes and not self._prepared:
            with self._preparing.take():  # a thread that comes second waits for what the first finds out
                self._prepare()
        return self.folder if self.writes else None

    def _prepare(self) -> None:
        if self._prepared or self.folder is None:
            return
        try:
            self.folder.create()
        except OSError as error:
            self.note_write(error)
            self.writes = False
        # Whoever was faster in making it must be somebody whom we believe.
        if not self._believed(self.folder):
            self.folder, self.writes = None, False
        self._prepared = True

    def write(self, action: Callable[[Folder], None]) -> bool:
        """Does `action` on the folder; whether that worked. What goes wrong is said once."""
        folder = self.writable()
        if folder is None:
            return False
        try:
            action(folder)
        except OSError as error:
            self.note_write(error)
            return False
        return True

    def note_write(self, error: OSError) -> None:
        """Says that the folder cannot be written; if for good, it is not tried again."""
        self._counts.add("write_failed")
        if error.errno in _FINAL:
            self.writes = False
        self.notices.say(
            "write_failed",
            f"{self.root} cannot be written ({error.strerror or error}): what this process builds stays in memory. "
            "Free space there, or set K3DSL_CACHE_DIR to a folder that can be written",
        )

    def note_lock(self, error: OSError) -> None:
        """Says that no lock is to be had there."""
        refused = error.errno == errno.EACCES and str(error.filename).endswith(".lock")
        if error.errno in NO_LOCKS:
            why, todo = f"{self.root} is on a filesystem without locks", "Set K3DSL_CACHE_DIR to a local folder"
        elif refused and os.access(self.root or "", os.W_OK | os.X_OK):
            # Of another user, who made it for himself alone: it says nothing of the entries.
            why, todo = f"{error.filename} cannot be opened", "chmod it like the folder"
        else:
            self.note_write(error)
            return
        self._counts.add("lock_unsupported")
        self.notices.say(
            "lock_unsupported", f"{why} ({error.strerror or error}): several processes may build one kernel. {todo}"
        )

    def _believed(self, folder: Folder) -> bool:
        try:
            folder.check()
        except FileNotFoundError:
            return True  # made when something is stored
        except UntrustedError as error:
            self.notices.say("untrusted", f"{error}, or set K3DSL_CACHE_DIR to a folder of yours; {_MEMORY}")
            return False
        except OSError as error:
            self.notices.say(
                "no_folder",
                f"{self.root} cannot be used ({error.strerror or error}): {_MEMORY}. Set K3DSL_CACHE_DIR to a folder",
            )
            return False
        return True


def find_root(given: str | os.PathLike[str] | None, configured: Path | None) -> Path | None:
    """The folder to use: what was given, what is configured, the user's cache folder; None if he has no home."""
    if given is not None:
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise ConfigError(f"root={given!r} must be the path of a folder, or None for the user's cache folder")
        return Path(given).expanduser().absolute()
    if configured is not None:
        return configured
    import platformdirs

    try:
        path = Path(platformdirs.user_cache_dir("k3dsl", appauthor=False))
    except (OSError, RuntimeError, KeyError):
        return None
    return path if path.is_absolute() else None  # "~/.cache" where nobody knows the home: never the current folder
