"""Joining several sources: their names, columns, labels, shapes and clients."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedkeel.data.dataset import Dataset, Ints, dataset
from fedkeel.data.read.identifiers import check_written_alike, in_order
from fedkeel.data.read.images import shape_text
from fedkeel.data.read.raw_examples import RawExamples, without_columns
from fedkeel.errors import DataError, nearest


@dataclass(frozen=True)
class Source:
    """One source.

    Args:
        name: what its clients and messages are called by.
        is_known: whether it is a known set.
        train: its training half.
        test: its test half.
        warnings: what a user should know about it.
    """

    name: str
    is_known: bool
    train: RawExamples
    test: RawExamples
    warnings: tuple[str, ...] = ()

    @property
    def halves(self) -> tuple[RawExamples, RawExamples]:
        """Training and test half."""
        return self.train, self.test


def with_distinct_names(sources: list[Source], texts: Sequence[str]) -> list[Source]:
    """Name sources as the settings do where their short names would be the same."""
    if len({source.name for source in sources}) == len(sources):
        return sources
    return [replace(source, name=text) for source, text in zip(sources, texts, strict=True)]


def with_same_columns(sources: Sequence[Source], may_have_gaps: bool) -> list[Source]:
    """Return tables with the same columns, in the order of the first.

    Args:
        sources: the sources.
        may_have_gaps: whether one may lack columns that another has; they are NaN there.

    Raises:
        DataError: one has other columns and may not, or they are tables and images.
    """
    first = sources[0]
    columns = first.train.columns
    for source in sources[1:]:
        odd = sorted(set(columns) ^ set(source.train.columns))
        both = columns and source.train.columns
        if odd and not (may_have_gaps and both):
            has = first if odd[0] in columns else source
            raise DataError(
                f"{first.name} and {source.name} cannot be joined: their columns differ.",
                got=f"{odd[0]!r} in {has.name} only",
                expected="the same columns, in any order",
                do=f"leave out what some lack: data.drop = {json.dumps(odd[:8])}; or count it "
                'there as missing values: missing = "mean" in [data]'
                if both
                else None,
            )
    everywhere = dict.fromkeys(name for source in sources for name in source.train.columns)
    columns = tuple(everywhere)
    shared = {c for c in columns if all(c in source.train.columns for source in sources)}
    return [
        replace(
            source,
            train=source.train.with_columns(columns),
            test=source.test.with_columns(columns),
            warnings=(*source.warnings, *_missing_columns(source, columns, shared)),
        )
        for source in sources
    ]


def _missing_columns(
    source: Source, columns: tuple[str, ...], shared: Collection[str]
) -> list[str]:
    """Return a warning for each half of a source that lacks columns which others have.

    Args:
        source: the source.
        columns: those of all sources.
        shared: those that every source has.
    """
    halves = (
        {"": source.train}
        if source.train.columns == source.test.columns
        else {
            "the training data of ": source.train,
            "the test data of ": source.test,
        }
    )
    warnings = []
    for of, half in halves.items():
        present = set(half.columns)
        names = [name for name in columns if name not in present]
        if names:
            own = [name for name in half.columns if name not in shared]
            warnings.append(without_columns(f"{of}{source.name}", names, own))
    return warnings


def with_same_categories(
    sources: Sequence[Source], known: Mapping[str, tuple[str, ...]], may_have_gaps: bool
) -> tuple[list[Source], dict[str, tuple[str, ...]]]:
    """Give all tables the same numbers for the same categories.

    Args:
        sources: tables with the same columns.
        known: names of the categories of a column; where they are empty, those of all training
            data are taken.
        may_have_gaps: whether a category that is not known is a missing value.

    Returns:
        The sources, and the names of the categories of each column of them.

    Raises:
        DataError: a category is not known, and a value may not be missing; or two files write one
            number in two ways.
    """
    names: dict[str, tuple[str, ...]] = {}
    for column in known:
        pairs = [(source.name, source.train.categories.get(column, ())) for source in sources]
        for name, categories in pairs[1:]:
            check_written_alike(*pairs[0], name, categories)
        union = set().union(*(categories for _, categories in pairs))
        names[column] = known[column] or in_order(union)
    numbered = []
    for source in sources:
        warnings = list(source.warnings)
        halves = [
            with_categories(half, names, f"{source.name} ({of})", may_have_gaps, warnings)
            for half, of in zip(source.halves, ("training", "test"), strict=True)
        ]
        train, test = halves
        numbered.append(replace(source, train=train, test=test, warnings=tuple(warnings)))
    return numbered, names


def with_categories(
    raw: RawExamples,
    names: Mapping[str, tuple[str, ...]],
    where: str,
    may_have_gaps: bool,
    warnings: list[str],
    is_for_model: bool = False,
) -> RawExamples:
    """Return examples with their categories numbered by known names; note what is not known.

    Args:
        raw: the examples.
        names: of each column of categories, the known ones.
        where: what to call the examples in messages.
        may_have_gaps: whether what is not known is taken for a missing value.
        warnings: where it is noted.
        is_for_model: whether a trained model is to answer them, whose settings stay as they are.

    Raises:
        DataError: a category is not known, and values may not be missing.
    """
    x = raw.x
    for column, categories in raw.categories.items():
        place, known = raw.columns.index(column), names[column]
        numbers = [known.index(name) if name in known else math.nan for name in categories]
        old = raw.x[:, place]
        new = torch.tensor([*numbers, math.nan], dtype=x.dtype)[
            old.nan_to_num(len(categories)).to(torch.int64)
        ]
        x = x.clone() if x is raw.x else x
        x[:, place] = new
        unknown = old[new.isnan() & ~old.isnan()].to(torch.int64)
        if not len(unknown):
            continue
        odd = [categories[number] for number in dict.fromkeys(unknown.tolist())]
        more = ", ..." if len(odd) > 3 else ""
        rows = f"in {len(unknown):,} of {len(raw):,} rows"
        example = f"{', '.join(map(repr, odd[:3]))}{more}, {rows}"
        close = dict.fromkeys(near for name in odd[:3] if (near := nearest(name, known, 0.7)))
        meant = f"did you mean {', '.join(map(repr, close))}?" if close else ""
        if not may_have_gaps:
            remedy = (
                "write the categories as in the training, or leave these rows out"
                if is_for_model
                else 'set missing = "mean" or "indicator" in [data], which takes it for a missing '
                "value; or name it in data.categories"
            )
            raise DataError(
                f"{where}: column {column!r} holds a category that is not known.",
                got=example,
                expected=f"one of {', '.join(map(repr, known[:8]))}",
                why="the training data say which there are, or data.categories where it names them",
                do=f"{meant} {remedy}".lstrip(),
            )
        warnings.append(
            f"{where}: column {column!r} holds a category that is not known ({example}): it is "
            "taken for a missing value" + f"; {meant}" * bool(meant)
        )
    return replace(raw, x=x, categories=names)


def with_same_labels(sources: list[Source]) -> list[Source]:
    """Give all sources the same numbers for the same classes.

    Users' files are numbered by what they hold, so that two of them may number a class
    differently: labels are numbered anew, by all names. Known sets keep their numbers.
    """
    names = [source.train.label_names for source in sources]
    for source in sources[1:]:
        first = sources[0]
        check_written_alike(
            first.name, first.train.label_names, source.name, source.train.label_names
        )
    if all(source.is_known for source in sources) or len(set(names)) == 1:
        return sources
    longest = max(names, key=len)
    union = set().union(*names)
    order = longest if union <= set(longest) else in_order(union)
    label_of = {name: label for label, name in enumerate(order)}

    def renumbered(raw: RawExamples) -> RawExamples:
        table = np.array([label_of[name] for name in raw.label_names], dtype=np.int64)
        return replace(raw, y=table[raw.y], label_names=order)

    return [
        replace(source, train=renumbered(source.train), test=renumbered(source.test))
        for source in sources
    ]


def common_shape(sources: Sequence[Source], wanted: tuple[int, int, int] | None) -> tuple[int, ...]:
    """Return the shape of one input of the joined set."""
    shapes = [(source.name, half.shape) for source in sources for half in source.halves]
    name, shape = shapes[0]
    if wanted is not None:
        if min(wanted) < 1:
            raise DataError("data.shape has a side below 1.", got=list(wanted))
        for name, shape in shapes:
            if len(shape) != 3:
                raise DataError(
                    f"data.shape is for images, and {name} has none.",
                    got=f"inputs of shape {shape_text(shape)}",
                    do="drop data.shape",
                )
        return wanted
    for other_name, other in shapes:
        if other != shape:
            raise DataError(
                f"The inputs of {name} and {other_name} have different shapes."
                if other_name != name
                else f"The training and test inputs of {name} have different shapes.",
                got=f"{shape_text(shape)} and {shape_text(other)}",
                do="set data.shape to [channels, height, width] that all images are brought to",
            )
    return shape


@dataclass(frozen=True)
class Clients:
    """The names of the clients, and the client of each example."""

    names: tuple[str, ...]
    index: Ints


def number_clients(sources: Sequence[Source]) -> tuple[Clients, Clients]:
    """Return the clients of the training set and those of the test set.

    Clients of joined sources are called SOURCE/CLIENT, and a source without a client column is one
    client. The training set has only clients with examples in it; the test set has these, in the
    same order, and after them those that have only test examples.
    """
    halves: tuple[list[Ints], list[Ints]] = ([], [])
    number_of: dict[str, int] = {}  # every name, in order, and its number for now
    for source in sources:
        for half, raw in zip(halves, source.halves, strict=True):
            names, index = raw.clients, raw.client
            if index is None:
                names, index = (source.name,), np.zeros(len(raw), np.int64)
            elif len(sources) > 1:
                names = tuple(f"{source.name}/{name}" for name in names)
            numbers = [number_of.setdefault(name, len(number_of)) for name in names]
            half.append(np.array(numbers)[index])
    train, test = (np.concatenate(half).astype(np.int64) for half in halves)
    in_train = np.unique(train)
    order = np.concatenate([in_train, np.setdiff1d(test, in_train)])  # ascending in each part
    final = np.zeros(len(number_of), dtype=np.int64)
    final[order] = np.arange(len(order))
    all_names = list(number_of)
    names = tuple(all_names[number] for number in order)
    return Clients(names[: len(in_train)], final[train]), Clients(names, final[test])


def number_groups(sources: Sequence[Source]) -> tuple[Ints, Ints | None]:
    """Return the groups of the training set and those of the test set.

    Each source has groups of its own. Test data that name no groups have none: None.
    """
    number_of: dict[tuple[str, str], int] = {}
    halves: tuple[list[Ints], list[Ints]] = ([], [])
    has_groups = [True, True]
    for source in sources:
        for place, raw in enumerate(source.halves):
            if raw.group is None:
                has_groups[place] = has_groups[place] and not len(raw)
                continue
            names = [(source.name, name) for name in raw.group_names]
            numbers = [number_of.setdefault(name, len(number_of)) for name in names]
            halves[place].append(np.array(numbers, dtype=np.int64)[raw.group])
    train, test = (np.concatenate([*half, np.zeros(0, np.int64)]) for half in halves)
    return train, test if has_groups[1] else None


def join_halves(
    sources: Sequence[Source],
    halves: Sequence[RawExamples],
    x: Tensor,
    clients: Clients | None,
    of: str,
) -> Dataset:
    """Make the dataset of one half of all sources."""
    label_names = [raw.label_names for raw in halves]
    is_single = len(halves) == 1
    lengths = [len(raw) for raw in halves]
    return dataset(
        x,
        halves[0].y if is_single else np.concatenate([raw.y for raw in halves]),
        classes=max(len(names) for names in label_names),
        name=f"{'+'.join(source.name for source in sources)} ({of})",
        sources=tuple(source.name for source in sources),
        source=None if is_single else np.repeat(np.arange(len(halves), dtype=np.int64), lengths),
        clients=() if clients is None else clients.names,
        client=None if clients is None else clients.index,
        label_names=label_names[0] if len(set(label_names)) == 1 else (),
        missing_targets="leave_out",  # what may not be missing was refused when it was read
    )
