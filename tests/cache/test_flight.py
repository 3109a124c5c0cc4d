"""Single flight, killed writers, forks: several processes on one folder."""

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, make_key, payload_of

from k3dsl.cache import Built, CompileCache, store
from k3dsl.cache.lock import Lock
from k3dsl.cache.store import Folder

Fresh = Callable[..., CompileCache]

#: Builds `count` keys; every build leaves a file of its own. Waits for `start`, so that all begin at once.
WORKER = """
import os, sys, time
from pathlib import Path
from cache_tools import make_key, payload_of
from k3dsl.cache import Built, CompileCache

root, marks, start, count = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])

def build(key):
    (marks / f"{key.digest}.{os.getpid()}").touch(exist_ok=False)
    time.sleep(0.02)
    return Built(payload_of(key), "kernel.cubin")

(marks.parent / f"ready.{os.getpid()}").touch()
while not start.exists():
    time.sleep(0.001)
cache = CompileCache(root)
for n in range(count):
    assert cache.get_or_build(make_key(n), build).payload == payload_of(make_key(n))
"""


def run_workers(tmp_path: Path, root: Path, processes: int, count: int) -> list[str]:
    """The names of all builds that `processes` cold processes did for the same `count` keys."""
    marks, start = tmp_path / "marks", tmp_path / "start"
    marks.mkdir()
    repository = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{repository}:{repository / 'tests'}"}
    command = [sys.executable, "-c", WORKER, str(root), str(marks), str(start), str(count)]
    children = [subprocess.Popen(command, env=environ) for _ in range(processes)]
    while len(list(tmp_path.glob("ready.*"))) < processes:
        time.sleep(0.005)
    start.touch()
    assert [child.wait(60) for child in children] == [0] * processes
    return [path.name for path in marks.iterdir()]


def test_cold_processes_build_each_key_once(tmp_path: Path, root: Path) -> None:
    """Lesson 8: exactly one compiles, the others load."""
    builds = run_workers(tmp_path, root, processes=4, count=6)
    assert sorted(name.partition(".")[0] for name in builds) == sorted(make_key(n).digest for n in range(6))
    stats = CompileCache(root).stats()
    assert (stats["built"], stats["stored"], stats["raced"], stats["corrupt"]) == (6, 6, 0, 0)
    assert stats["disk_hit"] + stats["memory_hit"] >= 18
    assert stats["miss"] >= 6


def test_threads_build_each_key_once(cache: CompileCache) -> None:
    """Lesson 8, within one process, also where there is no folder."""
    build = Builder()

    def slow(key: Any) -> Built:
        time.sleep(0.02)
        return build(key)

    for shared in (cache, CompileCache("/proc/nowhere/cache")):
        build.keys.clear()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(shared.get_or_build, [make_key()] * 8, [slow] * 8))
        assert build.calls == 1
        assert len({id(entry) for entry in found}) == 1


def test_threads_agree_that_a_folder_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, fresh: Fresh, build: Builder
) -> None:
    """A thread that comes while another still tries to make the folder waits for the outcome, and for the build."""
    entered = threading.Event()

    def create(self: Folder) -> None:
        entered.set()
        time.sleep(0.1)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Folder, "create", create)
    cache = fresh()

    def slow(key: Any) -> Built:
        time.sleep(0.1)
        return build(key)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_build, make_key(), slow)
        entered.wait(10)
        second = pool.submit(cache.get_or_build, make_key(), slow)
        assert first.result(10) is second.result(10)
    assert build.calls == 1
    assert cache.stats()["write_failed"] == 1


def test_a_child_does_not_wait_for_a_thread_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, fresh: Fresh, build: Builder
) -> None:
    """Forked while one thread makes the folder and then builds: the child has no such thread, and goes on at once."""
    entered, going = threading.Event(), threading.Event()
    create = Folder.create

    def slow(self: Folder) -> None:
        if not entered.is_set():
            entered.set()
            going.wait(10)
        create(self)

    monkeypatch.setattr(Folder, "create", slow)
    cache = fresh(lock_timeout=20)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.get_or_build, make_key(1), build)
        entered.wait(10)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)  # instead of a hang
            os._exit(0 if cache.get_or_build(make_key(1), build).source == "built" else 1)
        assert os.waitpid(pid, 0)[1] == 0
        going.set()
        assert first.result(10).key == make_key(1)


