"""Local training as a run sees it: who replies and when, what they are asked, and what counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeel.data import batches
from fedkeel.data.cohort import Selection, select_by_seed
from fedkeel.engine.base import TrainedCohort, TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.method.context import Ints, Message
from fedkeel.method.round_values import Server
from fedkeel.method.server_round import raw_weights
from fedkeel.method.survey import add_mean_answers
from fedkeel.runner.callbacks import CallbackList
from fedkeel.runner.feature_hooks import Hooks, Selector
from fedkeel.runner.features import schedule_of


class Training:
    """Trains the clients whose replies are due.

    Args:
        prepared: the run.
        callbacks: are told how far a round is.
        hooks: of the run's features; one may select the clients of a round.
        engine: runs the clients in place of an engine on this machine.

    Attributes:
        schedule: who trains for each step of the server.
    """

    def __init__(
        self,
        prepared: Prepared,
        callbacks: CallbackList,
        hooks: Sequence[Hooks] = (),
        engine: TrainingEngine | None = None,
    ) -> None:
        self._prepared, self._callbacks, self._hooks = prepared, callbacks, hooks
        self._selection = next((item for item in hooks if isinstance(item, Selector)), None)
        sizes, seed = prepared.setup.federation.sizes, prepared.server_seed
        select = self._selection or select_by_seed(prepared.cohort, sizes, seed)
        self.schedule = schedule_of(prepared, select, engine)
        if self._selection is not None:
            self._selection.seconds = self.schedule.seconds

    def due(self, message: Message) -> Selection:
        """Return whose replies the server takes in the step after it has made a message."""
        if self._selection is not None:
            self._selection.message = message
        return self.schedule.due(message)

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
        self, engine: TrainingEngine, server: Server, message: Message, cohort: Selection
    ) -> TrainedCohort:
        """Train the clients whose replies are due, and tell the callbacks how far it is."""
        done, count = 0, len(cohort.clients)

        def tick(trained: int) -> None:
            nonlocal done
            done += trained
            self._callbacks.on_clients_trained(done, count)

        for each in self._hooks:
            each.sent(message)
        trained = self.schedule.train(engine, server, message, cohort, tick)
        for each in self._hooks:
            trained = each.received(trained, message.round)
        return trained

    def commit(
        self, engine: TrainingEngine, trained: TrainedCohort, keep: Ints, round: int
    ) -> None:
        """Make the new state of the clients `keep` of a round count, where it does not yet."""
        if self._selection is not None:
            self._selection.observe(trained, keep, round)
        if not self.schedule.counts_at_once:
            engine.commit(trained, keep)
