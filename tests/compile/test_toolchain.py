"""The compiler driven in a child: sound objects come out, everything else is one error that names the key."""

import ctypes
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from fake_cuda import FakeDriver, make_cubin
from faulty import FaultyKey, GreedyKey, OtherParamsKey

from k3dsl.cache import CompileKey
from k3dsl.cache.sources import source_files
from k3dsl.errors import CompileError, ConfigError, ToolchainError
from k3dsl.nvidia import toolchain
from k3dsl.nvidia.cubin import parse
from k3dsl.nvidia.device import TARGETS
from k3dsl.nvidia.driver import LaunchPlan, Module, tensor_map
from k3dsl.nvidia.toolchain import Compiler, Compilers, build, compile_key, facts, installed, kernel_key


def needs_compiler(test: Any) -> Any:
    """Of the tier `compile`: skipped where there is no compiler."""
    missing = pytest.mark.skipif(installed() is None, reason="needs the CuTe DSL: pip install 'k3dsl[nvidia]'")
    return pytest.mark.compile(missing(test))


def key_of(fault: str, tag: int = 0, target: str = "sm_90a") -> CompileKey:
    return compile_key(FaultyKey(fault, tag), target)


@pytest.fixture(scope="module")
def compiler():
    with Compiler() as compiler:
        yield compiler


def message(compiler: Compiler, key: CompileKey) -> str:
    with pytest.raises(CompileError) as error:
        compiler.build(key)
    text = str(error.value)
    assert key.short in text
    assert key.kernel in text
    assert key.target in text
    return text


def sections(cubin: bytes) -> dict[str, bytes]:
    return {s.name: s.data() for s in ELFFile(BytesIO(cubin)).iter_sections()}


# ---- facts and keys: no compiler needed


@pytest.fixture
def versions(monkeypatch):
    """Sets what is installed: a version for every distribution, or None."""

    def install(version: str | None) -> None:
        def answer(name: str) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(toolchain.metadata, "version", answer)
        toolchain.package_version.cache_clear()

    yield install
    monkeypatch.undo()
    toolchain.package_version.cache_clear()


def test_keys_are_the_same_with_and_without_the_compiler(versions):
    versions("4.8.1")
    there, key = facts("sm_90a"), key_of("none")
    versions(None)
    assert installed() is None
    assert facts("sm_90a") == there
    assert key_of("none") == key


def test_another_compiler_makes_other_keys(versions):
    versions("4.8.1")
    key = key_of("none")
    versions("4.9.0")
    other = key_of("none")
    assert {d.field for d in key.diff(other)} == {f"toolchain.{name}" for name in toolchain.PINNED}


@pytest.mark.parametrize("target", TARGETS)
def test_facts_are_plain_and_name_what_reaches_codegen(target):
    found = facts(target)
    assert all(type(k) is str and type(v) is str for k, v in found.items())
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "cuda", "options"} <= set(found)
    found["cuda"] = "changed"
    assert facts(target)["cuda"] == "13"


def test_targets_are_checked_in_one_place():
    for call in (facts, lambda target: compile_key(FaultyKey("none"), target)):
        with pytest.raises(ConfigError, match="target='sm_90' must be one of sm_90a, sm_100a, sm_103a"):
            call("sm_90")


