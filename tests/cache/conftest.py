"""What the cache tests share: a clean environment, a folder of their own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder

from k3dsl import env
from k3dsl.cache import CompileCache, notice


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No variable of the caller, no home folder of his, and every warning may be given again."""
    for option in env.TABLE:
        monkeypatch.delenv(option.name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    notice._said.clear()
    umask = os.umask(0o022)
    yield
    os.umask(umask)


@pytest.fixture
def build() -> Builder:
    return Builder()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(root: Path) -> CompileCache:
    return CompileCache(root)


@pytest.fixture
def fresh(root: Path) -> Callable[..., CompileCache]:
    """A cache on the same folder as a new process has it: nothing in memory, every warning still to be given."""

    def make(**options: Any) -> CompileCache:
        notice._said.clear()
        return CompileCache(root, **options)

    return make
