"""FlyDSL driven in a child: sound code objects come out, everything else is one error that names the key."""

import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hip import SIZES, FakeHip
from flyprobe import FlyProbeKey, OtherParamsKey

from k3dsl.amd import toolchain
from k3dsl.amd.codeobject import parse
from k3dsl.amd.hip import HipRuntime
from k3dsl.amd.launch import Executable, Launch, LaunchPlan
from k3dsl.amd.toolchain import Compiler, Compilers, compile_key, facts, installed, kernel_key
from k3dsl.cache import CompileCache, CompileKey
from k3dsl.errors import CompileError, ConfigError, LaunchError, ToolchainError

TARGET = "gfx950"
needs_compiler = pytest.mark.skipif(installed() is None, reason="needs FlyDSL: pip install 'k3dsl[amd]'")


def key_of(fault: str = "none", tag: int = 0) -> CompileKey:
    return compile_key(FlyProbeKey(fault, tag), TARGET)


@pytest.fixture(scope="module")
def compiler():
    with Compiler() as compiler:
        yield compiler


@pytest.fixture(scope="module")
def sound(compiler) -> bytes:
    return compiler.build(key_of()).payload


def refusal(compiler: Compiler, key: CompileKey, kind: type[Exception] = CompileError) -> str:
    with pytest.raises(kind) as error:
        compiler.build(key)
    text = str(error.value)
    assert key.short in text
    assert key.kernel in text
    return text


# ---- facts and keys: no compiler needed


def test_facts_are_the_same_with_and_without_the_compiler(monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "installed", lambda: None)
    toolchain._version.cache_clear()
    try:
        assert facts(TARGET) == toolchain.PINNED
    finally:
        monkeypatch.undo()
        toolchain._version.cache_clear()
    if installed() == toolchain.PINNED["flydsl"]:
        assert facts(TARGET) == toolchain.PINNED


def test_a_key_and_back() -> None:
    key = key_of("none", 3)
    assert kernel_key(key.kernel, key.params) == FlyProbeKey("none", 3)
    assert key.toolchain == facts(TARGET)
    assert key.digest != key_of("none", 4).digest
    with pytest.raises(ConfigError, match="target='gfx942' must be one of gfx950"):
        compile_key(FlyProbeKey(), "gfx942")
    with pytest.raises(ConfigError, match="kernel='nobody' must be one of"):
        kernel_key("nobody", {})


def test_keys_need_no_flydsl_no_torch_no_hip() -> None:
    code = (
        "import sys\nfor name in ('flydsl', 'torch', 'tools'): sys.modules[name] = None\n"
        "from k3dsl.amd.toolchain import compile_key\nfrom flyprobe import FlyProbeKey\n"
        "print(compile_key(FlyProbeKey(), 'gfx950').digest)"
    )
    paths = [str(Path(__file__).parents[k]) for k in (0, 2)]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{code}"], capture_output=True, text=True
    )
    assert run.stdout.strip() == key_of().digest, run.stderr


def test_without_a_compiler_the_error_says_what_to_do(compiler, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "installed", lambda: None)
    assert "no compiler is installed: pip install" in refusal(compiler, key_of(), ToolchainError)


# ---- building


