"""FedAvgM: momentum at the server.

Source
    Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, 2019 (key hsu2019). Section 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.part import Traits, param
from fedkeel.method.roles import ServerOptimiser
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class ServerMomentum(ServerOptimiser):
    r"""Adds a running sum of the aggregates in place of the aggregate.

    .. math:: v \leftarrow \beta v + \Delta, \qquad \theta \leftarrow \theta + \eta_g v

    Source: hsu2019, section 4.3; GradMA section 6.1 for its "M" variants, such as FedProxM.

    Args:
        beta: momentum in [0, 1). 0.9 in hsu2019.
        lr: eta_g, > 0.
        damping: whether the aggregate enters with weight 1 - beta, as in two public codes (MOON,
            FedDecorr). The learning rate then has another meaning.
        nesterov: whether the step looks ahead by one more beta v, as in one public code.
    Sent: nothing beyond the model.
    State: v at the server, one model, starting at 0.
    Cost: two passes over the parameters.
    Laws: beta = 0 is FedAvg. With damping, v is a mean of aggregates.
    Deviations: hsu2019 writes the step against the gradient; ours is along the update. Whether it
        meant Nesterov's form is not stated; the default has none.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedavgm(beta=0.5)").expression
        'momentum(beta=0.5)'
    """

    beta: float = param(0.9, ge=0.0, lt=1.0)
    lr: float = param(1.0, gt=0.0)
    damping: bool = False
    nesterov: bool = False

    name: ClassVar[str] = "momentum"
    paper: ClassVar[str] = "hsu2019"
    traits: ClassVar[Traits] = Traits(takes_stale_updates=True)

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return v = 0."""
        return {"v": tree.zeros_like(params)}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model after a step along v, and v."""
        fresh = tree.scale(update, 1.0 - self.beta) if self.damping else update
        v = tree.add(fresh, tree.leaves(cohort.state, "v"), self.beta)
        along = tree.add(fresh, v, self.beta) if self.nesterov else v
        return tree.add(params, along, self.lr), {"v": v}
