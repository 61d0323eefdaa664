"""FLTrust: updates count by their angle to an update of the server's own, made of clean examples.

Source
    Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021
    (key cao2021fltrust). Algorithm 2, Eq. (2)-(4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.config import Weights
from fedkeel.method.context import RoundCohort
from fedkeel.method.part import Capability, Traits
from fedkeel.method.roles import Reduction
from fedkeel.solve.span import Floats, Span
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FLTrust(Reduction):
    r"""Scales each update to the length of the server's own, and weighs it by their cosine.

    .. math::
        \Delta = \frac{1}{\sum_k s_k} \sum_k s_k
        \frac{\lVert\Delta_0\rVert}{\lVert\Delta_k\rVert} \Delta_k, \qquad
        s_k = \max\Bigl(0,
        \frac{\langle\Delta_k, \Delta_0\rangle}{\lVert\Delta_k\rVert\lVert\Delta_0\rVert}\Bigr)

    where the server trains Delta_0 as a client does, from the same model, on examples of its own
    (the table ``[root]``).

    Source: cao2021fltrust, Algorithm 2, Eq. (2) trust scores, (3) scaling, (4) the aggregate.
    Sent: nothing beyond the model.
    State: none.
    Cost: one local training at the server, K + 1 inner products, one pass over the updates.
    Laws: it does not change when an update is multiplied by a positive number; the aggregate is no
        longer than the server's own update; updates that are all the server's own give that one;
        an update whose angle to it is 90 degrees or more counts nothing.
    Deviations: where no client has a positive score, the model stays as it is; the paper divides by
        0 there. The paper's learning rate of the server is that of `addition`. Clients' numbers of
        examples do not count, as in the paper.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fltrust").weights
        'uniform'
    """

    name: ClassVar[str] = "fltrust"
    paper: ClassVar[str] = "cao2021fltrust"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.ROOT_EXAMPLES}
    )
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the mean of the scaled updates by their trust scores."""
        names = list(cohort.names)
        own = Span(tree.map(lambda t: t[None], cohort.root))
        lengths, length = updates.norms(names), float(own.norms(names)[0])
        along = updates.inner_products(cohort.root, names)
        scores = np.maximum(_ratio(along, lengths * length), 0.0)
        total = float(scores.sum())
        cohort.log("score", float(scores.mean()))
        cohort.log("trusted", float((scores > 0.0).mean()))
        if total == 0.0:
            return updates.sum(np.zeros(len(updates)))
        return updates.sum(scores / total * _ratio(np.full(len(scores), length), lengths))


def _ratio(above: Floats, below: Floats) -> Floats:
    """Return [K] quotients, 0 where the divisor is 0: an update that does not move says nothing."""
    return np.divide(above, below, out=np.zeros(len(below)), where=below > 0.0)
