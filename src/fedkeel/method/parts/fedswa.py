"""FedSWA and FedMoSWA: a learning rate that falls within each round, and a moving server average.

Source
    Liu et al., Improving Generalization in Federated Learning with Highly Heterogeneous Data via
    Momentum-Based Stochastic Controlled Weight Averaging, ICML 2025 (key liu2025fedswa).
    Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Local, Weights
from fedkeel.method.context import Outcome, Population, Round, RoundCohort, Step
from fedkeel.method.part import Capability, Stage, Traits, param
from fedkeel.method.roles import (
    AggregateTransform,
    Broadcast,
    ClientState,
    GradientTransform,
    LocalWork,
    ServerState,
    Upload,
)
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedSWA(LocalWork, AggregateTransform):
    r"""Lets the learning rate fall within each round, and moves the model by a share of the mean.

    .. math::
        \eta_s = \eta\,\bigl(1 - (1-\rho)\tfrac sS\bigr), \qquad
        \theta^{t+1} = \theta^t + \alpha\Bigl(\sum_k p_k\theta_k - \theta^t\Bigr)

    in the steps s = 0, ..., S-1 of a round.

    Source: liu2025fedswa, Algorithm 1.

    Args:
        rho: share of the learning rate that a round ends near, in [0, 1]. 0 in the public code.
        alpha: share of the way to the mean of the clients' models, > 0. 1 in the public code.
    Sent: nothing beyond the model.
    State: none.
    Cost: as FedAvg.
    Laws: rho = alpha = 1 is FedAvg, bit for bit. alpha is `addition(lr=alpha)`.
    Deviations: the public code makes each step of FedSWA with twice the learning rate. It also
        clips gradients at 10 (`clip`) and has a cosine over the rounds (`local.schedule`), which
        act beside this.

    Example:
        >>> import fedkeel
        >>> local = fedkeel.Local(lr=0.1, steps=4)
        >>> fedkeel.parse("fedswa(rho=0.0)").work(local).schedule.step_factors(0, 4, 10)
        (1.0, 0.75, 0.5, 0.25)
    """

    rho: float = param(0.1, ge=0.0, le=1.0)
    alpha: float = param(1.0, gt=0.0)

    name: ClassVar[str] = "fedswa"
    paper: ClassVar[str] = "liu2025fedswa"
    aggregate_stage: ClassVar[Stage] = Stage.LIMIT

    def work(self, local: Local) -> Local:
        """Return the settings with a learning rate that falls within each round."""
        schedule = local.schedule.model_copy(update={"cycle": self.rho})
        return local.model_copy(update={"schedule": schedule})

    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        """Return alpha times the update."""
        return update if self.alpha == 1.0 else tree.scale(update, self.alpha)


@dataclass(frozen=True)
class MomentumVariates(GradientTransform, ClientState, Upload, Broadcast, ServerState):
    r"""Corrects gradients as SCAFFOLD does, with a server's variate that is a moving average.

    .. math::
        \theta &\leftarrow \theta - \eta_s\,(g - c_k + c), \qquad
        c_k^+ = c_k - c + \frac{\theta^t-\theta_k}{\sum_s\eta_s} \\
        c &\leftarrow c + \gamma\Bigl(\tfrac1K\sum_k c_k^+ - c\Bigr)

    FedMoSWA is this beside FedSWA.

    Source: liu2025fedswa, Algorithm 2.

    Args:
        gamma: weight of the round's clients in c, in (0, 1]. 0.4 in the public code.
    Sent: c down and c_k^+ - c up, one model each beyond the model.
    State: c_k for each client and c at the server, one model each, starting at 0.
    Cost: two passes over the parameters for each step.
    Laws: the first round is FedSWA's. With all clients and full batches the optimum of the clients'
        mean loss, with c_k the clients' gradients there, is a fixed point.
    Deviations: the public code divides by S times the mean of the round's first and last learning
        rate; here it is the sum of the rates of the steps, as in the path. It takes the correction
        after the step, which is the same without local momentum.

    Example:
        >>> import fedkeel
        >>> [part.name for part in fedkeel.parse("fedmoswa").parts]
        ['fedswa', 'fedmoswa.variates']
    """

    gamma: float = param(0.4, gt=0.0, le=1.0)

    name: ClassVar[str] = "fedmoswa.variates"
    paper: ClassVar[str] = "liu2025fedswa"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    traits: ClassVar[Traits] = Traits(from_last_round_only=True, needs_only_sum=True)

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return g - c_k + c."""
        own, mean = tree.leaves(step.client_state, "c"), tree.leaves(step.broadcast, "c")
        return tree.sub(grads, tree.sub(own, mean))

    def init_client(self, start: Tree) -> State:
        """Return c_k = 0."""
        return {"c": tree.zeros_like(start)}

    def next_client(self, round: Round) -> State:
        """Return c_k^+."""
        own, mean = tree.leaves(round.client_state, "c"), tree.leaves(round.broadcast, "c")
        return {"c": tree.map(torch.add, tree.sub(own, mean), round.mean_grad())}

    def upload(self, round: Round) -> State:
        """Return c_k^+ - c."""
        new, mean = tree.leaves(round.new_state, "c"), tree.leaves(round.broadcast, "c")
        return {"c": tree.sub(new, mean)}

    def init_server(self, params: Tree, population: Population) -> State:
        """Return c = 0."""
        return {"c": tree.zeros_like(params)}

    def message(self, state: State) -> State:
        """Return c."""
        return state

    def next_server(self, outcome: Outcome) -> State:
        """Return c, moved towards the mean of the round's clients."""
        cohort = outcome.cohort
        changes, old = tree.leaves(cohort.uploads, "c"), tree.leaves(cohort.state, "c")
        share = self.gamma / len(cohort.clients)
        return {"c": tree.map(lambda c, changes: c + share * changes.sum(dim=0), old, changes)}
