"""`k3dsl cache`: what each command prints, as JSON and for people, and how it ends."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cache_tools import Builder, make_key, payload_of
from typer.testing import CliRunner

from k3dsl.cache import CompileCache, store
from k3dsl.cli import app, main

prepare = import_module("k3dsl.preparing")
COMMANDS = ("path", "ls", "show", "why", "stats", "verify", "prune", "rm", "clear", "pin", "export", "import")


class Run:
    """What a command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def k3dsl(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Runs `k3dsl cache ...` in this process, as the console script does."""
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(root))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Run:
        capsys.readouterr()
        try:
            main(["cache", *arguments])
            code = 0
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else 1
        caught = capsys.readouterr()
        return Run(code, caught.out, caught.err)

    return run


@pytest.fixture
def full(root: Path) -> CompileCache:
    """Three entries for sm_90a, one for sm_100a."""
    cache = CompileCache(root)
    for key in (make_key(0), make_key(1), make_key(2, kernel="mla_query"), make_key(3, target="sm_100a")):
        cache.get_or_build(key, Builder())
    return cache


def damage(cache: CompileCache, n: int = 0) -> None:
    entry = cache.reread(make_key(n))
    assert entry is not None
    os.truncate(f"{entry.path}/kernel.cubin", 10)


def test_ls(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    """Lesson 33: filters that filter, headers that match."""
    done = k3dsl("ls", "--json")
    assert done.code == 0
    rows = done.json["entries"]
    assert {row["digest"] for row in rows} == {entry.digest for entry in full.entries()}
    row = next(row for row in rows if row["digest"] == make_key(0).digest)
    assert (row["kernel"], row["target"], row["size"], row["registers"]) == ("mla_value", "sm_90a", 30_000, 64)
    assert os.path.isfile(f"{row['path']}/{row['payload']}")
    assert [row["digest"] for row in k3dsl("ls", "--target", "sm_100a", "--json").json["entries"]] == [
        make_key(3, target="sm_100a").digest
    ]
    assert len(k3dsl("ls", "--target", "sm_90a", "--kernel", "mla_value", "--json").json["entries"]) == 2
    assert k3dsl("ls", "--kernel", "none", "--json").json == {"entries": []}
    text = k3dsl("ls").out
    head = next(line for line in text.splitlines() if line.startswith("key"))
    line = next(line for line in text.splitlines() if line.startswith(make_key(0).short))
    for column, value in (("kernel", "mla_value"), ("target", "sm_90a"), ("params", "eps=1e-05")):
        assert line.index(value) == head.index(column)
    assert "4 entries, 120000 bytes" in text


@pytest.mark.parametrize("command", ["ls", "clear", "export", "import"])
@pytest.mark.parametrize(("targets", "wrong"), [("sm_90a,sm_90", "sm_90"), ("", ""), (",", ",")])
def test_a_target_that_nobody_knows_is_not_just_empty(
    k3dsl: Callable[..., Run], full: CompileCache, tmp_path: Path, command: str, targets: str, wrong: str
) -> None:
    file = tmp_path / "kernels.k3b"
    full.export(file)
    before = file.read_bytes()
    full.get_or_build(make_key(0, target="sm_80"), Builder())  # one with entries is known, whatever its name
    arguments = [str(file)] if command in ("export", "import") else []
    done = k3dsl(command, *arguments, "--target", targets)
    assert (done.code, done.out) == (2, "")
    assert f"target={wrong!r} must be one of gfx950, sm_100a, sm_103a, " in done.err
    assert (len(list(full.entries())), file.read_bytes() == before) == (5, True)
    if command != "clear":
        assert k3dsl(command, *arguments, "--target", "sm_80").code == 0


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "clear"])
def test_a_file_in_the_place_of_the_folder_is_the_environments_fault(
    k3dsl: Callable[..., Run], root: Path, command: str
) -> None:
    root.write_text("")
    done = k3dsl(command, "--json")
    assert (done.code, done.out, str(root) in done.err) == (3, "", True)


def test_verify_says_nothing_of_a_folder_that_it_does_not_believe(
    k3dsl: Callable[..., Run], full: CompileCache, root: Path
) -> None:
    root.chmod(0o777)
    done = k3dsl("verify", "--json")
    assert (done.code, done.out, "chmod go-w" in done.err) == (3, "", True)


@pytest.mark.parametrize(
    ("mode", "spoil", "why"),
    [("ro", None, "K3DSL_CACHE says so"), ("off", None, "K3DSL_CACHE says so"), ("", "chmod", "chmod go-w"),
     ("", "file", "Not a directory"), ("", "parent", "cannot be written")],
)  # fmt: skip
def test_import_where_nothing_can_be_stored(
    k3dsl: Callable[..., Run], full: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    mode: str, spoil: str | None, why: str,
) -> None:  # fmt: skip
    file, node = tmp_path / "kernels.k3b", tmp_path / "node"
    full.export(file)
    if spoil == "chmod":
        node.mkdir()
        node.chmod(0o777)
    elif spoil == "file":
        node.write_text("")
    elif spoil == "parent":
        monkeypatch.setattr(store.Folder, "create", lambda _: (_ for _ in ()).throw(PermissionError(13, "Forbidden")))
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(node))
    monkeypatch.setenv("K3DSL_CACHE", mode)
    done = k3dsl("import", str(file), "--json")
    assert (done.code, done.out, why in done.err) == (3, "", True)


def test_ls_of_nothing(k3dsl: Callable[..., Run], root: Path) -> None:
    assert k3dsl("ls", "--json").json == {"entries": []}
    assert k3dsl("ls").code == 0
    assert not root.exists()


def test_show(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    done = k3dsl("show", make_key(0).digest[:10], "--json")
    assert done.code == 0
    found = done.json
    assert found["digest"] == make_key(0).digest
    assert found["key"] == make_key(0).to_json()
    assert found["sha256"] == sha256(payload_of(make_key(0))).hexdigest()
    assert found["resources"] == {"registers": 64, "spills": 0}
    assert found["disassemble"] == f"nvdisasm {found['file']}"
    assert (found["sound"], found["problem"]) == (True, None)
    text = k3dsl("show", make_key(0).digest).out
    for words in ("params.heads", "toolchain.flavour", "registers", "nvdisasm", "ptxas: fine", "sha256"):
        assert words in text


def test_show_of_a_damaged_entry(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    damage(full)
    done = k3dsl("show", make_key(0).digest, "--json")
    assert (done.code, done.json["sound"]) == (1, False)
    assert "bytes, not" in done.json["problem"]


@pytest.mark.parametrize("command", ["show", "why", "rm", "pin"])
def test_prefixes(k3dsl: Callable[..., Run], root: Path, command: str) -> None:
    cache = CompileCache(root)
    n, seen = 0, dict[str, list[str]]()
    while not any(len(group) > 1 for group in seen.values()):  # two digests with one first digit
        digest = cache.get_or_build(make_key(n), Builder(10)).digest
        seen.setdefault(digest[0], []).append(digest)
        n += 1
    first, group = next((first, group) for first, group in seen.items() if len(group) > 1)
    done = k3dsl(command, first)
    assert (done.code, done.out) == (2, "")
    assert all(digest[:20] in done.err for digest in group)
    missing = next(c for c in "0123456789abcdef" if c not in seen) if len(seen) < 16 else "0" * 64
    assert k3dsl(command, missing).code == 1
    assert k3dsl(command, "xyz").code == 2
    assert k3dsl(command, group[0].upper()).code == 0


def test_why_of_a_key(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    done = k3dsl("why", make_key(0).digest[:12], "--json")
    assert (done.code, done.json["present"], done.json["missing"]) == (0, 1, 0)
    damage(full)
    assert CompileCache(full.root).get(make_key(0)) is None
    done = k3dsl("why", make_key(0).digest[:12], "--json")
    (found,) = done.json["keys"]
    assert (done.code, found["present"], found["nearest"]) == (1, False, make_key(1).digest)
    assert found["differences"] == [{"field": "params.n", "wanted": "0", "nearest": "1"}]
    assert "quarantined" in found["notes"][0]
    text = k3dsl("why", make_key(0).digest[:12])
    assert (text.code, "params.n: 0 wanted, 1 there" in text.out) == (1, True)


def test_why_of_a_plan(k3dsl: Callable[..., Run], root: Path) -> None:
    from k3dsl.deployment import Deployment
    from k3dsl.dims import MlaDims

    arguments = ("--target", "sm_90a", "--batches", "1,2", "--queries", "1")
    keys = list(Deployment(MlaDims.kimi_k3(8), target="sm_90a", batches=(1, 2), queries=(1,)).keys())
    done = k3dsl("why", *arguments, "--json")
    assert done.code == 1
    assert (done.json["present"], done.json["missing"]) == (0, len(set(keys)))
    for key in keys:
        CompileCache(root).get_or_build(key, Builder())
    done = k3dsl("why", *arguments, "--json")
    assert (done.code, done.json["present"], done.json["missing"]) == (0, len(set(keys)), 0)
    CompileCache(root).remove(keys[0])
    done = k3dsl("why", *arguments)
    assert (done.code, keys[0].short in done.out) == (1, True)
    assert k3dsl("why", "abc", "--target", "sm_90a").code == 2


def test_stats(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    full._session.flush()
    done = k3dsl("stats", "--json")
    assert (done.code, done.json["built"], done.json["entries"]) == (0, 4, 4)
    text = k3dsl("stats").out
    assert any(line.split()[:2] == ["built", "4"] for line in text.splitlines())


def test_verify(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    done = k3dsl("verify", "--json")
    assert (done.code, done.json["sound"], done.json["clean"]) == (0, 4, True)
    damage(full)
    done = k3dsl("verify")
    assert (done.code, make_key(0).short in done.out, "3 of 4 entries are sound" in done.out) == (1, True, True)
    assert k3dsl("verify", "--json").code == 0  # it is in quarantine now


def test_verify_recompile(k3dsl: Callable[..., Run], full: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder()
    monkeypatch.setattr(prepare, "builder_for", lambda key: builder)
    done = k3dsl("verify", "--recompile", "--json")
    assert (done.code, done.json["recompiled"], builder.calls) == (0, 4, 4)
    builder.size = 10
    done = k3dsl("verify", "--recompile", "--json")
    assert (done.code, len(done.json["differs"])) == (1, 4)


def test_prune(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    root = full.root
    total = full.stats()["bytes"]
    del full
    said = k3dsl("prune", "--max-bytes", str(total // 2), "--dry-run", "--json")
    assert (said.code, said.json["dry_run"], len(said.json["removed"])) == (0, True, 2)
    assert len(list(CompileCache(root).entries())) == 4
    done = k3dsl("prune", "--max-bytes", str(total // 2), "--json")
    assert [item["digest"] for item in done.json["removed"]] == [item["digest"] for item in said.json["removed"]]
    assert len(list(CompileCache(root).entries())) == 2
    assert k3dsl("prune", "--older-than", "1d", "--json").json["removed"] == []
    assert "0 entries stay" in k3dsl("prune", "--max-bytes", "0").out
    for arguments in ((), ("--max-bytes", "lots"), ("--older-than", "7")):
        assert k3dsl("prune", *arguments).code == 2


def test_rm(k3dsl: Callable[..., Run], full: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = k3dsl("rm", make_key(0).digest, make_key(1).digest, "--json")
    assert (done.code, len(done.json["removed"])) == (0, 2)
    assert k3dsl("show", make_key(0).digest).code == 1
    CompileCache(tmp_path / "layer").get_or_build(make_key(8), Builder())
    monkeypatch.setenv("K3DSL_CACHE_LAYERS", str(tmp_path / "layer"))
    done = k3dsl("rm", make_key(8).digest, "--json")
    assert (done.code, done.json["removed"]) == (1, [])
    assert "layer" in done.json["failed"][0]["reason"]


def test_rm_of_one_key_twice(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    done = k3dsl("rm", make_key(0).digest, make_key(0).digest[:20], "--json")
    assert (done.code, done.json) == (0, {"removed": [make_key(0).digest], "failed": []})


def test_what_another_process_removed_first_is_gone(
    k3dsl: Callable[..., Run], full: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(full)
    assert CompileCache(full.root).get(make_key(0)) is None
    remove, delete = CompileCache.remove, store.delete

    def late(cache: CompileCache, digest: Any) -> bool:
        remove(CompileCache(cache.root), digest)
        return remove(cache, digest)

    def deleted(path: str) -> None:
        delete(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(CompileCache, "remove", late)
    monkeypatch.setattr(store, "delete", deleted)
    done = k3dsl("clear", "--json")
    assert (done.code, len(done.json["removed"]), done.json["failed"]) == (0, 3, [])


def test_clear(k3dsl: Callable[..., Run], full: CompileCache, root: Path) -> None:
    assert len(k3dsl("clear", "--target", "sm_100a", "--json").json["removed"]) == 1
    damage(full)
    assert CompileCache(root).get(make_key(0)) is None
    done = k3dsl("clear", "--json")
    assert (done.code, len(done.json["removed"]), done.json["failed"]) == (0, 2, [])
    assert list(CompileCache(root).entries()) == []
    assert os.listdir(root / "quarantine") == []
    assert k3dsl("clear").code == 0


def test_clear_that_fails_says_so(
    k3dsl: Callable[..., Run], full: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 33: no exit 0 after a failure."""

    def rename(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        done = k3dsl("clear", "--json")
    assert (done.code, len(done.json["failed"])) == (1, 4)
    assert "Read-only" in done.json["failed"][0]["reason"]


@pytest.mark.parametrize("command", [("clear",), ("rm", make_key(0).digest), ("pin", make_key(0).digest),
                                     ("prune", "--max-bytes", "0")])  # fmt: skip
def test_what_must_write_does_not_pretend(
    k3dsl: Callable[..., Run], full: CompileCache, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Lesson 33: read only is the environment's doing: exit 3, nothing done."""
    monkeypatch.setenv("K3DSL_CACHE", "ro")
    done = k3dsl(*command, "--json")
    assert (done.code, done.out) == (3, "")
    assert "read only" in done.err
    assert len(list(full.entries())) == 4


def test_pin(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    root = full.root
    del full
    assert k3dsl("pin", make_key(0).digest[:16], "--json").json["pinned"] == [make_key(0).digest]
    k3dsl("prune", "--max-bytes", "0")
    assert [entry.digest for entry in CompileCache(root).entries()] == [make_key(0).digest]
    assert k3dsl("pin", make_key(0).digest, "--off").code == 0
    k3dsl("prune", "--max-bytes", "0")
    assert list(CompileCache(root).entries()) == []


def test_a_pin_outlives_its_entry_and_can_be_taken_away(k3dsl: Callable[..., Run], full: CompileCache) -> None:
    digests = [make_key(n).digest for n in (0, 1)]
    assert k3dsl("pin", *digests).code == 0
    assert k3dsl("rm", *digests).code == 0
    full.pin(["ab" + "0" * 62, "ab" + "1" * 62])
    done = k3dsl("pin", "--off", "ab")
    assert (done.code, "is the beginning of 2 pins" in done.err) == (2, True)
    assert k3dsl("pin", digests[0]).code == 1  # of entries alone
    done = k3dsl("pin", "--off", digests[0][:20], digests[1].upper(), "ab0", "--json")
    assert (done.code, done.json["unpinned"]) == (0, [*digests, "ab" + "0" * 62])
    assert os.listdir(f"{full.root}/pins") == ["ab" + "1" * 62]
    assert k3dsl("pin", "--off", digests[0]).code == 1


def test_export_and_import(
    k3dsl: Callable[..., Run], full: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "kernels.k3b")
    out = k3dsl("export", file, "--target", "sm_90a", "--json")
    assert (out.code, out.json["entries"], out.json["targets"]) == (0, 3, ["sm_90a"])
    assert k3dsl("export", file, "--target", "gfx950").code == 1
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "node"))
    assert k3dsl("import", file, "--sha256", "0" * 64).code == 1
    done = k3dsl("import", file, "--sha256", out.json["sha256"], "--json")
    assert (done.code, len(done.json["imported"])) == (0, 3)
    assert len(k3dsl("import", file, "--json").json["present"]) == 3
    assert "0 imported, 3 were there" in k3dsl("import", file).out
    assert k3dsl("import", str(tmp_path / "none")).code == 2
    content = Path(file).read_bytes()
    Path(file).write_bytes(content[:-1])
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "other"))
    done = k3dsl("import", file, "--json")
    assert (done.code, done.out) == (1, "")
    assert k3dsl("ls", "--json").json["entries"] == []


