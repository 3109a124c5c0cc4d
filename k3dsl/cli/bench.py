"""`k3dsl bench`: the questions of tools/bench, asked on the device present."""

import importlib.util
import json as jsonlib
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from k3dsl.cli.console import Json, emit, out
from k3dsl.errors import ConfigError

#: One file each in tools/bench, with `run(options) -> document` and `show(document, console)`.
QUESTIONS: Final = ("layer", "host", "core", "epilogue", "cache")
_PACKAGE: Final = "k3dsl_bench"


def bench(
    what: Annotated[str, typer.Option(help="Of layer, host, core, epilogue, cache: one or more.")] = "layer,host",
    against: Annotated[str | None, typer.Option(help="A named baseline of the question.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draws the result to this PNG.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Also writes the JSON document to this file.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record, where there is no git history.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and repetitions.")] = False,
    json: Json = False,
) -> None:
    """Measures on the device present and prints time, rate and floor, with the conditions.

    Example: k3dsl bench --what layer,host --save results.json
    """
    wanted = [name.strip() for name in what.split(",")]
    unknown = [name for name in wanted if name not in QUESTIONS]
    if unknown:
        raise ConfigError(f"what={', '.join(unknown)} must be among {', '.join(QUESTIONS)}")
    documents: dict[str, Any] = {}
    for name in wanted:
        module = question(name)
        options = {"against": against, "commit": commit, "quick": quick}
        documents[name] = module.run(**options)
        if not json:
            module.show(documents[name], out())
        if plot is not None:
            if not hasattr(module, "plot"):
                raise ConfigError(f"--plot: the question {name!r} has no picture")
            module.plot(documents[name], plot)
    if save is not None:
        save.write_text(jsonlib.dumps(documents, indent=2) + "\n")
    if json:
        emit(documents)


def question(name: str) -> Any:
    """The module of a question: from tools/bench of a checkout, or from the copy that a wheel carries."""
    here = Path(__file__).resolve()
    folders = [f for f in (here.parents[2] / "tools" / "bench", here.parents[1] / "_bench") if f.is_dir()]
    file = next((f / f"{name}.py" for f in folders if (f / f"{name}.py").is_file()), None)
    if file is None:
        raise ConfigError(f"--what {name}: this installation has no bench of that name")
    if _PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_loader(_PACKAGE, None, is_package=True)
        assert spec is not None
        package = importlib.util.module_from_spec(spec)
        package.__path__ = [str(file.parent)]
        sys.modules[_PACKAGE] = package
    return import_module(f"{_PACKAGE}.{name}")
