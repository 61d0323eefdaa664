"""The loss along lines between models, and how sharp the loss is at the global model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.rng import torch_seed
from fedkeel.data.dataset import Dataset
from fedkeel.engine.base import TrainingSetup
from fedkeel.features.diagnose.measured import RoundDiagnostics, mean
from fedkeel.features.diagnose.models import ModelState, measure
from fedkeel.features.diagnose.observed_round import ObservedRound
from fedkeel.method.context import Floats
from fedkeel.task.batch import Batch

POSITIONS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Where on a line models are measured."""

MOST_STEPS, TOLERANCE = 200, 1e-5
"""When power iteration ends: after so many steps, or so small a relative change."""

Product = Callable[[Tensor], Tensor]
"""v [d] -> H v."""


def between(a: ModelState, b: ModelState, position: float) -> ModelState:
    """Return the model at a position between two; of a buffer of whole numbers that of `a`."""
    blended = {
        name: torch.lerp(t, b.buffers[name], position) if t.is_floating_point() else t
        for name, t in a.buffers.items()
    }
    return ModelState(tree.blend(b.params, a.params, position), blended)


def barrier(losses: Floats) -> float:
    """Return how far the loss on a line rises above the straight line between its ends, >= 0.

    Source: Entezari et al. 2022, Definition 1.

    Args:
        losses: [len(POSITIONS)].
    """
    position = np.array(POSITIONS)
    straight = (1.0 - position) * losses[0] + position * losses[-1]
    return float((losses - straight).max())


def measure_landscape(round: ObservedRound) -> RoundDiagnostics:
    """Return loss and score on the probe set along lines between models.

    A ``global`` line goes from the global model after the round to a local model, a ``client`` line
    from a local model to that of the next client; both are means over all such lines.
    """
    data = round.probe("test")
    models = [round.local_model(row) for row in range(len(round.clients))]
    lines = {"global": [(round.after, model) for model in models], "client": [*pairwise(models)]}
    score, measured = round.setup.metrics.score.name, RoundDiagnostics()
    for name, ends in lines.items():
        scores = [
            [measure(round.setup, between(a, b, p), data) for p in POSITIONS] for a, b in ends
        ]
        if not scores:
            continue
        losses = np.array([[s["loss"] for s in line] for line in scores])
        tables = {f"{name}_loss.position": losses.mean(axis=0)}
        if score != "loss":
            values = np.array([[s[score] for s in line] for line in scores])
            tables[f"{name}_score.position"] = values.mean(axis=0)
        labels = [f"{position:g}" for position in POSITIONS]
        measured |= RoundDiagnostics(
            {f"{name}_barrier": mean(np.array([barrier(line) for line in losses]))},
            {k: dict(zip(labels, v.tolist(), strict=True)) for k, v in tables.items()},
        )
    return measured


def hessian_product(
    setup: TrainingSetup, model: ModelState, data: Dataset
) -> tuple[Product, Tensor]:
    """Return v -> H v for the Hessian of the mean loss on some examples, and a zero vector [d].

    The entries are those of all trained parameters in their order. The examples go through the
    network in one batch.
    """
    network = setup.training.network
    leaves = {k: v.detach().requires_grad_() for k, v in model.params.items()}
    tensors, batch = list(leaves.values()), Batch(data.x, data.y)
    with torch.enable_grad():
        loss = network.loss(leaves, network.copy_buffers(model.buffers), batch, train=False)
        slopes = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
        slope = torch.cat([s.reshape(-1) for s in slopes])

    def product(v: Tensor) -> Tensor:
        if not slope.requires_grad:  # the loss is linear
            return torch.zeros_like(v)
        parts = torch.autograd.grad(slope, tensors, v, retain_graph=True, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts]).detach()

    return product, torch.zeros_like(slope).detach()


def largest_eigenvalue(product: Product, start: Tensor) -> tuple[float, int]:
    """Return the largest eigenvalue of a symmetric matrix by power iteration, and the steps made.

    Power iteration finds the eigenvalue of the largest size. Where that is negative, it is
    repeated on the matrix shifted by it, whose largest eigenvalue is of the largest size.

    Args:
        product: v [d] -> H v.
        start: [d], not zero.
    """
    value, steps = _power_iteration(product, start)
    if value >= 0.0:
        return value, steps
    shifted, more = _power_iteration(lambda v: product(v) - value * v, start)
    return shifted + value, steps + more


def _power_iteration(product: Product, start: Tensor) -> tuple[float, int]:
    v, value = start / start.norm(), 0.0
    for step in range(1, MOST_STEPS + 1):
        image = product(v)
        before, value = value, float(v @ image)
        length = float(image.norm())
        if length == 0.0 or abs(value - before) <= TOLERANCE * abs(value):
            return value, step
        v = image / length
    return value, MOST_STEPS


def measure_sharpness(round: ObservedRound) -> RoundDiagnostics:
    """Return the largest eigenvalue of the Hessian of the mean loss at the global model.

    The examples are drawn from the training examples of all clients.
    """
    data, setup = round.probe("train"), round.setup
    product, zero = hessian_product(setup, round.after, data)
    source = torch.Generator().manual_seed(torch_seed(setup.seed, "diagnose.sharpness"))
    start = torch.randn(len(zero), generator=source, dtype=torch.float64).to(zero)
    value, steps = largest_eigenvalue(product, start)
    return RoundDiagnostics({"eigenvalue": value, "steps": float(steps)})
