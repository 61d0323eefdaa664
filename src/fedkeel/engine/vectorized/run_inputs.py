"""What one run gives to the training of its clients in a round.

Clients of several runs may train side by side. Each goes by the inputs of its own run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.trainer import ReadRecord, SequentialTrainer, TrainedClients
from fedkeel.engine.vectorized.begun import begun_before, stepped_start
from fedkeel.engine.vectorized.run_numbers import numbers_of
from fedkeel.engine.vectorized.transfers import to_device
from fedkeel.method.context import Message
from fedkeel.method.local_training import ClientTraining
from fedkeel.tree import Tree


@dataclass(frozen=True, eq=False)
class PlacedRun:
    """A run on the device where its clients train.

    Args:
        setup: method, model, data and seed of the run.
        placed: `setup` with network and data on the device.
        varied: names of the numbers of the method that are inputs of what is compiled.
    """

    setup: TrainingSetup
    placed: TrainingSetup
    varied: tuple[str, ...] = ()

    @cached_property
    def training(self) -> ClientTraining:
        """Its method and model on the device, ready to be traced."""
        training, part = self.placed.training, stepped_start(self.setup)
        training = training if part is None else begun_before(training, part)
        return replace(training, network=training.network.for_tracing())

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The numbers of its method that are inputs of what is compiled."""
        numbers = numbers_of(self.setup.training.plan.parts)
        return {name: numbers[name] for name in self.varied if name in numbers}

    @cached_property
    def placed_numbers(self) -> Tree:
        """The same as tensors [] on the device, of the type of the parameters."""
        like = next(iter(self.placed.training.network.params.values()))
        return {
            name: to_device(torch.tensor(value, dtype=like.dtype), like.device)
            for name, value in self.numbers.items()
        }

    @cached_property
    def one_by_one(self) -> SequentialTrainer:
        """What trains its clients one after the other, as the sequential engine does."""
        return SequentialTrainer(self.placed)


@dataclass(frozen=True, eq=False)
class RunInputs:
    """What the clients of a run begin a round with.

    Args:
        run: the run.
        message: what its server sent, on the device.
        read: reads what its clients keep, and puts it on the device.
    """

    run: PlacedRun
    message: Message
    read: ReadRecord

    @property
    def setup(self) -> TrainingSetup:
        """Method, model, data and seed of the run."""
        return self.run.setup

    @property
    def training(self) -> ClientTraining:
        """Its method and model on the device, ready to be traced."""
        return self.run.training

    def train_one_by_one(self, jobs: Sequence[ClientJob]) -> Iterator[TrainedClients]:
        """Train clients of the run one after the other."""
        return self.run.one_by_one(self.message, jobs, self.read)
