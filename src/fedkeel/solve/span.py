"""Linear algebra in the span of the received updates.

A server's projections stay within the span of the K updates that it received. They are computed in
float64 on the K x K Gram matrix, and their result is K coefficients: the parameters themselves are
read once for the Gram matrix and once for the combination.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.lazy import Tensor, torch
from fedkeel.tree import Tree

Floats = NDArray[np.float64]

CHUNK = 4096
"""Columns of one float32 product; the products are added up in float64. On half a million
parameters this is as fast as a single float32 product, with errors below 1e-7 in place of 1e-6."""

EXACT = 4 * CHUNK
"""Largest number of entries of a tensor that is multiplied in float64. The sum of one chunk has an
error of up to 4e-7; many chunks average it out, a few do not."""


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Sequence[str]) -> Floats:
    """Return [J, K] inner products of the rows of `a` [J, ...] with the rows of `b` [K, ...].

    Args:
        a: tensors with a leading axis J.
        b: tensors with a leading axis K.
        names: which tensors belong to the vector.

    >>> rows = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    >>> inner(rows, rows, ["w"]).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    first, second = a[names[0]], b[names[0]]
    if len(first) > len(second):  # the product with the shorter factor first is a third faster
        return np.ascontiguousarray(inner(b, a, names).T)
    total = torch.zeros(len(first), len(second), dtype=torch.float64, device=first.device)
    for name in names:
        total += row_products(_flat(a[name]), _flat(b[name]))
    return np.asarray(total.cpu().numpy())


