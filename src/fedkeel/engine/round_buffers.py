"""The buffers of a round: a row for each client of the cohort, and the store of client state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedkeel.engine.base import ClientJob, ReportProgress, TrainedCohort, TrainingSetup
from fedkeel.engine.client_states import ClientStates
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.rehearsal import CLIENT_STATE_PREFIX, client_state_spec
from fedkeel.engine.reply_rows import ReplyRows
from fedkeel.engine.spec import TensorSpec
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
        on_nodes: whether clients keep their state themselves, on other machines.
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
        on_nodes: bool = False,
        codec: RowCodec | None = None,
    ) -> None:
        self._sizes, self._on_nodes = setup.federation.sizes, on_nodes
        self.clients = ClientStates(
            len(self._sizes),
            client_state_spec(spec),
            capacity,
            allocate,
            file,
            codec,
            setup.others,
            on_nodes,
        )
        if on_nodes:
            spec = {k: v for k, v in spec.items() if not k.startswith(CLIENT_STATE_PREFIX)}
        self.rows = ReplyRows(setup, spec, capacity, allocate, sums, self.clients.store)

    def train(
        self,
        trainer: Trainer,
        message: Message,
        jobs: Sequence[ClientJob],
        report_progress: ReportProgress = lambda _: None,
    ) -> None:
        """Train clients and write their rows. See `ReplyRows.train`."""
        self.rows.train(trainer, message, jobs, self.clients.store.read, report_progress)

    def answer_survey(self, message: Message, job: ClientJob) -> None:
        """Write one client's answers to the surveys into its row."""
        self.rows.answer_survey(message, job, self.clients.store.read_state(job.client))

    def answers(self, clients: Ints) -> ByPart:
        """Return the answers of a cohort, tensors [K, ...] by part, as views."""
        return self.rows.answers(len(clients))

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
            processor_seconds=None if self._on_nodes else self.rows.processor_seconds(count),
        )
