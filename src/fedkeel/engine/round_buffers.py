"""The buffers of a round: a row for each client of the cohort, and the store of client state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.engine.base import ClientJob, ReportProgress, TrainedCohort, TrainingSetup
from fedkeel.engine.client_checkpoint import checkpoint_arrays, restore_clients
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.rehearsal import CLIENT_STATE_PREFIX, client_state_spec
from fedkeel.engine.reply_rows import ReplyRows
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store import client_store
from fedkeel.engine.store.record import RowCodec
from fedkeel.engine.trainer import Trainer
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.method.round_values import Replies
from fedkeel.tree import substate, substates, tensors


class RoundBuffers:
    """Rows for the replies of a round, and the store of client state.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        capacity: the largest cohort.
        allocate: provides the memory.
        file: file of client state; None keeps it in memory.
        sums: whether updates are added up as they come, where the method allows it.
        away: whether clients keep their state themselves, on other machines.
        codec: stores some of the clients' state in compact form; None stores it as it is.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        allocate: Allocate,
        file: Path | None = None,
        sums: bool = False,
        away: bool = False,
        codec: RowCodec | None = None,
    ) -> None:
        if away:
            spec = {k: v for k, v in spec.items() if not k.startswith(CLIENT_STATE_PREFIX)}
        self._away = away
        self._sizes = setup.federation.sizes
        clients = len(self._sizes)
        self._steps_done = np.zeros(clients, dtype=np.int64)  # [C]
        client_state = client_state_spec(spec)
        self.store = client_store(client_state, clients, allocate, file, capacity, codec)
        self.rows = ReplyRows(setup, spec, capacity, allocate, sums, self.store)

    def train(
        self,
        trainer: Trainer,
        message: Message,
        jobs: Sequence[ClientJob],
        report_progress: ReportProgress = lambda _: None,
    ) -> None:
        """Train clients and write their rows. See `ReplyRows.train`."""
        self.rows.train(trainer, message, jobs, self.store.read, report_progress)

    def answer_survey(self, message: Message, job: ClientJob) -> None:
        """Write one client's answers to the surveys into its row."""
        self.rows.answer_survey(message, job, self.store.read_state(job.client))

    def answers(self, clients: Ints) -> ByPart:
        """Return the answers of a cohort, tensors [K, ...] by part, as views."""
        return self.rows.answers(len(clients))

    def jobs(self, clients: Ints) -> list[ClientJob]:
        """Return a job for each client of the cohort."""
        return [ClientJob(row, int(k), int(self._steps_done[k])) for row, k in enumerate(clients)]

    def begin(self, clients: Ints) -> list[ClientJob]:
        """Return a job for each client of the cohort, and reserve slots for what they will keep."""
        self.store.reserve(clients)
        return self.jobs(clients)

    def gather(self, clients: Ints) -> TrainedCohort:
        """Return the rows of a finished round, as views."""
        count = len(clients)
        state, counts = self.rows.replies(count), self.rows.counts(count)
        replies = Replies(
            clients=clients,
            examples=self._sizes[clients],
            processed=np.array(counts["examples"].numpy()),
            finite=np.array(counts["finite"].numpy()),
            update=tensors(substate(state, "update")),
            buffers=tensors(substate(state, "buffers")),
            uploads=substates(substate(state, "uploads")),
            summed=self.rows.summed,
        )
        diagnostics = tensors(substate(state, "diagnostics"))
        return TrainedCohort(
            replies=replies,
            loss=np.array(counts["loss"].numpy()),
            steps=np.array(counts["steps"].numpy()),
            diagnostics={name: t.double().numpy() for name, t in diagnostics.items()},
            seconds=self.rows.seconds(count),
        )

    def done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""
        return self._steps_done[clients]

    def commit(self, trained: TrainedCohort, keep: Ints) -> None:
        """Take the state that the clients `keep` have written, and add to their steps."""
        clients = trained.replies.clients
        rows = np.flatnonzero(np.isin(clients, keep))
        self.store.commit(clients[rows])
        self._steps_done[clients[rows]] += trained.steps[rows]

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint holds of the clients."""
        return checkpoint_arrays(self.store, self._steps_done, self._away)

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take what a checkpoint holds of the clients."""
        restore_clients(arrays, self.store, self._steps_done, self._away)