def test_a_thread_may_come_again_while_it_makes_the_folder(
    monkeypatch: pytest.MonkeyPatch, fresh: Fresh, build: Builder
) -> None:
    """As from a log handler that looks at the cache."""
    cache = fresh()
    entered: list[bool] = []

    def create(self: Folder) -> None:
        if not entered:
            entered.append(True)
            cache.pin([make_key(2)])
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Folder, "create", create)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cache.get_or_build, make_key(1), build).result(10).source == "built"


def test_a_cache_that_only_reads_takes_what_another_one_builds(fresh: Fresh, build: Builder) -> None:
    """Two caches on one folder in one process: the wait for the build must not end in a second one."""
    started = threading.Event()

    def slow(key: Any) -> Built:
        started.set()
        time.sleep(0.3)
        return build(key)

    writes, reads = fresh(), fresh(read_only=True)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(writes.get_or_build, make_key(), slow)
        started.wait(10)
        assert reads.get_or_build(make_key(), build).payload == payload_of(make_key())
        first.result(10)
    assert build.calls == 1


def test_different_keys_do_not_wait_for_each_other(cache: CompileCache, fresh: Fresh, build: Builder) -> None:
    def outer(key: Any) -> Built:
        assert fresh(lock_timeout=0.0).get_or_build(make_key(2), build).source == "built"
        return build(key)

    cache.get_or_build(make_key(1), outer)
    assert cache.stats()["lock_timeout"] == 0


def hold(root: Path, key: Any, until: Path) -> int:
    """A child that holds the lock of `key` until `until` is there or it is killed."""
    pid = os.fork()
    if pid == 0:
        os.makedirs(root / "locks", exist_ok=True)
        lock = Lock(f"{root}/locks/{key.digest}.lock", create=True)
        lock.take()
        (until.parent / "held").touch()
        while not until.exists():
            time.sleep(0.005)
        os._exit(0)
    while not (until.parent / "held").exists():
        time.sleep(0.001)
    (until.parent / "held").unlink()
    return pid


def test_a_lock_dies_with_its_holder(root: Path, tmp_path: Path, build: Builder) -> None:
    """Lesson 9: kill -9 of the holder, and the waiter goes on at once."""
    root.mkdir()
    pid = hold(root, make_key(), tmp_path / "never")
    began = time.monotonic()
    killer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    killer.start()
    cache = CompileCache(root, lock_timeout=30)
    assert cache.get_or_build(make_key(), build).source == "built"
    assert 0.05 < time.monotonic() - began < 5
    os.waitpid(pid, 0)
    assert cache.stats()["lock_timeout"] == 0


def test_the_wait_is_bounded(root: Path, tmp_path: Path, build: Builder, caplog: pytest.LogCaptureFixture) -> None:
    """Lesson 9: a holder that hangs costs one bounded wait; then it is built here too."""
    root.mkdir()
    pid = hold(root, make_key(), tmp_path / "done")
    cache = CompileCache(root, lock_timeout=0.2)
    began = time.monotonic()
    assert cache.get_or_build(make_key(), build).payload == payload_of(make_key())
    assert 0.15 < time.monotonic() - began < 5
    assert cache.stats()["lock_timeout"] == 1
    assert len(caplog.messages) == 1
    assert "built elsewhere" in caplog.messages[0]
    (tmp_path / "done").touch()
    os.waitpid(pid, 0)
    assert CompileCache(root).get(make_key()) is not None


def test_a_waiter_takes_what_appears(root: Path, tmp_path: Path) -> None:
    """Lesson 8: the entry is there, whoever brought it: nobody waits for the lock then."""
    root.mkdir()
    pid = hold(root, make_key(), tmp_path / "done")
    publisher = threading.Timer(0.1, lambda: CompileCache(root, lock_timeout=0).get_or_build(make_key(), Builder()))
    publisher.start()
    cache = CompileCache(root, lock_timeout=30)
    entry = cache.get_or_build(make_key(), lambda key: pytest.fail("built twice"))
    assert entry.source == "disk"
    publisher.join()
    (tmp_path / "done").touch()
    os.waitpid(pid, 0)