def test_import_on_a_machine_with_a_gpu(
    k3dsl: Callable[..., Run], full: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 32: what this machine cannot run is skipped, with the reason."""
    file = str(tmp_path / "kernels.k3b")
    k3dsl("export", file)
    monkeypatch.setattr(prepare, "detect_target", lambda device=None: prepare.Target("sm_100a"))
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "node"))
    done = k3dsl("import", file, "--json")
    assert (len(done.json["imported"]), len(done.json["skipped"])) == (1, 3)
    assert done.json["skipped"][0]["reason"] == "it is for sm_90a, asked for was sm_100a"
    assert k3dsl("import", file).out.count("asked for was sm_100a") == 1  # a line a reason, not one an entry
    assert len(k3dsl("import", file, "--target", "sm_90a", "--json").json["imported"]) == 3


def test_import_under_a_bound_that_is_too_small(
    k3dsl: Callable[..., Run], full: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.export(tmp_path / "kernels.k3b")
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "node"))
    monkeypatch.setenv("K3DSL_CACHE_MAX_BYTES", "100K")
    done = k3dsl("import", str(tmp_path / "kernels.k3b"), "--json")
    there = {entry.digest for entry in CompileCache(tmp_path / "node").entries()}
    assert (done.code, set(done.json["imported"])) == (1, there)
    assert len(done.json["evicted"]) == 4 - len(there) > 0
    assert "did not stay: the bound of the folder is 102400 bytes" in done.err


def test_import_of_another_flavour(
    k3dsl: Callable[..., Run], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 32."""
    old = make_key(0, toolchain={"cuda": "12"})
    for key in (old, make_key(0, toolchain={"cuda": "13"}), make_key(0, target="gfx950", toolchain={"cuda": "12"})):
        CompileCache(root).get_or_build(key, Builder())
    file = str(tmp_path / "kernels.k3b")
    k3dsl("export", file)
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "node"))
    done = k3dsl("import", file, "--json")
    assert [item["digest"] for item in done.json["skipped"]] == [old.digest]
    assert "CUDA 12" in done.json["skipped"][0]["reason"]
    assert len(done.json["imported"]) == 2


