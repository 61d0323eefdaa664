"""FedBuff: the server makes a step with every K updates, however old they are.

Source
    Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek and Huba, Federated Learning with Buffered
    Asynchronous Aggregation, AISTATS 2022 (key nguyen2022fedbuff). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel.config import Weights
from fedkeel.method.context import Floats, Ints, RoundCohort
from fedkeel.method.part import param
from fedkeel.method.roles import Reduction, ServerPolicy
from fedkeel.solve.span import Span
from fedkeel.tree import Tree


def polynomial(staleness: Ints, exponent: float) -> Floats:
    """Return (1 + staleness) ** -exponent, exactly 1 for an update that is not stale.

    >>> polynomial(np.array([0, 3]), 0.5).tolist()
    [1.0, 0.5]
    """
    return np.asarray((1.0 + staleness) ** -exponent)


@dataclass(frozen=True)
class FedBuff(ServerPolicy, Reduction):
    r"""Adds up a buffer of updates, each scaled down by how old the model is that it began at.

    .. math::
        \Delta = \sum_{k=1}^{K} p_k\,(1 + \tau_k)^{-a}\,\Delta_k, \qquad
        \theta \leftarrow \theta + \Delta

    with p_k = 1/K, and tau_k the steps that the server has made since client k was sent the model.

    Source: nguyen2022fedbuff, Algorithm 1; the scaling is of its section 5. Its server learning
        rate is `addition(lr=...)`.

    Args:
        buffer: K, the number of updates in a step of the server, >= 1. The paper takes 10.
        exponent: a, >= 0; the paper takes 1/2. With 0 old updates count in full.
    Sent: nothing beyond the model.
    State: the updates in the buffer, and the models that clients train from.
    Cost: one pass over the K updates.
    Laws: where all clients are equally fast and K of them train at a time, it is FedAvg, bit for
        bit. The factors are not divided by their sum, so a buffer of old updates makes a short
        step.
    Deviations: a client whose update is in the buffer waits for the server's step, so that no
        client is sent a model twice. In the paper, clients are drawn from so many that this does
        not arise. A round is a step of the server; the size of the cohort says how many train at a
        time. Buffers of the model are averaged without the factors.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedprox+fedbuff(buffer=5)").policy.updates_per_step()
        5
    """

    buffer: int = param(10, ge=1)
    exponent: float = param(0.5, ge=0.0)

    name: ClassVar[str] = "fedbuff"
    paper: ClassVar[str] = "nguyen2022fedbuff"
    weights: ClassVar[Weights | None] = "uniform"

    def updates_per_step(self) -> int:
        """Return K."""
        return self.buffer

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the sum of the scaled updates."""
        cohort.log("staleness", float(cohort.staleness.mean()))
        return updates.sum(cohort.weights * polynomial(cohort.staleness, self.exponent))
