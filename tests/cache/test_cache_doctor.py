"""What `doctor` says of the cache: every degraded state, and what to do."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, make_key

from k3dsl.cache import CompileCache
from k3dsl.cache.doctor import Finding, filesystem, findings


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {item.name: item for item in found}


@pytest.fixture
def here(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(root))
    return root


def test_all_is_well(here: Path, build: Builder) -> None:
    CompileCache().get_or_build(make_key(), build)
    found = by_name(findings())
    assert {item.status for item in found.values()} == {"ok"}
    assert {"cache folder", "cache space", "cache writes", "cache locks", "cache entries"} <= set(found)
    assert str(here) in found["cache folder"].found
    assert "mode 755" in found["cache folder"].found
    assert found["cache entries"].found.startswith("1 entries")
    assert not [name for name in os.listdir(here) if name.startswith(".doctor")]


def test_no_folder_yet_is_no_fault(here: Path) -> None:
    found = by_name(findings())
    assert (found["cache folder"].status, "is made at the first build" in found["cache folder"].found) == ("info", True)
    assert not here.exists()


def test_a_folder_that_others_can_write_to(here: Path) -> None:
    """Lesson 29."""
    here.mkdir()
    here.chmod(0o777)
    found = by_name(findings())["cache folder"]
    assert (found.status, "chmod go-w" in found.found) == ("bad", True)


def test_a_file_where_the_folder_should_be(here: Path) -> None:
    here.write_text("")
    assert by_name(findings())["cache folder"].status == "bad"


@pytest.mark.parametrize("call", ["mkdir", "write", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
def test_writes_that_fail(here: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """Lesson 4: doctor tries what a publication does."""
    here.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lambda *_, **__: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
        found = by_name(findings())["cache writes"]
    assert (found.status, os.strerror(code) in found.found, bool(found.todo)) == ("bad", True, True)
    assert not [name for name in os.listdir(here) if name.startswith(".doctor")]


@pytest.mark.parametrize("name", ["v1", "v1/sm_90a", "v1/sm_90a/00", "locks", "sessions", "pins", "quarantine"])
def test_a_folder_below_that_is_not_ours(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lesson 28: made by root, once, in the folder of a user who can then store nothing."""
    (here / name).mkdir(parents=True)
    (here / "v1" / "sm_90a" / "11").mkdir(parents=True, exist_ok=True)
    assert by_name(findings())["cache writes"].status == "ok"
    access = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: str(path) != str(here / name) and access(path, mode))
        found = by_name(findings())["cache writes"]
    assert (found.status, found.found) == ("bad", f"{here / name} cannot be read and written")
    assert str(here) in found.todo


def test_no_locks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 10."""
    here.mkdir()
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
    found = by_name(findings())["cache locks"]
    assert (found.status, "No locks available" in found.found) == ("warn", True)


def test_locks_that_lock_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 10: a filesystem that says yes to everybody."""
    here.mkdir()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert by_name(findings())["cache locks"].status == "warn"


def test_little_space(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here.mkdir()
    facts = os.statvfs(here)
    full = os.statvfs_result((*facts[:3], 0, 0, *facts[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert by_name(findings())["cache space"].status == "bad"


def test_quarantine(here: Path, build: Builder) -> None:
    path = CompileCache().get_or_build(make_key(), build).path
    os.truncate(f"{path}/kernel.cubin", 1)
    assert CompileCache().get(make_key()) is None
    found = by_name(findings())["cache entries"]
    assert (found.status, "1 quarantined" in found.found) == ("warn", True)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 28."""
    monkeypatch.setattr("k3dsl.cache.compile_cache.find_root", lambda *_: None)
    assert by_name(findings())["cache folder"].status == "bad"


@pytest.mark.parametrize("mode", ["off", "ro", "frozen"])
def test_a_mode_is_told(here: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("K3DSL_CACHE", mode)
    assert f"K3DSL_CACHE={mode}" in by_name(findings())["cache mode"].found


def test_layers(here: Path, tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    CompileCache(good).get_or_build(make_key(), build)
    bad.mkdir()
    bad.chmod(0o777)
    monkeypatch.setenv("K3DSL_CACHE_LAYERS", f"{good}:{bad}:{tmp_path / 'none'}:http://127.0.0.1:9/k3")
    found = [item for item in findings() if item.name == "cache layer"]
    assert [item.status for item in found] == ["ok", "warn", "warn", "warn"]
    assert "1 entries" in found[0].found
    assert "not there" in found[2].found


def test_bad_and_misspelt_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3DSL_CACHE", "maybe")
    monkeypatch.setenv("K3DSL_CASH", "1")
    statuses = {(item.name, item.status) for item in findings()}
    assert statuses == {("environment", "bad"), ("environment", "warn")}


def test_the_filesystem_is_named(tmp_path: Path) -> None:
    assert filesystem(Path("/proc/self")) == "proc"
    assert filesystem(tmp_path) != "unknown filesystem"


def test_it_can_be_asked_of_a_cache(root: Path, build: Builder) -> None:
    cache: Any = CompileCache(root)
    cache.get_or_build(make_key(), build)
    assert str(root) in by_name(findings(cache))["cache folder"].found
