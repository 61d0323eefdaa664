"""Examples as a file has them, before they are resized, normalised and joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.base.values import only_tensor
from fedkeel.data.dataset import Dataset, Ints, MissingTargets, dataset
from fedkeel.data.hold_out import share_of_groups
from fedkeel.data.read.identifiers import Encoded, check_no_quantity, encode_as
from fedkeel.data.user_arrays import as_targets
from fedkeel.errors import DataError, did_you_mean, nearest


@dataclass(frozen=True)
class RawExamples:
    """Examples of one file, or of one half of a known set. N examples, Y classes.

    Args:
        x: [N, ...] inputs; four axes are images [N, C, H, W], and uint8 images have values 0..255.
        y: [N] labels 0..Y-1; or quantities, [N] or [N, D] floating point.
        label_names: Y names, in the order of the labels; empty for quantities.
        columns: names of the columns of a table, empty for anything else.
        clients: names of the clients that the data gives, empty where it gives none.
        client: [N] index into `clients`, or None.
        group_names: names of the groups that are held out as wholes, empty where there are none.
        group: [N] index into `group_names`, or None.
        dropped: names of the columns of a table that were left out.
        categories: of each column of a table that holds categories, the names of these; the inputs
            in that column are numbers of categories. NaN is a missing value.
    """

    x: Tensor
    y: NDArray[Any]
    label_names: tuple[str, ...]
    columns: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    client: Ints | None = None
    group_names: tuple[str, ...] = ()
    group: Ints | None = None
    dropped: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input, without the leading N."""
        return tuple(self.x.shape[1:])

    @property
    def strata(self) -> Ints:
        """[N] labels, by which a test part is drawn; all the same where there are none."""
        return self.y if self.label_names else np.zeros(len(self), dtype=np.int64)

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images [N, C, H, W]."""
        return self.x.ndim == 4

    def with_columns(self, columns: tuple[str, ...]) -> RawExamples:
        """Return the examples with these columns of a table; those it does not have are NaN."""
        if columns == self.columns:
            return self
        x = self.x.new_full((len(self), len(columns)), torch.nan)
        place = {name: index for index, name in enumerate(self.columns)}
        for index, name in enumerate(columns):
            if name in place:
                x[:, index] = self.x[:, place[name]]
        return replace(self, x=x, columns=columns)

    def take(self, rows: Ints) -> RawExamples:
        """Return the examples of the given rows."""
        return replace(
            self,
            x=self.x[torch.from_numpy(rows)],
            y=self.y[rows],
            client=None if self.client is None else self.client[rows],
            group=None if self.group is None else self.group[rows],
        )


def of_file(
    path: Path | str,
    x: Tensor,
    labels: Encoded | NDArray[Any],
    clients: Encoded | None,
    train: RawExamples | None,
    columns: tuple[str, ...] = (),
    dropped: tuple[str, ...] = (),
    groups: Encoded | None = None,
    missing_targets: MissingTargets = "refuse",
) -> RawExamples:
    """Return the examples of a user's file; refuse what cannot be trained on with its row.

    Args:
        path: the file.
        x: [N, ...] inputs.
        labels: of each example, with numbers of their own; or quantities.
        clients: of each example, None where the file has none.
        train: the training data, where these are test data.
        columns: names of the columns of a table.
        dropped: names of its columns that were left out.
        groups: of each example, None where the file has none.
        missing_targets: as `fedkeel.config.Data` has it.

    Raises:
        DataError: an input is not finite, or a label of the test data is unknown.
    """
    names: tuple[str, ...] = ()
    if isinstance(labels, np.ndarray):
        y = labels
        as_targets(y, str(path), 0, missing_targets == "leave_out")
    elif train is None:
        y, names = labels
        check_no_quantity(path, labels)
    else:
        y, names = encode_as(labels, train.label_names, str(path)), train.label_names
    # bytes may be images, which are made numbers later; the columns of a table have been checked
    if x.dtype != torch.uint8 and not columns:
        data = dataset(x, y, classes=len(names), name=str(path), missing_targets=missing_targets)
        x = only_tensor(data.x, "a file")
    client, client_names = (None, ()) if clients is None else clients
    group, group_names = (None, ()) if groups is None else groups
    return RawExamples(x, y, names, columns, client_names, client, group_names, group, dropped)


def as_floats(x: NDArray[Any]) -> NDArray[Any]:
    """Return numbers as float32 where that holds every number of their type, else as float64."""
    return x.astype(float_type([x.dtype]), copy=False)


def float_type(types: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return float32 where it holds every number of the given types, else float64."""
    fits = all(np.result_type(np.float32, dtype) == np.float32 for dtype in set(types))
    return np.dtype(np.float32 if fits else np.float64)


