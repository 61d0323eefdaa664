"""Warnings about the parts that examples are divided into: what is tested on should be new."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.federation import Federation
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.values import tensors_of
from fedkeel.errors import counted

MAX_NUMBERS, MAX_EXAMPLES = 20_000_000, 100_000
"""Size up to which the training set is compared with others; this takes 0.25 s."""

SHARED = 0.1
"""Share of the test examples that are training examples too, from which there is a warning."""

WINDOWS, OVERLAPPING = 500, 0.05
"""Windows of a part that are looked for among those trained on, and the share of them that has
to overlap with one of these for a warning."""

MOST_SEARCHED = 5_000_000
"""Numbers of the training set in which windows are looked for; this takes 0.5 s."""

_BASE = 0x9E3779B97F4A7C15
"""Odd number whose powers make a stretch of values one number of 64 bits."""


def split_warnings(federation: Federation, test: Dataset) -> Iterator[str]:
    """Yield warnings about test and held-out examples that are not new, or are missing."""
    yield _test_examples_in_training(federation, test)
    yield _groups_in_both(federation, test)
    yield _overlapping_windows(federation, test)
    yield _nothing_held_out(federation)


def is_from_catalogue(data: Dataset) -> bool:
    """Return whether all of the data come from the catalogue."""
    return all(source in SOURCES for source in data.sources)


def _test_examples_in_training(federation: Federation, test: Dataset) -> str:
    """Return a warning where test examples are trained on, number for number."""
    data = federation.data
    numbers = (sum(t.numel() for t in tensors_of(part.x)) for part in (data, test))
    is_large = max(numbers) > MAX_NUMBERS or max(len(data), len(test)) > MAX_EXAMPLES
    types = ([t.dtype for t in tensors_of(part.x)] for part in (data, test))
    if (
        is_large
        or is_from_catalogue(data)
        or data.shape != test.shape
        or next(types) != next(types)
    ):
        return ""
    trained = set(_example_digests(data, federation.rows))
    count = sum(row in trained for row in _example_digests(test, np.arange(len(test))))
    if count >= SHARED * len(test) and count:
        return (
            f"{count:,} of {counted(len(test), 'test example')} are among those that are trained "
            "on, number for number: accuracy on them says little about new ones"
        )
    held = federation.holdout_rows
    if held is None or not len(held):
        return ""
    count = sum(row in trained for row in _example_digests(data, held))
    if count < SHARED * len(held) or not count:
        return ""
    return (
        f"{count:,} of {counted(len(held), 'held-out example')} are among those that are trained "
        "on, number for number: accuracy on them says little about new ones"
    )


def _example_digests(data: Dataset, rows: Ints) -> Iterator[int]:
    """Yield a digest of each of some examples with its target."""
    tensors = (*tensors_of(data.x), *tensors_of(data.y))
    arrays = [t.numpy() for t in tensors]
    for row in rows.tolist():
        yield hash(tuple(array[row].tobytes() for array in arrays))


def _groups_in_both(federation: Federation, test: Dataset) -> str:
    """Return a warning where groups that are to stay whole are trained on and tested on."""
    group, of_test = federation.data.group, test.group
    if group is None or of_test is None:
        return ""
    tested = np.unique(of_test[of_test >= 0])
    count = int(np.isin(tested, group[federation.rows]).sum())
    if not count:
        return ""
    return (
        f"{count:,} of {len(tested):,} values of {test.grouped_by!r} in the test data are trained "
        "on, too: the score says little about new ones. Divide the data anew, so that each is on "
        "one side; without test data fedkeel does so"
    )


def _overlapping_windows(federation: Federation, test: Dataset) -> str:
    """Return a warning where windows of one series are trained on and tested on."""
    data = federation.data
    if is_from_catalogue(data):
        return ""
    parts = [("test examples", test.x, np.arange(len(test)))]
    if federation.holdout_rows is not None:
        parts.append(("held-out examples", data.x, federation.holdout_rows))
    for what, values, rows in parts:
        pairs = zip(tensors_of(data.x), tensors_of(values), strict=False)
        for trained, other in pairs:
            if not len(rows) or trained.shape[1:] != other.shape[1:]:
                continue
            few = _spread(rows, WINDOWS)
            share = _share_of_overlapping(trained, federation.rows, other[torch.from_numpy(few)])
            if share >= OVERLAPPING:
                return (
                    f"at least {100 * share:.0f} % of the {what} overlap with one that is trained "
                    "on, as windows of one series do: they are not new, so the score is too good. "
                    "Keep all windows of a series, a patient or a day on one side: "
                    "partition.holdout_by"
                )
    return ""


def _share_of_overlapping(trained: Tensor, rows: Ints, windows: Tensor) -> float:
    """Return the share of windows of which a stretch is elsewhere in one that is trained on.

    A stretch is the first or the last quarter of a window, if it has enough different values not
    to be alike by chance.

    Args:
        trained: [N, T] or [N, A, B] examples.
        rows: those that are trained on.
        windows: [M, ...] others.
    """
    rows = _spread(rows, max(1, MOST_SEARCHED // max(1, trained[0].numel())))
    largest = 0.0
    for first, second in zip(_series(trained, rows), _series(windows), strict=True):
        length = first.shape[1]
        width = min(max(length // 4, 4 if windows.is_floating_point() else 16), 32)
        if 2 * width > length:
            continue
        ends = np.concatenate([second[:, :width], second[:, -width:]])
        telling = _is_telling(ends, second, first.size)
        wanted = _digests(ends, width)[:, 0]
        place = np.repeat([0, length - width], len(second))
        found = np.zeros(len(ends), dtype=bool)
        step = max(1, 1_000_000 // length)
        for start in range(0, len(first), step):
            found |= _occur(wanted, place, _digests(first[start : start + step], width))
        hits = (found & telling).reshape(2, -1).any(axis=0)
        if hits.sum() >= 3:
            largest = max(largest, float(hits.mean()))
    return largest


def _is_telling(
    stretches: NDArray[np.uint64], windows: NDArray[np.uint64], numbers: int
) -> NDArray[np.bool_]:
    """Return which stretches are hardly twice among so many numbers by chance.

    By chance is as if each value was drawn by itself, as often as it is in the windows. A stretch
    of few different values, such as of zeros, is not taken.
    """
    values, counts = np.unique(windows, return_counts=True)
    log_share = np.log(counts / counts.sum())
    by_chance = log_share[np.searchsorted(values, stretches)].sum(axis=1) + np.log(numbers)
    distinct = (np.diff(np.sort(stretches, axis=1), axis=1) != 0).sum(axis=1) + 1
    is_varied = distinct >= max(4, stretches.shape[1] // 2)
    is_telling: NDArray[np.bool_] = (by_chance < np.log(1e-3)) & is_varied
    return is_telling


def _series(values: Tensor, rows: Ints | None = None) -> Iterator[NDArray[np.uint64]]:
    """Yield [n, T] the bits of the series in examples, along each axis that may be time.

    Of several series in an example it is the middle one.
    """
    few = values if rows is None else values[torch.from_numpy(rows)]
    if few.ndim not in (2, 3):
        return
    array = few.numpy()
    kind = {4: np.uint32, 8: np.uint64}.get(array.itemsize)
    if kind is None:
        return
    if array.ndim == 2:
        yield np.ascontiguousarray(array).view(kind).astype(np.uint64)
        return
    for part in (array[:, array.shape[1] // 2], array[:, :, array.shape[2] // 2]):
        yield np.ascontiguousarray(part).view(kind).astype(np.uint64)


def _digests(series: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Return [n, T - width + 1] a number of each stretch of so many values; equal ones have one.

    It is sum_i b_i R^i modulo 2^64 from the sums of all values before, divided by R^j.
    """
    length = series.shape[1]
    powers = np.array([pow(_BASE, i, 2**64) for i in range(length)], dtype=np.uint64)
    inverse = pow(_BASE, -1, 2**64)
    back = np.array([pow(inverse, j, 2**64) for j in range(length - width + 1)], dtype=np.uint64)
    sums = np.zeros((len(series), length + 1), dtype=np.uint64)
    np.cumsum(series * powers, axis=1, out=sums[:, 1:])
    digests: NDArray[np.uint64] = (sums[:, width:] - sums[:, :-width]) * back
    return digests


