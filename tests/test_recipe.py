"""Built on a laptop, run on a GPU node that has neither compiler nor package: the commands of docs/blackwell.md."""

import json
import os

import pytest
import torch
from fake_blackwell import BlackwellBench, BlackwellDriver
from fake_cuda import fake_build
from fake_runtime import STREAM, step

from k3dsl import CompileCache, Deployment, MlaDims, cli
from k3dsl.nvidia import device as devices
from k3dsl.nvidia import driver as drivers
from k3dsl.nvidia import toolchain

DIMS = MlaDims.kimi_k3(8)
PLAN = 'tp = 8\ntarget = "sm_100a,sm_103a"\nbatches = "1-4"\nqueries = "1,4"\ncore = "tokenspeed"\n'


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        said = capsys.readouterr()
        return ended.value.code or 0, json.loads(said.out)

    return call


@pytest.fixture
def node(monkeypatch):
    """A machine with one B200 and nothing that builds. Returns its driver."""
    driver = BlackwellDriver("sm_100a", 148)
    monkeypatch.setattr(drivers, "driver", lambda: driver)
    monkeypatch.setattr(devices, "driver", lambda: driver)
    devices.device.cache_clear()
    monkeypatch.setattr(toolchain, "package_version", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    yield driver
    devices.device.cache_clear()


def kernels(document):
    return {c["name"]: (c["status"], c["found"]) for c in document["checks"] if c["name"].startswith("kernels")}


def test_from_a_laptop_to_a_node(run, node, tmp_path, monkeypatch):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    laptop = CompileCache(tmp_path / "laptop")
    deployments = {
        t: Deployment(DIMS, t, batches=(1, 2, 3, 4), queries=(1, 4), core="tokenspeed") for t in ("sm_100a", "sm_103a")
    }
    for one in deployments.values():
        for key in one.keys():  # noqa: SIM118 - a method, not a dict's
            laptop.get_or_build(key, fake_build)

    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "laptop"))
    code, report = run("cache", "export", str(tmp_path / "b.k3b"), "--json")
    assert (code, report["targets"]) == (0, ["sm_100a", "sm_103a"])

    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "node"))
    code, document = run("doctor", "--plan", str(plan), "--json")
    count = len(deployments["sm_100a"].keys())
    assert (code, document["ok"]) == (1, False)
    assert kernels(document) == {"kernels sm_100a": ("bad", f"not ready: {plan}: 0 of {count} keys")}
    os.chmod(tmp_path / "b.k3b", 0o600)
    code, report = run("cache", "import", str(tmp_path / "b.k3b"), "--json")
    assert (code, len(report["imported"])) == (0, count)
    assert {item["target"] for item in report["skipped"]} == {"sm_103a"}
    code, document = run("doctor", "--plan", str(plan), "--json")
    assert kernels(document) == {"kernels sm_100a": ("ok", f"ready for {plan} ({plan}: {count} of {count} keys)")}
    assert code == (0 if document["ok"] else 1)
    code, document = run("plan", "--plan", str(plan), "--target", "sm_100a", "--json")
    assert all(key["present"] for key in document["keys"])

    frozen = CompileCache(tmp_path / "node", frozen=True)
    bench = BlackwellBench(deployments["sm_100a"], frozen)
    layer, kv = bench.layer(), bench.kv()
    layer.prepare_cache(kv)
    bench.fake.launches.clear()
    layer.run(**step(DIMS, 4, 1, width=4), cache=kv)
    assert [x.symbol for x in bench.fake.launches] == [
        "fake_mla_query",
        "fake_mla_value",
    ]  # the core's launcher is empty
    assert {x.stream for x in bench.fake.launches} == {STREAM}


def test_doctor_speaks_of_the_usual_deployments_of_the_gpu(run, node, tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    _, document = run("doctor", "--json")
    [(status, found)] = kernels(document).values()
    assert (status, found.startswith("not ready: tp 8: 0 of ")) == ("info", True)
    store = CompileCache(tmp_path)
    for key in Deployment(DIMS, "sm_100a").keys():  # noqa: SIM118 - a method, not a dict's
        store.get_or_build(key, fake_build)
    _, document = run("doctor", "--json")
    [(status, found)] = kernels(document).values()
    assert (status, found.startswith("ready for tp 8 (tp 8: ")) == ("ok", True)


def test_doctor_names_a_device_of_another_size(run, node, monkeypatch, tmp_path):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    node.cuda.attributes[16] = 132
    _, document = run("doctor", "--json")
    [check] = [c for c in document["checks"] if c["name"] == "GPU 0"]
    assert "those for 132 are built when a layer is prepared" in check["todo"]
