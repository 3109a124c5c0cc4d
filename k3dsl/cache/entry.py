"""One entry: what a build returns, the manifest that describes it on disk, and what a hit returns."""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from k3dsl import __version__
from k3dsl.cache.key import CompileKey, short
from k3dsl.errors import ConfigError, K3Error

#: Version of the entry on disk. A reader refuses another one; the folder above is named after it.
SCHEMA: Final = 1
MANIFEST: Final = "manifest.json"
#: A name that is the same on every filesystem and hides nowhere.
_FILENAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
#: Of a compiler's output, the end tells what went wrong.
LOG_LIMIT: Final = 64 * 1024
#: A manifest is a few KB; a kernel object well under a MB.
MANIFEST_LIMIT: Final = 4 * 2**20
PAYLOAD_LIMIT: Final = 2**30
#: Opens the last line of a manifest, which checks all lines before it.
_CHECK: Final = b'  "check": "'


class CorruptError(K3Error):
    """A stored entry is not what was stored. The message says why."""


@dataclass(frozen=True)
class Built:
    """What `build(key)` returns.

    payload    the object file's bytes, as the vendor's own tools read it
    filename   its name in the entry's folder, e.g. "kernel.cubin"
    resources  what the kernel takes (registers, shared memory, spills, ...): JSON types
    log        what the compiler said
    """

    payload: bytes
    filename: str
    resources: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""

    def __post_init__(self) -> None:
        problems = []
        if type(self.payload) is not bytes or not 0 < len(self.payload) <= PAYLOAD_LIMIT:
            problems.append(f"payload must be 1 to {PAYLOAD_LIMIT} bytes, not {_sketch(self.payload)}")
        if type(self.filename) is not str or not _FILENAME.fullmatch(self.filename) or self.filename == MANIFEST:
            problems.append(f"filename={self.filename!r} must be a plain file name other than {MANIFEST}")
        if not isinstance(self.resources, Mapping):
            problems.append(f"resources={self.resources!r} must be a mapping")
        if type(self.log) is not str:
            problems.append(f"log={self.log!r} must be a str")
        try:
            msgspec.json.encode(self.resources)
        except (TypeError, ValueError) as error:
            problems.append(f"resources={self.resources!r} must be JSON types: {error}")
        if problems:
            raise ConfigError.of("Built", problems)


Build: TypeAlias = Callable[[CompileKey], Built]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What manifest.json holds: enough to check, explain and rebuild the entry without anything else."""

    schema: int
    digest: str
    key: dict[str, Any]
    payload: str
    """File name of the payload."""
    sha256: str
    size: int
    resources: dict[str, Any] = {}
    build_seconds: float
    host: str
    user: str
    created: str
    """UTC, ISO 8601. For people: nothing is decided by it."""
    version: str
    """The k3dsl that built it."""
    log: str = ""

    def compile_key(self) -> CompileKey:
        """The full key. Raises CorruptError if it is not one, or not that of `digest`."""
        try:
            key = CompileKey.from_json(self.key)
        except (ConfigError, RecursionError) as error:
            raise CorruptError(f"its key cannot be read: {error}") from None
        if key.digest != self.digest:
            raise CorruptError(f"its key has the digest {key.short}, its manifest says {short(self.digest)}")
        return key

    def dump(self) -> bytes:
        """The bytes of manifest.json: JSON for people, the last line a checksum of the lines before it."""
        body = msgspec.json.format(msgspec.json.encode(self), indent=2)
        head = body[: body.rindex(b"\n}")] + b",\n"
        return head + _CHECK + sha256(head).hexdigest().encode() + b'"\n}\n'

    @classmethod
    def load(cls, content: bytes) -> "Manifest":
        """The manifest in `content`. Raises CorruptError, whichever byte was changed."""
        head = content[: max(content.rfind(_CHECK), 0)]
        if content[len(head) :] != _CHECK + sha256(head).hexdigest().encode() + b'"\n}\n':
            raise CorruptError("its manifest does not match its own checksum")
        try:
            manifest = msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CorruptError(f"its manifest cannot be read: {error}") from None
        if manifest.schema != SCHEMA:
            raise CorruptError(f"its manifest has schema {manifest.schema}, this k3dsl reads {SCHEMA}")
        if not _FILENAME.fullmatch(manifest.payload) or manifest.payload == MANIFEST:
            raise CorruptError(f"its payload is named {manifest.payload!r}")
        if not 0 < manifest.size <= PAYLOAD_LIMIT:
            raise CorruptError(f"its payload has size {manifest.size}")
        return manifest

    def check(self, payload: bytes) -> None:
        """Raises CorruptError unless `payload` is what was stored."""
        if len(payload) != self.size:
            raise CorruptError(f"{self.payload} has {len(payload)} bytes, not {self.size}")
        if sha256(payload).hexdigest() != self.sha256:
            raise CorruptError(f"{self.payload} does not match its checksum")


class _Keeper(Protocol):
    def gone(self, digest: str) -> None: ...


class Entry:
    """A compiled kernel: its key, its manifest, and its payload, which was checked before anybody sees it.

    source says where it came from: "built", "disk", or the name of a layer. As long as the object lives, no process
    evicts its files: whoever has loaded a kernel keeps its entry.
    """

    __slots__ = ("__weakref__", "_payload", "_read", "keeper", "key", "manifest", "path", "source")

    def __init__(
        self,
        key: CompileKey,
        manifest: Manifest,
        source: str,
        payload: bytes | None = None,
        read: Callable[[], bytes] | None = None,
        path: str | None = None,
    ) -> None:
        self.key = key
        self.manifest = manifest
        self.source = source
        #: The entry's folder; None for one that is in memory or behind HTTP only.
        self.path = path
        #: Whom to tell when nobody holds this entry any more. It lives at least as long.
        self.keeper: _Keeper | None = None
        self._payload = payload
        self._read = read

    def __del__(self) -> None:
        if self.keeper is not None:
            self.keeper.gone(self.manifest.digest)

    @property
    def payload(self) -> bytes:
        """The object file's bytes. Entries from a listing read and check it here.

        Raises CorruptError if it is not what was stored, UntrustedError or OSError.
        """
        if self._payload is None:
            assert self._read is not None
            self._payload = self._read()
        return self._payload

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def resources(self) -> dict[str, Any]:
        """What the kernel takes."""
        return self.manifest.resources

    def __repr__(self) -> str:
        return f"<Entry {self.key.kernel} {self.key.target} {self.key.short} {self.manifest.size} B from {self.source}>"


def manifest_of(key: CompileKey, built: Built, seconds: float) -> Manifest:
    """The manifest of what was just built on this machine."""
    return Manifest(
        schema=SCHEMA,
        digest=key.digest,
        key=key.to_json(),
        payload=built.filename,
        sha256=sha256(built.payload).hexdigest(),
        size=len(built.payload),
        resources=dict(built.resources),
        build_seconds=round(seconds, 3),
        host=os.uname().nodename,
        user=user_name(),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        version=__version__,
        log=built.log[-LOG_LIMIT:].encode(errors="replace").decode(),
    )


def user_name() -> str:
    """The user's name, or the number where the uid has none (a container that runs as any uid)."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _sketch(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else f"{type(value).__qualname__}"
