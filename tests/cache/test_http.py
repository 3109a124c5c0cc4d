"""The shared layer over HTTP: against nginx with WebDAV, and against servers that are dead, slow or lie."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, make_key, payload_of

from k3dsl.cache import CompileCache, bundle
from k3dsl.cache.http import OBJECT_LIMIT, HttpLayer
from k3dsl.cache.store import allocated
from k3dsl.cache.trust import UntrustedError
from k3dsl.errors import ConfigError

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nginx:
    """An nginx of our own on a loopback port: /rw takes GET and PUT, /ro only GET, /login wants a password."""

    def __init__(self, place: Path) -> None:
        self.port = free_port()
        self.files = place / "files"
        self.log = place / "access.log"
        self.files.mkdir(parents=True)
        (place / "tmp").mkdir()
        (place / "users").write_text("ci:{PLAIN}secret\n")
        configuration = f"""
            daemon off; master_process off; pid {place}/pid; error_log {place}/error.log; worker_processes 1;
            events {{ worker_connections 64; }}
            http {{
                access_log {self.log}; client_max_body_size 64m;
                client_body_temp_path {place}/tmp; proxy_temp_path {place}/tmp; fastcgi_temp_path {place}/tmp;
                uwsgi_temp_path {place}/tmp; scgi_temp_path {place}/tmp;
                server {{
                    listen 127.0.0.1:{self.port};
                    location /rw/ {{ alias {self.files}/; dav_methods PUT; create_full_put_path on; }}
                    location /ro/ {{ alias {self.files}/; }}
                    location /login/ {{ alias {self.files}/; auth_basic k3; auth_basic_user_file {place}/users; }}
                }}
            }}
        """
        (place / "nginx.conf").write_text(configuration)
        self.process = subprocess.Popen(
            [str(NGINX), "-p", str(place), "-c", str(place / "nginx.conf")], stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 10
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.process.stderr.read() if self.process.stderr else b"").decode())
            time.sleep(0.01)

    def url(self, path: str, scheme: str = "http", login: str = "") -> str:
        return f"{scheme}://{login}127.0.0.1:{self.port}/{path}"

    def requests(self) -> list[str]:
        return [
            line.split('"')[1].split()[0] + " " + line.split('"')[2].split()[0]
            for line in self.log.read_text().splitlines()
        ]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    if NGINX is None:
        pytest.skip("nginx is not installed (Debian: nginx-light)")
    place = tmp_path_factory.mktemp("nginx")
    place.chmod(0o755)
    running = Nginx(place)
    yield running
    running.stop()


@pytest.fixture
def nginx(server: Nginx) -> Nginx:
    for item in server.files.iterdir():
        shutil.rmtree(item)
    server.log.write_text("")
    return server


# Against nginx


def test_what_one_machine_builds_another_finds(nginx: Nginx, tmp_path: Path, build: Builder) -> None:
    first = CompileCache(tmp_path / "ci", layers=[nginx.url("rw", "http+rw")])
    for n in range(3):
        first.get_or_build(make_key(n), build)
    assert len(list(nginx.files.rglob("*.k3b"))) == 3
    second = CompileCache(tmp_path / "node", layers=[nginx.url("ro")])
    found = [second.get_or_build(make_key(n), build) for n in range(3)]
    assert [entry.payload for entry in found] == [payload_of(make_key(n)) for n in range(3)]
    assert build.calls == 3
    assert second.stats()["layer_hit"] == 3
    asked = len(nginx.requests())
    assert CompileCache(tmp_path / "node", layers=[nginx.url("ro")]).get(make_key(0)).source == "disk"  # type: ignore[union-attr]
    assert len(nginx.requests()) == asked  # it was copied into the folder
    assert found[0].resources == {"registers": 64, "spills": 0}


def test_put_only_where_it_is_allowed(nginx: Nginx, root: Path, build: Builder, caplog: Any) -> None:
    CompileCache(root, layers=[nginx.url("rw")]).get_or_build(make_key(0), build)
    assert not any(line.startswith("PUT") for line in nginx.requests())
    CompileCache(root, layers=[nginx.url("rw", "http+rw")], read_only=True).get_or_build(make_key(1), build)
    assert not any(line.startswith("PUT") for line in nginx.requests())
    cache = CompileCache(root, layers=[nginx.url("ro", "http+rw")])
    assert cache.get_or_build(make_key(2), build).path is not None
    assert cache.get_or_build(make_key(3), build).path is not None
    refused = [line for line in nginx.requests() if line.startswith("PUT")]
    assert refused == ["PUT 405"]  # asked once, then left alone
    assert len(caplog.messages) == 1
    assert "does not take entries" in caplog.messages[0]
    assert cache.stats()["give_failed"] == 1


def test_a_password(nginx: Nginx, root: Path, tmp_path: Path, build: Builder) -> None:
    CompileCache(tmp_path / "ci", layers=[nginx.url("rw", "http+rw")]).get_or_build(make_key(), build)
    inside = CompileCache(root, layers=[nginx.url("login", login="ci:secret@")])
    assert inside.get(make_key()) is not None
    assert "secret" not in str(inside.stats())
    outside = CompileCache(tmp_path / "other", layers=[nginx.url("login", login="ci:wrong@")])
    assert outside.get_or_build(make_key(), build).source == "built"
    assert "401" in next(iter(outside.degraded.values()))


@pytest.mark.parametrize("damage", ["truncate", "flip", "other", "empty", "html", "append"])
def test_a_damaged_object_is_not_served(nginx: Nginx, root: Path, tmp_path: Path, build: Builder, damage: str) -> None:
    """Lesson 3 for a server: what arrives is checked like any bundle, and its key compared."""
    ci = CompileCache(tmp_path / "ci", layers=[nginx.url("rw", "http+rw")])
    ci.get_or_build(make_key(0), build)
    ci.get_or_build(make_key(1), build)
    objects = {path.stem: path for path in nginx.files.rglob("*.k3b")}
    target, other = objects[make_key(0).digest], objects[make_key(1).digest]
    content = target.read_bytes()
    target.write_bytes(
        {
            "truncate": content[:-3],
            "flip": content[: len(content) // 2]
            + bytes([content[len(content) // 2] ^ 1])
            + content[len(content) // 2 + 1 :],
            "other": other.read_bytes(),
            "empty": b"",
            "html": b"<html>It works!</html>",
            "append": content + b"\0",
        }[damage]
    )
    cache = CompileCache(root, layers=[nginx.url("ro")])
    assert cache.get_or_build(make_key(0), build).payload == payload_of(make_key(0))
    assert cache.stats()["corrupt"] == 1
    assert (build.calls, cache.get(make_key(1)).source) == (3, nginx.url("ro"))  # type: ignore[union-attr]


# Against servers that are worse


class Bad(BaseHTTPRequestHandler):
    """A server whose answer the test chooses."""

    answer: Callable[["Bad"], None]
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        type(self).answer(self)

    do_PUT = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: Any) -> None:
        pass


def test_host_code_comes_over_https_or_from_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody between could answer for a plain server, and what is answered runs in this process."""
    asked = []
    monkeypatch.setattr(HttpLayer, "_ask", lambda self, *request: asked.append(self.name) or (404, b""))
    key = make_key(0, toolchain={"host_isa": "x86-64"})
    for url in ("http://cache.lan/k3", "http+rw://10.0.0.7/k3"):
        with pytest.raises(UntrustedError, match="only https:// says whose it is"):
            HttpLayer(url).load(key)
        assert HttpLayer(url).load(make_key(0)) is None
    assert len(asked) == 2
    for url in ("https://cache.lan/k3", "http://localhost:80/k3", "http://127.0.0.1/k3", "http://[::1]/k3"):
        assert HttpLayer(url).load(key) is None
    assert len(asked) == 6


