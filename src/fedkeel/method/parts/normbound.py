"""Norm bounding: no client's update is longer than a bound.

Source
    Sun et al., Can You Really Backdoor Federated Learning?, 2019 (key sun2019backdoor). Section 5,
    norm thresholding of updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel.method.context import RoundCohort
from fedkeel.method.part import param
from fedkeel.method.roles import CohortTransform
from fedkeel.solve.span import Span


@dataclass(frozen=True)
class NormBound(CohortTransform):
    r"""Shortens the updates that are longer than a bound, at the server.

    .. math:: \Delta_k \leftarrow \min\Bigl(1, \frac{M}{\lVert\Delta_k\rVert}\Bigr)\, \Delta_k

    Source: sun2019backdoor, Section 5.

    Args:
        norm: M, the largest norm of an update over the whole model, > 0.
    Sent: nothing beyond the model.
    State: none.
    Cost: the norms of the K updates.
    Laws: it keeps directions; a bound above all norms is FedAvg, bit for bit. A client of weight p
        moves the mean by no more than p M.
    Deviations: the paper adds noise besides, which `dpsgd` and the settings of privacy do.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("normbound(norm=2.0)+median").reduction.name
        'median'
    """

    norm: float = param(1.0, gt=0.0)

    name: ClassVar[str] = "normbound"
    paper: ClassVar[str] = "sun2019backdoor"

    def transform_cohort(self, updates: Span, cohort: RoundCohort) -> Span:
        """Return the updates, the long ones shortened."""
        lengths = updates.norms(cohort.names)
        factors = self.norm / np.maximum(lengths, self.norm)
        cohort.log("clipped", float((factors < 1.0).mean()))
        if (factors == 1.0).all():
            return updates
        mix = np.diag(factors)
        return updates.combined(dict.fromkeys(cohort.names, mix))
