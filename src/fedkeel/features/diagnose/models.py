"""Measuring a model on some examples: its scores, and its accuracy by class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.values import Values, rows_of
from fedkeel.data.dataset import Dataset
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.evaluation import evaluate, scores_by_group
from fedkeel.method.context import Floats
from fedkeel.records.rows import Scores
from fedkeel.task.outputs import scores_of
from fedkeel.tree import Tree


@dataclass(frozen=True)
class ModelState:
    """A model.

    Args:
        params: its parameters.
        buffers: its buffers.
    """

    params: Tree
    buffers: Tree


def measure(setup: TrainingSetup, model: ModelState, data: Dataset) -> Scores:
    """Return the metrics of the task, the loss among them, on some examples."""
    on_data = replace(setup, test=data)
    measured = evaluate(on_data, model.params, model.buffers, "test")
    return scores_by_group(on_data, "test", measured, of_all=True)[0]


def shards(setup: TrainingSetup, data: Dataset) -> Iterator[tuple[Values, Values]]:
    """Yield inputs and targets in pieces of the size of an evaluation's."""
    for start in range(0, len(data), setup.shard):
        piece = slice(start, start + setup.shard)
        yield rows_of(data.x, piece), rows_of(data.y, piece)


def class_accuracies(setup: TrainingSetup, model: ModelState, data: Dataset) -> Floats:
    """Return [Y] the accuracy on the examples of each class; NaN for a class without any."""
    network, classes = setup.training.network, data.classes
    hits, counts = torch.zeros(classes), torch.zeros(classes)
    for x, y in shards(setup, data):
        scores = scores_of(network.test_output(model.params, model.buffers, x)).cpu()
        labels = _labels(y).cpu()
        hits += torch.bincount(labels[scores.argmax(dim=1) == labels], minlength=classes)
        counts += torch.bincount(labels, minlength=classes)
    with np.errstate(invalid="ignore"):
        accuracies: Floats = hits.double().numpy() / counts.double().numpy()
    return accuracies


def _labels(y: Values) -> Tensor:
    if isinstance(y, dict):
        raise TypeError("several targets have no one label")
    return y
