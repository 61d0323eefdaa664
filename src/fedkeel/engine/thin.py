"""Matrices of a state as products of two thin ones, [a, r] x [r, b].

What a client keeps of a short round may be few thin products: SCAFFOLD's c_k is a mean of
gradients, and that of n examples is, for a linear layer, a product with r = n. Where rounds are
kept as sums of terms (`recording/factors.py`) it comes as such, and is kept as such: there is less
to write, to read and to multiply with. In a state the factors stand where the matrix would, by its
name with `LEFT` and `RIGHT` after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedkeel.engine.buffers import Spec
from fedkeel.tree import State, Tree, tensors

LEFT, RIGHT = "@left", "@right"

STEP = 8
"""Thin sides of lanes are multiples of this, so that few forms of a round are recorded."""


def whole(state: Mapping[str, Tensor | State]) -> State:
    """Return a state with every matrix made, also of lanes."""
    out: State = {}
    own = tensors(state)
    for name, value in state.items():
        path = name.removesuffix(LEFT)
        if not isinstance(value, Tensor):
            out[name] = whole(value)
        elif path != name:
            out[path] = torch.matmul(value, own[path + RIGHT])
        elif not name.endswith(RIGHT):
            out[name] = value
    return out


def forms(found: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return specs as they are when every matrix is made."""
    out: dict[str, Spec] = {}
    for name, spec in found.items():
        path = name.removesuffix(LEFT)
        if path != name:
            out[path] = Spec((*spec.shape[:-1], found[path + RIGHT].shape[-1]), spec.dtype)
        elif not name.endswith(RIGHT):
            out[name] = spec
    return out


def factors(flat: Tensor, shape: Sequence[int], side: int) -> tuple[Tensor, Tensor]:
    """Return factors that lie one behind the other at the beginning of a vector, as views.

    Args:
        flat: at least as many entries as the two have.
        shape: a and b.
        side: r.
    """
    a, b = shape
    return flat[: a * side].view(a, side), flat[a * side : (a + b) * side].view(side, b)


def beside(rows: Sequence[Tree], side: int) -> Tree:
    """Return states side by side, tensors [n, ...] by path.

    A matrix that is a product in some of them, and nothing but zeros in the others, is a product of
    [n, a, r] and [n, r, b], elsewhere it is made. Where it is nothing but zeros in all, it is one
    if it is to be one after the round.

    Args:
        rows: of each lane, of the same names but for products.
        side: r after the round, at most.
    """
    out: Tree = {}
    for path in dict.fromkeys(name.removesuffix(LEFT).removesuffix(RIGHT) for name in rows[0]):
        own = [{k: row[k] for k in (path, path + LEFT, path + RIGHT) if k in row} for row in rows]
        given = {one[path].data_ptr(): one[path] for one in own if path in one}  # new ones share it
        nothing = all(one.ndim == 2 and not one.any() for one in given.values())
        product = any(path not in one for one in own)
        if nothing and (product or _pays(side, *own[0][path].shape)):
            out[path + LEFT], out[path + RIGHT] = _factors(own, path, side)
        else:
            out[path] = torch.stack([tensors(whole(one))[path] for one in own])
    return out


def _pays(side: int, a: int, b: int) -> bool:
    """Return whether the terms of a round, and as many from the one before, are less work."""
    return 4 * side * (a + b) <= a * b


def _factors(rows: Sequence[Tree], path: str, side: int) -> tuple[Tensor, Tensor]:
    """Return the factors of a matrix in all states, zeros where it is given as a matrix."""
    pairs = {i: (r[path + LEFT], r[path + RIGHT]) for i, r in enumerate(rows) if path not in r}
    like = next(iter(pairs.values())) if pairs else (rows[0][path], rows[0][path])
    rank = max([side, *(left.shape[1] for left, _ in pairs.values())])
    rank += -rank % STEP
    lefts = like[0].new_zeros(len(rows), like[0].shape[0], rank)
    rights = like[0].new_zeros(len(rows), rank, like[1].shape[1])
    for lane, (left, right) in pairs.items():
        lefts[lane, :, : left.shape[1]], rights[lane, : len(right)] = left, right
    return lefts, rights
