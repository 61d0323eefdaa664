"""Values of new examples that are unlike those of the training, as by a wrong unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedkeel.data.read.scaling import Scale
from fedkeel.data.table_schema import TableSchema
from fedkeel.data.value_ranges import measure_range, places

NEAR, FAR = 3.0, 10.0
"""Deviations from the mean outside of which most values are told, and outside of which each is."""

MARGIN = 0.1
"""How far outside the training's range each value is told, as a share of the width of the range."""

LEAST = 3
"""Values, at least, that are told because more than half of all are outside. Fewer are told where
they are `NEAR` deviations from the mean."""

NARROW = 0.01
"""Share of the width of the training's range; images or series within so little are told."""

Scales = Sequence[tuple[Tensor, Scale]]
"""Rows, and the scale by which they were standardised."""


@dataclass(frozen=True)
class UsualValues:
    """The values that an input had in training, as the model takes them. F places.

    Args:
        low: [F] most values are not below.
        high: [F] nor above.
        least: [F] no value is below.
        most: [F] nor above.
        range: [F] the lowest and the highest value of the training; None where they are not known.
    """

    low: Tensor
    high: Tensor
    least: Tensor
    most: Tensor
    range: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of_range(cls, low: Tensor, high: Tensor, is_table: bool, is_scaled: bool) -> Self:
        """Return the usual values by the range of the training.

        One odd value of the training makes a range wide, so most values of a column are near the
        mean too. Inputs without names may be pixels, of which some hardly vary: what is far outside
        is then meant by the range of all.
        """
        if is_table:
            least, most = low, high
        else:
            least, most = low.min().expand_as(low), high.max().expand_as(high)
        margin = MARGIN * (most - least)
        ends = (
            (low.clamp(min=-NEAR), high.clamp(max=NEAR)) if is_table and is_scaled else (low, high)
        )
        return cls(*ends, least - margin, most + margin, (low, high))

    @property
    def rounding(self) -> Tensor:
        """[F] how far outside a value may be that is the lowest or the highest one itself."""
        largest = torch.maximum(self.low.abs(), self.high.abs())
        return 1e-4 * (self.high - self.low) + 1e-6 * largest

    @classmethod
    def by_deviation(cls, count: int, is_table: bool) -> Self:
        """Return the usual values of inputs of which only mean and deviation are known.

        A single pixel may be many deviations from its mean.
        """
        one = torch.ones(count, dtype=torch.float64)
        far = FAR if is_table else torch.inf
        return cls(-NEAR * one, NEAR * one, -far * one, far * one)


def odd_values(
    raw: Tensor,
    x: Tensor,
    usual: UsualValues,
    scales: Scales,
    schema: TableSchema | None,
    name: str,
) -> Iterator[str]:
    """Yield a warning for each column with values unlike those of the training.

    One value that is far outside is told, and values that are not usual where they are most.
    Categories are always known, and what a missing value was filled with is not told. Inputs
    without names have one warning together.

    Args:
        raw: [N, ...] inputs before they are standardised.
        x: [N, ...] the same as the model takes them.
        usual: the values that they had in training.
        scales: by what they were standardised; empty where they were not.
        schema: the columns of a table, None of anything else.
        name: what to call them.
    """
    count = len(usual.low)
    place = places(x.shape[1:], count).flatten()
    values = x.reshape(len(x), -1)
    is_given = torch.ones_like(values, dtype=torch.bool)
    if schema is not None:
        is_given = _given(raw, schema) & ~_is_flag(raw, scales)
    all_given = _sums(is_given, place, count)
    outside, far = (
        ((values < (low - usual.rounding)[place]) | (values > (high + usual.rounding)[place]))
        & is_given
        for low, high in ((usual.low, usual.high), (usual.least, usual.most))
    )
    is_few, has_mean = all_given < LEAST, schema is not None and bool(scales)
    outside &= ~is_few[place] | ((values.abs() > NEAR) & has_mean)
    many, some_far = (_sums(mask, place, count) for mask in (outside, far))
    is_most = (2 * many > all_given) & (is_few | (many >= LEAST))
    odd = (is_most | (some_far > 0)).nonzero().flatten().tolist()
    row = "example" if schema is None else "row"
    for f in odd[:1] if schema is None else odd:
        mask = (outside if is_most[f] else far) & (place == f)
        rows = mask.any(1).nonzero().flatten().tolist()
        scale = next((scale for index, scale in scales if rows[0] in index.tolist()), None)
        shown, ends = _shown(raw, values, usual, f, scale)
        yield (
            f"{name}: {_where(f, x.ndim, count, schema, len(odd) - 1)} values unlike those of the "
            f"training in {len(rows):,} of {len(x):,} {row}s: {_span(shown[mask])}, first in {row} "
            f"{rows[0]} (counted from 0); the training had {ends}: see whether the values and "
            "their unit are right"
        )
    if x.ndim > 2 and not odd and _is_narrow(raw, usual, scales):
        shown, ends = _shown(raw, values, usual, 0, scales[0][1] if scales else None)
        yield (
            f"{name}: all values are {_span(shown)}; the training had {ends}: see whether the "
            "values and their unit are right"
        )


