"""The bench of the core: what it builds is what it launches, and comparisons are named."""

from types import SimpleNamespace

import pytest

from k3dsl import ConfigError
from k3dsl.cli.bench import question
from k3dsl.nvidia.core import hopper

core = question("core")


def test_the_first_merge_of_a_row_is_the_one_that_serves_it():
    for shape, merges in core.MERGES:
        key = hopper.choose(heads=shape.heads, q=shape.q, page=core.PAGE, kv=shape.kv)
        assert core.merge_of(key, merges[0]) == hopper.merge_key(key, requests=len(shape.lengths))


def test_every_kernel_that_is_measured_is_built():
    built = set(core.keys())
    for shape in (*core.SHAPES, *core.LONG):
        for p in core.variants(shape):
            key = hopper.choose(heads=shape.heads, q=shape.q, page=core.PAGE, kv=shape.kv, p=p)
            assert {key, hopper.merge_key(key, requests=len(shape.lengths))} <= built
    assert [(s.heads, s.q, len(s.lengths)) for s in core.LONG] == [(12, 4, 64), (12, 4, 16), (96, 1, 64)]


def test_another_comparison_is_refused():
    with pytest.raises(ConfigError, match="against='torch' must be zeros or merges"):
        core.run(against="torch")


def test_comparisons_measure_each_row_on_both_data_and_with_every_merge():
    seen = []

    class Bench:
        pool = SimpleNamespace(zero_=lambda: seen.append("zeros"))

        def measure(self, shape, p, repeats, merge=None):
            seen.append((shape, p, merge))
            return {"us": 1.0}

    rows = core.on_zeros(Bench())
    half = seen.index("zeros")
    assert seen[:half] == seen[half + 1 :] == [(s, p, None) for s in core.LONG for p in (None, "e4m3")]
    assert [r["data"] for r in rows] == ["normal"] * half + ["zeros"] * half
    seen.clear()
    rows = core.other_merges(Bench())
    assert seen == [(s, None, m) for s, merges in core.MERGES for m in merges]
    assert [r["merge"] for r in rows] == [m for _, merges in core.MERGES for m in merges]
