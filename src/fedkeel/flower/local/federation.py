"""A whole federation on this machine: started, given a run, followed, and ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flwr.common.config import parse_config_args

from fedkeel.config import Experiment
from fedkeel.errors import RunError
from fedkeel.flower.export import export
from fedkeel.flower.local.processes import Federation, quoted
from fedkeel.flower.node.configuration import site
from fedkeel.flower.node.local_data import away
from fedkeel.flower.server.serve import OUTCOME
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.interrupts import interrupts
from fedkeel.runner.prepare import gather, prepare
from fedkeel.runner.progress import Watcher
from fedkeel.runner.warnings import hints

LOOK = 10.0
"""Seconds between questions to Flower whether the run is still alive, which are slow to answer."""


@dataclass(frozen=True)
class Finished:
    """What became of a run.

    Args:
        rows: its rounds.
        status: "finished", "interrupted" or "failed".
        message: why it ended before its last round, else "".
    """

    rows: list[RoundRecord]
    status: str
    message: str = ""


def shared(nodes: int) -> list[str]:
    """Return the configuration of nodes that share the clients of an experiment.

    >>> shared(2)
    ['partition-id=0 num-partitions=2', 'partition-id=1 num-partitions=2']
    """
    return [f"partition-id={i} num-partitions={nodes}" for i in range(nodes)]


def with_data(data: Sequence[str]) -> list[str]:
    """Return the configuration of nodes that have data of their own, each by its path."""
    words = [text if ":" in text else str(Path(text).absolute()) for text in data]
    return [f"{one} data={quoted(w)}" for one, w in zip(shared(len(data)), words, strict=True)]


def up(
    experiment: Experiment,
    out: Path,
    configs: Sequence[str],
    watcher: Watcher,
    resume: bool = False,
    secure: bool = False,
) -> Finished:
    """Make a run in a federation of processes on this machine.

    Logs, the app and what the clients keep are in the folder ``flower`` of the run.

    Args:
        experiment: what runs.
        out: the run folder.
        configs: the configuration of each SuperNode, see `shared` and `with_data`.
        watcher: follows the run.
        resume: whether to go on with an unfinished run that is there.
        secure: whether to use TLS and node keys, as a federation of several machines does.

    Raises:
        FedkeelError: the run cannot start, which is said before any process does where it can be
            told from the experiment; or it could not go on.
    """
    folder = RunFolder(out)
    if folder.exists() and not resume and folder.read_run().status != "finished":
        raise RunError(
            f"{out} holds an unfinished run.",
            do="add --resume to go on with it, or choose another folder (--out)",
        )
    place = out.absolute() / "flower"
    state = quoted(str(place / "state"))
    told = []
    if away(experiment):
        for one in configs:
            site(experiment, parse_config_args([one]))
    else:
        told = hints(prepare(experiment, gather(experiment)))
    with RunFolder(place).alone():  # what follows would end another one's processes
        app, outcome = place / "app", place / OUTCOME
        try:
            for old in (app, place / "keys"):  # of as many nodes as there were, and of their time
                shutil.rmtree(old, ignore_errors=True)
            for left in (outcome, place / "superlink.db"):
                left.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(
                f"{place} cannot be written to.",
                got=error.strerror or error,
                do="choose another folder (--out)",
            ) from None
        export(experiment, app)
        with Federation(place, [f"{one} state={state}" for one in configs], secure) as federation:
            run = federation.submit(app, {"out": str(out.absolute()), "resume": resume})
            for one in told:
                watcher.hint(_name(run), one)
            return _follow(federation, run, folder, outcome, experiment.rounds, watcher)


def _follow(
    federation: Federation,
    run: int,
    folder: RunFolder,
    outcome: Path,
    rounds: int,
    watcher: Watcher,
) -> Finished:
    """Show the rounds as they come, until the run has ended.

    The first interrupt goes to the ServerApp, which ends the run after the round at hand.
    """
    watcher.begin(_name(run), rounds, 0)
    with interrupts(watcher.stopping) as stop:
        rows = _watch(federation, run, folder, outcome, watcher, stop)
    said = json.loads(outcome.read_text(encoding="utf-8"))
    watcher.end(_name(run), said["what"] if said["status"] == "failed" else said["status"])
    if said["status"] == "failed":
        raise RunError(said["what"], got=said["got"], do=said["do"])
    return Finished(rows, said["status"], folder.read_run().message)


def _name(run: int) -> str:
    return f"flower run {run}"


def _watch(
    federation: Federation,
    run: int,
    folder: RunFolder,
    outcome: Path,
    watcher: Watcher,
    stop: threading.Event,
) -> list[RoundRecord]:
    """Show the rows as they come, and return them when the run has ended."""
    seen, asked, told = 0, time.monotonic(), False
    while True:
        ended = outcome.exists()  # before the rows are read: what is written by then is seen
        rows = folder.rows() if folder.exists() else []
        for row in rows[seen:]:
            watcher.row(_name(run), row)
        seen = len(rows)
        if ended:
            return rows
        if stop.is_set() and not told:
            told = True
            _interrupt(federation if rows else None)
        if time.monotonic() - asked > LOOK:
            _alive(federation, run, outcome)
            asked = time.monotonic()
        time.sleep(0.2)


def _interrupt(federation: Federation | None) -> None:
    """Pass an interrupt on to the ServerApp.

    Raises:
        KeyboardInterrupt: there is none yet, or none that can be found.
    """
    found = [] if federation is None else federation.started("superlink", "flwr-serverapp")
    if not found:
        raise KeyboardInterrupt
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


def _alive(federation: Federation, run: int, outcome: Path) -> None:
    """Refuse to wait for a run that Flower has given up on.

    Raises:
        RunError: the SuperLink has ended, or the run, without a word of ours.
    """
    link, status = federation.alive("superlink"), "stopped"
    if link:
        try:
            status = federation.status(run)
        except RunError:  # it is slow to answer; the next look may tell more
            return
    if (link and not status.startswith("finished")) or outcome.exists():
        return
    raise RunError(
        "The federation ended before the run did.",
        got=f"{status}: {federation.tail('superlink')}",
        do=f"see the logs in {federation.folder}, then go on with --resume",
    )
