"""``fedkeel report``: the page of runs or of a comparison."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import say, stderr


def report(
    runs: list[Path] = typer.Argument(..., metavar="RUN...", help="Run or comparison folders."),
    out: Path = typer.Option(None, "--out", help="The file; report.html in the first folder."),
    target: float = typer.Option(None, "--target", min=0, max=1, help="For rounds to target."),
) -> None:
    """Write the HTML page of runs or of a comparison."""
    from fedkeel.experiment.compare import runs_of
    from fedkeel.report.page import write

    folders = [folder for path in runs for folder in runs_of(path)]
    page = write(folders, out or runs[0] / "report.html", target=target)
    say(stderr(), f"report  {page}")