def test_lock_files_stay(cache: CompileCache, fresh: Fresh, root: Path, build: Builder) -> None:
    """Lesson 10: an unlinked lock file is two locks of one name."""
    cache.get_or_build(make_key(), build)
    lock = root / "locks" / f"{make_key().digest}.lock"
    inode = lock.stat().st_ino
    fresh().remove(make_key())
    fresh().prune(0)
    fresh().get_or_build(make_key(), build)
    assert lock.stat().st_ino == inode


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL], ids=errno.errorcode.get)
def test_without_locks_it_publishes_without(
    root: Path, build: Builder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Lesson 10: NFS or Lustre without locks: lock-free, said once, entries stored all the same."""

    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    cache = CompileCache(root, max_bytes=10**9)
    for n in range(3):
        assert cache.get_or_build(make_key(n), build).path is not None
    assert len(caplog.messages) == 1
    assert "without locks" in caplog.messages[0]
    assert cache.stats()["lock_unsupported"] == 3
    again = CompileCache(root)
    assert all(again.get(make_key(n)) is not None for n in range(3))
    assert again.prune(0, dry_run=True).kept >= 0


def test_an_error_inside_lets_the_lock_go(cache: CompileCache, build: Builder) -> None:
    def interrupted(key: Any) -> Built:
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            cache.get_or_build(make_key(), interrupted)
    assert cache.get_or_build(make_key(), build).source == "built"
    assert cache.stats()["lock_timeout"] == 0


def build_for_ever(root: Path, seed: int) -> None:
    """The child of the kill test: builds and reads until it is killed."""
    generator = random.Random(seed)
    cache = CompileCache(root)
    while True:
        key = make_key(generator.randrange(12))
        assert cache.get_or_build(key, Builder(200_000)).payload == payload_of(key, 200_000)
        cache.remove(make_key(generator.randrange(12)))


def test_two_may_remove_one_entry(cache: CompileCache, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second finds it gone, which is what was wanted."""
    cache.get_or_build(make_key(), build)
    remove = Folder.remove

    def second(self: Folder, path: str) -> None:
        remove(self, path)
        remove(self, path)

    monkeypatch.setattr(Folder, "remove", second)
    assert cache.remove(make_key())
    assert not cache.remove(make_key())
    assert list(cache.entries()) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_kill_at_any_point(root: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Lessons 1, 2, 3, 9: after kill -9 at random points no entry is torn, nobody hangs, the next run heals."""
    generator = random.Random(seed)
    for _ in range(10):
        children = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    build_for_ever(root, generator.randrange(10**9))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            children.append(pid)
        time.sleep(generator.uniform(0.005, 0.06))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), "a child failed before it was killed"
        report = CompileCache(root).verify()
        assert report.corrupt == []
    monkeypatch.setattr(store, "_TEMP_SECONDS", 0.0)
    cache = CompileCache(root, lock_timeout=1)
    build = Builder(200_000)
    for n in range(12):
        assert cache.get_or_build(make_key(n), build).payload == payload_of(make_key(n), 200_000)
    cache.prune(10**9)
    stats = cache.stats()
    assert (stats["corrupt"], stats["lock_timeout"], stats["entries"]) == (0, 0, 12)
    assert not list(root.rglob(".tmp-*"))


def test_a_fork_keeps_its_own_books(cache: CompileCache, root: Path, build: Builder) -> None:
    """Lesson 27: a forked child writes to no file of its parent's and counts nothing twice."""
    cache.get_or_build(make_key(1), build)
    pid = os.fork()
    if pid == 0:
        try:
            cache.get_or_build(make_key(1), build)
            cache.get_or_build(make_key(2), build)
            cache._session.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    cache.get_or_build(make_key(3), build)
    stats = cache.stats()
    assert (stats["built"], stats["memory_hit"]) == (3, 1)
