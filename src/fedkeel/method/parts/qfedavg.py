"""q-FedAvg: clients with a higher loss count more, so that losses become more equal.

Source
    Li, Sanjabi, Beirami and Smith, Fair Resource Allocation in Federated Learning, ICLR 2020 (key
    li2020qffl). Algorithm 2 and, for the objective q-FFL, Eq. (2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Round, RoundCohort
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import Reduction, Upload
from fedkeel.solve.span import Floats, Span
from fedkeel.tree import State, Tree

PIECE = 256
"""Examples of which a loss is taken at a time."""

SMALLEST_LOSS = 1e-10
"""Smallest loss that has a power; a smaller one, or one below 0, counts as this."""


def received_loss(round: Round) -> Tensor:
    """Return [] the mean task loss of the received model over a client's examples, in evaluation.

    A loss that looks at a whole batch is a mean over pieces of 256 examples.
    """
    step = round.all_examples_step()
    network, sums, counts = step.network, [], []
    buffers = network.copy_buffers(step.received)
    for piece, weight in step.pieces(PIECE):
        loss = network.loss(round.start, buffers, piece.batch, train=False)
        sums.append(torch.where(weight > 0, weight * loss, 0.0))
        counts.append(weight)
    return torch.stack(sums).sum() / torch.stack(counts).sum()


def losses_of(cohort: RoundCohort) -> Floats:
    """Return [K] the losses that clients have sent, as float64."""
    return np.asarray(tree.leaf(cohort.uploads, "loss").double().cpu().numpy())


@dataclass(frozen=True)
class QFedAvg(Upload, Reduction):
    r"""Weights updates by a power of the received model's loss, and shortens the step to match.

    .. math::
        \Delta = \frac{\sum_k p_k F_k^q\,\Delta_k/\eta}{\sum_k p_k h_k}, \qquad
        h_k = q F_k^{q-1} \lVert\Delta_k/\eta\rVert^2 + F_k^q/\eta

    with F_k the task's loss of the received model over all examples of client k. It goes down on
    the sum of p_k F_k^(q+1) / (q + 1), and the sum of the h_k bounds that objective's curvature.

    Source: li2020qffl, Algorithm 2, with L = 1 / eta; the objective is Eq. (2).

    Args:
        q: how much more a higher loss counts, >= 0. The paper has 0.001 to 5, by data set.
    Sent: one number up, the loss.
    State: none.
    Cost: a forward pass over all examples of the client; the norms of the K updates.
    Laws: q = 0 is FedAvg. After `fedsgd` it is the paper's q-FedSGD, Algorithm 1. With one client
        the step is FedAvg's over 1 + q ||Delta||^2 / (eta F). Its fixed points are those where the
        weighted updates cancel: after `fedsgd`, the stationary points of q-FFL.
    Deviations: the paper draws clients in proportion to p_k and counts them equally; here all are
        as likely, and count by p_k. L is one over the round's learning rate, as in the public code;
        the paper tunes it on q = 0. A loss below 1e-10 counts as 1e-10.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("qfedavg(q=2.0)").reduction.q
        2.0
    """

    q: float = param(1.0, ge=0.0)

    name: ClassVar[str] = "qfedavg"
    paper: ClassVar[str] = "li2020qffl"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.SEPARATE_UPDATES}
    )

    def upload(self, round: Round) -> State:
        """Return F_k."""
        return {"loss": received_loss(round)}

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the weighted sum."""
        losses = np.maximum(losses_of(cohort), SMALLEST_LOSS)
        raised = cohort.weights * (losses / losses.max()) ** self.q  # no power overflows
        squares = np.diagonal(updates.gram(cohort.names)) if self.q > 0.0 else 0.0
        bound = 1.0 + self.q * squares / (cohort.lr * losses)
        shares = raised / (raised * bound).sum()
        cohort.log("step", float(shares.sum()))
        return updates.sum(shares)
