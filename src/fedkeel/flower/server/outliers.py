"""Replies of a round whose norm, or whose numbers, are far from the others'."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkeel.method.context import ByPart
from fedkeel.method.round_values import Replies
from fedkeel.tree import walk


def outlying_replies(replies: Replies, factor: float) -> dict[int, str]:
    """Return the rows whose norm is more than `factor` times the median, each with the reason.

    The update and each part's upload are compared separately. The median is the lower one, and
    ignores what is not finite, so of two replies the larger one is the outlier.
    """
    norms = _norms("a message", replies.uploads)
    if replies.update:
        norms = {"an update": _norm(list(replies.update.values())), **norms}
    return _outliers(norms, factor)


def outlying_answers(answers: ByPart, factor: float) -> dict[int, str]:
    """Return the same for the answers to surveys."""
    return _outliers(_norms("an answer", answers), factor)


def outlying_numbers(numbers: Mapping[str, Tensor], factor: float) -> dict[int, str]:
    """Return the same for numbers that only the records hold, such as losses.

    They may be close to 0 for most clients, as the loss is on what a model knows well. So the
    median counts as 1 at least.

    Args:
        numbers: [K] of each client, by what they are called.
        factor: see `outlying_replies`.

    >>> outlying_numbers({"a loss": torch.tensor([0.5, 2.0, -3e29]).double()}, 1000.0)
    {2: 'a loss 2e+29 times as large as the median'}
    >>> outlying_numbers({"a loss": torch.tensor([1e-9, 1e-9, 20.0]).double()}, 1000.0)
    {}
    """
    sizes = {name: values.double().abs() for name, values in numbers.items()}
    return _outliers(sizes, factor, least=1.0)


def _outliers(
    norms_by_name: Mapping[str, Tensor], factor: float, least: float = 0.0
) -> dict[int, str]:
    reasons: dict[int, str] = {}
    for name, norms in norms_by_name.items():
        finite = norms[norms.isfinite()]
        median = max(float(finite.median()), least) if len(finite) else 0.0
        if median > 0.0:
            outlying = (norms > factor * median) & norms.isfinite()
            for row in torch.nonzero(outlying).flatten().tolist():
                ratio = float(norms[row]) / median
                reasons.setdefault(row, f"{name} {ratio:.0e} times as large as the median")
    return reasons


def _norms(name: str, by_part: ByPart) -> dict[str, Tensor]:
    """Return the norms [K], in float64, of what each part sends."""
    norms = {}
    for part, state in by_part.items():
        tensors = [t for _, t in walk(state) if t.is_floating_point()]
        if tensors:
            norms[f"{name} of {part}"] = _norm(tensors)
    return norms


def _norm(tensors: list[Tensor]) -> Tensor:
    squares = [t[..., None].flatten(1).double().square().sum(dim=1) for t in tensors]
    return torch.stack(squares).sum(dim=0).sqrt()
