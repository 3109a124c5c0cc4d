"""Layers: where else an entry may be found, after the user's own folder and before a build.

A folder layer is read in place: no lock, no write, no copy. An HTTP layer is fetched from, checked, and copied into the
user's folder. `http+rw://` and `https+rw://` also give it what was built here; every other layer is only read.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from k3dsl.cache.entry import Entry, Manifest
from k3dsl.cache.key import CompileKey
from k3dsl.cache.store import Folder
from k3dsl.cache.trust import Trust
from k3dsl.env import redacted
from k3dsl.errors import ConfigError


class Layer(Protocol):
    """What the cache asks of a layer."""

    name: str
    #: Whether what it gives is to be copied into the user's folder.
    remote: bool
    #: Whether it takes what was built here.
    takes: bool

    def load(self, key: CompileKey) -> Entry | None:
        """The entry of `key`, checked; None if it has none. Raises CorruptError, UntrustedError or OSError."""
        ...

    def give(self, manifest: Manifest, payload: bytes) -> None:
        """Stores an entry. Raises OSError."""
        ...

    def probe(self) -> None:
        """Raises OSError or UntrustedError unless the layer can be read."""
        ...


class FolderLayer:
    """A folder that somebody else fills: read only. Its owner is believed, for whoever lists a layer means its owner.

    A folder that others can write to is still refused.
    """

    remote = False
    takes = False

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        self.name = str(root)
        try:
            owners = frozenset({os.stat(root).st_uid})
        except OSError:
            owners = frozenset()  # not mounted yet, perhaps: then `load` finds nothing
        self.folder = Folder(root, name=self.name, trust=Trust(owners=owners, shared=shared))

    def load(self, key: CompileKey) -> Entry | None:
        try:
            self.folder.check()
        except FileNotFoundError:
            return None
        return self.folder.load(key)

    def give(self, manifest: Manifest, payload: bytes) -> None:
        raise OSError(f"{self.name} is read only")

    def probe(self) -> None:
        """Raises OSError or UntrustedError unless the folder can be read."""
        self.folder.check()


def open_layers(specs: Sequence[str | os.PathLike[str]], *, shared: bool = False) -> list[Layer]:
    """The layers that `specs` name: absolute folders and http(s) URLs. Raises ConfigError with every bad one."""
    if isinstance(specs, str) or not isinstance(specs, Iterable):
        what = redacted(specs) if isinstance(specs, str) else specs
        raise ConfigError(f"layers={what!r} must be a sequence of absolute folders and http(s) URLs")
    layers: list[Layer] = []
    problems = []
    for spec in specs:
        if not isinstance(spec, str | os.PathLike):
            problems.append(f"{spec!r} must be an absolute folder or an http(s) URL")
            continue
        text = os.fspath(spec)
        try:
            if "://" in text:
                from k3dsl.cache.http import HttpLayer  # its libraries are for those who use it

                layers.append(HttpLayer(text))
            elif (path := Path(text).expanduser()).is_absolute():
                layers.append(FolderLayer(path, shared=shared))
            else:
                problems.append(f"{text!r} must be an absolute folder or an http(s) URL")
        except (ValueError, RuntimeError) as error:
            problems.append(f"{redacted(text)!r} must be an absolute folder or an http(s) URL: {error}")
    if problems:
        raise ConfigError.of("layers", problems)
    return layers
