"""``fedkeel report``: the table and the page of runs or of a comparison."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import JSON, document, say, stderr


def report(
    runs: list[Path] = typer.Argument(..., metavar="RUN...", help="Run or comparison folders."),
    out: Path = typer.Option(None, "--out", help="The file; report.html in the first folder."),
    target: float = typer.Option(None, "--target", min=0, max=1, help="For rounds to target."),
    markdown: bool = typer.Option(False, "--markdown", help="Print the table as Markdown."),
    as_json: bool = JSON,
) -> None:
    """Print the table of runs or of a comparison, and write the HTML page."""
    from rich.console import Console

    from fedkeel.records.comparison import runs_of
    from fedkeel.report.alerts import unlike, went_wrong
    from fedkeel.report.page import save
    from fedkeel.report.runs import load
    from fedkeel.report.tables import table, to_markdown, to_text

    folders = [folder for path in runs for folder in runs_of(path)]
    entries = load(folders, target)
    page = save(entries, out or runs[0] / "report.html")
    rows = table([entry.group for entry in entries])
    if as_json:
        document(rows)
    elif markdown:
        print(to_markdown(rows), end="")
    else:
        Console().print(to_text(rows))
    for told in [*unlike(entries), *went_wrong(entries)]:
        if markdown and not as_json:  # it goes where the table goes
            print(f"\n{told}")
        else:
            say(stderr(), told)
    say(stderr(), f"report  {page}")
