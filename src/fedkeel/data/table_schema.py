"""The schema of a table: which inputs a model gets of its columns, the same at every client.

A column of numbers is one input. A column of categories is one input for each category, 1 for the
category of the example and 0 for the others. N examples, F columns, D inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from fedkeel.errors import DataError, counted

Missing = Literal["refuse", "mean", "indicator"]
"""What becomes of a value that is missing; see `fedkeel.config.Data`."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Args:
        name: its name.
        categories: names of its categories in the order of their inputs; None for numbers.
        fill: what the inputs of a missing value are: the mean over all training examples, of
            categories the share of each; empty where a missing value is refused, or where only the
            nodes of a federation know it.
        indicator: whether a further input is 1 where the value is missing, and 0 elsewhere.
    """

    name: str
    categories: tuple[str, ...] | None = None
    fill: tuple[float, ...] = ()
    indicator: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its inputs.

        >>> Column("sex", ("f", "m"), indicator=True).inputs
        ('sex=f', 'sex=m', 'sex is missing')
        """
        names = [self.name] if self.categories is None else self.category_inputs
        return (*names, f"{self.name} is missing") if self.indicator else tuple(names)

    @property
    def category_inputs(self) -> list[str]:
        """The names of the inputs of its categories."""
        return [f"{self.name}={category}" for category in self.categories or ()]

    def record(self) -> dict[str, Any]:
        """Return the column as run.json has it."""
        values: dict[str, Any] = {"name": self.name, "kind": "number"}
        if self.categories is not None:
            values |= {"kind": "category", "categories": list(self.categories)}
        if self.fill or self.indicator:
            values |= {"fill": list(self.fill), "indicator": self.indicator}
        return values


