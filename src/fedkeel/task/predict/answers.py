"""What a model answers: labels with their names and probabilities, or quantities."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeel.errors import DataError
from fedkeel.task.losses import LOSSES, bce, cross_entropy, dice, quantity_of
from fedkeel.task.losses import token_cross_entropy as token_loss


@dataclass(frozen=True)
class Predictions:
    """The answers of a model. N examples, Y classes.

    Args:
        values: [N] the most likely label, as a number; or quantities [N] or [N, D]; masks
            [N, H, W], tokens [N, T] or several labels [N, L], as the task has them.
        probabilities: [N, Y] of each class, or [N] of the label 1 where the model has one score;
            None of quantities. Of masks and tokens with an axis for each place.
        scores: what the module returns, [N, ...].
        label_names: Y names of the labels, empty where they are just numbers.
        others: columns of a table that are not inputs, or the names of files, [N] texts each.
        warnings: what a user should know about the examples.
    """

    values: Tensor
    probabilities: Tensor | None
    scores: Tensor
    label_names: tuple[str, ...] = ()
    others: dict[str, list[str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    @property
    def labels(self) -> list[str]:
        """[N] the names of the most likely labels.

        Raises:
            DataError: there is not one label for each example.
        """
        if self.probabilities is None or self.values.ndim != 1:
            if self.probabilities is None:
                got, do = "quantities", "take .values, a tensor of the quantities"
            else:
                got = f"labels of shape {list(self.values.shape[1:])} for each example"
                do = "take .values: the class of each place of a mask, or 0 or 1 for each label"
            raise DataError(
                "The model does not predict one label for each example.", got=got, do=do
            )
        numbers = self.values.tolist()
        return [self._name(number) for number in numbers]

    def _name(self, label: int) -> str:
        return self.label_names[label] if self.label_names else str(label)

    def table(self) -> dict[str, list[str]]:
        """Return columns of [N] texts: those that are not inputs, and then what is predicted.

        That is ``prediction``, and ``probability NAME`` of each class; several quantities or labels
        have a number behind the name.

        Raises:
            DataError: the answers are masks or the like, which no table can hold; or a column of
                the examples has the name of one of these.
        """
        if self.values.ndim > 2:
            raise DataError(
                "The answers do not fit into a table.",
                got=f"a prediction of shape {list(self.values.shape[1:])} for each example",
                do="take them in Python: fedkeel.load(RUN).predict(...).values",
            )
        columns: dict[str, list[str]] = {}
        if self.values.ndim == 1:
            is_label = self.probabilities is not None
            columns["prediction"] = self.labels if is_label else _numbers(self.values)
        else:
            for place in range(self.values.shape[1]):
                columns[f"prediction {place}"] = _numbers(self.values[:, place])
        if self.probabilities is not None:
            shares = self.probabilities
            if shares.ndim == 1:
                columns[f"probability {self._name(1)}"] = _numbers(shares)
            for place in range(shares.shape[1] if shares.ndim == 2 else 0):
                is_class = self.values.ndim == 1
                name = self._name(place) if is_class else str(place)
                columns[f"probability {name}"] = _numbers(shares[:, place])
        if taken := [name for name in columns if name in self.others]:
            raise DataError(
                "The examples have a column with the name of an answer.",
                got=", ".join(map(repr, taken)),
                why="the table would hold only one of the two columns",
                do="rename the column, or leave it out",
            )
        return {**self.others, **columns}


def answer(scores: Tensor, loss: str, classes: int) -> tuple[Tensor, Tensor | None]:
    """Return what scores say: values, and probabilities where there are such.

    Args:
        scores: [N, ...] what the module returns.
        loss: name of the loss by which it was trained. Of a user's own, scores [N, Y] are taken for
            scores of classes where there are Y classes, as metrics do, and others as they are.
        classes: Y, 0 of quantities.
    """
    known = LOSSES.get(loss)
    if known is None and classes >= 2 and scores.ndim == 2 and scores.shape[1] == classes:
        known = cross_entropy
    if known is token_loss or known is cross_entropy:
        axis = -1 if known is token_loss else 1
        shares = scores.softmax(axis)
        return shares.argmax(axis), shares
    if known is dice and scores.ndim == 4 and scores.shape[1] > 1:
        shares = scores.softmax(1)
        return shares.argmax(1), shares
    if scores.ndim > 1 and scores.shape[1] == 1:
        scores = scores.squeeze(1)
    if known is bce or known is dice:
        shares = torch.sigmoid(scores)
        return (shares >= 0.5).to(torch.int64), shares
    return (scores if known is None else quantity_of(known)(scores)), None


def _numbers(values: Tensor) -> list[str]:
    """Return numbers as texts of nine digits, which give the same float32 when they are read."""
    return [f"{value:.9g}" for value in values.tolist()]
