"""Every entry read and checked; on request built again and compared byte by byte."""

from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from k3dsl.cache.entry import Build, CorruptError, Entry
from k3dsl.cache.key import CompileKey, short
from k3dsl.cache.store import Folder, Place
from k3dsl.cache.trust import UntrustedError
from k3dsl.errors import K3Error

if TYPE_CHECKING:
    from k3dsl.cache.compile_cache import CompileCache

#: The `build` of a key, or None where this machine cannot build it.
BuilderFor: TypeAlias = Callable[[CompileKey], Build | None]


class Finding(msgspec.Struct, frozen=True):
    """One entry and what was found."""

    digest: str
    target: str
    where: str
    reason: str


class VerifyReport(msgspec.Struct, frozen=True):
    """What `verify` found. `clean` if every entry is what was stored and, if asked, what a build makes today."""

    checked: int
    sound: int
    corrupt: list[Finding]
    differs: list[Finding]
    """Built again, other bytes came out."""
    skipped: list[Finding]
    """Not built again, and why."""
    recompiled: int
    clean: bool


def verify(cache: "CompileCache", *, recompile: bool, builder_for: BuilderFor | None) -> VerifyReport:
    """The work of `CompileCache.verify`."""
    if recompile and builder_for is None:
        # The one place where the cache asks for a vendor: by name and late, so that it knows none.
        builder_for = import_module("k3dsl.preparing").builder_for
    corrupt: list[Finding] = []
    differs: list[Finding] = []
    skipped: list[Finding] = []
    sound = recompiled = 0
    for folder in cache.folders():
        for place in list(folder.places()):
            try:
                entry = folder.open(place)
                entry.payload  # noqa: B018 - reads and checks it
            except FileNotFoundError:
                continue  # removed meanwhile
            except (CorruptError, UntrustedError, OSError) as error:
                corrupt.append(Finding(place.digest, place.target, folder.name, str(error)))
                if not isinstance(error, OSError):
                    cache.reject(folder, place.path, error)
                continue
            sound += 1
            if recompile:
                assert builder_for is not None
                finding = _again(entry, folder, place, builder_for)
                recompiled += finding is None or finding[0]
                if finding is not None:
                    (differs if finding[0] else skipped).append(finding[1])
    return VerifyReport(
        checked=sound + len(corrupt),
        sound=sound,
        corrupt=corrupt,
        differs=differs,
        skipped=skipped,
        recompiled=recompiled,
        clean=not corrupt and not differs,
    )


def _again(entry: Entry, folder: Folder, place: Place, builder_for: BuilderFor) -> tuple[bool, Finding] | None:
    """Builds `entry` again. None if the bytes are the same, else whether it was built, and what is the matter."""

    def finding(reason: str) -> Finding:
        return Finding(place.digest, place.target, folder.name, reason)

    try:
        build = builder_for(entry.key)
        built = build(entry.key) if build is not None else None
    except K3Error as error:
        return False, finding(f"not built again: {error}")
    if built is None:
        return False, finding("not built again: nothing here builds this key")
    if built.payload == entry.payload:
        return None
    now = sha256(built.payload).hexdigest()
    return True, finding(
        f"built again it has sha256 {short(now)} and {len(built.payload)} bytes, "
        f"stored are {short(entry.manifest.sha256)} and {entry.manifest.size}"
    )
