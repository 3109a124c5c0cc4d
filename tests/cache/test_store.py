"""The folder: what is published is whole, what is damaged is found, what fails to be written stops nothing."""

import errno
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_tools import Builder, files_under, make_key, payload_of

from k3dsl.cache import Built, CompileCache, store
from k3dsl.cache.entry import Manifest
from k3dsl.errors import CacheMiss, CaptureError, ConfigError

Fresh = Callable[..., CompileCache]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# What is on the disk


def test_an_entry_is_a_folder_with_the_object_and_a_manifest(cache: CompileCache, root: Path, build: Builder) -> None:
    key = make_key()
    entry = cache.get_or_build(key, build)
    folder = root / "v1" / "sm_90a" / key.digest[:2] / key.digest
    assert sorted(os.listdir(folder)) == ["kernel.cubin", "manifest.json"]
    assert (folder / "kernel.cubin").read_bytes() == payload_of(key) == entry.payload
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["key"] == key.to_json()
    assert manifest["digest"] == key.digest
    assert manifest["payload"] == "kernel.cubin"
    assert manifest["sha256"] == sha256(entry.payload).hexdigest()
    assert manifest["size"] == len(entry.payload)
    assert manifest["resources"] == {"registers": 64, "spills": 0}
    assert manifest["build_seconds"] >= 0
    assert manifest["host"]
    assert manifest["user"]
    assert manifest["log"] == "ptxas: fine\n"


def test_a_hit_does_not_build(cache: CompileCache, fresh: Fresh, build: Builder) -> None:
    key = make_key()
    first = cache.get_or_build(key, build)
    assert cache.get_or_build(key, build) is first
    assert cache.get(key) is first
    again = fresh().get_or_build(key, build)
    assert (again.payload, again.source, again.key) == (first.payload, "disk", key)
    assert build.calls == 1
    assert again.resources == {"registers": 64, "spills": 0}


def test_a_miss_is_none_and_what_build_raises_comes_through(cache: CompileCache, root: Path, build: Builder) -> None:
    def fail(key: Any) -> Built:
        raise RuntimeError("ptxas: no")

    assert cache.get(make_key()) is None
    with pytest.raises(RuntimeError, match="ptxas: no"):
        cache.get_or_build(make_key(), fail)
    assert files_under(root) == []
    assert cache.stats()["build_failed"] == 1
    assert cache.get_or_build(make_key(), build).source == "built"


@pytest.mark.parametrize("made", [None, b"x", (b"x", "kernel.cubin")])
def test_a_build_that_returns_something_else_is_refused(cache: CompileCache, made: Any) -> None:
    with pytest.raises(ConfigError, match=r"not k3dsl\.cache\.Built"):
        cache.get_or_build(make_key(), lambda key: made)
    assert cache.get(make_key()) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"payload": b""}, "payload"),
        ({"payload": "text"}, "payload"),
        ({"filename": "../x"}, "filename"),
        ({"filename": "manifest.json"}, "filename"),
        ({"filename": ".hidden"}, "filename"),
        ({"resources": {"x": object()}}, "resources"),
    ],
)
def test_what_cannot_be_stored_is_refused_where_it_is_made(changes: dict[str, Any], word: str) -> None:
    facts: dict[str, Any] = {"payload": b"x", "filename": "kernel.cubin", "resources": {}}
    with pytest.raises(ConfigError, match=word):
        Built(**(facts | changes))


def test_only_a_key_is_a_key(cache: CompileCache) -> None:
    with pytest.raises(ConfigError, match="must be a CompileKey"):
        cache.get("abc")  # type: ignore[arg-type]


# Publishing


def test_a_writer_that_lost_the_race_uses_its_own_result(cache: CompileCache, fresh: Fresh, root: Path) -> None:
    """Lesson 1: unique temporary folders, one rename, and the loser goes on with what it built."""
    key = make_key()

    def slow(key: Any) -> Built:
        fresh().get_or_build(make_key(2), Builder())  # another key is no obstacle
        manifest = Manifest.load(cache_entry_manifest(root, make_key(2)))
        other = Manifest(**{**{f: getattr(manifest, f) for f in manifest.__struct_fields__},
                            "key": key.to_json(), "digest": key.digest})  # fmt: skip
        assert store.Folder(root).publish(other, payload_of(make_key(2)))
        return Built(b"mine", "kernel.cubin")

    entry = cache.get_or_build(key, slow)
    assert entry.payload == b"mine"
    assert cache.stats()["raced"] == 1
    assert fresh().get(key).payload == payload_of(make_key(2))  # type: ignore[union-attr]
    assert not [name for name in files_under(root) if ".tmp" in name]


