"""The sequential engine: a Python loop. The definition of correct, and the debugger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.base import Split, Tick, Trained, TrainingSetup
from fedkeel.engine.local import SequentialTrainer, Trainer, evaluate
from fedkeel.engine.process.numerics import arithmetic
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.record import RowCodec
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.tree import Tree


class Sequential:
    """Trains clients in this process, one after the other or side by side.

    Args:
        setup: method, model, data and seed.
        spec: what a reply looks like, from `rounds.rehearse`.
        capacity: the largest cohort.
        file: where client state lies; None for memory.
        chunks: what trains clients side by side; None trains them one by one.
        codec: stores some of the clients' state in compact form; None stores it as it is.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        *,
        file: Path | None = None,
        chunks: Trainer | None = None,
        codec: RowCodec | None = None,
    ) -> None:
        sums = chunks is not None
        self._buffers = RoundBuffers(setup, spec, capacity, private_memory, file, sums, codec=codec)
        self._train: Trainer = chunks or SequentialTrainer(setup)
        self._precision = setup.precision

    @property
    def reasons(self) -> list[str]:
        """Why clients were trained in a plainer way than was asked for."""
        return self._train.reasons

    def train(self, message: Message, clients: Ints, tick: Tick) -> Trained:
        """Train clients [K] from a message."""
        with arithmetic(self._precision):
            self._buffers.run(self._train, message, self._buffers.begin(clients), tick)
        return self._buffers.gather(clients)

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys."""
        with arithmetic(self._precision):
            for job in self._buffers.jobs(clients):
                self._buffers.ask(message, job)
        return self._buffers.answers(clients)

    def done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""
        return self._buffers.done(clients)

    def commit(self, trained: Trained, keep: Ints) -> None:
        """Take the state of the clients `keep`."""
        self._buffers.commit(trained, keep)

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Tensor:
        """Return [N, 3] of the examples of a split."""
        setup = self._train.placed
        like = next(iter(setup.training.network.params.values()))
        params, buffers = ({k: t.to(like.device) for k, t in s.items()} for s in (params, buffers))
        with arithmetic(self._precision):
            return evaluate(setup, params, buffers, split)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return client state as arrays."""
        return self._buffers.state()

    def saved(self) -> None:
        """Hear that the checkpoint of the last state is complete."""
        self._buffers.store.snapshot_saved()

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take client state from a checkpoint."""
        self._buffers.restore(arrays)

    def __enter__(self) -> Sequential:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end: everything is in this process."""
