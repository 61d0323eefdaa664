"""A pool of processes that make several runs at a time, each with one thread.

Runs of one structure may come as a group, whose clients train side by side in one process. A run
leaves only its folder. A run whose process dies is continued from its checkpoint, and a
finished run is not made again.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fedkeel import config
from fedkeel.base.memory import free_memory
from fedkeel.engine.choose.device import has_gpu
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.choose.parallel_runs import shared_runs, structure_of
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process import forking
from fedkeel.engine.process.affinity import core_count
from fedkeel.engine.process.forking import (
    ChildProcess,
    exit_reason,
    portable_error,
    start_child,
    wait_for_children,
)
from fedkeel.engine.process.interrupts import (
    interrupts,
    interrupts_blocked,
    take_interrupts_from_parent,
)
from fedkeel.engine.process.malloc import keep_freed_memory
from fedkeel.errors import FedkeelError, RunError, TrainingError
from fedkeel.features.progress.display import REUSED, ProgressDisplay
from fedkeel.features.track.declaration import TrackDeclaration
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import EngineChoice, Status
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.runner.feature import RunGroup
from fedkeel.runner.features import callbacks_of
from fedkeel.runner.start import start

POLL_SECONDS = 0.2
"""Seconds between two progress messages of a run."""

MODELS_OF_A_CLIENT = 8
"""Models that a client takes while it trains, about: with gradients, states and its reply."""

GRACE_SECONDS = 60.0
"""Seconds that runs have to finish their round and save, where the work ends with an error."""


@dataclass(frozen=True)
class RunRequest:
    """A run that is to be made.

    Args:
        name: label of the run while it goes on; no other run has it at the same time.
        folder: its run folder.
        run: makes or continues the run, and reports to the display under the given name. It is
            pickled for several jobs where processes are not forked.
        group: what it has in common with runs beside which its clients may train.
        parallel_runs: runs of such a group, at most.
    """

    name: str
    folder: Path
    run: Callable[[ProgressDisplay, str], Status]
    group: str = ""
    parallel_runs: int = 1


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended that was not interrupted.

    Args:
        folder: its run folder.
        error: why it could not go on; None where it is finished.
    """

    folder: Path
    error: FedkeelError | None = None

    @property
    def rows(self) -> list[RoundRecord]:
        """Its rows from the folder, round 0 first; a run that failed may have few or none."""
        folder = RunFolder(self.folder)
        return folder.rows() if folder.exists() else []


def run_all(
    requests: Iterable[RunRequest],
    jobs: int = 1,
    display: ProgressDisplay | None = None,
    may_continue: Callable[[RunOutcome], bool] = lambda outcome: True,
) -> list[RunOutcome | None]:
    """Make new runs, continue unfinished ones, and read finished ones.

    The first interrupt lets running runs end after their round; the second ends them at once.

    Args:
        requests: the runs; each is taken when its turn comes.
        jobs: runs at a time, each in its own process; a single job runs in this process.
        display: follows the runs; the caller calls its `plan`.
        may_continue: whether the other runs continue after this outcome. If not, they end as after
            an interrupt.

    Returns:
        One outcome for each request that was taken, in this order; None for an interrupted run.
    """
    display = display or ProgressDisplay()
    if jobs > 1:
        return _Pool(iter(requests), jobs, display, may_continue).run()
    outcomes: list[RunOutcome | None] = []
    with interrupts(display.stopping) as stop:
        for group in groups_of(requests):
            of_group = _make_group(group, display)
            outcomes += of_group
            is_open = all(outcome is not None and may_continue(outcome) for outcome in of_group)
            if stop.is_set() or not is_open:
                break
    return outcomes


def groups_of(requests: Iterable[RunRequest]) -> Iterator[list[RunRequest]]:
    """Yield runs that follow one another and may train side by side, as groups; others singly."""
    group: list[RunRequest] = []
    for request in requests:
        is_other = bool(group) and request.group != group[0].group
        is_there = any(request.folder == other.folder for other in group)
        if is_other or is_there:
            yield group
            group = []
        group.append(request)
        if not request.group or len(group) >= request.parallel_runs:  # nothing waits for the next
            yield group
            group = []
    if group:
        yield group


