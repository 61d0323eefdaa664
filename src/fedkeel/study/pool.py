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
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fedkeel import config
from fedkeel.cost import autotune
from fedkeel.engine.process import malloc
from fedkeel.engine.workers import beginning
from fedkeel.errors import FedkeelError, RunError
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import Status
from fedkeel.runner.interrupts import POLITE, be_patient, interrupts
from fedkeel.runner.progress import REUSED, Silent, Watcher

PATIENCE = 0.2
"""Seconds between looks for an interrupt while runs go on, and between words on how they go."""

_KILLED = "that is usually the system's answer to a lack of memory"

_ENDS_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""

GRACE = 60.0
"""Seconds that runs have to finish their round and save where the work ends with an error."""


@dataclass(frozen=True)
class Order:
    """A run that is wanted.

    Args:
        run: what it is called while it goes on; no other one is called so.
        folder: where it is kept.
        make: makes it, or goes on with it, and tells the watcher under this name. Where processes
            are not forked, it has to be pickled for several jobs.
    """

    run: str
    folder: Path
    make: Callable[[Watcher, str], Status]


@dataclass(frozen=True)
class Made:
    """What a run came to.

    Args:
        folder: where it is.
        error: why it could not go on, None where it is finished.
    """

    folder: Path
    error: FedkeelError | None = None

    @property
    def rows(self) -> list[RoundRecord]:
        """Its rows, round 0 first, from the folder; those that there are where it went wrong."""
        folder = RunFolder(self.folder)
        return folder.rows() if folder.exists() else []


def make_all(
    orders: Iterable[Order],
    jobs: int = 1,
    watcher: Watcher | None = None,
    goes_on: Callable[[Made], bool] = lambda made: True,
) -> list[Made | None]:
    """Make runs, go on with those that were begun, and read those that are finished.

    The first interrupt lets those at hand end after their round; the second ends them at once.

    Args:
        orders: the runs; each is taken when its turn comes.
        jobs: how many at a time, each in a process of its own; one runs in this process.
        watcher: follows them; `plan` is left to the caller.
        goes_on: says of what a run came to whether the others go on; if not, they end as after an
            interrupt.

    Returns:
        One for each order that was taken, in this order; None for those that an interrupt ended.
    """
    watcher = watcher or Silent()
    if jobs > 1:
        return _Jobs(orders, jobs, watcher, goes_on).make()
    found: list[Made | None] = []
    with interrupts(watcher.stopping) as stop:
        for order in orders:
            made = _read(order, watcher) or _here(order, watcher)
            found.append(made)
            if made is None or stop.is_set() or not goes_on(made):
                break
    return found


def can_fork() -> bool:
    """Return whether processes begin with all that is here, so that nothing is pickled."""
    return beginning() == "fork"


def alone(engine: config.Engine) -> config.Engine:
    """Return the engine for one process that starts no others, with the same bits."""
    kind = "sequential" if engine.kind in ("workers", "ray") else engine.kind
    return engine.model_copy(update={"kind": kind, "workers": 1, "address": None})


def _read(order: Order, watcher: Watcher) -> Made | None:
    """Return a run that is finished, None where it is not or has lost its rows."""
    folder = RunFolder(order.folder)
    record = folder.read_run() if folder.exists() else None
    if record is None or record.status != "finished":
        return None
    rows = folder.rows()
    if not rows:
        return None
    watcher.begin(order.run, record.rounds, rows[-1].round)
    watcher.row(order.run, rows[-1])
    watcher.end(order.run, REUSED)
    return Made(order.folder)


def _here(order: Order, watcher: Watcher) -> Made | None:
    """Make a run in this process."""
    try:
        status = order.make(watcher, order.run)
    except FedkeelError as error:
        return _failed(order, error, watcher)
    return None if status == "interrupted" else Made(order.folder)


def _failed(order: Order, error: FedkeelError, watcher: Watcher) -> Made:
    watcher.end(order.run, error.what)
    return Made(order.folder, error)


@dataclass
class _Child:
    """A process that makes a run, and our end of its pipe."""

    index: int
    order: Order
    process: Any
    pipe: Connection


