"""Why a key misses."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, make_key

from k3dsl.cache import Built, CompileCache, CompileKey, CorruptError
from k3dsl.cache.store import Folder

Fresh = Callable[..., CompileCache]


def test_the_nearest_entry_and_what_it_has_other(cache: CompileCache, build: Builder) -> None:
    for key in (
        make_key(1),
        make_key(1, kernel="other"),
        make_key(1, target="sm_100a"),
        make_key(1, sources="cd" * 32),
    ):
        cache.get_or_build(key, build)
    explanation = cache.explain(make_key(2))
    assert not explanation.present
    assert explanation.nearest is not None
    assert explanation.nearest.key == make_key(1)
    assert [(item.field, item.mine, item.theirs) for item in explanation.differences] == [("params.n", 2, 1)]
    assert "params.n: 2 wanted, 1 there" in str(explanation)
    form = explanation.to_json()
    assert json.loads(json.dumps(form)) == form
    assert form["differences"] == [{"field": "params.n", "wanted": "2", "nearest": "1"}]


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        (make_key(1, toolchain={"dsl": "4.9.0", "flavour": "cu13"}), ["toolchain.dsl"]),
        (make_key(1, sources="ef" * 32), ["sources"]),
        (make_key(1, target="sm_103a"), ["target"]),
        (make_key(1.0), ["params.n"]),
        (make_key(1, kernel="unheard"), ["kernel"]),
    ],
)
def test_a_changed_toolchain_or_source_is_named(
    cache: CompileCache, build: Builder, wanted: CompileKey, fields: list[str]
) -> None:
    """Lessons 13, 16: what changed, in words, instead of a silent rebuild."""
    cache.get_or_build(make_key(1), build)
    assert [item.field for item in cache.explain(wanted).differences] == fields


def test_the_same_kernel_is_nearer_than_the_same_values(cache: CompileCache, build: Builder) -> None:
    cache.get_or_build(make_key(1, kernel="other"), build)
    far = make_key(params={"a": 1, "b": 2}, toolchain={})
    cache.get_or_build(far, build)
    nearest = cache.explain(make_key(1)).nearest
    assert nearest is not None
    assert nearest.key == far


def test_where_a_key_is(cache: CompileCache, fresh: Fresh, build: Builder) -> None:
    cache.get_or_build(make_key(), build)
    assert (cache.explain(make_key()).where, fresh().explain(make_key()).where) == ("memory", "disk")
    assert "is there: disk" in str(fresh().explain(make_key()))


def test_an_empty_cache(cache: CompileCache) -> None:
    explanation = cache.explain(make_key())
    assert (explanation.nearest, explanation.differences) == (None, [])
    assert "no other entry is" in str(explanation)


def test_an_entry_of_another_kernel_has_no_fields_to_compare(cache: CompileCache, build: Builder) -> None:
    cache.get_or_build(make_key(kernel="other"), build)
    explanation = cache.explain(make_key())
    assert explanation.nearest is not None
    assert str(explanation).endswith(f"is not there, and no entry of {make_key().kernel} is")


def test_it_counts_nothing_and_keeps_what_is_damaged(cache: CompileCache, fresh: Fresh, build: Builder) -> None:
    path = cache.get_or_build(make_key(), build).path
    os.truncate(f"{path}/manifest.json", 3)
    reader = fresh()
    reader.explain(make_key(2))
    assert reader.stats()["session"]["miss"] == 0
    assert os.path.exists(str(path))


def test_quarantine_and_degraded_states_are_told(cache: CompileCache, fresh: Fresh, build: Builder) -> None:
    path = cache.get_or_build(make_key(), build).path
    os.truncate(f"{path}/kernel.cubin", 3)
    reader = fresh()
    assert reader.get(make_key()) is None
    assert "was quarantined: kernel.cubin has 3 bytes, not 30000" in str(reader.explain(make_key()))
    assert reader.quarantined_keys() == [make_key()]
    broken = CompileCache("/proc/nowhere")
    broken.get_or_build(make_key(), build)
    assert "cannot be" in str(broken.explain(make_key(2)))


# verify


def test_verify_finds_and_quarantines(cache: CompileCache, fresh: Fresh, root: Path, build: Builder) -> None:
    paths = [cache.get_or_build(make_key(n), build).path for n in range(4)]
    os.truncate(f"{paths[1]}/kernel.cubin", 3)
    os.unlink(f"{paths[2]}/manifest.json")
    report = fresh(read_only=True).verify()
    assert (report.checked, report.sound, report.clean) == (4, 2, False)
    assert os.path.exists(str(paths[1]))
    report = fresh().verify()
    assert {item.digest for item in report.corrupt} == {make_key(1).digest, make_key(2).digest}
    assert all(item.reason for item in report.corrupt)
    assert len(os.listdir(root / "quarantine")) == 2
    assert fresh().verify().clean
    assert fresh().stats()["corrupt"] >= 2


def test_an_entry_without_its_object_is_not_there(cache: CompileCache, fresh: Fresh, build: Builder) -> None:
    """Lesson 2: a hit needs every listed member, and what tells of hits agrees."""
    entry = cache.get_or_build(make_key(), build)
    os.unlink(f"{entry.path}/kernel.cubin")
    assert make_key() not in fresh()
    assert not fresh().explain(make_key()).present
    [listed] = fresh().entries()
    with pytest.raises(CorruptError, match=r"kernel\.cubin is not there"):
        listed.payload  # noqa: B018
    report = fresh().verify()
    assert [(item.digest, item.reason) for item in report.corrupt] == [(make_key().digest, "kernel.cubin is not there")]
    assert fresh().stats()["quarantined"] == 1


def test_an_entry_that_goes_while_it_is_verified_is_no_finding(
    cache: CompileCache, fresh: Fresh, root: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(cache.get_or_build(make_key(), build).path)
    real = Folder._payload

    def remove_first(folder: Folder, *rest: Any) -> bytes:
        folder.remove(path)
        return real(folder, *rest)

    monkeypatch.setattr(Folder, "_payload", remove_first)
    assert fresh().verify().checked == 0


def test_verify_by_building_again(cache: CompileCache, build: Builder) -> None:
    """Lessons 5, 6: the same key gives the same bytes, or it is told which do not."""
    for n in range(3):
        cache.get_or_build(make_key(n), build)

    def builder_for(key: CompileKey) -> Callable[[CompileKey], Built] | None:
        return {0: build, 1: lambda key: Built(b"other", "kernel.cubin"), 2: None}[key.params["n"]]  # type: ignore[index,return-value]

    report = cache.verify(recompile=True, builder_for=builder_for)
    assert (report.recompiled, report.sound, report.clean) == (2, 3, False)
    assert [item.digest for item in report.differs] == [make_key(1).digest]
    assert [item.digest for item in report.skipped] == [make_key(2).digest]
    assert cache.get(make_key(1)) is not None  # sound is what was stored: it is told, not taken away


def test_verify_by_default_asks_the_package_for_builders(cache: CompileCache, build: Builder) -> None:
    cache.get_or_build(make_key(target="gfx950"), build)
    report = cache.verify(recompile=True)
    assert len(report.skipped) == 1
    assert "not built again" in report.skipped[0].reason
    assert report.clean
