"""The sources that a kernel is traced from, by content: the import closure of its module inside k3dsl.

Imports are read from the syntax tree, nothing is imported: the digest is the same with and without a DSL. Every import
counts, wherever it stands (in a function, a branch, a `try`), and `import_module("k3dsl....")` with a literal name too.
Names of modules and bytes of files are all that enters: no path, no mtime, no working directory.

The `__init__` of a package counts where a name is taken from it, not merely because a module of the package is
imported: k3dsl's own are lists of public names, and a new public name must not rebuild every kernel.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from k3dsl.cache.key import CompileKey
from k3dsl.errors import ConfigError

#: An import statement that begins a line, to the end of its parentheses or of the line.
_STATEMENT: Final = re.compile(
    rb"^[ \t]*((?:from[ \t]+[\w.]+[ \t]+)?import\b(?:[ \t]*\([^()]*\)|[^\n\\(;]*$))", re.MULTILINE
)
_WORD: Final = re.compile(rb"\bimport\b")
#: The folder of the package whose modules count.
_PACKAGE: Final = Path(__file__).resolve().parents[1]


@cache
def source_digest(module: str, package: Path = _PACKAGE) -> str:
    """Sha256 (hex) over the import closure of `module`, e.g. "k3dsl.nvidia.kernels.value".

    `package` is the folder of the top package. Remembered for the life of the process, as the modules themselves are.
    Raises ConfigError if there is no such module or if a file of the closure is not Python.
    """
    files = source_files(module, package)
    # The encoding of keys, for its injectivity: nothing of it is particular to kernels.
    return CompileKey("sources", {}, "any", {}, tuple(sorted(files.items()))).digest


def source_files(module: str, package: Path = _PACKAGE) -> dict[str, str | None]:
    """Module name -> sha256 of its file, for the import closure of `module`; None for an import that is not there.

    An absent optional module is a fact of its own: the day it appears, the digest must change.
    """
    if _file(module, package) is None:
        raise ConfigError(f"module={module!r} must be a module under {package.name}")
    found: dict[str, str | None] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        facts = _facts(name, package)
        found[name] = facts[0] if facts else None
        if facts:
            todo.extend(facts[1])
    return found


@cache
def _facts(module: str, package: Path) -> tuple[str, tuple[str, ...]] | None:
    """The sha256 of a module's file and the modules of the package that it imports."""
    path = _file(module, package)
    if path is None:
        return None
    content = path.read_bytes()
    inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
    imports = dict.fromkeys(_imports(_import_nodes(content, path), inside, package))
    return sha256(content).hexdigest(), tuple(imports)


def _import_nodes(content: bytes, path: Path) -> Iterable[ast.AST]:
    """The nodes that may import. Only the import statements are parsed, where it is sure that they can be told by line:

    parsing 16 files takes 20 ms, which would be a sixth of what a process needs to load all kernels of a deployment.
    """
    calls = b"import_module" in content or b"__import__" in content
    statements = list(_STATEMENT.finditer(content))
    if not calls and len(statements) == len(_WORD.findall(content)):
        try:
            return ast.parse(b"\n".join(statement[1] for statement in statements)).body
        except (SyntaxError, ValueError):
            pass  # a line of prose that begins like one, perhaps
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from None
    return ast.walk(tree)


def _file(module: str, package: Path) -> Path | None:
    top, *parts = module.split(".")
    if top != package.name or not all(part.isidentifier() for part in parts):
        return None
    base = package.joinpath(*parts)
    for path in (base / "__init__.py", base.with_suffix(".py") if parts else base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imports(nodes: Iterable[ast.AST], inside: str, package: Path) -> Iterator[str]:
    top = package.name
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == top)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = inside.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            if base.split(".")[0] == top:
                for alias in node.names:
                    yield from _taken(base, alias.name, package)
        elif isinstance(node, ast.Call) and node.args:
            function, first = node.func, node.args[0]
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                name = first.value
                if isinstance(name, str) and name.split(".")[0] == top:
                    yield name


def _taken(base: str, name: str, package: Path) -> Iterator[str]:
    """What `from base import name` reads: `base`, the module `base.name`, or both if either could be meant."""
    inner = f"{base}.{name}"
    is_module = name != "*" and _file(inner, package) is not None
    if is_module:
        yield inner
        if name not in _bound(base, package):
            return
    yield base


@cache
def _bound(module: str, package: Path) -> frozenset[str]:
    """Every name that a module may bind, at any depth: more than it does, never less (a star aside)."""
    path = _file(module, package)
    return frozenset(_binds(ast.parse(path.read_bytes()))) if path else frozenset()


def _binds(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
