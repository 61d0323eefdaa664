"""``fedkeel report``: the table and the page of runs or of a comparison."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import JSON, document, say, stderr
from fedkeel.errors import ConfigError, printable


def report(
    runs: list[Path] = typer.Argument(..., metavar="RUN...", help="Run or comparison folders."),
    out: Path = typer.Option(None, "--out", help="The file; report.html in the first folder."),
    target: float = typer.Option(None, "--target", help="Score for rounds to target."),
    reference: str = typer.Option(
        None, "--reference", help="Method that the others are compared with; FedAvg by default."
    ),
    margin: float = typer.Option(
        None,
        "--margin",
        help="Smaller differences count as none; 0.5 points of a share by default.",
    ),
    markdown: bool = typer.Option(False, "--markdown", help="Print the table as Markdown."),
    latex: bool = typer.Option(False, "--latex", help="Print the table as LaTeX."),
    as_csv: bool = typer.Option(False, "--csv", help="Print every figure as CSV."),
    figures: Path = typer.Option(
        None, "--figures", help="Folder for figures as SVG and PDF (needs matplotlib)."
    ),
    as_json: bool = JSON,
) -> None:
    """Print the table of runs or of a comparison, and write the HTML page."""
    from rich.console import Console

    forms = {"--markdown": markdown, "--latex": latex, "--csv": as_csv, "--json": as_json}
    chosen = [name for name, is_chosen in forms.items() if is_chosen]
    if len(chosen) > 1:
        raise ConfigError(
            "The table is printed in one form.",
            got=" ".join(chosen),
            expected=f"one of {', '.join(forms)}",
            why="several in one output could not be read again",
            do="give one, and call the command again for another",
        )
    from fedkeel.records.comparison import runs_of
    from fedkeel.report.beside_table import client_tables, notes
    from fedkeel.report.claims import claims_of
    from fedkeel.report.page import save_report
    from fedkeel.report.paper_figures import save_figures
    from fedkeel.report.runs import load_runs
    from fedkeel.report.tables import csv_table, result_rows, result_table, terminal_table

    folders = [folder for path in runs for folder in runs_of(path)]
    methods = load_runs(folders, target)
    summaries = [method.summary for method in methods]
    claims = claims_of(summaries, reference, margin)
    rows = result_rows(summaries, claims)
    if as_json:
        document([row.to_json() for row in rows])
    elif markdown:
        tables = [result_table(rows), *client_tables(methods)]
        print("\n".join(table.markdown() for table in tables), end="")
    elif latex or as_csv:
        print(result_table(rows).latex() if latex else csv_table(rows), end="")
    else:
        Console().print(terminal_table(rows))
        for table in client_tables(methods):
            Console().print(table.terminal(is_wrapped=True))
    for sentence in notes(methods, claims):
        if markdown:  # below the table, where a reader of the Markdown sees it
            print(f"\n{printable(sentence)}")
        else:
            say(stderr(), sentence)
    page = save_report(methods, out or runs[0] / "report.html", claims=claims)
    say(stderr(), f"report  {page}")
    for file in save_figures(methods, claims, figures) if figures is not None else ():
        say(stderr(), f"figure  {file}")
