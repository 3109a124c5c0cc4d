"""What every command prints with: people get tables, machines one JSON document on stdout."""

import json
import sys
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from k3dsl.errors import ConfigError, K3Error, LaunchError, ToolchainError

#: Exit codes: done and as asked; a finding (a miss, a corrupt entry, an unmet check); wrong usage; the environment.
OK: Final = 0
FINDING: Final = 1
USAGE: Final = 2
ENVIRONMENT: Final = 3

#: Columns where there is no terminal: a row of a table stays a line, to be searched and copied.
PIPE_WIDTH: Final = 500

#: The option of every command.
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]


def out() -> Console:
    """For results. Text is printed as it is: paths, users and compilers write brackets that are no markup."""
    terminal = sys.stdout.isatty()
    return Console(highlight=False, markup=False, soft_wrap=not terminal, width=None if terminal else PIPE_WIDTH)


def err() -> Console:
    """For progress, notes and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def emit(document: Any) -> None:
    """Prints one JSON document."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table with these columns; those in `right` are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def exit_code(error: BaseException) -> int:
    """The exit code that an error ends a command with."""
    if isinstance(error, ConfigError):
        return USAGE
    return ENVIRONMENT if isinstance(error, ToolchainError | LaunchError | OSError) else FINDING


def report(error: K3Error | OSError) -> int:
    """Says what went wrong on stderr; returns the exit code."""
    err().print(f"[red]error:[/red] {type(error).__name__}: ", end="")
    err().print(str(error), markup=False)
    return exit_code(error)
