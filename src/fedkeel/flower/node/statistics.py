"""A site's statistics: counts and sums of its examples, as far as its operator's policy lets them.

They are of all the examples of the site, as they are in its file: neither the split into training
and test examples nor the normalisation changes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.base.values import only_tensor
from fedkeel.config import Data, Experiment
from fedkeel.data.dataset import Dataset
from fedkeel.data.table_schema import Column
from fedkeel.features.budget.policy import Policy, PolicyError, StatisticsKind
from fedkeel.features.secure.primitives import Words
from fedkeel.flower.node.count_noise import CountNoise
from fedkeel.flower.protocol import NodeDescription
from fedkeel.flower.statistics_protocol import (
    EXAMPLES,
    LIMBS,
    STATISTICS,
    TOTALS,
    ColumnForm,
    Ints,
    PartName,
    StatisticsLayout,
    StatisticsReply,
    StatisticsRequest,
    columns_of,
    in_limbs,
)
from fedkeel.flower.value_cells import CELLS, LEAVES, leaf_counts, merged, within_minimum
from fedkeel.flower.wire import WireError

Floats = NDArray[np.float64]

LARGEST = 2.0**48
"""Size of a number from which on a column has no moments."""

FINEST = 2.0**-150
"""Largest deviation from the mean, unless it is 0, below which a column has no moments: its squares
would have too few places."""


def as_it_is(data: Data) -> Data:
    """Return the settings by which a site's data are read for statistics.

    Inputs are not normalised, gaps are marked, and all examples are there.
    """
    return data.model_copy(update={"normalize": "none", "missing": "indicator", "limit": None})


def check_same_data(installed: Experiment, sent: Experiment, kind: str) -> None:
    """Refuse a request for statistics of other columns or rows than the installed app has.

    A server that could choose them would learn of few examples from the difference of two answers.

    Raises:
        PolicyError: the settings of the data differ.
    """
    tables = [(run.data, run.partition) for run in (installed, sent)]
    if kind in (STATISTICS, TOTALS) and tables[0] != tables[1]:
        raise PolicyError(
            "The server asks for statistics of other data than the app on this node names.",
            why="from the difference of two answers it could learn of few examples",
            do="change [data] and [partition] in the app that is installed on the node",
        )


@dataclass(frozen=True)
class OwnData:
    """The data that only a node has.

    Args:
        settings: of the experiment, by which the inputs are made.
        read: reads all examples as they are, see `as_it_is`.
    """

    settings: Data
    read: Callable[[], Dataset]


@dataclass(frozen=True)
class SiteCounter:
    """Answers requests for statistics of one site.

    Args:
        policy: what the site allows, None where its operator has not said so.
        own: the site's data; None where the server has them too.
        folder: the node's folder.
    """

    policy: Policy | None
    own: OwnData | None
    folder: Path

    @cached_property
    def _own(self) -> OwnData:
        if self.own is None:
            raise WireError(
                "The server asks for statistics of data that it has itself.",
                do="statistics are of data that stay on the nodes: data.source = 'nodes'",
            )
        return self.own

    @cached_property
    def data(self) -> Dataset:
        """The site's data as they are.

        Raises:
            WireError: the server has them too.
        """
        return self._own.read()

    def subject(self, clients: Collection[int]) -> str:
        """Return a digest of the clients: a node helps to unmask sums for the same nodes only.

        It depends neither on what is asked for nor on the data: the difference of two sums of
        different nodes would tell the numbers of one, whichever other kinds are in them, and in
        whatever order rows were read.
        """
        text = f"statistics {sorted(clients)}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def answer(
        self, request: StatisticsRequest, described: NodeDescription
    ) -> tuple[StatisticsReply, Words]:
        """Return the answer to a request, and what the policy has done to it.

        Args:
            request: what is asked for.
            described: what the node says of its data.

        Raises:
            PolicyError: the site's operator has not consented, or the site's epsilon is spent.
            WireError: the request is of other columns or labels than the data have.
        """
        policy = self._consent(request.kinds)
        rules, data = policy.statistics, self.data
        inputs, targets = described.inputs, described.targets
        columns = columns_of(described.columns, self._own.settings, inputs, targets)
        classes = data.classes if data.has_labels else 0
        is_numbered_alike = classes <= request.classes and (not request.classes) == (not classes)
        if columns != request.columns or not is_numbered_alike:
            raise WireError(
                "The server asks for statistics of other columns or labels than this node has.",
                got=f"{len(request.columns)} columns and {request.classes} labels",
                expected=f"{len(columns)} columns and {classes} labels",
                do="have the same columns in the same order everywhere",
            )
        noise = None
        if rules.epsilon is not None:
            noise = CountNoise.kept_in(self.folder, rules.epsilon / len(rules.kinds))
        made = _Answer(data, request.layout, rules.minimum, noise)
        words = request.layout.written(made.parts())
        if noise is not None and policy.epsilon is not None:
            noise.charge(policy, min((item.client for item in request.clients), default=0))
        return (
            StatisticsReply(
                run=request.run,
                round=request.round,
                minimum=rules.minimum,
                noise={} if noise is None else noise.deviations,
            ),
            words,
        )

    def _consent(self, kinds: Collection[StatisticsKind]) -> Policy:
        """Return the policy, where it allows all that is asked for.

        Raises:
            PolicyError: names what it does not allow.
        """
        allowed = () if self.policy is None else self.policy.statistics.kinds
        refused = [kind for kind in kinds if kind not in allowed]
        if self.policy is None or refused:
            raise PolicyError(
                "This site has not consented to these statistics.",
                got=", ".join(refused),
                expected=", ".join(allowed) or "none",
                do="name them in [statistics] kinds of the site's policy, if the site agrees",
            )
        return self.policy


@dataclass(frozen=True)
class _Answer:
    """Makes the parts of an answer.

    No count lies between 1 and the minimum: neither of a label, a category, missing values or a
    cell, nor what is left of a sum. Sums of moments may tell more, see the guide. Where fewer
    values than that are missing in a column, none counts as missing, and they count as the others
    do; where fewer are known, none is known.

    Args:
        data: of the site, as they are.
        layout: what is asked for.
        minimum: smallest count that is sent.
        noise: of the counts, None for none.
    """

    data: Dataset
    layout: StatisticsLayout
    minimum: int
    noise: CountNoise | None

    def parts(self) -> dict[PartName, Ints]:
        """Return the parts; of fewer examples than the minimum, only how many they are."""
        count = len(self.data)
        parts: dict[PartName, Ints] = {(EXAMPLES, -1): np.array([count])}
        if count < self.minimum:
            return parts
        if ("labels", -1) in self.layout.places:
            labels = np.bincount(self.data.labels, minlength=self.data.classes)
            shown = self._shown("labels", "", labels, 1)
            others = self.layout.classes + 1 - len(shown)  # labels that only other sites have
            parts["labels", -1] = np.insert(shown, -1, [0] * others)
        for form, values in self._columns():
            parts |= dict(self._column(self.layout.columns.index(form), form, values))
        return parts

    def _columns(self) -> Iterator[tuple[ColumnForm, Floats]]:
        """Yield each column with its values [N]; NaN where one is missing."""
        forms, y = list(self.layout.columns), self.data.y
        is_target = forms and not self.data.classes and isinstance(y, torch.Tensor) and y.ndim == 1
        if is_target:
            yield forms.pop(), only_tensor(y, "a target").double().numpy()
        if not forms:
            return
        x = only_tensor(self.data.x, "a column").double().numpy()
        schema, start = self.data.schema, 0
        columns = [Column(form.name) for form in forms] if schema is None else schema.columns
        for form, column in zip(forms, columns, strict=True):
            part = x[:, start : start + len(column.inputs)]
            start += len(column.inputs)
            values = part[:, 0]
            if column.categories is not None:
                values = part[:, : len(column.categories)].argmax(axis=1).astype(np.float64)
            yield form, np.where(part[:, -1] == 1.0, np.nan, values) if column.indicator else values

    def _column(
        self, index: int, form: ColumnForm, values: Floats
    ) -> Iterator[tuple[PartName, Ints]]:
        """Yield the parts of one column."""
        known = values[~np.isnan(values)]
        count, missing = len(values), len(values) - len(known)
        if self.noise is None and len(known) < self.minimum:
            known, missing = known[:0], count
        is_few = self.noise is None and missing < self.minimum
        also = missing if is_few else 0  # missing, and counted as known
        makers: dict[StatisticsKind, Callable[[], Ints]] = {
            "missing": lambda: self._missing(form, missing),
            "categories": lambda: self._categories(form, known, also),
            "moments": lambda: _moments(known, also),
            "quantiles": lambda: self._cells(form, known, also),
        }
        for kind, make in makers.items():
            is_told = kind == "missing" or self.noise is not None or len(known)
            if (kind, index) in self.layout.places and is_told:
                yield (kind, index), make()

    def _missing(self, form: ColumnForm, missing: int) -> Ints:
        counts = np.array([missing])
        if self.noise is not None:
            of = len(self.layout.columns)
            counts = self.noise.added("missing", form.name, counts, 1, of)
        return np.clip(np.where(counts < self.minimum, 0, counts), 0, len(self.data))

    def _categories(self, form: ColumnForm, known: Floats, also: int) -> Ints:
        counts = np.bincount(known.astype(np.int64), minlength=len(form.categories or ()))
        counts[counts.argmax()] += also
        of = sum(column.categories is not None for column in self.layout.columns)
        return self._shown("categories", form.name, counts, of)

    def _shown(self, kind: StatisticsKind, name: str, counts: Ints, of: int) -> Ints:
        """Return counts of which none is smaller than the minimum, and how many are in no count.

        Args:
            kind: what is counted.
            name: of the column.
            counts: of each label or category.
            of: columns among which the noise is divided.
        """
        if self.noise is not None:
            noisy = self.noise.added(kind, name, counts, 2, of)
            return np.append(np.where(noisy < self.minimum, 0, noisy), 0)
        shown = np.where(counts < self.minimum, 0, counts)
        rest = np.array([counts.sum() - shown.sum()])
        within_minimum(shown, rest, self.minimum)
        return np.append(shown, rest)

    def _cells(self, form: ColumnForm, known: Floats, also: int) -> Ints:
        leaves = leaf_counts(known)
        if self.noise is None:
            return merged(leaves, self.minimum, also)
        of = sum(column.categories is None for column in self.layout.columns)
        noisy = self.noise.added("quantiles", form.name, leaves, 2, of)
        least = max(self.minimum, self.noise.beyond(2, of, 20 * LEAVES))
        return np.append(
            np.where(noisy < least, 0, noisy), np.zeros(CELLS - LEAVES, dtype=np.int64)
        )


def _moments(known: Floats, also: int) -> Ints:
    """Return number, sum and sum of squares; what counts beside the known is like them.

    All are 0 where numbers are too large, or lie too close together.

    The last is made of the squared deviations from the mean, so that these are exact, too, when the
    server takes the mean off again.
    """
    none = np.zeros(1 + 2 * LIMBS, dtype=np.int64)
    if not np.abs(known).max() < LARGEST:
        return none
    count = len(known)
    mean = min(max(math.fsum(known) / count, known.min()), known.max())
    if 0.0 < np.abs(known - mean).max() < FINEST:
        return none
    deviations = math.fsum((known - mean) ** 2)
    total = Fraction(mean) * (count + also)
    squares = Fraction(deviations) * (count + also) / count + Fraction(mean) * total
    try:
        return np.concatenate([[count + also], in_limbs(total), in_limbs(squares)])
    except ValueError:  # so many large numbers have none
        return none
