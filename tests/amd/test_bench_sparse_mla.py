"""Sparse MLA's counts beside Triton's: the rival is right, and the page's claims hold where the numbers are made."""

import importlib.util

import pytest

from k3dsl.cache import CompileCache

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="needs FlyDSL: pip install 'k3dsl[amd]'"),
]


def test_counts_beside_triton(tmp_path) -> None:
    from tools.bench import sparse_mla as bench

    profile, resources, wrong = bench.ours(16, 2, CompileCache(tmp_path))
    mine = bench.row("k3dsl", profile, resources, wrong, 0)
    profile, resources, wrong = bench.triton_kernel(16, "columns", 64, 4, 1)
    rival = bench.row("triton", profile, resources, wrong, 0)
    for found in (mine, rival):
        assert found["error"] < 5e-3
        assert found["mfma"] == 2.12
        assert found["mfma_cycles"] == 8.5
        assert found["spills"] == 0
    assert mine["instructions"] < 24 < 70 < rival["instructions"]
    assert mine["bytes"] < 1.05 < rival["bytes"]
    assert (mine["barriers"], mine["conflicts"]) == (0, 0)
    assert mine["lds_cycles"] < 18
