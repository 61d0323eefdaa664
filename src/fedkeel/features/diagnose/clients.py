"""Clients that are trained for a diagnosis: they leave no trace in the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fedkeel.engine.base import ClientJob, TrainingEngine, TrainingSetup
from fedkeel.engine.client_inputs import client_info, take_examples
from fedkeel.engine.local import LocalResult, train_client
from fedkeel.method.context import ByPart, Message
from fedkeel.method.local_loop import client_start
from fedkeel.tree import map_tensors, substates


@dataclass(frozen=True)
class ObservedClients:
    """Trains clients from a message and their state before the round, one after the other.

    Args:
        setup: method, model, data and seed, where they are used.
        engine: has the state of the clients before the round.
        message: what they received.
        device: where models are used.
    """

    setup: TrainingSetup
    engine: TrainingEngine
    message: Message
    device: torch.device

    def train(self, client: int, limit: int | None = None) -> LocalResult:
        """Return a client's round, of `limit` steps at most."""
        done = int(self.engine.done(np.array([client]))[0])
        job = ClientJob(0, client, done)
        return train_client(self.setup, self.message, job, self._state(client), limit)

    def prepared(self, client: int) -> ByPart:
        """Return what the method's parts prepare of all of a client's examples, by part."""
        setup, rows = self.setup, self.setup.federation.client(client)
        every = partial(take_examples, setup, rows)
        info = client_info(setup, client)
        return client_start(setup.training, self.message, self._state(client), info, every)[
            0
        ].prepared

    def _state(self, client: int) -> ByPart | None:
        state = self.engine.client_state(client)
        if state is None:
            return None
        return substates(map_tensors(lambda t: t.to(self.device), dict(state)))
