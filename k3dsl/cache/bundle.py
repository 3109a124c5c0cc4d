"""Bundles: entries in one file, to be built in one place and run in another.

A zstd-compressed tar (`tar --zstd -tvf` lists it): bundle.json first, which names every member with its size and
sha256, then for each entry `<digest>/manifest.json` and `<digest>/payload`; behind it, where zstd programs skip it, the
sha256 of all that was before. The same entries give the same bytes.

An import reads the whole file first and checks every byte of it; only then does it publish, entry by entry, what is to
be taken. So a refused bundle leaves nothing. What a checksum inside the file cannot prove is who made it: for that
there is the `sha256` of the whole file, sent another way. Host code, which runs in the process that loads it, is taken
only from a file that nobody else can have written, or with that `sha256`.
"""

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256 as hash_of
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from k3dsl import __version__
from k3dsl.cache.entry import MANIFEST_LIMIT, PAYLOAD_LIMIT, CorruptError, Entry, Manifest
from k3dsl.cache.host import cannot_run
from k3dsl.cache.key import CompileKey, is_digest, short
from k3dsl.cache.store import unique
from k3dsl.cache.tar import BundleError, Member, Sealed, finish, read_members, write_member
from k3dsl.cache.trust import UntrustedError
from k3dsl.errors import CacheMiss, ConfigError

if TYPE_CHECKING:
    from k3dsl.cache.compile_cache import CompileCache

FORMAT: Final = "k3dsl-bundle"
VERSION: Final = 1
_INDEX: Final = "bundle.json"
_INDEX_LIMIT: Final = 64 * 2**20
#: zstd: beyond this, cubins get 1 % smaller for twice the time.
_LEVEL: Final = 10


class Item(msgspec.Struct, frozen=True):
    """One entry of a bundle."""

    digest: str
    kernel: str
    target: str
    toolchain: dict[str, Any]
    host_isa: str | None
    """What the host code in the payload needs; None if there is none."""
    manifest_sha256: str
    manifest_size: int
    payload_sha256: str
    payload_size: int


class Index(msgspec.Struct, frozen=True):
    """bundle.json."""

    format: str
    version: int
    made_by: str
    entries: list[Item]


class ExportReport(msgspec.Struct, frozen=True):
    """What `export` wrote; `sha256` is that of the whole file."""

    path: str
    entries: int
    bytes: int
    sha256: str
    targets: list[str]


class Skipped(msgspec.Struct, frozen=True):
    """An entry of a bundle that was not taken, and why."""

    digest: str
    target: str
    reason: str


class ImportReport(msgspec.Struct, frozen=True):
    """What `import_bundle` did."""

    path: str
    sha256: str
    imported: list[str]
    present: list[str]
    """Was there already."""
    skipped: list[Skipped]
    evicted: list[str] = []
    """Was stored or there, and did not stay: the folder's bound is smaller than the bundle."""


def export(
    cache: "CompileCache",
    path: str | os.PathLike[str],
    *,
    keys: Iterable[CompileKey | str] | None,
    target: str | Sequence[str] | None,
) -> ExportReport:
    """The work of `CompileCache.export`."""
    wanted = None if keys is None else {key.digest if isinstance(key, CompileKey) else key for key in keys}
    targets = _targets(target)
    entries = _chosen(cache, wanted, targets)
    missing = (wanted or set()) - {entry.digest for entry in entries}
    if missing:
        raise CacheMiss(f"not in the cache, so not in a bundle: {', '.join(sorted(short(item) for item in missing))}")
    if not entries:
        raise BundleError(
            f"nothing to export: the cache has no entry of {', '.join(targets) if targets else 'any target'}"
        )
    final = os.path.abspath(path)
    if not os.path.isdir(os.path.dirname(final)):  # said of the folder, not of a temporary file's name
        raise FileNotFoundError(errno.ENOENT, "no such folder to write a bundle to", os.path.dirname(final))
    temp = f"{final}.{unique()}.tmp"
    try:
        with open(temp, "xb") as file:
            pack(file, entries)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        with open(temp, "rb") as file:
            digest = _file_hash(file)
        os.replace(temp, final)
    except BaseException:
        if os.path.exists(temp):
            os.unlink(temp)
        raise
    return ExportReport(final, len(entries), size, digest, sorted({entry.key.target for entry in entries}))


