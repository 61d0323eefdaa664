"""Gradient matching: how far the gradient of made-up examples is from what an attacker saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.config.audit import Distance
from fedkeel.study.audit.observation import Observation
from fedkeel.task.batch import Batch
from fedkeel.tree import Tree


@dataclass(frozen=True)
class Direction:
    """A direction along which the attacker does not know the gradient.

    Args:
        names: the tensors that it spans.
        vector: the direction on them, of length 1.
    """

    names: tuple[str, ...]
    vector: Tree

    def without(self, values: Tree) -> Tree:
        """Return values without their component along the direction."""
        along = sum((values[k] * self.vector[k]).sum() for k in self.names)
        return {**values, **{k: values[k] - along * self.vector[k] for k in self.names}}


@dataclass(frozen=True)
class Match:
    """The distance of a gradient from the one that was seen.

    Args:
        target: the gradient that was seen, in float64.
        distance: how they are compared.
        unknown: directions along which they may differ.
    """

    target: Tree
    distance: Distance = "l2"
    unknown: Sequence[Direction] = ()

    def __call__(self, gradient: Tree) -> Tensor:
        """Return [] the distance."""
        target = self.target
        for direction in self.unknown:
            gradient, target = direction.without(gradient), direction.without(target)
        if self.distance == "l2":
            difference = tree.sub(gradient, target)
            return tree.dot(difference, difference)
        inner, size = tree.dot(gradient, target), tree.dot(gradient, gradient)
        length = (size * tree.dot(target, target)).clamp(min=1e-300).sqrt()
        return 1.0 - inner / length


class GradientModel:
    """The gradient of the task's loss at the received model, as a differentiable function of data.

    It is computed in float64, so that matching ends at the rounding of what was sent.

    Args:
        seen: what the attacker sees.
    """

    def __init__(self, seen: Observation) -> None:
        self._network = seen.network
        self._params = {k: v.detach().double() for k, v in seen.params.items()}
        self._buffers = {
            k: v.double() if v.is_floating_point() else v for k, v in seen.buffers.items()
        }
        self.target: Tree = {k: v.double() for k, v in seen.gradient.items()}

    def __call__(self, x: Tensor, y: Tensor) -> Tree:
        """Return the gradient of the mean loss of examples [B, ...] with targets [B, ...]."""
        leaves = {k: v.detach().requires_grad_() for k, v in self._params.items()}
        buffers = self._network.copy_buffers(self._buffers)
        loss = self._network.loss(leaves, buffers, Batch(x, y))
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=True, allow_unused=True
        )
        return {
            k: torch.zeros_like(leaf) if g is None else g
            for (k, leaf), g in zip(leaves.items(), gradients, strict=True)
        }

    def scores(self, x: Tensor) -> Tensor:
        """Return [B, Y] the scores of the received model."""
        with torch.no_grad():
            buffers = self._network.copy_buffers(self._buffers)
            return self._network.logits(self._params, buffers, x.double())