def missing(
    path: Path | str, what: str, name: str, present: Sequence[str], setting: str = ""
) -> DataError:
    """Return the error of a file without the column or array that a setting names."""
    hint = f"; set {setting} to the one that is meant" if setting else ""
    return DataError(f"{path} has no {what} {name!r}.", do=f"{did_you_mean(name, present)}{hint}")


def lacks_columns(name: str, absent: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return that a table lacks columns, and which of its other columns may be meant.

    Args:
        name: what to call the table.
        absent: names of the columns that it lacks.
        others: names of its columns that stand for nothing else.

    >>> lacks_columns("new.csv", ["age"], ["id", "Age"])
    "new.csv has no column 'age' (did you mean 'Age'?)"
    >>> lacks_columns("new.csv", ["age", "dose", "sex"], ["Sex", " dose"])[44:]
    "(did you mean ' dose' for 'dose', 'Sex' for 'sex'?)"
    """
    more = f" and {len(absent) - 20:,} more" if len(absent) > 20 else ""
    noun = "column" if len(absent) == 1 else "columns"
    close = {key: near for key in absent[:20] if (near := nearest(key, others, 0.7)) is not None}
    meant = [repr(near) + f" for {key!r}" * (len(absent) > 1) for key, near in close.items()]
    hint = f" (did you mean {', '.join(meant)}?)" if meant else ""
    return f"{name} has no {noun} {', '.join(map(repr, absent[:20]))}{more}{hint}"


def without_columns(name: str, absent: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return the warning of a table that lacks columns which may be missing; see `lacks_columns`.

    >>> without_columns("new.csv", ["age", "dose"])
    "new.csv has no columns 'age', 'dose': their values are taken for missing ones"
    """
    whose = "its" if len(absent) == 1 else "their"
    return f"{lacks_columns(name, absent, others)}: {whose} values are taken for missing ones"


def train_and_test_rows(
    data: RawExamples | Dataset, fraction: float, random: np.random.Generator
) -> tuple[Ints, Ints]:
    """Return the rows that are trained on and those that are set aside for testing, ascending.

    Each class has about the same share in both; where there are groups, these stay whole.

    Args:
        data: the examples.
        fraction: share that is set aside, in (0, 1).
        random: where the draw comes from.
    """
    if isinstance(data, RawExamples):
        strata = data.strata
    else:
        strata = data.labels if data.has_labels else np.zeros(len(data), dtype=np.int64)
    if data.group is None:
        return stratified_split(strata, fraction, random)
    is_test = share_of_groups(strata, fraction, random, data.group)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def stratified_split(y: Ints, fraction: float, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw a test set that has each class in about the same share as all examples.

    Of n examples, round(fraction * n) are set aside. Each class gives floor(fraction * n_c), and
    the classes with the largest remainders one more; every class keeps at least one example to
    train on.

    Args:
        y: [N] labels.
        fraction: share of the examples that are set aside, in (0, 1).
        rng: where the draw comes from.

    Returns:
        Row numbers of the training set and of the test set, ascending; the test set is empty where
        there are too few examples.
    """
    _, index, counts = np.unique(y, return_inverse=True, return_counts=True)
    ideal = fraction * counts
    quota = np.floor(ideal).astype(np.int64)  # below the count, as the fraction is below 1
    can_give_more = np.flatnonzero(quota < counts - 1)
    missing = round(fraction * len(y)) - int(quota.sum())
    remainder = ideal[can_give_more] - quota[can_give_more]
    order = can_give_more[np.argsort(-remainder, kind="stable")]
    quota[order[: max(missing, 0)]] += 1
    test = np.zeros(len(y), dtype=bool)
    for label, count in enumerate(quota):
        rows = np.flatnonzero(index == label)
        test[rng.permutation(rows)[:count]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)
