"""Attacks by clients that know the honest updates of the round, and all send the same.

Source
    ALIE: Baruch et al., A Little Is Enough, NeurIPS 2019 (key baruch2019), Algorithm 3. IPM: Xie et
    al., Fall of Empires, UAI 2019 (key xie2019). Min-max and min-sum: Shejwalkar and Houmansadr,
    Manipulating the Byzantine, NDSS 2021 (key shejwalkar2021), Equations (8) and (9). Mimic:
    Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022
    (key karimireddy2022), Section 3.2.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from fedkeel.features.attackers.settings import Adversary
from fedkeel.solve.span import Floats, inner
from fedkeel.tree import Tree


def joint_update(settings: Adversary, honest: Tree, attackers: int) -> Tree:
    """Return what every attacker of a cohort sends.

    Args:
        settings: the attack, of a kind in `KNOWING`.
        honest: updates of the honest clients, ascending, tensors [H, ...], H >= 2.
        attackers: number of attackers in the cohort.
    """
    count = len(next(iter(honest.values())))
    if settings.kind == "mimic":
        return mimic(honest)
    if settings.kind == "ipm":
        return inner_product_manipulation(honest, settings.strength or 0.5)
    if settings.kind == "alie":
        factor = settings.strength
        return little_is_enough(
            honest, alie_factor(count + attackers, attackers) if factor is None else factor
        )
    length = min_max_length if settings.kind == "min_max" else min_sum_length
    direction = against_mean(honest, settings.direction)
    mean = mean_of(honest)
    factor = length(*distances_along(honest, mean, direction))
    return {name: m + factor * direction[name] for name, m in mean.items()}


def mean_of(rows: Tree) -> Tree:
    """Return the mean of rows [H, ...]."""
    return {name: tensor.mean(dim=0) for name, tensor in rows.items()}


def mimic(honest: Tree) -> Tree:
    """Return the update of the first honest client.

    The paper chooses the client whose updates vary most along one direction; here it is the same
    one as long as it takes part.
    """
    return {name: tensor[0] for name, tensor in honest.items()}


def inner_product_manipulation(honest: Tree, factor: float) -> Tree:
    """Return -factor times the mean of the honest updates [H, ...]."""
    return {name: -factor * mean for name, mean in mean_of(honest).items()}


def little_is_enough(honest: Tree, factor: float) -> Tree:
    """Return the mean less `factor` standard deviations, entry by entry, of H - 1 freedoms."""
    return {
        name: tensor.mean(dim=0) - factor * tensor.std(dim=0) for name, tensor in honest.items()
    }


def alie_factor(clients: int, attackers: int) -> float:
    """Return the largest z with which enough honest clients are farther from the mean.

    Source: baruch2019, Algorithm 3: the quantile of a standard normal number at
        (n - m - s) / (n - m), where s = floor(n / 2 + 1) - m are needed for a majority. It is kept
        within (0, 1), where the quantile exists; a negative z, for few attackers among many, is 0.

    >>> round(alie_factor(50, 24), 4)  # s = 2 of 26
    1.4261
    """
    supporters = clients // 2 + 1 - attackers
    honest = clients - attackers
    share = min(max((honest - supporters) / honest, 1e-3), 1 - 1e-3)
    return max(0.0, NormalDist().inv_cdf(share))


def against_mean(honest: Tree, kind: str) -> Tree:
    """Return the direction in which attackers move from the mean."""
    if kind == "std":
        return {name: -tensor.std(dim=0) for name, tensor in honest.items()}
    mean = mean_of(honest)
    if kind == "sign":
        return {name: -tensor.sign() for name, tensor in mean.items()}
    square = sum(float(tensor.double().square().sum()) for tensor in mean.values())
    length = square**0.5 or 1.0
    return {name: -tensor / length for name, tensor in mean.items()}


def distances_along(
    honest: Tree, mean: Tree, direction: Tree
) -> tuple[Floats, Floats, Floats, float]:
    """Return what the attackers' distances to the honest updates depend on.

    Returns:
        [H, H] squared distances of the honest updates; [H] squared distances to their mean m; [H]
        inner products of m - x_i with the direction; the direction's squared norm.
    """
    names = list(honest)
    centred = {name: tensor - mean[name] for name, tensor in honest.items()}
    gram = inner(centred, centred, names)
    single = {name: tensor[None] for name, tensor in direction.items()}
    squares = np.diagonal(gram)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0)
    along = -inner(centred, single, names)[:, 0]
    return distances, squares, along, float(inner(single, single, names)[0, 0])


def min_max_length(distances: Floats, squares: Floats, along: Floats, norm2: float) -> float:
    """Return the largest factor with which no honest update is farther than two of them are.

    Source: shejwalkar2021, Equation (8). The paper searches for the factor; each distance is a
        quadratic function of it, so that it is the smallest of H roots.
    """
    if norm2 == 0.0:
        return 0.0
    room = np.maximum(distances.max() - squares, 0.0)
    return float(((np.sqrt(along**2 + norm2 * room) - along) / norm2).min())


def min_sum_length(distances: Floats, squares: Floats, along: Floats, norm2: float) -> float:
    """Return the largest factor whose sum of squared distances is that of an honest update.

    Source: shejwalkar2021, Equation (9).
    """
    if norm2 == 0.0:
        return 0.0
    count, push = len(squares), float(along.sum())
    room = max(float(distances.sum(axis=1).max() - squares.sum()), 0.0)
    return float((np.sqrt(push**2 + count * norm2 * room) - push) / (count * norm2))
