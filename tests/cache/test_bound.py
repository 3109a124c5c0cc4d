"""The bound: least recently used first, in allocated blocks, never what is pinned or in use."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_tools import Builder, make_key

from k3dsl.cache import CompileCache
from k3dsl.cache.store import allocated
from k3dsl.errors import ConfigError

Fresh = Callable[..., CompileCache]


def fill(root: Path, count: int, size: int = 30_000) -> int:
    """`count` entries, the first unused for longest; the bytes of one."""
    cache = CompileCache(root)
    for n in range(count):
        path = str(cache.get_or_build(make_key(n), Builder(size)).path)
        at = time.time() - 1000 + n
        os.utime(f"{path}/manifest.json", (at, at))
    cache._memory.used.clear()  # as if the process had ended long ago
    del cache
    return allocated(path)


def present(root: Path, count: int) -> list[int]:
    folder = CompileCache(root).folder
    assert folder is not None
    return [n for n in range(count) if folder.has(make_key(n))]


def test_it_counts_allocated_blocks(root: Path) -> None:
    """Lesson 30: a payload of one byte takes a block, and so do its folder and manifest."""
    one = fill(root, 1, size=1)
    entry = Path(next(iter(CompileCache(root).entries())).path or "")
    assert one == sum(path.stat().st_blocks * 512 for path in (entry, *entry.iterdir()))
    assert one >= 512 * 2
    assert CompileCache(root).stats()["bytes"] == one


def test_the_least_recently_used_goes_first(root: Path) -> None:
    """Lesson 30."""
    one = fill(root, 6)
    assert CompileCache(root).get(make_key(0)) is not None  # a use, so 1 is the oldest now
    report = CompileCache(root).prune(3 * one)
    assert [item.digest for item in report.removed] == [make_key(n).digest for n in (1, 2, 3)]
    assert present(root, 6) == [0, 4, 5]
    assert (report.kept, report.kept_bytes, report.freed_bytes) == (3, 3 * one, 3 * one)
    assert CompileCache(root).stats()["evicted"] == 3


def test_a_use_from_memory_counts(root: Path) -> None:
    one = fill(root, 3)
    cache = CompileCache(root)
    cache.get(make_key(0))
    at = time.time() - 5000
    os.utime(f"{cache.reread(make_key(0)).path}/manifest.json", (at, at))  # type: ignore[union-attr]
    cache.get(make_key(0))
    cache.prune(one)
    assert present(root, 3) == [0]


def test_the_bound_holds_after_every_build(root: Path, build: Builder) -> None:
    """Lesson 30: enforced after publishing; the entry just built stays."""
    one = fill(root, 1)
    cache = CompileCache(root, max_bytes=3 * one + one // 2)
    for n in range(10):
        cache.get_or_build(make_key(n), build)
        assert n in present(root, 10)
        assert cache.stats()["bytes"] <= 3 * one + one // 2
    assert len(present(root, 10)) == 3
    assert cache.get(make_key(2)) is not None  # from memory, as long as the process lives


def test_the_bound_holds_for_processes_together(root: Path, build: Builder) -> None:
    """Lesson 30: what another process stores meanwhile counts as well."""
    one = fill(root, 1)
    limit = 5 * one + one // 2
    caches = [CompileCache(root, max_bytes=limit) for _ in range(3)]
    for n in range(1, 13):
        caches[n % 3].get_or_build(make_key(n), build)
        assert CompileCache(root).stats()["bytes"] <= limit
    assert len(present(root, 13)) == 5


def test_what_others_store_is_counted_now_and_then(root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large folder is not walked after every build: once for a part of the bound, whatever others do."""
    one = fill(root, 1)
    walks = []
    real = CompileCache.prune
    monkeypatch.setattr(CompileCache, "prune", lambda self: (walks.append(1), real(self))[1])
    cache = CompileCache(root, max_bytes=640 * one)
    for n in range(1, 25):
        cache.get_or_build(make_key(n), build)
    assert 1 < len(walks) < 5  # the first time, then after more than ten entries


