"""FedLADA: local AMSGrad from averaged second moments, amended by the last global direction.

Source
    Sun et al., Efficient Federated Learning via Local Adaptive Amended Optimizer with Linear
    Speedup, IEEE TPAMI 2023 (key sun2023fedlada). Section 3, the algorithm FedLADA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Local, Weights
from fedkeel.method.context import Outcome, Population, Round
from fedkeel.method.local_optimiser import LocalOptimiser, decayed, descend, moments
from fedkeel.method.part import Traits, param
from fedkeel.method.roles import Broadcast, ClientOptimiser, ServerState, Upload
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class AmendedAMSGrad(LocalOptimiser):
    """AMSGrad without bias corrections, mixed with a constant direction.

    Args:
        betas: beta_1 and beta_2.
        alpha: weight of AMSGrad's direction.
        weight_decay: lambda, decoupled.
        no_decay: parameters without weight decay.
    """

    betas: tuple[float, float]
    alpha: float
    weight_decay: float
    no_decay: frozenset[str]

    def init(self, params: Tree) -> State:
        """Return all at 0; a step needs a v above 0."""
        names = ("m", "v", "largest", "direction")
        return {name: tree.zeros_like(params) for name in names}

    def step(
        self, params: Tree, grads: Tree, state: State, lr: float | Tensor
    ) -> tuple[Tree, State]:
        """Return parameters and state after one step."""
        toward = tree.leaves(state, "direction")
        m, v = moments(tree.leaves(state, "m"), tree.leaves(state, "v"), grads, self.betas)
        largest = tree.map(torch.maximum, tree.leaves(state, "largest"), v)
        alpha = self.alpha
        direction = tree.map(
            lambda m, v, toward: alpha * (m / v.sqrt()) + (1.0 - alpha) * toward, m, largest, toward
        )
        direction = decayed(direction, params, self.weight_decay, self.no_decay)
        after: State = {"m": m, "v": v}
        after |= {"largest": largest, "direction": toward}
        return descend(params, direction, lr), after


@dataclass(frozen=True)
class FedLADA(ClientOptimiser, Upload, Broadcast, ServerState):
    r"""Mixes each adaptive local step with the direction of the last round.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1)g, \qquad v \leftarrow \beta_2 v + (1-\beta_2)g^2,
            \qquad \hat v \leftarrow \max(\hat v, v) \\
        \theta &\leftarrow \theta - \eta\Bigl(\alpha\frac{m}{\sqrt{\hat v}}
            + (1-\alpha)\,g_a\Bigr) \\
        \bar v &= \tfrac1K\sum_k\hat v_k, \qquad g_a = -\frac{\theta^{t+1}-\theta^t}{\eta\,S}

    In each round m starts at 0, v and v-hat at v-bar. S is the clients' mean number of steps.

    Source: sun2023fedlada, section 3, the algorithm FedLADA.

    Args:
        alpha: weight of the adaptive step, in (0, 1].
        beta1: how much of the mean gradient stays in each step, in [0, 1).
        beta2: how much of the mean squared gradient stays in each step, in [0, 1).
        eps: root of the first v-bar, > 0: no gradient is divided by less.
    Sent: g_a and v-bar down and v-hat up, three models beyond the model; one number up.
    State: g_a and v-bar at the server, one model each.
    Cost: AMSGrad, and one pass over the parameters for each step.
    Laws: alpha = 1 is local AMSGrad with averaged second moments. beta1 = 0 with an eps above all
        gradients is FedAvg with the learning rate alpha / eps in the first round. The first round
        is that of alpha times the learning rate.
    Deviations: no code by the authors was found; a public port (fedbrew, after AdaFed) reads the
        algorithm in the same way, but divides each client's update by its own number of steps. The
        code beside FedAdamW leaves out the maximum and adds Adam's epsilon and a decay of 0.001.
        Weight decay is the run's and decoupled; it acts beside the mixture.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedlada(alpha=0.2)").client_optimiser.alpha
        0.2
    """

    alpha: float = param(0.1, gt=0.0, le=1.0)
    beta1: float = param(0.9, ge=0.0, lt=1.0)
    beta2: float = param(0.99, ge=0.0, lt=1.0)
    eps: float = param(1e-3, gt=0.0)

    name: ClassVar[str] = "fedlada"
    paper: ClassVar[str] = "sun2023fedlada"
    weights: ClassVar[Weights | None] = "uniform"
    traits: ClassVar[Traits] = Traits(needs_only_sum=True)

    def local_optimiser(self, local: Local, no_decay: frozenset[str]) -> LocalOptimiser:
        """Return AMSGrad with a constant direction."""
        betas = (self.beta1, self.beta2)
        return AmendedAMSGrad(betas, self.alpha, local.weight_decay, no_decay)

    def start_optimiser(self, initial: State, broadcast: State, client_state: State) -> State:
        """Return m = 0, and the mean v."""
        v, toward = tree.leaves(broadcast, "v"), tree.leaves(broadcast, "direction")
        return {"m": initial["m"], "v": dict(v), "largest": dict(v), "direction": toward}

    def upload(self, round: Round) -> State:
        """Return v-hat, and the number of steps."""
        return {"v": tree.leaves(round.optimiser, "largest"), "steps": round.steps.double()}

    def init_server(self, params: Tree, population: Population) -> State:
        """Return v-bar = eps^2, and no direction."""
        first = tree.full_like(params, self.eps**2)
        return {"v": first, "direction": tree.zeros_like(params)}

    def message(self, state: State) -> State:
        """Return both."""
        return state

    def next_server(self, outcome: Outcome) -> State:
        """Return the mean over the clients, and the direction of this round."""
        cohort = outcome.cohort
        share = 1.0 / len(cohort.clients)
        steps = tree.leaf(cohort.uploads, "steps").sum() * share
        v = tree.scale(tree.sum_rows(tree.leaves(cohort.uploads, "v")), share)
        moved = tree.sub(outcome.end, outcome.start)
        return {"v": v, "direction": tree.scale(moved, -1.0 / (cohort.lr * steps))}