def test_facts_import_neither_compiler_nor_torch():
    script = """
        import sys
        from k3dsl.nvidia.toolchain import facts
        facts("sm_90a")
        print({"cutlass", "torch", "cuda", "numpy"} & set(sys.modules) or "none")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout.split() == ["none"]


def test_a_key_holds_what_the_kernel_key_holds():
    key = compile_key(FaultyKey("none", 7), "sm_100a")
    assert (key.kernel, key.target) == ("test_faulty", "sm_100a")
    assert dict(key.params) == {"fault": "none", "tag": 7, "shape": ((1, 2), (3,))}
    assert kernel_key(key.kernel, key.params) == FaultyKey("none", 7)
    assert key != compile_key(FaultyKey("none", 8), "sm_100a")


def test_every_kernel_is_found_by_its_name():
    for name in list(toolchain.KERNELS):
        module, _, title = toolchain.KERNELS[name].partition(":")
        maker = getattr(toolchain.import_module(module), title)
        assert maker.name == name
        assert maker.device_module.startswith(("k3dsl.nvidia.kernels.", "faulty.", "probe."))
    with pytest.raises(ConfigError, match="kernel='mla_other' must be one of mla_query, mla_value"):
        kernel_key("mla_other", {})
    with pytest.raises(ConfigError, match=r"mla_value has other params than \{'hands': 3\}"):
        kernel_key("mla_value", {"hands": 3})


def test_a_kernel_is_keyed_by_device_code_and_facts_alone():
    """A change of what loads, launches or caches objects must not rebuild them. Kernels may build on others' facts."""
    facts = {maker.partition(":")[0] for maker in toolchain.KERNELS.values()}
    for maker in list(toolchain.KERNELS.values()):
        module, _, title = maker.partition(":")
        if not module.startswith("k3dsl."):
            continue
        device_module = getattr(toolchain.import_module(module), title).device_module
        files = source_files(device_module)
        allowed = {*facts, "k3dsl.errors", "k3dsl.nvidia.launch"}
        extra = {name for name in files if not name.startswith("k3dsl.nvidia.kernels.")} - allowed
        assert extra == set(), f"{device_module} is traced from more than it should be"
        assert {module, device_module} <= files.keys()


def test_without_a_compiler_the_error_says_what_to_install(versions):
    key = key_of("none")
    versions(None)
    with pytest.raises(ToolchainError, match=r"test_faulty .*no compiler is installed: pip install 'k3dsl\[nvidia\]'"):
        build(key)


def test_a_key_of_another_toolchain_is_not_built():
    key = key_of("none")
    other = CompileKey(key.kernel, key.params, key.target, {**key.toolchain, "cuda": "12"}, "0" * 64)
    with pytest.raises(ToolchainError, match="not a key of this installation") as error:
        build(other)
    assert "toolchain.cuda: '13' here, '12' there" in str(error.value)
    assert "sources" in str(error.value)


def test_the_driver_is_hidden_while_the_compiler_is_imported():
    real = ctypes.CDLL
    with toolchain._no_driver():
        with pytest.raises(OSError, match="hidden"):
            ctypes.CDLL("libcuda.so.1")
        assert isinstance(ctypes.CDLL(None), real)
    assert ctypes.CDLL is real


# ---- builds


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_a_sound_object(compiler, target):
    built = compiler.build(key_of("none", target=target))
    found = parse(built.payload)
    assert (built.filename, found.arch, found.block) == ("kernel.cubin", target, (128, 1, 1))
    assert found.tool.startswith("13.")
    assert [size for _, size in found.params] == [8, 4, 8]
    assert found.frame == found.stack == found.static_smem == 0
    # ptxas' own account, of the same compile
    assert f"Used {found.registers} registers" in built.log
    assert "\x1b" not in built.log
    assert built.resources["registers"] == found.registers > 0
    assert (built.resources["spill_stores"], built.resources["spill_loads"]) == (0, 0)
    assert built.resources["build_seconds"] > 0


