"""The commands: exit codes, and that --json puts one document and nothing else on stdout."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_cuda import fake_build

from k3dsl import CompileCache, ConfigError, Deployment, MlaDims
from k3dsl.cli import main
from k3dsl.cli.console import out, table
from k3dsl.cli.planargs import PlanArguments, numbers
from k3dsl.nvidia import toolchain


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


class Compilers:
    def __init__(self, jobs):
        self.jobs = jobs

    def build(self, key):
        return fake_build(key)

    def close(self):
        pass


@pytest.fixture
def compilers(monkeypatch):
    monkeypatch.setattr(toolchain, "Compilers", Compilers)


def k3dsl(capsys, *arguments):
    """(exit code, stdout, stderr) of a command."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr()
    return end.value.code or 0, said.out, said.err


PLAN = ("--target", "sm_90a,sm_100a", "--batches", "1-3,16", "--queries", "1")


def test_warmup_then_warmup_then_plan(capsys, compilers):
    code, out, _ = k3dsl(capsys, "warmup", *PLAN, "--jobs", "2", "--json")
    first = json.loads(out)
    assert code == 0
    assert first["keys"] == first["built"] > 0
    assert (first["hit"], first["failed"], first["targets"]) == (0, 0, ["sm_90a", "sm_100a"])
    code, out, _ = k3dsl(capsys, "warmup", *PLAN)
    assert code == 0
    assert out.startswith(f"{first['keys']} of {first['keys']} keys ready (0 built, {first['keys']} hit, 0 failed")
    code, out, _ = k3dsl(capsys, "plan", *PLAN, "--json")
    plan = json.loads(out)
    assert code == 0
    assert len(plan["keys"]) == first["keys"]
    assert all(key["present"] for key in plan["keys"])
    assert {s["core"] for s in plan["shapes"] if s["target"] == "sm_90a"} == {"hopper"}
    assert [s["core"] for s in plan["shapes"] if s["target"] == "sm_100a"] == ["tokenspeed"] * 3 + ["trtllm"]
    assert set(plan["keys"][0]) == {"digest", "kernel", "params", "target", "present"}