def _occur(wanted: NDArray[np.uint64], place: Ints, among: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which of a few numbers occur in another column than their own place.

    Args:
        wanted: [M] the numbers.
        place: [M] their places.
        among: [N, P] the columns.
    """
    table = np.zeros(2**16, dtype=bool)
    table[wanted.astype(np.uint16)] = True
    at = np.flatnonzero(table[among.astype(np.uint16)])
    values, column = among.ravel()[at], at % among.shape[1]
    found = np.zeros(len(wanted), dtype=bool)
    for of in np.unique(place):
        found |= (place == of) & np.isin(wanted, values[column != of])
    return found


def _spread(rows: Ints, most: int) -> Ints:
    """Return at most so many of some rows, in stretches that are spread over all of them."""
    if len(rows) <= most:
        return rows
    return rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def _nothing_held_out(federation: Federation) -> str:
    """Return a warning where clients hold nothing out because they are small, or have one group."""
    if federation.holdout_rows is None or federation.holdout_offsets is None:
        return ""
    if not len(federation.holdout_rows):
        return (
            "no client has enough examples to hold any out (holdout), so none is evaluated on its "
            "own"
        )
    data = federation.data
    without = np.flatnonzero(np.diff(federation.holdout_offsets) == 0)
    if data.group is None or not len(without):
        return ""
    names = [repr(federation.names[k]) if federation.names else str(k) for k in without[:3]]
    more = "" if len(without) <= 3 else f" and {len(without) - 3} more"
    return (
        f"{len(without)} of {counted(len(federation), 'client')} hold nothing out "
        f"({', '.join(names)}{more}): all examples of one {data.grouped_by!r} stay together, and "
        "they have only one, or need all of theirs to train on. They are not evaluated on their own"
    )
