"""Centred kernel alignment: how alike the layers of two models represent the same examples."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.values import only_tensor
from fedkeel.data.dataset import Dataset
from fedkeel.engine.base import TrainingSetup
from fedkeel.features.diagnose.measured import RoundDiagnostics, mean
from fedkeel.features.diagnose.models import ModelState, shards
from fedkeel.features.diagnose.observed_round import ObservedRound
from fedkeel.features.diagnose.updates import layers_of
from fedkeel.task.batch import Batch

_BLOCK = 4096
"""Columns of a layer's outputs that are taken to float64 at once."""


def linear_gram(outputs: Tensor) -> Tensor:
    """Return the Gram matrix [n, n] of outputs [n, ...] of n examples, in float64."""
    flat = outputs.flatten(1)
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for start in range(0, flat.shape[1], _BLOCK):
        piece = flat[:, start : start + _BLOCK].double()
        total += (piece @ piece.T).cpu()
    return total


def biased_hsic(k: Tensor, other: Tensor) -> float:
    r"""Return :math:`\mathrm{tr}(K H L H) / (n-1)^2` of two Gram matrices [n, n].

    Source: Gretton et al. 2005, Eq. (9); H centres.
    """
    n = len(k)
    centre = torch.eye(n, dtype=torch.float64) - 1.0 / n
    return float(((centre @ k @ centre) * other).sum()) / (n - 1) ** 2


def unbiased_hsic(k: Tensor, other: Tensor) -> float:
    r"""Return the unbiased estimate of HSIC of two Gram matrices [n, n]; NaN where n < 4.

    .. math::
        \frac{1}{n(n-3)}\left[\mathrm{tr}(\tilde K\tilde L)
        + \frac{1^T\tilde K 1\,1^T\tilde L 1}{(n-1)(n-2)}
        - \frac{2}{n-2}1^T\tilde K\tilde L 1\right]

    Source: Song et al. 2012, Eq. (5); the tilde sets the diagonal to zero.
    """
    n = len(k)
    if n < 4:
        return math.nan
    k, other = (m - torch.diag(m.diagonal()) for m in (k, other))
    total = (k * other).sum() + k.sum() * other.sum() / ((n - 1) * (n - 2))
    return float(total - 2.0 / (n - 2) * (k.sum(dim=0) @ other.sum(dim=1))) / (n * (n - 3))


def cka(k: Tensor, other: Tensor, *, unbiased: bool = True) -> float:
    """Return the centred kernel alignment of two Gram matrices [n, n].

    1 where the representations are the same up to rotation and scale. The biased estimate tends to
    1 where a layer has more outputs than there are examples; the unbiased one may be negative.

    Source: Kornblith et al. 2019, Section 3; Nguyen et al. 2021, Eq. (3) with the unbiased HSIC.
    """
    hsic = unbiased_hsic if unbiased else biased_hsic
    squared_norm = hsic(k, k) * hsic(other, other)
    return hsic(k, other) / math.sqrt(squared_norm) if squared_norm > 0.0 else math.nan


def layer_grams(setup: TrainingSetup, model: ModelState, data: Dataset) -> dict[str, Tensor]:
    """Return the Gram matrix of what each layer with parameters returns, by its name."""
    network, layers = setup.training.network, [*layers_of(setup.training.network.params)]
    names = [name for name in layers if name != "model"]
    pieces: dict[str, list[Tensor]] = {}
    for x, _ in shards(setup, data):
        outputs = network.layer_outputs(model.params, model.buffers, x, names)
        for name, output in outputs.items():
            pieces.setdefault(name, []).append(output.flatten(1))
    grams = {name: linear_gram(torch.cat(pieces[name])) for name in names if name in pieces}
    return {name: matrix for name, matrix in grams.items() if len(matrix) == len(data)}


def class_means(setup: TrainingSetup, model: ModelState, data: Dataset) -> Tensor:
    """Return [Y, d] the mean features, the inputs of the head, of the examples of each class."""
    sums: Tensor | None = None
    for x, y in shards(setup, data):
        batch, network = Batch(x, y), setup.training.network
        output = network.output(
            model.params, network.copy_buffers(model.buffers), batch, train=False
        )
        if output.features is None:
            break
        features, labels = output.features.double().cpu(), only_tensor(y, "a class").cpu()
        if sums is None:
            sums = torch.zeros(data.classes, features.shape[1], dtype=torch.float64)
        sums.index_add_(0, labels, features)
    counts = torch.from_numpy(np.bincount(data.labels, minlength=data.classes))
    return (torch.zeros(data.classes, 0) if sums is None else sums) / counts[:, None]


def measure_cka(round: ObservedRound) -> RoundDiagnostics:
    """Return the CKA of each local model with the global model after the round, by layer.

    The probe set are examples of the test set, the same ones in every round. Where they have
    labels and the model a head, ``class_drift`` is how far the mean features of a class move
    between the global and a local model, over the norm of the global model's.
    """
    data, setup = round.probe("test"), round.setup
    reference = layer_grams(setup, round.after, data)
    local = [layer_grams(setup, round.local_model(row), data) for row in range(len(round.clients))]
    numbers, breakdowns = {}, {}
    for name, unbiased in (("unbiased", True), ("biased", False)):
        values = {
            layer: mean(np.array([cka(grams[layer], k, unbiased=unbiased) for grams in local]))
            for layer, k in reference.items()
        }
        numbers[name] = mean(np.array([*values.values()]))
        breakdowns[f"{name}.layer"] = values
    measured = RoundDiagnostics(numbers, breakdowns)
    if setup.training.network.head and data.has_labels:
        measured |= _class_drift(round, data)
    return measured


def _class_drift(round: ObservedRound, data: Dataset) -> RoundDiagnostics:
    reference = class_means(round.setup, round.after, data)
    moved = [
        (class_means(round.setup, round.local_model(row), data) - reference).norm(dim=1)
        for row in range(len(round.clients))
    ]
    drift = torch.stack(moved).mean(dim=0) / reference.norm(dim=1)
    by_class = {str(label): value for label, value in enumerate(drift.tolist())}
    return RoundDiagnostics({"class_drift": mean(drift)}, {"class_drift.class": by_class})
