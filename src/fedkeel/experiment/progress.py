"""How long work shows that it is alive: bars on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedkeel.records import RoundRecord

STOPPING = "stopping after this round; a second interrupt stops at once and loses it"


class Watcher(Protocol):
    """Follows the runs of a piece of work."""

    def plan(self, runs: int) -> None:
        """Say how many runs there will be."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Say that a run of `rounds` rounds begins, `done` of them made before."""

    def clients(self, trained: int, of: int) -> None:
        """Say how many clients of the round have been trained."""

    def row(self, row: RoundRecord) -> None:
        """Say that a round is done."""

    def stopping(self) -> None:
        """Say that the run will end after the round at hand."""

    def end(self, reused: bool) -> None:
        """Say that the run is over, or was taken from an earlier time."""

    def made(self, label: str, row: RoundRecord | None, seconds: float) -> None:
        """Say that a run that went on beside others is over; `row` is its last."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Silent:
    """Shows nothing."""

    def plan(self, runs: int) -> None:
        """Show nothing."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Show nothing."""

    def clients(self, trained: int, of: int) -> None:
        """Show nothing."""

    def row(self, row: RoundRecord) -> None:
        """Show nothing."""

    def stopping(self) -> None:
        """Show nothing."""

    def end(self, reused: bool) -> None:
        """Show nothing."""

    def made(self, label: str, row: RoundRecord | None, seconds: float) -> None:
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

    def plan(self, runs: int) -> None:
        """Pass it on."""
        self._watcher.plan(runs)

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Pass it on."""
        self._watcher.begin(label, rounds, done)

    def clients(self, trained: int, of: int) -> None:
        """Pass it on."""
        self._watcher.clients(trained, of)

    def row(self, row: RoundRecord) -> None:
        """Pass it on, without accuracy."""
        self._watcher.row(replace(row, test=None))

    def stopping(self) -> None:
        """Pass it on."""
        self._watcher.stopping()

    def end(self, reused: bool) -> None:
        """Pass it on."""
        self._watcher.end(reused)

    def made(self, label: str, row: RoundRecord | None, seconds: float) -> None:
        """Pass it on, without accuracy."""
        self._watcher.made(label, None, seconds)


def bars(console: Console) -> Progress:
    """Return bars that go away when all is done; each has a ``note`` after its times."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    )


class Bars:
    """One bar for the runs, where there are several, and one for the rounds of the current run.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._progress = bars(console)
        self._runs: TaskID | None = None
        self._rounds = self._progress.add_task("", total=None, note="", visible=False)
        self._round = 0
        self._seen = 0.0

    def plan(self, runs: int) -> None:
        """Show a bar for the runs."""
        if runs > 1:
            self._runs = self._progress.add_task("runs", total=runs, note="")

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Begin the bar of a run."""
        self._progress.reset(
            self._rounds, total=rounds, completed=done, description=label, visible=True, note=""
        )
        self._round = done

    def clients(self, trained: int, of: int) -> None:
        """Move the bar by the share of the round that is done."""
        now = time.monotonic()
        if now - self._seen > 0.1:  # a tiny round has thousands of clients a second
            self._seen = now
            self._progress.update(self._rounds, completed=self._round + min(trained / of, 0.99))

    def row(self, row: RoundRecord) -> None:
        """Move the bar by a round, and show the accuracy where there is one."""
        self._round = row.round
        if row.test is None:
            self._progress.update(self._rounds, completed=row.round)
        else:
            note = f"test {100 * row.test.top1:.1f} %"
            self._progress.update(self._rounds, completed=row.round, note=note)

    def stopping(self) -> None:
        """Show a line above the bars."""
        self._progress.console.print(STOPPING)

    def end(self, reused: bool) -> None:
        """Move the bar of the runs."""
        if self._runs is not None:
            self._progress.advance(self._runs)

    def made(self, label: str, row: RoundRecord | None, seconds: float) -> None:
        """Move the bar of the runs, and show which one it was."""
        if self._runs is not None:
            self._progress.update(self._runs, advance=1, note=label)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class Lines:
    """A line when a run begins, every so many seconds, and when it ends.

    Args:
        console: where the lines go.
        seconds: time between lines of one run.
    """

    def __init__(self, console: Console, seconds: float = 10.0) -> None:
        self._console = console
        self._seconds = seconds
        self._label, self._rounds, self._runs, self._run = "", 0, 1, 0
        self._last = self._began = 0.0
        self._row: RoundRecord | None = None

    def plan(self, runs: int) -> None:
        """Remember the number of runs."""
        self._runs = runs

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Remember the run."""
        self._run += 1
        self._label, self._rounds, self._row = label, rounds, None
        self._last = self._began = time.monotonic()

    def clients(self, trained: int, of: int) -> None:
        """Show a line where a single round takes long."""
        self._say(f"round {(self._row.round if self._row else 0) + 1}: {trained}/{of} clients")

    def row(self, row: RoundRecord) -> None:
        """Show a line where it is time for one."""
        self._row = row
        self._say(f"round {row.round}/{self._rounds}{_accuracy(row)}")

    def stopping(self) -> None:
        """Show a line."""
        self._print(STOPPING)

    def end(self, reused: bool) -> None:
        """Show how the run ended."""
        shown = "taken from an earlier run" if reused else f"{time.monotonic() - self._began:.1f} s"
        self._print(f"{shown}{_accuracy(self._row) if self._row else ''}")

    def made(self, label: str, row: RoundRecord | None, seconds: float) -> None:
        """Show a line."""
        self._run, self._label = self._run + 1, label
        self._print(f"{seconds:.1f} s{_accuracy(row) if row else ''}")

    def _say(self, text: str) -> None:
        if time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self._print(text)

    def _print(self, text: str) -> None:
        count = f"[{self._run}/{self._runs}] " if self._runs > 1 else ""
        self._console.print(f"{count}{self._label}: {text}", markup=False, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


def _accuracy(row: RoundRecord) -> str:
    return "" if row.test is None else f", test {100 * row.test.top1:.1f} %"


def watcher(console: Console, quiet: bool = False) -> Watcher:
    """Return bars on a terminal, lines elsewhere, and nothing where quiet is asked for."""
    if quiet:
        return Silent()
    return Bars(console) if console.is_terminal else Lines(console)
