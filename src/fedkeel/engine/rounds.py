"""The buffers of a round: one row for each client of the cohort, whoever trains it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.engine.buffers import Allocate, Buffers, Spec, specs
from fedkeel.engine.loop import survey_client, train_client
from fedkeel.engine.store import client_store
from fedkeel.engine.world import Job, Trained, World
from fedkeel.errors import RunError, TrainingError
from fedkeel.method.client import Reply
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.method.server import Replies, surveyed, with_answers
from fedkeel.tree import State, below, branches, map_tensors, tensors, unwalk

COUNTS = {"loss": torch.float64, "finite": torch.bool, "steps": torch.int64, "seen": torch.int64}


def flat(message: Message) -> State:
    """Return everything that a message sends, as one state."""
    return {
        "params": dict(message.params),
        "buffers": dict(message.buffers),
        "sent": dict(message.sent),
    }


def unflat(state: State, round: int, lr: float) -> Message:
    """Return the message that `flat` made the state of."""
    return Message(
        params=tensors(below(state, "params")),
        buffers=tensors(below(state, "buffers")),
        sent=branches(below(state, "sent")),
        round=round,
        lr=lr,
    )


CLIENTS = "clients/"
"""Where client state stands among the arrays of a checkpoint."""

AWAY = "away"
"""Name in a checkpoint that says that client state lies on other machines."""

SURVEY = "survey/"
"""Where the answers to surveys stand among the specs of a rehearsal."""


def rehearse(world: World, message: Message) -> dict[str, Spec]:
    """Train one step of the first client and throw it away, to learn what a reply looks like.

    Returns:
        Shape and type of each tensor of a reply, by path, and of each answer to a survey.

    Raises:
        TrainingError: what the model, the loss or a part raised.
    """
    first = int(np.flatnonzero(world.federation.sizes)[0])  # a node has the data of its own alone
    job = Job(row=0, client=first, done=0)
    answers: ByPart = {}
    if world.bench.plan.surveys:
        answers = survey_client(world, message, job, None)
        alone = {part: map_tensors(lambda t: t[None], state) for part, state in answers.items()}
        message = surveyed(message, alone, np.ones(1))
    reply, _, _ = train_client(world, message, job, None, limit=1)
    return specs({**_reply(reply), "survey": dict(answers)})


def answered(message: Message, spec: Mapping[str, Spec]) -> Message:
    """Return the message with room for the answers to surveys, which are not known yet."""
    zeros = {
        path.removeprefix(SURVEY): torch.zeros(one.shape, dtype=one.dtype)
        for path, one in spec.items()
        if path.startswith(SURVEY)
    }
    return with_answers(message, branches(unwalk(zeros)))


def _reply(reply: Reply) -> State:
    return {
        "delta": dict(reply.delta),
        "buffers": dict(reply.buffers),
        "uploads": dict(reply.uploads),
        "mine": dict(reply.mine),
        "notes": dict(reply.notes),
    }


class RoundBuffers:
    """Where the replies of a round are written, and client state is kept.

    Args:
        world: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        capacity: the largest cohort.
        allocate: where the memory comes from.
        file: where client state lies; None for memory.
        away: whether clients keep their state themselves, on other machines.
    """

    def __init__(
        self,
        world: World,
        spec: Mapping[str, Spec],
        capacity: int,
        allocate: Allocate,
        file: Path | None = None,
        away: bool = False,
    ) -> None:
        if away:
            spec = {k: v for k, v in spec.items() if not k.startswith("mine/")}
        self._away = away
        counts = {k: Spec((), dtype) for k, dtype in COUNTS.items()}
        asked = {k.removeprefix(SURVEY): v for k, v in spec.items() if k.startswith(SURVEY)}
        spec = {k: v for k, v in spec.items() if not k.startswith(SURVEY)}
        self._asked = asked
        self._answers = Buffers(asked, capacity, allocate)
        self._replies = Buffers(spec, capacity, allocate)
        self._counts = Buffers(counts, capacity, allocate)
        mine = {k.removeprefix("mine/"): v for k, v in spec.items() if k.startswith("mine/")}
        self.store = client_store(mine, len(world.federation), allocate, file)
        self._done = np.zeros(len(world.federation), dtype=np.int64)  # [C] local steps made
        self._sizes = world.federation.sizes
        self._spec = dict(spec)

    def run(self, world: World, message: Message, job: Job) -> None:
        """Train one client and write its row.

        Raises:
            TrainingError: what the model, the loss or a part raised, or a part that sends or keeps
                something else than in the rehearsal.
        """
        self.put(job, *train_client(world, message, job, self.store.get(job.client)))

    def put(self, job: Job, reply: Reply, steps: int, seen: int) -> None:
        """Write one client's row, as `train_client` returned it."""
        state = _reply(reply)
        self._check(specs(state), job.client, self._spec)
        self._replies.write(state, job.row)
        row = (reply.loss, reply.finite, torch.tensor(steps), torch.tensor(seen))
        for name, value in zip(COUNTS, row, strict=True):
            self._counts.tensors[name][job.row] = value

    def ask(self, world: World, message: Message, job: Job) -> None:
        """Write one client's answers to the surveys into its row."""
        self.put_answers(job, survey_client(world, message, job, self.store.get(job.client)))

    def put_answers(self, job: Job, answers: ByPart) -> None:
        """Write one client's answers, as `survey_client` returned them."""
        self._check(specs(dict(answers)), job.client, self._asked)
        self._answers.write(dict(answers), job.row)

    def answers(self, clients: Ints) -> ByPart:
        """Return the answers of a cohort, tensors [K, ...] by part, as views."""
        return branches(self._answers.nested(len(clients)))

    @staticmethod
    def _check(found: dict[str, Spec], client: int, first: dict[str, Spec]) -> None:
        if found == first:
            return
        paths = [p for p in {**first, **found} if found.get(p) != first.get(p)]
        raise TrainingError(
            f"The reply of client {client} has another form than the first one.",
            got=f"{paths[0]}: {found.get(paths[0])}",
            expected=f"{first.get(paths[0])}",
            why="what a part sends, keeps and notes has the same names, shapes and types each time",
        )

    def jobs(self, clients: Ints) -> list[Job]:
        """Return a job for each client of the cohort."""
        return [Job(row, int(k), int(self._done[k])) for row, k in enumerate(clients)]

    def gather(self, clients: Ints) -> Trained:
        """Return the rows of a finished round, as views."""
        k = len(clients)
        state = self._replies.nested(k)
        counts = {name: t[:k] for name, t in self._counts.tensors.items()}
        replies = Replies(
            clients=clients,
            examples=self._sizes[clients],
            processed=np.array(counts["seen"].numpy()),
            finite=np.array(counts["finite"].numpy()),
            delta=tensors(below(state, "delta")),
            buffers=tensors(below(state, "buffers")),
            uploads=branches(below(state, "uploads")),
        )
        notes = tensors(below(state, "notes"))
        return Trained(
            replies=replies,
            mine=branches(below(state, "mine")),
            loss=np.array(counts["loss"].numpy()),
            steps=np.array(counts["steps"].numpy()),
            notes={name: t.double().numpy() for name, t in notes.items()},
        )

    def commit(self, trained: Trained, keep: Ints) -> None:
        """Write the state of the clients `keep` into the store, and add to their steps."""
        clients = trained.replies.clients
        rows = np.flatnonzero(np.isin(clients, keep))
        self.store.put(clients[rows], trained.mine, rows)
        self._done[clients[rows]] += trained.steps[rows]

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint holds of the clients."""
        arrays = {**self.store.snapshot(), "done": self._done[self.store.present]}
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
                do="go on as the run was begun, or choose another folder (--out)",
            )
        self.store.restore(own)
        self._done[:] = 0
        self._done[self.store.present] = own["done"]