def test_a_warmup_says_that_nothing_is_kept(capsys, compilers, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE", "off")
    code, _, err = k3dsl(capsys, "warmup", "--target", "sm_90a", "--batches", "1", "--epilogues", "none")
    assert (code, "checked and not kept" in err) == (0, True)
    monkeypatch.delenv("K3DSL_CACHE")
    code, out, err = k3dsl(capsys, "warmup", "--target", "sm_90a", "--batches", "1", "--epilogues", "none", "--json")
    assert (code, "kept" in err, json.loads(out)["hit"]) == (0, False, 0)


def test_plan_builds_nothing_and_lists_what_is_missing(capsys):
    code, out, _ = k3dsl(capsys, "plan", "--target", "sm_90a", "--batches", "1", "--epilogues", "none")
    assert code == 0
    assert "0 of 4 keys present" in out
    assert "the core of sm_90a" in out
    assert list(CompileCache().entries()) == []


def test_plan_says_once_what_all_keys_of_a_kernel_have_alike(capsys):
    code, out, _ = k3dsl(capsys, "plan", "--target", "sm_90a", "--batches", "1,2", "--epilogues", "none")
    assert code == 0
    rows = [line for line in out.splitlines() if line.split()[1:2] == ["mla_query"]]
    assert [row.split()[2:-2] for row in rows] == [["tile=1"], ["tile=2"]]
    assert "every mla_query: kv_format=fp8 schedule=narrow" in out.splitlines()
    [core] = [line for line in out.splitlines() if line.split()[1:2] == ["mla_hopper"]]
    assert "kv=fp8" in core  # one key: nothing to have alike
    assert "every mla_hopper" not in out


def test_a_failed_key_is_a_finding(capsys, monkeypatch):
    from k3dsl import CompileError

    class Failing(Compilers):
        def build(self, key):
            if key.kernel == "mla_merge":
                raise CompileError("it spills")
            return fake_build(key)

    monkeypatch.setattr(toolchain, "Compilers", Failing)
    arguments = ("warmup", "--target", "sm_90a", "--batches", "8", "--epilogues", "none")
    code, out, err = k3dsl(capsys, *arguments, "--json")
    document = json.loads(out)
    assert code == 1
    assert (document["failed"], document["built"]) == (1, 3)
    assert document["failures"][0]["error"] == "it spills"
    code, out, err = k3dsl(capsys, *arguments)
    assert code == 1
    assert "3 of 4 keys ready" in out
    assert "failed: mla_merge" in err


def test_plan_file_and_options_over_it(capsys, tmp_path, compilers):
    file = tmp_path / "plan.toml"
    file.write_text(
        'tp = 16\nepilogues = ["fp16"]\ntarget = ["sm_90a"]\nkv_format = "bf16"\nbatches = "1-2"\nqueries = [1, 2]\n'
    )
    [plan] = PlanArguments(plan=file).deployments()
    expected = Deployment(MlaDims.kimi_k3(16), target="sm_90a", kv_format="bf16", batches=(1, 2), queries=(1, 2))
    expected = replace(expected, epilogues=("fp16",))
    assert plan == expected
    [plan] = PlanArguments(plan=file, epilogues="bf16,fp16").deployments()
    assert plan.epilogues == ("bf16", "fp16")
    [plan] = PlanArguments(plan=file, epilogues="none").deployments()
    assert plan.epilogues == ()
    with pytest.raises(ConfigError, match="none must be alone"):
        PlanArguments(plan=file, epilogues="none,bf16").deployments()
    [plan] = PlanArguments(plan=file, batches="4", kv_format="fp8", target="sm_100a").deployments()
    assert (plan.batches, plan.kv_format, plan.target) == ((4,), "fp8", "sm_100a")
    code, out, _ = k3dsl(capsys, "warmup", "--plan", str(file), "--json")
    assert code == 0
    assert json.loads(out)["built"] == len(expected.keys())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tq = 8\n", "tq must be among model, tp"),
        ("tp = \n", "plan.toml"),
        ('model = "gpt"\n', "model='gpt' must be one of kimi-k3"),
        ("tp = 4\n", "tp=4"),
        ('model = ["kimi-k3"]\n', "model=['kimi-k3'] must be one of kimi-k3"),
        ('target = [["sm_90a"]]\n', "target=[['sm_90a']] must be a target or several"),
        ("target = []\n", "target=[] must be a target or several"),
        ("target = 90\n", "target='90' must be one of"),
        ('batches = [["1"]]\n', "batches: ['1'] must be an int"),
        ("queries = {}\n", "queries={}: '{}' must be a number"),
        ('epilogues = [["bf16"]]\n', "epilogues: ['bf16'] must be one of"),
        ('kv_format = ["fp8"]\n', "kv_format=['fp8'] must be one of"),
        ('core = ["hopper"]\n', "core=['hopper'] must be auto or one of"),
        ('host = ["x86-64"]\n', "host=['x86-64'] must be one of"),
        ('p_dtype = ["f16"]\n', "p_dtype=['f16'] must be"),
        ("tp = [8]\n", "tp=[8]"),
    ],
)
def test_bad_plan_files_are_wrong_usage(capsys, tmp_path, text, message):
    file = tmp_path / "plan.toml"
    file.write_text(text + ("" if "target" in text else 'target = "sm_90a"\n'))
    code, out, err = k3dsl(capsys, "plan", "--plan", str(file))
    assert (code, out) == (2, "")
    assert message in err


