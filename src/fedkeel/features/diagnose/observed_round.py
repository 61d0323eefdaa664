"""A round as diagnostics see it: what was sent, what came back, and the server afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.rng import generator
from fedkeel.data.dataset import Dataset
from fedkeel.engine.base import TrainingSetup
from fedkeel.features.diagnose.clients import ObservedClients
from fedkeel.features.diagnose.models import ModelState, measure
from fedkeel.features.diagnose.settings import Diagnose
from fedkeel.method.context import Floats, Ints, Message
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.tree import Tree


@dataclass(frozen=True)
class ObservedRound:
    """A round that is diagnosed. K clients counted.

    Args:
        setup: method, model, data and seed, where they are used.
        settings: what is measured.
        message: what the clients received.
        after: the global model after the round.
        clients: [K] ascending.
        weights: [K] of the mean, which sum to 1.
        processed: [K] examples that each processed.
        updates: [K, ...] end - start, as the server received them.
        buffers: [K, ...] of the local models, where they are averaged.
        rows: the rounds before.
        observed: trains clients again, or others than the cohort.
    """

    setup: TrainingSetup
    settings: Diagnose
    message: Message
    after: ModelState
    clients: Ints
    weights: Floats
    processed: Ints
    updates: Tree
    buffers: Tree
    rows: Sequence[RoundRecord]
    observed: ObservedClients
    _losses: dict[int, list[Scores]] = field(default_factory=dict)

    @property
    def p(self) -> Tensor:
        """[K] the weights as a tensor on the processor."""
        return torch.from_numpy(self.weights)

    @property
    def before(self) -> ModelState:
        """The model that the clients received."""
        return ModelState(self.message.params, self.message.buffers or self._network_buffers)

    @property
    def _network_buffers(self) -> Tree:
        return self.setup.training.network.buffers

    def local_model(self, row: int) -> ModelState:
        """Return the model of the client in a row after its local training."""
        update = {name: tensor[row] for name, tensor in self.updates.items()}
        buffers = {name: tensor[row] for name, tensor in self.buffers.items()}
        return ModelState(tree.add(self.message.params, update), buffers or self._network_buffers)

    @property
    def models(self) -> list[ModelState]:
        """The received model, then those of the K clients."""
        return [self.before, *map(self.local_model, range(len(self.clients)))]

    def scores_on(self, client: int) -> list[Scores]:
        """Return [1 + K] the scores of `models` on a client's training examples."""
        if client not in self._losses:
            data = self.setup.federation.data.take(self.setup.federation.client(client))
            self._losses[client] = [measure(self.setup, model, data) for model in self.models]
        return self._losses[client]

    def probe(self, split: str) -> Dataset:
        """Return the examples on which models are compared, the same ones in every round.

        They are drawn without replacement from the stream (seed, "diagnose").

        Args:
            split: ``test``, or ``train`` for the training examples of all clients.
        """
        federation = self.setup.federation
        data = self.setup.test if split == "test" else federation.data
        rows = torch.arange(len(data)).numpy() if split == "test" else federation.rows
        return some(data, rows, self.settings.examples, self.setup.seed)


def some(data: Dataset, rows: Ints, count: int, seed: int) -> Dataset:
    """Return `count` rows of some at random, in their order; all where there are no more."""
    if len(rows) > count:
        chosen = generator(seed, "diagnose").choice(len(rows), size=count, replace=False)
        chosen.sort()
        rows = rows[chosen]
    return data.take(rows)
