"""Off, read-only, sealed, frozen, captured: what a cache may do and what it refuses."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cache_tools import Builder, files_under, make_key, payload_of

from k3dsl.cache import CompileCache
from k3dsl.errors import CacheMiss, CaptureError, ConfigError

Fresh = Callable[..., CompileCache]


def test_off_reads_and_writes_nothing(root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    CompileCache(root).get_or_build(make_key(), build)
    before = files_under(root)
    monkeypatch.setenv("K3DSL_CACHE", "off")
    cache = CompileCache(root, layers=[root])
    assert cache.get(make_key()) is None
    assert cache.get_or_build(make_key(), build) is cache.get(make_key())
    cache.get_or_build(make_key(2), build)
    assert (build.calls, files_under(root)) == (3, before)
    assert cache.reread(make_key(2)) is None


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_read_only_reads_and_writes_nothing(
    root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Lesson 11: a hit that needs no write; whatever is damaged stays where it is."""
    path = Path(str(CompileCache(root).get_or_build(make_key(), build).path))
    truncated = Path(str(CompileCache(root).get_or_build(make_key(2), build).path))
    os.truncate(truncated / "kernel.cubin", 10)
    shutil.rmtree(root / "sessions")
    shutil.rmtree(root / "locks")
    before = {name: os.stat(root / name).st_mtime_ns for name in files_under(root)}
    if by == "environment":
        monkeypatch.setenv("K3DSL_CACHE", "ro")
    cache = CompileCache(root, read_only=by == "argument")
    assert cache.get(make_key()).path == str(path)  # type: ignore[union-attr]
    assert cache.get(make_key(2)) is None
    assert cache.get_or_build(make_key(2), build).payload == payload_of(make_key(2))
    assert cache.get_or_build(make_key(3), build).path is None
    assert cache.reread(make_key(3)) is None
    cache.pin([make_key()])
    assert cache.prune(0).dry_run
    del cache
    assert {name: os.stat(root / name).st_mtime_ns for name in files_under(root)} == before
    assert sorted(os.listdir(root)) == ["v1"]


def test_a_sealed_cache_refuses_with_the_difference(cache: CompileCache, root: Path, build: Builder) -> None:
    """Lesson 21: after warm-up a miss is an error that says what is missing and what is nearest."""
    cache.get_or_build(make_key(1), build)
    cache.seal()
    assert cache.get(make_key(1)) is not None
    for ask in (cache.get, lambda key: cache.get_or_build(key, build)):
        with pytest.raises(CacheMiss, match=r"(?s)sealed.*nearest is.*params\.n: 2 wanted, 1 there"):
            ask(make_key(2))
    assert (build.calls, cache.sealed) == (1, True)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_frozen_cache_is_sealed_from_the_start(
    root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    CompileCache(root).get_or_build(make_key(1), build)
    if by == "environment":
        monkeypatch.setenv("K3DSL_CACHE", "frozen")
    cache = CompileCache(root, frozen=by == "argument")
    assert cache.get_or_build(make_key(1), build).source == "disk"
    with pytest.raises(CacheMiss, match="params"):
        cache.get_or_build(make_key(2), build)
    assert make_key(1) in cache
    assert make_key(2) not in cache
    assert build.calls == 1


def test_no_build_inside_a_capture(cache: CompileCache, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 21: refused with the key, before anything is waited for; what is there is served."""
    cuda = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    cache.get_or_build(make_key(1), build)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert cache.get_or_build(make_key(1), build).payload == payload_of(make_key(1))
    with pytest.raises(CaptureError, match=make_key(2).short):
        cache.get_or_build(make_key(2), build)
    assert build.calls == 1


def test_reread_asks_the_disk(cache: CompileCache, build: Builder) -> None:
    """Lesson 5: warm-up checks that an entry is stored and sound, not that it was built."""
    entry = cache.get_or_build(make_key(), build)
    found = cache.reread(make_key())
    assert found is not None
    assert (found.source, found.payload) == ("disk", entry.payload)
    shutil.rmtree(str(entry.path))
    assert cache.get(make_key()) is not None
    assert cache.reread(make_key()) is None


def test_remove(cache: CompileCache, fresh: Fresh, build: Builder) -> None:
    cache.get_or_build(make_key(), build)
    assert cache.remove(make_key())
    assert cache.get(make_key()) is None
    assert not fresh().remove(make_key().digest)
    with pytest.raises(ConfigError, match="full digest"):
        cache.remove("abc")