@needs_compiler
@pytest.mark.emulator
class TestBuild:
    def test_a_sound_object_and_its_resources(self, compiler) -> None:
        built = compiler.build(key_of("prints"))
        assert built.payload[:4] == b"\x7fELF"
        assert built.filename == "kernel.hsaco"
        assert "one line on stdout" in built.log
        r = built.resources
        assert (r["symbol"], r["arch"], r["private"], r["vgpr_spills"]) == ("flyprobe_prints", TARGET, 0, 0)
        assert (r["kernarg"], r["block"], r["lds"], r["waves"]) == (40, [64, 1, 1], 0, 8)
        assert r["params"] == [[0, 4], [8, 8], [16, 4], [24, 8], [32, 8]]
        assert 0 < r["vgprs"] < 65
        assert 0 < r["sgprs"] < 103
        assert "LLD" in r["linker"]

    def test_the_same_bytes_in_another_process_and_environment(self, sound, monkeypatch, tmp_path) -> None:
        for name in ("ARCH", "FLYDSL_GPU_ARCH", "ROCM_PATH", "FLYDSL_COMPILE_LLVM_DIR", "COMPILE_ONLY"):
            monkeypatch.setenv(name, "gfx942" if "ARCH" in name else "1")
        monkeypatch.chdir(tmp_path)
        assert toolchain.build(key_of()).payload == sound
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("fault", "says"),
        [
            ("raises", "does not compile: RuntimeError: as asked"),
            ("exits", "the compiler process died with status 3"),
            ("hidden", "does not compile"),
            ("lds", "a workgroup takes 167936 bytes of LDS of 163840"),
            ("tanh", "the compiler reported: error: no libcall available for ftanh"),
            ("assembly", "invalid instruction"),
            ("spills", "bytes of scratch"),
        ],
    )
    def test_what_is_wrong_is_refused_and_named(self, compiler, sound, fault, says) -> None:
        assert says in refusal(compiler, key_of(fault))
        assert compiler.build(key_of()).payload == sound  # and the next one is not affected

    def test_other_parameters_than_named_are_refused(self, compiler) -> None:
        text = refusal(compiler, compile_key(OtherParamsKey(), TARGET))
        assert "the kernel's parameters are" in text
        assert "(count i32, source ptr)" in text

    def test_a_compiler_that_hangs_is_stopped(self) -> None:
        with Compilers(1, seconds=3) as compilers:
            began = time.monotonic()
            assert "gave no answer in time" in refusal(compilers, key_of("hangs"))  # type: ignore[arg-type]
            assert time.monotonic() - began < 20

    def test_no_linker(self, monkeypatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        monkeypatch.setattr(toolchain, "_STEERS", (*toolchain._STEERS, "PYTHONHOME"))
        with Compiler() as alone:
            if toolchain.linker() is None:
                assert "no ld.lld" in refusal(alone, key_of(), ToolchainError)
            else:  # ziglang's
                assert alone.build(key_of()).resources["linker"].startswith("LLD")

    def test_through_the_cache(self, tmp_path, compiler, sound) -> None:
        cache = CompileCache(tmp_path)
        first = cache.get_or_build(key_of(), compiler.build)
        assert (first.source, first.payload) == ("built", sound)
        again = CompileCache(tmp_path).get(key_of())
        assert again is not None
        assert again.payload == sound
        assert again.manifest.resources["vgprs"] == parse(sound).vgprs


# ---- objects


@needs_compiler
@pytest.mark.emulator
class TestObjects:
    def test_damaged_objects_are_refused(self, sound) -> None:
        assert parse(sound).symbol == "flyprobe_none"
        for size in (0, 3, 64, 200, len(sound) // 2):
            with pytest.raises(CompileError, match="not a readable code object"):
                parse(sound[:size])
        other = bytearray(sound)
        other[48] = 0x4C  # gfx942 in e_flags
        with pytest.raises(CompileError, match="not one of gfx950"):
            parse(bytes(other))
        cubin = bytearray(sound)
        cubin[18:20] = (190).to_bytes(2, "little")
        with pytest.raises(CompileError, match="not EM_AMDGPU"):
            parse(bytes(cubin))

    def test_a_launch_on_the_emulator(self, sound) -> None:
        from tools.gfx950 import Memory
        from tools.gfx950.runtime import EmulatorRuntime

        source, out = torch.randn(128), torch.full((128,), 7.0)
        runtime = EmulatorRuntime(Memory(source, out))
        plan = self.plan(runtime, sound, source=source.data_ptr(), out=out.data_ptr(), count=100)
        plan.launch(0)
        assert torch.equal(out[:100], source[:100] * 2 - 3)
        assert (out[100:] == 7).all()
        plan.set("scale", 1.0)
        plan.slot("offset").value = 0
        plan.launch(0)
        assert torch.equal(out[:100], source[:100])
        assert len(runtime.results) == 2

    @staticmethod
    def plan(runtime: Any, payload: bytes, **values: Any) -> LaunchPlan:
        given = {"count": 2, "source": 1 << 40, "scale": 2.0, "offset": -3 << 33, "out": 5 << 40, **values}
        return LaunchPlan(Executable.load(runtime, payload), Launch((2, 1, 1), (64, 1, 1)), FlyProbeKey.params, **given)

    def test_a_launch_on_hip(self, sound) -> None:
        fake = FakeHip()
        fake.sizes = [SIZES[kind] for _, kind in FlyProbeKey.params]
        runtime = HipRuntime(3, library=fake, target=TARGET, stream=lambda: 0x77)
        plan = self.plan(runtime, sound)
        assert fake.device == 0  # as it was
        assert [device for device, _ in fake.loaded.values()] == [3]
        plan.launch(runtime.stream())
        plan.set("count", -1)
        plan.launch_as(Launch((9, 1, 1), (64, 1, 1)), 0)
        first, second = fake.launches
        assert fake.extra == [None, None]
        assert (first["grid"], first["block"], first["lds"], first["stream"]) == ((2, 1, 1), (64, 1, 1), 0, 0x77)
        packed = [struct.pack("<i", 2), struct.pack("<Q", 1 << 40), struct.pack("<f", 2.0)]
        packed += [struct.pack("<q", -3 << 33), struct.pack("<Q", 5 << 40)]
        assert first["values"] == packed
        assert second["grid"] == (9, 1, 1)
        assert (first["device"], second["device"], fake.device) == (3, 3, 0)  # stream 0 is the current device's
        assert second["values"] == [struct.pack("<i", -1), *packed[1:]]
        assert not runtime.capturing()
        fake.captured.add(0x77)
        assert runtime.capturing()
        runtime.synchronize()
        assert fake.synchronized == [0x77]
        del plan
        assert fake.loaded == {}

    def test_what_hip_refuses_is_an_error(self, sound) -> None:
        fake = FakeHip()
        fake.sizes = [SIZES[kind] for _, kind in FlyProbeKey.params]
        runtime = HipRuntime(0, library=fake, target=TARGET, stream=lambda: 0)
        assert not runtime.capturing()
        assert fake.asked == []  # asking about the default stream would break another one's capture
        plan = self.plan(runtime, sound)
        fake.fail["hipModuleLaunchKernel"] = 719
        with pytest.raises(LaunchError, match=r"launch on device 0 with .*719 \(made up\)"):
            plan.launch(0)
        fake.fail["hipModuleLoadData"] = 209
        with pytest.raises(LaunchError, match=r"loading flyprobe_none .*hipModuleLoadData answered 209"):
            self.plan(runtime, sound)
        with pytest.raises(ConfigError, match=r"device 0 \(gfx942\) has no kernels"):
            HipRuntime(0, library=fake, target="gfx942", stream=lambda: 0)

    def test_wrong_launches_are_one_error(self, sound) -> None:
        executable = Executable.load(HipRuntime(0, library=FakeHip(), target=TARGET, stream=lambda: 0), sound)
        with pytest.raises(ConfigError) as error:
            LaunchPlan(executable, Launch((0, 1, 1), (32, 1, 1), lds=1 << 20), FlyProbeKey.params)
        for piece in ("grid (0, 1, 1)", "block (32, 1, 1) must be (64, 1, 1)", "lds=1048576 must be from 0 to 163840"):
            assert piece in str(error.value)
        with pytest.raises(ConfigError) as error:
            LaunchPlan(executable, Launch((1, 1, 1), (64, 1, 1)), FlyProbeKey.params, count=2.5, source=-1, more=3)
        for piece in ("count=2.5 must be an int", "source=-1 must be", "scale is missing", "more is no parameter"):
            assert piece in str(error.value)


def test_without_hip_the_error_says_so(monkeypatch) -> None:
    from k3dsl.amd import hip
    from k3dsl.amd.peers import HipMemory

    monkeypatch.setattr(hip, "LIBRARIES", ("libnowhere.so.1",))
    with pytest.raises(ToolchainError, match="no HIP"):
        hip.Hip()
    with pytest.raises(ToolchainError, match="no HIP"):
        HipMemory()
    with pytest.raises(ToolchainError, match=r"too old: it has no hipInit"):
        hip.Hip(object())


def test_a_warm_up_says_first_what_it_lacks(monkeypatch, tmp_path) -> None:
    from k3dsl import Deployment, MlaDims
    from k3dsl.preparing import lacking

    plan = Deployment(MlaDims(), target=TARGET, kv_format="fp8_ds_mla")
    cache = CompileCache(tmp_path)
    monkeypatch.setattr(toolchain, "installed", lambda: None)
    assert lacking(plan, cache) == ["the compiler of gfx950 is not installed: pip install 'k3dsl[amd]'"]
    monkeypatch.setattr(toolchain, "installed", lambda: "0.5.0")
    monkeypatch.setattr(toolchain, "linker", lambda: None)
    assert "no ld.lld" in lacking(plan, cache)[0]
    monkeypatch.undo()
    if installed():
        assert lacking(plan, cache) == []
