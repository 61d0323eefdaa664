"""The geometric median of the updates, by Weiszfeld's iteration.

Source
    Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on
    Signal Processing 2022 (key pillutla2022). Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.method.context import RoundCohort
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import Reduction
from fedkeel.solve.robust import geometric_median
from fedkeel.solve.span import Span
from fedkeel.tree import Tree


@dataclass(frozen=True)
class GeometricMedian(Reduction):
    r"""Takes the point with the smallest weighted sum of distances to the updates.

    .. math:: \Delta = \arg\min_z \sum_k p_k \lVert z - \Delta_k\rVert, \qquad
        z \leftarrow \frac{\sum_k \beta_k \Delta_k}{\sum_k \beta_k}, \quad
        \beta_k = \frac{p_k}{\max(\nu,\, \lVert z - \Delta_k\rVert)}

    Source: pillutla2022, Algorithm 2, the smoothed Weiszfeld iteration.

    Args:
        nu: distances count as no less than this, > 0, in units of the update.
        steps: number of iterations, >= 1. The paper finds that 3 are enough.
    Sent: nothing beyond the model.
    State: none.
    Cost: one Gram matrix of the K updates, and one pass over them.
    Laws: of equal updates it is that update; in one dimension it is near the weighted median. With
        less than half of the weight, broken clients cannot move it without bound. nu above all
        norms is the weighted mean, bit for bit.
    Deviations: it begins at the received model, as ByzFL does; the paper leaves the beginning open.
        With client weights by examples, a client that claims many counts much: `weights = uniform`
        does not believe it.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("geomedian(steps=8)").reduction.name
        'geomedian'
    """

    nu: float = param(1e-6, gt=0.0)
    steps: int = param(32, ge=1)

    name: ClassVar[str] = "geomedian"
    paper: ClassVar[str] = "pillutla2022"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})

    def withstands(self, count: int) -> int:
        """Return how many cannot move it without bound, where all have the same weight."""
        return (count - 1) // 2

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the geometric median."""
        gram = updates.gram(cohort.names)
        return updates.sum(geometric_median(gram, cohort.weights, self.nu, self.steps))