def test_path(k3dsl: Callable[..., Run], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert k3dsl("path").out == f"{root}\n"
    assert k3dsl("path", "--json").json["path"] == str(root)
    monkeypatch.setattr("k3dsl.cache.compile_cache.find_root", lambda *_: None)
    assert k3dsl("path").code == 3


def test_a_bad_variable_is_wrong_usage(k3dsl: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3DSL_CACHE", "maybe")
    done = k3dsl("ls", "--json")
    assert (done.code, done.out) == (2, "")
    assert "K3DSL_CACHE" in done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    done = CliRunner().invoke(app, ["cache", command, "--help"])
    assert done.exit_code == 0
    assert "k3dsl cache" in done.output.split("Usage", 1)[1].split("\n", 1)[1]
    assert "--json" in done.output


def test_completion_offers_digests(full: CompileCache, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3dsl.cli.entries import complete

    monkeypatch.setenv("K3DSL_CACHE_DIR", str(root))
    assert dict(complete(make_key(0).digest[:5])) == {make_key(0).short: "mla_value sm_90a"}
    assert len(complete("")) == 4
    monkeypatch.setenv("K3DSL_CACHE", "maybe")
    assert complete("") == []


def test_as_a_process_stdout_is_json_alone(full: CompileCache, root: Path) -> None:
    """A warning goes to stderr, whatever is wrong."""
    root.chmod(0o777)
    environ = {**os.environ, "K3DSL_CACHE_DIR": str(root)}
    command = [sys.executable, "-m", "k3dsl", "cache", "ls", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, json.loads(done.stdout)) == (0, {"entries": []})
    assert "chmod go-w" in done.stderr
