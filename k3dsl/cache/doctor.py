"""What `k3dsl doctor` says of the cache: each thing that it needs is tried, not guessed."""

import contextlib
import errno
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k3dsl import env
from k3dsl.cache.bound import PINS
from k3dsl.cache.flight import LOCKS
from k3dsl.cache.layers import FolderLayer, Layer
from k3dsl.cache.lock import Lock
from k3dsl.cache.session import SESSIONS
from k3dsl.cache.store import QUARANTINE, VERSION, unique
from k3dsl.cache.trust import UntrustedError
from k3dsl.errors import ConfigError

if TYPE_CHECKING:
    from k3dsl.cache.compile_cache import CompileCache

#: Below this a build of all kernels may not fit, with room for what else writes there.
_LOW_SPACE: Final = 256 * 2**20
_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "glusterfs")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it stands (ok, info, warn, bad), what was found, what to do about it."""

    name: str
    status: str
    found: str
    todo: str = ""


def findings(cache: "CompileCache | None" = None) -> list[Finding]:
    """Looks at the folder, its layers and the variables that name them: those of `cache`, by default the user's."""
    found = [
        Finding("environment", "warn", f"{name} is not a variable of k3dsl", f"misspelt? {', '.join(_names())}")
        for name in env.unknown()
    ]
    try:
        settings = env.settings()
        if cache is None:
            from k3dsl.cache.compile_cache import CompileCache

            cache = CompileCache()
    except ConfigError as error:
        return [*found, Finding("environment", "bad", str(error).replace("\n", ""), "correct or unset it")]
    if settings.mode is not None:
        what = {"off": "nothing is read or stored", "ro": "nothing is stored", "frozen": "a miss is an error"}
        found.append(Finding("cache mode", "info", f"K3DSL_CACHE={settings.mode}: {what[settings.mode]}"))
    if cache.root is None:
        found.append(Finding("cache folder", "bad", "no home folder was found", "set K3DSL_CACHE_DIR"))
    else:
        found += _folder(Path(cache.root), cache)
    return found + [_layer(layer) for layer in cache.layers]


def _names() -> list[str]:
    return [option.name for option in env.TABLE]


def _folder(root: Path, cache: "CompileCache") -> list[Finding]:
    place = _existing(root)
    try:
        status = os.stat(place)
    except OSError as error:
        return [Finding("cache folder", "bad", f"{root}: {error.strerror}", "set K3DSL_CACHE_DIR")]
    kind = filesystem(place)
    owner = f"{_user(status.st_uid)}, mode {status.st_mode & 0o7777:o}, {kind}"
    if place != root:
        found = [Finding("cache folder", "info", f"{root} is made at the first build (in {place}: {owner})")]
    elif not root.is_dir():
        return [Finding("cache folder", "bad", f"{root} is not a folder", "set K3DSL_CACHE_DIR to a folder")]
    else:
        found = [Finding("cache folder", "ok", f"{root} ({owner})")]
        try:
            cache.trust.check(status, str(root))
        except UntrustedError as error:
            found[0] = Finding("cache folder", "bad", str(error), "or set K3DSL_CACHE_DIR to a folder of yours")
    if kind in _NETWORK:
        found.append(Finding("cache filesystem", "info", f"{kind} is shared by machines; a local one is faster"))
    found.append(_space(place))
    if cache.read_only:
        found.append(Finding("cache writes", "info", "off: read only"))
    elif not os.access(place, os.W_OK | os.X_OK):
        found.append(Finding("cache writes", "bad", f"{place} cannot be written", "set K3DSL_CACHE_DIR"))
    elif place == root:
        found += [_writes(root), _locks(root)]
    if place == root and cache.folder is not None:
        found.append(_contents(cache))
    return found


def _space(place: Path) -> Finding:
    try:
        facts = os.statvfs(place)
    except OSError as error:
        return Finding("cache space", "warn", f"unknown: {error.strerror}")
    free = facts.f_bavail * facts.f_frsize
    if facts.f_files and not facts.f_favail:
        return Finding("cache space", "bad", "no inodes are left", "free some, or set K3DSL_CACHE_DIR")
    if free < _LOW_SPACE:
        return Finding("cache space", "bad", f"{_size(free)} free", "free space, or set K3DSL_CACHE_DIR")
    return Finding("cache space", "ok", f"{_size(free)} free")


