"""Local training as a run sees it: who replies and when, what they are asked, and what counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.data import batches
from fedkeel.data.cohort import Selection
from fedkeel.engine.base import TrainedCohort, TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.method.context import Ints, Message
from fedkeel.method.round_values import Server
from fedkeel.method.server_round import raw_weights, server_message
from fedkeel.method.survey import add_mean_answers
from fedkeel.runner.arrivals import Arrivals
from fedkeel.runner.attack import under_attack
from fedkeel.runner.callbacks import CallbackList
from fedkeel.runner.feature_hooks import Hooks, Selector
from fedkeel.system.asynchronous import Asynchronous
from fedkeel.system.make import make_schedule
from fedkeel.system.schedule import Due, Synchronous, Untimed
from fedkeel.system.trainings import Trainings


class Training:
    """Trains the clients whose replies are due.

    Args:
        prepared: the run.
        callbacks: are told how far a round is.
        trainings: those of nodes, for a server that does not wait; None simulates them.
        hooks: of the run's features; one may select the clients of a round.
    """

    def __init__(
        self,
        prepared: Prepared,
        callbacks: CallbackList,
        trainings: Trainings | None = None,
        hooks: Sequence[Hooks] = (),
    ) -> None:
        self._prepared, self._callbacks = prepared, callbacks
        self._selection = next((item for item in hooks if isinstance(item, Selector)), None)
        self._schedule = make_schedule(prepared, trainings, self._selection)
        if self._selection is not None and isinstance(self._schedule, Synchronous):
            self._selection.seconds = self._schedule.seconds
        self._arrivals: Arrivals | None = None  # where the server does not wait
        if isinstance(self._schedule, Asynchronous):
            self._arrivals = Arrivals(prepared, self._schedule)

    @property
    def counts_at_once(self) -> bool:
        """Whether clients' new state counts before the server's step."""
        return self._arrivals is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is real time in which clients train that `due` takes."""
        return isinstance(self._schedule, Asynchronous) and not self._schedule.trainings.is_remade

    @property
    def start_seconds(self) -> float | None:
        """Virtual time before the first round; None where no time is counted."""
        if isinstance(self._schedule, Asynchronous):
            return self._schedule.trainings.virtual_seconds
        return None if isinstance(self._schedule, Untimed) else 0.0

    def due(self, message: Message) -> Due:
        """Return whose replies the server takes in the step after it has made a message."""
        if self._arrivals is not None:
            return self._arrivals.due(message)
        if self._selection is not None:
            self._selection.message = message
        return self._schedule.due(message.round)

    def survey(self, engine: TrainingEngine, message: Message, cohort: Selection) -> Message:
        """Return the message with the clients' mean answer to what the method asks them first."""
        setup = self._prepared.setup
        sizes, steps = setup.federation.sizes[cohort.clients], engine.done(cohort.clients)
        processed = [
            batches.count_examples(setup.training.local, int(size), int(done))
            for size, done in zip(sizes, steps, strict=True)
        ]
        weights = raw_weights(self._prepared.plan.weights, sizes, np.array(processed))
        return add_mean_answers(message, engine.survey(message, cohort.clients), weights)

    def train(
        self, engine: TrainingEngine, server: Server, message: Message, due: Due
    ) -> TrainedCohort:
        """Train the clients whose replies are due, and tell the callbacks how far it is."""
        done, count = 0, len(due.cohort.clients)

        def tick(trained: int) -> None:
            nonlocal done
            done += trained
            self._callbacks.on_clients_trained(done, count)

        if self._arrivals is not None:
            return self._arrivals.train(engine, server, message, due, tick)
        replies = engine.train(message, due.cohort.clients, tick)
        return under_attack(replies, self._prepared, message.round)

    def commit(
        self, engine: TrainingEngine, trained: TrainedCohort, keep: Ints, round: int
    ) -> None:
        """Make the new state of the clients `keep` of a round count, where it does not yet."""
        if self._selection is not None:
            self._selection.observe(trained, keep, round)
        if self._arrivals is None:
            engine.commit(trained, keep)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has to hold beside the server's and the clients' state."""
        return {} if self._arrivals is None else self._arrivals.snapshot()

    def restore(
        self, arrays: Mapping[str, NDArray[Any]], server: Server, seconds: float | None
    ) -> None:
        """Go on from a checkpoint, at the virtual time of its last round."""
        self._schedule.resume(server.round, seconds)
        if self._arrivals is not None:
            like = server_message(self._prepared.plan, server, 1.0)
            self._arrivals.restore(arrays, like)