@pytest.fixture
def bad() -> Iterator[Callable[[Callable[[Bad], None]], str]]:
    servers = []

    def start(answer: Callable[[Bad], None]) -> str:
        handler = type("Handler", (Bad,), {"answer": staticmethod(answer), "asked": 0})
        running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(running)
        start.handler = handler  # type: ignore[attr-defined]
        return f"http+rw://127.0.0.1:{running.server_port}/k3"

    yield start
    for running in servers:
        running.shutdown()
        running.server_close()


def reply(status: int, content: bytes, **headers: str) -> Callable[[Bad], None]:
    def answer(request: Bad) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(content)

    return answer


def drip(request: Bad) -> None:
    """A byte now and then: no socket time-out ever strikes."""
    request.send_response(200)
    request.send_header("Content-Length", "1000000")
    request.end_headers()
    for _ in range(100):
        request.wfile.write(b"x")
        time.sleep(0.05)


def endless(request: Bad) -> None:
    request.send_response(200)
    request.end_headers()
    for _ in range(2 * OBJECT_LIMIT // 2**20):
        request.wfile.write(bytes(2**20))


def cut(request: Bad) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b"half")
    request.connection.close()


ANSWERS = {
    "500": reply(500, b"oops"),
    "redirect": reply(302, b"", Location="http://127.0.0.1:1/elsewhere"),
    "204": reply(204, b""),
    "garbage": reply(200, bytes(range(256)) * 100),
    "silence": lambda request: time.sleep(3),
    "drip": drip,
    "cut": cut,
    "no http": lambda request: request.wfile.write(b"SSH-2.0-OpenSSH\r\n"),
    "hangup": lambda request: request.connection.close(),
    "endless": endless,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_bad_server_never_costs_a_build(
    root: Path, build: Builder, bad: Any, answer: Callable[[Bad], None], caplog: Any
) -> None:
    """Bounded time-outs, one warning, the right kernel; and then the server is left alone."""
    cache = CompileCache(root)
    layer = HttpLayer(bad(answer), seconds=0.3)
    cache.layers = [layer]
    began = time.monotonic()
    for n in range(5):
        assert cache.get_or_build(make_key(n), build).payload == payload_of(make_key(n))
    assert time.monotonic() - began < 20  # asked twice, 0.3 s each, on however busy a machine
    assert len(caplog.messages) <= 2  # of reading, of giving
    if "garbage" not in str(cache.stats()["corrupt"]) and not cache.stats()["corrupt"]:
        assert bad.handler.asked <= 2
    assert CompileCache(root).verify().sound == 5


def test_a_dead_server(root: Path, build: Builder, caplog: Any) -> None:
    cache = CompileCache(root, layers=[f"http+rw://127.0.0.1:{free_port()}/k3"])
    began = time.monotonic()
    for n in range(5):
        assert cache.get_or_build(make_key(n), build).source == "built"
    assert time.monotonic() - began < 10
    assert len(caplog.messages) == 1
    assert "cannot be read" in caplog.messages[0]
    assert cache.stats()["read_failed"] == 1


def test_a_host_that_does_not_resolve_or_swallows_packets(root: Path, build: Builder, monkeypatch: Any) -> None:
    """Name resolution has no time-out of its own; the request has."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(5))
    cache = CompileCache(root)
    cache.layers = [HttpLayer("http://cache.example/k3", seconds=0.2)]
    began = time.monotonic()
    assert cache.get_or_build(make_key(), build).source == "built"
    assert time.monotonic() - began < 4


def test_a_server_that_comes_back_is_asked_again(root: Path, build: Builder, bad: Any) -> None:
    state = {"answer": reply(500, b"")}
    layer = HttpLayer(bad(lambda request: state["answer"](request)), seconds=1, pause=0.1)
    cache = CompileCache(root, read_only=True)
    cache.layers = [layer]
    assert cache.get(make_key()) is None
    assert cache.get(make_key()) is None
    assert bad.handler.asked == 1
    entry = CompileCache(root).get_or_build(make_key(), build)
    shutil.rmtree(str(entry.path))
    state["answer"] = reply(200, bundle.pack_one(entry))
    time.sleep(0.15)
    assert cache.get(make_key()).payload == entry.payload  # type: ignore[union-attr]


def test_what_a_server_gave_counts_against_the_bound(root: Path, tmp_path: Path, build: Builder, bad: Any) -> None:
    elsewhere = CompileCache(tmp_path / "elsewhere")
    objects = {make_key(n).digest: bundle.pack_one(elsewhere.get_or_build(make_key(n), build)) for n in range(6)}
    url = bad(lambda request: reply(200, objects[Path(request.path).stem])(request))
    one = allocated(str(elsewhere.get(make_key(0)).path))  # type: ignore[union-attr]
    cache = CompileCache(root, layers=[url.replace("+rw", "")], max_bytes=2 * one + one // 2)
    for n in range(6):
        assert cache.get(make_key(n)) is not None
        assert cache.folder.has(make_key(n))  # type: ignore[union-attr]
        assert cache.stats()["bytes"] <= 2 * one + one // 2
    assert cache.stats()["evicted"] == 4


def test_what_a_server_gave_is_in_use_like_what_was_built(root: Path, tmp_path: Path, build: Builder, bad: Any) -> None:
    """Lesson 30: its files in the folder stay for as long as somebody holds it, whichever process prunes."""
    elsewhere = CompileCache(tmp_path / "elsewhere")
    content = bundle.pack_one(elsewhere.get_or_build(make_key(), build))
    cache = CompileCache(root, layers=[bad(reply(200, content)).replace("+rw", "")])
    entry = cache.get(make_key())
    assert entry is not None
    assert entry.source.startswith("http://")
    assert entry.path == cache.folder.path("sm_90a", make_key().digest)  # type: ignore[union-attr]
    other = CompileCache(root)
    assert other.prune(0).exempt == 1
    assert other.folder.has(make_key())  # type: ignore[union-attr]
    del entry
    assert other.prune(0).kept == 0


def test_a_url_that_no_request_can_have(root: Path, build: Builder) -> None:
    """A path that is not ASCII is refused where it is given; a host that IDNA refuses counts as one that is down."""
    with pytest.raises(ConfigError, match="ASCII"):
        CompileCache(root, layers=["http://127.0.0.1/\u00e9"])
    cache = CompileCache(root, layers=[f"http://{'a' * 70}.example/k3"])
    assert cache.get_or_build(make_key(), build).payload == payload_of(make_key())
    assert len(cache.degraded) == 1


def test_absence_is_no_failure(root: Path, build: Builder, bad: Any, caplog: Any) -> None:
    cache = CompileCache(root)
    cache.layers = [HttpLayer(bad(reply(404, b"no")), seconds=1)]
    cache.layers[0].takes = False
    for n in range(3):
        cache.get_or_build(make_key(n), build)
    assert bad.handler.asked == 3
    assert (caplog.messages, cache.degraded) == ([], {})
