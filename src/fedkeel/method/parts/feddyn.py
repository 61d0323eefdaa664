"""FedDyn: a linear and a quadratic term that make the clients' optima agree with the server's.

Source
    Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021 (key acar2021feddyn).
    Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Population, Round, RoundCohort, Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import ClientState, Penalty, ServerOptimiser
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedDyn(Penalty, ClientState, ServerOptimiser):
    r"""Lets each client minimise its loss with a term that remembers its own gradient.

    .. math::
        \theta_k &\approx \arg\min_\theta\; F_k(\theta) - \langle h_k, \theta\rangle
            + \frac\alpha2\lVert\theta-\theta^t\rVert^2, \qquad
        h_k \leftarrow h_k - \alpha\,(\theta_k - \theta^t) \\
        h &\leftarrow h - \frac\alpha C \sum_{k\in S} (\theta_k - \theta^t), \qquad
        \theta^{t+1} = \frac1{|S|}\sum_{k\in S}\theta_k - h/\alpha

    At an exact local optimum h_k is the gradient of F_k there.

    Source: acar2021feddyn, Algorithm 1.

    Args:
        alpha: weight of the quadratic term, > 0, in units of 1 / learning rate. The paper tunes
            {0.001, 0.01, 0.1}.
        divisor: what the sum in h is divided by: the number of ``clients`` C (the paper), or the
            square of the ``cohort``'s |S|, as in GC-Fed's public code: the same where
            C = |S|^2, and C / |S|^2 times as long a step otherwise.
    Sent: nothing beyond the model.
    State: h_k for each client and h at the server, one model each, starting at 0.
    Cost: two passes over the parameters for each step.
    Laws: h is the mean of the h_k over all C clients where no other part changes the updates. FedGH
        and CGC change them, and h follows the changed updates. FedNova divides updates by their
        steps, and is refused. On heterogeneous quadratics with unequal local work its fixed point
        is the optimum of the clients' mean loss, whatever `weights` says: clients count equally in
        h. The clients' first round is FedProx's with mu = alpha; of all clients, it moves the model
        twice as far.
    Deviations: local optima are approximated by the configured work. The authors' public code
        divides alpha by C times a client's share of the examples, and puts it into the weight
        decay. It clips the gradient, with the linear term in it, at 10, and adds the weight decay
        after that; `clip` clips both terms. What it sends is the same as here: the mean of the
        selected clients' last models plus the mean of all clients' corrections, -h / alpha.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("feddyn(alpha=0.01)").pull
        0.01
    """

    alpha: float = param(0.1, gt=0.0)
    divisor: Literal["clients", "cohort"] = "clients"

    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "acar2021feddyn"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.WHOLE_UPDATES, Capability.SEPARATE_UPDATES}
    )
    traits: ClassVar[Traits] = Traits(server_holds_sum=True)

    @property
    def pull(self) -> float:
        """Return alpha: the linear term does not pull, it counts as any other gradient."""
        return self.alpha

    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return alpha (theta - theta_t) - h_k."""
        h = tree.leaves(step.client_state, "h")
        return tree.map(
            lambda w, start, h: torch.sub(w, start).mul_(self.alpha) - h, params, step.start, h
        )

    def init_client(self, start: Tree) -> State:
        """Return h_k = 0."""
        return {"h": tree.zeros_like(start)}

    def next_client(self, round: Round) -> State:
        """Return h_k - alpha (theta_k - theta_t)."""
        moved = tree.sub(round.end, round.start)
        return {"h": tree.add(tree.leaves(round.client_state, "h"), moved, -self.alpha)}

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return h = 0."""
        return {"h": tree.zeros_like(params)}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model, moved by the aggregate and by -h / alpha, and h."""
        count = len(updates)
        divisor = cohort.population.clients if self.divisor == "clients" else max(1, count) ** 2
        moved = updates.sum(np.full(count, 1.0 / divisor))
        h = tree.add(tree.leaves(cohort.state, "h"), moved, -self.alpha)
        return tree.add(tree.add(params, update), h, -1.0 / self.alpha), {"h": h}