class _Jobs:
    """Runs that go on at the same time.

    Args:
        orders: the runs.
        jobs: how many at a time, at most.
        watcher: follows them.
        goes_on: as in `make_all`.
    """

    def __init__(
        self,
        orders: Iterable[Order],
        jobs: int,
        watcher: Watcher,
        goes_on: Callable[[Made], bool],
    ) -> None:
        self._orders, self._jobs, self._watcher = iter(orders), jobs, watcher
        self._goes_on = goes_on
        self._found: list[Made | None] = []
        self._running: list[_Child] = []
        self._context: Any = multiprocessing.get_context(beginning())

    def make(self) -> list[Made | None]:
        """Make the runs until all are made, or an interrupt comes."""
        if can_fork():
            importlib.import_module(
                "fedkeel.engine.vectorized.engine"
            )  # once, and not in every process
        told = False
        with interrupts(self._watcher.stopping) as stop:
            try:
                while (not stop.is_set() and self._fill(stop)) or self._running:
                    if stop.is_set() and not told:
                        told = True
                        self._ask()
                    pipes = {child.pipe: child for child in self._running}
                    for pipe in wait(list(pipes), PATIENCE):
                        self._hear(pipes[pipe], stop)  # type: ignore[index]
            except Exception:
                self._ask()
                ends = time.monotonic() + GRACE
                for child in self._running:
                    child.process.join(max(ends - time.monotonic(), 0.0))
                raise
            finally:
                self._end()
        return self._found

    def _ask(self) -> None:
        """Ask the runs at hand to finish their round, save and end."""
        for child in self._running:
            child.process.terminate()

    def _fill(self, stop: threading.Event) -> bool:
        """Begin as many runs as may go on; return whether any does."""
        while len(self._running) < self._jobs and not stop.is_set():
            order = next(self._orders, None)
            if order is None:
                break
            taken = {child.order.run for child in self._running}
            while order.run in taken:
                order = replace(order, run=f"{order.run} (again)")
            self._found.append(_read(order, self._watcher))
            if self._found[-1] is None:
                self._begin(order)
        return bool(self._running)

    def _begin(self, order: Order) -> None:
        ours, theirs = self._context.Pipe()
        inherited = [ours, *(child.pipe for child in self._running)] if can_fork() else []
        arguments = (order, theirs, inherited, os.getpid())
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        with warnings.catch_warnings(), _deaf():
            # a progress bar's thread may be alive, and is not used
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._running.append(_Child(len(self._found) - 1, order, process, ours))

    def _hear(self, child: _Child, stop: threading.Event) -> None:
        """Pass on a word of a run, or take what it came to."""
        try:
            word, *said = child.pipe.recv()
        except (EOFError, OSError):
            word, said = "made", [None, {}]
        if word != "made":
            getattr(self._watcher, word)(child.order.run, *said)
            return
        self._running.remove(child)
        child.process.join()
        child.pipe.close()
        autotune.learn(said[1])
        made = self._collected(child, said[0], stop)
        self._found[child.index] = made
        if made is not None and not self._goes_on(made):
            stop.set()

    def _collected(self, child: _Child, said: object, stop: threading.Event) -> Made | None:
        """Return what a run came to, None where it was interrupted."""
        order = child.order
        if said is None and not stop.is_set():
            code = child.process.exitcode
            said = RunError(
                f"The process of a run ended: {order.run}.",
                got=f"exit code {code}",
                why=_KILLED if code == -signal.SIGKILL else None,
                do="run the same command again, perhaps with fewer jobs: it goes on from there",
            )
        if isinstance(said, FedkeelError):
            return _failed(order, said, self._watcher)
        if isinstance(said, BaseException):
            raise said
        if said == "finished":
            return Made(order.folder)
        stop.set()  # someone may have ended this one politely
        return None

    def _end(self) -> None:
        """End what still runs: something went wrong, or a second interrupt came."""
        for child in self._running:
            child.process.kill()
        for child in self._running:
            child.process.join()
            child.pipe.close()
        self._running.clear()


@contextmanager
def _deaf() -> Iterator[None]:
    """Put off interrupts, so that a new process hears none before it is ready."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in a process of its own --------------------------------------------------------------------


class _Teller(Silent):
    """Says how a run goes along a pipe; where nobody is left to hear, the run is over."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._said = 0.0
        self._row: RoundRecord | None = None

    def begin(self, run: str, rounds: int, done: int) -> None:
        """Say how far the run is."""
        self._say("begin", rounds, done)

    def hint(self, run: str, text: str) -> None:
        """Tell it."""
        self._say("hint", text)

    def clients(self, run: str, trained: int, of: int) -> None:
        """Say it now and then."""
        if time.monotonic() - self._said >= PATIENCE:
            self._say_row()  # or words of clients would leave no room for it
            self._say("clients", trained, of)

    def row(self, run: str, row: RoundRecord) -> None:
        """Say it now and then, and at the end."""
        self._row = row
        if time.monotonic() - self._said >= PATIENCE:
            self._say_row()

    def end(self, run: str, how: str) -> None:
        """Say how it ended."""
        self._say_row()
        self._say("end", how)

    def _say_row(self) -> None:
        if self._row is not None:
            self._say("row", self._row)
            self._row = None

    def _say(self, *word: object) -> None:
        self._said = time.monotonic()
        try:
            self._pipe.send(word)
        except OSError:
            raise KeyboardInterrupt from None


def _work(order: Order, pipe: Connection, inherited: list[Connection], parent: int) -> None:
    """Make a run, and say how it ended. Runs in a process of its own."""
    for number in POLITE:
        signal.signal(number, signal.SIG_DFL)
    be_patient()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_ENDS_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C reaches the parent alone, which says so
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    malloc.keep()
    said: object
    known = autotune.known()
    try:
        said = order.make(_Teller(pipe), order.run)
    except FedkeelError as error:
        said = _plain(error)
    except Exception:
        said = RuntimeError(f"in the process of a run:\n{traceback.format_exc()}")
    except KeyboardInterrupt:
        os._exit(1)
    learned = {key: found for key, found in autotune.known().items() if key not in known}
    pipe.send(("made", said, learned))
    os._exit(0)


def _plain(error: FedkeelError) -> FedkeelError:
    """Return the error in words, which any pipe takes."""
    said = {name: getattr(error, name) for name in ("got", "expected", "why", "do")}
    words = {name: None if value is None else str(value) for name, value in said.items()}
    return type(error)(error.what, **words)
