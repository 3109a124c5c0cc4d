"""The import closure of a kernel's module, by content."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3dsl.cache import source_digest
from k3dsl.cache.sources import source_files
from k3dsl.errors import ConfigError

FILES = {
    "__init__.py": "from app import everything\n",
    "everything.py": "import app.kernels.unrelated\n",
    "errors.py": "class E(Exception): pass\n",
    "kernels/__init__.py": "",
    "kernels/value.py": "import cutlass\nfrom app.kernels import primitives\nfrom ..errors import E\n"
    "def f():\n    from .lazy import late\n",
    "kernels/primitives.py": "from app.kernels.ptx import add\n",
    "kernels/ptx.py": "add = 1\n",
    "kernels/lazy.py": "try:\n    import app.kernels.fast as late\nexcept ImportError:\n    late = None\n",
    "kernels/unrelated.py": "x = 1\n",
    "facts/__init__.py": "from app.facts.inner import shape\nname = 'facts'\n",
    "facts/inner.py": "shape = 1\n",
    "dynamic.py": "from importlib import import_module\ndef f():\n    return import_module('app.kernels.ptx')\n",
}


@pytest.fixture
def app(tmp_path: Path) -> Path:
    package = tmp_path / "app"
    for name, content in FILES.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return package


def digest(app: Path, module: str = "app.kernels.value") -> str:
    """As a new process computes it."""
    source_digest.cache_clear()
    from k3dsl.cache import sources

    sources._facts.cache_clear()
    sources._bound.cache_clear()
    return source_digest(module, app)


def closure(app: Path, module: str) -> set[str]:
    digest(app, module)
    return set(source_files(module, app))


def test_the_closure_is_what_is_imported(app: Path) -> None:
    """Lesson 13: a helper of a helper, a relative import, an import inside a function or a `try`."""
    assert closure(app, "app.kernels.value") == {
        "app.kernels.value",
        "app.kernels.primitives",
        "app.kernels.ptx",
        "app.kernels.lazy",
        "app.kernels.fast",  # not there, and that is a fact
        "app.errors",
    }
    assert closure(app, "app.dynamic") == {"app.dynamic", "app.kernels.ptx"}


@pytest.mark.parametrize("name", ["value", "primitives", "ptx", "lazy", "fast"])
def test_a_change_in_the_closure_changes_the_digest(app: Path, name: str) -> None:
    """Lesson 13: a helper in another module changes, so do its users' keys; an optional module that appears counts."""
    before = digest(app)
    with open(app / "kernels" / f"{name}.py", "a", encoding="utf-8") as file:
        file.write("# a word\n")
    assert digest(app) != before


@pytest.mark.parametrize("name", ["__init__.py", "everything.py", "kernels/unrelated.py", "kernels/__init__.py"])
def test_a_change_elsewhere_does_not(app: Path, name: str) -> None:
    """Lesson 13: a comment in an unrelated file rebuilds nothing."""
    before = digest(app)
    with open(app / name, "a", encoding="utf-8") as file:
        file.write("# a word\n")
    assert digest(app) == before


def test_a_package_counts_where_a_name_is_taken_from_it(app: Path) -> None:
    (app / "kernels" / "value.py").write_text("from app.facts import name\nfrom app import facts\n")
    assert {"app.facts", "app.facts.inner"} <= closure(app, "app.kernels.value")
    (app / "kernels" / "value.py").write_text("from app.facts import *\n")
    assert {"app.facts", "app.facts.inner"} <= closure(app, "app.kernels.value")
    (app / "kernels" / "value.py").write_text("from app.facts.inner import shape\n")
    assert closure(app, "app.kernels.value") == {"app.kernels.value", "app.facts.inner"}


def test_only_names_and_bytes_count(app: Path, tmp_path: Path) -> None:
    """Lessons 19, 20: neither the path of the checkout nor an mtime."""
    before = digest(app)
    for path in app.rglob("*.py"):
        os.utime(path, (1, 1))
    moved = tmp_path / "other" / "place" / "app"
    moved.parent.mkdir(parents=True)
    app.rename(moved)
    assert digest(moved) == before