def cache_entry_manifest(root: Path, key: Any) -> bytes:
    return (root / "v1" / key.target / key.digest[:2] / key.digest / "manifest.json").read_bytes()


def test_an_entry_appears_whole(
    cache: CompileCache, root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 2: readers see no folder until all its files are there, written and synced."""
    key = make_key()
    synced: list[str] = []
    real_rename, real_sync = os.rename, os.fsync

    def rename(source: str, target: str) -> None:
        assert sorted(os.listdir(source)) == ["kernel.cubin", "manifest.json"]
        assert not os.path.exists(target)
        assert len(synced) >= 3  # two files and their folder
        real_rename(source, target)

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "fsync", sync)
    cache.get_or_build(key, build)
    names = [os.path.basename(path) for path in synced]
    assert {"kernel.cubin", "manifest.json", key.digest[:2]} <= set(names)


def test_the_temporary_folder_of_a_killed_writer_goes(
    cache: CompileCache, fresh: Fresh, root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 3: what a killed writer left is swept; what a living one holds is not."""
    cache.get_or_build(make_key(), build)
    shard = root / "v1" / "sm_90a" / "00"
    shard.mkdir(exist_ok=True)
    dead, living = shard / ".tmp-0123456789abcdef", shard / ".tmp-fedcba9876543210"
    for folder in (dead, living):
        folder.mkdir()
        (folder / "kernel.cubin").write_bytes(b"half")
    monkeypatch.setattr(store, "_TEMP_SECONDS", 0.0)
    lock = store.Lock(str(living))
    assert lock.take()
    fresh().get_or_build(make_key(2), build)
    assert (dead.exists(), living.exists()) == (False, True)
    lock.release()
    assert fresh().prune(10**9).removed == []
    assert not living.exists()


def test_cleaning_up_never_fails_a_finished_build(
    cache: CompileCache, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 1."""
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOTEMPTY, "there")))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert cache.get_or_build(make_key(), build).source == "built"


# Damage


def truncate(folder: Path) -> None:
    os.truncate(folder / "kernel.cubin", 1000)


def empty(folder: Path) -> None:
    os.truncate(folder / "kernel.cubin", 0)


def flip(name: str, at: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        (folder / name).write_bytes(content)

    return damage


def append(folder: Path) -> None:
    with open(folder / "kernel.cubin", "ab") as file:
        file.write(b"\0")


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def no_payload(folder: Path) -> None:
    (folder / "kernel.cubin").unlink()


def other_entry(folder: Path) -> None:
    """The folder of one key with the files of another, whole and consistent in themselves."""
    root = folder.parents[3]
    CompileCache(root).get_or_build(make_key("other"), Builder())
    other = make_key("other")
    source = root / "v1" / other.target / other.digest[:2] / other.digest
    shutil.rmtree(folder)
    shutil.copytree(source, folder)


def not_a_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"what?")


def link_payload(folder: Path) -> None:
    moved = folder.parents[3] / "elsewhere"
    (folder / "kernel.cubin").rename(moved)
    (folder / "kernel.cubin").symlink_to(moved)


def pipe_payload(folder: Path) -> None:
    (folder / "kernel.cubin").unlink()
    os.mkfifo(folder / "kernel.cubin")


def newer_schema(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    del content["check"]
    manifest = Manifest(**{**content, "schema": 2})
    (folder / "manifest.json").write_bytes(manifest.dump())


def deep(manifest: bytes, depth: int) -> bytes:
    """A manifest whose key holds a value `depth` arrays deep, its own checksum made to fit."""
    content = json.loads(manifest)
    del content["check"]
    content["key"]["params"]["deep"] = "DEEP"
    body = json.dumps(content, indent=2).replace('"DEEP"', "[" * depth + "]" * depth)
    head = body[: body.rindex("\n}")].encode() + b",\n"
    return head + b'  "check": "' + sha256(head).hexdigest().encode() + b'"\n}\n'


def deep_key(depth: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_bytes(deep(path.read_bytes(), depth))

    return damage


DAMAGES = {
    "key too deep to walk": deep_key(900),
    "key too deep to read": deep_key(100_000),
    "truncated": truncate,
    "empty": empty,
    "payload bit": flip("kernel.cubin", 0.5),
    "last payload bit": flip("kernel.cubin", 1),
    "appended": append,
    "no manifest": no_manifest,
    "no payload": no_payload,
    "empty manifest": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "binary manifest": lambda folder: (folder / "manifest.json").write_bytes(bytes(range(256))),
    "another entry": other_entry,
    "not a folder": not_a_folder,
    "empty folder": lambda folder: [no_manifest(folder), no_payload(folder)],
    "newer schema": newer_schema,
    **{f"manifest bit {at}": flip("manifest.json", at / 10) for at in range(11)},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_a_miss_and_heals(
    cache: CompileCache, fresh: Fresh, root: Path, build: Builder, damage: Callable[[Path], Any]
) -> None:
    """Lessons 2, 3: damage is never loaded: quarantined, counted, built again."""
    key = make_key()
    path = cache.get_or_build(key, build).path
    assert path is not None
    damage(Path(path))
    assert build.calls == 1
    reader = fresh()
    assert reader.get(key) is None
    if os.path.basename(str(path)) in os.listdir(Path(path).parent):
        pytest.fail("the damaged entry still stands")
    kept = os.listdir(root / "quarantine")
    assert len(kept) == 1
    assert kept[0].startswith(key.digest)
    assert reader.stats()["corrupt"] == 1
    assert "quarantined" in str(reader.explain(key)) or not (root / "quarantine" / kept[0]).is_dir()
    assert fresh().get_or_build(key, build).payload == payload_of(key)
    assert build.calls == 2
    assert fresh().get(key).payload == payload_of(key)  # type: ignore[union-attr]


@pytest.mark.parametrize("damage", [link_payload, pipe_payload])
def test_what_is_no_plain_file_is_not_read(
    cache: CompileCache, fresh: Fresh, build: Builder, damage: Callable[[Path], Any]
) -> None:
    """Lesson 29: no link is followed, no pipe is waited for."""
    key = make_key()
    damage(Path(str(cache.get_or_build(key, build).path)))
    reader = fresh()
    assert reader.get(key) is None
    assert reader.get_or_build(key, build).payload == payload_of(key)
    assert fresh().get(key).payload == payload_of(key)  # type: ignore[union-attr]


def test_every_flipped_bit_of_a_manifest_is_noticed(cache: CompileCache, build: Builder) -> None:
    """Lesson 3: the resource use in it decides launches, so it is checked like the payload."""
    path = Path(str(cache.get_or_build(make_key(), build).path)) / "manifest.json"
    content = path.read_bytes()
    for at in range(len(content)):
        damaged = content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]
        with pytest.raises(store.CorruptError):
            Manifest.load(damaged)
    for end in range(0, len(content), 7):
        with pytest.raises(store.CorruptError):
            Manifest.load(content[:end])


def test_a_sound_entry_is_not_quarantined_for_its_predecessor(cache: CompileCache, root: Path, build: Builder) -> None:
    """Lesson 3: between reading a corrupt entry and moving it away, another process may have replaced it."""
    key = make_key()
    path = str(cache.get_or_build(key, build).path)
    folder = store.Folder(root)
    real = os.stat

    def swapped(target: Any, **options: Any) -> os.stat_result:
        found = real(target, **options)
        if target == path:  # the corrupt one was another folder
            values = list(found)
            values[stat.ST_INO] += 1
            return os.stat_result(values)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", swapped)
        assert folder.quarantine(path, "corrupt") is None
    assert folder.load(key) is not None


def test_quarantine_does_not_grow_for_ever(cache: CompileCache, fresh: Fresh, root: Path, build: Builder) -> None:
    for _ in range(store.QUARANTINE_LIMIT + 4):
        truncate(Path(str(fresh().get_or_build(make_key(), build).path)))
    assert fresh().get(make_key()) is None
    assert len(os.listdir(root / "quarantine")) == store.QUARANTINE_LIMIT


def test_an_entry_that_is_being_removed_is_absent_not_corrupt(
    cache: CompileCache, fresh: Fresh, root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 2: eviction takes the files of an open folder one by one."""
    key = make_key()
    path = str(cache.get_or_build(key, build).path)
    real = store.read_checked

    def remove_first(name: str, *rest: Any) -> bytes:
        if os.path.exists(path):
            store.Folder(root).remove(path)
        return real(name, *rest)

    monkeypatch.setattr(store, "read_checked", remove_first)
    reader = fresh()
    assert reader.get(key) is None
    assert reader.stats()["corrupt"] == 0


# Faults of the disk


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


# Modes


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
