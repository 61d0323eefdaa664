"""How long work shows that it is alive: bars on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Protocol, Self

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

from fedkeel.records.rows import RoundRecord

FINISHED = "finished"
REUSED = "taken from an earlier run"
STOPPING = "stopping after this round; a second interrupt stops at once and loses it"


class Watcher(Protocol):
    """Follows the runs of a piece of work, one after the other or side by side.

    A run is known by what it is called, which no other one is at the same time.
    """

    def plan(self, runs: int, rounds: int) -> None:
        """Say how many runs there will be, and of how many rounds in all."""

    def begin(self, run: str, rounds: int, done: int) -> None:
        """Say that a run of `rounds` rounds begins, `done` of them made before."""

    def hint(self, run: str, text: str) -> None:
        """Say what is to be known of a run before its rounds."""

    def clients(self, run: str, trained: int, of: int) -> None:
        """Say how many clients of the round have been trained."""

    def row(self, run: str, row: RoundRecord) -> None:
        """Say that a round is done."""

    def end(self, run: str, how: str) -> None:
        """Say that a run is over, and how: `FINISHED`, `REUSED`, or why it is not finished."""

    def stopping(self) -> None:
        """Say that the runs will end after the rounds at hand."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Silent:
    """Shows nothing."""

    def plan(self, runs: int, rounds: int) -> None:
        """Show nothing."""

    def begin(self, run: str, rounds: int, done: int) -> None:
        """Show nothing."""

    def hint(self, run: str, text: str) -> None:
        """Show nothing."""

    def clients(self, run: str, trained: int, of: int) -> None:
        """Show nothing."""

    def row(self, run: str, row: RoundRecord) -> None:
        """Show nothing."""

    def end(self, run: str, how: str) -> None:
        """Show nothing."""

    def stopping(self) -> None:
        """Show nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class Blind(Silent):
    """Shows no accuracy on the test set.

    Args:
        watcher: what shows all else.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def plan(self, runs: int, rounds: int) -> None:
        """Pass it on."""
        self._watcher.plan(runs, rounds)

    def begin(self, run: str, rounds: int, done: int) -> None:
        """Pass it on."""
        self._watcher.begin(run, rounds, done)

    def hint(self, run: str, text: str) -> None:
        """Pass it on."""
        self._watcher.hint(run, text)

    def clients(self, run: str, trained: int, of: int) -> None:
        """Pass it on."""
        self._watcher.clients(run, trained, of)

    def row(self, run: str, row: RoundRecord) -> None:
        """Pass it on, without accuracy."""
        self._watcher.row(run, replace(row, test=None))

    def end(self, run: str, how: str) -> None:
        """Pass it on."""
        self._watcher.end(run, how)

    def stopping(self) -> None:
        """Pass it on."""
        self._watcher.stopping()


class Bars:
    """A bar for each run at work, and where there are several, one for the rounds of all.

    Args:
        console: a terminal.
        mark: what every line begins with.
    """

    def __init__(self, console: Console, mark: str = "") -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._mark = mark
        self._all: TaskID | None = None
        self._runs = self._over = 0
        self._tasks: dict[str, _Bar] = {}
        self._seen = 0.0
        self._told: set[str] = set()

    def plan(self, runs: int, rounds: int) -> None:
        """Show the bar of all runs."""
        if self._all is not None:  # of an earlier piece of work
            self._progress.remove_task(self._all)
            self._all = None
        self._runs, self._over = runs, 0
        if runs > 1:
            self._all = self._progress.add_task(
                f"{escape(self._mark)}{runs} runs", total=rounds, note=""
            )

    def begin(self, run: str, rounds: int, done: int) -> None:
        """Show the bar of a run."""
        text = escape(self._mark + run)
        task = self._progress.add_task(text, total=rounds, completed=done, note="")
        self._tasks[run] = _Bar(task, rounds)
        self._move(run, done)

    def hint(self, run: str, text: str) -> None:
        """Show it above the bars, once however many runs it is true of."""
        if text not in self._told:
            self._told.add(text)
            self._print(f"hint: {text}")

    def clients(self, run: str, trained: int, of: int) -> None:
        """Move the bar by the share of the round that is done."""
        now = time.monotonic()
        if now - self._seen > 0.1:  # a tiny round has thousands of clients a second
            self._seen = now
            bar = self._tasks[run]
            self._progress.update(bar.task, completed=bar.done + min(trained / of, 0.99))

    def row(self, run: str, row: RoundRecord) -> None:
        """Move the bars by a round, and show the accuracy where there is one."""
        self._move(run, row.round)
        if row.test is not None:
            note = f"test {100 * row.test.top1:.1f} %"
            self._progress.update(self._tasks[run].task, note=note)

    def end(self, run: str, how: str) -> None:
        """Take the bar of a run away, and say so where it is not finished."""
        self._over += 1
        bar = self._tasks.pop(run, None)
        if bar is not None:
            if self._all is not None:
                left = bar.rounds - bar.done if how in (FINISHED, REUSED) else 0
                self._progress.advance(self._all, left)  # it may have ended early
            self._progress.remove_task(bar.task)
        if self._all is not None:
            self._progress.update(self._all, note=f"{self._over} of {self._runs} runs")
        if how not in (FINISHED, REUSED):
            self._print(f"{run}: {how}")

    def stopping(self) -> None:
        """Show a line above the bars."""
        self._print(STOPPING)

    def _print(self, text: str) -> None:
        _print(self._progress.console, self._mark + text)

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
    """The bar of a run, and how far it is."""

    task: TaskID
    rounds: int
    done: int = 0


