"""The coordinate-wise median and trimmed mean: aggregates on which few clients have little effect.

Source
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018
    (key yin2018). Definitions 1 and 2, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Weights
from fedkeel.method.context import RoundCohort
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import Reduction
from fedkeel.solve.span import Span
from fedkeel.tree import Tree


def middle(rows: Tensor, trimmed: int) -> Tensor:
    """Return the mean of rows [K, ...] without the `trimmed` largest and smallest of each entry.

    >>> middle(torch.tensor([[9.0], [1.0], [2.0], [0.0]]), 1)
    tensor([1.5000])
    """
    ordered = torch.sort(rows, dim=0).values
    return ordered[trimmed : len(rows) - trimmed].mean(dim=0)


@dataclass(frozen=True)
class Median(Reduction):
    r"""Takes the median of the K updates, entry by entry.

    .. math:: \Delta_j = \mathrm{median}_k\,(\Delta_k)_j

    For an even number of clients it is the mean of the two in the middle.

    Source: yin2018, Definition 1, Algorithm 1.
    Sent: nothing beyond the model.
    State: none.
    Cost: sorts K numbers for each parameter.
    Laws: of one or two updates it is their mean. Fewer than half of the clients cannot move an
        entry beyond the range of the others.
    Deviations: the paper takes the median of gradients, where ours is of updates, which is the same
        for one step. Clients count equally, whatever `weights` says.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("median").weights
        'uniform'
    """

    name: ClassVar[str] = "median"
    paper: ClassVar[str] = "yin2018"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def withstands(self, count: int) -> int:
        """Return how many cannot move it beyond the range of the others."""
        return (count - 1) // 2

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the medians."""
        trimmed = (len(updates) - 1) // 2
        return tree.map(lambda rows: middle(rows, trimmed), updates.materialise())


@dataclass(frozen=True)
class TrimmedMean(Reduction):
    r"""Takes the mean of the K updates without the largest and smallest values of each entry.

    .. math::
        \Delta_j = \frac1{K-2b}\sum_{k \in U_j} (\Delta_k)_j, \qquad
        b = \lfloor\beta K\rfloor

    where U_j leaves out the b largest and the b smallest values of entry j.

    Source: yin2018, Definition 2, Algorithm 1.

    Args:
        beta: share of the clients trimmed at each end, in [0, 0.5): at least that of the clients
            that may be broken.
    Sent: nothing beyond the model.
    State: none.
    Cost: sorts K numbers for each parameter, unless nothing is trimmed.
    Laws: beta = 0, or beta K < 1, is the unweighted mean, bit for bit. beta near 1/2 is the median.
    Deviations: the paper takes the mean of gradients, where ours is of updates, which is the same
        for one step. Clients count equally, whatever `weights` says.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("trimmed_mean(beta=0.2)").reduction.trimmed(10)
        2
    """

    beta: float = param(0.1, ge=0.0, lt=0.5)

    name: ClassVar[str] = "trimmed_mean"
    paper: ClassVar[str] = "yin2018"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def trimmed(self, clients: int) -> int:
        """Return b, the number of values left out at each end."""
        return min(int(self.beta * clients + 1e-9), (clients - 1) // 2)

    def withstands(self, count: int) -> int:
        """Return b, the number of values left out at each end."""
        return self.trimmed(count)

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the trimmed means."""
        trimmed = self.trimmed(len(updates))
        cohort.log("trimmed", trimmed)
        if trimmed == 0:
            return updates.sum(np.full(len(updates), 1.0 / len(updates)))
        return tree.map(lambda rows: middle(rows, trimmed), updates.materialise())
