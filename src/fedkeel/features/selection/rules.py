"""Cohorts by the clients' losses: power of choice, and a selection like Oort's.

Sources
    Cho, Wang and Joshi, Client Selection in Federated Learning: Convergence Analysis and
    Power-of-Choice Selection Strategies, arXiv 2010.01243, 2020.
    Lai, Zhu, Madhyastha and Chowdhury, Oort: Efficient Federated Learning via Guided Participant
    Selection, OSDI 2021.
"""

from __future__ import annotations

import math

import numpy as np

from fedkeel.config import Cohort
from fedkeel.data.dataset import Ints
from fedkeel.data.partition.common import Floats

FIRST_EXPLORATION, FALL, LEAST_EXPLORATION = 0.9, 0.98, 0.2
"""Share of clients that have never trained in the first round, the factor by which it falls each
round, and its end."""

SLOWNESS_EXPONENT = 2.0
"""alpha of `oort_utility` where the settings have none."""

CUT, CLIP = 0.95, 95.0
"""Share of the last chosen client's utility that makes a client eligible; percentile at which
utilities are clipped."""


def largest_losses(candidates: Ints, losses: Floats, count: int) -> Ints:
    """Return the `count` candidates with the largest losses, ascending.

    Section 3 of Cho et al. Of equal losses that of the smaller number comes first; one that is not
    a number comes last.

    >>> largest_losses(np.array([2, 5, 7, 9]), np.array([0.1, 0.9, np.nan, 0.5]), 2)
    array([5, 9])
    """
    order = np.argsort(-np.nan_to_num(losses, nan=-np.inf), kind="stable")
    return np.sort(candidates[order[:count]])


def oort_utility(
    statistical: Floats,
    last_round: Ints,
    round: int,
    seconds: Floats | None,
    preferred: float,
    exponent: float,
) -> Floats:
    r"""Return [n] the utility of clients that have trained before.

    .. math::
        \left(U_i + \sqrt{0.1 \ln R / L_i}\right) \cdot (T / t_i)^{\alpha\,[t_i > T]}

    with U_i clipped at its 95th percentile: Algorithm 1 of Lai et al.

    Args:
        statistical: U, number of examples times loss.
        last_round: L, the round in which each was last chosen, counted from 1.
        round: R, the round, counted from 1.
        seconds: t, how long each takes; None where time does not count.
        preferred: T.
        exponent: alpha.

    >>> oort_utility(np.array([8.0, 8.0]), np.array([1, 1]), 1, np.array([2.0, 4.0]), 2.0, 2.0)
    array([8., 2.])
    """
    clipped = np.minimum(statistical, np.percentile(statistical, CLIP))
    utility = clipped + np.sqrt(0.1 * math.log(round) / last_round)
    if seconds is None:
        return np.asarray(utility)
    return np.asarray(utility * np.minimum(1.0, preferred / seconds) ** exponent)


def explored_share(settings: Cohort, round: int) -> float:
    """Return the share of the clients of a round, counted from 1, that have never trained.

    >>> explored_share(Cohort(sampling="oort"), 2)
    0.882
    """
    first = FIRST_EXPLORATION if settings.exploration is None else settings.exploration
    return max(min(first, LEAST_EXPLORATION), first * FALL ** (round - 1))


def draw_by_utility(
    clients: Ints, utility: Floats, count: int, random: np.random.Generator
) -> Ints:
    """Draw clients that are eligible, with probability in proportion to their utility.

    Eligible is whose utility is at least 95 % of the `count`-th largest one.
    """
    if count <= 0:
        return clients[:0]
    least = CUT * np.sort(utility)[-count]
    eligible = np.flatnonzero(utility >= least)
    share = np.maximum(utility[eligible], np.finfo(np.float64).tiny)
    drawn: Ints = random.choice(eligible, count, replace=False, p=share / share.sum())
    return clients[drawn]
