"""Loading: from the settings of the data to a training set and a test set.

Each source is read as it is, cut to the limit, and written once into the memory of the joined
set, where it is resized and normalised in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedkeel.config import Data
from fedkeel.data.dataset import Dataset, Ints, dataset, narrowed
from fedkeel.data.read import folders, images, sources, tables
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.images import Scale
from fedkeel.data.read.raw_examples import Raw, stratified
from fedkeel.errors import DataError, did_you_mean
from fedkeel.rng import generator


@dataclass(frozen=True)
class _Pair:
    """One source: its name, whether it is a known set, and its two halves."""

    name: str
    known: bool
    train: Raw
    test: Raw


def load(settings: Data, seed: int = 0, cache: Path | None = None) -> tuple[Dataset, Dataset]:
    """Load the data that settings name.

    Args:
        settings: see `fedkeel.config.Data`. Where it names several sources they are joined: both
            halves say in `Dataset.source` what came from where.
        seed: draws the test set where a file of one's own has none. It is not the seed of a run:
            all runs of an experiment have one test set, as of ``digits``, and one draw of
            `settings.limit`. A client all of whose examples are drawn keeps them for training.
        cache: folder of downloads; see `fedkeel.data.read.sources.cache_folder`.

    Returns:
        The training set and the test set, float32. Images are [N, C, H, W].

    Raises:
        DataError: a source is not known or not here, cannot be read, or does not fit the others.
    """
    _possible(settings)
    pairs = [_limited(_pair(text, settings, seed, cache), settings) for text in settings.sources]
    pairs = _named_apart(pairs, settings.sources)
    pairs = _same_columns(pairs)
    check_augment(settings, all(pair.train.is_image for pair in pairs))
    pairs = _same_labels(pairs)
    train_x, test_x, scale = _inputs(pairs, settings)
    people = _people(pairs) if settings.client is not None else None
    train = _join([pair.train for pair in pairs], train_x, pairs, people and people[0], "training")
    test = _join([pair.test for pair in pairs], test_x, pairs, people and people[1], "test")
    told = None if scale is None else scale.plain()
    columns = pairs[0].train.columns
    return replace(train, columns=columns, scale=told), replace(test, columns=columns, scale=told)


def _possible(settings: Data) -> None:
    """Refuse settings that contradict each other."""
    if settings.source == "nodes":
        raise DataError(
            "data.source = 'nodes': the data are on the nodes of a federation, and not here.",
            do="fedkeel flower up EXPERIMENT.toml --data FILE --data FILE ..., or flower export",
        )
    own = [name for name in settings.sources if name not in SOURCES]
    named = [name for name in settings.drop if name in (settings.label, settings.client)]
    if named:
        raise DataError(
            f"data.drop leaves out {named[0]!r}, which data.label or data.client names.",
            do="take it out of one of them",
        )
    plain = [name for name in settings.sources if not name.lower().endswith(tables.TABLES)]
    if settings.drop and plain:
        raise DataError(
            f"data.drop is for columns of tables, and {plain[0]} is none.",
            got=f"data.drop = {list(settings.drop)}",
            expected=f"files that end in {' or '.join(tables.TABLES)}",
        )
    if not settings.sources:
        raise DataError("data.source names nothing.", do=did_you_mean("", SOURCES, limit=20))
    if settings.test is not None and len(own) != 1:
        raise DataError(
            "data.test goes with one path in data.source.",
            got=f"{len(own)} paths in {', '.join(settings.sources)}",
            do="drop data.test; known sets have test data, and data.test_fraction is for the rest",
        )


def _pair(text: str, settings: Data, seed: int, cache: Path | None) -> _Pair:
    """Read one source."""
    if text in SOURCES:
        return _Pair(text, True, *sources.read(text, settings.test_fraction, cache))
    path = Path(text).expanduser()
    _exists(path, text)
    name = path.resolve().name if path.is_dir() else path.stem
    train, test = _own(path, settings)
    if test is None:
        rows = stratified(train.y, settings.test_fraction, generator(seed, "data.test/own"))
        rows = rows if train.client is None else _none_lost(train.client, *rows)
        train, test = train.take(rows[0]), train.take(rows[1])
    return _Pair(name, False, train, test)


def _none_lost(client: Ints, kept: Ints, aside: Ints) -> tuple[Ints, Ints]:
    """Return what is kept for training and what is set aside, where every client has some to keep.

    Where nobody had two, all stays as it is: there would be nothing to test on.
    """
    lost = ~np.isin(client[aside], client[kept])
    if lost.all():
        return kept, aside
    return np.sort(np.concatenate([kept, aside[lost]])), aside[~lost]


def _exists(path: Path, text: str) -> None:
    """Refuse a path that cannot be read, by what is wrong with it."""
    if not path.exists():
        looks_like_path = "/" in text or "\\" in text or path.suffix in tables.SUFFIXES
        raise DataError(
            f"There is no file or folder {text!r}."
            if looks_like_path
            else f"{text!r} is neither a known data set nor a file or folder.",
            do=f"check the path (looked in {Path.cwd()})"
            if looks_like_path
            else f"{did_you_mean(text, SOURCES, limit=20)}; or check the path",
        )
    if path.is_dir():
        return
    if path.suffix.lower() not in tables.SUFFIXES:
        raise DataError(
            f"{text}: files of this kind are not read.",
            got=f"suffix {path.suffix!r}",
            expected=f"{', '.join(tables.SUFFIXES)}, or a folder with a folder for each class",
            do='write it with its labels, numpy.savez("data.npz", x=x, label=y)'
            if path.suffix.lower() == ".npy"
            else None,
        )
    if path.stat().st_size == 0:
        raise DataError(f"{text} is empty.", expected="a file with examples")


def _own(path: Path, settings: Data) -> tuple[Raw, Raw | None]:
    """Read a file or folder of one's own, and its test data where there are any."""
    given = None
    if settings.test is not None:
        given = Path(settings.test).expanduser()
        _exists(given, settings.test)
        if given.resolve() == path.resolve():
            raise DataError(
                "data.test is the file that is trained on.",
                got=settings.test,
                do="drop data.test, and data.test_fraction sets examples aside; or name another",
            )
        if path.is_dir() != given.is_dir() or (path.suffix == ".npz") != (given.suffix == ".npz"):
            raise DataError(
                "The test data are of another kind than the training data.",
                got=f"{path.name} and {given.name}",
                expected="two tables, two .npz files, or two folders",
            )
    if path.is_dir():
        first, second = folders.halves(path)
        train = folders.read(first, settings.shape)
        second = given or second
        if second is None:
            return train, None
        return train, folders.read(second, settings.shape, like=train.label_names)
    train = tables.read(path, settings)
    if given is None:
        return train, None
    return train, tables.read(given, settings, like=train)