def row_products(left: Tensor, right: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return [J, K] inner products of rows [J, F] and [K, F], in float64.

    Args:
        left: [J, F].
        right: [K, F].
        chunk: number of columns whose products are added up in the rows' own type.
    """
    width = left.shape[1]
    if width <= EXACT:
        return left.double() @ right.double().T
    full_width = width - width % chunk
    sums = torch.bmm(
        left[:, :full_width].reshape(len(left), -1, chunk).transpose(0, 1),
        right[:, :full_width].reshape(len(right), -1, chunk).permute(1, 2, 0),
    )  # [F / chunk, J, K]
    return sums.sum(dim=0, dtype=torch.float64) + left[:, full_width:] @ right[:, full_width:].T


def relative_rounding(rows: Mapping[str, Tensor], names: Sequence[str]) -> float:
    """Return the relative rounding error of `inner` of `rows` over the named tensors."""
    exact = all(rows[k].dtype == torch.float64 or rows[k][0].numel() <= EXACT for k in names)
    return 1e-13 if exact else 1e-7


def _flat(rows: Tensor) -> Tensor:
    """Return rows [K, ...] as a matrix [K, F], also of single numbers, and where K is 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def combine(coefficients: Floats, rows: Tensor) -> Tensor:
    """Return coefficients [J, K] @ rows [K, ...], in the type of `rows`, as [J, ...].

    Rows whose coefficients are all zero are not read.
    """
    used = np.flatnonzero(np.any(coefficients != 0.0, axis=0))
    shape = (len(coefficients), *rows.shape[1:])
    if len(used) == 0:
        return torch.zeros(shape, dtype=rows.dtype, device=rows.device)
    if len(used) < len(rows):
        picked = rows[torch.from_numpy(used).to(rows.device)]
        coefficients = coefficients[:, used]
    else:
        picked = rows
    factor = torch.from_numpy(np.ascontiguousarray(coefficients)).to(rows.device, rows.dtype)
    if len(factor) == 1:
        return torch.mv(_flat(picked).T, factor[0]).reshape(shape)
    return (factor @ _flat(picked)).reshape(shape)


@dataclass(frozen=True)
class Span:
    """Vectors, each a combination of the K received updates, stored as coefficients.

    There are K of them, or fewer where updates were merged.

    Args:
        rows: the received updates, tensors [K, ...].
        mix: coefficients [J, K] for each tensor name, or None for the updates themselves.
    """

    rows: Tree
    mix: Mapping[str, Floats] | None = None

    def __len__(self) -> int:
        if self.mix is not None:
            return len(next(iter(self.mix.values())))
        return len(next(iter(self.rows.values())))

    def norms(self, names: Sequence[str]) -> Floats:
        """Return [K] lengths of the vectors, over the named tensors."""
        if self.mix is not None:
            return np.asarray(np.sqrt(np.diagonal(self.gram(names))))
        squares = torch.zeros(len(self), dtype=torch.float64)
        for name in names:
            rows = torch.linalg.vector_norm(_flat(self.rows[name]), dim=1, dtype=torch.float64)
            squares += rows.cpu().square()
        return np.asarray(squares.sqrt().numpy())

    def gram(self, names: Sequence[str]) -> Floats:
        """Return [K, K] inner products of the vectors, over the named tensors.

        A combination that is zero but for rounding has inner products of exactly zero.
        """
        if self.mix is None:
            return inner(self.rows, self.rows, names)
        total, size2 = np.zeros((len(self), len(self))), np.zeros(len(self))
        for members in _same_mix(self.mix, names):
            mix, gram = self.mix[members[0]], inner(self.rows, self.rows, members)
            total += mix @ gram @ mix.T
            size2 += (np.abs(mix) @ np.sqrt(np.diagonal(gram))) ** 2
        is_zero = np.diagonal(total) <= relative_rounding(self.rows, names) * size2
        total[is_zero, :] = total[:, is_zero] = 0.0
        return total

    def inner_products(self, vector: Mapping[str, Tensor], names: Sequence[str]) -> Floats:
        """Return [K] inner products of the vectors with one more, over the named tensors."""
        single = {name: vector[name][None] for name in names}
        if self.mix is None:
            return inner(self.rows, single, names)[:, 0]
        total = np.zeros(len(self))
        for members in _same_mix(self.mix, names):
            total += self.mix[members[0]] @ inner(self.rows, single, members)[:, 0]
        return total

    def combined(self, coefficients: Mapping[str, Floats]) -> Span:
        """Return the combinations `coefficients` [J, K] (by tensor name) of these vectors."""
        if self.mix is None:
            return Span(self.rows, dict(coefficients))
        return Span(self.rows, {k: c @ self.mix[k] for k, c in coefficients.items()})

    def sum(self, weights: Mapping[str, Floats] | Floats) -> Tree:
        """Return the tree of the sums of the vectors with `weights` [K], one or one per tensor."""
        out: Tree = {}
        for name, rows in self.rows.items():
            w = weights[name] if isinstance(weights, Mapping) else weights
            if self.mix is not None:
                w = w @ self.mix[name]
            out[name] = combine(np.asarray(w)[None], rows)[0]
        return out

    def materialise(self) -> Tree:
        """Return the vectors themselves, tensors [K, ...]."""
        if self.mix is None:
            return self.rows
        return {name: combine(self.mix[name], rows) for name, rows in self.rows.items()}


@dataclass(frozen=True)
class Sums(Span):
    """K vectors of which only weighted sums were kept.

    Args:
        rows: G sums of some of the vectors with their weights, tensors [G, ...].
        weights: [K] the weights.
        noisy: whether the noise of the method's reduction is in the sums already.
    """

    weights: Floats = field(default_factory=lambda: np.zeros(0))
    noisy: bool = False

    def __len__(self) -> int:
        return len(self.weights)

    def sum(self, weights: Mapping[str, Floats] | Floats) -> Tree:
        """Return the sum of the vectors with weights [K] in proportion to `self.weights`.

        Raises:
            TypeError: the weights have other proportions.
        """
        if isinstance(weights, Mapping):
            raise TypeError(_ONLY_SUMS)
        factor = float(weights.sum() / self.weights.sum())
        scaled = factor * self.weights
        if not (np.abs(weights - scaled) <= 1e-9 * np.abs(scaled)).all():
            raise TypeError(_ONLY_SUMS)
        if not self.rows:  # no parameter is shared
            return {}
        count = len(next(iter(self.rows.values())))
        if count == 1 and factor:
            return {name: rows[0] * factor for name, rows in self.rows.items()}
        shares = np.full((1, count), factor)
        return {name: combine(shares, rows)[0] for name, rows in self.rows.items()}

    def norms(self, names: Sequence[str]) -> Floats:
        """Raise a TypeError."""
        raise TypeError(_ONLY_SUMS)

    def gram(self, names: Sequence[str]) -> Floats:
        """Raise a TypeError."""
        raise TypeError(_ONLY_SUMS)

    def inner_products(self, vector: Mapping[str, Tensor], names: Sequence[str]) -> Floats:
        """Raise a TypeError."""
        raise TypeError(_ONLY_SUMS)

    def combined(self, coefficients: Mapping[str, Floats]) -> Span:
        """Raise a TypeError."""
        raise TypeError(_ONLY_SUMS)

    def materialise(self) -> Tree:
        """Raise a TypeError."""
        raise TypeError(_ONLY_SUMS)


_ONLY_SUMS = (
    "only the weighted sum of the updates was kept; "
    "a part that looks at single ones needs PER_CLIENT_UPDATES"
)


def _same_mix(mix: Mapping[str, Floats], names: Sequence[str]) -> list[list[str]]:
    """Return the names in groups with one coefficient matrix, so each group is multiplied once."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(id(mix[name]), []).append(name)
    return list(groups.values())
