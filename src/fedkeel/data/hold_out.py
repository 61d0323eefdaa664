"""Which examples are set aside for evaluation: of each client, by class, and in whole groups.

A group is all that belongs together, such as the images of one patient. Its examples are alike, so
a model that was trained on some of them knows the others. C clients, M examples, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedkeel.data.dataset import Ints

_FREE, _KEPT, _HELD = 0, 1, 2
"""Whether a group is still to be drawn, trained on, or set aside."""


def set_aside(
    strata: Ints, offsets: Ints, fraction: float, random: Generator, group: Ints | None = None
) -> NDArray[np.bool_]:
    """Return [M] which examples are set aside.

    Without groups each class of a client gives round(fraction * n) of its n examples, but at least
    one, and it keeps at least one; of a class of one example nothing is set aside.

    With groups, those of a client are taken in random order, as long as one brings the number of
    examples of its classes closer to the share that is wanted. A class that is then not among them
    gets the group that fits best. No class loses its last group to this. A group that is at several
    clients is on the same side at all of them, as the first one has it, unless a client would have
    nothing left to train on.

    Args:
        strata: [M] class of each example; one for all where classes do not matter.
        offsets: [C + 1]; the examples of client k are ``offsets[k]:offsets[k + 1]``.
        fraction: share that is set aside, in (0, 1).
        random: where the draw comes from.
        group: [M] number >= 0 of the group of each example; None for no groups.

    >>> random = np.random.default_rng(0)
    >>> set_aside(np.array([0, 0, 0, 0, 1, 1, 2]), np.array([0, 7]), 0.5, random)
    array([ True, False,  True, False, False,  True, False])
    """
    clients = [slice(*pair) for pair in pairwise(offsets)]
    is_held = np.zeros(len(strata), dtype=bool)
    if group is None:
        for rows in clients:
            is_held[rows] = _of_each_class(strata[rows], fraction, random)
        return is_held
    side = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int8)
    for rows in clients:
        _draw_groups(strata[rows], group[rows], fraction, random, side)
    return np.asarray(side[group] == _HELD)


def share_of_groups(
    strata: Ints, fraction: float, random: Generator, group: Ints
) -> NDArray[np.bool_]:
    """Return [M] which examples of one whole set are set aside, in whole groups.

    Where no group can be spared for the sake of the classes, these do not matter.
    """
    offsets = np.array([0, len(strata)])
    is_held = set_aside(strata, offsets, fraction, random, group)
    return is_held if is_held.any() else set_aside(0 * strata, offsets, fraction, random, group)


def _of_each_class(strata: Ints, fraction: float, random: Generator) -> NDArray[np.bool_]:
    is_held = np.zeros(len(strata), dtype=bool)
    order = np.argsort(strata, kind="stable")
    _, starts = np.unique(strata[order], return_index=True)
    for rows in np.split(order, starts[1:]):
        wanted = int(np.floor(fraction * len(rows) + 0.5))
        count = min(max(wanted, 1), len(rows) - 1)
        is_held[random.permutation(rows)[:count]] = True
    return is_held


def _draw_groups(
    strata: Ints, group: Ints, fraction: float, random: Generator, side: NDArray[np.int8]
) -> None:
    """Draw the side of each group of one client that has none yet; changes `side` in place."""
    if not len(group):
        return
    classes, number = np.unique(strata, return_inverse=True)
    names, place = np.unique(group, return_inverse=True)
    pairs, counts = np.unique(place * len(classes) + number, return_counts=True)
    at = np.searchsorted(pairs, np.arange(len(names) + 1) * len(classes))
    members = [pairs[a:b] % len(classes) for a, b in pairwise(at)]
    sizes = [counts[a:b] for a, b in pairwise(at)]
    total = np.bincount(number, minlength=len(classes))
    draw = _Draw(members, sizes, total, fraction)
    for g in np.flatnonzero(side[names] == _HELD):
        draw.take(int(g))
    free = random.permutation(np.flatnonzero(side[names] == _FREE))
    for g in free.tolist():
        if draw.change(g) < 0 and draw.can_spare(g):
            draw.take(g)
    draw.cover(free)
    side[names[free]] = np.where(draw.taken[free], _HELD, _KEPT)
    if (side[names] == _HELD).all():  # by what other clients have drawn: one comes back
        side[names[int(np.argmin([n.sum() for n in sizes]))]] = _KEPT


class _Draw:
    """The groups of one client that are taken so far.

    Args:
        members: of each group its classes.
        sizes: of each group the number of examples of these.
        total: [Y] number of examples of each class.
        fraction: share of each class that is wanted.
    """

    def __init__(
        self, members: Sequence[Ints], sizes: Sequence[Ints], total: Ints, fraction: float
    ) -> None:
        self._members, self._sizes, self._weight = members, sizes, 1.0 / total**2
        self._lacking = fraction * total
        groups = np.concatenate(members) if members else np.zeros(0, dtype=np.int64)
        self._left = np.bincount(groups, minlength=len(total))
        self._covered = np.zeros(len(total), dtype=bool)
        self.taken = np.zeros(len(members), dtype=bool)

    def change(self, g: int) -> float:
        """Return by how much the squared distance to the share changes, if a group is taken."""
        y, n = self._members[g], self._sizes[g]
        return float((self._weight[y] * n * (n - 2.0 * self._lacking[y])).sum())

    def can_spare(self, g: int) -> bool:
        """Return whether each class of a group has another group to train on."""
        return bool((self._left[self._members[g]] > 1).all())

    def take(self, g: int) -> None:
        """Take a group."""
        y = self._members[g]
        self._lacking[y] -= self._sizes[g]
        self._left[y] -= 1
        self._covered[y] = True
        self.taken[g] = True

    def cover(self, free: Ints) -> None:
        """Take a group of each class of which none is taken, where there is one to spare."""
        of_class: dict[int, list[int]] = {}
        for g in free.tolist():
            for y in self._members[g].tolist():
                of_class.setdefault(y, []).append(g)
        for y in sorted(of_class, key=lambda y: len(of_class[y])):
            if self._covered[y]:
                continue
            spare = [g for g in of_class[y] if not self.taken[g] and self.can_spare(g)]
            if spare:
                self.take(min(spare, key=self.change))
