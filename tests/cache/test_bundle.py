"""Bundles: what is exported comes back, and nothing of a forged one stays."""

import io
import os
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from cache_tools import Builder, files_under, make_key, payload_of

from k3dsl.cache import BundleError, CompileCache, CorruptError
from k3dsl.cache.entry import Manifest
from k3dsl.cache.host import cannot_run, host_isa
from k3dsl.cache.store import Folder
from k3dsl.cache.tar import seal
from k3dsl.cache.trust import UntrustedError
from k3dsl.errors import CacheMiss, ConfigError

KEYS = [make_key(0), make_key(1), make_key(2, target="sm_100a")]


@pytest.fixture
def source(tmp_path: Path) -> CompileCache:
    cache = CompileCache(tmp_path / "source")
    for key in KEYS:
        cache.get_or_build(key, Builder())
    return cache


@pytest.fixture
def file(source: CompileCache, tmp_path: Path) -> Path:
    return Path(source.export(tmp_path / "kernels.k3b").path)


@pytest.fixture
def node(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "node")


def members(file: Path) -> list[tuple[str, bytes]]:
    """The members of a bundle, read with other tools than ours."""
    raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(file.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        return [(item.name, archive.extractfile(item).read()) for item in archive]  # type: ignore[union-attr]


def write(file: Path, items: list[Any], *, tail: bytes = b"") -> None:
    """A bundle of any members: (name, content) or a TarInfo with content."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in items:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    trimmed = raw.getvalue().rstrip(b"\0")
    trimmed += bytes(-len(trimmed) % 512) + bytes(1024)  # tarfile pads to 10 KiB, bundles do not
    file.write_bytes(compressed(trimmed + tail))


def compressed(raw: bytes) -> bytes:
    """A sealed frame."""
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
    return frame + seal(sha256(frame).digest())


def test_there_and_back(source: CompileCache, node: CompileCache, file: Path, build: Builder) -> None:
    report = node.import_bundle(file)
    assert report.imported == sorted(key.digest for key in KEYS)
    assert (report.present, report.skipped) == ([], [])
    assert report.sha256 == sha256(file.read_bytes()).hexdigest()
    for key in KEYS:
        mine, theirs = source.get(key), node.get(key)
        assert mine is not None
        assert theirs is not None
        assert (mine.payload, mine.manifest) == (theirs.payload, theirs.manifest)
    assert node.verify().clean
    assert node.stats()["imported"] == 3
    node.seal()
    assert node.get_or_build(KEYS[0], build).source == "memory"
    again = CompileCache(node.root).import_bundle(file)
    assert (again.imported, again.present) == ([], report.imported)


def test_a_bundle_that_a_tar_program_reads(file: Path, tmp_path: Path) -> None:
    names = [name for name, _ in members(file)]
    assert names[0] == "bundle.json"
    assert set(names[1:]) == {f"{key.digest}/{name}" for key in KEYS for name in ("manifest.json", "payload")}
    index = msgspec.json.decode(members(file)[0][1])
    for item in index["entries"]:
        key = next(key for key in KEYS if key.digest == item["digest"])
        assert item["target"] == key.target
        assert item["toolchain"] == {"dsl": "4.8.1", "flavour": "cu13"}
        assert item["payload_sha256"] == sha256(payload_of(key)).hexdigest()
        assert item["host_isa"] is None
    if shutil.which("zstd"):
        listing = subprocess.run(["tar", "--zstd", "-tf", str(file)], capture_output=True, text=True, check=True)
        assert listing.stdout.split() == names


def test_the_same_entries_give_the_same_bytes(source: CompileCache, file: Path, tmp_path: Path) -> None:
    again = Path(CompileCache(source.root).export(tmp_path / "again.k3b").path)
    assert again.read_bytes() == file.read_bytes()


def test_what_is_exported_can_be_chosen(source: CompileCache, tmp_path: Path) -> None:
    report = source.export(tmp_path / "a", target="sm_100a")
    assert (report.entries, report.targets, report.bytes) == (1, ["sm_100a"], os.path.getsize(tmp_path / "a"))
    assert source.export(tmp_path / "a", target=["sm_90a", "sm_100a"]).entries == 3
    assert source.export(tmp_path / "a", keys=[KEYS[0], KEYS[2].digest]).entries == 2
    with pytest.raises(CacheMiss, match=make_key(9).short):
        source.export(tmp_path / "b", keys=[KEYS[0], make_key(9)])
    with pytest.raises(BundleError, match="nothing to export"):
        source.export(tmp_path / "b", target="gfx950")
    assert not (tmp_path / "b").exists()
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


def test_a_bundle_never_lacks_what_is_damaged(source: CompileCache, tmp_path: Path) -> None:
    """Lesson 33: neither a damaged manifest nor a file of doubtful origin makes a bundle smaller and the exit 0."""
    path = source.get(KEYS[0]).path  # type: ignore[union-attr]
    os.truncate(f"{path}/manifest.json", 100)
    with pytest.raises(CorruptError, match=f"{path} is not sound: its manifest"):
        CompileCache(source.root).export(tmp_path / "b")
    with pytest.raises(CorruptError, match="not sound"):
        CompileCache(source.root).export(tmp_path / "b", keys=[KEYS[0]])
    assert CompileCache(source.root).export(tmp_path / "b", target="sm_100a").entries == 1
    assert CompileCache(source.root).export(tmp_path / "b", keys=[KEYS[1]]).entries == 1
    CompileCache(source.root).remove(KEYS[0])
    path = source.get(KEYS[1]).path  # type: ignore[union-attr]
    os.chmod(f"{path}/manifest.json", 0o666)
    with pytest.raises(UntrustedError, match="can be written by others"):
        CompileCache(source.root).export(tmp_path / "b")


def test_an_entry_that_is_evicted_meanwhile_costs_itself_alone(
    source: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Folder._payload

    def remove_first(folder: Folder, path: str, manifest: Manifest) -> bytes:
        if manifest.digest == KEYS[0].digest:
            folder.remove(path)
        return real(folder, path, manifest)

    monkeypatch.setattr(Folder, "_payload", remove_first)
    assert CompileCache(source.root).export(tmp_path / "b").entries == 2


def test_a_damaged_entry_is_not_exported(source: CompileCache, tmp_path: Path) -> None:
    """Lesson 5: what is shipped was checked."""
    path = Path(str(source.reread(KEYS[0]).path)) / "kernel.cubin"  # type: ignore[union-attr]
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(CorruptError, match="checksum"):
        CompileCache(source.root).export(tmp_path / "b")
    assert [name for name in os.listdir(tmp_path) if name.startswith("b")] == []


def test_what_cannot_run_here_is_skipped_with_the_reason(
    source: CompileCache, node: CompileCache, tmp_path: Path
) -> None:
    """Lesson 32: another arch, another flavour, a newer host ISA: skipped, the rest imported."""
    for isa in ("x86-64-v9", "x86-64"):
        toolchain = {"dsl": "4.8.1", "flavour": "cu13", "host_isa": isa}
        source.get_or_build(make_key(0, toolchain=toolchain), Builder())
    old = make_key(0, toolchain={"dsl": "4.8.1", "flavour": "cu12"})
    source.get_or_build(old, Builder())
    file = source.export(tmp_path / "x.k3b").path
    report = node.import_bundle(
        file,
        target="sm_90a",
        accept=lambda manifest: None if manifest.key["toolchain"]["flavour"] == "cu13" else "its flavour is cu12",
    )
    reasons = {item.digest: item.reason for item in report.skipped}
    assert reasons[KEYS[2].digest] == "it is for sm_100a, asked for was sm_90a"
    assert reasons[old.digest] == "its flavour is cu12"
    assert "x86-64-v9" in "".join(reasons.values())
    assert {KEYS[0].digest, KEYS[1].digest} <= set(report.imported)
    assert len(report.imported) + len(report.skipped) == 6
    assert node.get(KEYS[2]) is None


def test_host_code_is_taken_from_a_file_that_nobody_else_can_have_written(
    source: CompileCache, node: CompileCache, tmp_path: Path
) -> None:
    """It runs in the process that loads it: what is asked of the cache's folder is asked of the file."""
    key = make_key(0, toolchain={"dsl": "4.8.1", "host_isa": host_isa()})
    source.get_or_build(key, Builder())
    report = source.export(tmp_path / "x.k3b")
    os.chmod(report.path, 0o666)
    [skipped] = node.import_bundle(report.path).skipped
    assert skipped.digest == key.digest
    assert "has host code, and the bundle can be written by others (mode 666): chmod go-w it, or give" in skipped.reason
    assert node.get(KEYS[0]) is not None  # the others are data
    assert node.import_bundle(report.path, sha256=report.sha256).skipped == []
    assert node.get(key) is not None
    os.chmod(report.path, 0o644)
    other = CompileCache(tmp_path / "other")
    assert other.import_bundle(report.path).skipped == []


@pytest.mark.parametrize(("machine", "isa"), [("x86_64", "x86-64"), ("arm64", "aarch64"), ("riscv64", "riscv64")])
def test_which_host_code_runs_where(monkeypatch: pytest.MonkeyPatch, machine: str, isa: str) -> None:
    """Lesson 17."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert host_isa() == isa
    assert cannot_run(None) is None
    assert cannot_run(isa) is None
    for other in {"x86-64", "aarch64", "x86-64-v4"} - {isa}:
        assert cannot_run(other) == f"its host code is for {other}, this machine runs {isa}"


def test_what_another_import_stored_first_is_present(
    source: CompileCache, node: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Folder.publish

    def late(folder: Folder, manifest: Manifest, payload: bytes) -> bool:
        if manifest.digest == KEYS[0].digest:
            publish(folder, manifest, payload)
        return publish(folder, manifest, payload)

    monkeypatch.setattr(Folder, "publish", late)
    report = node.import_bundle(source.export(tmp_path / "x.k3b").path)
    assert report.present == [KEYS[0].digest]
    assert len(report.imported) == len(KEYS) - 1
    assert node.stats()["imported"] == len(KEYS) - 1


def refused(node: CompileCache, file: Path, match: str | None = None) -> None:
    """The bundle is refused and nothing of it is there."""
    with pytest.raises(BundleError, match=match):
        node.import_bundle(file)
    assert files_under(Path(str(node.root))) == [] if Path(str(node.root)).exists() else True


def test_a_flipped_byte_anywhere_is_refused(node: CompileCache, file: Path) -> None:
    """Lesson 32."""
    content = file.read_bytes()
    places = [
        *range(0, 64),
        *range(64, len(content), max(len(content) // 200, 1)),
        *range(len(content) - 16, len(content)),
    ]
    for at in places:
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        refused(node, file)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.7, 0.99, 1.0])
def test_a_truncated_bundle_is_refused(node: CompileCache, file: Path, part: float) -> None:
    """Lesson 32: also one that lacks only its last byte."""
    content = file.read_bytes()
    file.write_bytes(content[: int(part * (len(content) - 1))])
    refused(node, file, "truncated|damaged")


def test_something_appended_is_refused(node: CompileCache, file: Path) -> None:
    content = file.read_bytes()
    for tail in (b"\0", content, b"tail" * 1000):
        file.write_bytes(content + tail)
        refused(node, file, "appended|damaged")


def test_every_truncation_of_the_archive_is_refused(node: CompileCache, file: Path) -> None:
    raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(file.read_bytes())).read()
    for end in range(0, len(raw), 512 * 7):
        file.write_bytes(compressed(raw[:end]))
        refused(node, file, "truncated|begin|no tar")
    for tail in (bytes(512), bytes(10240), b"x" * 512):
        file.write_bytes(compressed(raw + tail))
        refused(node, file, "behind its end")


def special(name: str, kind: bytes, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    return info, b""


FORGERIES: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "path upwards": (lambda m: [*m, ("../../../../tmp/k3dsl-forged", b"x")], "does not name"),
    "absolute path": (lambda m: [*m, ("/tmp/k3dsl-forged", b"x")], "does not name"),
    "symlink": (lambda m: [m[0], special(m[1][0], tarfile.SYMTYPE, "/etc/passwd"), *m[2:]], "not a plain file"),
    "hard link": (lambda m: [m[0], special(m[1][0], tarfile.LNKTYPE, "/etc/passwd"), *m[2:]], "not a plain file"),
    "device": (lambda m: [m[0], special(m[1][0], tarfile.CHRTYPE), *m[2:]], "not a plain file"),
    "folder": (lambda m: [m[0], special(m[1][0], tarfile.DIRTYPE), *m[2:]], "not a plain file"),
    "no index": (lambda m: m[1:], "begin"),
    "index last": (lambda m: [*m[1:], m[0]], "begin"),
    "member missing": (lambda m: m[:-1], "not there"),
    "member twice": (lambda m: [*m, m[-1]], "does not name"),
    "members swapped": (lambda m: [m[0], m[2], m[1], *m[3:]], "in the place of"),
    "payload of another": (lambda m: [*m[:2], (m[2][0], m[4][1]), *m[3:]], "checksum"),
    "payload longer": (lambda m: [*m[:2], (m[2][0], m[2][1] + b"x"), *m[3:]], "bytes, not"),
    "index too deep": (
        lambda m: [(m[0][0], m[0][1].replace(b'"entries": [', b'"entries": ' + b"[" * 100_000)), *m[1:]],
        "cannot be read",
    ),
    "index not JSON": (lambda m: [(m[0][0], b"{"), *m[1:]], "cannot be read"),
    "empty": (lambda m: [], "begin"),
}


@pytest.mark.parametrize(("forge", "match"), FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_bundle_is_refused_and_nothing_stays(
    node: CompileCache, file: Path, forge: Callable[[list[Any]], list[Any]], match: str
) -> None:
    """Lesson 32: traversal, links, extra, missing, swapped or changed members."""
    write(file, forge(members(file)))
    refused(node, file, match)
    assert not Path("/tmp/k3dsl-forged").exists()


def edited(items: list[tuple[str, bytes]], **changes: Any) -> list[tuple[str, bytes]]:
    """The bundle with the first entry of its index changed."""
    index = msgspec.json.decode(items[0][1])
    index["entries"][0] |= changes
    return [(items[0][0], msgspec.json.encode(index)), *items[1:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "gfx950"},
        {"kernel": "other"},
        {"toolchain": {}},
        {"digest": "../../../etc/passwd"},
        {"digest": "ab" * 32},
        {"payload_size": 2**40},
        {"manifest_size": 2**30},
        {"payload_sha256": "0" * 64},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_index_that_tells_something_else_is_refused(node: CompileCache, file: Path, changes: dict[str, Any]) -> None:
    """Lesson 32."""
    write(file, edited(members(file), **changes))
    refused(node, file)


def test_a_consistent_forgery_of_the_key_is_refused(node: CompileCache, file: Path) -> None:
    """Lessons 15, 32: a payload under the key of another, all checksums made to fit."""
    items = members(file)
    manifest = msgspec.json.decode(items[1][1])
    manifest["key"]["target"] = "gfx950"
    del manifest["check"]
    from k3dsl.cache import Manifest

    head = Manifest(**manifest).dump()
    items[1] = (items[1][0], head)
    write(file, edited(items, manifest_sha256=sha256(head).hexdigest(), manifest_size=len(head), target="gfx950"))
    refused(node, file, "forged or damaged")


def test_the_checksum_of_the_whole_file(node: CompileCache, source: CompileCache, tmp_path: Path) -> None:
    """Lesson 32: what only a checksum sent another way can prove."""
    report = source.export(tmp_path / "x.k3b")
    with pytest.raises(BundleError, match="has sha256"):
        node.import_bundle(report.path, sha256="0" * 64)
    assert node.import_bundle(report.path, sha256=report.sha256.upper()).imported


def test_a_bomb_is_refused_before_it_explodes(node: CompileCache, file: Path) -> None:
    """A few KB that would be 64 GiB: sizes are checked before anything is read."""
    compressor = zstandard.ZstdCompressor().compressobj()
    info = tarfile.TarInfo("bundle.json")
    info.size = 8**11 - 1
    content = compressor.compress(info.tobuf(tarfile.USTAR_FORMAT))
    for _ in range(64):
        content += compressor.compress(bytes(2**20))
    file.write_bytes(content + compressor.flush())
    refused(node, file, "begin")


def test_an_index_of_another_version_is_named(node: CompileCache, file: Path) -> None:
    items = members(file)
    index = msgspec.json.decode(items[0][1])
    write(file, [(items[0][0], msgspec.json.encode({**index, "version": 2})), *items[1:]])
    refused(node, file, "k3dsl-bundle 2, this k3dsl reads k3dsl-bundle 1")


def test_a_corrupt_entry_is_replaced_by_the_bundles(source: CompileCache, node: CompileCache, file: Path) -> None:
    node.import_bundle(file)
    path = Path(str(node.reread(KEYS[0]).path)) / "kernel.cubin"  # type: ignore[union-attr]
    path.write_bytes(b"torn")
    again = CompileCache(node.root)
    report = again.import_bundle(file)
    assert report.imported == [KEYS[0].digest]
    assert again.stats()["corrupt"] == 1
    assert CompileCache(node.root).get(KEYS[0]).payload == payload_of(KEYS[0])  # type: ignore[union-attr]


def test_what_did_not_stay_is_not_imported(file: Path, tmp_path: Path) -> None:
    """Nor is what was there before and had to make room."""
    one = CompileCache(tmp_path / "node")
    one.get_or_build(KEYS[0], Builder())
    size = one.stats()["bytes"]
    del one
    report = CompileCache(tmp_path / "node", max_bytes=size * 3 // 2).import_bundle(file)
    there = [entry.digest for entry in CompileCache(tmp_path / "node").entries()]
    assert (len(there), sorted([*report.imported, *report.present])) == (1, there)
    assert sorted([*report.evicted, *there]) == sorted(key.digest for key in KEYS)


def test_a_pipe_is_no_bundle(file: Path, node: CompileCache) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    try:
        with pytest.raises(ConfigError, match="must be a file, not a pipe"):
            node.import_bundle(f"/dev/fd/{reader}")
    finally:
        os.close(reader)


def test_a_bundle_needs_a_place(file: Path, tmp_path: Path) -> None:
    for cache in (CompileCache("/proc/nowhere"), CompileCache(tmp_path / "ro", read_only=True)):
        with pytest.raises(ConfigError, match="folder that can be written"):
            cache.import_bundle(file)
    with pytest.raises(ConfigError, match=f"this cache only reads {tmp_path / 'ro'}"):
        CompileCache(tmp_path / "ro", read_only=True).import_bundle(file)
    with pytest.raises(FileNotFoundError):
        CompileCache(tmp_path / "n").import_bundle(tmp_path / "none")


def test_errors_name_the_file_and_the_folder(
    source: CompileCache, node: CompileCache, file: Path, tmp_path: Path
) -> None:
    torn = tmp_path / "torn.k3b"
    torn.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(BundleError, match=r"torn\.k3b: it is "):
        node.import_bundle(torn)
    with pytest.raises(FileNotFoundError, match=r"folder to write a bundle to: '.*/none'"):
        source.export(tmp_path / "none" / "kernels.k3b")
