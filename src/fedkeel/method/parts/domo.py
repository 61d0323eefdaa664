"""DOMO: the server's momentum is fused into the model before clients train with their own.

Source
    Xu and Huang, Coordinating Momenta for Cross-Silo Federated Learning, AAAI 2022 (key
    xu2022domo). Pre-momentum fusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.part import param
from fedkeel.method.roles import Dispatch, ServerOptimiser
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class DOMO(Dispatch, ServerOptimiser):
    r"""Sends the model moved along the server's momentum, and steps along that momentum.

    .. math::
        \tilde\theta^t = \theta^t + \mu\eta m, \qquad
        m \leftarrow \beta m + \Delta/\eta, \qquad
        \theta^{t+1} = \theta^t + \gamma\eta m

    with Delta the mean of the clients' updates, which begin at the model they received, and eta the
    local learning rate. The clients' momentum is the run's (`local.momentum`).

    Source: xu2022domo, section on pre-momentum fusion.

    Args:
        fusion: mu, how far ahead along the momentum the clients start, >= 0.
        beta: momentum of the server, in [0, 1).
        lr: gamma, > 0.
    Sent: nothing beyond the model.
    State: m at the server, one model, starting at 0.
    Cost: three passes over the parameters for each round.
    Laws: at a constant local learning rate, fusion = 0 is FedAvgM, and with beta = 0 and lr = 1
        FedAvg; fusion = beta with lr = 1 is FedAvg with the model that FedACG sends, without its
        penalty.
    Deviations: ours follows two public codes, not the authors'. They write m as a mean gradient of
        K local steps, which here is a sum, so that clients may make different numbers of steps. The
        variant that spreads the fusion over the local steps (DOMO-S) is not here.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("domo(fusion=0.5)").dispatch.fusion
        0.5
    """

    fusion: float = param(0.9, ge=0.0)
    beta: float = param(0.9, ge=0.0, lt=1.0)
    lr: float = param(1.0, gt=0.0)

    name: ClassVar[str] = "domo"
    paper: ClassVar[str] = "xu2022domo"

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return m = 0."""
        return {"m": tree.zeros_like(params)}

    def dispatch(self, params: Tree, state: State, lr: float) -> Tree:
        """Return the model, ahead by mu eta m."""
        return tree.add(params, tree.leaves(state, "m"), self.fusion * lr)

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model after a step along m, and m."""
        m = tree.add(tree.scale(update, 1.0 / cohort.lr), tree.leaves(cohort.state, "m"), self.beta)
        return tree.add(params, m, self.lr * cohort.lr), {"m": m}
