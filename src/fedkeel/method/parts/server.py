"""The server's default: the weighted mean of the updates, added to the model.

Source
    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
    AISTATS 2017 (key mcmahan2017). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.part import Traits, param
from fedkeel.method.roles import Reduction, ServerOptimiser
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class WeightedMean(Reduction):
    r"""The weighted mean of the updates, :math:`\Delta = \sum_k p_k \Delta_k`.

    Source: mcmahan2017, Algorithm 1.
    Sent: nothing beyond the model.
    State: none.
    Cost: one pass over the K updates.
    Laws: commutes with every linear map of the updates.
    Deviations: none; how clients count is the run's choice (`weights`).

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedavg").reduction.name
        'mean'
    """

    name: ClassVar[str] = "mean"
    paper: ClassVar[str] = "mcmahan2017"

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the weighted mean."""
        return updates.sum(cohort.weights)


@dataclass(frozen=True)
class Addition(ServerOptimiser):
    r"""Adds the aggregate to the model, :math:`\theta \leftarrow \theta + \eta_g\Delta`.

    Source: mcmahan2017, Algorithm 1, where eta_g = 1; karimireddy2020, Algorithm 1, for eta_g.

    Args:
        lr: eta_g, the server's learning rate, > 0.
    Sent: nothing beyond the model.
    State: none.
    Cost: one pass over the parameters.
    Laws: lr = 1 is FedAvg.
    Deviations: none.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("scaffold+addition(lr=0.5)").expression
        'scaffold+addition(lr=0.5)'
    """

    lr: float = param(1.0, gt=0.0)

    name: ClassVar[str] = "addition"
    paper: ClassVar[str] = "mcmahan2017"
    traits: ClassVar[Traits] = Traits(takes_stale_updates=True)

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return nothing: addition remembers nothing."""
        return {}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return params + lr * delta."""
        return tree.add(params, update, self.lr), cohort.state
