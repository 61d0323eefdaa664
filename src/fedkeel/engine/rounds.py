"""The buffers of a round: one row for each client of the cohort, whoever trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.engine.buffers import Allocate, Buffers, Spec, specs
from fedkeel.engine.loop import Done, Trainer, sent, survey_client, train_client
from fedkeel.engine.store import client_store
from fedkeel.engine.world import Job, Tick, Trained, World
from fedkeel.errors import RunError, TrainingError
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.method.server import Replies, raw_weights, surveyed, with_answers
from fedkeel.tree import State, Tree, below, branches, map_tensors, tensors, unwalk, walk

COUNTS = {
    "loss": torch.float64,
    "finite": torch.bool,
    "steps": torch.int64,
    "seen": torch.int64,
    "head": torch.int64,
}
"""Numbers about each client's round; `head` is the row that its update was added to."""


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
    return specs({**sent(reply), "survey": dict(answers)})


def answered(message: Message, spec: Mapping[str, Spec]) -> Message:
    """Return the message with room for the answers to surveys, which are not known yet."""
    zeros = {
        path.removeprefix(SURVEY): torch.zeros(one.shape, dtype=one.dtype)
        for path, one in spec.items()
        if path.startswith(SURVEY)
    }
    return with_answers(message, branches(unwalk(zeros)))


def _of_delta(spec: Mapping[str, Spec], wanted: bool) -> dict[str, Spec]:
    return {path: one for path, one in spec.items() if path.startswith("delta/") == wanted}


class RoundBuffers:
    """Where the replies of a round are written, and client state is kept.

    Args:
        world: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        capacity: the largest cohort.
        allocate: where the memory comes from.
        file: where client state lies; None for memory.
        away: whether clients keep their state themselves, on other machines.
        sums: whether updates are added up as they come, where the method allows it.
    """

    def __init__(
        self,
        world: World,
        spec: Mapping[str, Spec],
        capacity: int,
        allocate: Allocate,
        file: Path | None = None,
        away: bool = False,
        sums: bool = False,
    ) -> None:
        if away:
            spec = {k: v for k, v in spec.items() if not k.startswith("mine/")}
        self._away = away
        counts = {k: Spec((), dtype) for k, dtype in COUNTS.items()}
        asked = {k.removeprefix(SURVEY): v for k, v in spec.items() if k.startswith(SURVEY)}
        spec = {k: v for k, v in spec.items() if not k.startswith(SURVEY)}
        self._asked = asked
        self._answers = Buffers(asked, capacity, allocate)
        self._weights = world.bench.plan.weights
        self._summed = sums and world.bench.plan.sums
        self._deltas = Buffers(_of_delta(spec, True), capacity, allocate)  # by client, or by piece
        self._replies = Buffers(_of_delta(spec, False), capacity, allocate)
        self._counts = Buffers(counts, capacity, allocate)
        mine = {k.removeprefix("mine/"): v for k, v in spec.items() if k.startswith("mine/")}
        self.store = client_store(mine, len(world.federation), allocate, file)
        self._done = np.zeros(len(world.federation), dtype=np.int64)  # [C] local steps made
        self._sizes = world.federation.sizes
        self._spec = dict(spec)

    def run(self, train: Trainer, message: Message, jobs: Sequence[Job], tick: Tick) -> None:
        """Train clients and write their rows.

        Where updates are added up, their sum is row `jobs[0].row`.

        Raises:
            TrainingError: what the model, the loss or a part raised, or a part that sends or keeps
                something else than in the rehearsal.
        """
        head = jobs[0].row if jobs else 0
        if self._summed:
            for tensor in self._deltas.tensors.values():
                tensor[head].zero_()
        for done in train(message, jobs, self.store.get):
            self._take(done, head)
            tick(len(done.jobs))

    def _take(self, done: Done, head: int) -> None:
        found = {path: Spec(tuple(t.shape[1:]), t.dtype) for path, t in walk(done.state)}
        self._check(found, done.jobs[0].client, self._spec)
        rows = [job.row for job in done.jobs]
        delta: State = {"delta": below(done.state, "delta")}
        rest = {name: state for name, state in done.state.items() if name != "delta"}
        if self._summed:
            self._add(tensors(below(delta, "delta")), done, head)
        else:
            self._deltas.write(delta, rows)
        self._replies.write(rest, rows)
        heads = [head] * len(rows)
        counts = (done.loss, done.finite, *map(torch.tensor, (done.steps, done.seen, heads)))
        self._counts.write(dict(zip(COUNTS, counts, strict=True)), rows)

    def _add(self, delta: Tree, done: Done, head: int) -> None:
        """Add the updates of clients, those that are finite, to the sum of their piece."""
        sizes = self._sizes[[job.client for job in done.jobs]]
        raw = raw_weights(self._weights, sizes, np.array(done.seen))
        good = np.flatnonzero(done.finite.cpu().numpy())
        for name, rows in delta.items():
            into = self._deltas.tensors[f"delta/{name}"][head]
            if len(rows) == 1:
                if len(good):
                    into.add_(rows[0].to(into.device), alpha=raw[0])
                continue
            if len(good) < len(rows):
                rows = rows[torch.from_numpy(good).to(rows.device)]
            weights = torch.from_numpy(raw[good]).to(rows.device, rows.dtype)
            total = torch.mv(rows.reshape(len(rows), -1).T, weights)
            into.add_(total.view(into.shape).to(into.device))

    def ask(self, world: World, message: Message, job: Job) -> None:
        """Write one client's answers to the surveys into its row."""
        self.put_answers(job, survey_client(world, message, job, self.store.get(job.client)))

    def put_answers(self, job: Job, answers: ByPart) -> None:
        """Write one client's answers, as `survey_client` returned them."""
        self._check(specs(dict(answers)), job.client, self._asked)
        self._answers.write(map_tensors(lambda t: t[None], dict(answers)), [job.row])

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
        delta = tensors(below(self._deltas.nested(k), "delta"))
        if self._summed:
            heads = torch.unique(counts["head"])
            delta = {name: rows[heads] for name, rows in delta.items()}
        replies = Replies(
            clients=clients,
            examples=self._sizes[clients],
            processed=np.array(counts["seen"].numpy()),
            finite=np.array(counts["finite"].numpy()),
            delta=delta,
            buffers=tensors(below(state, "buffers")),
            uploads=branches(below(state, "uploads")),
            summed=self._summed,
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
