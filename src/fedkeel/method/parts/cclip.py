"""Centred clipping: the mean of updates that are clipped around the last aggregate.

Source
    Karimireddy, He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021
    (key karimireddy2021history). Algorithm 2 and Equation (CC).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.config import Weights
from fedkeel.method.context import Outcome, Population, RoundCohort
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import Reduction, ServerState
from fedkeel.solve.robust import centred_clipping
from fedkeel.solve.span import Span, inner
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class CentredClipping(Reduction, ServerState):
    r"""Moves the last aggregate by the mean of the clipped differences to the updates.

    .. math:: v \leftarrow v + \frac1K \sum_k (\Delta_k - v)\,
        \min\Bigl(1, \frac{\tau}{\lVert\Delta_k - v\rVert}\Bigr)

    Source: karimireddy2021history, Algorithm 2.

    Args:
        tau: largest distance by which a client pulls, > 0, in units of the update.
        steps: how often v moves in a round, >= 1. The paper takes 1.
    Sent: nothing beyond the model.
    State: v, the last aggregate, at the server; 0 before the first round.
    Cost: one Gram matrix of the K updates and v, twice, and two passes over them.
    Laws: tau above all distances is the unweighted mean, bit for bit. One client moves the
        aggregate by no more than steps tau / K.
    Deviations: the paper clips momenta of the workers, where ours are updates: it relies on their
        momentum; `local.momentum` with `local.keep_state` is the closest to it here. Clients count
        equally.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("cclip(tau=0.5)").reduction.name
        'cclip'
    """

    tau: float = param(1.0, gt=0.0)
    steps: int = param(1, ge=1)

    name: ClassVar[str] = "cclip"
    paper: ClassVar[str] = "karimireddy2021history"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def init_server(self, params: Tree, population: Population) -> State:
        """Return an aggregate of 0."""
        return {"center": tree.zeros_like(params)}

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the aggregate."""
        center, names = tree.leaves(cohort.state, "center"), list(cohort.names)
        single = tree.map(lambda t: t[None], center)
        to_center = updates.inner_products(center, names)[:, None]
        square = inner(single, single, names)
        gram = np.block([[updates.gram(names), to_center], [to_center.T, square]])
        coefficients = centred_clipping(gram, self.tau, self.steps)
        pulled = updates.sum(coefficients[:-1])
        if coefficients[-1] == 0.0:
            return pulled
        return tree.add(pulled, center, float(coefficients[-1]))

    def next_server(self, outcome: Outcome) -> State:
        """Return the aggregate of this round, made once more of the same updates."""
        return {"center": self.reduce(outcome.updates, outcome.cohort)}
