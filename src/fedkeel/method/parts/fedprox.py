"""FedProx: keep local models near the one they started from.

Source
    Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (key li2020fedprox).
    Algorithm 2, Eq. (2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.method.context import Step
from fedkeel.method.part import param
from fedkeel.method.roles import Penalty
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FedProx(Penalty):
    r"""Adds a proximal term to each client's objective.

    .. math:: F_k(\theta) + \frac{\mu}{2}\lVert\theta-\theta^t\rVert^2

    Source: li2020fedprox, Algorithm 2, Eq. (2).

    Args:
        mu: weight of the term, >= 0, in units of 1 / learning rate. The paper tunes
            {0.001, 0.01, 0.1, 1}.
    Sent: nothing beyond the model.
    State: none.
    Cost: one pass over the parameters for each step.
    Laws: mu = 0 is FedAvg, bit for bit.
    Deviations: the paper lets clients stop early (gamma-inexact); we run the configured work.
        FedReg's code has no 1/2, so its weight is mu / 2.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedprox(mu=0.01)").pull
        0.01
    """

    mu: float = param(0.1, ge=0.0)

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "li2020fedprox"

    @property
    def pull(self) -> float:
        """Return mu."""
        return self.mu

    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return mu (theta - theta_t)."""
        return tree.map(lambda w, start: torch.sub(w, start).mul_(self.mu), params, step.start)
