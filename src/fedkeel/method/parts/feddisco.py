"""FedDisco: clients whose classes are unevenly mixed count less in the mean.

Source
    Ye et al., FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023 (key
    ye2023feddisco). The section on aggregation weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Floats, Round, RoundCohort
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import Reduction, Upload
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree

LabelDistance = Literal["kl", "l1", "l2", "cosine"]


def discrepancy(counts: Tensor, target: Tensor, metric: LabelDistance) -> Tensor:
    """Return [] how far the mixture of a client's classes is from a target.

    Args:
        counts: [Y] number of examples of each class, not all 0.
        target: [Y] shares of the classes, which sum to 1, none of them 0.
        metric: ``kl`` divergence of the client's mixture from the target, the ``l1`` or ``l2`` norm
            of the difference, or the ``cosine`` distance.

    >>> discrepancy(torch.tensor([4.0, 0.0]), torch.tensor([0.5, 0.5]), "l1")
    tensor(1.)
    """
    shares = counts / counts.sum()
    if metric == "kl":
        return torch.xlogy(shares, shares / target).sum()
    if metric == "cosine":
        return 1.0 - torch.nn.functional.cosine_similarity(shares, target, dim=0)
    apart = (shares - target).abs()
    return apart.sum() if metric == "l1" else apart.square().sum().sqrt()


@dataclass(frozen=True)
class FedDisco(Upload, Reduction):
    r"""Makes clients count less in the mean, the further their classes are from an even mixture.

    .. math:: \Delta = \frac{\sum_k w_k\Delta_k}{\sum_k w_k},
        \qquad w_k = \max(0,\; p_k - a\,d_k + b)

    with p_k the client's weight, which is its share of the cohort's examples, and d_k the distance
    between its shares of the classes and 1/Y.

    Source: ye2023feddisco, the section on discrepancy-aware aggregation weights.

    Args:
        a: how much the distance counts, >= 0. 0.5 in the public code.
        b: added to each weight; the larger, the more equally clients count. 0.1 in the public code.
        metric: d_k: the ``kl`` divergence, divided by the sum of the cohort's; the ``l1`` or ``l2``
            norm; or the ``cosine`` distance. The first one is the public code's default.
    Sent: d_k up, one number, which says how uneven the client's classes are.
    State: none.
    Cost: nothing beyond the mean.
    Laws: a = 0 and b = 0 is FedAvg, to rounding; a large b is the unweighted mean. Where the
        classes are mixed alike everywhere, all weights change by the same number.
    Deviations: the public code divides the divergences by their sum, and not the other distances,
        which is so here too; it can take other targets than an even mixture. Where no weight is
        positive it ends with an error; here such a round has the weights p_k, and is counted
        (`feddisco.fallback`).

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("feddisco(a=0.2)+momentum").reduction.metric
        'kl'
    """

    a: float = param(0.5, ge=0.0)
    b: float = param(0.1)
    metric: LabelDistance = "kl"

    name: ClassVar[str] = "feddisco"
    paper: ClassVar[str] = "ye2023feddisco"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.CLASS_COUNTS,
            Capability.CLASSES,
            Capability.PER_CLIENT_UPDATES,
            Capability.SEPARATE_UPDATES,
        }
    )

    def upload(self, round: Round) -> State:
        """Return d_k."""
        counts = round.client_info.class_counts.to(next(iter(round.start.values())).dtype)
        even = torch.full_like(counts, 1.0 / len(counts))
        return {"d": discrepancy(counts, even, self.metric)}

    def weigh(self, p: Floats, d: Floats) -> Floats | None:
        """Return [K] weights that sum to 1, or None where none is positive.

        Args:
            p: [K] weights that sum to 1.
            d: [K] distances.
        """
        if self.metric == "kl" and d.sum() > 0.0:
            d = d / d.sum()
        weights = np.maximum(0.0, p - self.a * d + self.b)
        total = weights.sum()
        return weights / total if total > 0.0 else None

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the mean with those weights."""
        d = tree.leaf(cohort.uploads, "d").double().cpu().numpy()
        weights = self.weigh(cohort.weights, d)
        cohort.log("fallback", weights is None)
        return updates.sum(cohort.weights if weights is None else weights)