def test_an_import_cycle_ends(app: Path) -> None:
    (app / "kernels" / "ptx.py").write_text("from app.kernels import value\n")
    assert "app.kernels.value" in closure(app, "app.kernels.value")


@pytest.mark.parametrize("module", ["app.kernels.gone", "other.module", "app", "app..kernels", "app/kernels"])
def test_a_module_that_is_not_there(app: Path, module: str) -> None:
    if module == "app":
        assert "app" in closure(app, module)
    else:
        with pytest.raises(ConfigError, match="module="):
            digest(app, module)


def test_a_file_that_is_not_python_is_named(app: Path) -> None:
    (app / "kernels" / "ptx.py").write_text("def (import\n")
    with pytest.raises(ConfigError, match=r"ptx\.py is not Python"):
        digest(app)


def test_it_is_remembered(app: Path) -> None:
    """Within a process the modules that run are the ones that were loaded."""
    before = digest(app)
    (app / "kernels" / "ptx.py").write_text("add = 2\n")
    assert source_digest("app.kernels.value", app) == before
    assert digest(app) != before


def test_our_own_kernels_without_importing_them() -> None:
    """Lesson 14: no DSL and no GPU is needed to make a key."""
    program = (
        "import sys\nfrom k3dsl.cache.sources import source_files\n"
        "found = source_files('k3dsl.nvidia.kernels.value')\n"
        "assert {'k3dsl.nvidia.kernels.value', 'k3dsl.nvidia.value'} <= set(found), found\n"
        "assert 'k3dsl.preparing' not in found and 'k3dsl' not in found, found\n"
        "bad = {'torch', 'cutlass', 'k3dsl.nvidia.kernels.value'} & set(sys.modules)\nassert not bad, bad\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "from app.kernels import (\n    ptx,  # the first\n    lazy as late,\n)\n",
        "if True: from app.kernels import ptx, lazy\n",
        "import os; from app.kernels import ptx, lazy\n",
        "from app.kernels import \\\n    ptx, \\\n    lazy\n",
        "from app.kernels import ptx\nx = 'import this'\nfrom app.kernels import lazy\n",
        "def f():\n\tfrom app.kernels import ptx\n\tdef g():\n\t\tfrom .lazy import late\n",
        "from . import ptx, lazy  # import both\n",
        'Text = """\nimport the kernels from where they are\n"""\nfrom . import (ptx, lazy)\n',
        "from .ptx import(add)\nfrom .lazy import*\n",
        "class A:\r\n    from .ptx import add\r\n    import app.kernels.lazy as l\r\n",
        "from app.kernels import ptx as a, lazy as b # (\n",
        "match 1:\n    case 1:\n        from .ptx import add\n    case _: from .lazy import late\n",
        "\ufefffrom .ptx import add\nfrom .lazy import late\n",
    ],
)
def test_every_way_to_write_an_import_is_seen(app: Path, text: str) -> None:
    """Lesson 13: whatever the layout, the closure is what the syntax tree says."""
    import ast

    (app / "kernels" / "value.py").write_text(text, newline="")
    compile(text.encode(), "value.py", "exec")
    assert {"app.kernels.ptx", "app.kernels.lazy"} <= closure(app, "app.kernels.value")
    assert any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(ast.parse(text.encode())))


def test_our_own_files_give_what_their_trees_give() -> None:
    """The quick way and the syntax tree agree on every file of the package."""
    import ast

    from k3dsl.cache import sources

    for path in sorted(sources._PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(sources._PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
        content = path.read_bytes()
        quick = set(sources._imports(sources._import_nodes(content, path), inside, sources._PACKAGE))
        assert quick == set(sources._imports(ast.walk(ast.parse(content)), inside, sources._PACKAGE)), path
