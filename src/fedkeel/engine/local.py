"""One client's round, and one shard of an evaluation, as every engine means them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedkeel.clock import Clock
from fedkeel.data import batches
from fedkeel.data.augment import crop_flip, crops
from fedkeel.engine.base import Job, Split, TrainingSetup
from fedkeel.engine.store.record import ClientRecord
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method import checks
from fedkeel.method.context import ByPart, ClientInfo, Ints, Message, of
from fedkeel.method.local_loop import (
    Client,
    Progress,
    Reply,
    client_finish,
    client_start,
    client_step,
    client_survey,
)
from fedkeel.method.roles import Capability
from fedkeel.rng import generator, generators, torch_seed
from fedkeel.task import metrics
from fedkeel.task.network import Batch
from fedkeel.tree import State, Tree, map_tensors, substate

PHASES = ("data", "steps", "upload")
"""Phases of a client's round: which examples and the examples themselves; what is done before the
first step, and the steps; what is done after the last one, and writing the reply."""


@torch.no_grad()
def train_client(
    setup: TrainingSetup,
    message: Message,
    job: Job,
    client_state: ByPart | None,
    limit: int | None = None,
    clock: Clock | None = None,
) -> tuple[Reply, int, int]:
    """Run one client's round.

    Args:
        setup: method, model, data and seed.
        message: what the server sent.
        job: the client.
        client_state: what the client kept, None the first time.
        limit: at most so many steps; for a rehearsal.
        clock: counts the seconds of each of `PHASES`.

    Returns:
        The reply, the number of steps and the number of examples processed.

    Raises:
        TrainingError: what the model, the loss or a part raised, with client, step and part.
    """
    clock = clock or Clock()
    rows = setup.federation.client(job.client)
    planned = plans(setup, message, [job])[0][:limit]
    clock.lap("data")
    at = 0
    try:
        with torch.random.fork_rng(devices=[]):
            seed(torch_seed(setup.seed, "torch", message.round, job.client))
            client, progress, used = _begin(setup, message, job, client_state, rows, planned)
            checks.states("prepares", client.prepared)
            checks.states("carries from step to step", progress.carry)
            augment = generator(setup.seed, "augment", message.round, job.client)
            normal = noise(setup, message, job.client)
            turn = passes(setup, job, planned)
            clock.lap("steps")
            for at, positions in enumerate(planned, start=1):
                batch = _batch(setup, rows[positions])
                if setup.augment:
                    where = crops(augment, len(batch.y))
                    batch = Batch(crop_flip(batch.x, where), batch.y)
                clock.lap("data")
                first = planned[(at - 1) % turn]
                places = _places(used, positions), _places(used, first)
                progress = client_step(client, progress, batch, *places, noise=normal())
                clock.lap("steps")
            reply = client_finish(client, progress, len(planned))
            checks.states("keeps for a client", reply.client_state)
            if (
                client_state is None
            ):  # later ones are compared with the first reply, see `engine.rows`
                checks.same_form("keeps for a client", client.client_state, reply.client_state)
            clock.lap("upload")
            return reply, len(planned), sum(len(positions) for positions in planned)
    except FedkeelError:
        raise
    except Exception as error:
        raise _named(error, job.client, at) from error


def seed(number: int) -> None:
    """Seed what a module draws from, its own dropout or noise.

    `torch.manual_seed` also notes, for each kind of accelerator that is not in use, who called it:
    that takes longer than a step of a small network.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


def carry_on(source: torch.Generator) -> None:
    """Let what torch draws follow what a generator has drawn."""
    if source.device.type == "cuda":
        torch.cuda.set_rng_state(source.get_state(), source.device)
    else:
        torch.default_generator.set_state(source.get_state())


def plans(setup: TrainingSetup, message: Message, jobs: Sequence[Job]) -> list[list[Ints]]:
    """Return the positions, within a client's examples, of its round's mini-batches, of each."""
    local, sizes = setup.training.local, setup.federation.sizes
    streams: Sequence[np.random.Generator | None] = [None] * len(jobs)
    if batches.draws_each_round(local):
        clients = [job.client for job in jobs]
        streams = generators(setup.seed, "batches", message.round, clients)
    return [
        batches.plan(
            local, int(sizes[one.client]), setup.seed, message.round, one.client, one.done, stream
        )
        for one, stream in zip(jobs, streams, strict=True)
    ]


