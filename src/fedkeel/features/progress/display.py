"""Showing the progress of runs: bars on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedkeel import config
from fedkeel.base.feature import figures
from fedkeel.errors import printable
from fedkeel.records.fairness import client_values, spread
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.runner.callbacks import Callback, GlobalModel, RunInfo
from fedkeel.runner.result import Result

FINISHED = "finished"
REUSED = "taken from an earlier run"
PREPARING = "preparing data, model and engine"
WAITING = (
    "waiting: another thread of this process is making a run, and they share torch's random "
    "numbers, so one goes at a time"
)
STOPPING = "stopping after this round; a second interrupt stops at once and loses it"


class ProgressDisplay:
    """Shows the progress of runs, one after the other or side by side; this one shows nothing.

    A run is known by its name, which no other run has at the same time.
    """

    def prepare(self) -> None:
        """Say that data, model and engine are prepared, until the first run begins."""

    def plan(self, runs: int, rounds: int, expected: str = "") -> None:
        """Say how many runs there will be, of how many rounds in all, and how long they take."""

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        """Say that a run of `rounds` rounds begins, `done` of them made before."""

    def warn(self, run: str, message: str) -> None:
        """Show a warning about a run."""

    def clients(self, run: str, trained: int, count: int) -> None:
        """Say how many clients of the round have been trained."""

    def row(self, run: str, row: RoundRecord) -> None:
        """Say that a round is done."""

    def step(self, run: str, done: int, unit: str) -> None:
        """Say how far work is that has no rounds, such as the iterations of a search."""

    def end(self, run: str, how: str) -> None:
        """Say that a run is over, and how: `FINISHED`, `REUSED`, or why it is not finished."""

    def waiting(self) -> None:
        """Say that a run in another thread of this process goes first."""

    def stopping(self) -> None:
        """Say that the runs will end after the rounds at hand."""

    def follow(self, run: str) -> Callback:
        """Return the callback that shows the progress of a run under this name."""
        return _RunProgress(self, run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class _RunProgress(Callback):
    """Shows the progress of one run on a display."""

    def __init__(self, display: ProgressDisplay, run: str) -> None:
        self._display, self._run, self._is_reused = display, run, False

    def on_run_begin(self, run: RunInfo) -> None:
        self._is_reused = run.is_finished
        record = run.record
        self._display.begin(self._run, record.rounds, run.rounds_done, record.score)
        for message in () if run.is_finished else run.record.warnings:
            self._display.warn(self._run, message)

    def on_clients_trained(self, trained: int, count: int) -> None:
        self._display.clients(self._run, trained, count)

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        self._display.row(self._run, row)

    def on_run_end(self, result: Result) -> None:
        if self._is_reused:
            self._display.row(self._run, result.rows[-1])
        if result.record.status != "failed":  # the error says why
            self._display.end(self._run, REUSED if self._is_reused else result.record.status)


class WithoutScores(ProgressDisplay):
    """Shows all but the scores on the test set.

    Args:
        display: shows the rest.
    """

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display

    def prepare(self) -> None:
        """Pass it on."""
        self._display.prepare()

    def plan(self, runs: int, rounds: int, expected: str = "") -> None:
        """Pass it on."""
        self._display.plan(runs, rounds, expected)

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        """Pass it on."""
        self._display.begin(run, rounds, done, score)

    def warn(self, run: str, message: str) -> None:
        """Pass it on."""
        self._display.warn(run, message)

    def clients(self, run: str, trained: int, count: int) -> None:
        """Pass it on."""
        self._display.clients(run, trained, count)

    def row(self, run: str, row: RoundRecord) -> None:
        """Pass it on, without the score."""
        self._display.row(run, replace(row, test=None))

    def step(self, run: str, done: int, unit: str) -> None:
        """Pass it on."""
        self._display.step(run, done, unit)

    def end(self, run: str, how: str) -> None:
        """Pass it on."""
        self._display.end(run, how)

    def waiting(self) -> None:
        """Pass it on."""
        self._display.waiting()

    def stopping(self) -> None:
        """Pass it on."""
        self._display.stopping()


class ProgressBars(ProgressDisplay):
    """A bar for each run at work, and where there are several, one for the rounds of all.

    Args:
        console: a terminal.
        prefix: what every line begins with.
    """

    def __init__(self, console: Console, prefix: str = "") -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
        )
        self._prefix = prefix
        self._preparing: TaskID | None = None
        self._all: TaskID | None = None
        self._runs = self._ended = 0
        self._tasks: dict[str, _Bar] = {}
        self._moved_at = 0.0
        self._warned: set[str] = set()

    def prepare(self) -> None:
        """Show a bar without an end."""
        if self._preparing is None:
            text = f"{escape(self._prefix)}{PREPARING}"
            self._preparing = self._progress.add_task(text, total=None, text="")

    def plan(self, runs: int, rounds: int, expected: str = "") -> None:
        """Show the bar of all runs."""
        if expected:
            self._print(_amount(runs, rounds, expected))
        if self._all is not None:  # of an earlier piece of work
            self._progress.remove_task(self._all)
            self._all = None
        self._runs, self._ended = runs, 0
        if runs > 1:
            self._all = self._progress.add_task(
                f"{escape(printable(self._prefix))}{runs} runs", total=rounds, text=""
            )

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        """Show the bar of a run."""
        self._end_preparation()
        text = escape(printable(self._prefix + run))
        task = self._progress.add_task(text, total=rounds, completed=done, text="")
        self._tasks[run] = _Bar(task, rounds, score)
        self._move(run, done)

    def warn(self, run: str, message: str) -> None:
        """Show it above the bars, once for all runs."""
        if message not in self._warned:
            self._warned.add(message)
            self._print(f"warning: {message}")

    def clients(self, run: str, trained: int, count: int) -> None:
        """Move the bar by the share of the round that is done."""
        now = time.monotonic()
        if now - self._moved_at > 0.1:  # a tiny round has thousands of clients a second
            self._moved_at = now
            bar = self._tasks[run]
            self._progress.update(bar.task, completed=bar.done + min(trained / count, 0.99))

    def row(self, run: str, row: RoundRecord) -> None:
        """Move the bars by a round, and show the score where there is one."""
        self._move(run, row.round)
        if row.test is not None:
            bar = self._tasks[run]
            self._progress.update(bar.task, text=_score(row, bar.score).removeprefix(", "))

    def step(self, run: str, done: int, unit: str) -> None:
        """Move the bars."""
        self._move(run, done)

    def end(self, run: str, how: str) -> None:
        """Take the bar of a run away, and say so where it is not finished."""
        self._end_preparation()
        self._ended += 1
        bar = self._tasks.pop(run, None)
        if bar is not None:
            if self._all is not None:
                left = bar.rounds - bar.done if how in (FINISHED, REUSED) else 0
                self._progress.advance(self._all, left)  # it may have ended early
            self._progress.remove_task(bar.task)
        if self._all is not None:
            self._progress.update(self._all, text=f"{self._ended} of {self._runs} runs")
        if how not in (FINISHED, REUSED):
            self._print(f"{run}: {how}")

    def waiting(self) -> None:
        """Show a line above the bars."""
        self._print(WAITING)

    def stopping(self) -> None:
        """Show a line above the bars."""
        self._print(STOPPING)

    def _print(self, text: str) -> None:
        _print(self._progress.console, self._prefix + text)

    def _end_preparation(self) -> None:
        if self._preparing is not None:
            self._progress.remove_task(self._preparing)
            self._preparing = None

    def _move(self, run: str, done: int) -> None:
        bar = self._tasks[run]
        self._progress.update(bar.task, completed=done)
        if self._all is not None:
            self._progress.advance(self._all, done - bar.done)
        bar.done = done

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


@dataclass
class _Bar:
    """The bar of a run, and how many rounds it shows."""

    task: TaskID
    rounds: int
    score: MetricInfo
    done: int = 0


class ProgressLines(ProgressDisplay):
    """A line for each run every so many seconds, and when it ends.

    Args:
        console: where the lines go.
        prefix: what every line begins with.
        seconds: time between lines of one run.
    """

    def __init__(self, console: Console, prefix: str = "", seconds: float = 10.0) -> None:
        self._console, self._prefix, self._seconds = console, prefix, seconds
        self._runs, self._begun = 1, 0
        self._lines: dict[str, _Line] = {}
        self._warned: set[str] = set()

    def prepare(self) -> None:
        """Show a line."""
        self._print(PREPARING)

    def plan(self, runs: int, rounds: int, expected: str = "") -> None:
        """Show how much there is to do, where it is more than one run."""
        self._runs, self._begun = runs, 0
        if runs > 1:
            self._print(_amount(runs, rounds, expected))

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        """Remember the run."""
        self._begun += 1
        now = time.monotonic()
        self._lines[run] = _Line(self._begun, rounds, now, now, done, score)

    def warn(self, run: str, message: str) -> None:
        """Show a line, once for all runs."""
        if message not in self._warned:
            self._warned.add(message)
            self._print(f"warning: {message}")

    def clients(self, run: str, trained: int, count: int) -> None:
        """Show a line where a single round takes long."""
        self._say(run, f"round {self._lines[run].done + 1}: {trained}/{count} clients")

    def row(self, run: str, row: RoundRecord) -> None:
        """Show a line where it is time for one."""
        self._lines[run].row, self._lines[run].done = row, row.round
        self._say(
            run, f"round {row.round}/{self._lines[run].rounds}{_score(row, self._lines[run].score)}"
        )

    def step(self, run: str, done: int, unit: str) -> None:
        """Show a line where it is time for one."""
        self._say(run, f"{unit} {done}/{self._lines[run].rounds}")

    def end(self, run: str, how: str) -> None:
        """Show how the run ended."""
        line = self._lines.pop(run, None)
        if line is None:  # it ended before it began
            self._print(f"{run}: {how}")
            return
        shown = f"{time.monotonic() - line.began:.1f} s" if how == FINISHED else how.rstrip(".")
        self._print(f"{self._count(line)}{run}: {shown}{_score(line.row, line.score)}")

    def waiting(self) -> None:
        """Show a line."""
        self._print(WAITING)

    def stopping(self) -> None:
        """Show a line."""
        self._print(STOPPING)

    def _say(self, run: str, text: str) -> None:
        line = self._lines[run]
        if time.monotonic() - line.last >= self._seconds:
            line.last = time.monotonic()
            self._print(f"{self._count(line)}{run}: {text}")

    def _count(self, line: _Line) -> str:
        return f"[{line.number}/{self._runs}] " if self._runs > 1 else ""

    def _print(self, text: str) -> None:
        _print(self._console, self._prefix + text)


@dataclass
class _Line:
    """How far a run is, and when it was last shown."""

    number: int
    rounds: int
    began: float
    last: float
    done: int
    score: MetricInfo
    row: RoundRecord | None = None


def _print(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _amount(runs: int, rounds: int, expected: str) -> str:
    return ", ".join(filter(None, (f"{runs} runs of {rounds:,} rounds in all", expected)))


def _score(row: RoundRecord | None, score: MetricInfo) -> str:
    """Return the test score of a row, with the name of any score but accuracy, and of clients."""
    if row is None:
        return ""
    if row.test is None:
        return _counted(row)
    name = "" if score.name == ACCURACY.name else f"{score.label} "
    text = f", test {name}{score.format(row.test[score.name])}"
    over = spread(list(client_values(row.personal, score).values()), score)
    if over is not None:
        worst = score.format(over.worst_tenth)
        text += f", personal models {score.format(over.mean)} (worst tenth {worst})"
    return text + _counted(row)


def _counted(row: RoundRecord) -> str:
    """Return the numbers that features have added to a row."""
    shown = [
        f", {figure.progress.format(value / figure.per_unit)}"
        for figure in figures()
        if figure.progress and (value := figure.value(row.features)) is not None
    ]
    return "".join(shown)


def run_name(settings: config.Run) -> str:
    """Return the name under which a run is shown."""
    return f"{settings.method} seed {settings.seed}"


def progress_display(console: Console, quiet: bool = False, prefix: str = "") -> ProgressDisplay:
    """Return bars on a terminal, lines elsewhere, and nothing with `quiet`.

    Args:
        console: where they are shown.
        quiet: whether nothing is shown.
        prefix: what every line begins with.
    """
    if quiet:
        return ProgressDisplay()
    kind = ProgressBars if console.is_terminal else ProgressLines
    return kind(console, prefix)
