"""AFL: the mixture of clients on which the model is worst, sought while it is trained.

Source
    Mohri, Sivek and Suresh, Agnostic Federated Learning, ICML 2019 (key mohri2019afl). Section 4,
    the algorithm Stochastic-AFL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.method.context import Outcome, Population, Round, RoundCohort
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.parts.qfedavg import losses_of, received_loss
from fedkeel.method.roles import Reduction, ServerState, Upload
from fedkeel.solve.span import Floats, Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class AFL(Upload, Reduction, ServerState):
    r"""Weights updates by lambda, which climbs along the clients' losses on the simplex.

    .. math::
        \Delta = \sum_k \lambda_k\Delta_k, \qquad
        \lambda \leftarrow \Pi_{\mathrm{simplex}}(\lambda + \gamma F)

    with F_k the task's loss of the received model over all examples of client k, and Pi the nearest
    point with entries >= 0 that add up to 1. So it seeks the model whose loss is least on the worst
    mixture of the clients.

    Source: mohri2019afl, section 4, Stochastic-AFL.

    Args:
        gamma: step of lambda, >= 0, in units of 1 / loss.
    Sent: one number up, the loss.
    State: lambda at the server, one number for each client, starting at 1 / C.
    Cost: a forward pass over all examples of the client.
    Laws: gamma = 0 with all clients is FedAvg with uniform weights. lambda stays on the simplex.
        With all clients, after `fedsgd`, a fixed point is a saddle point: clients that count have
        one and the same loss, the others none above it.
    Deviations: the paper takes one stochastic gradient in a round and adds up over rounds to a mean
        model; here clients make the run's local work, and the last model is the result. Where not
        all clients take part, those that do climb, and their weights are divided by their sum; if
        that is 0 they count equally. How clients count (`weights`) is only lambda.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("afl(gamma=0.1)").reduction.gamma
        0.1
    """

    gamma: float = param(0.1, ge=0.0)

    name: ClassVar[str] = "afl"
    paper: ClassVar[str] = "mohri2019afl"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.STABLE_CLIENTS, Capability.SEPARATE_UPDATES}
    )
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def upload(self, round: Round) -> State:
        """Return F_k."""
        return {"loss": received_loss(round)}

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the sum with weights lambda."""
        shares = _lambda(cohort)[cohort.clients]
        total = shares.sum()
        count = len(shares)
        shares = shares / total if total > 0.0 else np.full(count, 1.0 / count)
        cohort.log("largest", float(shares.max()))
        return updates.sum(shares)

    def init_server(self, params: Tree, population: Population) -> State:
        """Return equal weights."""
        like = next(iter(params.values()))
        count = population.clients
        weights = torch.full((count,), 1.0 / count, dtype=torch.float64, device=like.device)
        return {"lambda": weights}

    def next_server(self, outcome: Outcome) -> State:
        """Return lambda after a step up the losses of the round's clients."""
        cohort = outcome.cohort
        weights = _lambda(cohort).copy()
        weights[cohort.clients] += self.gamma * losses_of(cohort)
        device = tree.leaf(cohort.state, "lambda").device
        return {"lambda": torch.from_numpy(nearest_on_simplex(weights)).to(device)}


def _lambda(cohort: RoundCohort) -> Floats:
    return np.asarray(tree.leaf(cohort.state, "lambda").cpu().numpy())


def nearest_on_simplex(x: Floats) -> Floats:
    """Return the point nearest to x with entries >= 0 that add up to 1.

    >>> nearest_on_simplex(np.array([0.5, 1.1, -3.0])).round(12).tolist()
    [0.2, 0.8, 0.0]
    """
    falling = np.sort(x)[::-1]
    excess = (np.cumsum(falling) - 1.0) / np.arange(1, len(x) + 1)
    level = excess[np.flatnonzero(falling > excess)[-1]]
    return np.asarray(np.maximum(x - level, 0.0))
