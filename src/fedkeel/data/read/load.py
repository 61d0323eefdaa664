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
from fedkeel.data.dataset import Dataset, Ints, cast_inputs, dataset
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.folders import read_folder, train_and_test_folders
from fedkeel.data.read.images import Scale, measure_scale, normalise, shape_text, write_images
from fedkeel.data.read.raw_examples import RawExamples, stratified_split
from fedkeel.data.read.sources import read_known_set
from fedkeel.data.read.tables import SUFFIXES, TABLE_SUFFIXES, read_file
from fedkeel.errors import DataError, did_you_mean
from fedkeel.rng import generator


@dataclass(frozen=True)
class _Source:
    """One source: its name, whether it is a known set, and its two halves."""

    name: str
    is_known: bool
    train: RawExamples
    test: RawExamples

    @property
    def halves(self) -> tuple[RawExamples, RawExamples]:
        return self.train, self.test


def load(settings: Data, seed: int = 0, cache: Path | None = None) -> tuple[Dataset, Dataset]:
    """Load the data that settings name.

    Args:
        settings: see `fedkeel.config.Data`. Where it names several sources they are joined: both
            halves say in `Dataset.source` what came from where.
        seed: draws the test set where a user's file has none. It is not the seed of a run: all
            runs of an experiment have one test set, as of ``digits``, and one draw of
            `settings.limit`. A client all of whose examples are drawn keeps them for training.
        cache: folder of downloads; see `fedkeel.data.read.sources.cache_folder`.

    Returns:
        The training set and the test set, float32. Images are [N, C, H, W].

    Raises:
        DataError: a source is not known or not here, cannot be read, or does not fit the others.
    """
    _check_settings(settings)
    sources = [_limited(_read(text, settings, seed, cache), settings) for text in settings.sources]
    sources = _with_distinct_names(sources, settings.sources)
    sources = _with_same_columns(sources)
    check_augment(settings, all(source.train.is_image for source in sources))
    sources = _with_same_labels(sources)
    train_x, test_x, scale = _inputs(sources, settings)
    clients = (_NO_CLIENTS, _NO_CLIENTS) if settings.client is None else _clients(sources)
    train = _join(sources, [source.train for source in sources], train_x, clients[0], "training")
    test = _join(sources, [source.test for source in sources], test_x, clients[1], "test")
    columns, recorded = sources[0].train.columns, None if scale is None else scale.recorded()
    return (
        replace(train, columns=columns, scale=recorded),
        replace(test, columns=columns, scale=recorded),
    )


def _check_settings(settings: Data) -> None:
    """Refuse settings that contradict each other."""
    if settings.source == "nodes":
        raise DataError(
            "data.source = 'nodes': the data are on the nodes of a federation, and not here.",
            do="fedkeel flower up EXPERIMENT.toml --data FILE --data FILE ..., or flower export",
        )
    used = [name for name in settings.drop if name in (settings.label, settings.client)]
    if used:
        raise DataError(
            f"data.drop leaves out {used[0]!r}, which data.label or data.client names.",
            do="take it out of one of them",
        )
    others = [name for name in settings.sources if not name.lower().endswith(TABLE_SUFFIXES)]
    if settings.drop and others:
        raise DataError(
            f"data.drop is for columns of tables, and {others[0]} is none.",
            got=f"data.drop = {list(settings.drop)}",
            expected=f"files that end in {' or '.join(TABLE_SUFFIXES)}",
        )
    if not settings.sources:
        raise DataError("data.source names nothing.", do=did_you_mean("", SOURCES, limit=20))
    paths = [name for name in settings.sources if name not in SOURCES]
    if settings.test is not None and len(paths) != 1:
        raise DataError(
            "data.test goes with one path in data.source.",
            got=f"{len(paths)} paths in {', '.join(settings.sources)}",
            do="drop data.test; known sets have test data, and data.test_fraction is for the rest",
        )
    twice = next((text for text in settings.sources if settings.sources.count(text) > 1), None)
    if twice is not None:
        raise DataError(f"data.source names {twice!r} twice.", expected="each source once")


