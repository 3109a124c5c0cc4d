"""`k3dsl bench`: the questions of tools/bench, asked on the device present."""

import errno
import importlib.util
import json as jsonlib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from k3dsl.cli.console import emit, out
from k3dsl.errors import ConfigError

#: One file each in tools/bench, with `run(options) -> document` and `show(document, console)`.
QUESTIONS: Final = ("layer", "host", "core", "epilogue", "cache", "blackwell")
_PACKAGE: Final = "k3dsl_bench"


def bench(
    what: Annotated[
        str, typer.Option(help="Of layer, host, core, epilogue, cache, blackwell: one or more.")
    ] = "layer,host",
    against: Annotated[str | None, typer.Option(help="A named baseline of the question.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draws the results to this PNG.")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Writes one JSON document to this file; - is stdout, without tables.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record, where there is no git history.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and repetitions.")] = False,
) -> None:
    """Measures on the device present and prints time, rate and floor, with the conditions.

    Example: k3dsl bench --what layer,host --json results.json
    """
    wanted = [name.strip() for name in what.split(",")]
    unknown = [name for name in wanted if name not in QUESTIONS]
    if unknown:
        raise ConfigError(f"what={', '.join(unknown)} must be among {', '.join(QUESTIONS)}")
    questions = {name: question(name) for name in wanted}
    mute = [name for name, module in questions.items() if not hasattr(module, "plot")]
    if plot is not None and mute:
        raise ConfigError(f"--plot: there is no picture of {', '.join(mute)}")
    on_stdout = json is not None and str(json) == "-"
    for file in [plot, None if on_stdout else json]:
        if file is not None:
            _writable(file)
    documents: dict[str, Any] = {}
    for name, module in questions.items():
        documents[name] = module.run(against=against, commit=commit, quick=quick)
        if not on_stdout:
            module.show(documents[name], out())
    if plot is not None:
        for name, module in questions.items():
            module.plot(documents[name], plot if len(questions) == 1 else plot.with_stem(f"{plot.stem}-{name}"))
    if on_stdout:
        emit(documents)
    elif json is not None:
        json.write_text(jsonlib.dumps(documents, indent=2) + "\n")


def _writable(file: Path) -> None:
    """Raises OSError, before minutes of measuring, where the results could not be written to `file`."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not file.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder to write results to", str(file.parent))
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


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