def passes(setup: TrainingSetup, job: Job, planned: list[Ints]) -> int:
    """Return the number of mini-batches in a client's first pass over its examples this round."""
    size = int(setup.federation.sizes[job.client])
    return max(1, min(len(planned), batches.batches_per_pass(setup.training.local, size)))


def _begin(
    setup: TrainingSetup,
    message: Message,
    job: Job,
    client_state: ByPart | None,
    rows: Ints,
    planned: list[Ints],
) -> tuple[Client, Progress, Ints | None]:
    """Start the client; where a part prepares, also return the distinct positions it needs."""
    used = np.unique(np.concatenate(planned)) if setup.training.plan.preparations else None

    def everything() -> Batch:
        return _batch(setup, rows)

    def examples() -> Batch:
        return _batch(setup, rows if used is None else rows[used])

    client, progress = client_start(
        setup.training, message, client_state, client_info(setup, job.client), everything, examples
    )
    return client, progress, used


@torch.no_grad()
def survey_client(
    setup: TrainingSetup, message: Message, job: Job, client_state: ByPart | None
) -> ByPart:
    """Return a client's answers to the surveys, by part, before it trains. See `train_client`.

    Raises:
        TrainingError: what the model, the loss or a part raised, with client and part.
    """
    rows = setup.federation.client(job.client)
    try:
        with torch.random.fork_rng(devices=[]):
            seed(torch_seed(setup.seed, "survey", message.round, job.client))
            about = client_info(setup, job.client)
            everything = partial(_batch, setup, rows)
            asked = _unanswered(message)  # there may be room for them, with the last round's
            answers = client_survey(setup.training, asked, client_state, about, everything)
            checks.states("answers to its survey", answers)
            return answers
    except FedkeelError:
        raise
    except Exception as error:
        raise _named(error, job.client, 0) from error


def _unanswered(message: Message) -> Message:
    """Return the message as it is before clients have answered, in whatever memory it lies."""
    told = {
        k: {n: v for n, v in of(message.broadcast, k).items() if n != "survey"}
        for k in message.broadcast
    }
    return replace(message, broadcast=told)


def client_info(setup: TrainingSetup, client: int) -> ClientInfo:
    """Return what a client knows about itself, as far as the method needs it."""
    rows = setup.federation.client(client)
    if Capability.CLASS_COUNTS not in setup.training.plan.needs:
        return ClientInfo(client, len(rows))
    data = setup.federation.data
    counts = torch.bincount(data.y[torch.from_numpy(rows)], minlength=data.classes)
    return ClientInfo(client, len(rows), counts)


def noise(setup: TrainingSetup, message: Message, client: int) -> Callable[[], Tree | None]:
    """Return what gives standard normal numbers of the model's shapes, fresh in every step."""
    if Capability.NOISE not in setup.training.plan.needs:
        return lambda: None
    source = torch.Generator().manual_seed(torch_seed(setup.seed, "noise", message.round, client))
    return lambda: {
        k: torch.randn(v.shape, generator=source, dtype=v.dtype) for k, v in message.params.items()
    }


def _batch(setup: TrainingSetup, rows: Ints) -> Batch:
    data = setup.federation.data
    index = torch.from_numpy(rows)
    return Batch(data.x[index], data.y[index])


def _places(used: Ints | None, positions: Ints) -> Tensor | None:
    """Return where the positions stand among the distinct ones."""
    return None if used is None else torch.from_numpy(np.searchsorted(used, positions))


@dataclass(frozen=True)
class Done:
    """Clients that have ended their round.

    Args:
        jobs: the n clients.
        state: what they send and log, tensors [n, ...] by ``update``, ``buffers``, ``uploads`` and
            ``diagnostics``.
        client_state: what they keep, tensors [n, ...].
        loss: [n] mean recorded loss of each.
        finite: [n] whether everything that each sends is finite.
        steps: local steps that each made.
        seen: examples that each processed.
        seconds: by phase of `PHASES`, of all of them together.
        added: whether ``update`` [1, ...] is the sum of their updates, by their raw weights.
    """

    jobs: Sequence[Job]
    state: State
    client_state: ClientRecord
    loss: Tensor
    finite: Tensor
    steps: Sequence[int]
    seen: Sequence[int]
    seconds: Mapping[str, float] = field(default_factory=dict)
    added: bool = False


ReadRecord = Callable[[int], ClientRecord | None]
"""Client -> what it kept from its last round, None the first time."""


