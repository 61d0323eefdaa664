"""A run in a federation on this machine: started, followed to its end, and cleaned up."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.common.config import parse_config_args

from fedkeel.base.named_files import expanded, writing
from fedkeel.config import Experiment
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import RunError
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.flower.export import export
from fedkeel.flower.local.processes import FlowerProcesses, quoted
from fedkeel.flower.node.configuration import make_node
from fedkeel.flower.protocol import NodeDescription
from fedkeel.flower.server.placeholder import placeholder
from fedkeel.flower.server.serve import OUTCOME, RunEnd
from fedkeel.records.folder import ANOTHER, RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import MetricInfo
from fedkeel.records.trust import mark_as_made_here
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.warnings import find_warnings

STATUS_SECONDS = 10.0
"""Time between questions to Flower whether the run is still alive. They are slow to answer."""


FINISHED_BEFORE = "this run had finished before; for a new one choose another folder (--out)"


@dataclass(frozen=True)
class FederationResult:
    """The result of a run.

    Args:
        rows: its rounds.
        status: "finished", "interrupted" or "failed".
        message: why it ended before its last round, or that it had finished before, else "".
    """

    rows: list[RoundRecord]
    status: str
    message: str = ""


def shared_configs(nodes: int) -> list[str]:
    """Return the configuration of nodes that share the clients of an experiment.

    >>> shared_configs(2)
    ['partition-id=0 num-partitions=2', 'partition-id=1 num-partitions=2']
    """
    return [f"partition-id={i} num-partitions={nodes}" for i in range(nodes)]


def data_configs(sources: Sequence[str]) -> list[str]:
    """Return the configuration of nodes with data of their own: paths, or import paths."""
    texts = [source if ":" in source else str(expanded(source).absolute()) for source in sources]
    configs = shared_configs(len(sources))
    return [f"{config} data={quoted(text)}" for config, text in zip(configs, texts, strict=True)]


def run_locally(
    experiment: Experiment,
    out: Path,
    configs: Sequence[str],
    display: ProgressDisplay,
    resume: bool = False,
    secure: bool = False,
) -> FederationResult:
    """Make a run in a federation of processes on this machine.

    Logs, the app and the clients' states are in the folder ``flower`` of the run.

    Args:
        experiment: what runs.
        out: the run folder.
        configs: the configuration of each SuperNode, see `shared_configs` and `data_configs`.
        display: shows the progress.
        resume: whether to go on with an unfinished run that is there.
        secure: whether to use TLS and node keys, as a federation of several machines does.

    Raises:
        FedkeelError: the run cannot start (where the experiment shows that, no process is started);
            or it could not go on.
    """
    folder = RunFolder(out)
    is_new = not folder.exists()
    if folder.exists() and not resume and folder.read_run().status != "finished":
        raise RunError(
            f"{out} holds an unfinished run.",
            do="add --resume to go on with it, or choose another folder (--out)",
        )
    flower_folder = out.absolute() / "flower"
    state = quoted(str(flower_folder / "state"))
    warnings: list[str] = []
    if is_on_nodes(experiment):
        said: dict[int, NodeDescription] = {}
        for client, config in enumerate(configs):
            node = make_node(experiment, parse_config_args([config]))
            said[client] = NodeDescription.read(node.describe())
            warnings += node.prepared.setup.federation.data.warnings
        prepared = prepare(experiment, placeholder(experiment, said))
    else:
        prepared = prepare(experiment, gather(experiment))
    if folder.exists():
        before = folder.read_run()
        if before.status == "finished" and before.key == prepared.key:
            return FederationResult(folder.rows(), "finished", FINISHED_BEFORE)
    warnings += find_warnings(replace(prepared, on_nodes=True))
    score = prepared.setup.metrics.score
    with RunFolder(flower_folder).alone():  # what follows would end another command's processes
        app = flower_folder / "app"
        _remove_leftovers(flower_folder)
        export(experiment, app)
        configs = [f"{config} state={state}" for config in configs]
        with FlowerProcesses(flower_folder, configs, secure) as federation:
            run = federation.submit(app, {"out": str(out.absolute()), "resume": resume})
            for warning in warnings:
                display.warn(f"flower run {run}", warning)
            try:
                follower = _Follower(federation, run, folder, display)
                return follower.follow(experiment.rounds, score)
            finally:
                if is_new:  # by the files here, which the app has copies of
                    mark_as_made_here(out, experiment)


def _remove_leftovers(folder: Path) -> None:
    """Remove what an earlier run has left and this one makes anew, for another number of nodes."""
    with writing(f"{folder} cannot be written to.", ANOTHER):
        for name in ("app", "keys"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (OUTCOME, "superlink.db"):
            (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Follower:
    """Follows a run, known by Flower's number, through its folder, and displays its progress."""

    federation: FlowerProcesses
    run: int
    folder: RunFolder
    display: ProgressDisplay

    @property
    def _name(self) -> str:
        return f"flower run {self.run}"

    @property
    def _has_ended(self) -> bool:
        return (self.federation.folder / OUTCOME).exists()

    def follow(self, rounds: int, score: MetricInfo) -> FederationResult:
        """Show the rounds as they come, and return the result when the run has ended.

        Args:
            rounds: T.
            score: the metric that is shown.

        Raises:
            RunError: the run has failed.
        """
        self.display.begin(self._name, rounds, 0, score)
        with interrupts(self.display.stopping) as stop:
            rows = self._wait(stop)
        outcome = RunEnd.read(self.federation.folder)
        has_failed = outcome.status == "failed"
        self.display.end(self._name, outcome.what if has_failed else outcome.status)
        if has_failed:
            raise RunError(outcome.what, got=outcome.got, do=outcome.do)
        return FederationResult(rows, outcome.status, self.folder.read_run().message)

    def _wait(self, stop: threading.Event) -> list[RoundRecord]:
        """Show the rows as they come, and return all of them when the run has ended.

        The first interrupt goes to the ServerApp, which ends the run after the current round.
        """
        shown, last_check, is_told = 0, time.monotonic(), False
        reported: set[str] = set()
        while True:
            has_ended = self._has_ended  # before the rows are read, so that none is missed
            rows = self.folder.rows() if self.folder.exists() else []
            for row in rows[shown:]:
                self.display.row(self._name, row)
            shown = len(rows)
            if has_ended:
                return rows
            if stop.is_set() and not is_told:
                is_told = True
                self._interrupt(has_rows=bool(rows))
            for name in set(self.federation.ended_nodes()) - reported:
                reported.add(name)
                self._report_ended(name)
            if time.monotonic() - last_check > STATUS_SECONDS:
                self._check_alive()
                last_check = time.monotonic()
            time.sleep(0.2)

    def _interrupt(self, has_rows: bool) -> None:
        """Pass an interrupt on to the ServerApp.

        Raises:
            KeyboardInterrupt: no ServerApp is at work on rounds yet, or none is found.
        """
        pids = self.federation.find("superlink", "flwr-serverapp") if has_rows else []
        if not pids:
            raise KeyboardInterrupt
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _report_ended(self, node: str) -> None:
        """Say that a SuperNode has ended, to the user and to Flower, and end its helpers."""
        last = self.federation.tail(node, 1)
        self.display.warn(self._name, f"the SuperNode {node} has ended; its log ends with: {last}")
        self.federation.stop(node)
        with suppress(RunError):  # Flower notices by itself, later
            self.federation.unregister(node)

    def _check_alive(self) -> None:
        """Check that Flower has not given up on the run.

        Raises:
            RunError: the SuperLink has ended, or the run without an outcome.
        """
        is_alive, status = self.federation.is_alive("superlink"), "stopped"
        if is_alive:
            try:
                status = self.federation.status(self.run)
            except RunError:  # it is slow to answer; the next check may tell more
                return
        if (is_alive and not status.startswith("finished")) or self._has_ended:
            return
        raise RunError(
            "The federation ended before the run did.",
            got=f"{status}: {self.federation.tail('superlink')}",
            do=f"see the logs in {self.federation.folder}, then go on with --resume",
        )
