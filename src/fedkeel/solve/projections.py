"""Projections that are not quadratic programmes: centralisation and harmonisation."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.lazy import Tensor

Floats = NDArray[np.float64]
Axes = Literal["input", "kernel", "output", "all", "channels", "output_channels", "output_kernel"]
Rule = Literal["originals", "inplace", "printed", "mutual"]


def centralise(w: Tensor, axes: Axes = "input", vectors: bool = False) -> Tensor:
    r"""Subtract the mean over some axes, so that the result is orthogonal to the constant.

    .. math:: \Phi(W) = W - \mathrm{mean}(W)

    Idempotent, linear, and commutes with averaging over clients.

    Args:
        w: a tensor whose first axis is the output unit.
        axes: ``input`` is all axes but the first (GC-Fed Eq. 1-2); ``kernel`` the axes from the
            third on (the receptive field of a convolution); ``output`` the first; ``all`` all;
            ``channels`` the second (a convolution's input channels); ``output_channels`` the first
            two; ``output_kernel`` all but the second.
            A matrix is always centralised over ``input``: GC-Fed's section 4.3.1 changes the axes
            of convolutions only.
        vectors: what happens to a tensor of one axis or none: left as it is, or its mean over all
            entries is subtracted, which sets a tensor of one entry to 0.

    >>> import torch
    >>> centralise(torch.tensor([[1.0, 3.0], [5.0, 5.0]]))
    tensor([[-1.,  1.],
            [ 0.,  0.]])
    """
    if w.ndim < 2:
        return w - w.mean() if vectors else w
    over = {
        "input": tuple(range(1, w.ndim)),
        "kernel": tuple(range(2, w.ndim)),
        "output": (0,),
        "all": tuple(range(w.ndim)),
        "channels": (1,),
        "output_channels": (0, 1),
        "output_kernel": (0, *range(2, w.ndim)),
    }["input" if w.ndim == 2 else axes]
    return w - w.mean(dim=over, keepdim=True)


def harmonise(
    gram: Floats, rng: np.random.Generator, rule: Rule = "originals", noise: float = 1e-13
) -> Floats:
    r"""Remove the conflicting parts of K vectors, as coefficients on these vectors.

    Two vectors conflict where their inner product is negative. For each i, over the others j in
    random order, where the running g_i conflicts with g_j:

    - ``originals``: g_i loses its component along the received g_j (the denominator is
      :math:`\lVert g_j\rVert^2`, as in FedGH's letter; also PCGrad's rule).
    - ``inplace``: the same with the running g_j, so earlier changes count.
    - ``printed``: as ``inplace``, divided by :math:`\lVert g_i\rVert^2`, as in FedGH's slides;
      this is not a projection unless the norms are equal.
    - ``mutual``: both members of each unordered pair lose their component along the other's running
      value, at once.

    A vector of which only rounding is left, such as one of two opposite vectors, becomes 0.

    Args:
        gram: [K, K] inner products of the vectors, float64.
        rng: draws the orders.
        rule: see above.
        noise: relative rounding of the inner products.

    Returns:
        A [K, K]: harmonised vector i is sum_k A[i, k] * vector k. Identity without conflicts.
    """
    k = len(gram)
    if not np.any(gram < 0.0):
        return np.eye(k)
    if rule == "originals":
        return _against_originals(gram, rng)
    if rule == "mutual":
        return _mutual(gram, rng, noise)
    return _in_place(gram, rng, noise, printed=rule == "printed")


def _against_originals(gram: Floats, rng: np.random.Generator) -> Floats:
    """Return the coefficients for all i at once: they do not depend on each other's changes."""
    k = len(gram)
    order = np.stack([rng.permutation(np.delete(np.arange(k), i)) for i in range(k)])
    norm2 = np.diagonal(gram)
    mix, inner = np.eye(k), gram.copy()  # inner[i] = <running g_i, originals>
    rows = np.arange(k)
    for j in order.T:
        conflict = inner[rows, j]
        share = np.where(conflict < 0.0, conflict / np.where(norm2[j] > 0.0, norm2[j], 1.0), 0.0)
        mix[rows, j] -= share
        inner -= share[:, None] * gram[j]
    return mix


def _in_place(gram: Floats, rng: np.random.Generator, noise: float, printed: bool) -> Floats:
    k = len(gram)
    mix = np.eye(k)
    for i in range(k):
        for j in rng.permutation(np.delete(np.arange(k), i)):
            base = mix[i] if printed else mix[j]
            mix[i] = _without(mix[i], mix[j], base, gram, noise)
    return mix


def _mutual(gram: Floats, rng: np.random.Generator, noise: float) -> Floats:
    k = len(gram)
    mix = np.eye(k)
    pairs = np.stack(np.triu_indices(k, 1), axis=1)
    for i, j in rng.permutation(pairs):
        gi, gj = mix[i], mix[j]
        mix[i], mix[j] = _without(gi, gj, gj, gram, noise), _without(gj, gi, gi, gram, noise)
    return mix


def _without(gi: Floats, gj: Floats, base: Floats, gram: Floats, noise: float) -> Floats:
    """Return g_i - <g_i, g_j> / |base|^2 g_j where the two conflict, as coefficients [K].

    A rest that is only rounding becomes 0: later divisions by its length would give arbitrary
    numbers. The sizes of the terms of the sum tell how large rounding is.
    """
    conflict = gi @ gram @ gj
    if conflict >= 0.0:
        return gi
    rest = gi - conflict / (base @ gram @ base) * gj
    size = np.abs(rest) @ np.sqrt(np.clip(np.diagonal(gram), 0.0, None))
    return rest if rest @ gram @ rest > noise * size**2 else np.zeros_like(rest)
