"""Which replies of a round are not like the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkeel.method.context import ByPart
from fedkeel.method.server_round import Replies
from fedkeel.tree import walk


def outliers(replies: Replies, factor: float) -> dict[int, str]:
    """Return the rows whose norm is more than `factor` times the median, and why, in words.

    The update, and each part's message, are compared by themselves. The median is the lower one and
    leaves out what is not finite, so that of two replies the larger one is the outlier.
    """
    update = {"an update": _norm(list(replies.update.values()))} if replies.update else {}
    return _far({**update, **_norms("a message", replies.uploads)}, factor)


def odd_answers(answers: ByPart, factor: float) -> dict[int, str]:
    """Return the same of the answers to surveys."""
    return _far(_norms("an answer", answers), factor)


def _far(measured: Mapping[str, Tensor], factor: float) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, norms in measured.items():
        finite = norms[norms.isfinite()]
        if not len(finite):
            continue
        middle = float(finite.median())
        for row in torch.nonzero(norms > factor * middle).flatten().tolist():
            if middle > 0.0 and bool(norms[row].isfinite()):
                times = float(norms[row]) / middle
                found.setdefault(row, f"{name} {times:.0e} times as large as the median")
    return found


def _norms(what: str, by_part: ByPart) -> dict[str, Tensor]:
    """Return norms [K] in float64 of what each part sends, by what it is called."""
    found = {}
    for part, state in by_part.items():
        tensors = [t for _, t in walk(state) if t.is_floating_point()]
        if tensors:
            found[f"{what} of {part}"] = _norm(tensors)
    return found


def _norm(tensors: list[Tensor]) -> Tensor:
    squares = [t[..., None].flatten(1).double().square().sum(dim=1) for t in tensors]
    return torch.stack(squares).sum(dim=0).sqrt()
