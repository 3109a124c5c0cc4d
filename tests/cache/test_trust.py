"""Whose folder it is, who may write to it, and where it is looked for."""

import errno
import logging
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, make_key, payload_of

from k3dsl.cache import CompileCache, notice
from k3dsl.cache.doctor import findings
from k3dsl.cache.entry import user_name

Fresh = Callable[..., CompileCache]
NOBODY = 54321  # a uid that no passwd knows
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def as_user(uid: int, work: Callable[[], Any], gid: int | None = None) -> int:
    """The exit status of a child of another user that does `work`."""
    return os.waitpid(start_as_user(uid, work, gid), 0)[1]


def start_as_user(uid: int, work: Callable[[], Any], gid: int | None = None) -> int:
    """The pid of that child."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid if gid is None else gid)
            os.setuid(uid)
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(1)
    return pid


def open_way(path: Path) -> None:
    """Lets other users come to `path`."""
    for folder in (path, *path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(
    root: Path, build: Builder, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """Lesson 29: whoever can write there can run code here."""
    CompileCache(root).get_or_build(make_key(), build)
    root.chmod(mode)
    cache = CompileCache(root)
    assert cache.get(make_key()) is None
    assert cache.get_or_build(make_key(), build).path is None
    assert len(warnings(caplog)) == 1
    assert f"{mode:o}" in warnings(caplog)[0]
    assert "chmod go-w" in warnings(caplog)[0]
    assert "untrusted" in cache.degraded
    assert CompileCache(root, allow_shared=True).get(make_key()) is not None


@as_root
def test_a_folder_of_somebody_else_is_not_used(root: Path, build: Builder, caplog: pytest.LogCaptureFixture) -> None:
    """Lessons 28, 29: /tmp/cache made by another user before us."""
    CompileCache(root).get_or_build(make_key(), build)
    os.chown(root, NOBODY, NOBODY)
    cache = CompileCache(root)
    assert cache.get(make_key()) is None
    assert f"belongs to uid {NOBODY}" in warnings(caplog)[0]
    shared = CompileCache(root, allow_shared=True)
    assert shared.get(make_key()) is not None
    for one, status in ((cache, "bad"), (shared, "ok")):
        assert next(f for f in findings(one) if f.name == "cache folder").status == status


@as_root
@pytest.mark.parametrize("name", ["manifest.json", "kernel.cubin"])
def test_a_file_of_somebody_else_is_not_loaded(
    cache: CompileCache, fresh: Fresh, build: Builder, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Lesson 29: the descriptor that is read is the one that is checked, in whatever folder it stands."""
    path = str(cache.get_or_build(make_key(), build).path)
    os.chown(f"{path}/{name}", NOBODY, NOBODY)
    assert make_key() not in fresh()
    reader = fresh()
    assert reader.get(make_key()) is None
    assert reader.stats()["untrusted"] == 1
    assert f"{name} belongs to uid {NOBODY}" in warnings(caplog)[0]
    assert fresh().get_or_build(make_key(), build).payload == payload_of(make_key())
    assert build.calls == 2


@pytest.mark.parametrize("name", ["manifest.json", "kernel.cubin"])
def test_a_file_that_others_can_write_to_is_not_loaded(
    cache: CompileCache, fresh: Fresh, build: Builder, name: str
) -> None:
    """Lesson 29."""
    path = str(cache.get_or_build(make_key(), build).path)
    os.chmod(f"{path}/{name}", 0o666)
    assert make_key() not in fresh()
    assert fresh().get(make_key()) is None
    assert fresh().get_or_build(make_key(), build).source == "built"


def test_nothing_is_unpickled_or_imported(cache: CompileCache, fresh: Fresh, build: Builder, tmp_path: Path) -> None:
    """Lesson 29: a payload is bytes, a manifest is JSON: neither can do anything."""
    import pickle

    class Boom:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "boom"),)

    path = str(cache.get_or_build(make_key(), build).path)
    for name in ("manifest.json", "kernel.cubin"):
        Path(path, name).write_bytes(pickle.dumps(Boom()))
    assert fresh().get(make_key()) is None
    assert not (tmp_path / "boom").exists()


@as_root
def test_a_folder_that_only_root_can_write_to(root: Path, build: Builder) -> None:
    """Lesson 28: a read-only HOME: hits are hits, builds stay in memory, one warning."""
    CompileCache(root).get_or_build(make_key(1), build)
    open_way(root)

    def work() -> None:
        notice._said.clear()
        cache = CompileCache(root)
        assert cache.get(make_key(1)).source == "disk"  # type: ignore[union-attr]
        assert cache.get_or_build(make_key(2), build).path is None
        assert cache.get_or_build(make_key(3), build).path is None
        assert cache.get(make_key(2)) is not None
        assert "Permission denied" in cache.degraded["write_failed"]
        assert cache.stats()["write_failed"] == 1

    assert as_user(NOBODY, work) == 0