@dataclass(frozen=True)
class TableSchema:
    """The columns of a table, and what becomes of missing values.

    Args:
        columns: F columns.
        missing: what becomes of a value that is missing.
        label: name of the column of labels.
        dropped: names of the columns that were left out.
    """

    columns: tuple[Column, ...]
    missing: Missing = "refuse"
    label: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def width_told(self) -> str:
        """How many inputs an example has, and what they come from.

        >>> columns = Column("age"), Column("sex", ("f", "m")), Column("dose", indicator=True)
        >>> TableSchema(columns).width_told
        '5 inputs: 2 columns of numbers + one column of 2 categories + one gap indicator'
        """
        numbers = sum(column.categories is None for column in self.columns)
        categories = [len(column.categories) for column in self.columns if column.categories]
        gaps = sum(column.indicator for column in self.columns)
        parts = [f"{counted(numbers, 'column')} of numbers"] if numbers else []
        if categories:
            of = f"{sum(categories)} categories" + (" in all" if len(categories) > 1 else "")
            parts.append(f"{counted(len(categories), 'column')} of {of}")
        if gaps:
            parts.append(counted(gaps, "gap indicator"))
        inputs = sum(len(column.inputs) for column in self.columns)
        return f"{counted(inputs, 'input')}: {' + '.join(parts)}"

    @classmethod
    def of(
        cls,
        x: Tensor,
        columns: Sequence[str],
        categories: Mapping[str, tuple[str, ...]],
        missing: Missing,
        label: str = "",
        dropped: tuple[str, ...] = (),
        is_one_of_many: bool = False,
    ) -> Self:
        """Return the schema of the training examples of all clients.

        A column gets an indicator where at least one of these examples has no value in it; on one
        of many nodes, which do not know each other's examples, every column gets one.

        Args:
            x: [N, F] numbers; of a column of categories the number of each example's category. NaN
                where a value is missing.
            columns: F names.
            categories: of each column of categories, the names of these.
            missing: what becomes of a value that is missing.
            label: as the field.
            dropped: as the field.
            is_one_of_many: whether other nodes have more of the data.

        Raises:
            DataError: no example has a value in a column.
        """
        made = []
        for index, name in enumerate(columns):
            values, names = x[:, index], categories.get(name)
            fill: tuple[float, ...] = ()
            is_missing = values.isnan()
            if missing != "refuse":
                known = values[~is_missing]
                if not len(known):
                    raise DataError(
                        f"No training example has a value in the column {name!r}.",
                        do=f"fill in at least one cell where the table is made up, else leave "
                        f'the column out at every site: data.drop = ["{name}"]'
                        if is_one_of_many
                        else f'leave it out: drop = ["{name}"]',
                    )
                fill = tuple(_mean(known, len(names or ())))
            has_gaps = is_one_of_many or bool(is_missing.any())
            has_indicator = missing == "indicator" and has_gaps
            made.append(Column(name, names, fill, has_indicator))
        return cls(tuple(made), missing, label, dropped)

    @classmethod
    def of_nodes(
        cls,
        inputs: Sequence[str],
        categories: Mapping[str, tuple[str, ...]],
        missing: Missing,
        mean: Sequence[float] | None,
    ) -> Self:
        """Return the schema of tables that only nodes have, by what a server knows of them.

        Each node fills its gaps by its own numbers, and these stay there. So a gap in new examples
        gets the mean of all nodes, which is known where they standardise by it. What a gap in a
        column of categories gets is not known.

        Args:
            inputs: D names of inputs.
            categories: of each column of categories, the names of these.
            missing: what becomes of a value that is missing.
            mean: D means of the inputs of all nodes; None where they are not known.

        >>> schema = TableSchema.of_nodes(
        ...     ["age", "sex=f", "sex=m"], {"sex": ("f", "m")}, "mean", [40.0, 0.0, 0.0]
        ... )
        >>> [(column.name, column.categories, column.fill) for column in schema.columns]
        [('age', None, (40.0,)), ('sex', ('f', 'm'), ())]
        """
        columns, start = [], 0
        for column in columns_of_inputs(inputs, categories):
            if missing != "refuse" and mean is not None and column.categories is None:
                column = replace(column, fill=(mean[start],))
            columns.append(column)
            start += len(column.inputs)
        if missing == "refuse" and any(column.indicator for column in columns):
            missing = "indicator"  # a function at the nodes has made the inputs
        return cls(tuple(columns), missing)

    @property
    def inputs(self) -> tuple[str, ...]:
        """D names of the inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def is_binary(self) -> Tensor:
        """[D] whether an input is a category's or an indicator's, which are not standardised."""
        flags = [
            column.categories is not None or place > 0
            for column in self.columns
            for place, _ in enumerate(column.inputs)
        ]
        return torch.tensor(flags, dtype=torch.bool)

    @property
    def is_plain(self) -> bool:
        """Whether all columns are numbers without gaps, so that the inputs are the columns."""
        return not any(column.fill or column.categories is not None for column in self.columns)

    def inputs_of(self, x: Tensor) -> Tensor:
        """Return the inputs [N, D] of a table [N, F] as `of` takes it, of the same type.

        >>> schema = TableSchema((Column("sex", ("f", "m"), fill=(0.25, 0.75), indicator=True),))
        >>> schema.inputs_of(torch.tensor([[1.0], [torch.nan]])).tolist()
        [[0.0, 1.0, 0.0], [0.25, 0.75, 1.0]]
        """
        if self.is_plain:
            return x
        inputs, start = x.new_empty(len(x), len(self.inputs)), 0
        for index, column in enumerate(self.columns):
            values, names = x[:, index], column.categories
            end = start + (1 if names is None else len(names))
            part = inputs[:, start:end]
            if names is None:
                part.copy_(values[:, None])
            else:
                part.copy_(values[:, None] == torch.arange(len(names), dtype=x.dtype))
            is_missing = values.isnan()
            if column.fill:
                part[is_missing] = torch.tensor(column.fill, dtype=x.dtype)
            if column.indicator:
                inputs[:, end] = is_missing.to(x.dtype)
                end += 1
            start = end
        return inputs

    def record(self) -> list[dict[str, Any]]:
        """Return the columns as run.json has them."""
        return [column.record() for column in self.columns]


def columns_of_inputs(
    inputs: Sequence[str], categories: Mapping[str, tuple[str, ...]]
) -> Iterator[Column]:
    """Yield the columns of a table by the names of its inputs.

    Args:
        inputs: D names.
        categories: of each column of categories, the names of these; others are of numbers.
    """
    rest = tuple(inputs)
    of_names = [(name, known) for name, known in categories.items() if known]
    while rest:
        kinds = [*of_names, (rest[0], None)]
        choices = [Column(name, known, indicator=i) for name, known in kinds for i in (True, False)]
        column = next(c for c in choices if rest[: len(c.inputs)] == c.inputs)
        yield column
        rest = rest[len(column.inputs) :]


def _mean(values: Tensor, categories: int) -> list[float]:
    """Return the mean of numbers, or the share of each category, in float64."""
    if not categories:
        return [float(values.mean(dtype=torch.float64))]
    counts = torch.bincount(values.to(torch.int64), minlength=categories)
    shares: list[float] = (counts.to(torch.float64) / len(values)).tolist()
    return shares
