"""``fedkeel run``: one method, one seed."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from fedkeel.cli.common import (
    JSON,
    QUIET,
    ExperimentSource,
    default_folder,
    many_imports,
    page_written,
    say,
    show,
    stderr,
    takes_experiment,
)


@takes_experiment
def run(
    source: ExperimentSource,
    out: Path = typer.Option(None, "--out", help="Run folder; runs/NAME where nothing is given."),
    resume: bool = typer.Option(False, "--resume", help="Go on with an unfinished run."),
    rounds: int = typer.Option(
        None, "--rounds", min=1, help="Rounds; with --resume, more than the run there has had."
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Train one method, and write a run folder."""
    from fedkeel.cli.experiment import check_methods, read_experiment

    more = () if rounds is None else (f"rounds={rounds}",)
    experiment, path = read_experiment(source, *more), source.path
    check_methods([experiment.method], experiment.weights)

    with many_imports():
        from fedkeel.base.feature import figures
        from fedkeel.engine.process.interrupts import interrupts
        from fedkeel.features.progress.display import progress_display, run_name
        from fedkeel.records.run_record import to_json
        from fedkeel.report.alerts import problems
        from fedkeel.report.client_gains import client_table, personal_rows
        from fedkeel.report.feature_report import feature_notes
        from fedkeel.report.page import write_report
        from fedkeel.report.runs import load_runs
        from fedkeel.report.tables import terminal_table
        from fedkeel.runner.features import callbacks_of
        from fedkeel.runner.ingredients import gather
        from fedkeel.runner.prepare import prepare
        from fedkeel.runner.start import start
        from fedkeel.study.comparison import Comparison

    if out is None:
        is_folder = path is not None and os.path.isdir(path)
        out = path if is_folder else default_folder(experiment.name, "run")
    console = stderr()
    with progress_display(console, quiet) as display:
        display.prepare()
        prepared = prepare(experiment, gather(experiment))
        try:
            with interrupts(display.stopping):
                callbacks = [*callbacks_of(experiment, out), display.follow(run_name(experiment))]
                result = start(prepared, out, resume, callbacks)
        except KeyboardInterrupt:
            say(console, f"stopped; to go on from what was saved: fedkeel run {out} --resume")
            raise typer.Exit(130) from None
    page = page_written(lambda: write_report([out], out / "report.html"))
    record, last = result.record, result.rows[-1]
    runs = load_runs([out])
    clients = personal_rows(runs)
    show(
        as_json,
        {
            "run_dir": str(out),
            "status": record.status,
            "message": record.message,
            "rounds": last.round,
            **{figure.key: figure.value(last.features) for figure in figures()},
            "best": result.best,
            "last": result.last,
            "best_model": None if record.best_model is None else to_json(record.best_model),
            "clients": [row.to_json() for row in clients],
            "warnings": record.warnings,
            "bytes_up": sum(sum(row.bytes_up.values()) for row in result.rows),
            "bytes_down": sum(sum(row.bytes_down.values()) for row in result.rows),
        },
        terminal_table(Comparison([result]).table),
        *([client_table(clients).terminal(is_wrapped=True)] if clients else []),
    )
    for sentence in [*feature_notes(runs), *problems(runs)]:
        say(console, sentence)
    for warning in record.warnings if quiet else ():
        say(console, f"warning: {warning}")
    for reason in record.engine.reasons if record.engine.asked != "auto" else ():
        say(console, f"slower than asked for: {reason}")
    if record.status == "finished" and record.message:
        say(console, record.message)
    say(console, f"run     {out}")
    say(console, f"report  {page}")
    if record.status == "interrupted":
        done = f"after {last.round} of {experiment.rounds} rounds"
        say(console, f"interrupted {done}; to go on: fedkeel run {out} --resume")
        raise typer.Exit(130)
