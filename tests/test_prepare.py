"""prepare, warmup, detect_target and the reference layer, on a machine with no GPU."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fake_cuda import FakeDriver, fake_build

import k3dsl
from k3dsl import (
    CompileCache,
    CompileError,
    ConfigError,
    Deployment,
    MlaDims,
    MlaWeights,
    NotPrepared,
    ToolchainError,
    preparing,
)
from k3dsl.cache.store import Folder
from k3dsl.nvidia import device as devices
from k3dsl.nvidia import driver as drivers
from k3dsl.nvidia import fill_splits, pad_requests, toolchain
from k3dsl.preparing import Progress, builder_for, detect_target, prepare, warmup
from k3dsl.reference import bits, decode_layer
from k3dsl.scenario import Stack

DIMS = MlaDims.kimi_k3(16)
PLAN = Deployment(DIMS, target="sm_90a", batches=(1, 4, 16), queries=(1,))


def test_import_is_light():
    """Nothing but the standard library, and little of that: a few ms, which a busy machine would not let us test."""
    code = "import sys; old = set(sys.modules); import k3dsl; print(*set(sys.modules) - old)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"k3dsl"}
    assert len(loaded) < 60


def test_prepare_is_the_function_whatever_was_imported_first():
    code = "import k3dsl, k3dsl.preparing; k3dsl.detect_target; k3dsl.warmup; print(type(k3dsl.prepare).__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["function"]


def test_public_names_are_all_there():
    assert [name for name in k3dsl.__all__ if getattr(k3dsl, name, None) is None] == []
    from k3dsl import nvidia

    assert [name for name in nvidia.__all__ if getattr(nvidia, name, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nvidia.nothing


# ---- targets


def test_target_of_the_present_device(fake_driver):
    target = detect_target()
    assert target == "sm_90a"
    assert isinstance(target, str)
    assert target.vendor == "nvidia"
    assert detect_target("cuda:0") == detect_target(0) == detect_target(torch.device("cuda", 0)) == "sm_90a"
    assert detect_target(3) is None
    assert Deployment(DIMS, target=target) == Deployment(DIMS, target="sm_90a")


def test_no_target_without_a_driver_or_for_another_gpu(monkeypatch):
    monkeypatch.setattr(drivers, "_driver", FakeDriver(capability=(8, 0)))
    devices.device.cache_clear()
    assert detect_target() is None
    devices.device.cache_clear()

    def none():
        raise ToolchainError("no driver")

    monkeypatch.setattr(devices, "driver", none)
    assert detect_target() is None
    devices.device.cache_clear()


def test_fill_splits(fake_driver):
    assert [fill_splits(b, 0) for b in (1, 2, 8, 64)] == [66, 33, 8, 1]
    with pytest.raises(ConfigError, match="batch=0"):
        fill_splits(0, 0)


def test_pad_requests():
    table, lengths = torch.arange(6, dtype=torch.int32).view(3, 2), torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    same = pad_requests(3, table, lengths)
    assert (same[0] is table, same[1] is lengths, same[2]) == (True, True, None)
    padded_table, padded, totals = pad_requests(5, table, lengths, lengths * 2)
    assert padded_table.tolist() == [[0, 1], [2, 3], [4, 5], [0, 0], [0, 0]]
    assert padded.tolist() == [5, 6, 7, 0, 0]
    assert totals.tolist() == [10, 12, 14, 0, 0]
    assert padded.dtype == padded_table.dtype == totals.dtype == torch.int32


# ---- the reference layer


@pytest.fixture(scope="module")
def reference():
    plan = Deployment(DIMS, target="reference", batches=(2, 4, 8), queries=(1, 2))
    stack = Stack(DIMS, layers=1, lengths=(1, 64, 65, 0), steps=2)
    layer = prepare(plan, stack.layers[0].weights)
    layer.prepare_cache(stack.layers[0].cache)
    return layer, stack


def test_reference_layer_runs_the_oracle(reference):
    layer, stack = reference
    one = stack.layers[0]
    twin = one.cache.clone()
    stack.run([layer], requests=3)  # the empty request is padded in
    expected = decode_layer(one.projected, one.weights, twin, stack.slots, stack.block_table, stack.lengths)
    assert torch.equal(bits(one.out), bits(expected))
    assert torch.equal(one.cache, twin)
    assert layer.shapes == ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2))


def test_reference_layer_refuses_what_the_kernels_refuse(reference):
    layer, stack = reference
    one = stack.layers[0]
    step = {"slots": stack.slots, "block_table": stack.block_table, "lengths": stack.lengths}
    with pytest.raises(NotPrepared, match=r"\(3, 1\) is not prepared"):
        layer.run(one.projected[:3], one.out[:3], cache=one.cache, **step)
    with pytest.raises(ConfigError, match="lengths is int64, must be int32"):
        layer.run(one.projected, one.out, cache=one.cache, **{**step, "lengths": stack.lengths.long()})
    with pytest.raises(ConfigError, match="when the cache moves"):
        layer.run(one.projected, one.out, cache=one.cache.clone(), **step)
    with pytest.raises(ConfigError, match=r"must be \[pages, 64, 576\]"):
        layer.prepare_cache(torch.zeros(4, 32, 576, dtype=torch.uint8))
    unbound = prepare(Deployment(DIMS, target="reference", batches=(4,)), one.weights)
    with pytest.raises(ConfigError, match="call prepare_cache"):
        unbound.run(one.projected, one.out, cache=one.cache, **step)


BAD_STEPS = {
    "projected": (None, torch.zeros(())),
    "out": (None, torch.zeros(())),
    "cache": (None, [1]),
    "slots": (None, torch.zeros(2, dtype=torch.int64), torch.tensor([1 << 40, -1, -1, -1])),
    "block_table": (None, torch.zeros(4, dtype=torch.int32), torch.full((4, 9), 1 << 30, dtype=torch.int32),
                    torch.full((4, 9), -1, dtype=torch.int32)),
    "lengths": ([1, 2], torch.zeros((), dtype=torch.int32), torch.tensor([1, 2, 1 << 30, 3], dtype=torch.int32),
                torch.tensor([1, 2, -1, 3], dtype=torch.int32)),
    "totals": ([1], torch.zeros(4, 1, dtype=torch.int32)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_STEPS.items() for value in values])
def test_reference_layer_writes_nothing_where_a_step_is_wrong(reference, name, value):
    layer, stack = reference
    one = stack.layers[0]
    step = {"projected": one.projected, "out": one.out, "cache": one.cache, "slots": stack.slots,
            "block_table": stack.block_table, "lengths": stack.lengths}  # fmt: skip
    before = one.cache.clone(), bits(one.out).clone()
    with pytest.raises(ConfigError, match=f"{name}( is|:| has) "):
        layer.run(**{**step, name: value})
    assert torch.equal(one.cache, before[0])
    assert torch.equal(bits(one.out), before[1])


@pytest.mark.parametrize("q", [True, None, "1", 1.0, [1]])
def test_reference_layer_takes_an_int_for_q(reference, q):
    layer, stack = reference
    one = stack.layers[0]
    step = {"slots": stack.slots, "block_table": stack.block_table, "lengths": stack.lengths}
    with pytest.raises(NotPrepared, match="must be a multiple of q="):
        layer.run(one.projected, one.out, cache=one.cache, **step, q=q)


def test_weights_of_another_model_are_refused():
    with pytest.raises(ConfigError, match=r"W_UK_T is bfloat16 \[6, 128, 512\], must be bfloat16 \[12, 128, 512\]"):
        prepare(Deployment(MlaDims.kimi_k3(8), target="reference"), MlaWeights.random(DIMS))
    with pytest.raises(ConfigError, match=r"q_b_proj\.weight is missing"):
        prepare(Deployment(DIMS, target="reference"), object())


@pytest.mark.parametrize("target", ["reference", "sm_90a"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "bogus"}, "device='bogus' must be a device of torch"),
        ({"device": "cuda:x"}, "device='cuda:x' must be"),
        ({"device": 1.5}, "device=1.5 must be"),
        ({"cache": "x"}, "cache='x' must be a CompileCache"),
        ({"parity": 9}, "parity=9 must be 0 or 1"),
        ({"dcp": 5}, "dcp=5 must be None|the box has None"),
    ],
)
def test_prepare_refuses_what_it_does_not_know(target, options, says):
    with pytest.raises(ConfigError, match=says):
        prepare(Deployment(DIMS, target=target), MlaWeights.random(DIMS), **options)


@pytest.mark.parametrize("plan", [None, "sm_90a", [PLAN, PLAN]])
def test_prepare_takes_one_deployment(plan):
    with pytest.raises(ConfigError, match="must be a Deployment"):
        prepare(plan, MlaWeights.random(DIMS))


def test_a_number_is_a_cuda_device():
    with pytest.raises(ConfigError, match="W_UK_T is on cpu, must be on cuda:0"):
        prepare(Deployment(DIMS, target="reference"), MlaWeights.random(DIMS), device=0)


def test_a_gpu_layer_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="must be a CUDA device"):
        prepare(PLAN, MlaWeights.random(DIMS))


# ---- warm-up


class FakeCompilers:
    """Stands for toolchain.Compilers: builds objects without code, fails where a test says so."""

    fail = ()
    interrupt = False
    closed = 0
    threads: set[int] = set()  # noqa: RUF012 - a test resets it

    def __init__(self, jobs):
        self.jobs = jobs

    def build(self, key):
        type(self).threads.add(threading.get_ident())
        if key.kernel in self.fail:
            raise CompileError(f"{key.kernel} does not compile")
        if self.interrupt and key.kernel == "mla_value":
            raise KeyboardInterrupt
        return fake_build(key)

    def close(self):
        type(self).closed += 1


@pytest.fixture
def compilers(monkeypatch):
    kind = type("Compilers", (FakeCompilers,), {"threads": set()})
    monkeypatch.setattr(toolchain, "Compilers", kind)
    return kind


def test_warmup_builds_once_and_then_hits(tmp_path, compilers):
    seen: list[Progress] = []
    report = warmup(PLAN, CompileCache(tmp_path), jobs=2, progress=seen.append)
    total = len(PLAN.keys())
    assert (report.keys, report.built, report.hit, report.failed, report.ok) == (total, total, 0, 0, True)
    assert (seen[0].done, seen[-1].done, seen[-1].total, seen[-1].at_work) == (0, total, total, ())
    again = warmup([PLAN, PLAN], CompileCache(tmp_path), jobs=2)
    assert (again.keys, again.built, again.hit, again.failed) == (total, 0, total, 0)
    assert compilers.closed == 2


def test_a_key_that_fails_does_not_lose_the_others(tmp_path, compilers):
    compilers.fail = ("mla_query",)
    report = warmup(PLAN, CompileCache(tmp_path), jobs=3)
    failed = [key for key in PLAN.keys() if key.kernel == "mla_query"]  # noqa: SIM118
    assert report.failed == len(failed) == len(report.failures)
    assert report.built == report.keys - report.failed
    assert not report.ok
    assert {key for key, _ in report.failures} == set(failed)
    assert all("does not compile" in error for _, error in report.failures)
    compilers.fail = ()
    assert warmup(PLAN, CompileCache(tmp_path)).built == report.failed


def test_ctrl_c_ends_the_compilers_and_keeps_what_is_finished(tmp_path, compilers):
    compilers.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        warmup(PLAN, CompileCache(tmp_path), jobs=1)
    assert compilers.closed == 1
    compilers.interrupt = False
    cache = CompileCache(tmp_path)
    assert cache.verify().clean
    report = warmup(PLAN, cache)
    assert report.ok
    assert 0 < report.built <= report.keys


def test_what_cannot_be_stored_is_not_ready(tmp_path, compilers):
    (tmp_path / "file").write_text("")
    report = warmup(PLAN, CompileCache(tmp_path / "file"))
    assert report.failed == report.keys
    assert "could not be stored" in report.failures[0][1]


def test_what_does_not_read_back_is_not_ready(tmp_path, compilers, monkeypatch):
    publish = Folder.publish

    def damaging(folder, manifest, payload):
        done = publish(folder, manifest, payload)
        [file] = Path(folder.path(manifest.key["target"], manifest.digest)).glob("kernel.*")
        file.chmod(0o600)
        file.write_bytes(payload[:-1])
        return done

    monkeypatch.setattr(Folder, "publish", damaging)
    cache = CompileCache(tmp_path)
    report = warmup(PLAN, cache)
    assert report.failed == report.keys
    assert "does not give it back" in report.failures[0][1]
    assert cache.stats()["corrupt"] == report.keys


def test_a_second_warmup_does_not_take_memory_for_the_folder(tmp_path, compilers):
    """Lesson 5: keys that were built before and could not be stored are in memory, and nowhere else."""
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file")
    warmup(PLAN, cache)
    again = warmup(PLAN, cache)
    assert (again.failed, again.hit, again.built) == (again.keys, 0, 0)


def test_what_the_bound_takes_away_is_not_ready(tmp_path, compilers):
    """Lesson 5: "N of N keys ready" is said of what is there in the end."""
    warmup(PLAN, CompileCache(tmp_path / "all"))
    size = CompileCache(tmp_path / "all").stats()["bytes"]
    report = warmup(PLAN, CompileCache(tmp_path / "small", max_bytes=size // 2))
    there = CompileCache(tmp_path / "small")
    ready = sum(key in there for key in PLAN.keys())  # noqa: SIM118
    assert 0 < report.failed < report.keys
    assert report.built == ready == report.keys - report.failed
    assert f"max_bytes={size // 2}" in report.failures[0][1]
    assert warmup(PLAN, CompileCache(tmp_path / "small", max_bytes=size)).ok


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_warmup_that_must_not_write_only_checks(tmp_path, compilers, monkeypatch, by):
    if by == "environment":
        monkeypatch.setenv("K3DSL_CACHE", "ro")
    report = warmup(PLAN, CompileCache(tmp_path, read_only=by == "argument"))
    assert (report.built, report.ok) == (report.keys, True)


def test_an_entry_that_nobody_can_read_is_not_ready(tmp_path, compilers, monkeypatch):
    """Lesson 5: it is there, so nothing takes its place, and it serves nobody."""
    key = PLAN.keys()[0]
    warmup(PLAN, CompileCache(tmp_path))
    load = Folder.load

    def closed(folder, asked):
        if asked == key:
            raise PermissionError(13, "Permission denied", folder.path(key.target, key.digest))
        return load(folder, asked)

    monkeypatch.setattr(Folder, "load", closed)
    cache = CompileCache(tmp_path)
    report = warmup(PLAN, cache)
    assert [failed for failed, _ in report.failures] == [key]
    assert "Permission denied" in report.failures[0][1]
    assert (report.hit, report.built) == (report.keys - 1, 0)
    assert cache.get(key).path is None


def test_warmup_takes_deployments_and_a_cache(tmp_path):
    for plan in ("x", None, [PLAN, "x"]):
        with pytest.raises(ConfigError, match="must be a Deployment"):
            warmup(plan, CompileCache(tmp_path))
    for cache in (None, tmp_path):
        with pytest.raises(ConfigError, match=r"cache=.* must be a CompileCache"):
            warmup(PLAN, cache)


def test_warmup_refuses_bad_jobs_and_captures(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="jobs=0 must be a positive int"):
        warmup(PLAN, CompileCache(tmp_path), jobs=0)
    monkeypatch.setattr(preparing, "guard", lambda what: (_ for _ in ()).throw(k3dsl.CaptureError(what)))
    with pytest.raises(k3dsl.CaptureError, match="warmup"):
        warmup(PLAN, CompileCache(tmp_path))


def test_builder_of_a_key(monkeypatch):
    key = PLAN.keys()[0]
    monkeypatch.setattr(toolchain, "installed", lambda: "4.8.1")
    assert builder_for(key) is toolchain.build
    other = k3dsl.CompileKey(key.kernel, dict(key.params), "gfx942", {}, "0")
    assert builder_for(other) is None
    monkeypatch.setattr(toolchain, "installed", lambda: None)
    assert builder_for(key) is None


def test_compile_core_gives_the_objects_of_a_shape(tmp_path, monkeypatch):
    from k3dsl.nvidia import compiled

    monkeypatch.setattr(compiled, "build", fake_build)
    found = compiled.compile_core(8, 6, q=2, target="sm_90a", cache=CompileCache(tmp_path))
    assert [e.key.kernel for e in found] == ["mla_query", "mla_hopper", "mla_merge", "mla_value"]
    assert found.core.key.params["q"] == 2
    with pytest.raises(ConfigError, match="3 divides none"):
        compiled.compile_core(8, 6, q=3, target="sm_90a", cache=CompileCache(tmp_path))
    assert Path(found.query.path).is_dir()