def test_numbers():
    assert numbers("1-4, 16,2", "batches") == (1, 2, 3, 4, 16)
    assert numbers([3, 1], "batches") == (3, 1)
    assert numbers(8, "batches") == (8,)
    for bad in ("", "1-", "4-1", "a", "1,,2", "-3"):
        with pytest.raises(ConfigError, match="must be a number or a range"):
            numbers(bad, "batches")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("plan", "--target", "sm_80"), 2, "target='sm_80' must be one of"),
        (("plan", "--target", "sm_90a", "--batches", "x"), 2, "batches='x'"),
        (("plan", "--target", "sm_90a", "--batches", "1-99999999999"), 2, "a range of 4096 numbers at most"),
        (("plan", "--target", "sm_90a", "--batches", "9" * 5000), 2, "must be a number"),
        (("plan", "--target", "sm_90a", "--batches", "99", "--core", "flash"), 2, "2 problems"),
        (("warmup", "--target", "gfx942"), 2, "gfx942"),
        (("warmup", "--jobs", "0"), 2, ""),
        (("nothing",), 2, ""),
        (("bench", "--what", "colour"), 2, "colour must be among layer, host, core, epilogue, cache"),
        (("demo", "--q", "9"), 2, ""),
        (("demo", "--seed", "9" * 30), 2, ""),
        (("demo", "--page-size", "99999999999"), 2, ""),
        (("demo", "--steps", "99999999999"), 2, ""),
        (("cache", "prune", "--max-bytes", "9" * 400), 2, "must be a number of bytes below 2^63"),
        (("bench", "--what", "cache", "--against", "/nowhere/python"), 2, "must be the Python of an environment"),
        (("bench", "--what", "cache", "--against", "/bin/false"), 2, "must be the Python of an environment"),
        (("bench", "--what", "cache", "--against", "/bin/true"), 2, "must be the Python of an environment"),
    ],
)
def test_wrong_usage_is_2_with_nothing_on_stdout(capsys, arguments, code, message):
    got, out, err = k3dsl(capsys, *arguments)
    assert got == code
    assert out == ""
    assert message in err
    assert err


def test_demo_of_a_gpu_target_without_that_gpu_is_3(capsys):
    code, out, err = k3dsl(capsys, "demo", "--target", "sm_100a", "--json")
    assert (code, out) == (3, "")
    assert "needs a GPU of that architecture" in err


@pytest.mark.parametrize(("kv_format", "q"), [("fp8", 1), ("bf16", 4), ("fp8_ds_mla", 1)])
def test_demo_on_the_reference(capsys, kv_format, q):
    code, out, _ = k3dsl(
        capsys, "demo", "--target", "reference", "--steps", "2", "--layers", "1", "--tp", "16", "--json",
        "--kv-format", kv_format, "--q", str(q), "--replays", "1",
    )  # fmt: skip
    document = json.loads(out)
    assert code == 0
    assert document["ok"] is True
    assert (document["target"], document["steps"], document["compiled"], document["hits"]) == ("reference", 2, 0, 0)
    assert 0 < document["max_rel_error"] <= document["limit"]
    assert (document["strays"], document["replays_equal"]) == (0, True)
    assert document["lengths"]["first"][-1] == 0
    assert {max(n, q) for n in (1, 63, 64, 65)} <= set(document["lengths"]["first"])


def test_demo_that_finds_a_difference_is_1(capsys, monkeypatch):
    from k3dsl.cli import demo

    monkeypatch.setitem(demo.LIMITS, "fp8", 1e-9)
    code, out, _ = k3dsl(
        capsys, "demo", "--target", "reference", "--steps", "1", "--layers", "1", "--tp", "16", "--json"
    )
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_doctor_says_what_is_there(capsys, monkeypatch):
    code, out, _ = k3dsl(capsys, "doctor", "--json")
    document = json.loads(out)
    names = {check["name"] for check in document["checks"]}
    assert {"k3dsl", "torch", "NVIDIA compiler", "Blackwell core", "cache folder", "K3DSL_CACHE_DIR"} <= names
    assert code == (0 if document["ok"] else 1)
    assert all(check["status"] in ("ok", "info", "warn", "bad") for check in document["checks"])
    _, out, _ = k3dsl(capsys, "doctor")
    assert "Blackwell core" in out
    monkeypatch.setenv("K3DSL_CACHE_DIR", "relative/folder")
    code, out, _ = k3dsl(capsys, "doctor", "--json")
    assert code == 1
    assert any(check["status"] == "bad" and "absolute path" in check["found"] for check in json.loads(out)["checks"])