def _chosen(cache: "CompileCache", wanted: set[str] | None, targets: tuple[str, ...] | None) -> list[Entry]:
    """The entries to export, each read and checked: a bundle that lacks what is damaged would look like a whole one."""
    found: dict[str, Entry] = {}
    for folder in cache.folders():
        for place in folder.places():
            if place.digest in found or (wanted is not None and place.digest not in wanted):
                continue
            if targets is not None and place.target not in targets:
                continue
            try:
                entry = folder.open(place)
                entry.payload  # noqa: B018 - reads and checks it
            except FileNotFoundError:
                continue  # another process has just evicted it
            except (CorruptError, UntrustedError) as error:
                raise type(error)(
                    f"not exported, as {place.path} is not sound: {error}; see k3dsl cache verify"
                ) from None
            found[place.digest] = entry
    return list(found.values())


def import_bundle(
    cache: "CompileCache",
    path: str | os.PathLike[str],
    *,
    target: str | Sequence[str] | None,
    sha256: str | None,
    accept: Callable[[Manifest], str | None] | None,
) -> ImportReport:
    """The work of `CompileCache.import_bundle`."""
    folder = cache.writable_folder()
    if folder is None:
        states = "; ".join(cache.degraded.values()) or f"this cache only reads {cache.root}"
        raise ConfigError(f"a bundle needs a folder that can be written: {states}")
    targets = _targets(target)
    take: dict[str, Manifest] = {}
    imported: list[str] = []
    present: list[str] = []
    skipped: list[Skipped] = []
    with open(path, "rb") as file:
        if not file.seekable():
            raise ConfigError(f"{path} must be a file, not a pipe: all of it is checked before any of it is taken")
        found = _file_hash(file)
        if sha256 is not None and found != sha256.lower():
            raise BundleError(f"{path} has sha256 {found}, not {sha256}")
        doubt = None if sha256 is not None else _doubt(cache, file)
        file.seek(0)
        for manifest, _ in _unpack_file(path, file):  # reads and checks everything to the last byte
            why = _refusal(manifest, targets, accept, doubt)
            if why is not None:
                skipped.append(Skipped(manifest.digest, manifest.key["target"], why))
            elif cache.sound(manifest.compile_key()):
                present.append(manifest.digest)
            else:
                take[manifest.digest] = manifest
        file.seek(0)
        if take:
            # Checked again: the file is not ours, and may have changed.
            for manifest, payload in _unpack_file(path, file):
                if take.get(manifest.digest) == manifest:
                    # Another import may have been faster.
                    (imported if folder.publish(manifest, payload) else present).append(manifest.digest)
    cache.imported(len(imported))
    evicted = {digest for digest in (*imported, *present) if not folder.paths_of(digest)}
    return ImportReport(
        os.path.abspath(path),
        found,
        sorted({*imported} - evicted),
        sorted({*present} - evicted),
        skipped,
        sorted(evicted),
    )


def _unpack_file(path: str | os.PathLike[str], file: IO[bytes]) -> Iterator[tuple[Manifest, bytes]]:
    """`unpack` with the file's name in every error."""
    try:
        yield from unpack(file)
    except BundleError as error:
        raise BundleError(f"{os.fspath(path)}: {error}") from None


def pack(file: IO[bytes], entries: Iterable[Entry]) -> None:
    """Writes a bundle of `entries`, in the order of their digests. Raises CorruptError if one is damaged."""
    import zstandard

    found = sorted(entries, key=lambda entry: entry.digest)
    items = []
    for entry in found:
        head = entry.manifest.dump()
        isa = entry.key.toolchain.get("host_isa")
        items.append(
            Item(
                digest=entry.digest,
                kernel=entry.key.kernel,
                target=entry.key.target,
                toolchain=entry.manifest.key["toolchain"],
                host_isa=isa if isinstance(isa, str) else None,
                manifest_sha256=hash_of(head).hexdigest(),
                manifest_size=len(head),
                payload_sha256=entry.manifest.sha256,
                payload_size=entry.manifest.size,
            )
        )
    index = Index(FORMAT, VERSION, __version__, items)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    sealed = Sealed(file)
    with compressor.stream_writer(sealed, closefd=False) as stream:  # type: ignore[arg-type]
        write_member(stream, _INDEX, msgspec.json.format(msgspec.json.encode(index), indent=1))
        for entry in found:
            write_member(stream, f"{entry.digest}/manifest.json", entry.manifest.dump())
            write_member(stream, f"{entry.digest}/payload", entry.payload)
        finish(stream)
    sealed.close()