def _limited(pair: _Pair, settings: Data) -> _Pair:
    """Return the source with at most `settings.limit` training examples, in their order."""
    if settings.limit is None or len(pair.train) <= settings.limit:
        return pair
    rng = generator(0, f"data.limit/{pair.name if pair.known else 'own'}")
    rows = np.sort(rng.choice(len(pair.train), settings.limit, replace=False)).astype(np.int64)
    return replace(pair, train=pair.train.take(rows))


def _named_apart(pairs: Sequence[_Pair], texts: Sequence[str]) -> list[_Pair]:
    """Name sources as they were written where short names would be the same."""
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if list(texts).count(text) > 1)
        raise DataError(f"data.source names {twice!r} twice.", expected="each source once")
    if len({pair.name for pair in pairs}) == len(pairs):
        return list(pairs)
    return [replace(pair, name=text) for pair, text in zip(pairs, texts, strict=True)]


def _same_columns(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Return tables with their columns in the order of the first.

    Raises:
        DataError: one has other columns, or they are tables and images.
    """
    first = pairs[0]
    for pair in pairs[1:]:
        odd = sorted(set(first.train.columns) ^ set(pair.train.columns))
        if odd:
            raise DataError(
                f"{first.name} and {pair.name} cannot be joined: their columns differ.",
                got=f"{odd[0]!r} in only one of them",
                expected="the same columns, in any order",
            )
    order = first.train.columns
    return [
        replace(pair, train=pair.train.ordered(order), test=pair.test.ordered(order))
        for pair in pairs
    ]


def _same_labels(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Give all sources the same numbers for the same classes.

    Files of one's own are numbered by what they hold, so that two of them may number a class
    differently: labels are numbered anew, by all names. Known sets keep their numbers.
    """
    names = [pair.train.label_names for pair in pairs]
    if all(pair.known for pair in pairs) or len(set(names)) == 1:
        return list(pairs)
    longest = max(names, key=len)
    union = set().union(*names)
    if union <= set(longest):
        order = longest
    elif all(name.lstrip("-").isdigit() for name in union):
        order = tuple(sorted(union, key=int))
    else:
        order = tuple(sorted(union))
    place = {name: label for label, name in enumerate(order)}

    def renumbered(raw: Raw) -> Raw:
        table = np.array([place[name] for name in raw.label_names], dtype=np.int64)
        return replace(raw, y=table[raw.y], label_names=order)

    return [
        replace(pair, train=renumbered(pair.train), test=renumbered(pair.test)) for pair in pairs
    ]


def _inputs(pairs: Sequence[_Pair], settings: Data) -> tuple[Tensor, Tensor, Scale | None]:
    """Return the inputs of both halves, resized, joined and normalised, and by what all were."""
    scale: Scale | None = None
    shape = _shape(pairs, settings.shape)
    wide = not pairs[0].train.is_image and any(
        half.x.dtype == torch.float64 for pair in pairs for half in (pair.train, pair.test)
    )
    work = torch.float64 if wide else torch.float32
    train = torch.empty((sum(len(pair.train) for pair in pairs), *shape), dtype=work)
    test = torch.empty((sum(len(pair.test) for pair in pairs), *shape), dtype=work)
    starts = (0, 0)
    for pair in pairs:
        ends = (starts[0] + len(pair.train), starts[1] + len(pair.test))
        halves = train[starts[0] : ends[0]], test[starts[1] : ends[1]]
        for out, raw in zip(halves, (pair.train, pair.test), strict=True):
            if raw.is_image:
                images.fill(out, raw.x, pair.name)
            else:
                out.copy_(raw.x)
        if settings.normalize == "source" and pair.known:
            own = _published(pair, shape) or images.measure(halves[0])
            for half in halves:
                own.apply_(half)
            scale = own if len(pairs) == 1 else None
        starts = ends
    scale = images.normalise(train, test, settings.normalize) or scale
    names = pairs[0].train.columns
    return _single(train, names), _single(test, names), scale


def check_augment(settings: Data, images: bool) -> None:
    """Refuse to augment what is no image.

    Raises:
        DataError: it is to be augmented.
    """
    if settings.augment != "none" and not images:
        raise DataError(
            f"data.augment = {settings.augment!r} is for images, and the data are none.",
            do="drop data.augment",
        )


def _single(x: Tensor, columns: Sequence[str]) -> Tensor:
    """Return inputs as float32, which training is in; refuse a number that is too large for it."""
    do = 'normalize = "standardize" in [data], or divide the column by a large number'
    return narrowed(x, torch.float32, columns, do)


def _published(pair: _Pair, shape: tuple[int, ...]) -> Scale | None:
    """Return a known set's published mean and deviation.

    They are of the images as published: None where there are none or the images were brought to
    another shape. The set is then standardised by its own training images.
    """
    source = SOURCES[pair.name]
    if not source.mean or shape != source.shape:
        return None
    return images.scale(source.mean, source.std)


def _shape(pairs: Sequence[_Pair], wanted: tuple[int, int, int] | None) -> tuple[int, ...]:
    """Return the shape of one input of the joined set."""
    halves = [(pair.name, raw.shape) for pair in pairs for raw in (pair.train, pair.test)]
    name, shape = halves[0]
    if wanted is not None:
        if min(wanted) < 1:
            raise DataError("data.shape has a side below 1.", got=list(wanted))
        flat = next((half for half in halves if len(half[1]) != 3), None)
        if flat is not None:
            raise DataError(
                f"data.shape is for images, and {flat[0]} has none.",
                got=f"inputs of shape {images.by_name(flat[1])}",
                do="drop data.shape",
            )
        return wanted
    other = next((half for half in halves if half[1] != shape), None)
    if other is None:
        return shape
    raise DataError(
        f"The inputs of {name} and {other[0]} have different shapes."
        if other[0] != name
        else f"The training and test inputs of {name} have different shapes.",
        got=f"{images.by_name(shape)} and {images.by_name(other[1])}",
        do="set data.shape to [channels, height, width] that all images are brought to",
    )


_People = tuple[tuple[str, ...], Ints]


def _people(pairs: Sequence[_Pair]) -> tuple[_People, _People]:
    """Return the names of the clients and the client of each example, for both halves.

    Clients of joined sources are called SOURCE/CLIENT, and a source without a client column is one
    client. The training set has only clients with examples in it; the test set has these, in the
    same order, and after them those that have only test examples.
    """
    rows: tuple[list[Ints], list[Ints]] = ([], [])
    place: dict[str, int] = {}  # every name, in order, and its number for now
    for pair in pairs:
        for half, raw in zip(rows, (pair.train, pair.test), strict=True):
            own = (pair.name,) if raw.client is None else raw.clients
            joined = len(pairs) > 1 and raw.client is not None
            names = [f"{pair.name}/{name}" if joined else name for name in own]
            numbers = np.array([place.setdefault(name, len(place)) for name in names])
            half.append(numbers[np.zeros(len(raw), np.int64) if raw.client is None else raw.client])
    train, test = (np.concatenate(half).astype(np.int64) for half in rows)
    present = np.unique(train)
    kept = np.concatenate([present, np.setdiff1d(test, present)])  # ascending in each part
    final = np.zeros(len(place), dtype=np.int64)
    final[kept] = np.arange(len(kept))
    order = list(place)
    tested = tuple(order[number] for number in kept)
    return (tested[: len(present)], final[train]), (tested, final[test])


def _join(
    halves: Sequence[Raw], x: Tensor, pairs: Sequence[_Pair], people: _People | None, half: str
) -> Dataset:
    """Make the dataset of one half of all sources."""
    names = [raw.label_names for raw in halves]
    alone = len(halves) == 1
    lengths = [len(raw) for raw in halves]
    clients, client = people or ((), None)
    return dataset(
        x,
        halves[0].y if alone else np.concatenate([raw.y for raw in halves]),
        classes=max(len(each) for each in names),
        name=f"{'+'.join(pair.name for pair in pairs)} ({half})",
        sources=tuple(pair.name for pair in pairs),
        source=None if alone else np.repeat(np.arange(len(halves), dtype=np.int64), lengths),
        clients=clients,
        client=client,
        label_names=names[0] if len(set(names)) == 1 else (),
    )
