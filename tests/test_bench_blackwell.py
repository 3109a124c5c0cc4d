"""The bench of the tokenspeed core's start: a filled cache compiles nothing, and the table says what was compiled."""

import io

from fake_cuda import fake_build
from rich.console import Console

from k3dsl import CompileCache
from k3dsl.cli.bench import question
from k3dsl.nvidia.core import tokenspeed
from k3dsl.nvidia.host_object import host_isa
from k3dsl.nvidia.toolchain import compile_key

bench = question("blackwell")


def test_ranks_that_find_the_object_compile_none(tmp_path):
    key = tokenspeed.key_for(
        bench.TARGET, heads=12, q=1, requests=1, page=64, max_context=131072, sm_count=148, host=host_isa()
    )
    CompileCache(tmp_path).get_or_build(compile_key(key, bench.TARGET), fake_build)
    row = bench._start(2, "warm", str(tmp_path))
    assert row["compiled"] == 0
    assert len(row["ranks"]) == 2
    assert 0 < max(one["seconds"] for one in row["ranks"]) <= row["seconds"]


def test_the_table_has_every_start():
    rows = [{"ranks": 4, **{kind: {"seconds": 1.5 + i, "compiled": i} for i, kind in enumerate(bench.KINDS)}}]
    out = io.StringIO()
    bench.show({"conditions": {"method": "wall clock"}, "rows": rows}, Console(file=out, width=160))
    text = out.getvalue()
    assert all(kind in text for kind in bench.KINDS)
    assert "0, 1, 2, 3" in text
    assert "wall clock" in text
