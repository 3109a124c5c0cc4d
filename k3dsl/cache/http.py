"""A shared layer over HTTP: any server that answers GET, and PUT where it is to be filled, such as nginx with WebDAV.

An entry is one object, `<url>/v1/<target>/<aa>/<digest>.k3b`, a bundle of one entry. It is checked like any bundle, and
its key compared, before anybody sees it. Checksums prove that it arrived as it was put; who may put is for the server
to say, and that it is the server, for https: objects with host code come over https, or from this machine, alone.

A server can cost little: each request is over after `seconds`, name resolution included, and a server that failed is
left alone for a while.
"""

import base64
import errno
import http.client
import os
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from k3dsl.cache.bundle import pack_one, unpack_one
from k3dsl.cache.entry import CorruptError, Entry, Manifest
from k3dsl.cache.key import CompileKey
from k3dsl.cache.store import VERSION
from k3dsl.cache.tar import BundleError
from k3dsl.cache.trust import UntrustedError

#: A LAN answers in milliseconds, a build takes seconds: who needs longer than this is of no help.
SECONDS: Final = 5.0
#: How long a server that failed is left alone.
PAUSE: Final = 60.0
#: Kernel objects are well under a MB.
OBJECT_LIMIT: Final = 64 * 2**20
_SCHEMES: Final = ("http", "https", "http+rw", "https+rw")
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
T = TypeVar("T")


class HttpLayer:
    """`http[s]://host[:port]/path` is read, `http[s]+rw://...` also takes what is built; `user:password@` works."""

    remote = True

    def __init__(self, url: str, *, seconds: float = SECONDS, pause: float = PAUSE) -> None:
        form = f"a URL is {', '.join(_SCHEMES)}, then ://host[:port]/path"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # whose text may quote the password
            raise ValueError(form) from None
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise ValueError(form)
        if parts.query or parts.fragment:
            raise ValueError("a URL of a layer has no ? and no #")
        if not parts.path.isascii():
            raise ValueError("the path of a URL is ASCII, all else in it as %XX")
        self.takes = parts.scheme.endswith("+rw")
        self._tls = parts.scheme.startswith("https")
        self._host, self._port = parts.hostname, port
        self._sure = self._tls or parts.hostname in _LOOPBACK
        self._base = parts.path.rstrip("/")
        where = f"{parts.hostname}:{port}" if port else parts.hostname
        self.name = f"{parts.scheme}://{where}{self._base}"  # without the password
        self._headers = {"User-Agent": "k3dsl", "Accept-Encoding": "identity"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        self._seconds = seconds
        self._pause = pause
        self._again = 0.0

    def load(self, key: CompileKey) -> Entry | None:
        """The entry of `key`, checked; None without one, or while a server that failed is left alone.

        Raises CorruptError for an object that is not the entry, OSError (TimeoutError, ...) if the server fails, and
        UntrustedError, without asking, for host code over a connection that others could answer on.
        """
        if key.toolchain.get("host_isa") and not self._sure:
            raise UntrustedError("it has host code, which runs in this process: only https:// says whose it is")
        status, content = self._ask("GET", self._path(key.target, key.digest), None)
        if status in (0, 404, 410):
            return None
        if status != 200:
            raise self._failed(OSError(errno.EIO, f"GET is answered with {status}"))
        try:
            manifest, payload = unpack_one(content, key)
        except BundleError as error:
            raise CorruptError(f"the server's object is not the entry: {error}") from None
        return Entry(key, manifest, source=self.name, payload=payload)

    def give(self, manifest: Manifest, payload: bytes) -> None:
        """Puts an entry. Raises OSError."""
        entry = Entry(manifest.compile_key(), manifest, source="built", payload=payload)
        status, _ = self._ask("PUT", self._path(entry.key.target, entry.digest), pack_one(entry))
        if status and not 200 <= status < 300:
            raise self._failed(OSError(errno.EIO, f"PUT is answered with {status}"))

    def probe(self) -> None:
        """Raises OSError unless the server answers a GET with anything but an error of its own."""
        status, _ = self._ask("GET", f"{self._base}/", None)
        if status >= 500 or status in (401, 407):
            raise OSError(errno.EIO, f"GET is answered with {status}")

    def _path(self, target: str, digest: str) -> str:
        return f"{self._base}/{VERSION}/{target}/{digest[:2]}/{digest}.k3b"

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and content of the answer; status 0 without a request, while the server is left alone."""
        if time.monotonic() < self._again:
            return 0, b""
        try:
            return bounded(lambda: self._request(method, path, body), self._seconds)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a name that IDNA refuses
            if isinstance(error, TimeoutError):
                raise self._failed(TimeoutError(errno.ETIMEDOUT, f"no answer in {self._seconds:g} s")) from None
            code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            raise self._failed(OSError(code, str(error) or type(error).__name__)) from None

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection: http.client.HTTPConnection
        if self._tls:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._seconds, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        try:
            connection.request(method, path, body=body, headers=self._headers)
            answer = connection.getresponse()  # a redirect is an answer like another: it is not followed
            content = answer.read(OBJECT_LIMIT + 1)
            if len(content) > OBJECT_LIMIT:
                raise OSError(errno.EFBIG, f"an object of more than {OBJECT_LIMIT} bytes")
            return answer.status, content
        finally:
            connection.close()

    def _failed(self, error: OSError) -> OSError:
        self._again = time.monotonic() + self._pause
        return error


def bounded(work: Callable[[], T], seconds: float) -> T:
    """`work()`, but for no longer than `seconds`: TimeoutError then.

    Socket time-outs bound one step each, and name resolution not at all; a server that sends a byte a second would hold
    us for ever. So the work is done by a thread that is left to itself when its time is over.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="k3dsl-http", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    return results[0]
