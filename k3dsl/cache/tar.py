"""The container of a bundle: the few features of tar and zstd that it uses, and a refusal of all others.

A general tar reader follows links, sparse maps and extended headers that an attacker writes. This one knows regular
files with plain names, and takes anything else for a forgery.
"""

import tarfile
from collections.abc import Iterator
from hashlib import sha256
from typing import IO, Final, Protocol

from k3dsl.errors import K3Error

_BLOCK: Final = 512
#: Compressed bytes at a time. zstd makes at most 32 KB of each, so this bounds what a hostile file can make us hold.
_CHUNK: Final = 1024
_SKIPPABLE: Final = b"\x50\x2a\x4d\x18"
_SEAL_SIZE: Final = 4 + 4 + 32
#: What an archive ends with.
_END: Final = 2 * _BLOCK


class BundleError(K3Error, ValueError):
    """A file that is not a bundle, or no longer the one that was exported."""


class _Writer(Protocol):
    def write(self, content: bytes, /) -> int: ...


class Member:
    """A file of an archive; `read` once, before the next member."""

    __slots__ = ("_stream", "name", "size")

    def __init__(self, name: str, size: int, stream: "_Stream") -> None:
        self.name = name
        self.size = size
        self._stream = stream

    def read(self) -> bytes:
        """Its bytes."""
        content = self._stream.exactly(self.size)
        if self._stream.exactly(-self.size % _BLOCK).strip(b"\0"):
            raise BundleError(f"{self.name} is followed by something that belongs to no file")
        self.size = -1
        return content


class _Stream:
    """Decompressed bytes, to the exact end of exactly one zstd frame and of the seal behind it."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._file = file
        self._error = zstandard.ZstdError
        # The window bounds what a hostile frame can make us allocate; our own frames need far less.
        self._frame = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
        self._buffer = b""
        self._hash = sha256()
        self._held = b""  # the last bytes read: the seal, if these are the last of the file

    def exactly(self, count: int) -> bytes:
        """The next `count` bytes; BundleError if they are not there."""
        pieces = [self._buffer]
        have = len(self._buffer)
        while have < count and (piece := self._more()):
            pieces.append(piece)
            have += len(piece)
        content = b"".join(pieces)
        if have < count:
            raise BundleError("it is truncated")
        self._buffer = content[count:]
        return content[:count]

    def _more(self) -> bytes:
        while chunk := self._file.read(_CHUNK):
            self._held += chunk
            body, self._held = self._held[:-_SEAL_SIZE], self._held[-_SEAL_SIZE:]
            self._hash.update(body)
            if self._frame.eof and body:
                raise BundleError("something was appended to it")
            try:
                piece: bytes = self._frame.decompress(body) if body else b""
            except self._error as error:
                raise BundleError(f"it is damaged or no zstd file: {error}") from None
            if self._frame.unused_data:
                raise BundleError("something was appended to it")
            if piece:
                return piece
        return b""

    def end(self) -> None:
        """Raises BundleError unless this is the end of the frame, and the file is to the last byte what was sealed."""
        if self._buffer or self._more():
            raise BundleError("it goes on behind its end")
        if not self._frame.eof:
            raise BundleError("it is truncated")
        if self._held != seal(self._hash.digest()):
            raise BundleError("it is damaged: its checksum does not match")


def seal(digest: bytes) -> bytes:
    """What stands behind the frame: the sha256 of all bytes before, in a frame that zstd programs skip."""
    return _SKIPPABLE + len(digest).to_bytes(4, "little") + digest


class Sealed:
    """A file that is written to; `close` seals what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = sha256()

    def write(self, content: bytes, /) -> int:
        """Writes."""
        self._hash.update(content)
        return self._file.write(content)

    def close(self) -> None:
        """Appends the seal; leaves the file open."""
        self._file.write(seal(self._hash.digest()))


def write_member(stream: _Writer, name: str, content: bytes) -> None:
    """Appends a regular file. Owner, mode and time are fixed: the same content gives the same bytes."""
    stream.write(_header(name, len(content)))
    stream.write(content)
    stream.write(bytes(-len(content) % _BLOCK))


def finish(stream: _Writer) -> None:
    """Ends the archive."""
    stream.write(bytes(_END))


def read_members(file: IO[bytes]) -> Iterator[Member]:
    """The members of an archive, in order; at the end checks that it is the end. Each must be read before the next."""
    stream = _Stream(file)
    while True:
        header = stream.exactly(_BLOCK)
        if not header.strip(b"\0"):
            if stream.exactly(_END - _BLOCK).strip(b"\0"):
                raise BundleError("it goes on behind its end")
            stream.end()
            return
        member = _member(header, stream)
        yield member
        if member.size >= 0:
            member.read()


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


def _member(header: bytes, stream: _Stream) -> Member:
    """The member of a header, which must be byte for byte what `write_member` writes for its name and size."""
    try:
        name = header[:100].rstrip(b"\0").decode("ascii")
        size = int(header[124:135].decode("ascii"), 8)
        again = _header(name, size)
    except (UnicodeDecodeError, ValueError) as error:
        raise BundleError(f"it is no tar file: {error}") from None
    if again != header:
        raise BundleError(f"its member {name!r} is not a plain file as a bundle has it")
    return Member(name, size, stream)
