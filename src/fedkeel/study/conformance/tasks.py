"""The kinds of tasks on which methods are checked: a small model of each, and its examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel.data.dataset import Dataset, dataset
from fedkeel.method.legality import TaskKind
from fedkeel.task.task import Task


class Regression(nn.Module):
    """Two layers with two quantities."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 2]."""
        out: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return out


class Segmentation(nn.Module):
    """Two convolutions with a score for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 3, 3, padding=1)
        self.head = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 1, 5, 5] for images [B, 1, 5, 5]."""
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


class Tokens(nn.Module):
    """An embedding, an attention and a score for each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, 6] for tokens [B, T]."""
        h = self.embed(x)
        out: Tensor = self.head(h + self.attention(h, h, h, need_weights=False)[0])
        return out


@dataclass(frozen=True)
class SmallTask:
    """A task on which methods are checked.

    Args:
        model: makes its model.
        loss: name of its loss.
        draw: random numbers, number of examples -> that many.
    """

    model: type[nn.Module]
    loss: str
    draw: Callable[[np.random.Generator, int], Dataset]

    @property
    def task(self) -> Task:
        """The task."""
        return Task(self.model, loss=self.loss)


def _regression(random: np.random.Generator, count: int) -> Dataset:
    x = random.normal(size=(count, 5))
    return dataset(x, x[:, :2] - x[:, 2:4] + 0.1 * random.normal(size=(count, 2)))


def _segmentation(random: np.random.Generator, count: int) -> Dataset:
    x = random.normal(size=(count, 1, 5, 5))
    return dataset(x, (x[:, 0] > 0).astype(np.int64))


def _tokens(random: np.random.Generator, count: int) -> Dataset:
    x = random.integers(0, 6, size=(count, 4))
    return dataset(x, (x + 1) % 6, tokens=True)


TASKS: dict[TaskKind, SmallTask] = {
    "regression": SmallTask(Regression, "mse", _regression),
    "segmentation": SmallTask(Segmentation, "bce", _segmentation),
    "tokens": SmallTask(Tokens, "token_cross_entropy", _tokens),
}
"""A task of each kind beside classification."""
