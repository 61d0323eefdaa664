"""The run: round by round, each sampled, trained, aggregated, evaluated and recorded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from fedkeel.base.clock import Clock, shares
from fedkeel.data.cohort import Selection
from fedkeel.engine.base import TrainedCohort, TrainingEngine
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.engine.process.idle_threads import let_idle_threads_sleep
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.engine.process.malloc import keeping_freed_memory
from fedkeel.errors import FedkeelError, RunError, TrainingError
from fedkeel.method.context import Message
from fedkeel.method.round_values import RoundResult
from fedkeel.method.server_memory import copy_memory, reset_client_sums
from fedkeel.method.server_round import server_message, server_round
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord, Status
from fedkeel.runner.callbacks import Callback, CallbackList, GlobalModel, RunInfo
from fedkeel.runner.checkpoint import Checkpoints
from fedkeel.runner.engines import make, server_device, state_folder
from fedkeel.runner.evaluate import judged
from fedkeel.runner.feature_hooks import concluded, recorded, timed
from fedkeel.runner.features import hooks_of
from fedkeel.runner.finish import ended, finish, server_on_processor
from fedkeel.runner.result import Result
from fedkeel.runner.round_record import round_record
from fedkeel.runner.server_table import ServerTable
from fedkeel.runner.training import Training


class RoundLoop:
    """One run, made round by round.

    Args:
        prepared: the run, checked.
        record: what runs.
        folder: the run folder, None to stay in memory.
        callbacks: follow the run.
        engine: runs the clients in place of an engine on this machine.
    """

    def __init__(
        self,
        prepared: Prepared,
        record: RunRecord,
        folder: RunFolder | None = None,
        callbacks: Iterable[Callback] = (),
        engine: TrainingEngine | None = None,
    ) -> None:
        self._prepared, self._record, self._folder = prepared, record, folder
        self._settings, self._setup, self._plan = prepared.settings, prepared.setup, prepared.plan
        self._user_engine = engine
        hooks = hooks_of(prepared)
        self._callbacks = CallbackList([*hooks, *callbacks])
        self._training = Training(prepared, self._callbacks, hooks, engine)
        self._schedule = self._training.schedule
        self._hooks = [*hooks, self._schedule]
        self._server = copy_memory(prepared.server)
        self._rows: list[RoundRecord] = []
        self._stop_reason = ""
        self._is_recorded = True  # false from a server's step until the record of its round
        self._clock = Clock()
        self._table: ServerTable  # from when it is known where state lives
        self._checkpoints: Checkpoints | None = None  # None before the engine runs, and in memory

    def make(self, resume: bool = False) -> Result:
        """Make all rounds that are left, or those until an early end.

        The first interrupt (Ctrl-C, or SIGTERM) ends the run after the round at hand, with
        everything saved. A second one ends it at once and loses that round.

        Args:
            resume: whether to go on from the folder's checkpoint.
        """
        rounds = self._settings.rounds
        folder = state_folder(self._prepared, self._folder, resume)
        let_idle_threads_sleep()
        with keeping_freed_memory(), interrupts() as stop, folder as state, ExitStack() as stack:
            engine = None
            try:
                made = self._user_engine or make(self._prepared, self._record.engine, state)
                engine = stack.enter_context(made)
                self._begin(engine, state, resume)
                while not (self._server.round >= rounds or self._stop_reason or stop.is_set()):
                    self._round(engine)
            except KeyboardInterrupt:
                self._checkpoints = None  # the end has to come at once
                self._end("interrupted", "stopped in the middle of a round", None, lenient=True)
                raise
            except Exception as error:
                what = error.what if isinstance(error, FedkeelError) else ""
                message = what or f"{type(error).__name__}: {error}"
                result = self._end("failed", message, engine, lenient=True)
                if isinstance(error, TrainingError):
                    error.result = result
                raise
            if self._server.round >= rounds or self._stop_reason:
                early = self._stop_reason if self._server.round < rounds else ""
                return self._end("finished", early, engine)
            return self._end("interrupted", "stopped on request", engine)

    def _begin(self, engine: TrainingEngine, state: Path | None, resume: bool) -> None:
        """Restore the checkpoint, or evaluate the initial model as round 0."""
        file = None if state is None else state / "table.bin"
        count, largest = self._prepared.population.clients, self._prepared.largest_cohort
        self._table = ServerTable(self._plan, self._server.params, count, largest, file)
        saved = None
        if self._folder is not None:
            key = self._prepared.key
            keepers = engine, self._table, self._hooks
            self._checkpoints = Checkpoints(self._folder, key, *keepers, self._record.earlier_keys)
            saved = self._checkpoints.restore(self._server) if resume else None
            if self._checkpoints.damaged:
                text = f"{self._checkpoints.damaged}; the run went on from the one before"
                self._record = replace(self._record, warnings=[*self._record.warnings, text])
        self._clock = Clock()
        if saved is not None:
            self._server, self._rows = saved
        self._server = self._server.on(server_device(self._prepared, engine, self._record.engine))
        if saved is None:
            if self._folder is not None:
                self._folder.keep_rows(-1)
            row = recorded(self._hooks, RoundRecord(0))
            row = judged(self._hooks, row, engine, self._prepared, self._server)
            self._clock.lap("evaluation")
            self._add(timed(self._hooks, replace(row, seconds=self._clock.restart())))
        for row in self._rows:
            self._stop_reason = self._callbacks.stop_reason(row)
        self._callbacks.on_run_begin(RunInfo(self._record, self._server.round))
        if saved is None and self._rows[0].test is not None:
            self._callbacks.on_evaluation(self._rows[0], self._model())

    def _round(self, engine: TrainingEngine) -> None:
        """Make one round, record it, and save where it is time to."""
        clock, plan, server = self._clock, self._plan, self._server
        clock.lap("records")  # of the round before
        lr = learning_rate(self._settings, self._setup.training, server.round)
        message = server_message(plan, server, lr)
        cohort = self._training.due(message)
        clock.lap(self._schedule.phase)
        if plan.surveys and len(cohort.clients):
            message = self._training.survey(engine, message, cohort)
            clock.lap("train.survey")
        self._is_recorded = not self._schedule.counts_at_once
        trained = self._training.train(engine, server, message, cohort)
        clock.lap("train")
        self._is_recorded = False  # parts may change their state in place
        result = server_round(
            plan,
            server,
            message,
            trained.replies,
            self._prepared.population,
            self._prepared.server_seed,
            self._table.remembered(server.params, trained.replies.clients),
            clock.lap,
        )
        self._server = result.server
        if trained.remote is not None and trained.remote.lost and plan.client_sum_parts:
            self._server = reset_client_sums(plan, result.server, self._prepared.population)
        for each in self._hooks:
            each.after_server_step(engine, message, trained, result, self._rows, clock.lap)
        self._training.commit(engine, trained, result.clients, result.server.round)
        self._table.put(result)
        clock.lap("server")
        self._record_round(engine, cohort, message, trained, result)
        if self._checkpoints is not None:
            self._checkpoints.save(self._server, self._settings.engine.checkpoint_seconds)

    def _record_round(
        self,
        engine: TrainingEngine,
        cohort: Selection,
        message: Message,
        trained: TrainedCohort,
        result: RoundResult,
    ) -> None:
        """Evaluate the round, add its row, and call the callbacks."""
        bytes_up = None if self._prepared.is_baseline else self._record.estimate.up
        row = round_record(cohort, message, trained, result, self._plan, bytes_up)
        row = recorded(self._hooks, row)
        self._clock.lap("records")
        row = self._evaluate(engine, row)
        self._clock.lap("evaluation")
        seconds = self._clock.restart()
        training = shares("train", seconds.pop("train"), trained.seconds)
        row = timed(self._hooks, replace(row, seconds={**seconds, **training}))
        self._add(row)
        self._is_recorded = True
        model = self._model()
        if row.test is not None or row.per_client is not None:
            self._callbacks.on_evaluation(row, model)
        self._callbacks.on_round_end(row, model)

    def _evaluate(self, engine: TrainingEngine, row: RoundRecord) -> RoundRecord:
        """Return the row with the scores that are due: all of them after the last round."""
        is_last = row.round == self._settings.rounds
        if is_last or row.round % self._settings.evaluation.every == 0:
            row = judged(self._hooks, row, engine, self._prepared, self._server)
        self._stop_reason = self._callbacks.stop_reason(row)
        is_end = is_last or bool(self._stop_reason)
        return concluded(self._hooks, row, engine, self._server, is_end)

    def _model(self) -> GlobalModel:
        return GlobalModel(self._setup.training.network, self._server.params, self._server.buffers)

    def _add(self, row: RoundRecord) -> None:
        if self._folder is not None:
            self._folder.append(row)
        self._rows.append(row)

    def _end(
        self, status: Status, message: str, engine: TrainingEngine | None, lenient: bool = False
    ) -> Result:
        """Save the run and tell the callbacks; `lenient` after an error, which matters more."""
        self._server, is_lost = server_on_processor(self._server, lenient)
        self._checkpoints = None if is_lost else self._checkpoints
        self._record = ended(self._record, status, message, engine, self._hooks)
        server = self._server
        result = Result(
            self._record,
            self._rows,
            server.params,
            server.buffers,
            self._prepared.state_dict(server),
            self._folder.path if self._folder else None,
            {name: model for each in self._hooks for name, model in each.models().items()},
        )
        with suppress(RunError) if lenient else ExitStack():
            if self._checkpoints is not None and self._rows and self._is_recorded:
                self._checkpoints.save(server)
            result = finish(result, self._folder, self._prepared, server, engine, self._hooks)
            self._record = result.record
        self._callbacks.on_run_end(result)
        return result
