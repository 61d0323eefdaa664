"""FedCM: every local step goes along the last global direction too.

Source
    Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021 (key xu2021fedcm).
    Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Population, Round, RoundCohort, Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import Broadcast, GradientTransform, ServerOptimiser, Upload
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedCM(GradientTransform, Upload, Broadcast, ServerOptimiser):
    r"""Mixes each local gradient with the mean gradient of the round before.

    .. math::
        g &\leftarrow \alpha g + (1-\alpha)\bar g^t \\
        \bar g^{t+1} &= -\frac{\Delta}{\eta \sum_k p_k K_k}, \qquad
        \theta^{t+1} = \theta^t + \eta_g\Delta

    with K_k the length of client k's path: its number of steps, for plain gradient descent.

    Source: xu2021fedcm, Algorithm 2.

    Args:
        alpha: weight of the fresh gradient, in (0, 1]. 0.1 in the paper.
        lr: eta_g, the server's learning rate, > 0. The paper's is K eta times ours.
    Sent: the mean gradient down, one model beyond the model; one number up.
    State: the mean gradient at the server, one model, starting at 0.
    Cost: one pass over the parameters for each step.
    Laws: alpha = 1 is FedAvg, bit for bit. The first round is FedAvg's with alpha times the
        learning rate, without weight decay. At a fixed point the mean gradient is 0, so without
        weight decay a fixed point is one of FedAvg with alpha times the learning rate; a weight
        decay lambda, which acts after the mixture, counts there as lambda / alpha does in FedAvg.
    Deviations: the paper's clients make K steps each; with unequal work ours divides by the mean
        length, so that the server's step is still eta K g-bar. The division is by the learning rate
        of the round that made the update, and by the path's length under local momentum. Penalties
        are part of the gradient that alpha weighs.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedcm(alpha=0.2)").weights
        'uniform'
    """

    alpha: float = param(0.1, gt=0.0, le=1.0)
    lr: float = param(1.0, gt=0.0)

    name: ClassVar[str] = "fedcm"
    paper: ClassVar[str] = "xu2021fedcm"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the mixture."""
        past = tree.leaves(step.broadcast, "mean")
        alpha = self.alpha
        return tree.map(
            lambda g, past: tree.plus(torch.mul(g, alpha), past, 1.0 - alpha), grads, past
        )

    def upload(self, round: Round) -> State:
        """Return the length of the path."""
        like = next(iter(round.start.values()))
        return {"path": torch.as_tensor(round.path_length, dtype=torch.float64, device=like.device)}

    def message(self, state: State) -> State:
        """Return the mean gradient."""
        return state

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return a mean gradient of 0."""
        return {"mean": tree.zeros_like(params)}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return params + lr * delta, and the aggregate as a mean gradient."""
        path = tree.leaf(cohort.uploads, "path")
        weights = torch.from_numpy(cohort.weights).to(path.device)
        length = float((weights * path).sum())
        mean = tree.scale(update, -1.0 / (cohort.lr * length))
        return tree.add(params, update, self.lr), {"mean": mean}
