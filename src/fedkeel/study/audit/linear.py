"""What linear layers give away without any search: inputs of the first one, labels of the last.

Sources
    Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, 2017:
    `first_inputs`. Zhao et al., iDLG: Improved Deep Leakage from Gradients, 2020: `single_label`.
    Wainakh et al., User-Level Label Leakage from Gradients, 2022: `label_counts`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedkeel.method.context import Floats, Ints
from fedkeel.study.audit.matching import GradientModel
from fedkeel.tree import Tree


def first_layer(gradient: Tree, features: int) -> tuple[Tensor, Tensor] | None:
    """Return weight [U, F] and bias [U] gradients of a first linear layer on all the inputs.

    Args:
        gradient: of the whole model.
        features: F, numbers in an input.

    Returns:
        None where the first parameters are not such a layer with a bias.
    """
    name, first = next(iter(gradient.items()))
    bias = gradient.get(f"{name.removesuffix('weight')}bias")
    is_linear = name.endswith("weight") and first.ndim == 2 and first.shape[1] == features
    return (first, bias) if is_linear and bias is not None else None


def first_inputs(weight: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
    """Return [m, F] inputs that the gradients of a first linear layer give away.

    The gradient of unit u is sum_b e_bu x_b by the weights and sum_b e_bu by the bias. Where a
    single example reaches the unit, their quotient is the example.

    Args:
        weight: [U, F] gradient by the weights.
        bias: [U] gradient by the biases.
        low: smallest value that an input has; quotients below are mixtures.
        high: largest value.

    Returns:
        The quotients that lie in the range of inputs, the unit with the largest gradient first,
        each once.
    """
    order = bias.abs().argsort(descending=True)
    order = order[bias[order].abs() > 1e-9 * max(float(bias.abs().max()), 1e-300)]
    quotients = weight[order] / bias[order, None]
    slack = 1e-3 * (high - low)
    quotients = quotients[((quotients >= low - slack) & (quotients <= high + slack)).all(dim=1)]
    kept: list[Tensor] = []
    for candidate in quotients:
        if all(float((candidate - other).abs().max()) > 10 * slack for other in kept):
            kept.append(candidate)
    return torch.stack(kept) if kept else quotients[:0]


def last_layer(gradient: Tree, classes: int) -> tuple[Tensor, Tensor | None] | None:
    """Return weight [Y, F] and bias [Y] gradients of the last linear layer, None for no bias.

    Returns:
        None where no linear layer has one output for each class.
    """
    names = [k for k, g in gradient.items() if g.ndim == 2 and g.shape[0] == classes]
    if not names:
        return None
    return gradient[names[-1]], gradient.get(f"{names[-1].removesuffix('weight')}bias")


def single_label(weight: Tensor, bias: Tensor | None) -> int:
    """Return the label of the only example behind a gradient of the cross-entropy.

    The gradient by the score of a class is its probability, minus 1 for the true one: only that is
    negative. Without a bias, the row of the true class points against all others.

    Args:
        weight: [Y, F] gradient by the weights of the last layer.
        bias: [Y] gradient by its biases; None where it has none.
    """
    if bias is not None:
        return int(bias.argmin())
    products = weight @ weight.T
    against = (products < 0).sum(dim=1)
    return int(against.argmax())


def label_counts(model: GradientModel, bias: Tensor, examples: int, inputs: Tensor) -> Ints:
    """Return [Y] how many examples of each class are behind a gradient of the mean cross-entropy.

    The mean gradient by the score of class c is the mean probability of c minus the share of c.
    The attacker does not know the mean probability on the client's examples, and takes that on
    other inputs.

    Args:
        model: the received model.
        bias: [Y] gradient by the biases of the last layer.
        examples: n, how many examples there are.
        inputs: [m, ...] inputs of the attacker's own.

    Returns:
        Whole numbers whose sum is n.
    """
    expected = model.scores(inputs).double().softmax(dim=1).mean(dim=0)
    shares = (expected - bias.double()).clamp(min=0.0)
    return whole_counts(shares.numpy(), examples)


def guessed_shares(known: Ints) -> dict[str, Floats]:
    """Return shares of the labels [Y] that one guesses who saw no message, by name of the guess.

    ``majority`` is one label for all, and is there only where more than half of the known examples
    have it: of classes that are about equal, the first is so by chance.

    Args:
        known: [Y] how many examples of each class the attacker knows.

    >>> guessed_shares(np.array([3, 1]))["majority"].tolist()
    [1.0, 0.0]
    """
    classes, total = len(known), int(known.sum())
    guesses: dict[str, Floats] = {"even": np.full(classes, 1.0 / classes)}
    if total:
        guesses["shares"] = known / total
    if 2 * known.max() > total:
        guesses["majority"] = np.eye(classes)[known.argmax()]
    return guesses


def whole_counts(shares: np.ndarray[tuple[int], np.dtype[np.float64]], total: int) -> Ints:
    """Return whole numbers in proportion to shares, whose sum is the total: largest remainders.

    >>> whole_counts(np.array([0.5, 0.3, 0.2]), 4).tolist()
    [2, 1, 1]
    """
    size = float(shares.sum())
    wanted = shares / size * total if size > 0 and math.isfinite(size) else shares * 0.0
    counts = np.floor(wanted).astype(np.int64)
    missing = total - int(counts.sum())
    for place in np.argsort(counts - wanted, kind="stable")[: max(missing, 0)]:
        counts[place] += 1
    counts[0] += total - int(counts.sum())  # of shares that are all 0
    return counts
