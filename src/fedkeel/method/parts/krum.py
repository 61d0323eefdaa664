"""Krum, Multi-Krum and Bulyan: aggregates of the updates that lie closest together.

Source
    Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
    NeurIPS 2017 (key blanchard2017). Sections 4 and 5. El Mhamdi, Guerraoui and Rouault, The Hidden
    Vulnerability of Distributed Learning in Byzantium, ICML 2018 (key elmhamdi2018). Section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Weights
from fedkeel.method.context import Ints, RoundCohort
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import Reduction
from fedkeel.solve.robust import (
    bulyan_selection,
    count_of_share,
    krum_scores,
    squared_distances,
)
from fedkeel.solve.span import Floats, Span, relative_rounding
from fedkeel.tree import Tree

Neighbours = Literal["n-f-2", "n-f-1"]
"""Number of nearest others in a score: of the paper and Flower, or of the library ByzFL."""


def distances_of(updates: Span, cohort: RoundCohort) -> Floats:
    """Return [K, K] squared distances of the updates, over the whole model."""
    rounding = relative_rounding(updates.rows, cohort.names)
    return squared_distances(updates.gram(cohort.names), rounding)


def equally(chosen: Ints, count: int) -> Floats:
    """Return [count] weights that are equal for the chosen positions and 0 for the others."""
    weights = np.zeros(count)
    weights[chosen] = 1.0 / len(chosen)
    return weights


def nearest_to_median(rows: Tensor, count: int) -> Tensor:
    """Return the mean of the `count` values nearest to the median of rows [K, ...], by entry.

    >>> nearest_to_median(torch.tensor([[9.0], [1.0], [2.0], [0.0], [1.5]]), 3)
    tensor([1.5000])
    """
    ordered = torch.sort(rows, dim=0).values
    half = (len(rows) - 1) // 2
    median = ordered[half : len(rows) - half].mean(dim=0)
    order = (ordered - median).abs().argsort(dim=0, stable=True)[:count]
    return ordered.gather(0, order).mean(dim=0)


@dataclass(frozen=True)
class Krum(Reduction):
    r"""Takes the one update that is closest to its nearest others.

    .. math:: \Delta = \Delta_{i^*}, \qquad
        i^* = \arg\min_i \sum_{j \in N_i} \lVert\Delta_i - \Delta_j\rVert^2

    where N_i are the K - f - 2 updates nearest to that of client i, and f = floor(beta K).

    Source: blanchard2017, Section 4.

    Args:
        beta: share of the clients that may be broken, in [0, 0.5). f is no more than (K - 3) / 2,
            for which Krum is proved.
        neighbours: how many others are in a score: ``n-f-2`` as in the paper, or ``n-f-1``.
    Sent: nothing beyond the model.
    State: none.
    Cost: one Gram matrix of the K updates.
    Laws: it returns one of the updates, bit for bit; a shift of all updates shifts it. Fewer than
        f clients cannot make it return one that is far from all honest ones.
    Deviations: the paper chooses among gradients, where ours are updates, which is the same for one
        step. Of equal scores the client with the smallest number is taken. Clients count equally.
        ByzFL has ``n-f-1``. On non-IID data it drops what only few clients know, without any
        attacker: the guide to attackers has numbers.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("krum(beta=0.2)").reduction.name
        'krum'
    """

    beta: float = param(0.2, ge=0.0, lt=0.5)
    neighbours: Neighbours = "n-f-2"

    name: ClassVar[str] = "krum"
    paper: ClassVar[str] = "blanchard2017"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def withstands(self, count: int) -> int:
        """Return f, the number of broken updates that it is made for."""
        return broken_among(self.beta, count)

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the update with the smallest score."""
        order = best_by_krum(updates, cohort, self.beta, self.neighbours)
        if len(updates) == len(cohort.clients):
            cohort.log("client", float(cohort.clients[order[0]]))
        return updates.sum(equally(order[:1], len(updates)))