def beside(
    prepared: Prepared, engine: EngineChoice | None, is_tracked: bool = False
) -> tuple[str, int]:
    """Return the `RunRequest.group` of a run, and how many train side by side at most.

    Args:
        prepared: the run.
        engine: its engine, from `with_parallel_runs`.
        is_tracked: whether trackers follow it, which follow one run at a time.
    """
    if engine is None or is_tracked or not engine.parallel_runs:
        return "", 1
    return structure_of(prepared.setup, engine.parallel_numbers), engine.parallel_runs


def can_be_scored(outcome: RunOutcome) -> bool:
    """Return whether the run is finished or has failed in training, which counts as a score."""
    return outcome.error is None or isinstance(outcome.error, TrainingError)


def make_run(
    prepared: Prepared,
    folder: Path,
    engine: EngineChoice | None,
    display: ProgressDisplay,
    name: str,
    group: RunGroup | None = None,
) -> Status:
    """Make or continue a run in its folder, and report to the display; return how it ended.

    It reports to trackers where it has a group.
    """
    tracked = [] if group is None else callbacks_of(prepared.settings, folder, group)
    callbacks = [*tracked, display.follow(name)]
    return start(prepared, folder, resume=True, callbacks=callbacks, choice=engine).record.status


def default_jobs(prepared: Prepared, runs: int) -> int:
    """Return how many runs are made at a time where nobody has said: one for each core.

    It is one where the settings say how a run is spread over the machine, on a GPU, where trackers
    follow the runs, and where more of them would take more than half of the free memory.

    Args:
        prepared: one of the runs.
        runs: number of the runs.
    """
    engine = prepared.settings.engine
    is_spread = engine.kind in ("workers", "ray") or engine.workers or engine.devices is not None
    is_tracked = bool(getattr(prepared.settings, TrackDeclaration.table).to)
    if is_spread or is_tracked or not can_fork() or has_gpu(engine.device):
        return 1
    estimate, free = estimate_run(prepared), free_memory()
    state = estimate.client_state * estimate.clients if estimate.state == "memory" else 0
    replies = MODELS_OF_A_CLIENT * estimate.down.get("model", 0) * prepared.largest_cohort
    needed = state + replies + estimate.server_state + estimate.evaluation
    needed *= shared_runs(prepared, runs)
    fitting = runs if free is None else int(free / 2 / max(needed, 1))
    return max(1, min(core_count(), runs, fitting))


def can_fork() -> bool:
    """Return whether new processes inherit this process's memory, so that nothing is pickled."""
    return forking.start_method() == "fork"


def single_process(engine: config.Engine) -> config.Engine:
    """Return an engine with the same bits that starts no other processes."""
    kind = "sequential" if engine.kind in ("workers", "ray") else engine.kind
    alone: dict[str, str | int | None] = {"kind": kind, "workers": 1, "address": None}
    if engine.devices is not None:
        device = "cpu" if "cpu" in engine.devices else "cuda"
        alone |= {"kind": "vectorized", "devices": None, "device": device}
    return engine.model_copy(update=alone)


def _read_finished(request: RunRequest, display: ProgressDisplay) -> RunOutcome | None:
    """Return the outcome of a finished run, None where it is unfinished or its rows changed."""
    folder = RunFolder(request.folder)
    record = folder.read_run() if folder.exists() else None
    if record is None or record.status != "finished":
        return None
    rows = folder.rows()
    if not rows or folder.changes(record, rows, models=False):
        return None
    display.begin(request.name, record.rounds, rows[-1].round, record.score)
    display.row(request.name, rows[-1])
    display.end(request.name, REUSED)
    return RunOutcome(request.folder)


def _make_group(group: Sequence[RunRequest], display: ProgressDisplay) -> list[RunOutcome | None]:
    """Make the unfinished runs of a group side by side, in this process."""
    outcomes = {request: _read_finished(request, display) for request in group}
    unfinished = [request for request, outcome in outcomes.items() if outcome is None]
    from fedkeel.engine.vectorized.side_by_side import side_by_side  # slow to import

    made = side_by_side([partial(_run_here, request, display) for request in unfinished])
    outcomes.update(zip(unfinished, made, strict=True))
    return [outcomes[request] for request in group]


