"""FedAsync: each client's model is mixed into the server's as soon as it comes.

Source
    Xie, Koyejo and Gupta, Asynchronous Federated Optimization, arXiv 1903.03934, 2019 (key
    xie2019fedasync). Algorithm 1, and section 5.2 for the functions of staleness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.method.context import Floats, Ints, Population, RoundCohort
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.parts.fedbuff import polynomial
from fedkeel.method.roles import ServerOptimiser, ServerPolicy
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


def hinge(staleness: Ints, slope: float, free: int) -> Floats:
    """Return 1 for a staleness up to `free`, and 1 / (slope (staleness - free) + 1) beyond.

    >>> hinge(np.array([0, 4, 5]), slope=10.0, free=4).round(3).tolist()
    [1.0, 1.0, 0.091]
    """
    return np.asarray(1.0 / (slope * np.maximum(staleness - free, 0) + 1.0))


@dataclass(frozen=True)
class FedAsync(ServerPolicy, ServerOptimiser):
    r"""Moves the global model a part of the way to each client's model, less for an old one.

    .. math::
        \theta \leftarrow (1 - \alpha_\tau)\,\theta + \alpha_\tau\,\theta_k, \qquad
        \alpha_\tau = \alpha\, s(\tau)

    with tau the steps that the server has made since client k was sent the model, and s one of

    .. math::
        s(\tau) = 1, \qquad s(\tau) = (1 + \tau)^{-a}, \qquad
        s(\tau) = \begin{cases} 1 & \tau \le b \\ 1 / (a'(\tau - b) + 1) & \text{else.}\end{cases}

    Source: xie2019fedasync, Algorithm 1 and section 5.2.

    Args:
        alpha: share of the client's model, in (0, 1]; the paper takes 0.6.
        decay: s: ``constant``, ``polynomial`` or ``hinge``.
        a: exponent of ``polynomial``, >= 0; the paper takes 0.5.
        slope: a' of ``hinge``, >= 0; the paper takes 10.
        b: staleness that ``hinge`` lets pass, >= 0; the paper takes 4.
    Sent: nothing beyond the model.
    State: the models that clients train from.
    Cost: two passes over the parameters for each update.
    Laws: with alpha = 1 and one client it is that client's own training, round after round. With
        alpha = 1 and ``constant`` the last model that came is the global one.
    Deviations: the paper's clients add a proximal term, which is `fedprox(mu=0.005)` beside this
        part; its alpha falls in the course of training, here it is one number. An update that is
        not stale has tau = 0, so that s is 1.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedprox(mu=0.005)+fedasync(alpha=0.9)").policy.updates_per_step()
        1
    """

    alpha: float = param(0.6, gt=0.0, le=1.0)
    decay: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: float = param(0.5, ge=0.0)
    slope: float = param(10.0, ge=0.0)
    b: int = param(4, ge=0)

    name: ClassVar[str] = "fedasync"
    paper: ClassVar[str] = "xie2019fedasync"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WHOLE_UPDATES})
    traits: ClassVar[Traits] = Traits(updates_from_present=True)

    def updates_per_step(self) -> int:
        """Return 1."""
        return 1

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return nothing: mixing remembers nothing."""
        return {}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model, moved along `update`, which leads to the client's model."""
        factor = self.alpha * float(self.factors(cohort.staleness)[0])
        cohort.log("staleness", float(cohort.staleness[0]))
        return tree.add(params, update, factor), cohort.state

    def factors(self, staleness: Ints) -> Floats:
        """Return [K] s of updates."""
        if self.decay == "constant":
            return np.ones(len(staleness))
        if self.decay == "polynomial":
            return polynomial(staleness, self.a)
        return hinge(staleness, self.slope, self.b)
