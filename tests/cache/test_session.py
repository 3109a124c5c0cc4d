"""Counters that outlive processes, and who uses what."""

import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_tools import Builder, make_key

from k3dsl.cache import COUNTERS, CompileCache, session
from k3dsl.cache.session import InUse, Session, fold, in_use, totals
from k3dsl.cache.trust import Trust

Fresh = Callable[..., CompileCache]
PROGRAM = """
import sys
from cache_tools import Builder, make_key
from k3dsl.cache import CompileCache
cache = CompileCache(sys.argv[1])
cache.get_or_build(make_key(int(sys.argv[2])), Builder())
for _ in range(5):
    cache.get(make_key(int(sys.argv[2])))
"""


def run(root: Path, n: int) -> None:
    repository = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{repository}:{repository / 'tests'}"}
    subprocess.run([sys.executable, "-c", PROGRAM, str(root), str(n)], env=environ, check=True)


def test_counts_of_ended_processes_add_up(root: Path) -> None:
    run(root, 1)
    run(root, 1)
    run(root, 2)
    stats = CompileCache(root).stats()
    assert {name: stats[name] for name in ("built", "stored", "miss", "disk_hit", "memory_hit")} == {
        "built": 2,
        "stored": 2,
        "miss": 2,
        "disk_hit": 1,
        "memory_hit": 15,
    }
    assert stats["session"]["built"] == 0
    assert stats.built == 2
    with pytest.raises(AttributeError, match="stats has no 'bilt'"):
        stats.bilt  # noqa: B018


def test_folding_counts_nothing_twice(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    for _ in range(5):
        log = Session(str(root), Trust())
        log.counts.add("built", 2)
        log.close()
    assert totals(str(root))["built"] == 10
    with monkeypatch.context() as patch:  # killed after the totals were written, before the files were gone
        patch.setattr(os, "unlink", lambda path: (_ for _ in ()).throw(OSError("killed")))
        fold(str(root))
    assert totals(str(root))["built"] == 10
    fold(str(root))
    fold(str(root))
    assert totals(str(root))["built"] == 10
    assert [name for name in os.listdir(root / "sessions") if name.endswith(".log")] == []


@pytest.mark.parametrize("after", [0, 1])
def test_totals_are_written_whole_or_not_at_all(root: Path, after: int) -> None:
    """Lesson 4: a disk that fills up takes no figures and leaves no file."""
    root.mkdir()
    log = Session(str(root), Trust())
    log.counts.add("built", 2)
    log.close()
    before = sorted(os.listdir(root / "sessions"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, limit[1]))
    try:
        fold(str(root))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted({*os.listdir(root / "sessions")} - {"totals.lock"}) == before
    fold(str(root))
    assert totals(str(root))["built"] == 2


def test_a_living_session_is_not_folded(root: Path) -> None:
    root.mkdir()
    log = Session(str(root), Trust())
    log.counts.add("built", 1)
    use = InUse(log)
    use.hold("ab" * 32)
    log.flush()
    fold(str(root))
    assert len(list((root / "sessions").glob("*.log"))) == 1
    assert totals(str(root))["built"] == 1
    assert in_use(str(root)) == {"ab" * 32}
    use.release("ab" * 32)
    assert in_use(str(root)) == set()
    use.hold("cd" * 32)
    log.close()
    assert in_use(str(root)) == set()


def test_many_dead_sessions_are_folded_on_the_way_out(root: Path, build: Builder) -> None:
    root.mkdir()
    for _ in range(session._FOLD_ABOVE + 2):
        log = Session(str(root), Trust())
        log.counts.add("built", 1)
        log.close()
    assert len(list((root / "sessions").glob("*.log"))) <= 2
    assert totals(str(root))["built"] == session._FOLD_ABOVE + 2


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"counts": 1}', b"\xff\xfe", b'{"counts": {"a": "b"}, "folded": []}']
)
def test_damaged_figures_are_only_figures(root: Path, build: Builder, content: bytes) -> None:
    """Lesson 31: nothing but the figures depends on these files."""
    CompileCache(root).get_or_build(make_key(), build)
    gc.collect()
    (root / "sessions" / "totals.json").write_bytes(content)
    (root / "sessions" / ("0" * 16 + ".log")).write_bytes(
        content + b"\n{]\n+x\n" + json.dumps({"built": 1}).encode() + b"\n"
    )
    cache = CompileCache(root)
    assert cache.get(make_key()) is not None
    assert cache.stats()["built"] >= 1
    assert set(COUNTERS) <= set(cache.stats())


def test_no_place_for_figures_costs_the_figures_alone(root: Path, build: Builder) -> None:
    root.mkdir()
    (root / "sessions").write_text("a file where a folder should be")
    cache = CompileCache(root)
    assert cache.get_or_build(make_key(), build).path is not None
    assert cache.stats()["built"] == 1
    assert cache.degraded == {}


def test_a_read_only_cache_counts_in_memory(root: Path, fresh: Fresh, build: Builder) -> None:
    CompileCache(root).get_or_build(make_key(), build)
    gc.collect()
    reader = fresh(read_only=True)
    reader.get(make_key())
    stats = reader.stats()
    assert (stats["built"], stats["disk_hit"], stats["session"]["disk_hit"]) == (1, 1, 1)
    del reader
    assert fresh().stats()["disk_hit"] == 0


def test_counts_before_there_is_a_folder_are_kept(root: Path, build: Builder) -> None:
    cache = CompileCache(root)
    cache.get(make_key())
    assert cache.stats()["miss"] == 1
    assert not root.exists()
    cache.get_or_build(make_key(), build)
    del cache
    gc.collect()
    assert (CompileCache(root).stats()["miss"], CompileCache(root).stats()["built"]) == (2, 1)


def test_the_table_is_seen_at_once_and_does_not_grow(root: Path, build: Builder) -> None:
    cache = CompileCache(root)
    for n in range(3):
        cache.get_or_build(make_key(n), build)
    assert in_use(str(root)) == set()
    for _ in range(5000):
        assert cache.get(make_key(0)) is not None
    entry = cache.get(make_key(1))
    assert in_use(str(root)) == {make_key(1).digest}
    other = cache.reread(make_key(1))
    del entry
    assert in_use(str(root)) == {make_key(1).digest}
    del other
    assert in_use(str(root)) == set()
    (table,) = (root / "sessions").glob("*.use")
    assert table.stat().st_size == 64 * 1024


def test_an_entry_that_outlives_its_cache_is_in_use(root: Path, build: Builder) -> None:
    """Lesson 24: whoever has loaded a kernel keeps its entry, not the cache that it came from."""
    entry = CompileCache(root).get_or_build(make_key(), build)
    gc.collect()
    assert in_use(str(root)) == {make_key().digest}
    assert CompileCache(root).prune(0).exempt == 1
    del entry
    assert CompileCache(root).prune(0).kept == 0


def test_more_entries_than_the_table_has_slots(root: Path, monkeypatch: pytest.MonkeyPatch, build: Builder) -> None:
    monkeypatch.setattr(session, "_SLOTS", 2)
    cache = CompileCache(root)
    held = [cache.get_or_build(make_key(n), build) for n in range(4)]
    assert len(in_use(str(root))) == 2
    assert CompileCache(root).prune(0).exempt == 2
    del held
    assert in_use(str(root)) == set()