def _run_here(request: RunRequest, display: ProgressDisplay) -> RunOutcome | None:
    """Make a run in this process; None where it was interrupted."""
    try:
        status = request.run(display, request.name)
    except FedkeelError as error:
        return _failure(request, error, display)
    return None if status == "interrupted" else RunOutcome(request.folder)


def _failure(request: RunRequest, error: FedkeelError, display: ProgressDisplay) -> RunOutcome:
    display.end(request.name, error.what)
    return RunOutcome(request.folder, error)


@dataclass(frozen=True)
class _Progress:
    """Message of a run's process: call this method of the display with these arguments."""

    method: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class _Ended:
    """Message of a run's process: how the run of this name ended."""

    run: str
    result: Status | Exception


@dataclass
class _Child:
    """A process that makes a group of runs, and the places of the outcomes that it still owes."""

    places: dict[str, tuple[int, RunRequest]]
    process: ChildProcess


class _Pool:
    """Makes runs in several processes; the arguments are those of `run_all`."""

    def __init__(
        self,
        requests: Iterator[RunRequest],
        jobs: int,
        display: ProgressDisplay,
        may_continue: Callable[[RunOutcome], bool],
    ) -> None:
        self._groups, self._jobs, self._display = groups_of(requests), jobs, display
        self._may_continue = may_continue
        self._outcomes: list[RunOutcome | None] = []
        self._children: list[_Child] = []

    def run(self) -> list[RunOutcome | None]:
        """Make the runs until all are made, or an interrupt comes."""
        if can_fork():  # imported once here, and not in every process
            importlib.import_module("fedkeel.engine.vectorized.side_by_side")
        is_terminated = False
        with interrupts(self._display.stopping) as stop:
            try:
                while (not stop.is_set() and self._fill(stop)) or self._children:
                    if stop.is_set() and not is_terminated:
                        is_terminated = True
                        self._terminate()
                    for child in self._ready(end_stopped=stop.is_set()):
                        self._receive(child, stop)
            except Exception:
                self._terminate()
                deadline = time.monotonic() + GRACE_SECONDS
                for child in self._children:
                    child.process.join(max(deadline - time.monotonic(), 0.0))
                raise
            finally:
                self._kill()
        return self._outcomes

    def _ready(self, end_stopped: bool) -> list[_Child]:
        ready = wait_for_children((child.process for child in self._children), end_stopped)
        return [child for child in self._children if child.process in ready]

    def _terminate(self) -> None:
        """Ask the running runs to finish their round, save and end."""
        for child in self._children:
            child.process.terminate()

    def _fill(self, stop: threading.Event) -> bool:
        """Start as many groups as there are free jobs; return whether any run goes on."""
        while len(self._children) < self._jobs and not stop.is_set():
            group = next(self._groups, None)
            if group is None:
                break
            names = {name for child in self._children for name in child.places}
            places: dict[str, tuple[int, RunRequest]] = {}
            for request in group:
                while request.name in names:
                    request = replace(request, name=f"{request.name} (again)")
                names.add(request.name)
                self._outcomes.append(_read_finished(request, self._display))
                if self._outcomes[-1] is None:
                    places[request.name] = len(self._outcomes) - 1, request
            if places:
                self._start(places)
        return bool(self._children)

    def _start(self, places: dict[str, tuple[int, RunRequest]]) -> None:
        with interrupts_blocked():
            process = start_child(
                _child_main,
                [[request for _, request in places.values()]],
                siblings=[child.process.pipe for child in self._children],
                what="A run cannot be sent to another process.",
                do="define model and loss at the top level of a module, or run one job at a time",
            )
        self._children.append(_Child(places, process))

    def _receive(self, child: _Child, stop: threading.Event) -> None:
        """Forward a message to the display, or record how a run ended."""
        try:
            message = child.process.pipe.recv()
        except (EOFError, OSError):
            message = None  # the process died
        if isinstance(message, _Progress):
            getattr(self._display, message.method)(*message.arguments)
            return
        if message is None:
            self._children.remove(child)
            child.process.join()
            ended = [
                (place, request, "interrupted" if stop.is_set() else _died(child, request))
                for place, request in child.places.values()
            ]
        else:
            place, request = child.places.pop(message.run)
            if not child.places:
                self._children.remove(child)
                child.process.join()
            ended = [(place, request, message.result)]
        for place, request, result in ended:
            outcome = self._outcome(request, result)
            self._outcomes[place] = outcome
            if outcome is None or not self._may_continue(outcome):
                stop.set()  # also where somebody has terminated only this process

    def _outcome(self, request: RunRequest, result: object) -> RunOutcome | None:
        """Return the outcome of a run that ended; None where it was interrupted."""
        if isinstance(result, FedkeelError):
            return _failure(request, result, self._display)
        if isinstance(result, Exception):
            raise result
        return RunOutcome(request.folder) if result == "finished" else None

    def _kill(self) -> None:
        """Kill the processes that still run, after an error or a second interrupt."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.join()
        self._children.clear()


def _died(child: _Child, request: RunRequest) -> RunError:
    code = child.process.exit_code
    return RunError(
        f"The process of a run ended: {request.name}.",
        got=f"exit code {code}",
        why=exit_reason(code),
        do="run the same command again, perhaps with fewer jobs: it goes on from there",
    )


# ---- in the process of a run --------------------------------------------------------------------


class _PipeDisplay(ProgressDisplay):
    """Sends the progress of runs through a pipe; they end where nobody reads it any more."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._last_sent: dict[str, float] = {}
        self._pending_rows: dict[str, RoundRecord] = {}

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        """Send how far the run is."""
        self._send("begin", run, rounds, done, score)

    def warn(self, run: str, message: str) -> None:
        """Send a warning."""
        self._send("warn", run, message)

    def clients(self, run: str, trained: int, count: int) -> None:
        """Send the number of trained clients now and then, after a row that waits."""
        if self._is_due(run):
            self._send_row(run)
            self._send("clients", run, trained, count)

    def row(self, run: str, row: RoundRecord) -> None:
        """Send the newest row now and then, and at the end."""
        self._pending_rows[run] = row
        if self._is_due(run):
            self._send_row(run)

    def end(self, run: str, how: str) -> None:
        """Send how the run ended."""
        self._send_row(run)
        self._send("end", run, how)

    def _is_due(self, run: str) -> bool:
        return time.monotonic() - self._last_sent.get(run, 0.0) >= POLL_SECONDS

    def _send_row(self, run: str) -> None:
        row = self._pending_rows.pop(run, None)
        if row is not None:
            self._send("row", run, row)

    def _send(self, method: str, run: str, *arguments: object) -> None:
        self._last_sent[run] = time.monotonic()
        try:
            self._pipe.send(_Progress(method, (run, *arguments)))
        except OSError:
            raise KeyboardInterrupt from None


def _child_main(requests: Sequence[RunRequest], pipe: Connection) -> None:
    """Make runs in this process, side by side, and send the parent how each of them ended."""
    from fedkeel.engine.vectorized.side_by_side import side_by_side

    take_interrupts_from_parent()
    torch.set_num_threads(1)
    keep_freed_memory()
    display = _PipeDisplay(pipe)
    try:
        with interrupts():
            side_by_side([partial(_run_and_tell, request, display, pipe) for request in requests])
    except KeyboardInterrupt:
        os._exit(1)
    os._exit(0)


def _run_and_tell(request: RunRequest, display: _PipeDisplay, pipe: Connection) -> None:
    """Make a run, and send the parent how it ended."""
    try:
        result: Status | Exception = request.run(display, request.name)
    except FedkeelError as error:
        result = portable_error(error)
    except Exception:
        result = RuntimeError(f"in the process of a run:\n{traceback.format_exc()}")
    pipe.send(_Ended(request.name, result))