def _read(text: str, settings: Data, seed: int, cache: Path | None) -> _Source:
    """Read one source."""
    if text in SOURCES:
        return _Source(text, True, *read_known_set(text, settings.test_fraction, cache))
    path = Path(text).expanduser()
    _check_path(path, text)
    train, test = _read_own(path, settings)
    if test is None:
        random = generator(seed, "data.test/own")
        rows = stratified_split(train.y, settings.test_fraction, random)
        if train.client is not None:
            rows = _with_every_client(train.client, *rows)
        train, test = train.take(rows[0]), train.take(rows[1])
    return _Source(path.resolve().name if path.is_dir() else path.stem, False, train, test)


def _with_every_client(client: Ints, train: Ints, test: Ints) -> tuple[Ints, Ints]:
    """Move examples of clients that would have none to train on back to training.

    Where no client has two examples, all stays as it is: there would be nothing to test on.
    """
    lost = ~np.isin(client[test], client[train])
    if lost.all():
        return train, test
    return np.sort(np.concatenate([train, test[lost]])), test[~lost]


def _check_path(path: Path, text: str) -> None:
    """Refuse a path that cannot be read, by what is wrong with it."""
    suffix = path.suffix.lower()
    if not path.exists():
        if "/" in text or "\\" in text or path.suffix in SUFFIXES:
            what = f"There is no file or folder {text!r}."
            raise DataError(what, do=f"check the path (looked in {Path.cwd()})")
        raise DataError(
            f"{text!r} is neither a known data set nor a file or folder.",
            do=f"{did_you_mean(text, SOURCES, limit=20)}; or check the path",
        )
    if path.is_dir():
        return
    if suffix not in SUFFIXES:
        raise DataError(
            f"{text}: files of this kind are not read.",
            got=f"suffix {path.suffix!r}",
            expected=f"{', '.join(SUFFIXES)}, or a folder with a folder for each class",
            do='write it with its labels, numpy.savez("data.npz", x=x, label=y)'
            if suffix == ".npy"
            else None,
        )
    if path.stat().st_size == 0:
        raise DataError(f"{text} is empty.", expected="a file with examples")


def _read_own(path: Path, settings: Data) -> tuple[RawExamples, RawExamples | None]:
    """Read a user's file or folder, and its test data where there are any."""
    test_path = None
    if settings.test is not None:
        test_path = Path(settings.test).expanduser()
        _check_path(test_path, settings.test)
        if test_path.resolve() == path.resolve():
            raise DataError(
                "data.test is the file that is trained on.",
                got=settings.test,
                do="drop data.test, and data.test_fraction sets examples aside; or name another",
            )
        same_suffix = (path.suffix == ".npz") == (test_path.suffix == ".npz")
        if path.is_dir() != test_path.is_dir() or not same_suffix:
            raise DataError(
                "The test data are of another kind than the training data.",
                got=f"{path.name} and {test_path.name}",
                expected="two tables, two .npz files, or two folders",
            )
    if path.is_dir():
        train_folder, test_folder = train_and_test_folders(path)
        test_folder = test_path or test_folder
        train = read_folder(train_folder, settings.shape)
        if test_folder is None:
            return train, None
        return train, read_folder(test_folder, settings.shape, train.label_names)
    train = read_file(path, settings)
    return train, None if test_path is None else read_file(test_path, settings, train)


def _limited(source: _Source, settings: Data) -> _Source:
    """Return the source with at most `settings.limit` training examples, in their order."""
    if settings.limit is None or len(source.train) <= settings.limit:
        return source
    random = generator(0, f"data.limit/{source.name if source.is_known else 'source_scale'}")
    rows = np.sort(random.choice(len(source.train), settings.limit, replace=False))
    return replace(source, train=source.train.take(rows.astype(np.int64)))


def _with_distinct_names(sources: list[_Source], texts: Sequence[str]) -> list[_Source]:
    """Name sources as the settings do where their short names would be the same."""
    if len({source.name for source in sources}) == len(sources):
        return sources
    return [replace(source, name=text) for source, text in zip(sources, texts, strict=True)]


def _with_same_columns(sources: Sequence[_Source]) -> list[_Source]:
    """Return tables with their columns in the order of the first.

    Raises:
        DataError: one has other columns, or they are tables and images.
    """
    first = sources[0]
    columns = first.train.columns
    for source in sources[1:]:
        odd = sorted(set(columns) ^ set(source.train.columns))
        if odd:
            raise DataError(
                f"{first.name} and {source.name} cannot be joined: their columns differ.",
                got=f"{odd[0]!r} in only one of them",
                expected="the same columns, in any order",
            )
    return [
        replace(
            source,
            train=source.train.with_columns(columns),
            test=source.test.with_columns(columns),
        )
        for source in sources
    ]


