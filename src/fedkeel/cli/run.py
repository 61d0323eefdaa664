"""``fedkeel run``: one method, one seed."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import (
    EXPERIMENT,
    JSON,
    PRESET,
    QUIET,
    SET,
    document,
    experiment,
    say,
    stderr,
)


def run(
    path: Path = EXPERIMENT,
    preset: str = PRESET,
    settings: list[str] = SET,
    out: Path = typer.Option(None, "--out", help="Run folder; runs/NAME where nothing is given."),
    resume: bool = typer.Option(False, "--resume", help="Go on with an unfinished run."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Train one method, and write a run folder."""
    from rich.console import Console

    from fedkeel.engine.process.interrupts import interrupts
    from fedkeel.report.alerts import problems
    from fedkeel.report.page import write_report
    from fedkeel.report.runs import load_runs
    from fedkeel.runner.prepare import gather, prepare
    from fedkeel.runner.progress import progress_display, run_name
    from fedkeel.runner.start import start

    chosen = experiment(path, preset, settings)
    if out is None:
        out = path if path is not None and path.is_dir() else Path("runs") / chosen.name
    console = stderr()
    prepared = prepare(chosen, gather(chosen))
    try:
        with progress_display(console, quiet) as display, interrupts(display.stopping):
            result = start(prepared, out, resume, [display.follow(run_name(chosen))])
    except KeyboardInterrupt:
        say(console, f"stopped; to go on from what was saved: fedkeel run {out} --resume")
        raise typer.Exit(130) from None
    page = write_report([out], out / "report.html")
    sums = [row for row in result.rows if row.round > 0]
    if as_json:
        document(
            {
                "run_dir": str(out),
                "status": result.record.status,
                "message": result.record.message,
                "rounds": result.rows[-1].round,
                "best": result.best,
                "last": result.last,
                "warnings": result.record.warnings,
                "bytes_up": sum(sum(row.bytes_up.values()) for row in sums),
                "bytes_down": sum(sum(row.bytes_down.values()) for row in sums),
            }
        )
    else:
        from fedkeel.report.tables import terminal_table
        from fedkeel.study.compare import Comparison

        Console().print(terminal_table(Comparison([result]).table))
    for sentence in problems(load_runs([out])):
        say(console, sentence)
    for hint in result.record.warnings if quiet else ():
        say(console, f"warning: {hint}")
    if result.record.engine.asked != "auto":
        for reason in result.record.engine.reasons:
            say(console, f"slower than asked for: {reason}")
    if result.record.status == "finished" and result.record.message:
        say(console, result.record.message)
    say(console, f"run     {out}")
    say(console, f"report  {page}")
    if result.record.status == "interrupted":
        done = f"after {result.rows[-1].round} of {chosen.rounds} rounds"
        say(console, f"interrupted {done}; to go on: fedkeel run {out} --resume")
        raise typer.Exit(130)
