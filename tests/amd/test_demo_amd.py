"""`k3dsl demo --target gfx950` where there is no GPU: on the emulator, or on the reference, and it says which."""

import importlib.util

import pytest

from k3dsl.cli import demo_amd
from k3dsl.cli.demo_amd import AmdDemo
from k3dsl.errors import ConfigError


def demo(**changes: object) -> AmdDemo:
    sizes = {"steps": 2, "layers": 1, "q": 1, "tp": 8, "page_size": 64, "replays": 1, "seed": 0}
    return AmdDemo(**({"target": "gfx950", "kv_format": "fp8"} | sizes | changes))  # type: ignore[arg-type]


def test_without_an_emulator_the_reference_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_amd, "emulator_present", lambda: "flydsl missing")
    found = demo().run()
    facts = found.document()
    assert facts["ok"]
    assert facts["executor"] == facts["decode"] == "reference"
    assert facts["note"] == "flydsl missing"
    assert facts["max_rel_error"] < 1e-2
    assert not facts["captured"]
    assert facts["replays_equal"]
    assert not facts["kernels"]
    assert facts["lengths"] == {"first": [1, 63, 64, 65, 129, 700, 2500, 0], "last": [2, 64, 65, 66, 130, 701, 2501, 0]}
    found.show()
    shown = capsys.readouterr().out
    assert "mla_pre on the reference, decode attention on reference (flydsl missing)" in shown


@pytest.mark.emulator
def test_the_emulator_runs_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    if importlib.util.find_spec("flydsl") is None or importlib.util.find_spec("tinygrad") is None:
        pytest.skip("needs the amd extra")
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    found = demo(steps=1, replays=0).run()
    facts = found.document()
    assert facts["ok"]
    assert facts["executor"] == "emulator"
    assert facts["compiled"] == 1
    assert [kernel["kernel"] for kernel in facts["kernels"]] == ["mla_pre"]
    assert facts["kernels"][0]["registers"] > 0
    assert 0 < facts["max_rel_error"] < facts["limit"]
    assert facts["strays"] == 0


def test_what_it_cannot_run_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        demo(tp=16, kv_format="bf16", q=4).run()
    for says in ("tp=16 must be 8", "kv_format='bf16' must be fp8", "q=4: 8 requests are 32 rows, of 16"):
        assert says in str(error.value)
