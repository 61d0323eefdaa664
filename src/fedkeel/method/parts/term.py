"""TERM: client losses tilted by an exponential, towards the worst clients or away from them.

Source
    Li, Beirami, Sanjabi and Smith, Tilted Empirical Risk Minimization, ICLR 2021 (key
    li2021term). Eq. (1) for the objective and Lemma 1 for its gradient, with clients as groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel.method.context import Round, RoundCohort
from fedkeel.method.part import Capability, param
from fedkeel.method.parts.qfedavg import losses_of, received_loss
from fedkeel.method.roles import Reduction, Upload
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class TERM(Upload, Reduction):
    r"""Weights updates by the exponential of the received model's loss.

    .. math::
        \Delta = \sum_k \lambda_k\Delta_k, \qquad
        \lambda_k = \frac{p_k e^{t F_k}}{\sum_j p_j e^{t F_j}}

    with F_k the task's loss of the received model over all examples of client k. It goes down on
    (1/t) log of the sum of p_k exp(t F_k).

    Source: li2021term, Eq. (1) and Lemma 1; clients are the groups.

    Args:
        t: tilt, in units of 1 / loss. Above 0 high losses count more, up to only the largest;
            below 0 they count less, which leaves out clients whose labels are noise.
    Sent: one number up, the loss.
    State: none.
    Cost: a forward pass over all examples of the client.
    Laws: t = 0 is FedAvg. After `fedsgd` its steps are gradient descent on the tilted loss. As t
        grows the weights go to the client with the largest loss, as it falls to the smallest.
    Deviations: the paper tilts losses of examples or of groups in one place, not of clients; in a
        round of several local steps the weights are those at the received model. Weights are of
        only this round's losses: the paper's stochastic solver keeps a running mean of the sum.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("term(t=-1.0)").reduction.t
        -1.0
    """

    t: float = param(1.0)

    name: ClassVar[str] = "term"
    paper: ClassVar[str] = "li2021term"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.SEPARATE_UPDATES}
    )

    def upload(self, round: Round) -> State:
        """Return F_k."""
        return {"loss": received_loss(round)}

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the weighted mean."""
        tilt = self.t * losses_of(cohort)
        raised = cohort.weights * np.exp(tilt - tilt.max())
        shares = raised / raised.sum()
        cohort.log("largest", float(shares.max()))
        return updates.sum(shares)