def unpack(file: IO[bytes]) -> Iterator[tuple[Manifest, bytes]]:
    """Every entry of a bundle, checked. Raises BundleError at the first thing that is not as `pack` writes it."""
    members = read_members(file)
    first = next(members, None)
    if first is None or first.name != _INDEX or first.size > _INDEX_LIMIT:
        raise BundleError(f"it does not begin with {_INDEX}")
    try:
        index = msgspec.json.decode(first.read(), type=Index)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BundleError(f"its {_INDEX} cannot be read: {error}") from None
    if (index.format, index.version) != (FORMAT, VERSION):
        raise BundleError(f"it is a {index.format} {index.version}, this k3dsl reads {FORMAT} {VERSION}")
    digests = [item.digest for item in index.entries]
    if len(set(digests)) != len(digests):
        raise BundleError(f"its {_INDEX} names an entry twice")
    for item in index.entries:
        if not is_digest(item.digest):
            raise BundleError(f"its {_INDEX} has the digest {item.digest!r}")
        head = _expect(
            members, f"{item.digest}/manifest.json", item.manifest_sha256, item.manifest_size, MANIFEST_LIMIT
        )
        payload = _expect(members, f"{item.digest}/payload", item.payload_sha256, item.payload_size, PAYLOAD_LIMIT)
        try:
            manifest = Manifest.load(head)
            key = manifest.compile_key()
            manifest.check(payload)
        except CorruptError as error:
            raise BundleError(f"its entry {short(item.digest)} is forged or damaged: {error}") from None
        told = (item.digest, item.kernel, item.target, item.toolchain, item.payload_sha256)
        if told != (key.digest, key.kernel, key.target, manifest.key["toolchain"], manifest.sha256):
            raise BundleError(f"its {_INDEX} does not tell of {short(item.digest)} what the entry's own manifest tells")
        yield manifest, payload
    extra = next(members, None)
    if extra is not None:
        raise BundleError(f"it has a member {extra.name!r} that its {_INDEX} does not name")


def pack_one(entry: Entry) -> bytes:
    """One entry as a bundle in memory: what goes over HTTP."""
    buffer = io.BytesIO()
    pack(buffer, [entry])
    return buffer.getvalue()


def unpack_one(content: bytes, key: CompileKey) -> tuple[Manifest, bytes]:
    """The entry of `key` in a bundle of one. Raises BundleError if it is anything else."""
    found = list(unpack(io.BytesIO(content)))
    if len(found) != 1 or found[0][0].compile_key() != key:
        raise BundleError(f"it holds {', '.join(short(item.digest) for item, _ in found)}, not {key.short}")
    return found[0]


def _expect(members: Iterator[Member], name: str, sha256: str, size: int, limit: int) -> bytes:
    member = next(members, None)
    if member is None or member.name != name:
        raise BundleError(
            f"{name} is not there" if member is None else f"it has {member.name!r} in the place of {name}"
        )
    if member.size != size or size > limit:
        raise BundleError(f"{name} has {member.size} bytes, not {min(size, limit)}")
    content = member.read()
    if hash_of(content).hexdigest() != sha256:
        raise BundleError(f"{name} does not match its checksum")
    return content


def _refusal(
    manifest: Manifest,
    targets: tuple[str, ...] | None,
    accept: Callable[[Manifest], str | None] | None,
    doubt: str | None,
) -> str | None:
    key = manifest.compile_key()
    if targets is not None and key.target not in targets:
        return f"it is for {key.target}, asked for was {', '.join(targets)}"
    isa = key.toolchain.get("host_isa")
    return cannot_run(isa) or (doubt if isa else None) or (accept(manifest) if accept else None)


def _doubt(cache: "CompileCache", file: IO[bytes]) -> str | None:
    """Why host code of this file is not taken: what the cache asks of its folder is asked of the file."""
    try:
        cache.trust.check(os.fstat(file.fileno()), "the bundle")
    except UntrustedError as error:
        return f"it has host code, and {error}, or give its sha256"
    return None


def _targets(target: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if target is None:
        return None
    names = tuple(target) if isinstance(target, Iterable) and not isinstance(target, str) else (target,)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"target={target!r} must be a target or several")
    return names


def _file_hash(file: IO[bytes]) -> str:
    digest = hash_of()
    while piece := file.read(2**20):
        digest.update(piece)
    return digest.hexdigest()
