"""The `k3dsl` command: one file a command, which prints and never decides."""

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from k3dsl import __version__
from k3dsl.cli import bench, cache, demo, doctor, plan, warmup
from k3dsl.cli.console import report
from k3dsl.errors import K3Error

app = typer.Typer(
    help="Kimi-K3 MLA decode layers: kernels built ahead of graph capture, one run() a layer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("warmup")(warmup.warmup)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")
app.command("bench")(bench.bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"k3dsl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process: 0 done, 1 a finding, 2 wrong usage, 3 the environment."""
    if sys.stderr is None:  # closed by the caller: what is said there is for nobody
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "standard output is closed")
        app(args=None if arguments is None else list(arguments), prog_name="k3dsl")
    except (K3Error, OSError) as error:
        sys.exit(report(error))