@dataclass(frozen=True)
class MultiKrum(Reduction):
    r"""Takes the mean of the m updates with the smallest scores of Krum.

    .. math:: \Delta = \frac1m \sum_{i \in M} \Delta_i

    Source: blanchard2017, Section 5.

    Args:
        beta: share of the clients that may be broken, in [0, 0.5); f = floor(beta K) as in `krum`.
        keep: m, how many updates are averaged, at most K; 0 takes K - f.
        neighbours: as in `krum`.
    Sent: nothing beyond the model.
    State: none.
    Cost: one Gram matrix of the K updates, and one pass over them.
    Laws: beta = 0 is the unweighted mean, bit for bit; keep = 1 is `krum`.
    Deviations: as of `krum`. The paper leaves m open; K - f is that of ByzFL. Flower's strategy
        chooses the same clients, then takes their mean by examples, and m is 1 where none is given.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedprox+multikrum(beta=0.2)").weights
        'uniform'
    """

    beta: float = param(0.2, ge=0.0, lt=0.5)
    keep: int = param(0, ge=0)
    neighbours: Neighbours = "n-f-2"

    name: ClassVar[str] = "multikrum"
    paper: ClassVar[str] = "blanchard2017"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def withstands(self, count: int) -> int:
        """Return f, the number of broken updates that it is made for; 0 where it keeps all."""
        return 0 if self.keep >= count else broken_among(self.beta, count)

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the mean of the updates with the smallest scores."""
        count = len(updates)
        keep = min(self.keep, count) or count - broken_among(self.beta, count)
        cohort.log("kept", keep)
        if keep == count:
            return updates.sum(np.full(count, 1.0 / count))
        order = best_by_krum(updates, cohort, self.beta, self.neighbours)
        return updates.sum(equally(order[:keep], count))


@dataclass(frozen=True)
class Bulyan(Reduction):
    r"""Chooses updates by Krum, and averages those values of each entry that are near the median.

    .. math:: \Delta_j = \frac{1}{K - 4f} \sum_{i \in B_j} (\Delta_i)_j

    where B_j are the K - 4f of the K - 2f chosen updates whose entry j is nearest to its median.

    Source: elmhamdi2018, Section 4, with Krum, which chooses one after the other.

    Args:
        beta: share of the clients that may be broken, in [0, 0.25): f = floor(beta K), and no more
            than (K - 3) / 4, for which Bulyan is proved.
    Sent: nothing beyond the model.
    State: none.
    Cost: one Gram matrix of the K updates, K^3 numbers, and sorting K numbers for each parameter.
    Laws: beta = 0 is the unweighted mean, bit for bit. No entry is beyond the range of those of the
        chosen updates.
    Deviations: as of `krum`. The median of an even number is the mean of the two in the middle.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("bulyan(beta=0.1)").reduction.name
        'bulyan'
    """

    beta: float = param(0.2, ge=0.0, lt=0.25)

    name: ClassVar[str] = "bulyan"
    paper: ClassVar[str] = "elmhamdi2018"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def withstands(self, count: int) -> int:
        """Return f, the number of broken updates that it is made for."""
        return count_of_share(self.beta, count, (count - 3) // 4)

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the means near the medians."""
        count = len(updates)
        broken = self.withstands(count)
        cohort.log("broken", broken)
        if broken == 0:
            return updates.sum(np.full(count, 1.0 / count))
        chosen = torch.from_numpy(bulyan_selection(distances_of(updates, cohort), broken))
        rows = updates.materialise()
        nearest = count - 4 * broken
        return tree.map(lambda t: nearest_to_median(t[chosen.to(t.device)], nearest), rows)


def broken_among(beta: float, count: int) -> int:
    """Return f, the number of broken updates among `count` for which Krum is proved."""
    return count_of_share(beta, count, (count - 3) // 2)


def best_by_krum(updates: Span, cohort: RoundCohort, beta: float, neighbours: Neighbours) -> Ints:
    """Return the positions of the updates in the order of their scores, the best one first."""
    count = len(updates)
    distances = distances_of(updates, cohort)
    nearest = count - broken_among(beta, count) - (2 if neighbours == "n-f-2" else 1)
    return np.argsort(krum_scores(distances, nearest), kind="stable")