class Trainer(Protocol):
    """Trains clients from a message, in any order."""

    @property
    def parallel_clients(self) -> int:
        """Clients that are trained at once, at most."""

    @property
    def placed(self) -> TrainingSetup:
        """Method, model and data where they are used, on a GPU, say."""

    @property
    def reasons(self) -> list[str]:
        """Why clients are trained in a plainer way than was asked for, as far as it is known."""

    def __call__(
        self, message: Message, jobs: Sequence[Job], kept: ReadRecord, sums: bool = False
    ) -> Iterator[Done]:
        """Train clients; with `sums`, their updates may come added up."""


class SequentialTrainer:
    """A `Trainer` that trains one client after the other: the definition of correct.

    Args:
        setup: method, model, data and seed.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self.placed = setup
        self.parallel_clients = 1
        varies = setup.training.network.traits.why_calls_differ
        self.reasons = [varies] if varies else []

    def __call__(
        self, message: Message, jobs: Sequence[Job], kept: ReadRecord, sums: bool = False
    ) -> Iterator[Done]:
        """Train clients from a message."""
        for job in jobs:
            clock = Clock()
            record = kept(job.client)
            client_state = None if record is None else record.state
            reply, steps, seen = train_client(self.placed, message, job, client_state, clock=clock)
            yield ended(job, reply, steps, seen, clock.seconds)


def ended(
    job: Job, reply: Reply, steps: int, seen: int, seconds: Mapping[str, float] | None = None
) -> Done:
    """Return one client's reply with a leading axis of length 1."""
    state = map_tensors(lambda t: t[None], sent(reply))
    client_state = ClientRecord.of(substate(state, "client_state"))
    return Done(
        jobs=[job],
        state={k: v for k, v in state.items() if k != "client_state"},
        client_state=client_state,
        loss=reply.loss[None],
        finite=reply.finite[None],
        steps=[steps],
        seen=[seen],
        seconds=seconds or {},
    )


def sent(reply: Reply) -> State:
    """Return what a client sends, keeps and notes, as one state."""
    return {
        "update": dict(reply.update),
        "buffers": dict(reply.buffers),
        "uploads": dict(reply.uploads),
        "client_state": dict(reply.client_state),
        "diagnostics": dict(reply.diagnostics),
    }


def _named(error: Exception, client: int, step: int) -> TrainingError:
    """Return an error that says at which client and step, and in which part, it happened."""
    when = f"step {step}" if step else "before its first step"
    return checks.training_error(f"Training failed at client {client}, {when}", error)


def evaluated(setup: TrainingSetup, split: Split) -> tuple[Ints | None, Ints, int]:
    """Return what an evaluation looks at.

    Returns:
        [N] rows of the training set, None for the whole test set; [N] group of each example: its
        source, or its client; and the number of groups.
    """
    federation = setup.federation
    if split == "test":
        return None, setup.test.source_ids, len(setup.test.sources)
    if federation.holdout_rows is None or federation.holdout_offsets is None:
        return federation.rows, federation.client_of_row(), len(federation)
    sizes = np.diff(federation.holdout_offsets)
    return federation.holdout_rows, np.repeat(np.arange(len(federation)), sizes), len(federation)


def examples(setup: TrainingSetup, split: Split) -> int:
    """Return N, the number of examples of a split."""
    return len(evaluated(setup, split)[1])


def evaluate_shard(
    setup: TrainingSetup, params: Tree, buffers: Tree, split: Split, start: int
) -> Tensor:
    """Return [n, 3] of the examples from `start` on, at most `setup.shard` of them.

    A module that draws in evaluation too draws the same for them each time, wherever that is.
    """
    rows, group, _ = evaluated(setup, split)
    part = slice(start, start + setup.shard)
    if rows is None:
        x, y = setup.test.x[part].clone(), setup.test.y[part]  # see shared_memory.ALIGNMENT
    else:
        index = torch.from_numpy(rows[part])
        x, y = setup.federation.data.x[index], setup.federation.data.y[index]
    with torch.random.fork_rng(devices=[]):
        seed(torch_seed(setup.seed, f"evaluation.{split}", client=start))
        of = torch.from_numpy(group[part])
        return metrics.measure(setup.training.network, params, buffers, x, y, of)


def evaluate(setup: TrainingSetup, params: Tree, buffers: Tree, split: Split) -> Tensor:
    """Return [N, 3] of the examples of a split, shard by shard in this process."""
    starts = range(0, examples(setup, split), setup.shard)
    shards = [evaluate_shard(setup, params, buffers, split, start) for start in starts]
    return torch.cat(shards).cpu() if shards else torch.empty(0, 3, dtype=torch.float64)
