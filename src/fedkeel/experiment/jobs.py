"""Many runs, several at a time: each in a process of its own, of one thread.

A run's folder is all that it leaves. So a process that dies takes nothing along: the run is taken
up again from its checkpoint, and what is finished is not made again.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fedkeel import config
from fedkeel.engine import heap
from fedkeel.engine.workers import START
from fedkeel.errors import ConfigError, FedkeelError, TrainingError
from fedkeel.experiment.execute import start
from fedkeel.experiment.interrupts import interrupts
from fedkeel.experiment.prepare import Ingredients, Prepared, prepare
from fedkeel.experiment.progress import Silent, Watcher
from fedkeel.records import RoundRecord, RunFolder, Status

PATIENCE = 0.2
"""Seconds between looks for an interrupt while runs go on."""

_ENDS_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


@dataclass(frozen=True)
class Made:
    """What a run came to.

    Args:
        folder: where it is.
        rows: one a round, round 0 first; those that there are where it could not go on.
        error: why it could not go on, "" where it is finished.
    """

    folder: Path
    rows: Sequence[RoundRecord]
    error: str = ""


def make_all(
    wanted: Sequence[config.Run],
    ingredients: Ingredients,
    place: Callable[[Prepared], Path],
    jobs: int = 1,
    watcher: Watcher | None = None,
) -> list[Made | None]:
    """Make runs, go on with those that were begun, and read those that are finished.

    Args:
        wanted: their settings. With several jobs, the engines ``workers`` and ``ray`` become
            ``sequential``, with the same bits.
        ingredients: data and model.
        place: gives the folder of a run.
        jobs: how many at a time; one runs in this process, with the engine that was asked for.
        watcher: follows them; `plan` is left to the caller.

    Returns:
        One for each that was wanted, in this order; None for those that an interrupt left out.

    Raises:
        ConfigError: several jobs on a system without fork.
        FedkeelError: a run that cannot be made, for another reason than its training.
    """
    watcher = watcher or Silent()
    if jobs == 1:
        return _one_by_one(wanted, ingredients, place, watcher)
    if START != "fork":
        raise ConfigError(
            "Several runs at a time need processes that can be forked.",
            got=f"jobs {jobs} on this system",
            do="leave jobs at 1; engine.kind = 'workers' uses all cores for each run",
        )
    return _Jobs(jobs, watcher).make(wanted, ingredients, place)


def _one_by_one(
    wanted: Sequence[config.Run],
    ingredients: Ingredients,
    place: Callable[[Prepared], Path],
    watcher: Watcher,
) -> list[Made | None]:
    found: list[Made | None] = [None] * len(wanted)
    for index, settings in enumerate(wanted):
        prepared = prepare(settings, ingredients)
        folder = place(prepared)
        try:
            result = start(prepared, folder, resume=True, watcher=watcher)
        except TrainingError as error:
            found[index] = Made(folder, RunFolder(folder).rows(), error.what)
            continue
        if result.record.status == "interrupted":
            break
        found[index] = Made(folder, result.rows)
    return found


@dataclass
class _Child:
    """A process that makes a run, and our end of its pipe."""

    index: int
    folder: Path
    label: str
    process: Any
    pipe: Connection
    began: float


class _Jobs:
    """Runs that go on at the same time.

    Args:
        jobs: how many, at most.
        watcher: follows them.
    """

    def __init__(self, jobs: int, watcher: Watcher) -> None:
        self._jobs, self._watcher = jobs, watcher
        self._running: list[_Child] = []
        self._context: Any = multiprocessing.get_context(START)

    def make(
        self,
        wanted: Sequence[config.Run],
        ingredients: Ingredients,
        place: Callable[[Prepared], Path],
    ) -> list[Made | None]:
        """Make the runs. After an interrupt those at hand end after their round."""
        if any(one.engine.kind in ("auto", "vectorised") for one in wanted):
            importlib.import_module("fedkeel.engine.chunks")  # once, and not in every process
        found: list[Made | None] = [None] * len(wanted)
        left = list(range(len(wanted)))[::-1]
        told = False
        with interrupts(self._watcher.stopping) as stop:
            try:
                while self._running or (left and not stop.is_set()):
                    while left and len(self._running) < self._jobs and not stop.is_set():
                        index = left.pop()
                        prepared = prepare(wanted[index], ingredients)
                        found[index] = self._begin(index, prepared, place(prepared))
                    if stop.is_set() and not told:
                        told = True
                        for child in self._running:
                            _tell(child)
                    for child in self._ended():
                        found[child.index] = self._collect(child)
                        if found[child.index] is None:  # someone has ended this one politely
                            stop.set()
            finally:
                self._end()
        return found

    def _begin(self, index: int, prepared: Prepared, folder: Path) -> Made | None:
        """Start a process for a run, or return the run where it is finished."""
        there = RunFolder(folder)
        if there.exists() and there.read_run().status == "finished":
            return Made(folder, start(prepared, folder, watcher=self._watcher).rows)
        settings = prepared.settings
        ours, theirs = self._context.Pipe()
        prepared = replace(
            prepared, settings=settings.model_copy(update={"engine": alone(settings.engine)})
        )
        others = [ours, *(child.pipe for child in self._running)]
        arguments = (prepared, folder, theirs, others, os.getpid())
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        with warnings.catch_warnings():  # a progress bar's thread may be alive, and is not used
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        label = f"{settings.method} seed {settings.seed}"
        self._running.append(_Child(index, folder, label, process, ours, time.monotonic()))
        return None

    def _ended(self) -> list[_Child]:
        ready = wait([child.pipe for child in self._running], PATIENCE)
        return [child for child in self._running if child.pipe in ready]

    def _collect(self, child: _Child) -> Made | None:
        """Return what a run came to, None where it was interrupted."""
        try:
            said = child.pipe.recv()
        except (EOFError, OSError):
            said = None
        self._running.remove(child)
        child.process.join()
        child.pipe.close()
        if said is None:
            raise TrainingError(
                f"The process of a run ended: {child.label}.",
                got=f"exit code {child.process.exitcode}",
                why="-9 is usually the system's answer to a lack of memory",
                do="run the same command again, perhaps with fewer jobs: it goes on from there",
            )
        if isinstance(said, TrainingError):
            rows = RunFolder(child.folder).rows()
            self._watcher.made(child.label, None, time.monotonic() - child.began)
            return Made(child.folder, rows, said.what)
        if isinstance(said, BaseException):
            raise said
        if said == "interrupted":
            return None
        rows = RunFolder(child.folder).rows()
        self._watcher.made(child.label, rows[-1], time.monotonic() - child.began)
        return Made(child.folder, rows)

    def _end(self) -> None:
        """End what still runs: something went wrong, or a second interrupt came."""
        for child in self._running:
            child.process.kill()
        for child in self._running:
            child.process.join()
            child.pipe.close()
        self._running.clear()


def _tell(child: _Child) -> None:
    """Ask a process to stop after its round."""
    try:
        child.pipe.send("stop")
    except OSError:
        return  # it has ended


def alone(engine: config.Engine) -> config.Engine:
    """Return the engine for one process that starts no others."""
    kind = "sequential" if engine.kind in ("workers", "ray") else engine.kind
    return engine.model_copy(update={"kind": kind, "workers": 1, "address": None})


# ---- in a process of its own --------------------------------------------------------------------


class _Obedient(Silent):
    """Interrupts its own process when the other end of the pipe asks for it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._stopped = pipe, False

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Look for the word before the first round."""
        self._look()

    def row(self, row: RoundRecord) -> None:
        """Look for the word after each round."""
        self._look()

    def _look(self) -> None:
        if not self._stopped and self._pipe.poll():
            self._stopped = True
            signal.raise_signal(signal.SIGTERM)


def _work(
    prepared: Prepared, folder: Path, pipe: Connection, others: list[Connection], parent: int
) -> None:
    """Make a run, and say how it ended. Runs in a process of its own."""
    ctypes.CDLL(None).prctl(_ENDS_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setpgrp()  # Ctrl-C reaches the parent alone, which says so
    for other in others:
        other.close()
    torch.set_num_threads(1)
    heap.keep()
    try:
        pipe.send(_made(prepared, folder, pipe))
    except FedkeelError as error:
        pipe.send(_plain(error))
    except Exception:
        pipe.send(RuntimeError(f"in the process of a run:\n{traceback.format_exc()}"))
    os._exit(0)


def _made(prepared: Prepared, folder: Path, pipe: Connection) -> Status:
    choice, there = None, RunFolder(folder)
    if there.exists() and prepared.settings.engine.kind == "auto":
        before = there.read_run().engine
        kind = "sequential" if before["kind"] == "workers" else before["kind"]
        choice = {**before, "kind": kind, "workers": 1}
    result = start(prepared, folder, resume=True, watcher=_Obedient(pipe), choice=choice)
    return result.record.status


def _plain(error: FedkeelError) -> FedkeelError:
    """Return the error in words, which any pipe takes."""
    said = {name: getattr(error, name) for name in ("got", "expected", "why", "do")}
    words = {name: None if value is None else str(value) for name, value in said.items()}
    return type(error)(error.what, **words)