@needs_compiler
def test_the_same_bytes_in_another_process_and_environment(compiler, monkeypatch, tmp_path):
    key = key_of("none")
    first = compiler.build(key).payload
    for name, value in {
        "CUTE_DSL_ARCH": "sm_100a",
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_KEEP": "ir,ptx",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "PYTHONHASHSEED": "77",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert build(key).payload == first
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_the_account_of_ptxas_leaves_the_code_as_it_is(compiler, tmp_path):
    """Private to the DSL: the option, the artifact, and that of the object only a note depends on the option."""
    script = f"""
        import cutlass.cute as cute, sys
        from faulty import FaultyKey
        from faulty.kernel import trace
        function, arguments = trace(FaultyKey("none"), "sm_90a")
        options = "--gpu-arch sm_90a {toolchain.OPTIONS} --keep-cubin --dump-dir ."
        sys.stdout.buffer.write(cute.compile(function, *arguments, options=options).artifacts.CUBIN)
    """
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    plain, ours = sections(done.stdout), sections(compiler.build(key_of("none")).payload)
    assert {n for n in plain.keys() | ours.keys() if plain.get(n) != ours.get(n)} <= {".note.nv.tkinfo"}
    assert any(n.startswith(".text.kernel_cutlass") for n in plain)


@needs_compiler
def test_the_child_sees_no_gpu_and_nothing_that_steers_the_dsl(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with Compiler() as compiler:
        assert "devices='' dsl=[] flavour=True" in message(compiler, key_of("environment"))


@needs_compiler
def test_the_child_lives_in_a_folder_of_its_own(compiler, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toolchain.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with Compiler() as own:
        own.build(key_of("litter"))
        (folder,) = (tmp_path / "temporary").iterdir()
        assert (folder / "litter.txt").read_text() == str(folder)
        assert [p.name for p in folder.iterdir()] == ["litter.txt"]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["temporary"]


@needs_compiler
def test_what_it_prints_does_not_disturb(compiler):
    built = compiler.build(key_of("chatter"))
    assert "x" * 100_000 in built.log
    assert "and past Python" in built.log
    assert "x" * 1000 not in compiler.build(key_of("none")).log


@needs_compiler
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("exception", "does not compile: ValueError: a sentence of the kernel"),
        ("ptxas", "does not compile: "),
        ("reported", "the compiler reported: ptxas error   : something is wrong"),
        ("two kernels", "it must hold one kernel, it holds 2"),
        ("no kernel", r"compiles to what is not a readable cubin (0 bytes)"),
    ],
)
def test_faults_that_the_child_survives(compiler, fault, why):
    compiler.build(key_of("none"))
    child = compiler._child
    assert why in message(compiler, key_of(fault))
    assert compiler.build(key_of("none")).payload
    assert compiler._child is child


@needs_compiler
def test_a_spill_is_refused_with_its_figures(compiler):
    text = message(compiler, key_of("spill"))
    assert "a thread takes" in text
    assert "bytes of local memory" in text
    assert "with 64 registers" in text
    stores = int(text.split(" bytes of spill stores")[0].rsplit("(", 1)[1])
    frame = int(text.split(" bytes of local memory")[0].rsplit(" ", 1)[1])
    # LIVE floats and an address or two do not fit 64 registers
    assert stores >= 4 * 30
    assert frame >= 4 * 30


@needs_compiler
def test_shared_memory_over_the_limit_is_refused(compiler):
    text = message(compiler, compile_key(GreedyKey("none"), "sm_90a"))
    assert "a CTA takes 0 + 232449 bytes of shared memory of 232448" in text


@needs_compiler
def test_other_parameters_than_named_are_refused(compiler):
    text = message(compiler, compile_key(OtherParamsKey("none"), "sm_90a"))
    assert "the cubin's parameters have [8, 4, 8] bytes, they must have [8, 8, 8]" in text


def test_what_is_refused_without_compiling_anything():
    """Registers, threads, target and CUDA release, on objects made up for it."""
    params = FaultyKey.params
    for changed, why in (
        ({"arch": "sm_100a"}, "it is for sm_100a, not sm_90a"),
        ({"tool": "12.9"}, "it was built by CUDA 12.9, not 13"),
        ({"registers": 256}, "a thread takes 256 registers of 255"),
        ({"registers": 130, "block": (512, 1, 1)}, "a CTA of 512 threads takes 69632 registers of 65536"),
        ({"block": (2048, 1, 1)}, "a CTA has 2048 threads of 1024"),
        ({"frame": 8}, "a thread takes 8 bytes of local memory"),
        ({"static_smem": 232449}, "a CTA takes 232449 + 0 bytes of shared memory of 232448"),
    ):
        bad = toolchain.check(parse(make_cubin(params, **changed)), "", params, TARGETS["sm_90a"])
        assert any(why in b for b in bad), (changed, bad)
    fits = make_cubin(params, registers=128, block=(512, 1, 1), static_smem=232448)
    assert toolchain.check(parse(fits), "0 errors", params, TARGETS["sm_90a"]) == []
    for log in ("ptxas error : no", "foo.mlir:1:2: error: no", "ptxas fatal   : no", "[error]: no", "Error: no"):
        assert toolchain.check(parse(fits), log, params, TARGETS["sm_90a"]) == [f"the compiler reported: {log}"]
    slow = (
        "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient registers"
    )
    bad = toolchain.check(parse(fits), f"ptxas info    : {slow} for 'f'", params, TARGETS["sm_90a"])
    assert bad == [f"its wgmmas run one at a time: {slow} for "]


@needs_compiler
@pytest.mark.parametrize(
    ("fault", "why"),
    [("abort", "the compiler process died with signal 6"), ("exit", "the compiler process died with status 3")],
)
def test_a_death_is_an_error_and_the_next_build_has_a_new_child(compiler, fault, why):
    text = message(compiler, key_of(fault))
    assert why in text
    assert ("last words" in text) == (fault == "abort")
    assert compiler.build(key_of("none")).payload


@needs_compiler
def test_a_hang_is_bounded():
    with Compiler(seconds=4.0) as compiler:
        start = time.monotonic()
        assert "gave no answer in time" in message(compiler, key_of("hang"))
        assert time.monotonic() - start < 30
        assert compiler._child is None


@needs_compiler
def test_closing_ends_what_another_thread_builds():
    with Compilers(1) as compilers, ThreadPoolExecutor(2) as threads:
        builds = [threads.submit(compilers.build, key_of("hang", tag)) for tag in range(2)]
        while compilers._all[0]._child is None:
            time.sleep(0.01)
        time.sleep(0.5)
        compilers.close()
        errors = {type(build.exception(timeout=30)) for build in builds}
    assert errors == {CompileError, ToolchainError}
    assert compilers._all[0]._child is None


@needs_compiler
def test_several_children_for_several_threads():
    keys = [key_of(fault, tag) for tag in range(3) for fault in ("none", "exit", "exception", "chatter")]

    def outcome(key: CompileKey) -> str:
        try:
            return compilers.build(key).filename
        except CompileError as error:
            return "refused" if key.short in str(error) else str(error)

    with Compilers(2) as compilers, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(outcome, keys)) == ["kernel.cubin", "refused", "refused", "kernel.cubin"] * 3
        assert len(compilers._all) == 2
    assert all(c._child is None for c in compilers._all)
    with pytest.raises(ConfigError, match="jobs=0 must be at least 1"):
        Compilers(0)


