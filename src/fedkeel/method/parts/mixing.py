"""Nearest-neighbour mixing and bucketing: updates are averaged before a robust aggregate.

Source
    Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS
    2023 (key allouah2023), Algorithm 2. Karimireddy, He and Jaggi, Byzantine-Robust Learning on
    Heterogeneous Datasets via Bucketing, ICLR 2022 (key karimireddy2022), Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel.config import Weights
from fedkeel.method.context import Ints, RoundCohort
from fedkeel.method.part import Traits, param
from fedkeel.method.parts.krum import distances_of
from fedkeel.method.roles import CohortTransform
from fedkeel.solve.robust import count_of_share, nearest_mean
from fedkeel.solve.span import Floats, Span


@dataclass(frozen=True)
class NearestMixing(CohortTransform):
    r"""Replaces each update by the mean of the K - f nearest ones, itself among them.

    .. math:: \Delta_i \leftarrow \frac{1}{K-f} \sum_{j \in N_i} \Delta_j, \qquad
        f = \lfloor\beta K\rfloor

    Source: allouah2023, Algorithm 2.

    Args:
        beta: share of the clients that may be broken, in [0, 0.5).
    Sent: nothing beyond the model.
    State: none.
    Cost: one Gram matrix of the K updates, and their combinations where the reduction needs them.
    Laws: beta = 0 makes all updates their unweighted mean, up to rounding. Equal updates stay.
    Deviations: of updates at equal distance the one with the smaller client number is nearer.
        Clients count equally.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("nnm(beta=0.2)+krum(beta=0.2)").reduction.name
        'krum'
    """

    beta: float = param(0.2, ge=0.0, lt=0.5)

    name: ClassVar[str] = "nnm"
    paper: ClassVar[str] = "allouah2023"
    weights: ClassVar[Weights | None] = "uniform"

    def withstands(self, count: int) -> int:
        """Return f, how many updates each mean leaves out."""
        return count_of_share(self.beta, count, (count - 1) // 2)

    def transform_cohort(self, updates: Span, cohort: RoundCohort) -> Span:
        """Return the means of the nearest updates."""
        count = len(updates)
        nearest = count - self.withstands(count)
        mix = nearest_mean(distances_of(updates, cohort), nearest)
        return updates.combined(dict.fromkeys(cohort.names, mix))


@dataclass(frozen=True)
class Bucketing(CohortTransform):
    r"""Replaces the updates by the means of random buckets of s of them.

    .. math:: \Delta_b \leftarrow \frac{1}{|B_b|} \sum_{k \in B_b} \Delta_k, \qquad
        b = 1, \dots, \lceil K / s\rceil

    Source: karimireddy2022, Algorithm 1.

    Args:
        size: s, clients in a bucket, >= 1; the last bucket has those that are left over.
    Sent: nothing beyond the model.
    State: none.
    Cost: combinations of the K updates where the reduction needs them.
    Laws: size = 1 changes nothing; where size divides K, the mean stays, up to rounding.
    Deviations: buckets count equally, also the last one. What follows sees ceil(K / s) updates, of
        which f clients may spoil f: give a later part the share s times that of the clients. A part
        that needs one update of each client does not go with it.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("bucketing(size=2)+krum(beta=0.4)").reduction.name
        'krum'
    """

    size: int = param(2, ge=1)

    name: ClassVar[str] = "bucketing"
    paper: ClassVar[str] = "karimireddy2022"
    weights: ClassVar[Weights | None] = "uniform"
    traits: ClassVar[Traits] = Traits(merges_updates=True)

    def transform_cohort(self, updates: Span, cohort: RoundCohort) -> Span:
        """Return the means of the buckets."""
        if self.size == 1:
            return updates
        order = cohort.rng().permutation(len(updates))
        mix = bucket_means(order, self.size)
        return updates.combined(dict.fromkeys(cohort.names, mix))


def bucket_means(order: Ints, size: int) -> Floats:
    """Return [B, K] coefficients of the means of buckets: `size` clients after the other.

    >>> bucket_means(np.array([2, 0, 1]), 2).tolist()
    [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    """
    count = len(order)
    mix = np.zeros((-(-count // size), count))
    for bucket in range(len(mix)):
        members = order[bucket * size : (bucket + 1) * size]
        mix[bucket, members] = 1.0 / len(members)
    return mix
