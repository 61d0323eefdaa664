"""FedACG: clients start from the model moved ahead along the server's momentum.

Source
    Kim, Kim and Han, Communication-Efficient Federated Learning with Accelerated Client Gradient,
    CVPR 2024 (key kim2024fedacg). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.config import Weights
from fedkeel.method.context import Population, RoundCohort, Step
from fedkeel.method.part import param
from fedkeel.method.roles import Dispatch, Penalty, ServerOptimiser
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedACG(Dispatch, Penalty, ServerOptimiser):
    r"""Sends the model moved ahead along the server's momentum, and keeps clients near it.

    .. math::
        \hat\theta^t &= \theta^t + \lambda m, \qquad
        \theta_k \approx \arg\min_\theta\; F_k(\theta) + \beta\lVert\theta-\hat\theta^t\rVert^2 \\
        m &\leftarrow \lambda m + \Delta, \qquad \theta^{t+1} = \theta^t + m

    with Delta the mean of the clients' updates, which begin at the model they received. So the new
    model is the mean of the clients' models.

    Source: kim2024fedacg, Algorithm 1.

    Args:
        lam: lambda, momentum in [0, 1). 0.85 in the paper's experiments.
        beta: weight of the quadratic term, which has no 1/2, >= 0, in units of 1 / learning rate.
            FedProx's mu is twice as much.
        step: what the model is moved by: the ``momentum`` m, or only the ``update`` Delta, as in
            GC-Fed's public code until August 2025, where the step ahead is lost in each round.
    Sent: nothing beyond the model.
    State: m at the server, one model, starting at 0.
    Cost: one pass over the parameters for each step.
    Laws: lam = beta = 0 is FedAvg, bit for bit. lam = 0 is FedProx with mu = 2 beta. With one
        full-batch step of each client and beta = 0 it is Nesterov's accelerated gradient. Without
        beta its fixed point is that of FedAvg.
    Deviations: the authors' public code clips gradients at 10 (`clip`) and has no local momentum.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedacg(beta=0.01)").pull
        0.02
    """

    lam: float = param(0.85, ge=0.0, lt=1.0)
    beta: float = param(0.001, ge=0.0)
    step: Literal["momentum", "update"] = "momentum"

    name: ClassVar[str] = "fedacg"
    paper: ClassVar[str] = "kim2024fedacg"
    weights: ClassVar[Weights | None] = "uniform"

    @property
    def pull(self) -> float:
        """Return 2 beta."""
        return 2.0 * self.beta

    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return 2 beta (theta - theta^), from the model that was received."""
        return tree.scale(tree.sub(params, step.start), self.pull)

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return m = 0."""
        return {"m": tree.zeros_like(params)}

    def dispatch(self, params: Tree, state: State, lr: float) -> Tree:
        """Return the model, ahead by lambda m."""
        return tree.add(params, tree.leaves(state, "m"), self.lam)

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model after a step along m, and m."""
        m = tree.add(update, tree.leaves(cohort.state, "m"), self.lam)
        return tree.add(params, m if self.step == "momentum" else update), {"m": m}
