"""FedGH: remove the part of each client's update that conflicts with the others' updates.

Source
    Zhang et al., FedGH: Gradient Harmonization in Federated Learning, slides, and the letter
    arXiv 2309.06692 (key fedgh2024). Algorithm 1. Another method shares the name (Generalized
    Global Header, MM 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel.config import Weights
from fedkeel.method.context import RoundCohort
from fedkeel.method.roles import CohortTransform
from fedkeel.solve.projections import Rule, harmonise
from fedkeel.solve.span import Floats, Span, relative_rounding
from fedkeel.tree import Groups


@dataclass(frozen=True)
class FedGH(CohortTransform):
    r"""Projects conflicting updates, in random order, before they are averaged.

    .. math::
        \text{if } \langle g_i, g_j\rangle < 0: \quad
        g_i \leftarrow g_i - \frac{\langle g_i, g_j\rangle}{\lVert g_j\rVert^2}\, g_j

    Source: fedgh2024, Algorithm 1 of the slides, with the denominator of the letter.

    Args:
        rule: which of the published rules; see `fedkeel.solve.projections.harmonise`. ``originals``
            projects against the received updates, ``inplace`` against the running ones, ``printed``
            is the slides' formula with the norm of g_i, ``mutual`` changes both of a pair.
        groups: what is projected as one vector; the paper speaks of a client's gradient vector.
    Sent: nothing beyond the model.
    State: none.
    Cost: one Gram matrix of the K updates and K^3 numbers besides.
    Laws: without conflict it is FedAvg, bit for bit. A common factor of all updates, also a
        negative one, is a factor of the result; so the update can replace the "recalculated
        gradient".
    Deviations: the slides print the denominator |g_i|^2, which is not a projection: what g_i loses
        then depends on the length of g_j; `rule="printed"` keeps it. Their loop also changes g_i in
        place, so that later pairs meet changed updates; the default projects against the updates
        as they were received, and `rule="inplace"` is the loop. With FedNova the normalised
        updates are harmonised; the paper does not say. Buffers are averaged, not harmonised.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fednova+fedgh").weights
        'uniform'
    """

    rule: Rule = "originals"
    groups: Groups = "model"

    name: ClassVar[str] = "fedgh"
    paper: ClassVar[str] = "fedgh2024"
    weights: ClassVar[Weights | None] = "uniform"

    def transform_cohort(self, updates: Span, cohort: RoundCohort) -> Span:
        """Return the harmonised updates."""
        rng = cohort.rng()
        pairs = len(updates) * (len(updates) - 1) / 2
        mix: dict[str, Floats] = {}
        conflicts = 0.0
        groups = cohort.groups(self.groups)
        for names in groups:
            gram = updates.gram(names)
            negative = np.count_nonzero(np.triu(gram, 1) < 0.0)
            conflicts += negative / max(pairs, 1) / len(groups)
            coefficients = harmonise(gram, rng, self.rule, relative_rounding(updates.rows, names))
            mix.update(dict.fromkeys(names, coefficients))
        cohort.log("conflicts", conflicts)
        return updates.combined(mix) if conflicts else updates
