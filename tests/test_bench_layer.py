"""The bench of a layer: its torch ops compute the layer, and its floors are those of the bytes and operations."""

import importlib.util
import json

import pytest
import torch

from k3dsl import ConfigError, MlaDims, ToolchainError
from k3dsl.cli.bench import question
from k3dsl.reference import decode_layer
from k3dsl.scenario import relative_error

layer = question("layer")
harness = question("harness")


@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
def test_torch_ops_are_the_layer(kv_format):
    dims = MlaDims.kimi_k3(16)
    one = layer.Layer(dims, rows=3, context=130, kv_format=kv_format, device="cpu", seed=1)
    twin = one.cache.clone()
    expected = decode_layer(one.projected, one.weights, twin, one.slots, one.table, one.lengths, kv_format=kv_format)
    out = layer.torch_layer(one)
    assert relative_error(out, expected) < 1e-2
    assert out is one.out
    assert (one.cache != twin).sum() <= 3 * 576 * 0.01  # roundings of the step's entries


@pytest.mark.parametrize(
    ("rows", "context", "kv_format", "us"),
    [(1, 1024, "fp8", 2.5), (16, 8192, "fp8", 20.1), (64, 1024, "fp8", 11.9), (4, 8192, "bf16", 11.2)],
)
def test_floor_is_memory_at_decode_sizes(rows, context, kv_format, us):
    bound = layer.floor(MlaDims.kimi_k3(8), rows, context, kv_format)
    assert bound["us"] == bound["memory_us"] == pytest.approx(us, abs=0.06)
    assert bound["compute_us"] < bound["memory_us"]


def test_rotation_passes_the_bytes_within_bounds():
    assert harness.rotation(10 << 20) == 24
    assert harness.rotation(40 << 20) == 8
    assert harness.rotation(1 << 30) == 4


def test_conditions_name_what_a_number_needs():
    found = harness.conditions("abc123", "how")
    assert found["commit"] == "abc123"
    assert all(found[name] for name in ("date", "torch", "python", "cpu", "k3dsl", "method"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_measure():
    for name in ("layer", "host"):
        with pytest.raises(ToolchainError, match="no GPU"):
            question(name).run()
        with pytest.raises(ConfigError, match="against='flashmla' must be torch"):
            question(name).run(against="flashmla")


def test_a_question_that_is_not_there():
    with pytest.raises(ConfigError, match="no bench of that name"):
        question("colour")


def test_a_picture_needs_matplotlib_or_is_a_png(tmp_path):
    rows = [
        {"kv_format": "fp8", "context": 1024, "rows": n, "us": 5.0 + n, "torch_us": 90.0, "floor_us": 3.0}
        for n in (1, 4)
    ]
    file = tmp_path / "a.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ToolchainError, match=r"pip install 'k3dsl\[plot\]'"):
            layer.plot({"rows": rows}, file)
    else:
        layer.plot({"rows": rows}, file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_the_document(tmp_path, capsys, monkeypatch):
    from k3dsl.cli import main

    document = {"conditions": {"cpu": "a cpu"}, "rows": [{"rows": 1, "us": 9.0, "launch_us": 7.0, "python_us": 2.0,
                "torch_us": 200.0}]}  # fmt: skip
    monkeypatch.setattr(question("host"), "run", lambda **_: document)
    file = tmp_path / "out.json"
    for target, shown in ((str(file), True), ("-", False)):
        with pytest.raises(SystemExit) as end:
            main(["bench", "--what", "host", "--json", target])
        out = capsys.readouterr().out
        assert not end.value.code
        assert ("Host time of an eager layer on a cpu" in out) is shown
    assert json.loads(file.read_text()) == json.loads(out) == {"host": document}
