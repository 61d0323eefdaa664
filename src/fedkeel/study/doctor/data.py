"""What the doctor measures only of the data: labels, sizes and inputs by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.base.values import tensors_of
from fedkeel.data.federation import Federation
from fedkeel.data.read.scaling import Moments
from fedkeel.study.doctor.heterogeneity import (
    MomentSkew,
    label_skew,
    moment_skew,
    size_skew,
    tell_clients_apart,
)
from fedkeel.study.doctor.measurements import Measurements

MOST_TOKENS = 10_000
"""Most distinct tokens that are counted as columns."""


def measure_data(federation: Federation, seed: int) -> Measurements:
    """Return what the data say by themselves; the numbers of a pilot are empty."""
    data, sizes = federation.data, federation.sizes
    filled = np.flatnonzero(sizes)
    rows = [federation.client(int(k)) for k in filled]
    histogram = histogram_of(federation)
    targets = _columns(data.y) if not data.has_labels and not histogram.size else None
    inputs = _columns(data.x)
    skew = _skew(inputs, rows)
    apart, constant = _by_name(federation, filled, skew)
    labels = data.labels[federation.rows] if data.has_labels else None
    return Measurements(
        clients=len(federation),
        per_round=len(federation),
        sizes=size_skew(sizes),
        lr=1.0,
        scores_by_lr={1.0: None},
        has_labels=data.has_labels,
        labels=label_skew(histogram) if histogram.size else None,
        targets=_skew(targets, rows),
        inputs=skew,
        columns_apart=apart,
        constant=constant,
        separability=None
        if inputs is None
        else tell_clients_apart(
            inputs[torch.from_numpy(federation.rows)].numpy(),
            federation.client_of_row(),
            labels,
            seed,
        ),
    )


def _skew(columns: Tensor | None, rows: list[NDArray[np.int64]]) -> MomentSkew | None:
    if columns is None:
        return None
    moments = [Moments.of(columns[torch.from_numpy(of_client)]) for of_client in rows]
    return moment_skew(moments, [len(of_client) for of_client in rows])


def _by_name(
    federation: Federation, filled: NDArray[np.intp], skew: MomentSkew | None
) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, str], ...]]:
    """Return the columns in which clients differ most, and those that do not vary at a client.

    Args:
        federation: the clients.
        filled: numbers of the clients that have examples.
        skew: how their mean inputs differ.
    """
    data = federation.data
    if skew is None or not data.columns or len(data.columns) != len(skew.of_columns):
        return (), ()
    known = () if data.schema is None else data.schema.columns
    of_numbers = {column.name for column in known if column.categories is None}
    names = federation.names or range(len(federation))
    constant = [
        (name, str(names[int(filled[place])]))
        for place, column in skew.constant
        if (name := data.columns[column]) in of_numbers or not known
    ]
    return skew.most_apart(data.columns), tuple(constant)


def histogram_of(federation: Federation) -> NDArray[np.int64]:
    """Return [C, Y] labels, or target tokens, by client; [C, 0] where targets are quantities."""
    if federation.data.has_labels:
        return federation.histogram()
    y = federation.data.y
    if not isinstance(y, Tensor) or y.is_floating_point() or int(y.max()) >= MOST_TOKENS:
        return np.zeros((len(federation), 0), dtype=np.int64)
    tokens = y.numpy()
    width = int(tokens.max()) + 1
    clients = range(len(federation))
    return np.stack(
        [np.bincount(tokens[federation.client(k)].ravel(), minlength=width) for k in clients]
    )


def _columns(values: Any) -> Tensor | None:  # noqa: ANN401 - a tensor, or several by name
    """Return [N, F] float64: the numbers of each example, of tokens the share of each."""
    columns = []
    for tensor in tensors_of(values):
        flat = tensor.reshape(len(tensor), -1)
        if flat.is_floating_point():
            columns.append(flat.double())
        elif int(flat.max()) < MOST_TOKENS:
            counts = torch.zeros(len(flat), int(flat.max()) + 1, dtype=torch.float64)
            ones = torch.ones(flat.shape, dtype=torch.float64)
            columns.append(counts.scatter_add_(1, flat, ones) / flat.shape[1])
    return torch.cat(columns, dim=1) if columns else None