class Lines:
    """A line for each run every so many seconds, and when it ends.

    Args:
        console: where the lines go.
        mark: what every line begins with.
        seconds: time between lines of one run.
    """

    def __init__(self, console: Console, mark: str = "", seconds: float = 10.0) -> None:
        self._console, self._mark, self._seconds = console, mark, seconds
        self._runs, self._begun = 1, 0
        self._at: dict[str, _Line] = {}
        self._told: set[str] = set()

    def plan(self, runs: int, rounds: int) -> None:
        """Show how much there is to do, where it is more than one run."""
        self._runs, self._begun = runs, 0
        if runs > 1:
            self._print(f"{runs} runs of {rounds:,} rounds in all")

    def begin(self, run: str, rounds: int, done: int) -> None:
        """Remember the run."""
        self._begun += 1
        now = time.monotonic()
        self._at[run] = _Line(self._begun, rounds, now, now, done)

    def hint(self, run: str, text: str) -> None:
        """Show a line, once however many runs it is true of."""
        if text not in self._told:
            self._told.add(text)
            self._print(f"hint: {text}")

    def clients(self, run: str, trained: int, of: int) -> None:
        """Show a line where a single round takes long."""
        self._say(run, f"round {self._at[run].done + 1}: {trained}/{of} clients")

    def row(self, run: str, row: RoundRecord) -> None:
        """Show a line where it is time for one."""
        self._at[run].row, self._at[run].done = row, row.round
        self._say(run, f"round {row.round}/{self._at[run].rounds}{_accuracy(row)}")

    def end(self, run: str, how: str) -> None:
        """Show how the run ended."""
        at = self._at.pop(run, None)
        if at is None:  # it ended before it began
            self._print(f"{run}: {how}")
            return
        shown = f"{time.monotonic() - at.began:.1f} s" if how == FINISHED else how.rstrip(".")
        self._print(f"{self._count(at)}{run}: {shown}{_accuracy(at.row)}")

    def stopping(self) -> None:
        """Show a line."""
        self._print(STOPPING)

    def _say(self, run: str, text: str) -> None:
        at = self._at[run]
        if time.monotonic() - at.last >= self._seconds:
            at.last = time.monotonic()
            self._print(f"{self._count(at)}{run}: {text}")

    def _count(self, at: _Line) -> str:
        return f"[{at.number}/{self._runs}] " if self._runs > 1 else ""

    def _print(self, text: str) -> None:
        _print(self._console, self._mark + text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


@dataclass
class _Line:
    """What there is to say of a run."""

    number: int
    rounds: int
    began: float
    last: float
    done: int
    row: RoundRecord | None = None


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _accuracy(row: RoundRecord | None) -> str:
    return "" if row is None or row.test is None else f", test {100 * row.test.top1:.1f} %"


def watcher(console: Console, quiet: bool = False, mark: str = "") -> Watcher:
    """Return bars on a terminal, lines elsewhere, and nothing where quiet is asked for.

    Args:
        console: where they are shown.
        quiet: whether nothing is shown.
        mark: what every line begins with.
    """
    if quiet:
        return Silent()
    return Bars(console, mark) if console.is_terminal else Lines(console, mark)
