"""The folder: what is published is whole, what is damaged is found, what fails to be written stops nothing."""

import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, files_under, make_key, payload_of

from k3dsl.cache import Built, CompileCache, store
from k3dsl.cache.entry import Manifest
from k3dsl.errors import ConfigError

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