def _writes(root: Path) -> Finding:
    """Looks for folders that are closed to us, then does what a publication does: a folder, a file, fsync, rename."""
    patterns = (VERSION, f"{VERSION}/*", f"{VERSION}/*/*", QUARANTINE, LOCKS, SESSIONS, PINS)
    folders = (path for pattern in patterns for path in root.glob(pattern) if os.path.isdir(path))
    closed = [path for path in folders if not os.access(path, os.R_OK | os.W_OK | os.X_OK)]
    if closed:
        more = f", nor can {len(closed) - 1} more below {root}" if len(closed) > 1 else ""
        return Finding("cache writes", "bad", f"{closed[0]} cannot be read and written{more}", f"chown -R {root}")
    temp, final = (f"{root}/.doctor-{unique()}" for _ in range(2))
    try:
        try:
            os.mkdir(temp, 0o700)
            descriptor = os.open(f"{temp}/file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(descriptor, bytes(64 * 1024))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temp, final)
        finally:
            for path in (temp, final):
                with contextlib.suppress(OSError):
                    os.unlink(f"{path}/file")
                with contextlib.suppress(OSError):
                    os.rmdir(path)
    except OSError as error:
        return Finding("cache writes", "bad", f"fail: {error.strerror}", "free space, or set K3DSL_CACHE_DIR")
    return Finding("cache writes", "ok", "work: write, fsync, rename")


def _locks(root: Path) -> Finding:
    path = f"{root}/.doctor-{unique()}"
    first, second = Lock(path, create=True), Lock(path)
    try:
        held = first.take()
        if held and second.take():
            raise OSError(errno.ENOLCK, "two hold one lock")
    except OSError as error:
        text = f"do not work ({error.strerror}): several processes may build one kernel"
        return Finding("cache locks", "warn", text, "set K3DSL_CACHE_DIR to a local folder")
    finally:
        first.release()
        second.release()
        with contextlib.suppress(OSError):
            os.unlink(path)  # nobody else knows this one
    return Finding("cache locks", "ok", "work")


def _contents(cache: "CompileCache") -> Finding:
    try:
        stats = cache.stats()
    except OSError as error:
        return Finding("cache entries", "bad", f"cannot be read: {error}", "chown it, or set K3DSL_CACHE_DIR")
    if "unreadable" in stats["degraded"]:
        return Finding("cache entries", "bad", stats["degraded"]["unreadable"], "chown it, or set K3DSL_CACHE_DIR")
    text = f"{stats['entries']} entries, {_size(stats['bytes'])}"
    if cache.max_bytes is not None:
        text += f" of {_size(cache.max_bytes)}"
    if stats["quarantined"]:
        text += f", {stats['quarantined']} quarantined (corrupt so far: {stats['corrupt']})"
        advice = "a disk that damages files? look in quarantine/; what lies there serves nobody and may be removed"
        return Finding("cache entries", "warn", text, advice)
    return Finding("cache entries", "ok", text)


def _layer(layer: Layer) -> Finding:
    name = "cache layer"
    try:
        if isinstance(layer, FolderLayer):
            layer.probe()
            return Finding(name, "ok", f"{layer.name}: {sum(1 for _ in layer.folder.places())} entries, read in place")
        layer.probe()
    except FileNotFoundError:
        return Finding(name, "warn", f"{layer.name} is not there", "mount it, or take it off K3DSL_CACHE_LAYERS")
    except (OSError, UntrustedError) as error:
        return Finding(name, "warn", f"{layer.name}: {error}", "mend it, or take it off K3DSL_CACHE_LAYERS")
    return Finding(name, "ok", f"{layer.name}: answers{', takes what is built here' if layer.takes else ''}")


def filesystem(path: Path) -> str:
    """The type of the filesystem that holds `path`."""
    best, kind = "", "unknown filesystem"
    text = os.path.realpath(path)
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        for line in file:
            _, where, type_, *_ = line.split(" ")
            where = where.replace("\\040", " ")
            inside = text == where or text.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best):
                best, kind = where, type_
    return kind


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