def _with_same_labels(sources: list[_Source]) -> list[_Source]:
    """Give all sources the same numbers for the same classes.

    Users' files are numbered by what they hold, so that two of them may number a class
    differently: labels are numbered anew, by all names. Known sets keep their numbers.
    """
    names = [source.train.label_names for source in sources]
    if all(source.is_known for source in sources) or len(set(names)) == 1:
        return sources
    longest = max(names, key=len)
    union = set().union(*names)
    if union <= set(longest):
        order = longest
    elif all(name.lstrip("-").isdigit() for name in union):
        order = tuple(sorted(union, key=int))
    else:
        order = tuple(sorted(union))
    label_of = {name: label for label, name in enumerate(order)}

    def renumbered(raw: RawExamples) -> RawExamples:
        table = np.array([label_of[name] for name in raw.label_names], dtype=np.int64)
        return replace(raw, y=table[raw.y], label_names=order)

    return [
        replace(source, train=renumbered(source.train), test=renumbered(source.test))
        for source in sources
    ]


def _inputs(sources: Sequence[_Source], settings: Data) -> tuple[Tensor, Tensor, Scale | None]:
    """Return the inputs of both halves, resized, joined and normalised, and their common scale."""
    scale: Scale | None = None
    shape = _shape(sources, settings.shape)
    first = sources[0].train
    needs_double = not first.is_image and any(
        half.x.dtype == torch.float64 for source in sources for half in source.halves
    )
    dtype = torch.float64 if needs_double else torch.float32
    train = torch.empty((sum(len(source.train) for source in sources), *shape), dtype=dtype)
    test = torch.empty((sum(len(source.test) for source in sources), *shape), dtype=dtype)
    train_rest, test_rest = train, test
    for source in sources:
        parts = train_rest[: len(source.train)], test_rest[: len(source.test)]
        train_rest, test_rest = train_rest[len(source.train) :], test_rest[len(source.test) :]
        for part, raw in zip(parts, source.halves, strict=True):
            if raw.is_image:
                write_images(part, raw.x, source.name)
            else:
                part.copy_(raw.x)
        if settings.normalize == "source" and source.is_known:
            source_scale = _published_scale(source.name, shape) or measure_scale(parts[0])
            for part in parts:
                source_scale.apply_(part)
            scale = source_scale if len(sources) == 1 else None
    scale = normalise(train, test, settings.normalize) or scale
    do = 'normalize = "standardize" in [data], or divide the column by a large number'
    train, test = (cast_inputs(x, torch.float32, first.columns, do) for x in (train, test))
    return train, test, scale


def check_augment(settings: Data, is_image: bool) -> None:
    """Refuse to augment what is no image.

    Raises:
        DataError: it is to be augmented.
    """
    if settings.augment != "none" and not is_image:
        raise DataError(
            f"data.augment = {settings.augment!r} is for images, and the data are none.",
            do="drop data.augment",
        )


def _published_scale(name: str, shape: tuple[int, ...]) -> Scale | None:
    """Return a known set's published mean and deviation.

    They are of the images as published: None where there are none or the images were brought to
    another shape. The set is then standardised by its own training images.
    """
    source = SOURCES[name]
    if not source.mean or shape != source.shape:
        return None
    return Scale.of(source.mean, source.std)


def _shape(sources: Sequence[_Source], wanted: tuple[int, int, int] | None) -> tuple[int, ...]:
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
class _Clients:
    """The names of the clients, and the client of each example where the data gives clients."""

    names: tuple[str, ...] = ()
    index: Ints | None = None


_NO_CLIENTS = _Clients()


def _clients(sources: Sequence[_Source]) -> tuple[_Clients, _Clients]:
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
    return _Clients(names[: len(in_train)], final[train]), _Clients(names, final[test])


def _join(
    sources: Sequence[_Source], halves: Sequence[RawExamples], x: Tensor, clients: _Clients, of: str
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
        clients=clients.names,
        client=clients.index,
        label_names=label_names[0] if len(set(label_names)) == 1 else (),
    )
