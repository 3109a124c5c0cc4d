"""Disks that fail: the run goes on from memory, says so once, and leaves nothing half-written."""

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, files_under, make_key, payload_of

from k3dsl.cache import CompileCache, bound
from k3dsl.cache.doctor import findings

Fresh = Callable[..., CompileCache]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def failing(code: int, *, after: int = 0) -> Callable[..., int]:
    """An os.write that writes `after` bytes and then fails."""
    real, left = os.write, [after]

    def write(descriptor: int, content: Any) -> int:
        if left[0] <= 0:
            raise OSError(code, os.strerror(code))
        count = real(descriptor, bytes(content)[: left[0]])
        left[0] -= count
        return count

    return write


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("after", [0, 1000, 30_100])
def test_a_full_or_failing_disk_costs_a_warning(
    cache: CompileCache,
    fresh: Fresh,
    root: Path,
    build: Builder,
    caplog: pytest.LogCaptureFixture,
    code: int,
    after: int,
) -> None:
    """Lesson 4: the run goes on from memory, one warning says what to set, nothing half-written stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", failing(code, after=after))
        entries = [cache.get_or_build(make_key(n), build) for n in range(3)]
        assert [cache.get(make_key(n)) is entries[n] for n in range(3)] == [True] * 3
    assert [entry.payload for entry in entries] == [payload_of(make_key(n)) for n in range(3)]
    assert not [name for name in files_under(root) if os.path.basename(name).startswith((".tmp", "kernel"))]
    assert len(warnings(caplog)) == 1
    assert "K3DSL_CACHE_DIR" in warnings(caplog)[0]
    assert os.strerror(code) in warnings(caplog)[0]
    assert "write_failed" in cache.degraded
    assert cache.get_or_build(make_key(4), build).path is not None  # there is room again
    assert fresh().get(make_key(4)) is not None


@pytest.mark.parametrize("call", ["mkdir", "rename", "fsync", "chmod", "fchmod"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_any_step_of_publishing_may_fail(
    root: Path, build: Builder, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    """Lesson 4."""
    cache = CompileCache(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, lambda *_, **__: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
        assert cache.get_or_build(make_key(), build).payload == payload_of(make_key())
    assert cache.get(make_key()) is not None
    assert len(warnings(caplog)) == 1
    assert CompileCache(root).get_or_build(make_key(), build).payload == payload_of(make_key())


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 64 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "none", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lesson 4, on a filesystem that has no room."""
    build = Builder(40_000)
    cache = CompileCache(tiny / "cache")
    for n in range(4):
        assert cache.get_or_build(make_key(n), build).payload == payload_of(make_key(n), 40_000)
    assert len(warnings(caplog)) == 1
    assert not [name for name in files_under(tiny) if ".tmp" in name]
    again = CompileCache(tiny / "cache")
    assert sum(again.get(make_key(n)) is not None for n in range(4)) == 1
    assert again.stats()["corrupt"] == 0


def test_reading_that_fails_is_a_miss(
    cache: CompileCache, fresh: Fresh, build: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    """Lesson 4: EIO says nothing about the entry, so it is not quarantined."""
    key = make_key()
    cache.get_or_build(key, build)
    reader = fresh()
    real = os.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "read", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        assert reader.get(key) is None
    assert os.read is real
    assert (reader.stats()["read_failed"], reader.stats()["corrupt"]) == (1, 0)
    assert len(warnings(caplog)) == 1
    assert fresh().get(key) is not None


def close_listing(patch: pytest.MonkeyPatch, path: Path, *, ghost: str | None = None) -> None:
    """Makes `path` a folder that cannot be listed, or one whose listing has a `ghost` that is gone by now."""
    real = os.listdir

    def listdir(where: str) -> list[str]:
        if str(where) != str(path):
            return real(where)
        if ghost is None:
            raise PermissionError(errno.EACCES, "Permission denied", str(where))
        return [*real(where), ghost]

    patch.setattr(os, "listdir", listdir)


def test_a_folder_that_cannot_be_listed_costs_its_own_entries(
    root: Path, fresh: Fresh, build: Builder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 1: keeping the bound and counting never fail a finished build, and never hide the other entries."""
    keys = [make_key(n) for n in range(4)]
    shards = [Path(str(CompileCache(root).get_or_build(key, build).path)).parent for key in keys]
    close_listing(monkeypatch, shards[0])
    cache = fresh(max_bytes=10**9)
    assert cache.get_or_build(make_key(9), build).path is not None
    shown = {entry.digest for entry in cache.entries()}
    assert shown == {key.digest for key in (*keys, make_key(9)) if key.digest[:2] != shards[0].name}
    assert cache.stats()["entries"] == len(shown)
    assert cache.prune(0).failed == []
    assert "Permission denied" in cache.degraded["unreadable"]
    assert len(warnings(caplog)) == 1
    [entries] = [item for item in findings(cache) if item.name == "cache entries"]
    assert (entries.status, str(shards[0]) in entries.found) == ("bad", True)


def test_two_quarantine_at_once(root: Path, fresh: Fresh, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 1: what another process takes out of quarantine meanwhile is no fault of a build."""
    path = fresh().get_or_build(make_key(), build).path
    os.truncate(f"{path}/kernel.cubin", 3)
    close_listing(monkeypatch, root / "quarantine", ghost="gone")
    cache = fresh(max_bytes=10**9)
    assert cache.get_or_build(make_key(), build).path is not None
    assert cache.stats()["quarantined"] == 1
    assert cache.prune(0).failed == []
    real = os.rename

    def rename(source: str, target: str) -> None:
        real(source, target)
        if f"{root}/quarantine/" in target:
            shutil.rmtree(target)

    monkeypatch.setattr(os, "rename", rename)
    path = fresh().get_or_build(make_key(), build).path
    os.truncate(f"{path}/kernel.cubin", 3)
    assert fresh().get_or_build(make_key(), build).payload == payload_of(make_key())


def test_a_bound_that_cannot_be_kept_costs_a_warning(
    root: Path, build: Builder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 1."""
    monkeypatch.setattr(
        bound, "prune", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
    )
    cache = CompileCache(root, max_bytes=0)
    for n in range(2):
        assert cache.get_or_build(make_key(n), build).path is not None
    assert len(warnings(caplog)) == 1
    assert "may outgrow its bound" in cache.degraded["prune_failed"]


def test_figures_that_cannot_be_had_are_a_finding(root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(root)
    cache.get_or_build(make_key(), build)
    monkeypatch.setattr(cache, "stats", lambda: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    [entries] = [item for item in findings(cache) if item.name == "cache entries"]
    assert (entries.status, "Input/output error" in entries.found) == ("bad", True)
