"""How the K updates of a round lie to each other: norms, angles, conflicts, diversity.

Everything follows from the Gram matrix G [K, K] of the updates, G_ij = <u_i, u_j>, in float64. An
update is end - start; a caller may give gradients in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedkeel.tree import group_names


def layers_of(updates: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each layer, by the name of its module; ``model`` for the outermost.

    >>> sorted(layers_of({"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2, 1)}))
    ['a']
    """
    groups = group_names(list(updates), "layer")
    return {
        names[0].rpartition(".")[0] or "model": {name: updates[name] for name in names}
        for names in groups
    }


def gram(updates: Mapping[str, Tensor]) -> Tensor:
    """Return the Gram matrix [K, K] of updates, in float64 on the processor.

    Args:
        updates: tensors [K, ...], by parameter.
    """
    total = torch.zeros((), dtype=torch.float64)
    for tensor in updates.values():
        flat = tensor.detach().reshape(len(tensor), -1).double()
        total = total + (flat @ flat.T).cpu()
    return total


def norms(gram: Tensor) -> Tensor:
    """Return [K] the Euclidean norms of the updates, from their Gram matrix."""
    return gram.diagonal().clamp(min=0.0).sqrt()


def cosines(gram: Tensor) -> Tensor:
    """Return [K, K] the cosines between updates; NaN beside an update that is zero."""
    length = norms(gram)
    return (gram / (length[:, None] * length[None, :])).clamp(-1.0, 1.0)


def pairwise(matrix: Tensor) -> Tensor:
    """Return [K (K - 1) / 2] the entries of a symmetric matrix [K, K] above its diagonal."""
    rows, columns = torch.triu_indices(len(matrix), len(matrix), offset=1)
    return matrix[rows, columns]


def cosines_with_mean(gram: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [K] the cosines between each update and the weighted mean of all.

    Args:
        gram: [K, K].
        weights: [K] weights of the mean; None for equal ones.
    """
    shares = _shares(gram, weights)
    with_mean = gram @ shares
    length = (shares @ with_mean).clamp(min=0.0).sqrt()
    return (with_mean / (norms(gram) * length)).clamp(-1.0, 1.0)


def mean_norm(gram: Tensor, weights: Tensor | None = None) -> float:
    """Return the norm of the weighted mean of the updates."""
    shares = _shares(gram, weights)
    return math.sqrt(max(float(shares @ gram @ shares), 0.0))


def conflict_share(gram: Tensor) -> float:
    """Return the share of pairs of updates with a negative inner product; NaN without a pair."""
    pairs = pairwise(gram)
    return float((pairs < 0).double().mean()) if len(pairs) else math.nan


def distances_to_mean(gram: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [K] the Euclidean distance between each update and the weighted mean of all.

    They are the distances between the local models and their mean.
    """
    shares = _shares(gram, weights)
    with_mean = gram @ shares
    squared = gram.diagonal() - 2 * with_mean + shares @ with_mean
    return squared.clamp(min=0.0).sqrt()


def gradient_diversity(gram: Tensor, weights: Tensor | None = None) -> float:
    r"""Return how different the updates are: 1 where all are the same, larger otherwise.

    .. math:: \frac{\sum_k p_k\lVert u_k\rVert^2}{\lVert\sum_k p_k u_k\rVert^2}

    Source: with equal weights K times the gradient diversity of Yin et al. 2018, Definition 1, and
    the square of B in the bounded dissimilarity of Li et al. 2020 (FedProx), Definition 3.
    Infinity where the mean is zero and the updates are not; NaN where all are zero.

    Args:
        gram: [K, K].
        weights: [K] weights p_k, which need not sum to 1; None for equal ones.

    >>> gradient_diversity(torch.eye(4, dtype=torch.float64))
    4.0
    """
    shares = _shares(gram, weights)
    mean = float(shares @ gram.diagonal())
    of_mean = float(shares @ gram @ shares)
    if of_mean <= 0.0:
        return math.inf if mean > 0.0 else math.nan
    return mean / of_mean


def _shares(gram: Tensor, weights: Tensor | None) -> Tensor:
    """Return [K] weights that sum to 1."""
    if weights is None:
        return torch.full((len(gram),), 1.0 / len(gram), dtype=torch.float64)
    return weights.double() / weights.double().sum()
