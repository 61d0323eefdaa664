"""FedSpeed: a proximal term whose pull is corrected, and gradients mixed with those uphill.

Source
    Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization
    Accuracy, ICLR 2023 (key sun2023fedspeed). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Round, Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import ClientState, GradientRule, Penalty, UpdateTransform
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedSpeed(GradientRule, Penalty, UpdateTransform, ClientState):
    r"""Trains with a proximal term and its correction, on gradients at and uphill of the model.

    .. math::
        g &\leftarrow (1-\alpha)\nabla f(\theta) + \alpha\nabla f\Bigl(\theta
            + \rho\frac{\nabla f(\theta)}{\lVert\nabla f(\theta)\rVert}\Bigr)
            - h_k + \frac1\lambda(\theta - \theta^t) \\
        h_k &\leftarrow h_k - \frac1\lambda(\theta_k - \theta^t), \qquad
            \text{sent: } \theta_k - \lambda h_k

    with both gradients on the same mini-batch and the norm over the whole model.

    Source: sun2023fedspeed, Algorithm 1, where h_k is written as g-hat.

    Args:
        rho: rho_0, length of the step uphill, >= 0, in units of the parameters.
        alpha: weight of the gradient uphill, in [0, 1]. 1 in the public code.
        lam: lambda, > 0, in units of the learning rate: 1 / lam is the weight of the proximal term,
            0.1 in the public code.
    Sent: nothing beyond the model.
    State: h_k for each client, one model, starting at 0.
    Cost: two gradients for each step.
    Laws: with rho = 0 or alpha = 0 and all clients in every round it is FedDyn with alpha = 1/lam.
        A client's first round ends as with FedProx of mu = 1/lam and the same step uphill; what it
        sends is twice as long. At an exact local optimum h_k is the gradient of the client's loss
        there. On heterogeneous quadratics with unequal local work its fixed point is the optimum of
        the clients' mean loss.
    Deviations: Algorithm 1 goes uphill by rho times the gradient; the paper's experiments and
        public code by a fixed length, as here. Nothing is added to the norm. The public code adds
        to the mean of the cohort's models that of all clients' corrections, as FedDyn does; the
        paper, and this, the mean of the cohort's: the same where all clients take part. It has
        1/lam in the weight decay, and h_k in units of the parameters. The proximal terms of other
        parts are taken at the local model, and count in the direction uphill.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedspeed(lam=5.0)").pull
        0.2
    """

    rho: float = param(0.1, ge=0.0)
    alpha: float = param(1.0, ge=0.0, le=1.0)
    lam: float = param(10.0, gt=0.0)

    name: ClassVar[str] = "fedspeed"
    paper: ClassVar[str] = "sun2023fedspeed"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.WHOLE_UPDATES, Capability.FRESH_UPDATES}
    )
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.WHOLE_UPDATES})

    @property
    def pull(self) -> float:
        """Return 1 / lam: the linear term does not pull, it counts as any other gradient."""
        return 1.0 / self.lam

    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return (theta - theta_t) / lam - h_k."""
        h = tree.leaves(step.client_state, "h")
        return tree.map(
            lambda w, start, h: torch.sub(w, start).mul_(1.0 / self.lam) - h, params, step.start, h
        )

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the mixture of the gradients at and uphill of the local model."""
        here = step.grad(params)
        uphill = tree.sub(here, self.penalty_gradient(params, step))
        ascended = tree.add(params, uphill, tree.factor_to(self.rho, uphill))
        there = step.grad(ascended, penalties_at=params)
        return there if self.alpha == 1.0 else tree.blend(there, here, self.alpha)

    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Return the update less lam times the new h_k."""
        return tree.add(update, self._corrected(round), -self.lam)

    def init_client(self, start: Tree) -> State:
        """Return h_k = 0."""
        return {"h": tree.zeros_like(start)}

    def next_client(self, round: Round) -> State:
        """Return h_k - (theta_k - theta_t) / lam."""
        return {"h": self._corrected(round)}

    def _corrected(self, round: Round) -> Tree:
        moved = tree.sub(round.end, round.start)
        return tree.add(tree.leaves(round.client_state, "h"), moved, -1.0 / self.lam)
