"""Folder layers: read in place, never written, believed by their owner's word."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, files_under, make_key, payload_of

from k3dsl.cache import BundleError, CompileCache
from k3dsl.errors import CacheMiss, ConfigError

Fresh = Callable[..., CompileCache]


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A system layer with keys 0, 1 and 2, and nothing else."""
    place = tmp_path / "system"
    cache = CompileCache(place)
    for n in range(3):
        cache.get_or_build(make_key(n), Builder())
    del cache
    shutil.rmtree(place / "locks")
    shutil.rmtree(place / "sessions")
    return place


def stamps(place: Path) -> dict[str, Any]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_ino) for path in place.rglob("*")
    }


def test_a_hit_in_a_layer_takes_no_lock_and_writes_nothing(
    root: Path, layer: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 11."""
    before = stamps(layer)
    cache = CompileCache(root, layers=[layer])
    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "utime", "chmod", "write"):
            patch.setattr(os, name, lambda *_, **__: pytest.fail("a write"))
        patch.setattr("k3dsl.cache.lock.Lock.take", lambda *_: pytest.fail("a lock"))
        entries = [cache.get_or_build(make_key(n), build) for n in range(3)]
    assert [entry.payload for entry in entries] == [payload_of(make_key(n)) for n in range(3)]
    assert {entry.source for entry in entries} == {str(layer)}
    assert build.calls == 0
    assert cache.stats()["layer_hit"] == 3
    cache.prune(0)
    del cache
    assert stamps(layer) == before
    assert not root.exists()


def test_the_folder_comes_first_then_the_layers_in_order(root: Path, layer: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    CompileCache(other).get_or_build(make_key(0), Builder(10))
    CompileCache(other).get_or_build(make_key(7), Builder(10))
    cache = CompileCache(root, layers=[layer, other])
    assert len(cache.get(make_key(0)).payload) == 30_000  # type: ignore[union-attr]
    assert cache.get(make_key(7)).source == str(other)  # type: ignore[union-attr]
    CompileCache(root).get_or_build(make_key(1), Builder(20))
    assert len(CompileCache(root, layers=[layer]).get(make_key(1)).payload) == 20  # type: ignore[union-attr]
    assert CompileCache(root, layers=[other, layer]).get(make_key(0)).source == str(other)  # type: ignore[union-attr]


def test_a_miss_is_built_into_the_folder(root: Path, layer: Path, build: Builder) -> None:
    before = stamps(layer)
    cache = CompileCache(root, layers=[layer])
    assert str(cache.get_or_build(make_key(9), build).path).startswith(str(root))
    assert stamps(layer) == before


@pytest.mark.parametrize("damage", ["truncate", "flip", "manifest"])
def test_damage_in_a_layer_is_passed_over(root: Path, layer: Path, build: Builder, damage: str) -> None:
    """Lessons 3, 11: not loaded, not touched; built into the folder, which then comes first."""
    folder = layer / "v1" / "sm_90a" / make_key(0).digest[:2] / make_key(0).digest
    name = "manifest.json" if damage == "manifest" else "kernel.cubin"
    content = bytearray((folder / name).read_bytes())
    content[100] ^= 1
    (folder / name).write_bytes(content[:50] if damage == "truncate" else content)
    before = stamps(layer)
    cache = CompileCache(root, layers=[layer])
    assert cache.get_or_build(make_key(0), build).payload == payload_of(make_key(0))
    assert cache.stats()["corrupt"] == 1
    assert stamps(layer) == before
    assert CompileCache(root, layers=[layer]).get(make_key(0)).source == "disk"  # type: ignore[union-attr]


def test_a_layer_that_is_not_there(root: Path, tmp_path: Path, build: Builder) -> None:
    cache = CompileCache(root, layers=[tmp_path / "not-mounted"])
    assert cache.get_or_build(make_key(), build).source == "built"
    assert cache.degraded == {}


def test_a_layer_that_others_can_write_to(root: Path, layer: Path, build: Builder, caplog: Any) -> None:
    """Lesson 29."""
    layer.chmod(0o777)
    cache = CompileCache(root, layers=[layer])
    assert cache.get_or_build(make_key(0), build).source == "built"
    assert cache.get_or_build(make_key(1), build).source == "built"
    assert len(caplog.messages) == 1
    assert "chmod go-w" in caplog.messages[0]


def test_a_layer_that_is_not_read_has_nothing(
    root: Path, layer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lesson 29: what tells where a key is does not count on a layer that no lookup reads."""
    layer.chmod(0o777)
    cache = CompileCache(root, layers=[layer], frozen=True)
    assert make_key(0) not in cache
    assert list(cache.entries()) == []
    assert cache.verify().checked == 0
    explanation = cache.explain(make_key(0))
    assert not explanation.present
    assert "chmod go-w" in str(explanation)
    with pytest.raises(CacheMiss, match="and no other entry is"):
        cache.get(make_key(0))
    with pytest.raises(BundleError, match="nothing to export"):
        cache.export(tmp_path / "kernels.k3b")
    assert len(caplog.messages) == 1
    assert make_key(0) in CompileCache(root, layers=[layer], allow_shared=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give folders away")
def test_the_owner_of_a_layer_is_believed(root: Path, layer: Path, build: Builder) -> None:
    """Lesson 28: a service account fills it; whoever lists the layer means that account, and no third one."""
    for path in (layer, *layer.rglob("*")):
        os.chown(path, 4321, 4321)
    assert CompileCache(root, layers=[layer]).get(make_key(0)) is not None
    folder = layer / "v1" / "sm_90a" / make_key(1).digest[:2] / make_key(1).digest
    os.chown(folder / "kernel.cubin", 9999, 9999)
    assert CompileCache(root, layers=[layer]).get(make_key(1)) is None


def test_layers_of_the_environment(root: Path, layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3DSL_CACHE_LAYERS", f"{tmp_path / 'none'}:{layer}")
    cache = CompileCache(root)
    assert [entry.name for entry in cache.layers] == [str(tmp_path / "none"), str(layer)]
    assert cache.get(make_key(0)) is not None
    assert CompileCache(root, layers=[tmp_path]).get(make_key(0)) is None  # an argument wins
    assert CompileCache(root, layers=[]).layers == []


@pytest.mark.parametrize(
    "spec", ["relative/folder", "ftp://host/x", "http://", "http:///x", "http://h/x?y", "http://h:x/"]
)
def test_what_is_no_layer_is_refused(root: Path, spec: str) -> None:
    """Lesson 29: no path that depends on the current folder."""
    with pytest.raises(ConfigError, match="absolute folder or an http"):
        CompileCache(root, layers=[spec])


def test_entries_and_explain_see_layers(root: Path, layer: Path, build: Builder) -> None:
    cache = CompileCache(root, layers=[layer])
    cache.get_or_build(make_key(8), build)
    assert {entry.digest for entry in cache.entries()} == {make_key(n).digest for n in (0, 1, 2, 8)}
    explanation = cache.explain(make_key(0))
    assert (explanation.present, explanation.where) == (True, str(layer))
    assert make_key(0) in cache
    assert cache.verify().checked == 4
    assert files_under(layer)


def test_a_whole_cache_folder_serves_as_a_layer(root: Path, tmp_path: Path, build: Builder) -> None:
    """An image build fills a folder; the node lists it."""
    CompileCache(root).get_or_build(make_key(), build)
    node = CompileCache(tmp_path / "node", layers=[root], frozen=True)
    assert node.get(make_key()).payload == payload_of(make_key())  # type: ignore[union-attr]


@pytest.mark.parametrize("layers", [5, "/a", "https://u:s3cret@host", [1], [b"/a"], Path("/a")])
def test_what_is_no_list_of_layers_is_named(root: Path, layers: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be (an|a sequence of) absolute folder") as caught:
        CompileCache(root, layers=layers)
    assert "s3cret" not in str(caught.value)
