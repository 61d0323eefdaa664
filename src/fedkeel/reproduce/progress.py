"""How the running of a table is shown: bars on a terminal, lines elsewhere, or nothing."""

from __future__ import annotations

import time
from typing import Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from fedkeel.experiment.progress import bars

STOPPING = "each job stops after its round and saves; a second interrupt stops at once"


class Follower(Protocol):
    """Is told how the runs go. A run is known by the name of its folder."""

    def plan(self, runs: int, rounds: int) -> None:
        """Be told how many runs there are, and of how many rounds in all."""

    def began(self, name: str, label: str, rounds: int, done: int) -> None:
        """Be told that a run begins, `done` of its rounds made before."""

    def row(self, name: str, round: int, top1: float | None) -> None:
        """Be told how far a run is."""

    def ended(self, name: str, label: str, how: str) -> None:
        """Be told that a run is over, and how."""

    def stopping(self) -> None:
        """Be told that an interrupt came."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Nobody:
    """Shows nothing."""

    def plan(self, runs: int, rounds: int) -> None:
        """Show nothing."""

    def began(self, name: str, label: str, rounds: int, done: int) -> None:
        """Show nothing."""

    def row(self, name: str, round: int, top1: float | None) -> None:
        """Show nothing."""

    def ended(self, name: str, label: str, how: str) -> None:
        """Show nothing."""

    def stopping(self) -> None:
        """Show nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class Bars:
    """A bar for the rounds of all runs, and one for each run at work.

    Args:
        console: a terminal.
        mark: what every line begins with.
    """

    def __init__(self, console: Console, mark: str = "") -> None:
        self._progress = bars(console)
        self._mark = escape(mark)
        self._all = TaskID(0)
        self._runs = self._ended = 0
        self._tasks: dict[str, TaskID] = {}
        self._at: dict[str, int] = {}

    def plan(self, runs: int, rounds: int) -> None:
        """Show the bar of all runs."""
        self._runs = runs
        told = f"{self._mark}{runs} runs"
        self._all = self._progress.add_task(told, total=rounds, note="")

    def began(self, name: str, label: str, rounds: int, done: int) -> None:
        """Show the bar of a run."""
        told = f"{self._mark}{escape(label)}"
        task = self._progress.add_task(told, total=rounds, completed=done, note="")
        self._tasks[name], self._at[name] = task, 0
        self._move(name, done)

    def row(self, name: str, round: int, top1: float | None) -> None:
        """Move the bars."""
        note = "" if top1 is None else f"test {100 * top1:.1f} %"
        self._progress.update(self._tasks[name], completed=round, note=note)
        self._move(name, round)

    def ended(self, name: str, label: str, how: str) -> None:
        """Take the bar of a run away; say so where it was not finished."""
        self._ended += 1
        if name in self._tasks:
            task = self._tasks.pop(name)
            total = next(t.total for t in self._progress.tasks if t.id == task)
            if how == "finished" and total is not None:
                self._move(name, int(total))
            self._progress.remove_task(task)
        self._progress.update(self._all, note=f"{self._ended} of {self._runs} runs")
        if how != "finished":
            self._progress.console.print(f"{self._mark}{escape(label)}: {escape(how)}")

    def stopping(self) -> None:
        """Show a line above the bars."""
        self._progress.console.print(self._mark + STOPPING)

    def _move(self, name: str, round: int) -> None:
        self._progress.advance(self._all, round - self._at[name])
        self._at[name] = round

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class Lines:
    """A line for each run that ends, and every so many seconds for each at work.

    Args:
        console: where the lines go.
        mark: what every line begins with.
        seconds: time between lines of one run.
    """

    def __init__(self, console: Console, mark: str = "", seconds: float = 30.0) -> None:
        self._console, self._mark, self._seconds = console, mark, seconds
        self._runs = self._ended = 0
        self._last: dict[str, float] = {}
        self._labels: dict[str, tuple[str, int]] = {}

    def plan(self, runs: int, rounds: int) -> None:
        """Show how much there is to do."""
        self._runs = runs
        self._print(f"{runs} runs of {rounds:,} rounds in all")

    def began(self, name: str, label: str, rounds: int, done: int) -> None:
        """Remember the run."""
        self._last[name] = time.monotonic()
        self._labels[name] = (label, rounds)

    def row(self, name: str, round: int, top1: float | None) -> None:
        """Show a line where it is time for one."""
        if time.monotonic() - self._last[name] < self._seconds:
            return
        self._last[name] = time.monotonic()
        label, rounds = self._labels[name]
        shown = "" if top1 is None else f", test {100 * top1:.1f} %"
        self._print(f"{label}: round {round}/{rounds}{shown}")

    def ended(self, name: str, label: str, how: str) -> None:
        """Show how the run ended."""
        self._ended += 1
        self._print(f"[{self._ended}/{self._runs}] {label}: {how}")

    def stopping(self) -> None:
        """Show a line."""
        self._print(STOPPING)

    def _print(self, text: str) -> None:
        self._console.print(self._mark + text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


def follower(console: Console, mark: str = "", quiet: bool = False) -> Follower:
    """Return bars on a terminal, lines elsewhere, and nothing where quiet is asked for."""
    if quiet:
        return Nobody()
    return Bars(console, mark) if console.is_terminal else Lines(console, mark)