@needs_compiler
def test_sources_that_changed_since_they_were_read(monkeypatch, tmp_path):
    """A process that read a kernel's sources must not store the object of later ones under their digest."""
    package = tmp_path / "moving"
    package.mkdir()
    here = Path(__file__).parent / "faulty"
    for file in here.glob("*.py"):
        (package / file.name).write_text(file.read_text().replace("faulty", "moving").replace("Faulty", "Moving"))
    monkeypatch.syspath_prepend(tmp_path)
    moving = toolchain.import_module("moving")
    key = compile_key(moving.MovingKey("none"), "sm_90a")
    with Compiler() as compiler:
        assert compiler.build(key).payload
        kernel = package / "kernel.py"
        kernel.write_text(kernel.read_text().replace("* scale", "+ scale"))
        compiler.close()
        assert "have changed since this process started" in message(compiler, key)


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_every_kind_of_parameter_and_a_launch_of_it(compiler, monkeypatch, target):
    """Private to the DSL: pointers, scalars and GridConstant maps become one parameter each, in their order."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "gpu")
    probe = toolchain.import_module("probe")
    key = probe.ProbeKey(4)
    with Compiler() as own:  # the search path is that of its start
        built = own.build(compile_key(key, target))
    assert [size for _, size in parse(built.payload).params] == [8, 4, 128, 4, 8, 8, 4, 8, 8]

    driver = FakeDriver(capability=TARGETS[target].capability)
    keys = tensor_map(driver, dtype="bf16", address=4096, dims=[64, 40], strides_bytes=[128], box=[64, 8])
    values = {
        "source": 1,
        "count": 2,
        "keys": keys,
        "scale": 0.5,
        "offset": -3,
        "out": 4,
        "row": -5,
        "tile": 6,
        "ranks": 7,
    }
    function = Module.load(driver, built.payload).function(0)
    LaunchPlan(function, probe.geometry(key, count=5000), key.params, **values).launch(9)
    (launch,) = driver.launches
    assert (launch.grid, launch.cluster, launch.smem, launch.pdl) == ((40, 1, 1), (4, 1, 1), probe.SMEM, True)
    assert launch.values(key.params) == {**values, "keys": keys.bytes()}
