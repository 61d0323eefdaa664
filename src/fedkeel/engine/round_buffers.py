"""The buffers of a round: one row for each client of the cohort, whoever trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.engine.base import Job, Tick, Trained, TrainingSetup
from fedkeel.engine.local import Trainer, sent, survey_client, train_client
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.reply_rows import KEPT, SURVEY, Rows
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store import client_store
from fedkeel.engine.store.record import RowCodec
from fedkeel.errors import RunError
from fedkeel.method import checks
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.method.local_loop import kept
from fedkeel.method.plugins import fingerprint
from fedkeel.method.server_round import Replies, surveyed, with_answers
from fedkeel.records.folder import ANOTHER
from fedkeel.tree import State, map_tensors, substate, substates, tensors, unwalk


def flat(message: Message) -> State:
    """Return everything that a message sends, as one state."""
    return {
        "params": dict(message.params),
        "buffers": dict(message.buffers),
        "broadcast": dict(message.broadcast),
    }


def unflat(state: State, round: int, lr: float) -> Message:
    """Return the message that `flat` made the state of."""
    return Message(
        params=tensors(substate(state, "params")),
        buffers=tensors(substate(state, "buffers")),
        broadcast=substates(substate(state, "broadcast")),
        round=round,
        lr=lr,
    )


CLIENTS = "clients/"
"""Where client state stands among the arrays of a checkpoint."""

AWAY = "away"
"""Name in a checkpoint that says that client state lies on other machines."""


def rehearse(setup: TrainingSetup, message: Message) -> dict[str, TensorSpec]:
    """Train one step of the first client and throw it away, to learn what a reply looks like.

    Returns:
        Shape and type of each tensor of a reply, by path, and of each answer to a survey.

    Raises:
        TrainingError: what the model, the loss or a part raised; or a part of one's own changed in
            place what it had received, or what it had kept.
    """
    own = fingerprint(setup.training.plan.parts)
    if not own or setup.training.network.traits.writes_parameters:
        return specs_of(tried(setup, message))
    received, said = flat(message), f"was changed in place, in {', '.join(own)}"
    before = checks.versions(received)
    found = specs_of(tried(setup, message))
    checks.unchanged(f"What the server sent {said}", before, received)
    client_state, _ = kept(setup.training, message, None)
    before = checks.versions(dict(client_state))
    tried(setup, message, client_state)
    checks.unchanged(f"What a client keeps {said}", before, dict(client_state))
    return found


def tried(setup: TrainingSetup, message: Message, client_state: ByPart | None = None) -> State:
    """Return what the first client sends and keeps after one step, and its answers to surveys.

    Args:
        setup: method, model, data and seed.
        message: what the server sent.
        client_state: what the client kept, None the first time.
    """
    first = int(np.flatnonzero(setup.federation.sizes)[0])  # a node has the data of its own alone
    job = Job(row=0, client=first, done=0)
    answers: ByPart = {}
    if setup.training.plan.surveys:
        answers = survey_client(setup, message, job, client_state)
        alone = map_tensors(lambda t: t[None], dict(answers))
        message = surveyed(message, substates(alone), np.ones(1))
    reply, _, _ = train_client(setup, message, job, client_state, limit=1)
    return {**sent(reply), "survey": dict(answers)}


def kept_spec(spec: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return shape and type of what a client keeps, by path, from those of its reply."""
    return {k.removeprefix(KEPT): v for k, v in spec.items() if k.startswith(KEPT)}


def answered(message: Message, spec: Mapping[str, TensorSpec]) -> Message:
    """Return the message with room for the answers to surveys, which are not known yet."""
    zeros = {
        path.removeprefix(SURVEY): torch.zeros(one.shape, dtype=one.dtype)
        for path, one in spec.items()
        if path.startswith(SURVEY)
    }
    return with_answers(message, substates(unwalk(zeros)))


class RoundBuffers:
    """Where the replies of a round are written, and client state is kept.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        capacity: the largest cohort.
        allocate: where the memory comes from.
        file: where client state lies; None for memory.
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
            spec = {k: v for k, v in spec.items() if not k.startswith(KEPT)}
        self._away = away
        clients = len(setup.federation)
        self.store = client_store(kept_spec(spec), clients, allocate, file, capacity, codec)
        self.rows = Rows(setup, spec, capacity, allocate, sums, self.store)
        self._done = np.zeros(clients, dtype=np.int64)  # [C] local steps made
        self._sizes = setup.federation.sizes

    def run(self, train: Trainer, message: Message, jobs: Sequence[Job], tick: Tick) -> None:
        """Train clients and write their rows. See `Rows.run`."""
        self.rows.run(train, message, jobs, self.store.read, tick)

    def ask(self, message: Message, job: Job) -> None:
        """Write one client's answers to the surveys into its row."""
        self.rows.ask(message, job, self.store.read_state(job.client))

    def answers(self, clients: Ints) -> ByPart:
        """Return the answers of a cohort, tensors [K, ...] by part, as views."""
        return self.rows.answers(len(clients))

    def jobs(self, clients: Ints) -> list[Job]:
        """Return a job for each client of the cohort."""
        return [Job(row, int(k), int(self._done[k])) for row, k in enumerate(clients)]

    def begin(self, clients: Ints) -> list[Job]:
        """Return a job for each client of the cohort, with room for what they will keep."""
        self.store.reserve(clients)
        return self.jobs(clients)

    def gather(self, clients: Ints) -> Trained:
        """Return the rows of a finished round, as views."""
        k = len(clients)
        state, counts = self.rows.replies(k), self.rows.counts(k)
        replies = Replies(
            clients=clients,
            examples=self._sizes[clients],
            processed=np.array(counts["seen"].numpy()),
            finite=np.array(counts["finite"].numpy()),
            update=tensors(substate(state, "update")),
            buffers=tensors(substate(state, "buffers")),
            uploads=substates(substate(state, "uploads")),
            summed=self.rows.summed,
        )
        diagnostics = tensors(substate(state, "diagnostics"))
        return Trained(
            replies=replies,
            loss=np.array(counts["loss"].numpy()),
            steps=np.array(counts["steps"].numpy()),
            diagnostics={name: t.double().numpy() for name, t in diagnostics.items()},
            seconds=self.rows.seconds(k),
        )

    def done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""
        return self._done[clients]

    def commit(self, trained: Trained, keep: Ints) -> None:
        """Take the state that the clients `keep` have written, and add to their steps."""
        clients = trained.replies.clients
        rows = np.flatnonzero(np.isin(clients, keep))
        self.store.commit(clients[rows])
        self._done[clients[rows]] += trained.steps[rows]

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint holds of the clients."""
        arrays = {**self.store.snapshot(), "done": self._done[self.store.has_row]}
        if self._away:
            arrays[AWAY] = np.ones(1, dtype=np.bool_)
        return {CLIENTS + name: array for name, array in arrays.items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take what a checkpoint holds of the clients."""
        own = {k.removeprefix(CLIENTS): v for k, v in arrays.items() if k.startswith(CLIENTS)}
        if (AWAY in own) != self._away:
            raise RunError(
                "The checkpoint does not hold the clients' state that this engine needs.",
                why="in a federation of nodes it lies on the nodes, elsewhere with the run",
                do=f"go on as the run was begun, or {ANOTHER}",
            )
        self.store.restore(own)
        self._done[:] = 0
        self._done[self.store.has_row] = own["done"]
