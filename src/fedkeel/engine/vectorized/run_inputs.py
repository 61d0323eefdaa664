"""What one run gives to the training of its clients in a round.

Clients of several runs may train side by side. Each goes by the inputs of its own run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.trainer import ReadRecord, SequentialTrainer, TrainedClients
from fedkeel.method.context import Message
from fedkeel.method.local_training import ClientTraining


@dataclass(frozen=True, eq=False)
class PlacedRun:
    """A run on the device where its clients train.

    Args:
        setup: method, model, data and seed of the run.
        placed: `setup` with network and data on the device.
    """

    setup: TrainingSetup
    placed: TrainingSetup

    @cached_property
    def training(self) -> ClientTraining:
        """Its method and model on the device, ready to be traced."""
        training = self.placed.training
        return replace(training, network=training.network.for_tracing())

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
