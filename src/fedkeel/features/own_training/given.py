"""What the user's function is given: the examples of a client, and what a round asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedkeel.base.values import Values, count_of, example
from fedkeel.config import Local
from fedkeel.task.batch import Batch
from fedkeel.tree import State


class ClientExamples(Dataset[tuple[Values, Values]]):
    """The examples of one client, a data set of torch: `data[i]` is input and target of one.

    Args:
        x: inputs [N, ...], or a dict of such tensors.
        y: targets [N, ...], likewise.
        steps: S, the number of mini-batches of the round.
        make_batch: number of a mini-batch, from 1 -> the mini-batch.
    """

    def __init__(
        self, x: Values, y: Values, steps: int, make_batch: Callable[[int], Batch]
    ) -> None:
        self.x, self.y = x, y
        self._batches = _Batches(steps, make_batch)

    def __len__(self) -> int:
        return count_of(self.y)

    def __getitem__(self, index: int) -> tuple[Values, Values]:
        return example(self.x, index), example(self.y, index)

    @property
    def batches(self) -> DataLoader[tuple[Values, Values]]:
        """The mini-batches of the whole round, (x, y), as fedkeel's own steps take them.

        One pass over them has all epochs, or all steps, that the settings ask for, and each further
        pass is the same. They are augmented where the run's examples are.
        """
        # Its own generator: torch's draws for the model are then those of fedkeel's own steps.
        own = torch.Generator()
        return DataLoader(self._batches, batch_size=None, collate_fn=_as_it_is, generator=own)


class _Batches(Dataset[tuple[Values, Values]]):
    """The mini-batches of a round, by their number from 0."""

    def __init__(self, steps: int, make_batch: Callable[[int], Batch]) -> None:
        self._steps, self._make_batch = steps, make_batch

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> tuple[Values, Values]:
        batch = self._make_batch(step + 1)
        return batch.x, batch.y


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401 - as the loader asks for
    return batch


@dataclass(frozen=True)
class TrainingRound:
    """What the user's function is told of a client's round.

    Args:
        number: rounds completed before this one.
        rounds: T, of the run.
        client: index of the client.
        seed: seed of this client in this round, below 2^32. The generators of torch, NumPy and
            Python are seeded before; a library that seeds them by itself may be given it.
        lr: learning rate of the round.
        local: the settings of local training.
        steps: S, the number of mini-batches of the round, over all its epochs.
        step_factors: what `lr` is multiplied with in each of them; () for 1 in all.
        device: where the model and the examples are.
        loss: (output of the model, targets) -> the task's mean loss, [].
        state: named tensors that the client keeps until its next round, such as those of an
            optimiser, where `local.keep_state` is set; empty in its first round. Change this dict.
        is_trial: whether this is the trial before the run: one mini-batch, and the result is
            thrown away. At a server without data, its numbers are zeros.
    """

    number: int
    rounds: int
    client: int
    seed: int
    lr: float
    local: Local
    steps: int
    step_factors: tuple[float, ...]
    device: torch.device
    loss: Callable[[Any, Any], Tensor]
    state: State
    is_trial: bool

    @property
    def epochs(self) -> int | None:
        """Passes over the examples; None where the settings count steps."""
        return self.local.epochs

    @property
    def batch_size(self) -> int | str:
        """Examples of a mini-batch, or ``all``."""
        return self.local.batch_size
