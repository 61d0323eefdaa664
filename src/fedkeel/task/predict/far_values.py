"""Values of new rows that are far outside those of the training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedkeel.data.read.scaling import Scale
from fedkeel.data.table_schema import TableSchema

FAR = 10.0
"""Deviations from the mean of the training examples, beyond which a value is told."""


def is_far(x: Tensor, scale: Scale, schema: TableSchema) -> Tensor:
    """Return [N, D] whether an input is far outside those of the training.

    Nothing is kept of the training's values but their mean and deviation. A column that never
    varied is ignored by the model. 0 and 1 are never far where training had only these two, of
    which one may be rare; nor is what a missing value was filled with.

    Args:
        x: [N, D] inputs before they are standardised.
        scale: D means and deviations.
        schema: the columns of the table.
    """
    values, mean, std = x.to(torch.float64), scale.mean, scale.std
    far: Tensor = (values - mean).abs() > FAR * std
    only_two = torch.isclose(std.square(), mean * (1 - mean), rtol=1e-6, atol=0.0)
    far &= ~(only_two & ((values == 0) | (values == 1)))
    far &= (std > 0) & ~schema.is_binary
    place = 0
    for column in schema.columns:
        if column.categories is None and column.fill:
            far[:, place] &= x[:, place] != x.new_tensor(column.fill[0])
        place += len(column.inputs)
    return far


def far_warnings(x: Tensor, far: Tensor, schema: TableSchema, name: str) -> Iterator[str]:
    """Yield a warning for each column with values far outside those of the training.

    Args:
        x: [N, D] inputs before they are standardised.
        far: [N, D] which are.
        schema: the columns of the table.
        name: what to call the table.
    """
    for place, column in enumerate(schema.inputs):
        rows = far[:, place].nonzero().flatten().tolist()
        if rows:
            yield (
                f"{name}: column {column!r} holds values far outside those of the training, in "
                f"{len(rows):,} of {len(x):,} rows: {x[rows[0], place].item():g} in row {rows[0]} "
                f"(counted from 0) is more than {FAR:g} deviations from the mean; see whether the "
                "value and its unit are right"
            )
