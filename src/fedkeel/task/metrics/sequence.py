"""Metrics of tokens: each place of a sequence has a target."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.losses import IGNORED, token_losses
from fedkeel.task.metrics.base import SumMetric, TaskInfo, divided
from fedkeel.task.outputs import Outputs, scores_of


def perplexity(info: TaskInfo) -> SumMetric:
    """Return exp of the mean cross-entropy over all tokens that count."""
    _need_tokens(info, "perplexity")

    def sums(output: Outputs, y: Tensor) -> Tensor:
        losses = token_losses(scores_of(output).double(), y).sum(dim=1)
        return torch.stack([losses, (y != IGNORED).sum(dim=1)], dim=1)

    def finish(sums: Tensor, examples: Tensor) -> Tensor:
        return divided(sums[:, 0], sums[:, 1]).exp()

    return SumMetric("perplexity", sums, finish, higher_is_better=False)


def token_accuracy(info: TaskInfo) -> SumMetric:
    """Return the share of all tokens that count whose highest score is right."""
    _need_tokens(info, "token_accuracy")

    def sums(output: Outputs, y: Tensor) -> Tensor:
        scores = scores_of(output)
        is_number = ~scores.isnan().any(dim=-1)
        right = (scores.argmax(dim=-1) == y) & (y != IGNORED) & is_number
        return torch.stack([right.sum(dim=1), (y != IGNORED).sum(dim=1)], dim=1)

    return SumMetric(
        "token_accuracy", sums, lambda sums, _: divided(sums[:, 0], sums[:, 1]), unit="%"
    )


def _need_tokens(info: TaskInfo, name: str) -> None:
    if len(info.target) != 1 or len(info.scores) != 2 or info.scores[0] != info.target[0]:
        raise ModelError(
            f"The metric {name!r} is of tokens.",
            got=f"scores {list(info.scores)} and targets {list(info.target)} for one example",
            expected="scores [T, V] and targets [T]",
        )
