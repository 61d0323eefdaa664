"""A run that goes from round to round: training, evaluation, records, checkpoints."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from fedkeel.clock import Clock, shares
from fedkeel.cost.memory import estimate
from fedkeel.data import batches
from fedkeel.data.cohort import Selection, select
from fedkeel.engine.base import Engine, RemoteReport, TrainedCohort
from fedkeel.engine.evaluation import split_examples
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.engine.process.malloc import keeping_freed_memory
from fedkeel.errors import FedkeelError, RunError, TrainingError
from fedkeel.method.context import Message
from fedkeel.method.round_values import RoundResult
from fedkeel.method.server_memory import copy_memory, reset_client_sums
from fedkeel.method.server_round import raw_weights, server_message, server_round
from fedkeel.method.survey import add_mean_answers
from fedkeel.records.folder import Checkpoint, RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord, Status
from fedkeel.runner.checkpoint import packed, unpacked
from fedkeel.runner.early_stopping import Early, least
from fedkeel.runner.engines import make
from fedkeel.runner.evaluate import on_clients, on_test
from fedkeel.runner.interrupts import interrupts
from fedkeel.runner.progress import Watcher
from fedkeel.runner.server_table import ServerTable
from fedkeel.tree import Tree, nbytes


@dataclass(frozen=True, repr=False)
class Result:
    """What a run came to.

    Args:
        record: what ran, and how it ended.
        rows: one a round, round 0 first.
        params: the global model's parameters.
        buffers: its buffers, where they were averaged.
        module: the whole state dict of the user's module with these, frozen parameters and all.
        folder: where it is on disk, None for a run in memory.
    """

    record: RunRecord
    rows: list[RoundRecord]
    params: Tree
    buffers: Tree
    module: Tree
    folder: Path | None = None

    def __repr__(self) -> str:
        record, done = self.record, self.rows[-1].round
        scores = f", best {self.best:.4f}, last {self.last:.4f}" if self.accuracies else ""
        where = "" if self.folder is None else f", in {self.folder}"
        return (
            f"<Result of {record.method}, seed {record.seed}: {record.status}, "
            f"{done} of {record.rounds} rounds{scores}{where}>"
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained model for ``module.load_state_dict(...)``; a copy.

        It has all that the module has: trained and frozen parameters, tied ones under each name,
        and buffers, which are the initial ones where clients' were not averaged.
        """
        return {name: tensor.clone() for name, tensor in self.module.items()}

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(rounds completed, test top-1) of every evaluated round."""
        return [(row.round, row.test.top1) for row in self.rows if row.test is not None]

    @property
    def best(self) -> float:
        """The best test top-1 over rounds, in [0, 1]."""
        return max(top1 for _, top1 in self.accuracies)

    @property
    def last(self) -> float:
        """The test top-1 after the last round, in [0, 1]."""
        return self.accuracies[-1][1]


class Run:
    """A run that goes from round to round.

    Args:
        prepared: the run, checked.
        folder: where it is kept, None for memory only.
        watcher: follows it.
        name: what the watcher is told that it is called.
        engine: what runs the clients in place of an engine on this machine.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder | None,
        watcher: Watcher,
        name: str,
        engine: Engine | None = None,
    ) -> None:
        self._prepared = prepared
        self._given = engine
        self._setup = prepared.setup
        self._settings = prepared.settings
        self._folder = folder
        self._watcher, self._name = watcher, name
        self._server = copy_memory(prepared.server)
        self._rows: list[RoundRecord] = []
        self._whole = True  # false from a server's step until its round is recorded
        sources = len(np.unique(split_examples(self._setup, "test").groups))
        self._early = Early(self._settings.stop, least(self._settings.flower.quorum, sources))
        self._table: ServerTable  # from when it is known where state lives
        self._estimate = estimate(prepared)
        self._saved = time.monotonic()
        self._clock = Clock()

    def execute(self, record: RunRecord, resume: bool) -> Result:
        """Make all rounds that are still to be made, or those until an early end.

        The first interrupt (Ctrl-C, or a polite kill) ends the run after the round at hand, with
        everything saved; a second one ends it at once, and loses that round.

        Args:
            record: what runs; its status is kept up to date on disk.
            resume: whether to go on from the folder's checkpoint.
        """
        status: Status = "finished"
        message = ""
        rounds = self._settings.rounds
        with (
            keeping_freed_memory(),
            interrupts(self._watcher.stopping) as stop,
            self._state(resume) as state,
            ExitStack() as open_now,
        ):
            engine = None
            try:
                made = self._given or make(self._prepared, record.engine, state)
                engine = open_now.enter_context(made)
                file = None if state is None else state / "table.bin"
                plan, population = self._prepared.plan, self._prepared.population
                self._table = ServerTable(plan, self._server.params, population, file)
                self._begin(engine, resume)
                self._watcher.begin(self._name, rounds, self._server.round)
                for told in record.warnings:
                    self._watcher.hint(self._name, told)
                while not (self._server.round >= rounds or self._early.reason or stop.is_set()):
                    self._round(engine)
            except FedkeelError as error:
                with suppress(RunError):  # a full disk, which has been said then
                    ended = self._finish(record, "failed", str(error.what), engine)
                    if isinstance(error, TrainingError):
                        error.result = ended
                raise
            except KeyboardInterrupt:
                with suppress(RunError):
                    self._finish(record, "interrupted", "stopped in the middle of a round", None)
                raise
            if self._server.round < rounds:
                message = self._early.reason or "stopped on request"
                status = "finished" if self._early.reason else "interrupted"
            result = self._finish(record, status, message, engine)
            self._watcher.end(self._name, status)
            return result

    @contextmanager
    def _state(self, resume: bool) -> Iterator[Path | None]:
        """Give the folder of client state, None where it lives in memory.

        A run that has its state on disk leaves it there. Without a run folder it is a temporary
        one.
        """
        folder, on_disk = self._folder, self._prepared.state == "disk"
        if folder is not None:
            yield folder.state if on_disk or (resume and folder.state.exists()) else None
        elif on_disk:
            with tempfile.TemporaryDirectory(prefix="fedkeel-") as aside:
                yield Path(aside)
        else:
            yield None

    def _begin(self, engine: Engine, resume: bool) -> None:
        """Take up the checkpoint, or evaluate the initial model as round 0."""
        saved = self._folder.load() if resume and self._folder else None
        if saved is not None and self._folder is not None:
            if saved.state["key"] != self._prepared.key:
                raise RunError(f"The checkpoint in {self._folder} belongs to another run.")
            self._server = unpacked(saved.arrays, self._server, saved.round)
            engine.restore(saved.arrays)
            self._table.restore(saved.arrays)
            self._rows = self._folder.keep_rows(saved.round)
            for row in self._rows:
                self._early.see(row)
            self._clock = Clock()
            return
        if self._folder is not None:
            self._folder.keep_rows(-1)
        self._clock = Clock()
        test, sources = on_test(engine, self._setup, self._server)
        self._clock.lap("evaluation")
        row = RoundRecord(0, test=test, sources=sources, seconds=self._clock.restart())
        self._early.see(row)
        self._add(row)

    def _round(self, engine: Engine) -> None:
        """Make one round, record it, and save where it is time to."""
        clock = self._clock
        clock.lap("records")  # of the round before
        server, number = self._server, self._server.round + 1
        lr = learning_rate(self._settings, self._setup.training, server.round)
        sizes = self._setup.federation.sizes
        chosen = select(self._settings.cohort, sizes, self._settings.seed, server.round)
        message = server_message(self._prepared.plan, server, lr)
        clock.lap("sampling")
        count = len(chosen.clients)
        done = 0

        def tick(trained: int) -> None:
            nonlocal done
            done += trained
            self._watcher.clients(self._name, done, count)

        if self._prepared.plan.surveys and count:
            message = self._ask(engine, message, chosen)
            clock.lap("train.survey")
        trained = engine.train(message, chosen.clients, tick)
        clock.lap("train")
        self._whole = False  # parts may change in place what they remember
        result = server_round(
            self._prepared.plan,
            server,
            message,
            trained.replies,
            self._prepared.population,
            self._settings.seed,
            self._table.remembered(server.params, trained.replies.clients),
            clock.lap,
        )
        after = result.server
        if (
            trained.remote is not None
            and trained.remote.lost
            and self._prepared.plan.client_sum_parts
        ):
            after = reset_client_sums(self._prepared.plan, after, self._prepared.population)
        self._server = after
        engine.commit(trained, result.clients)
        self._table.put(result)
        clock.lap("server")
        row = self._record(number, lr, chosen, trained, result, message)
        clock.lap("records")
        row = self._evaluated(engine, row)
        clock.lap("evaluation")
        spent = clock.restart()
        training = shares("train", spent.pop("train"), trained.seconds)
        row = replace(row, seconds={**spent, **training})
        self._add(row)
        self._whole = True
        self._watcher.row(self._name, row)
        self._save(engine, due=self._settings.engine.checkpoint_seconds)

    def _evaluated(self, engine: Engine, row: RoundRecord) -> RoundRecord:
        """Return the row of a round with the scores that are due: all of them after the last."""
        setup, server, evaluation = self._setup, self._server, self._settings.evaluation
        last = row.round == self._settings.rounds
        if last or row.round % evaluation.every == 0:
            test, sources = on_test(engine, setup, server)
            row = replace(row, test=test, sources=sources)
        every = evaluation.clients_every
        last = last or self._early.see(row)
        if last or (every and row.round % every == 0):
            row = replace(row, per_client=on_clients(engine, setup, server))
        return row

    def _ask(self, engine: Engine, message: Message, chosen: Selection) -> Message:
        """Return the message with the clients' mean answer to what the method asks them first."""
        plan, local = self._prepared.plan, self._setup.training.local
        sizes, done = self._setup.federation.sizes[chosen.clients], engine.done(chosen.clients)
        spent = [
            batches.count_examples(local, int(n), int(d)) for n, d in zip(sizes, done, strict=True)
        ]
        weights = raw_weights(plan.weights, sizes, np.array(spent))
        return add_mean_answers(message, engine.survey(message, chosen.clients), weights)

    def _record(
        self,
        number: int,
        lr: float,
        chosen: Selection,
        trained: TrainedCohort,
        result: RoundResult,
        message: Message,
    ) -> RoundRecord:
        """Return the row of a round, without scores and seconds."""
        kept = ~np.isin(trained.replies.clients, result.excluded)
        selected = len(chosen.clients) + len(chosen.dropped)
        replied = trained.replies.clients
        silent = np.setdiff1d(chosen.clients, replied)
        account = trained.remote or self._account(message, selected, len(replied))
        losses = trained.loss[kept]
        diagnostics = {
            k: float(v[kept].mean()) for k, v in trained.diagnostics.items() if kept.any()
        }
        return RoundRecord(
            round=number,
            lr=lr,
            clients=[int(k) for k in trained.replies.clients[kept]],
            dropped=sorted(int(k) for k in (*chosen.dropped, *silent)),
            excluded=result.excluded,
            examples=int(trained.replies.processed.sum()),
            steps=int(trained.steps.sum()),
            train_loss=float(losses.mean()) if len(losses) else None,
            bytes_down=account.down,
            bytes_up=account.up,
            diagnostics={**diagnostics, **result.diagnostics},
            faults=account.faults,
        )

    def _account(self, message: Message, selected: int, replied: int) -> RemoteReport:
        """Return what was sent, where every client receives and sends the same."""
        down = {"model": nbytes(dict(message.params)) + nbytes(dict(message.buffers))}
        down.update({part: nbytes(state) for part, state in message.broadcast.items()})
        return RemoteReport(
            down={part: n * selected for part, n in down.items()},
            up={part: n * replied for part, n in self._estimate.up.items()},
            faults={},
            lost=[],
        )

    def _add(self, row: RoundRecord) -> None:
        if self._folder is not None:
            self._folder.append(row)
        self._rows.append(row)

    def _save(self, engine: Engine, due: float) -> None:
        """Save a checkpoint if the last one is `due` seconds old.

        Nothing is saved of a round that is begun and not recorded, or before there is anything:
        what is there already would be lost.
        """
        if self._folder is None or time.monotonic() - self._saved < due:
            return
        if not self._rows or not self._whole:
            return
        arrays = {**packed(self._server), **engine.state(), **self._table.snapshot()}
        self._folder.save(Checkpoint(self._server.round, arrays, {"key": self._prepared.key}))
        engine.saved()
        self._table.saved()
        self._saved = time.monotonic()

    def _finish(
        self, record: RunRecord, status: Status, message: str, engine: Engine | None
    ) -> Result:
        """Save, write how the run ended, and return the result."""
        if engine is not None:
            self._save(engine, due=0.0)
            if engine.reasons:
                reasons = list(dict.fromkeys([*record.engine.reasons, *engine.reasons]))
                record = replace(record, engine=replace(record.engine, reasons=reasons))
        record = replace(record, status=status, message=message)
        folder = self._folder
        server = self._server
        module = self._setup.training.network.state_dict(server.params, server.buffers)
        if folder is not None:
            if status == "finished":
                folder.save_model({name: tensor.numpy() for name, tensor in module.items()})
            folder.write_run(record)
            if status == "finished":
                shutil.rmtree(folder.state, ignore_errors=True)
        path = folder.path if folder else None
        return Result(record, self._rows, server.params, server.buffers, module, path)
