"""``fedkeel audit``: what an attacker learns from what a method sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedkeel.cli.common import (
    JSON,
    QUIET,
    ExperimentSource,
    many_imports,
    page_written,
    say,
    show,
    stderr,
    takes_experiment,
)


@takes_experiment
def audit(
    source: ExperimentSource,
    attacks: str = typer.Option(
        None, "--attacks", metavar="NAMES", help="E.g. dlg,labels; all but lira else."
    ),
    view: str = typer.Option(None, "--view", help="What is seen: client (default), sum, release."),
    round: int = typer.Option(None, "--round", min=1, help="Round that is attacked; 1 else."),
    targets: int = typer.Option(None, "--targets", min=1, help="Clients that are attacked."),
    images: int = typer.Option(None, "--images", min=1, help="Inputs looked for at once; 8 else."),
    iterations: int = typer.Option(None, "--iterations", help="Steps of Adam; 1000 else."),
    shadows: int = typer.Option(None, "--shadows", help="Runs of lira; 16 else."),
    out: Path = typer.Option(None, "--out", help="Folder; runs/NAME-audit else."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Attack what a method sends in a round: inputs, labels, and who was trained on.

    It makes the run up to that round on the reference engine, and attacks the real messages. It
    writes a page with originals and reconstructions. Attacks that were made are used again: run the
    same command to continue.
    """
    from fedkeel import config
    from fedkeel.cli.experiment import check_methods, read_experiment

    chosen: dict[str, Any] = {
        "attacks": attacks,
        "view": view,
        "round": round,
        "targets": targets,
        "images": images,
        "iterations": iterations,
        "shadows": shadows,
    }
    values = {name: value for name, value in chosen.items() if value is not None}
    wanted = config.build(config.Audit, values, "audit")
    experiment = read_experiment(source)
    check_methods([experiment.method], experiment.weights)

    with many_imports():
        from fedkeel.cli.progress import shown_progress
        from fedkeel.records.audit import write_audit
        from fedkeel.report.audit_page import write_audit_page
        from fedkeel.report.audit_text import headline, terminal_page
        from fedkeel.runner.ingredients import gather
        from fedkeel.study.audit.examine import examine

    out = Path("runs") / f"{experiment.name}-audit" if out is None else out
    ingredients = gather(experiment)
    with shown_progress(quiet) as display:
        record = examine(experiment, ingredients, wanted, out, display)
    write_audit(record, out)
    page = page_written(lambda: write_audit_page(record, out / "audit.html"))
    values = {"headline": headline(record), **record.to_json()}
    show(as_json, values, terminal_page(record))
    say(stderr(), f"page    {page}")
