"""Every build of sparse MLA with every kind of list and value: minutes, so only where `-m sweep` asks for it."""

import importlib.util

import pytest
from sparse_cases import Case, check, make, run, sweep

from k3dsl.cache import CompileCache

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="needs FlyDSL: pip install 'k3dsl[amd]'"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> CompileCache:
    """Objects of this file's builds, each built by the first case that needs it."""
    return CompileCache(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("case", sweep(), ids=lambda c: c.name)
def test_against_float64(case: Case, cache: CompileCache) -> None:
    made = make(case)
    runtime = run(case, made, cache)
    check(case, made)
    assert not runtime.results[-1].reports
