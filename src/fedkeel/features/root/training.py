"""Training at the server: on its own examples, from what the clients are sent, as a client does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkeel.data import batches
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.engine.base import ClientJob, TrainedCohort
from fedkeel.engine.local import train_client
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.errors import TrainingError
from fedkeel.method.context import Message
from fedkeel.runner.feature_hooks import Hooks
from fedkeel.tree import Tree


class RootTraining(Hooks):
    """Trains at the server in each round, and lays the update beside the clients' replies.

    The server is one client more, after the last one: so it has random streams of its own.

    Args:
        prepared: the run.
        data: the server's examples.
    """

    def __init__(self, prepared: Prepared, data: Dataset) -> None:
        clients = len(prepared.setup.federation)
        offsets = np.zeros(clients + 2, dtype=np.int64)
        offsets[-1] = len(data)
        federation = Federation(data, np.arange(len(data)), offsets)
        self._setup = replace(prepared.setup, federation=federation)
        self._number = clients
        self._message: Message | None = None

    def sent(self, message: Message) -> None:
        """Remember from what the clients of this round begin."""
        self._message = message

    def received(self, trained: TrainedCohort, round: int) -> TrainedCohort:
        """Return the replies with the server's own update beside them."""
        if self._message is None or not len(trained.replies.clients):
            return trained
        return replace(trained, replies=replace(trained.replies, root=self.update(self._message)))

    def update(self, message: Message) -> Tree:
        """Return the server's own update from what the clients are sent.

        Raises:
            TrainingError: it is not finite.
        """
        local = self._setup.training.local
        steps = batches.count_steps(local, int(self._setup.federation.sizes[-1]))
        job = ClientJob(0, self._number, message.round * steps)
        with use_numerics(self._setup.precision):
            reply = train_client(self._setup, message, job, None).reply
        if not bool(reply.finite):
            raise TrainingError(
                f"Training at the server diverged in round {message.round + 1}.",
                got="an update with NaN or infinity, on the server's own examples",
                do="lower local.lr, or bring inputs that are large to a common scale",
            )
        return reply.update
