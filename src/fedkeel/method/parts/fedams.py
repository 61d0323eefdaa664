"""FedAMS: AMSGrad at the server, with two options to keep the denominator away from zero.

Source
    Wang, Lin and Chen, Communication-Efficient Adaptive Federated Learning, ICML 2022 (key
    wang2022fedams). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.part import Traits, param
from fedkeel.method.parts.fedopt import unbiased
from fedkeel.method.roles import ServerOptimiser
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedAMS(ServerOptimiser):
    r"""Divides by the root of the largest second moment so far.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1)\Delta, \qquad
        v \leftarrow \beta_2 v + (1-\beta_2)\Delta^2 \\
        &\text{option 1:}\quad \hat v \leftarrow \max(\hat v, v, \epsilon), \qquad
        \theta \leftarrow \theta + \eta_g\, m / \sqrt{\hat v} \\
        &\text{option 2:}\quad \hat v \leftarrow \max(\hat v, v), \qquad
        \theta \leftarrow \theta + \eta_g\, m / (\sqrt{\hat v} + \epsilon)

    Source: wang2022fedams, Algorithm 1, without compression.

    Args:
        lr: eta_g, > 0, in units of the parameters.
        beta1: weight of the past in m, in [0, 1). 0.9 in the paper.
        beta2: weight of the past in v, in [0, 1). 0.99 in the paper.
        eps: epsilon, > 0: a squared update under option ``1``, an update under option ``2``.
        option: ``1`` takes the larger of epsilon and the moment, ``2`` adds epsilon to the root.
        start: v^ before the first round, >= 0; None is epsilon.
        correction: whether m is divided by 1 - beta1^t and v^ by 1 - beta2^t, as in the authors'
            public code. Under option ``2`` epsilon is added after that.
    Sent: nothing beyond the model.
    State: m, v and v^ at the server, one model each, and the number of steps.
    Cost: eight passes over the parameters.
    Laws: v^ never falls. With an epsilon above every v, option 1 is server momentum with damping
        and a rate of eta_g / sqrt(epsilon). While squares grow, option 2 from 0 is FedAdam.
    Deviations: the paper has no bias correction, its public code has. How clients count is the
        run's choice (`weights`); the paper's average is of equal shares, which is "uniform".

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedams(option=2)").expression
        'fedams(option=2)'
    """

    lr: float = param(0.1, gt=0.0)
    beta1: float = param(0.9, ge=0.0, lt=1.0)
    beta2: float = param(0.99, ge=0.0, lt=1.0)
    eps: float = param(1e-3, gt=0.0)
    option: Literal[1, 2] = 1
    start: float | None = param(None, ge=0.0)
    correction: bool = False

    name: ClassVar[str] = "fedams"
    paper: ClassVar[str] = "wang2022fedams"
    traits: ClassVar[Traits] = Traits(takes_stale_updates=True)

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return m = v = 0, v^ as `start` says, and no steps."""
        initial = self.eps if self.start is None else self.start
        return {
            "m": tree.zeros_like(params),
            "v": tree.zeros_like(params),
            "largest": tree.full_like(params, initial),
            "t": torch.zeros((), dtype=torch.int64),
        }

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model after a step along m / sqrt(v^), and m, v, v^ and t."""
        state = cohort.state
        t = tree.leaf(state, "t") + 1
        kind: Literal["moments", "none"] = "moments" if self.correction else "none"
        m_factor, root_factor = unbiased(self.beta1, self.beta2, int(t), kind)
        m, v = tree.leaves(state, "m"), tree.leaves(state, "v")
        beta1, beta2 = self.beta1, self.beta2
        m = tree.map(lambda d, m: torch.add(m * beta1, d, alpha=1.0 - beta1), update, m)
        v = tree.map(lambda d, v: torch.addcmul(v * beta2, d, d, value=1.0 - beta2), update, v)
        largest = tree.map(torch.maximum, tree.leaves(state, "largest"), v)
        if self.option == 1:
            largest = tree.map(lambda w: w.clamp(min=self.eps), largest)
        eps_outside = self.eps if self.option == 2 else 0.0

        def moved(p: Tensor, m: Tensor, largest: Tensor) -> Tensor:
            root = largest.sqrt().mul_(root_factor).add_(eps_outside)
            return torch.addcdiv(p, m, root, value=self.lr * m_factor)

        params = tree.map(moved, params, m, largest)
        return params, {"m": m, "v": v, "largest": largest, "t": t}
