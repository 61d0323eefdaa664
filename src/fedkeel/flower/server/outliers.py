"""Replies that are far from those of the other clients, and from the client's own of before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.method.context import ByPart, Floats, Ints
from fedkeel.tree import State, Tree, walk

Sizes = Mapping[str, tuple[Floats, "Strictness"]]
"""[K] how large something is that each client sent, by what it is called; NaN where it lacks."""

PREFIX = "nodes/outliers"
"""Beginning of the names in a checkpoint."""

REFERENCES = 32
"""Sizes with which one is compared, at least, where so many clients have replied before."""

APART = 128
"""Replies of a round up to which each is compared with all but itself; of more, with all."""

MANY = 4
"""Sizes that make a spread which can be trusted."""

LARGEST = 1e300
"""Stands for a size that is too large for a number."""

SHORT = 32
"""A message of fewer numbers counts something, such as steps, and says little of the model."""


@dataclass(frozen=True)
class Strictness:
    """How many times the median a size may be, beyond which it is an outlier.

    It is `outlier_factor` at most. Where sizes are alike, it is less: `close` where there are many,
    `few` where there are few, times the square of their spread.

    Args:
        close: power of `outlier_factor`; 1 looks at no spread.
        few: power of `outlier_factor` in the case of few.
    """

    close: float = 1.0
    few: float = 1.0

    def limit(self, factor: float, logarithms: Floats) -> float:
        """Return that number, by the logarithms of the sizes that it is compared with."""
        power = self.close if len(logarithms) >= MANY else self.few
        base = max(min(factor, 10.0), factor**power)
        if power == 1.0 or not len(logarithms):
            return float(base)
        deviation = 1.4826 * float(np.median(np.abs(logarithms - _lower_median(logarithms))))
        return float(min(factor, base * math.exp(min(2.0 * deviation, 700.0))))


OF_UPDATE, OF_MESSAGE, OF_NUMBER = Strictness(1 / 2, 2 / 3), Strictness(2 / 3, 2 / 3), Strictness()
"""Updates are the most alike, once they are divided by the learning rate and the root of the number
of steps. Messages may be squares, as Fisher information is. Numbers may be anything."""


@dataclass(frozen=True)
class _Usual:
    """What is usual of a size.

    Args:
        median: of the sizes that it is compared with, NaN for none.
        limit: how many times the median it may be, by their spread.
        alike: the same where they are all alike.
        is_of_few: whether the median is the largest one of few sizes.
    """

    median: float
    limit: float
    alike: float
    is_of_few: bool


class Outliers:
    """Judges what clients send by what others send, and by what they have sent themselves.

    A size is compared with those of the other clients in the round. Where these are fewer than
    `REFERENCES`, the last ones of clients that replied before are taken too, whether or not they
    were left out. So a change that most clients make is not an outlier, and a few clients cannot
    move the median. A size is an outlier where it is too many times their median (see
    `Strictness`), or as many times the larger one of the median and what the client itself has
    sent last. Of fewer than `MANY` the largest one stands for the median, and what the client
    itself has sent counts as one of them.

    Args:
        factor: `outlier_factor` of the settings.
        clients: C.
    """

    def __init__(self, factor: float, clients: int) -> None:
        self._factor, self._clients = factor, clients
        self._last: dict[str, Floats] = {}  # [C] last size of each client, NaN for none
        self._taken: dict[str, Floats] = {}  # [C] the last one that was not an outlier
        self._when: dict[str, Ints] = {}  # [C] when the last one came, counted by judgements
        self._now = 0

    def begun_anew(self) -> Outliers:
        """Return one with the same settings that remembers nothing."""
        return Outliers(self._factor, self._clients)

    def judge(self, clients: Ints, sizes: Sizes, first: Floats | None = None) -> dict[int, str]:
        """Return the rows of clients [K] that are outliers, each with the reason; remember all.

        Args:
            clients: who has sent something.
            sizes: how large it is.
            first: [K] what an update is compared with where there is nothing else.
        """
        reasons: dict[int, str] = {}
        for name, (values, strictness) in sizes.items():
            rows = np.flatnonzero(~np.isnan(values))
            of_all = None
            if len(rows) > APART:
                of_all = self._usual(name, clients, values, None, strictness)
            for row in rows.tolist():
                usual = of_all or self._usual(name, clients, values, row, strictness)
                lonely = math.nan if first is None or name != UPDATE else float(first[row])
                ratio = self._excess(name, int(clients[row]), float(values[row]), usual, lonely)
                if ratio is not None:
                    text = f"{name} {ratio:.0e} times as large as the median"
                    reasons.setdefault(row, text)
        self._remember(clients, {name: values for name, (values, _) in sizes.items()}, reasons)
        return reasons

    def _usual(
        self, name: str, clients: Ints, values: Floats, row: int | None, strictness: Strictness
    ) -> _Usual:
        """Return what is usual among those with which a row is compared; None compares with all."""
        here = values if row is None else np.delete(values, row)
        here = here[~np.isnan(here)]
        others = np.concatenate([here, self._before(name, clients, REFERENCES - len(here))])
        medians = [_lower_median(group) for group in (here, others) if len(group)]
        if len(others) < MANY:  # one of them may be near 0, and not for a fault
            medians = others.tolist()
        limit = strictness.limit(self._factor, np.log(others[others > 0.0]))
        alike = strictness.limit(self._factor, np.zeros(len(others)))
        return _Usual(max(medians, default=math.nan), limit, alike, len(others) < MANY)

    def _excess(
        self, name: str, client: int, size: float, usual: _Usual, lonely: float
    ) -> float | None:
        """Return how many times the median a size is where that is too many, else None."""
        before = float(self._taken[name][client]) if name in self._taken else math.nan
        median = next((m for m in (usual.median, before, lonely) if not math.isnan(m)), 0.0)
        if usual.is_of_few:
            median = float(np.fmax(median, before))
        if not median > 0.0:
            return None
        highest = usual.limit * median
        if not math.isnan(before):
            highest = min(highest, usual.alike * max(median, before))
        return min(size, LARGEST) / median if size > highest else None

    def _before(self, name: str, clients: Ints, count: int) -> Floats:
        """Return the last sizes of so many other clients, of those that came last."""
        if name not in self._last or count <= 0:
            return np.zeros(0)
        when = self._when[name].copy()
        when[clients] = 0
        recent = np.argsort(-when, kind="stable")[:count]
        return self._last[name][recent[when[recent] > 0]]

    def _remember(
        self, clients: Ints, sizes: Mapping[str, Floats], reasons: Mapping[int, str]
    ) -> None:
        self._now += 1
        is_taken = np.array([row not in reasons for row in range(len(clients))], dtype=np.bool_)
        for name, values in sizes.items():
            if name not in self._last:
                self._last[name] = np.full(self._clients, math.nan)
                self._taken[name] = np.full(self._clients, math.nan)
                self._when[name] = np.zeros(self._clients, dtype=np.int64)
            has_sent = ~np.isnan(values)
            self._last[name][clients[has_sent]] = np.minimum(values[has_sent], LARGEST)
            self._when[name][clients[has_sent]] = self._now
            self._taken[name][clients[has_sent & is_taken]] = values[has_sent & is_taken]

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has to hold, so that a resumed run judges alike."""
        arrays: dict[str, NDArray[Any]] = {f"{PREFIX}/now": np.array([self._now])}
        for kind, of_kind in self._kinds().items():
            arrays |= {f"{PREFIX}/{kind}/{name}": array.copy() for name, array in of_kind.items()}
        return arrays

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take what was remembered at a checkpoint; those of before had nothing of it."""
        for kind, of_kind in self._kinds().items():
            start = f"{PREFIX}/{kind}/"
            of_kind.clear()
            of_kind.update(
                (name.removeprefix(start), np.array(array))
                for name, array in arrays.items()
                if name.startswith(start)
            )
        self._now = int(arrays.get(f"{PREFIX}/now", np.zeros(1))[0])

    def _kinds(self) -> dict[str, dict[str, Any]]:
        return {"last": self._last, "taken": self._taken, "when": self._when}


UPDATE = "an update"
"""What an update is called in a reason."""


def message_sizes(update: Tree, buffers: Tree, uploads: ByPart, scale: Floats) -> Sizes:
    """Return the norms of what clients send beside numbers for the record.

    Args:
        update: tensors [K, ...]; none where a codec has replaced it.
        buffers: tensors [K, ...].
        uploads: tensors [K, ...] by part.
        scale: [K] what the norms of updates are divided by.
    """
    sizes = _sizes({f"a message of {part}": state for part, state in uploads.items()})
    means = _sizes({"buffers": dict(buffers)})
    sizes.update((name, (values, OF_MESSAGE)) for name, (values, _) in means.items())
    if update:
        sizes[UPDATE] = (norms(list(update.values())) / scale, OF_UPDATE)
    return sizes


def answer_sizes(answers: ByPart) -> Sizes:
    """Return the norms of answers to surveys, tensors [K, ...] by part."""
    return _sizes({f"an answer of {part}": state for part, state in answers.items()})


def number_sizes(numbers: Mapping[str, Floats]) -> Sizes:
    """Return the sizes of numbers that only the records hold, such as losses.

    They may be close to 0 for most clients, as the loss is on what a model knows well. So each of
    them counts as 1 at least.

    Args:
        numbers: [K] of each client, by what they are called.
    """
    return {k: (np.maximum(np.abs(values), 1.0), OF_NUMBER) for k, values in numbers.items()}


def outlying_losses(losses: Floats, factor: float) -> dict[int, str]:
    """Return the rows of losses [K] of an evaluation that are outliers, each with the reason.

    NaN stands for a client without a reply. Infinity is an outlier, unless no loss is finite.

    >>> outlying_losses(np.array([0.5, 2.0, -3e29]), 1000.0)
    {2: 'a loss 1e+29 times as large as the median'}
    >>> outlying_losses(np.array([1e-9, 1e-9, 20.0, math.nan]), 1000.0)
    {}
    """
    if not np.isfinite(losses).any():
        return {}
    clients = np.arange(len(losses))
    return Outliers(factor, len(losses)).judge(clients, number_sizes({"a loss": losses}))


def without(sizes: Sizes, rows: NDArray[np.bool_]) -> Sizes:
    """Return sizes of which some rows [K] count as not sent."""
    return {k: (np.where(rows, math.nan, values), how) for k, (values, how) in sizes.items()}


def _sizes(states: Mapping[str, State]) -> dict[str, tuple[Floats, Strictness]]:
    sizes = {}
    for name, state in states.items():
        tensors = [t for _, t in walk(state) if t.is_floating_point()]
        if tensors:
            is_short = sum(t[0].numel() for t in tensors if len(t)) < SHORT
            sizes[name] = (norms(tensors), OF_NUMBER if is_short else OF_MESSAGE)
    return sizes


def norms(tensors: list[Tensor]) -> Floats:
    """Return norms [K] in float64, as infinity where they are larger than such a number."""
    rows = [t[..., None].flatten(1).double() for t in tensors]
    largest = torch.stack([t.abs().amax(dim=1) for t in rows if t.shape[1]]).amax(dim=0)
    unit = torch.where((largest > 0.0) & largest.isfinite(), largest, 1.0)
    squares = torch.stack([(t / unit[:, None]).square().sum(dim=1) for t in rows]).sum(dim=0)
    return np.asarray((squares.sqrt() * unit).numpy(), dtype=np.float64)


def _lower_median(values: Floats) -> float:
    """Return the median, of an even number the smaller one of the two in the middle."""
    return float(np.sort(values)[(len(values) - 1) // 2])
