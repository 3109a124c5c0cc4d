"""What is no argument of the cache: named, with what is allowed, and nothing done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, files_under, make_key

from k3dsl.cache import Built, CompileCache
from k3dsl.errors import ConfigError

OPTIONS = {
    "root": ("", 5, b"/a"),
    "lock_timeout": (float("inf"), float("nan"), 1e12, -1, "300", None, True),
    "max_bytes": ("2G", -1, 1.5, True),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OPTIONS.items() for value in values])
def test_options(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}={value!r} must be "):
        CompileCache(**{name: value})


DIGEST = make_key(0).digest
CALLS: dict[str, Callable[[CompileCache], Any]] = {
    "prune bytes as text": lambda cache: cache.prune("2G"),  # type: ignore[arg-type]
    "prune less than nothing": lambda cache: cache.prune(-1),
    "prune age as text": lambda cache: cache.prune(older_than="30d"),  # type: ignore[arg-type]
    "prune age nan": lambda cache: cache.prune(older_than=float("nan")),
    "prune age negative": lambda cache: cache.prune(older_than=-5),
    "export keys": lambda cache: cache.export(f"{cache.root}/x", keys=[1]),  # type: ignore[list-item]
    "export one key": lambda cache: cache.export(f"{cache.root}/x", keys=DIGEST),
    "export target": lambda cache: cache.export(f"{cache.root}/x", target=5),  # type: ignore[arg-type]
    "export targets": lambda cache: cache.export(f"{cache.root}/x", target=[5]),  # type: ignore[list-item]
    "import sha256": lambda cache: cache.import_bundle("/dev/null", sha256=5),  # type: ignore[arg-type]
    "import sha256 short": lambda cache: cache.import_bundle("/dev/null", sha256="ab"),
    "explain": lambda cache: cache.explain("x"),  # type: ignore[arg-type]
    "get": lambda cache: cache.get("x"),  # type: ignore[arg-type]
    "reread": lambda cache: cache.reread(DIGEST),  # type: ignore[arg-type]
    "build": lambda cache: cache.get_or_build(make_key(1), None),  # type: ignore[arg-type]
    "remove": lambda cache: cache.remove(5),  # type: ignore[arg-type]
    "pin": lambda cache: cache.pin(DIGEST),
    "unpin": lambda cache: cache.unpin(5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(cache: CompileCache, build: Builder, root: Path, name: str) -> None:
    cache.get_or_build(make_key(0), build)
    before = files_under(root)
    with pytest.raises(ConfigError, match=" must be "):
        CALLS[name](cache)
    assert files_under(root) == before


def test_what_is_no_key_is_not_there(cache: CompileCache) -> None:
    assert [key in cache for key in ("x", DIGEST, None, 5, [])] == [False] * 5


@pytest.mark.parametrize(("name", "value"), [("resources", None), ("resources", [1]), ("resources", {"a": object()}),
                                             ("log", None), ("log", b"ptxas")])  # fmt: skip
def test_built(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* must be "):
        Built(b"object", "kernel.cubin", **{name: value})


def test_a_cache_that_only_reads_does_not_say_that_it_removed(
    cache: CompileCache, build: Builder, fresh: Callable[..., CompileCache]
) -> None:
    cache.get_or_build(make_key(), build)
    reading = fresh(read_only=True)
    assert reading.get(make_key()) is not None
    with pytest.raises(OSError, match="only reads"):
        reading.remove(make_key())
    assert reading.get(make_key()) is not None
    assert not reading.remove(make_key(2))
