"""A server optimiser of your own: `-s method=server_optimiser:BoundedStep`."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedkeel import tree
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.roles import ServerOptimiser, param
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class BoundedStep(ServerOptimiser):
    r"""Moves the model by the aggregate, but not much further than in the rounds before.

    .. math::
        \theta \leftarrow \theta + \min\Bigl(1, \frac{\kappa n}{\lVert\Delta\rVert}\Bigr) \Delta,
        \qquad n \leftarrow (1 - \beta)\lVert\Delta\rVert + \beta n

    Source: this file. A single round with a very long aggregate does little harm.

    Args:
        factor: kappa >= 1, how much longer than the mean a step may be.
        beta: in [0, 1), how slowly the mean length n changes.
    Sent: nothing beyond the model.
    State: n at the server, one number. It is 0 before the first round, which has no bound.
    Cost: two passes over the parameters.
    Laws: with a very large factor it is FedAvg.
    Deviations: none.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("server_optimiser:BoundedStep(factor=3.0)").parts[0].factor
        3.0
    """

    factor: float = param(2.0, ge=1.0)
    beta: float = param(0.9, ge=0.0, lt=1.0)

    name: ClassVar[str] = "bounded_step"
    paper: ClassVar[str] = ""

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return a mean length of 0."""
        return {"length": torch.zeros((), dtype=torch.float64)}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model after the bounded step, and the new mean length."""
        mean = tree.leaf(cohort.state, "length")
        length = tree.dot(update, update).double().sqrt()
        bound = torch.where(mean > 0, self.factor * mean, length)
        share = float(torch.clamp(bound / length.clamp(min=1e-300), max=1.0))
        after = torch.where(mean > 0, (1 - self.beta) * length + self.beta * mean, length)
        cohort.log("bounded", float(share < 1.0))
        return tree.add(params, update, share), {"length": after}