def test_the_bound_of_the_environment(root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    one = fill(root, 1)
    monkeypatch.setenv("K3DSL_CACHE_MAX_BYTES", str(2 * one))
    cache = CompileCache(root)
    for n in range(5):
        cache.get_or_build(make_key(n), build)
    assert len(present(root, 5)) == 2
    with pytest.raises(ConfigError, match="max_bytes"):
        CompileCache(root, max_bytes=-1)


def test_pinned_entries_stay(root: Path, fresh: Fresh, build: Builder) -> None:
    """Lesson 30: pins outlive the process, and may come before the entry."""
    fill(root, 4)
    CompileCache(root).pin([make_key(1), make_key(9).digest])
    CompileCache(root).get_or_build(make_key(9), build)
    report = CompileCache(root).prune(0)
    assert present(root, 10) == [1, 9]
    assert report.exempt == 2
    assert CompileCache(root).stats()["pinned"] == 2
    CompileCache(root).unpin([make_key(1), make_key(2)])
    CompileCache(root).prune(0)
    assert present(root, 10) == [9]
    with pytest.raises(ConfigError, match="full digest"):
        CompileCache(root).pin(["abc"])


def test_entries_in_use_stay(root: Path) -> None:
    """Lesson 30: whoever holds an entry, here or in another process, keeps its files until he lets go."""
    fill(root, 3)
    user = CompileCache(root)
    held = user.get(make_key(0))
    assert held is not None
    assert CompileCache(root).prune(0).exempt == 1
    assert present(root, 3) == [0]
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child = CompileCache(root)
            kept = child.get_or_build(make_key(5), Builder())
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0 if kept.payload else 1)
        finally:
            os._exit(1)
    os.read(ready[0], 1)
    CompileCache(root).prune(0)
    assert present(root, 6) == [0, 5]
    os.write(done[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    del held
    user.prune(0)
    assert present(root, 6) == []


def test_dry_run_removes_nothing(root: Path) -> None:
    one = fill(root, 4)
    said = CompileCache(root).prune(one, dry_run=True)
    assert present(root, 4) == [0, 1, 2, 3]
    done = CompileCache(root).prune(one)
    assert [item.digest for item in said.removed] == [item.digest for item in done.removed]
    assert (said.freed_bytes, said.kept, said.dry_run) == (done.freed_bytes, done.kept, True)
    assert present(root, 4) == [3]


def test_by_age(root: Path) -> None:
    fill(root, 4)
    report = CompileCache(root).prune(older_than=998.5)
    assert [item.digest for item in report.removed] == [make_key(n).digest for n in (0, 1)]
    assert all(item.idle_seconds > 998.5 for item in report.removed)
    assert CompileCache(root).prune(older_than=10**6).removed == []
    assert CompileCache(root).prune().removed == []  # no bound, no age: nothing to do


def test_what_is_quarantined_goes_first(root: Path, fresh: Fresh) -> None:
    fill(root, 2)
    entry = CompileCache(root).get(make_key(1))
    assert entry is not None
    os.truncate(f"{entry.path}/kernel.cubin", 5)
    del entry
    assert fresh().get(make_key(1)) is None
    total = CompileCache(root).stats()
    report = CompileCache(root).prune(total["bytes"])
    assert [item.target for item in report.removed] == ["quarantine"]
    assert present(root, 2) == [0]


def test_what_cannot_be_removed_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 33."""
    fill(root, 2)
    cache = CompileCache(root)
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    report = cache.prune(0)
    assert len(report.failed) == 2
    assert "Read-only" in report.failed[0].reason
    assert (report.removed, report.kept) == ([], 2)


def test_two_prune_at_once(root: Path) -> None:
    fill(root, 8)
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(1 if CompileCache(root).prune(0).failed else 0)
            finally:
                os._exit(2)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert present(root, 8) == []
