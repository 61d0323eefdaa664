"""Warnings about the parts that examples are divided into: what is tested on should be new."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.base.values import tensors_of
from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.federation import Federation
from fedkeel.data.read.catalogue import SOURCES
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

_CHUNK = 200_000
"""Numbers that are searched at a time, so few that they stay in the processor's cache."""

_UNSIGNED = {4: np.uint32, 8: np.uint64}
"""Type of the bits of a number by its bytes."""

_BASE = 0x9E3779B97F4A7C15
"""Odd number whose powers make a stretch of values one number of 64 bits."""


def split_warnings(federation: Federation, test: Dataset) -> Iterator[str]:
    """Yield warnings about test and held-out examples that are not new, or are missing."""
    yield _tested_examples_in_training(federation, test)
    yield _groups_in_both(federation, test)
    yield _overlapping_windows(federation, test)
    yield _nothing_held_out(federation)


def is_from_catalogue(data: Dataset) -> bool:
    """Return whether all of the data come from the catalogue."""
    return all(source in SOURCES for source in data.sources)


def _tested_parts(federation: Federation, test: Dataset) -> Iterator[tuple[str, Dataset, Ints]]:
    """Yield the name of an example, the data and the rows of each part that is not trained on."""
    yield "test example", test, np.arange(len(test))
    if federation.holdout_rows is not None:
        yield "held-out example", federation.data, federation.holdout_rows


def _tested_examples_in_training(federation: Federation, test: Dataset) -> str:
    """Return a warning where test or held-out examples are trained on, number for number."""
    data = federation.data
    numbers = (sum(t.numel() for t in tensors_of(part.x)) for part in (data, test))
    is_large = max(numbers) > MAX_NUMBERS or max(len(data), len(test)) > MAX_EXAMPLES
    if is_large or is_from_catalogue(data):
        return ""
    trained: set[int] = set()
    for name, part, rows in _tested_parts(federation, test):
        if not len(rows) or part.shape != data.shape or _types(part) != _types(data):
            continue
        trained = trained or set(_example_digests(data, federation.rows))
        count = sum(digest in trained for digest in _example_digests(part, rows))
        if count >= SHARED * len(rows):
            return (
                f"{count:,} of {counted(len(rows), name)} are among those that are trained on, "
                "number for number: accuracy on them says little about new ones"
            )
    return ""


def _types(data: Dataset) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_of(data.x)]


def _example_digests(data: Dataset, rows: Ints) -> Iterator[int]:
    """Yield a digest of each of some examples with its target."""
    arrays = [t.reshape(len(data), -1).numpy() for t in (*tensors_of(data.x), *tensors_of(data.y))]
    for start in range(0, len(rows), 1000):
        chunk = rows[start : start + 1000]
        columns = [np.ascontiguousarray(array[chunk]).view(np.uint8) for array in arrays]
        examples = np.concatenate(columns, axis=1)
        yield from map(hash, examples.view(f"V{examples.shape[1]}").ravel().tolist())


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
    for name, part, rows in _tested_parts(federation, test):
        for trained, tested in zip(tensors_of(data.x), tensors_of(part.x), strict=False):
            if not len(rows) or trained.shape[1:] != tested.shape[1:]:
                continue
            windows = tested[torch.from_numpy(_spread(rows, WINDOWS))]
            share = _share_of_overlapping(trained, federation.rows, windows)
            if share >= OVERLAPPING:
                return (
                    f"at least {100 * share:.0f} % of the {name}s overlap with one that is trained "
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
    if trained.ndim not in (2, 3) or trained.element_size() not in _UNSIGNED:
        return 0.0
    rows = _spread(rows, max(1, MOST_SEARCHED // trained[0].numel()))
    largest = 0.0
    for axis in range(1, trained.ndim):
        tested = _series(windows, axis)
        length = tested.shape[1]
        width = min(max(length // 4, 4 if windows.is_floating_point() else 16), 32)
        if 2 * width > length:
            continue
        ends = np.concatenate([tested[:, :width], tested[:, -width:]])
        wanted = _digests(ends, width)[:, 0]
        place = np.repeat([0, length - width], len(tested))
        occurs = np.zeros(len(ends), dtype=bool)
        step = max(1, _CHUNK // trained[0].numel())
        for start in range(0, len(rows), step):
            searched = _series(trained[torch.from_numpy(rows[start : start + step])], axis)
            occurs |= _occur(wanted, place, _digests(searched, width))
        telling = _is_telling(ends, tested, len(rows) * length)
        hits = (occurs & telling).reshape(2, -1).any(axis=0)
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


def _series(examples: Tensor, axis: int) -> NDArray[np.uint64]:
    """Return [n, T] the bits of the series in examples along an axis, the middle one of several.

    The upper half of 64 bits goes into the lower half: whole numbers in float64 differ in their
    upper bits only, and a sum modulo 2^64 of multiples of them would forget most of these.
    """
    if examples.ndim == 3:
        other = 3 - axis
        examples = examples.select(other, examples.shape[other] // 2)
    array = np.ascontiguousarray(examples.numpy())
    bits = array.view(_UNSIGNED[array.itemsize]).astype(np.uint64)
    return bits ^ (bits >> np.uint64(32))


def _digests(series: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Return [n, T - width + 1] a number of each stretch of so many values; equal ones have one.

    It is sum_i b_i R^i modulo 2^64 from the sums of all values before, divided by R^j.
    """
    length = series.shape[1]
    powers = np.cumprod(np.full(length, _BASE, dtype=np.uint64), dtype=np.uint64)
    inverses = np.full(length - width + 1, pow(_BASE, -1, 2**64), dtype=np.uint64)
    back = np.cumprod(inverses, dtype=np.uint64)
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
    occurs = np.zeros(len(wanted), dtype=bool)
    for excluded in np.unique(place):
        occurs |= (place == excluded) & np.isin(wanted, values[column != excluded])
    return occurs


def _spread(rows: Ints, most: int) -> Ints:
    """Return at most so many of some rows, evenly spread over all of them."""
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