def _sums(mask: Tensor, place: Tensor, count: int) -> Tensor:
    """Return [F] how many of [N, P] are set at each place."""
    return torch.zeros(count, dtype=torch.int64).index_add(0, place, mask.sum(0))


def _is_narrow(raw: Tensor, usual: UsualValues, scales: Scales) -> bool:
    """Return whether inputs have next to none of the spread that those of the training had."""
    if usual.range is None:
        return False
    low, high = (torch.tensor(ends) for ends in measure_range(raw, len(usual.low)))
    std = scales[0][1].std if scales else torch.ones(1)
    width = (usual.range[1] - usual.range[0]) * (std if len(std) == len(low) else std.median())
    return bool((high - low < NARROW * width).all())


def _given(x: Tensor, schema: TableSchema) -> Tensor:
    """Return [N, D] whether an input is a number that was given: no category, and no filled gap."""
    is_given = (~schema.is_binary).expand(x.shape).clone()
    place = 0
    for column in schema.columns:
        if column.categories is None and column.fill:
            is_given[:, place] &= x[:, place] != x.new_tensor(column.fill[0])
        place += len(column.inputs)
    return is_given


def _is_flag(x: Tensor, scales: Scales) -> Tensor:
    """Return [N, D] whether an input is 0 or 1, where training had only these two.

    One of the two may be rare, and then many deviations from the mean.
    """
    flags = torch.zeros_like(x, dtype=torch.bool)
    for rows, scale in scales:
        share = scale.mean * (1 - scale.mean)
        only_two = torch.isclose(scale.std.square(), share, rtol=1e-6, atol=0.0)
        flags[rows] = only_two & ((x[rows] == 0) | (x[rows] == 1))
    return flags


def _shown(
    raw: Tensor, values: Tensor, usual: UsualValues, f: int, scale: Scale | None
) -> tuple[Tensor, str]:
    """Return the inputs [N, P] as they are shown, and in words what the training had at a place.

    They are shown as the user has them, unless each number of the place has a scale of its own.
    """
    ends, is_ours = [], scale is None or len(scale.mean) == len(usual.low)
    mean, std = (0.0, 1.0)
    if scale is not None and is_ours:
        mean, std = scale.mean[f].item(), scale.std[f].item()
    if usual.range is not None:
        low, high = (mean + std * end[f].item() for end in usual.range)
        zero = 1e-5 * (high - low)  # up to rounding
        ends.append(" to ".join(_number(end if abs(end) > zero else 0.0) for end in (low, high)))
    if scale is not None and is_ours:
        ends.append(f"{_number(mean)} on average")
    if usual.range is None:
        ends.append(f"a deviation of {_number(std)}")
    if not is_ours:
        ends.append("once standardised")
    return raw.reshape(len(raw), -1) if is_ours else values, ", ".join(ends)


def _where(f: int, axes: int, count: int, schema: TableSchema | None, others: int) -> str:
    """Return in words what holds the values, up to the verb."""
    if schema is not None:
        return f"column {schema.inputs[f]!r} holds"
    if count == 1:
        return "there are"
    what = f"{'input' if axes == 2 else 'channel'} {f} (counted from 0)"
    return f"{what} and {others:,} more hold" if others else f"{what} holds"


def _span(values: Tensor) -> str:
    low, high = _number(values.min().item()), _number(values.max().item())
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.6g}"