@as_root
def test_entries_that_root_made_in_a_folder_of_ours(root: Path, build: Builder) -> None:
    """Lesson 28: `sudo k3dsl warmup`, once. Doctor tells that nothing can be stored, and where."""
    CompileCache(root).get_or_build(make_key(1), build)
    open_way(root)
    os.chown(root, NOBODY, NOBODY)

    def work() -> None:
        notice._said.clear()
        cache = CompileCache(root)
        assert cache.get(make_key(1)).source == "disk"  # type: ignore[union-attr]
        found = {item.name: item for item in findings(cache)}["cache writes"]
        assert (found.status, f"{root}/v1 cannot" in found.found) == ("bad", True)
        assert cache.get_or_build(make_key(2), build).path is None

    assert as_user(NOBODY, work) == 0


@as_root
def test_a_user_without_passwd_entry_or_home(tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 28: a container that runs as any uid."""
    open_way(tmp_path)
    monkeypatch.chdir(tmp_path)

    def work() -> None:
        for home in (None, "/nonexistent/home", "/proc/self"):
            os.environ.pop("HOME", None)
            if home:
                os.environ["HOME"] = home
            notice._said.clear()
            cache = CompileCache()
            assert cache.get_or_build(make_key(), build).payload == payload_of(make_key())
            assert cache.get(make_key()) is not None
            assert len(cache.degraded) == 1
            assert "K3DSL_CACHE_DIR" in next(iter(cache.degraded.values()))
        assert user_name() == str(NOBODY)

    before = sorted(os.listdir(tmp_path))
    assert as_user(NOBODY, work) == 0
    assert sorted(os.listdir(tmp_path)) == before


def test_no_home_is_no_excuse_for_the_current_folder(tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """Lessons 28, 29: never look in the current directory."""

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    cache = CompileCache()
    assert cache.root is None
    assert cache.get_or_build(make_key(), build).payload == payload_of(make_key())
    assert os.listdir(tmp_path) == []
    assert len(warnings(caplog)) == 1
    assert "set K3DSL_CACHE_DIR" in warnings(caplog)[0].replace("Set", "set")
    assert cache.stats()["entries"] == 0
    assert list(cache.entries()) == []
    assert cache.prune(0).removed == []


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CompileCache().root == tmp_path / "home" / ".cache" / "k3dsl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert CompileCache().root == tmp_path / "xdg" / "k3dsl"
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "dir"))
    assert CompileCache().root == tmp_path / "dir"
    assert CompileCache(tmp_path / "given").root == tmp_path / "given"
    monkeypatch.chdir(tmp_path)
    assert CompileCache("here").root == tmp_path / "here"
    assert not (tmp_path / "here").exists()  # made when something is stored


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o000, 0o022])
def test_new_files_are_as_open_as_the_folder(root: Path, build: Builder, umask: int) -> None:
    """Lesson 28: umask 077 must not make a group's folder unreadable, nor umask 0 a private one writable."""
    for mode in (0o750, 0o700, 0o755):
        place = root.parent / f"cache{mode:o}"
        place.mkdir()
        place.chmod(mode)
        os.umask(umask)
        cache = CompileCache(place)
        entry = cache.get_or_build(make_key(), build)
        cache.pin([make_key()])
        cache.stats()  # folds
        os.umask(0o022)
        for path in (place / "v1", Path(str(entry.path)), place / "locks", place / "pins", place / "sessions"):
            assert stat.S_IMODE(path.stat().st_mode) == mode, path
        files = [*Path(str(entry.path)).iterdir(), *(place / "locks").iterdir(), *(place / "sessions").iterdir()]
        assert {path.suffix for path in files} == {".json", ".cubin", ".lock", ".log", ".use"}
        for path in files:
            assert stat.S_IMODE(path.stat().st_mode) == mode & 0o666, path


@as_root
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_users_of_one_group_share_a_folder(root: Path, build: Builder, umask: int) -> None:
    """Lesson 28: what one makes, the other can use; what one pins or holds, the other does not evict."""
    group = 7777
    root.mkdir()
    open_way(root)
    os.chown(root, 0, group)
    root.chmod(0o2775)
    ready, done = os.pipe(), os.pipe()

    def refuse(key: Any) -> Any:
        raise ValueError("does not compile")

    def first() -> None:
        os.umask(umask)
        cache = CompileCache(root, allow_shared=True)
        with pytest.raises(ValueError, match="does not compile"):
            cache.get_or_build(make_key(1), refuse)
        cache.get_or_build(make_key(2), build)
        held = cache.get_or_build(make_key(3), build)
        cache.pin([make_key(2)])
        cache.stats()
        assert cache.degraded == {}
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        assert held.payload

    def second() -> None:
        os.umask(umask)
        notice._said.clear()
        cache = CompileCache(root, allow_shared=True)
        assert cache.get_or_build(make_key(1), build).path is not None
        assert cache.get(make_key(3)).source == "disk"  # type: ignore[union-attr]
        cache.pin([make_key(2)])
        assert cache.prune(0).exempt == 2
        assert make_key(2) in CompileCache(root, allow_shared=True)
        assert make_key(3) in CompileCache(root, allow_shared=True)
        assert cache.stats()["built"] == 3
        assert cache.degraded == {}

    pid = start_as_user(NOBODY, first, group)
    os.close(ready[1])
    os.read(ready[0], 1)  # or the end of the file, if it failed
    try:
        assert as_user(NOBODY + 1, second, group) == 0
    finally:
        os.write(done[1], b"x")
        assert os.waitpid(pid, 0)[1] == 0
    assert (root / "sessions" / "totals.json").stat().st_uid == NOBODY + 1


def test_a_lock_of_another_user_is_no_lock(
    root: Path, fresh: Fresh, build: Builder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lesson 10: the key is built without it, and entries are stored as ever."""
    CompileCache(root).get_or_build(make_key(0), build)
    real = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".lock") and "/locks/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    cache = fresh()
    for n in range(1, 3):
        assert cache.get_or_build(make_key(n), build).path is not None
    assert (cache.stats()["lock_unsupported"], cache.stats()["write_failed"]) == (2, 0)
    assert len(warnings(caplog)) == 1
    assert f"{make_key(1).digest}.lock cannot be opened (Permission denied)" in warnings(caplog)[0]


@pytest.mark.parametrize("name", ["pins", "sessions", ".use"])
def test_what_cannot_be_read_may_be_pinned_or_in_use(
    root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Lesson 30: it is kept."""
    user = CompileCache(root)
    held = user.get_or_build(make_key(0), build)
    user.pin([make_key(1)])
    real_list, real_open = os.listdir, open

    def listdir(path: str) -> list[str]:
        if path == f"{root}/{name}":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real_list(path)

    def open_(path: Any, *rest: Any, **named: Any) -> Any:
        if name == ".use" and str(path).endswith(name):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real_open(path, *rest, **named)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr("builtins.open", open_)
    cache = CompileCache(root, max_bytes=0)
    with pytest.raises(PermissionError):
        cache.prune()
    assert cache.get_or_build(make_key(1), build).path is not None
    assert "Permission denied" in cache.degraded["prune_failed"]
    assert cache.stats()["entries"] == 2
    monkeypatch.undo()
    assert CompileCache(root).prune(0).exempt == 2
    assert held.payload


def test_a_folder_that_is_made_is_never_writable_by_others(root: Path, build: Builder) -> None:
    os.umask(0)
    CompileCache(root).get_or_build(make_key(), build)
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


@pytest.mark.parametrize("where", ["file", "file/below", "proc", "loop"])
def test_a_folder_that_cannot_be(tmp_path: Path, build: Builder, caplog: pytest.LogCaptureFixture, where: str) -> None:
    """Lesson 28."""
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    root = Path("/proc/cache") if where == "proc" else tmp_path / where
    cache = CompileCache(root)
    for n in range(2):
        assert cache.get_or_build(make_key(n), build).path is None
        assert cache.get(make_key(n)) is not None
    assert len(warnings(caplog)) == 1
    assert "K3DSL_CACHE_DIR" in warnings(caplog)[0]


def test_a_link_to_a_folder_of_ours_is_fine(tmp_path: Path, build: Builder) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    CompileCache(tmp_path / "link").get_or_build(make_key(), build)
    assert CompileCache(tmp_path / "real").get(make_key()) is not None


def test_one_warning_a_process(root: Path, build: Builder, caplog: pytest.LogCaptureFixture) -> None:
    root.mkdir()
    root.chmod(0o777)
    for n in range(3):
        CompileCache(root).get_or_build(make_key(n), build)
    assert len(warnings(caplog)) == 1
