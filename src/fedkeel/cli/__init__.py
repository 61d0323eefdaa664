"""The command. Results go to standard output, everything else to standard error.

A user's mistake ends with exit code 2 and at most four lines; training that could not go on with
1; an interrupt that was waited for with 130. Modules that are slow to load are imported when a
command runs.
"""

from __future__ import annotations

import os
import sys
import warnings

import typer
from rich.console import Console

from fedkeel.cli.audit import audit
from fedkeel.cli.check import check
from fedkeel.cli.common import Command, CommandGroup, replace_unencodable
from fedkeel.cli.compare import compare
from fedkeel.cli.data import app as data
from fedkeel.cli.doctor import doctor
from fedkeel.cli.environment import version_text
from fedkeel.cli.flower import app as flower
from fedkeel.cli.methods import methods
from fedkeel.cli.new import new
from fedkeel.cli.predict import export, predict
from fedkeel.cli.rank import rank
from fedkeel.cli.report import report
from fedkeel.cli.reproduce import reproduce
from fedkeel.cli.run import run
from fedkeel.cli.tune import tune
from fedkeel.errors import (
    ClusterWarning,
    FedkeelError,
    SlowWork,
    StoppedProcess,
    TrainingError,
)

app = typer.Typer(
    name="fedkeel",
    cls=CommandGroup,
    help="Federated learning on non-IID data: methods, compared and combined.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    *(new, run, compare, tune, doctor, audit, methods, check),
    *(report, rank, reproduce, predict, export),
):
    app.command(cls=Command)(command)
app.add_typer(data, name="data")
app.add_typer(flower, name="flower")


def _version(value: bool) -> None:
    if value:
        print(version_text())
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_version,
        is_eager=True,
        help="Show version and machine.",
    ),
) -> None:
    """Federated learning on non-IID data: methods, compared and combined."""


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning as it is printed, without a place in the code where that says nothing."""
    from fedkeel.base.settings import RenamedSetting

    if issubclass(category, (ClusterWarning, RenamedSetting, SlowWork, StoppedProcess)):
        return f"warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


_python_format = warnings.formatwarning


def main() -> None:
    """Run the command and turn errors into exit codes."""
    warnings.formatwarning = _format_warning
    replace_unencodable()
    try:
        try:
            app(prog_name="fedkeel")
        finally:
            sys.stdout.flush()
    except FedkeelError as error:
        console = Console(stderr=True)
        for line in error.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        sys.exit(1 if isinstance(error, TrainingError) else 2)
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
