"""Matrices of a state as products of two thin ones, [a, r] x [r, b].

What a client keeps of a short round may be few thin products: SCAFFOLD's c_k is a mean of
gradients, and that of n examples is, for a linear layer, a product with r = n. Where rounds are
kept as sums of terms (`recording/factors.py`) it comes as such, and is kept as such: there is less
to write, to read and to multiply with. In a state the factors stand where the matrix would, by its
name with `LEFT` and `RIGHT` after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedkeel.engine.spec import TensorSpec
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


def forms(found: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return specs as they are when every matrix is made."""
    out: dict[str, TensorSpec] = {}
    for name, spec in found.items():
        path = name.removesuffix(LEFT)
        if path != name:
            out[path] = TensorSpec((*spec.shape[:-1], found[path + RIGHT].shape[-1]), spec.dtype)
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


def beside(rows: Iterable[Tree], lanes: int, side: int, parts: Collection[str]) -> Tree:
    """Return states side by side, tensors [lanes, ...] by path.

    A matrix of one of the parts that is a product in some of them, and nothing but zeros in the
    others, is a product of [lanes, a, r] and [lanes, r, b], elsewhere it is made. Where it is
    nothing but zeros in all, it is one if it is to be one after the round.

    Args:
        rows: of each lane, of the same names but for products.
        lanes: how many there are.
        side: r after the round, at most.
        parts: whose matrices may be products, by name.

    Raises:
        ValueError: states have different names.
    """
    out: Tree = {}
    held: dict[str, list[Tree]] = {}  # of matrices that are products or zeros so far, by lane
    zeros: Tree = {}  # those that were looked at: clients that are new share them
    names: list[str] = []
    for lane, row in enumerate(rows):
        found = list(dict.fromkeys(_path(name) for name in row))
        names = names or found
        if set(names) != set(found):
            raise ValueError("clients keep different things")
        for path in names:
            own = {k: row[k] for k in (path, path + LEFT, path + RIGHT) if k in row}
            if path not in out and path.split("/")[0] in parts and _nothing(path, own, zeros):
                held.setdefault(path, []).append(own)
                continue
            if path not in out:
                one = _whole(path, own)
                out[path] = one.new_empty(lanes, *one.shape)
                for before, other in enumerate(held.pop(path, [])):
                    out[path][before] = _whole(path, other)
            out[path][lane] = _whole(path, own)
    return _in_order(names, out, held, side)


def _path(name: str) -> str:
    """Return where the matrix stands of which a tensor is a factor, if it is one."""
    return name.removesuffix(LEFT).removesuffix(RIGHT)


def _whole(path: str, own: Tree) -> Tensor:
    """Return a tensor, made if it is a product."""
    return own[path] if path in own else torch.matmul(own[path + LEFT], own[path + RIGHT])


def _nothing(path: str, own: Tree, zeros: Tree) -> bool:
    """Return whether a matrix is a product, or nothing but zeros."""
    if path not in own:
        return True
    if own[path] is not zeros.get(path):
        if own[path].ndim != 2 or own[path].any():
            return False
        zeros[path] = own[path]
    return True


def _in_order(names: Sequence[str], made: Tree, held: Mapping[str, list[Tree]], side: int) -> Tree:
    """Return all that lanes hold, in the order of the names: products as factors, if they pay."""
    out: Tree = {}
    for path in names:
        if path in made:
            out[path] = made[path]
            continue
        own = held[path]
        if any(path not in one for one in own) or pays(side, *own[0][path].shape):
            out[path + LEFT], out[path + RIGHT] = _factors(own, path, side)
        else:
            out[path] = torch.stack([one[path] for one in own])
    return out


def pays(side: int, a: int, b: int) -> bool:
    """Return whether the terms of a round, and as many from the one before, are less work."""
    return 4 * side * (a + b) <= a * b


def _factors(rows: Sequence[Tree], path: str, side: int) -> tuple[Tensor, Tensor]:
    """Return the factors of a matrix in all states, zeros where it is no product."""
    pairs = {i: (r[path + LEFT], r[path + RIGHT]) for i, r in enumerate(rows) if path not in r}
    like = next(iter(pairs.values())) if pairs else (rows[0][path], rows[0][path])
    rank = max([side, *(left.shape[1] for left, _ in pairs.values())])
    rank += -rank % STEP
    lefts = like[0].new_zeros(len(rows), like[0].shape[0], rank)
    rights = like[0].new_zeros(len(rows), rank, like[1].shape[1])
    for lane, (left, right) in pairs.items():
        lefts[lane, :, : left.shape[1]], rights[lane, : len(right)] = left, right
    return lefts, rights
