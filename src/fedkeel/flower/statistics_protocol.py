"""The messages by which a server asks sites for statistics: headers, and what lies where.

An answer is a list of whole numbers, of which sums over sites are the same for all of them. So the
server adds up lists, or has a secure sum of them, and reads a sum as it reads one site's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedkeel.config import Data, Settings
from fedkeel.data.table_schema import columns_of_inputs
from fedkeel.engine.spec import TensorSpec
from fedkeel.features.budget.policy import STATISTICS_KINDS, StatisticsKind
from fedkeel.features.secure.primitives import Words
from fedkeel.flower.protocol import MAX_SIZE, Form, Request
from fedkeel.flower.secure_protocol import VECTOR, NodeNumber, Texts
from fedkeel.flower.value_cells import CELLS
from fedkeel.flower.wire import Header

STATISTICS, TOTALS = "query.statistics", "query.totals"
"""Message types, with their actions: for one site's statistics, and for them under a mask."""

MAX_COLUMNS = 1_000
"""Columns of which statistics are made. Of more, as of images, only labels are counted."""

LIMBS, LIMB_BITS, PLACES = 16, 32, 384
"""A real number is a whole number of 512 bits, of which 384 are binary places, in 16 parts. So the
square of each number of float32 has places enough."""

EXAMPLES = "examples"
"""Name of the number of examples, the first of an answer."""

Ints = NDArray[np.int64]
PartName = tuple[str, int]
"""Kind and column of a part of an answer; column -1 for labels and the number of examples."""


class ColumnForm(Settings):
    """A column of which statistics are made.

    Args:
        name: its name.
        categories: names of its categories; None for numbers.
    """

    name: str = Field(max_length=1_000)
    categories: tuple[str, ...] | None = None


class StatisticsRequest(Request):
    """Header of `STATISTICS`.

    Args:
        kinds: what is asked for.
        classes: number of labels, 0 where the targets are none.
        columns: of which statistics are made.
    """

    kinds: tuple[StatisticsKind, ...] = Field(min_length=1, max_length=len(STATISTICS_KINDS))
    classes: int = Field(ge=0, le=10**6)
    columns: tuple[ColumnForm, ...] = Field(max_length=MAX_COLUMNS)

    @property
    def layout(self) -> StatisticsLayout:
        """What lies where in an answer."""
        return StatisticsLayout(self.kinds, self.classes, self.columns)


class TotalsRequest(StatisticsRequest):
    """Header of `TOTALS`: the same, and what a secure sum needs, as in `SumRequest`.

    Args:
        node: the number of the node.
        shares: what the other nodes have written for this one.
        bound: what they are bound to, of these shares.
    """

    node: NodeNumber
    shares: Texts
    bound: Texts


class StatisticsReply(Header):
    """Header of an answer to either: what the site's policy has done to the numbers.

    Args:
        minimum: smallest count that is sent.
        noise: standard deviation of the noise of a count, by kind; empty for none.
    """

    minimum: int = Field(ge=1, le=MAX_SIZE)
    noise: dict[StatisticsKind, Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=dict, max_length=len(STATISTICS_KINDS)
    )


def columns_of(
    names: Sequence[str], data: Data, inputs: Mapping[str, Form], targets: Mapping[str, Form]
) -> tuple[ColumnForm, ...]:
    """Return the columns of which statistics are made, as either end knows them.

    A target that is one quantity is one of them. What is neither a table nor a row of numbers has
    no columns.

    Args:
        names: names of the inputs of a table, else none.
        data: the settings of the data.
        inputs: form of the inputs, as a node describes them.
        targets: form of the targets.
    """
    form, target = inputs.get(""), targets.get("")
    columns: list[ColumnForm] = []
    if form is not None and len(form.shape) == 1 and not form.whole:
        named = list(names) or [str(i) for i in range(form.shape[0])]
        columns = [
            ColumnForm(name=column.name, categories=column.categories)
            for column in columns_of_inputs(named, data.categories_of)
        ]
    if target is not None and not target.shape and not target.whole:
        columns.append(ColumnForm(name=data.label))
    return tuple(columns) if len(columns) <= MAX_COLUMNS else ()


@dataclass(frozen=True)
class StatisticsLayout:
    """The order of the numbers of an answer.

    Args:
        kinds: what is asked for.
        classes: number of labels.
        columns: of which statistics are made.
    """

    kinds: Sequence[StatisticsKind]
    classes: int
    columns: Sequence[ColumnForm]

    @cached_property
    def places(self) -> dict[PartName, slice]:
        """Where each part is."""
        places, start = {}, 0
        for place, size in self._sizes():
            places[place] = slice(start, start + size)
            start += size
        return places

    def _sizes(self) -> Iterator[tuple[PartName, int]]:
        yield (EXAMPLES, -1), 1
        if "labels" in self.kinds and self.classes:
            yield ("labels", -1), self.classes + 1  # the last are those of no label that is shown
        for index, column in enumerate(self.columns):
            if "missing" in self.kinds:
                yield ("missing", index), 1
            if column.categories is not None:
                if "categories" in self.kinds:
                    yield ("categories", index), len(column.categories) + 1
                continue
            if "moments" in self.kinds:
                yield ("moments", index), 1 + 2 * LIMBS
            if "quantiles" in self.kinds:
                yield ("quantiles", index), CELLS

    @cached_property
    def size(self) -> int:
        """How many numbers an answer has."""
        return max(int(place.stop) for place in self.places.values())

    @property
    def spec(self) -> Mapping[str, TensorSpec]:
        """Shape and type of an answer."""
        return {VECTOR: TensorSpec((self.size,), torch.int64)}

    def written(self, parts: Mapping[PartName, Ints]) -> Words:
        """Return the numbers of an answer; a part that is not given is 0."""
        numbers = np.zeros(self.size, dtype=np.int64)
        for place, part in parts.items():
            if place in self.places:
                numbers[self.places[place]] = part
        return numbers.view(np.uint64)

    def parts(self, words: Words) -> dict[PartName, Ints]:
        """Return the parts of an answer, or of a sum of answers."""
        numbers = words.view(np.int64)
        return {place: numbers[where] for place, where in self.places.items()}


def in_limbs(number: float | Fraction) -> Ints:
    """Return the parts [LIMBS] of a real number, which add up as the numbers do.

    Raises:
        ValueError: it is not finite, or too large.

    >>> of_limbs(in_limbs(0.5) + in_limbs(-2.25))
    -1.75
    """
    largest = 2.0 ** (LIMBS * LIMB_BITS - PLACES - 32)  # which leaves room for a sum
    if not -largest < float(number) < largest:
        raise ValueError(f"{number} is too large")
    whole = round(Fraction(number) * (1 << PLACES)) % (1 << LIMBS * LIMB_BITS)
    limbs = [(whole >> LIMB_BITS * i) % (1 << LIMB_BITS) for i in range(LIMBS)]
    return np.array(limbs, dtype=np.int64)


def whole_of_limbs(limbs: Ints) -> int:
    """Return the real number of a sum of parts [LIMBS], times 2 to the power of `PLACES`."""
    size = 1 << LIMBS * LIMB_BITS
    whole = sum(int(limb) << LIMB_BITS * i for i, limb in enumerate(limbs)) % size
    return whole - size if whole >= size // 2 else whole


def of_limbs(limbs: Ints) -> float:
    """Return the real number of a sum of parts [LIMBS]."""
    return whole_of_limbs(limbs) / (1 << PLACES)
