"""Trainers: what an engine with shared buffers calls to train some clients of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedkeel.base.clock import Clock
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.local import LocalResult, train_client
from fedkeel.engine.store.record import ClientRecord
from fedkeel.method.context import Message
from fedkeel.method.round_values import reply_state
from fedkeel.tree import State, map_tensors, substate


@dataclass(frozen=True)
class TrainedClients:
    """Clients that have ended their round.

    Args:
        jobs: the n clients.
        state: what they send and log, tensors [n, ...] by ``update``, ``buffers``, ``uploads`` and
            ``diagnostics``.
        client_state: what they keep, tensors [n, ...].
        loss: [n] mean recorded loss of each.
        finite: [n] whether everything that each sends is finite.
        steps: local steps that each made.
        examples: examples that each processed.
        seconds: by phase of `PHASES`, of all of them together.
        added: whether ``update`` [1, ...] is the sum of their updates, by their raw weights.
        processor_seconds: what another thread than the caller's has spent on them.
        wait: returns when `loss` and `finite` may be read, which a GPU may have yet to compute.
    """

    jobs: Sequence[ClientJob]
    state: State
    client_state: ClientRecord
    loss: Tensor
    finite: Tensor
    steps: Sequence[int]
    examples: Sequence[int]
    seconds: Mapping[str, float] = field(default_factory=dict)
    added: bool = False
    processor_seconds: float = 0.0
    wait: Callable[[], None] = lambda: None


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
    def queue_length(self) -> int:
        """Groups of clients that may wait for a GPU while the next one is started; 0 on a CPU."""

    @property
    def reasons(self) -> list[str]:
        """Why clients are trained in a plainer way than was asked for, as far as it is known."""

    def __call__(
        self,
        message: Message,
        jobs: Sequence[ClientJob],
        read: ReadRecord,
        sums: bool = False,
    ) -> Iterator[TrainedClients]:
        """Train clients; with `sums`, their updates may come added up."""


class MovableTrainer(Trainer, Protocol):
    """A trainer of which each process makes one on its own device."""

    def on(self, device: torch.device, processes: int) -> Trainer:
        """Return a trainer of the same clients on a device, whose memory some processes share."""


class SequentialTrainer:
    """A `Trainer` that trains one client after the other.

    Args:
        setup: method, model, data and seed.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self.placed = setup
        self.parallel_clients = 1
        self.queue_length = 0
        varies = setup.training.network.traits.why_calls_differ
        self.reasons = [varies] if varies else []

    def on(self, device: torch.device, processes: int) -> Trainer:
        """Return itself: it trains on the processor, one client after the other."""
        return self

    def __call__(
        self,
        message: Message,
        jobs: Sequence[ClientJob],
        read: ReadRecord,
        sums: bool = False,
    ) -> Iterator[TrainedClients]:
        """Train clients from a message."""
        for job in jobs:
            clock = Clock()
            record = read(job.client)
            client_state = None if record is None else record.state
            result = train_client(self.placed, message, job, client_state, clock=clock)
            yield single_client(job, result, clock.seconds)


def single_client(
    job: ClientJob, result: LocalResult, seconds: Mapping[str, float] | None = None
) -> TrainedClients:
    """Return one client's result with a leading axis of length 1."""
    state = map_tensors(lambda t: t[None], reply_state(result.reply))
    client_state = ClientRecord.of(substate(state, "client_state"))
    return TrainedClients(
        jobs=[job],
        state={k: v for k, v in state.items() if k != "client_state"},
        client_state=client_state,
        loss=result.reply.loss[None],
        finite=result.reply.finite[None],
        steps=[result.steps],
        examples=[result.examples],
        seconds=seconds or {},
    )