@pytest.mark.parametrize("command", ["demo", "warmup", "plan", "doctor", "bench", "cache"])
def test_every_command_has_help(capsys, command):
    code, out, _ = k3dsl(capsys, command, "--help")
    assert code == 0
    assert "Usage" in out
    if command != "cache":
        assert f"Example: k3dsl {command}" in out


def test_module_and_version():
    out = subprocess.check_output([sys.executable, "-m", "k3dsl", "--version"], text=True)
    assert out.split()[0] == "k3dsl"


def test_text_with_brackets_is_printed_as_it_is(capsys):
    """A user, a path or a compiler's message may hold what looks like markup, and may not break the table."""
    view = table("entry", "name", "value")
    view.add_row("user", "[bold]u[/x]")
    out().print(view)
    assert "[bold]u[/x]" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["layer", "host", "core", "epilogue"])
def test_bench_without_a_gpu_is_the_environments_fault(capsys, monkeypatch, what):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, said, error = k3dsl(capsys, "bench", "--what", what)
    assert (code, said) == (3, "")
    assert "torch sees no GPU here" in error


def test_a_row_of_a_table_is_a_line_where_there_is_no_terminal(capsys, monkeypatch, compilers):
    monkeypatch.delenv("COLUMNS")
    k3dsl(capsys, "warmup", *PLAN)
    key = Deployment(MlaDims(), target="sm_90a", batches=(1,)).keys()[0]
    _, said, _ = k3dsl(capsys, "plan", *PLAN)
    [row] = [line for line in said.splitlines() if key.short in line]
    assert all(word in row for word in (key.kernel, "sm_90a", "schedule=narrow", "tile=1", "yes"))


def test_an_interrupted_warmup_says_how_far_it_came(capsys, monkeypatch, compilers):
    built = []

    def build(self, key):
        if built:
            raise KeyboardInterrupt
        built.append(key)
        return fake_build(key)

    monkeypatch.setattr(Compilers, "build", build)
    code, said, error = k3dsl(
        capsys, "warmup", "--target", "sm_90a", "--batches", "1", "--epilogues", "none", "--jobs", "1"
    )
    assert (code, said) == (130, "")
    assert "interrupted: 1 of 4 keys ready" in error


@pytest.mark.parametrize(("stream", "code", "says"), [("stdout", 3, "standard output is closed"), ("stderr", 1, "")])
def test_a_stream_that_is_closed(capsys, monkeypatch, stream, code, says):
    with monkeypatch.context() as patch:
        patch.setattr(sys, stream, None)
        with pytest.raises(SystemExit) as end:
            main(["cache", "show", "ff", "--json"])
    assert (end.value.code, says in capsys.readouterr().err) == (code, True)


def test_doctor_says_all_that_is_wrong_with_a_plan(capsys, tmp_path):
    (tmp_path / "plan.toml").write_text('target = "sm_90a"\nbatches = [99]\nkv_format = "fp7"\n')
    code, out, _ = k3dsl(capsys, "doctor", "--plan", str(tmp_path / "plan.toml"), "--json")
    [found] = [check["found"] for check in json.loads(out)["checks"] if check["name"] == "kernels"]
    assert code == 1
    assert "batches: 99 must be" in found
    assert "kv_format='fp7' must be" in found
    assert "\n" not in found


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize(("place", "says"), [("none/o.png", "no such folder"), ("", "Is a directory")])
def test_bench_measures_nothing_that_it_cannot_write(capsys, monkeypatch, tmp_path, option, place, says):
    from k3dsl.cli import bench

    class Question:
        @staticmethod
        def plot(document, file):
            raise AssertionError

        @staticmethod
        def run(**_):
            raise AssertionError("it was measured")

    monkeypatch.setattr(bench, "question", lambda name: Question)
    code, out, err = k3dsl(capsys, "bench", "--what", "layer", option, str(tmp_path / place))
    assert (code, out, says in err) == (3, "", True)
