"""Warnings about the task: scores that the loss takes for others, targets that say nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedkeel.base.values import rows_of, tensors_of
from fedkeel.data.dataset import Dataset
from fedkeel.engine.prepared import Prepared
from fedkeel.task.adapters import on_random_weights
from fedkeel.task.losses import (
    IGNORED,
    bce,
    cox,
    cross_entropy,
    dice,
    loss_name,
    named_like,
    token_cross_entropy,
)
from fedkeel.task.network import Network

_FEW = 8
"""Examples whose scores are looked at."""


def task_warnings(prepared: Prepared) -> Iterator[str]:
    """Yield the warnings about model, loss and targets."""
    network, data = prepared.setup.training.network, prepared.setup.federation.data
    task = prepared.ingredients.task
    test = prepared.setup.test  # may be empty, where clients hold examples out
    yield _probabilities_for_scores(network, test if len(test) else data)
    yield _targets_that_are_inputs(network, data)
    seed = prepared.settings.seed
    yield on_random_weights(network.params, network.frozen, lambda: task.module(seed + 1))
    if network.task_loss is cox and isinstance(data.y, Tensor) and not data.y[:, 1].any():
        yield "no training example has an event: the loss 'cox' is 0, and nothing is learned"


def _probabilities_for_scores(network: Network, examples: Dataset) -> str:
    """Return a warning where the module ends in what the loss does itself."""
    loss, x = network.task_loss, rows_of(examples.x, slice(_FEW))
    name, like = loss_name(loss), named_like(loss)
    with torch.no_grad():
        scores = network.test_logits(network.params, network.buffers, x)
        if like in (cross_entropy, token_cross_entropy) and scores.ndim > 1:
            if _are_shares(scores, -1 if like is token_cross_entropy else 1):
                return (
                    f"the model returns probabilities, and the loss {name!r} takes scores: the "
                    "softmax is then taken twice and training is slow, so remove it from the model"
                )
        elif isinstance(loss, nn.NLLLoss) and scores.ndim > 1:
            if not _are_shares(scores.exp(), 1):
                return (
                    "the loss 'NLLLoss' takes logarithms of probabilities, and the model returns "
                    "something else: end it in log_softmax, or take loss = 'cross_entropy'"
                )
        elif like is bce or (like is dice and (scores.ndim < 4 or scores.shape[1] == 1)):
            larger = {key: 100 * value for key, value in network.params.items()}
            both = scores, network.test_logits(larger, network.buffers, x)
            if all(bool(((part >= 0) & (part <= 1)).all()) for part in both):
                return (
                    f"the model returns probabilities, and the loss {name!r} takes scores: the "
                    "sigmoid is then taken twice, so remove it from the model"
                )
    return ""


def _are_shares(values: Tensor, axis: int) -> bool:
    """Return whether values are shares of 1 along an axis of two or more."""
    if values.shape[axis] < 2 or bool((values < 0).any()):
        return False
    return not bool(((values.sum(dim=axis) - 1).abs() > 1e-3).any())


def _targets_that_are_inputs(network: Network, data: Dataset) -> str:
    """Return a warning where the target of each token is this token itself."""
    y = data.y
    named = named_like(network.task_loss) in (cross_entropy, token_cross_entropy)
    if not named or not isinstance(y, Tensor) or y.ndim != 2 or y.is_floating_point():
        return ""
    counts = y != IGNORED
    for x in tensors_of(data.x):
        if x.shape == y.shape and not bool((counts & (x != y)).any()):
            return (
                "the target of each token is this token itself, so a copy of the inputs is "
                "learned: give the next token, y[:, :-1] = ids[:, 1:] and y[:, -1] = -100"
            )
    return ""
