"""What attackers do to their examples: flipped labels, and a trigger with a label of its own.

Source
    Label flipping: Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated
    Learning, USENIX Security 2020 (key fang2020), Section 5.1. Backdoor: Bagdasaryan et al., How To
    Backdoor Federated Learning, AISTATS 2020 (key bagdasaryan2020), Sections 4.1 and 4.3, with the
    trigger in the image of Gu et al., BadNets (key gu2017).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.rng import generator
from fedkeel.base.values import only_tensor, shape_text
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.errors import DataError
from fedkeel.features.attackers.settings import Adversary
from fedkeel.method.context import Ints

POISONING = ("label_flip", "backdoor")
"""Kinds of attacks that change the attackers' examples."""


def poisoned(federation: Federation, settings: Adversary, attackers: Ints, seed: int) -> Federation:
    """Return the federation with the examples that attackers train on changed.

    What clients hold out for evaluation stays as it is.

    Args:
        federation: the clients.
        settings: the attack; of a kind that changes no examples the federation is returned.
        attackers: their numbers.
        seed: seed of the run; of a backdoor, it decides which examples get the trigger.

    Raises:
        DataError: the targets are not labels, the inputs cannot carry a trigger, or an attacker has
            an example that an honest client has, too.
    """
    if settings.kind not in POISONING:
        return federation
    data = federation.data
    _check_labels(data, settings)
    rows = {int(k): federation.client(int(k)) for k in attackers}
    of_attackers = np.concatenate(list(rows.values()))
    is_attacker = np.isin(federation.client_of_row(), attackers)
    if np.isin(of_attackers, federation.rows[~is_attacker]).any():
        raise DataError(
            "An attacker has an example that an honest client has, too.",
            why="its label would be changed for both",
            do="give each client examples of its own",
        )
    y = only_tensor(data.y, "an attack on labels").clone()
    if settings.kind == "label_flip":
        index = torch.from_numpy(of_attackers)
        y[index] = data.classes - 1 - y[index]
        return replace(federation, data=replace(data, y=y))
    chosen = np.concatenate([_chosen(rows[k], settings, seed, k) for k in rows])
    index = torch.from_numpy(chosen)
    y[index] = settings.target
    x = _checked_inputs(data, settings).clone()
    x[index] = with_trigger(x[index], settings.trigger, brightest(x))
    return replace(federation, data=replace(data, x=x, y=y))


def triggered(test: Dataset, train: Dataset, settings: Adversary) -> Dataset:
    """Return the test examples of other labels than the target, with trigger and target.

    The accuracy on them is the attack success rate.

    Args:
        test: the test set.
        train: the training set, for the brightness of the trigger.
        settings: the backdoor.

    Raises:
        DataError: there are none, or the inputs cannot carry a trigger.
    """
    _check_labels(test, settings)
    other = test.take(np.flatnonzero(test.labels != settings.target))
    if not len(other):
        raise DataError(f"All test examples have the label {settings.target}, adversary.target.")
    x = with_trigger(
        _checked_inputs(other, settings),
        settings.trigger,
        brightest(_checked_inputs(train, settings)),
    )
    y = torch.full_like(only_tensor(other.y, "a backdoor"), settings.target)
    return replace(other, x=x, y=y, sources=("trigger",), source=None)


def with_trigger(x: Tensor, side: int, value: float) -> Tensor:
    """Return inputs [n, ...] with the trigger: a square of an image, or the last columns.

    >>> with_trigger(torch.zeros(1, 2, 2), 1, 9.0).tolist()
    [[[0.0, 0.0], [0.0, 9.0]]]
    """
    x = x.clone()
    if x.ndim >= 3:
        x[..., -side:, -side:] = value
    else:
        x[..., -side:] = value
    return x


def brightest(x: Tensor) -> float:
    """Return the largest number of all inputs, which a trigger consists of."""
    return float(x.max())


def _chosen(rows: Ints, settings: Adversary, seed: int, client: int) -> Ints:
    """Return the rows of an attacker that get the trigger, at least one."""
    count = max(1, round(settings.poisoned * len(rows)))
    return generator(seed, "trigger", 0, client).permutation(rows)[:count]


def _check_labels(data: Dataset, settings: Adversary) -> None:
    if not data.has_labels:
        raise DataError(
            f"The attack {settings.kind!r} needs labels, and the targets are not labels.",
            do="choose one that changes updates, such as 'sign_flip'",
        )
    if settings.kind == "backdoor" and settings.target >= data.classes:
        raise DataError(
            "adversary.target is not a label.",
            got=settings.target,
            expected=f"0..{data.classes - 1}",
        )


def _checked_inputs(data: Dataset, settings: Adversary) -> Tensor:
    """Return the inputs, if they can carry a trigger."""
    x = data.x
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        raise DataError(
            "The inputs cannot carry the trigger of a backdoor.",
            got=shape_text(x),
            expected="one tensor of images or columns",
        )
    sides = x.shape[-2:] if x.ndim >= 3 else x.shape[-1:]
    if settings.trigger > min(sides):
        raise DataError(
            "adversary.trigger is larger than an input.",
            got=settings.trigger,
            expected=f"1..{min(sides)}",
        )
    return x
