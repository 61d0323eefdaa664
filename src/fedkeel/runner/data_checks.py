"""The test set of a run: its labels and shapes have to be those of the training set."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from fedkeel.base.values import shape_of, shape_text
from fedkeel.data.dataset import Dataset
from fedkeel.errors import DataError, ModelError, counted
from fedkeel.method.compose import Plan
from fedkeel.method.part import Capability
from fedkeel.task.batch import Batch
from fedkeel.task.losses import (
    cross_entropy,
)
from fedkeel.task.network import Network
from fedkeel.task.output_check import check_tokens
from fedkeel.task.target_check import check_targets


def matched_test_set(train: Dataset, test: Dataset) -> Dataset:
    """Return the test set with labels numbered as those that are trained on."""
    if train.columns and test.columns and train.columns != test.columns:
        both = zip_longest(test.columns, train.columns)
        got, expected = next((a, b) for a, b in both if a != b)
        raise DataError(
            "The columns of the test set are not those of the training set.",
            got=repr(got),
            expected=repr(expected),
            why="columns are matched by their position, not by their name",
            do="put the columns of both in one order",
        )
    if isinstance(train.y, dict) or isinstance(test.y, dict):
        return test
    if not train.classes and test.classes:  # whole numbers by chance
        return replace(test, y=test.y.to(train.y.dtype), classes=0)
    if train.has_labels and not test.classes:
        raise DataError(
            "The targets of the test set are quantities, and those of the training set are labels.",
            got=f"targets such as {test.y.flatten()[0].item():g}",
            expected=f"labels 0..{train.classes - 1}",
            why="numbers that are all whole are taken as labels",
            do="say classes=0 for the training set where its targets are quantities, too",
        )
    return test.with_label_names(train.label_names, "The test set") if train.label_names else test


def public_inputs(
    plan: Plan, network: Network, train: Dataset, public: Dataset | None
) -> Batch | None:
    """Return the public inputs as the run's type has them; None where no part needs them.

    Raises:
        DataError: they have another shape than the training inputs, or other targets.
    """
    if public is None or Capability.PUBLIC_INPUTS not in plan.needs:
        return None
    public = matched_test_set(train, public.to(network.dtype))
    if public.shape != train.shape or not len(public):
        raise DataError(
            "Public and training inputs differ in shape." if len(public) else "No public inputs.",
            got=f"{shape_text(public.x)} of the public inputs",
            expected=f"{shape_text(train.x)}, as in training, but for the number of examples",
            do="prepare both alike",
        )
    check_targets(network, public, "The public set")
    return Batch(public.x, public.y)


def check_test_targets(network: Network, train: Dataset, test: Dataset) -> None:
    """Refuse a test set that the model cannot be tested on as it is trained.

    Raises:
        ModelError: inputs or labels do not fit.
        DataError: targets do not fit.
    """
    if test.shape != train.shape:
        raise ModelError(
            "Training and test inputs differ in shape.",
            got=f"{shape_text(test.x)} of the test set",
            expected=f"{shape_text(train.x)}, as in training, but for the number of examples",
            do="prepare both alike",
        )
    if shape_of(test.y) != shape_of(train.y):
        raise DataError(
            "Training and test targets differ in shape.",
            got=f"{shape_text(test.y)} of the test set",
            expected=f"{shape_text(train.y)}, as in training, but for the number of examples",
            do="prepare both alike",
        )
    outputs = network.scores_shape[0] if network.scores_shape else 0
    if network.task_loss is cross_entropy and test.has_labels and test.classes > outputs:
        raise ModelError(
            "The model's output does not fit the test labels.",
            got=f"{counted(outputs, 'output')} for {counted(test.classes, 'class')}",
            do="change the last layer, or check the test labels",
        )
    check_targets(network, test, "The test set")
    check_tokens(network, test, "The test set")
