"""Running a table: each cell a run of its own, cached and resumable, several at a time.

A job is a process of one thread that makes one run after the other. What a run is kept in depends
on its settings alone, so a table that was stopped goes on, and tables share what they have in
common. A run that is finished keeps its rows and not its model: a table has hundreds of them.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, cast

from fedkeel.experiment.compare import make_folder
from fedkeel.experiment.interrupts import interrupts
from fedkeel.experiment.jobs import alone
from fedkeel.reproduce.job import End, work
from fedkeel.reproduce.plan import Cell
from fedkeel.reproduce.progress import Follower, Nobody

START: Literal["fork", "spawn"] = "fork" if sys.platform.startswith("linux") else "spawn"
"""How jobs begin: forked where that is safe, which is at once and shares what is imported."""


@dataclass
class Played:
    """What came of running cells.

    Args:
        finished: runs that were finished now.
        reused: runs that had been finished before.
        failures: by name of the run folder, why it could not go on.
        complete: whether no interrupt came between.
    """

    finished: int = 0
    reused: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    complete: bool = True


def play(cells: Sequence[Cell], jobs: int, follower: Follower | None = None) -> Played:
    """Make the runs that are not finished, several at a time.

    The first interrupt lets each job finish its round and save; the second ends them at once.

    Args:
        cells: the runs; those that share a folder are made once, and those without data left out.
        jobs: processes.
        follower: is told how it goes.

    Raises:
        RunError: the folder cannot be written to.
    """
    follower, found = follower or Nobody(), Played()
    once = {cell.folder: cell for cell in reversed(cells) if not cell.absent}
    todo = [cell for cell in reversed(once.values()) if not cell.finished]
    found.reused = len(once) - len(todo)
    if not todo:
        return found
    make_folder(todo[0].folder.parent)
    with follower, interrupts(follower.stopping) as stop:
        follower.plan(len(todo), sum(cell.experiment.rounds for cell in todo))
        _Floor(todo, min(jobs, len(todo)), follower, found).run(stop)
    return found


class _Floor:
    """The jobs at work.

    Args:
        todo: the runs, in order.
        jobs: processes at most.
        follower: is told how it goes.
        found: is filled in.
    """

    def __init__(self, todo: Sequence[Cell], jobs: int, follower: Follower, found: Played) -> None:
        self._todo, self._jobs = list(reversed(todo)), jobs
        self._follower, self._found = follower, found
        self._at: dict[Connection, tuple[BaseProcess, Cell]] = {}
        self._told: set[Connection] = set()

    def run(self, stop: threading.Event) -> None:
        """Make the runs until all are made or `stop` is set."""
        try:
            while self._at or (self._todo and not stop.is_set()):
                while self._todo and len(self._at) < self._jobs and not stop.is_set():
                    self._hire()
                if stop.is_set():
                    self._stop()
                for line in wait(list(self._at), timeout=0.1):
                    self._hear(cast(Connection, line), stop)
        finally:
            for process, _ in self._at.values():
                process.kill()
                process.join()
        self._found.complete = not self._todo and self._found.complete

    def _hire(self) -> None:
        context: Any = multiprocessing.get_context(START)
        ours, theirs = context.Pipe()
        inherited = [*self._at, ours] if START == "fork" else []
        process = context.Process(target=work, args=(theirs, inherited), daemon=True)
        process.start()
        theirs.close()
        self._give(ours, process)

    def _give(self, line: Connection, process: BaseProcess) -> None:
        """Give a job its next run."""
        cell = self._todo.pop()
        self._at[line] = (process, cell)
        experiment = cell.experiment
        experiment = experiment.model_copy(update={"engine": alone(experiment.engine)})
        values = experiment.model_dump(exclude_none=True)
        line.send((values, str(cell.folder)))

    def _hear(self, line: Connection, stop: threading.Event) -> None:
        process, cell = self._at[line]
        try:
            word, one, two = line.recv()
        except (EOFError, OSError):
            self._ended(line, "interrupted" if stop.is_set() else "failed", "its process died")
            return self._dismiss(line)
        name = cell.folder.name
        if word == "begin":
            self._follower.began(name, cell.label, one, two)
        elif word == "row":
            self._follower.row(name, one, two)
        else:
            self._ended(line, one, two)
            if one != "interrupted" and self._todo and not stop.is_set():
                return self._give(line, process)
            self._dismiss(line)

    def _ended(self, line: Connection, how: End, why: str) -> None:
        cell = self._at[line][1]
        if how == "failed":
            self._found.failures[cell.folder.name] = why
        elif how == "finished":
            self._found.finished += 1
        else:
            self._found.complete = False
        self._follower.ended(cell.folder.name, cell.label, why if how == "failed" else how)

    def _dismiss(self, line: Connection) -> None:
        process, _ = self._at.pop(line)
        line.close()  # which ends it
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()

    def _stop(self) -> None:
        """Ask those that have not been asked to finish their round and save."""
        for line, (process, _) in self._at.items():
            if line not in self._told:
                self._told.add(line)
                process.terminate()
