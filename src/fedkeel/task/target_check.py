"""Targets that a loss cannot take, refused with a remedy before anything is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.data.dataset import Dataset
from fedkeel.errors import DataError
from fedkeel.task.losses import (
    IGNORED,
    WITH_UNKNOWN,
    Loss,
    bce,
    cox,
    cross_entropy,
    dice,
    loss_name,
    poisson,
    token_cross_entropy,
)
from fedkeel.task.network import Network

VOID = 255
"""What files of masks often hold where nothing counts."""

_BCE = (bce, nn.BCEWithLogitsLoss, nn.BCELoss)
_BCE_FUNCTIONS = (F.binary_cross_entropy_with_logits, F.binary_cross_entropy)
_COUNTS = (poisson, nn.PoissonNLLLoss, F.poisson_nll_loss)
_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)


def check_targets(network: Network, data: Dataset, what: str) -> None:
    """Refuse targets that the loss cannot take: torch would train on many of them in silence.

    Named losses are known, and those of torch; what a function of the user takes is not.

    Args:
        network: the model and its loss.
        data: a data set.
        what: what to call it in messages.

    Raises:
        DataError: a target is outside of 0 to 1 (bce, dice of one score), no class that the model
            scores (cross-entropy, dice of several), below 0 (poisson), no pair of a time and an
            event (cox); or there is no target that counts.
    """
    y, loss = data.y, network.task_loss
    if not isinstance(y, Tensor) or not len(y):
        return
    name = loss_name(loss)
    _check_known(y, loss, what)
    scores = network.scores_shape
    is_places = len(scores) == y.ndim and len(scores) > 1 and scores[0] > 1
    if _is_one_of(loss, (*_BCE, *_BCE_FUNCTIONS)) or (loss is dice and not is_places):
        _check_shares(y, name, loss in (bce, dice), what)
    elif loss is cox:
        _check_survival(y, what)
    elif _is_one_of(loss, _COUNTS):
        _check_counts(y, name, what)
    elif loss in (cross_entropy, dice) and scores:
        _check_classes(y, name, scores[0], IGNORED, what)
    elif loss is token_cross_entropy and scores:
        _check_classes(y, name, scores[-1], IGNORED, what)
    elif _is_one_of(loss, _CLASSES) and scores:
        _check_classes(y, name, scores[0], _ignored_by(loss), what)


def _check_known(y: Tensor, loss: Loss, what: str) -> None:
    """Refuse targets that are not known, NaN, where the loss does not leave them out."""
    if not y.is_floating_point() or not (unknown := y.isnan()).any():
        return
    if not any(loss is known for known in WITH_UNKNOWN):
        raise DataError(
            f"{what}: the loss {loss_name(loss)!r} does not leave out targets that are not known.",
            got=_first(y, unknown),
            expected=", ".join(sorted(repr(loss_name(known)) for known in WITH_UNKNOWN)),
            do="take one of these, or drop examples with gaps; of several labels say "
            f"{IGNORED} for one that is not known",
        )
    if unknown.all():
        raise DataError(f"{what}: no target is known.", got="NaN everywhere")


def _is_one_of(loss: Loss, known: tuple[Any, ...]) -> bool:
    """Return whether a loss is one of some functions, also with arguments, or of some classes."""
    function = loss.func if isinstance(loss, partial) else loss
    return function in known or type(function) in known


def _ignored_by(loss: Any) -> int:  # noqa: ANN401 - a module or a function of torch
    """Return the label that a loss of torch leaves out."""
    if isinstance(loss, partial):
        return int(loss.keywords.get("ignore_index", IGNORED))
    return int(getattr(loss, "ignore_index", IGNORED))


def _check_shares(y: Tensor, loss: str, leaves_out: bool, what: str) -> None:
    """Refuse targets outside of 0 to 1; those of -100 do not count where the loss leaves them out.

    Labels [N] have none of these: an example without its only label does not count.
    """
    is_left_out = leaves_out and y.ndim > 1 and not y.is_floating_point()
    counts = y != IGNORED if is_left_out else torch.ones((), dtype=torch.bool).expand(y.shape)
    _need_any(counts, loss, what)
    bad = counts & ((y < 0) | (y > 1))
    if bad.any():
        raise DataError(
            f"{what}: a target of the loss {loss!r} lies outside of 0 to 1.",
            got=_first(y, bad),
            expected="0 or 1, or a probability"
            + (f"; {IGNORED} where nothing counts" if is_left_out else ""),
            why="its loss would fall without bound",
            do=_remedy_for_shares(y, loss, leaves_out),
        )


def _remedy_for_shares(y: Tensor, loss: str, leaves_out: bool) -> str:
    """Return how to bring targets to 0 to 1."""
    values = torch.unique(y).tolist()
    noun = "mask" if y.ndim > 2 else "y"
    is_whole = all(value == round(value) for value in values)
    if values in ([0, VOID], [VOID]):
        return f"give {noun} // {VOID}, or ({noun} > 0).astype(int)"
    if values in ([1, 2], [2]):
        return f"number the classes from 0: {noun} - 1"
    if values == [-1, 1]:
        return f"give ({noun} + 1) // 2"
    unknown = [value for value in values if value in (-1, VOID, IGNORED)]
    if unknown and set(values) <= {0, 1, *unknown}:
        value = int(unknown[0])
        if not leaves_out:
            return f"take loss = 'bce', which leaves out targets of {IGNORED}, whole numbers"
        if y.ndim == 1:
            return "leave such examples out: each has one label, which is not known"
        if value == IGNORED:
            return f"give whole numbers, of which {IGNORED} does not count: {noun}.astype(int)"
        return (
            f"of unknown targets say {IGNORED}, which do not count: "
            f"numpy.where({noun} == {value}, {IGNORED}, {noun}).astype(int)"
        )
    if y.ndim > 2 and values[0] >= 0 and values[-1] <= VOID and is_whole and len(values) > 2:
        return (
            "number its classes from 0, with one output for each; "
            f"of shades of grey give ({noun} > 127).astype(int)"
        )
    if is_whole and values[0] >= 0 and len(values) > 2 and loss != "dice":
        return "several classes take loss = 'cross_entropy', quantities 'mse'"
    if values[0] >= 0 and values[-1] <= 100:
        return f"give shares, e.g. {noun} / 100 of percent; quantities take loss = 'mse'"
    return "bring them to 0 and 1; quantities take loss = 'mse'"


def _check_classes(y: Tensor, loss: str, outputs: int, ignored: int, what: str) -> None:
    """Refuse a class that the model has no score for. Probabilities are floating point."""
    if y.is_floating_point():
        return
    counts = y != ignored
    _need_any(counts, loss, what)
    bad = counts & ((y < 0) | (y >= outputs))
    if not bad.any():
        return
    raise DataError(
        f"{what}: a target of the loss {loss!r} is not a class that the model has a score for.",
        got=_first(y, bad),
        expected=f"0..{outputs - 1}, the outputs of the model, or {ignored}, which does not count",
        do=remedy_for_classes(y, outputs)
        or "give the last layer one output for each class, or check the targets",
    )


def remedy_for_classes(y: Tensor, outputs: int) -> str | None:
    """Return how to number the classes of masks or tokens; None where that is not known.

    Args:
        y: [N, ...] targets.
        outputs: number of classes that the model scores.
    """
    values = [value for value in torch.unique(y).tolist() if value != IGNORED]
    if not values or y.ndim < 2:
        return None
    if values == [0, VOID]:
        return f"give mask // {VOID}, or (mask > 0).astype(int)"
    known = [value for value in values if 0 <= value < outputs]
    others = sorted(set(values) - set(known))
    if len(others) == 1 and others[0] in (-1, VOID):
        return (
            f"where nothing counts (void) say {IGNORED}: "
            f"numpy.where(y == {others[0]}, {IGNORED}, y), of a signed type such as int64"
        )
    if values[0] == 1 and values[-1] == outputs:
        return "number the classes from 0: y - 1"
    return None


def _check_counts(y: Tensor, loss: str, what: str) -> None:
    bad = y < 0
    if bad.any():
        raise DataError(
            f"{what}: a target of the loss {loss!r} is negative.",
            got=_first(y, bad),
            expected="counts, 0 or more",
            why="its loss would fall without bound",
            do="give counts as they are, not standardised; other quantities take loss = 'mse'",
        )


def _check_survival(y: Tensor, what: str) -> None:
    """Refuse targets that are not pairs of a time and of 1 for an event or 0."""
    expected = "[N, 2]: the time, and 1 for an event or 0 for the end of observation"
    if y.ndim != 2 or y.shape[1] != 2:
        raise DataError(
            f"{what}: the loss 'cox' is of times until an event.",
            got=f"targets of shape {list(y.shape)}",
            expected=expected,
            do="give numpy.stack([time, event], axis=1)",
        )
    time, event = y.unbind(dim=1)
    bad = (event != 0) & (event != 1)
    if not bad.any():
        return
    values = torch.unique(event).tolist()
    if ((time == 0) | (time == 1)).all():
        do = "swap the columns: y[:, ::-1]"
    elif values in ([1, 2], [2]):
        do = "in R's form 2 is an event and 1 the end of observation: give event - 1"
    elif values in ([-1, 1], [-1]):
        do = "give event > 0"
    else:
        do = "of competing events say which one is looked at: event == 1"
    raise DataError(
        f"{what}: an event is neither 0 nor 1.",
        got=f"{event[bad][0].item():g} in row {int(bad.nonzero()[0])} (counted from 0)",
        expected=expected,
        do=do,
    )


def _need_any(counts: Tensor, loss: str, what: str) -> None:
    if not counts.any():
        raise DataError(
            f"{what}: no target of the loss {loss!r} counts.",
            got=f"{IGNORED} everywhere" if counts.ndim > 1 else "unknown labels only",
            do="check how the targets are made",
        )


def _first(y: Tensor, bad: Tensor) -> str:
    """Return the first of some targets, and its row."""
    place = tuple(bad.nonzero()[0].tolist())
    return f"{y[place].item():g} in row {place[0]} (counted from 0)"
