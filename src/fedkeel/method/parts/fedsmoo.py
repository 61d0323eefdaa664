"""FedSMOO: FedDyn on gradients uphill, with one direction uphill that clients agree on.

Source
    Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching
    Global Consistency and Smooth Landscape, ICML 2023 (key sun2023fedsmoo). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Population, Round, RoundCohort, Step
from fedkeel.method.part import Traits, param
from fedkeel.method.parts.feddyn import FedDyn
from fedkeel.method.roles import Broadcast, Carry, GradientRule, Upload
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedSMOO(FedDyn, GradientRule, Carry, Upload, Broadcast):
    r"""Takes FedDyn's steps at a point uphill, whose direction is held near that of all clients.

    .. math::
        e &= \rho\frac{\nabla f(\theta) - \mu_k - s}{\lVert\nabla f(\theta) - \mu_k - s\rVert},
            \qquad \mu_k \leftarrow \mu_k + e - s \quad\text{in each local step} \\
        g &= \nabla f(\theta + e) - h_k + \alpha(\theta - \theta^t),\qquad
        s \leftarrow \rho\frac{\sum_{k\in S}\mu_k}{\bigl\lVert\sum_{k\in S}\mu_k\bigr\rVert}

    with both gradients on the same mini-batch, the norms over all parameters that are shared, and
    h_k and the server's step as in FedDyn.

    Source: sun2023fedsmoo, Algorithm 1.

    Args:
        alpha: weight of the quadratic term, > 0, see FedDyn; 0.1 in the public code.
        divisor: see FedDyn.
        rho: length of the step uphill, >= 0, in units of the parameters.
    Sent: s to the clients and mu_k to the server, one model each.
    State: h_k and mu_k for each client, h and s at the server, one model each, starting at 0.
    Cost: two gradients for each step.
    Laws: with rho = 0 it is FedDyn. A step uphill is rho long, whatever mu_k and s are.
    Deviations: s is computed only from the mu_k, as in the authors' public code, which leaves a
        small term of the paper's s out. Nothing is added to the norms; the public code adds 1e-7.
        The proximal terms of other parts are taken at the local model, and count in the direction
        uphill.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedsmoo(rho=0.05)").pull
        0.1
    """

    rho: float = param(0.1, ge=0.0)

    name: ClassVar[str] = "fedsmoo"
    paper: ClassVar[str] = "sun2023fedsmoo"
    traits: ClassVar[Traits] = Traits(server_holds_sum=True, needs_only_sum=True)

    def message(self, state: State) -> State:
        """Return the common direction s."""
        return {"s": state["s"]}

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient uphill, and note the new mu_k."""
        common = tree.leaves(step.broadcast, "s")
        dual = tree.leaves(step.carry, "mu")
        uphill = tree.sub(step.grad(params), self.penalty_gradient(params, step))
        ascent = _of_length(self.rho, tree.sub(tree.sub(uphill, dual), common))
        step.noted["mu"] = tree.add(dual, tree.sub(ascent, common))
        return step.grad(tree.add(params, ascent), penalties_at=params)

    def init_carry(self, start: Tree, client_state: State) -> State:
        """Return mu_k as the last round left it."""
        return {"mu": client_state["mu"]}

    def next_carry(self, before: Tree, carry: State) -> State:
        """Return the new mu_k, which the gradient has noted."""
        return carry

    def init_client(self, start: Tree) -> State:
        """Return h_k = mu_k = 0."""
        return {**super().init_client(start), "mu": tree.zeros_like(start)}

    def next_client(self, round: Round) -> State:
        """Return FedDyn's h_k, and mu_k after the last step."""
        return {**super().next_client(round), "mu": round.carry["mu"]}

    def upload(self, round: Round) -> State:
        """Return mu_k."""
        return {"mu": round.carry["mu"]}

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return h = s = 0."""
        return {**super().init_optimiser(params, population), "s": tree.zeros_like(params)}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return FedDyn's model, h, and s."""
        moved, state = super().apply(params, update, updates, cohort)
        total = tree.sum_rows(tree.leaves(cohort.uploads, "mu"))
        return moved, {**state, "s": _of_length(self.rho, total)}


def _of_length(length: float, direction: Tree) -> Tree:
    """Return a direction with another length; 0 where it has none."""
    return tree.scale(direction, tree.factor_to(length, direction))
