"""Loading: from the settings of the data to a training set and a test set.

Each source is read as it is, cut to the limit, and written once into the memory of the joined
set, where it is resized and normalised in place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedkeel.base.named_files import expanded
from fedkeel.base.rng import generator
from fedkeel.config import Data
from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.read.arrays import read_arrays
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.folders import (
    beside_halves,
    read_folder,
    tables_in,
    train_and_test_folders,
)
from fedkeel.data.read.identifiers import check_written_alike
from fedkeel.data.read.inputs import make_inputs
from fedkeel.data.read.join import (
    Source,
    join_halves,
    number_clients,
    number_groups,
    with_distinct_names,
    with_same_columns,
    with_same_labels,
)
from fedkeel.data.read.raw_examples import RawExamples, train_and_test_rows
from fedkeel.data.read.sources import read_known_set
from fedkeel.data.read.tables import TABLE_SUFFIXES, read_table
from fedkeel.errors import DataError, counted, did_you_mean

SUFFIXES = (".npz", *TABLE_SUFFIXES)
"""What files of a user end in."""


def load(
    settings: Data,
    seed: int = 0,
    cache: Path | None = None,
    is_one_of_many: bool = False,
    group: str | None = None,
) -> tuple[Dataset, Dataset]:
    """Load the data that settings name.

    Args:
        settings: see `fedkeel.config.Data`. Where it names several sources they are joined: both
            halves say in `Dataset.source` what came from where.
        seed: draws the test set where a user's file has none. It is not the seed of a run: all
            runs of an experiment have one test set, as of ``digits``, and one draw of
            `settings.limit`. A client all of whose examples are drawn keeps them for training.
        cache: folder of downloads; see `fedkeel.data.read.sources.cache_folder`.
        is_one_of_many: whether other nodes have more of the data. As where there are several
            sources, a column of `settings.drop` may then be missing, and what is too little to set
            some aside for testing is all trained on; `Dataset.warnings` say so.
        group: name of the column or array of groups, see `fedkeel.config.Partition.holdout_by`.

    Returns:
        The training set and the test set, float32. Images are [N, C, H, W].

    Raises:
        DataError: a source is not known or not here, cannot be read, or does not fit the others.
    """
    _check_settings(settings)
    drop = settings.drop
    if group is not None:
        _check_group(settings, group)
        settings = settings.model_copy(update={"drop": tuple(dict.fromkeys((*drop, group)))})
    may_be_small = is_one_of_many or len(settings.sources) > 1
    sources = [_read(text, settings, seed, cache, may_be_small, group) for text in settings.sources]
    sources = [_limited(source, settings) for source in sources]
    if len(sources) > 1 or settings.test is not None:
        _check_dropped(sources, drop)
    if not is_one_of_many and not any(len(source.test) for source in sources):
        raise DataError(
            "No source has enough examples to set some aside for testing.",
            got=f"{settings.test_fraction:g} of {max(len(s.train) for s in sources):,} at most",
            do="give more examples, or a larger data.test_fraction",
        )
    return join(with_distinct_names(sources, settings.sources), settings, is_one_of_many, group)


def join(
    sources: Sequence[Source],
    settings: Data,
    is_one_of_many: bool = False,
    group: str | None = None,
) -> tuple[Dataset, Dataset]:
    """Join sources that have been read.

    Args:
        sources: at least one, each with a name of its own.
        settings: how they are made ready.
        is_one_of_many: whether other nodes have more of the data.
        group: what a group is called, None where there are none.

    Returns:
        As `load`.

    Raises:
        DataError: they do not fit each other.
    """
    sources = with_same_columns(sources, settings.missing != "refuse")
    check_augment(settings, all(source.train.is_image for source in sources))
    sources = with_same_labels(sources)
    clients = number_clients(sources)
    sources, inputs = make_inputs(sources, settings, clients, is_one_of_many)
    named = (None, None) if settings.client is None else clients
    halves = [source.train for source in sources], [source.test for source in sources]
    train = join_halves(sources, halves[0], inputs.train, named[0], "training")
    test = train.take(np.empty(0, dtype=np.int64))
    if len(inputs.test):
        test = join_halves(sources, halves[1], inputs.test, named[1], "test")
    columns = () if inputs.schema is None else inputs.schema.inputs
    warnings = tuple(warning for source in sources for warning in source.warnings)
    scales, schema = inputs.client_scales, inputs.schema
    groups = (None, None) if group is None else number_groups(sources)
    train, test = (
        replace(
            half,
            columns=columns,
            scale=inputs.scale,
            client_scales=scales,
            schema=schema,
            grouped_by=group or "",
            group=numbers,
        )
        for half, numbers in zip((train, test), groups, strict=True)
    )
    return replace(train, warnings=warnings), test


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
    for key, names in (("drop", settings.drop), ("categories", (*settings.categories_of,))):
        if names and others:
            raise DataError(
                f"data.{key} is for columns of tables, and {others[0]} is not a table.",
                got=f"data.{key} = {list(names)}",
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


def _check_group(settings: Data, group: str) -> None:
    """Refuse a name of groups that the sources cannot have, or that is that of the labels."""
    if group == settings.label:
        raise DataError(
            f"partition.holdout_by = {group!r} names the column of labels.",
            expected="the column that says what belongs together, such as 'patient'",
            do="partition.stratify keeps the share of each class",
        )
    for text in settings.sources:
        if text in SOURCES or not text.lower().endswith(SUFFIXES):
            raise DataError(
                f"partition.holdout_by is for a column of a table, and {text} is not a table.",
                got=f"partition.holdout_by = {group!r}",
                expected=f"files that end in {', '.join(SUFFIXES)}",
                do="in Python give one group for each example: "
                "fedkeel.from_clients(..., holdout=0.2, holdout_by=groups)",
            )


def _read(
    text: str,
    settings: Data,
    seed: int,
    cache: Path | None,
    is_one_of_many: bool,
    group: str | None,
) -> Source:
    """Read one source."""
    if text in SOURCES:
        _check_labels_are_wanted(text, settings)
        return Source(text, True, *read_known_set(text, settings.test_fraction, cache))
    path = expanded(text)
    check_path(path, text)
    if path.is_dir():
        _check_labels_are_wanted(text, settings)
    train, test = _read_own(path, settings, is_one_of_many, group)
    warnings: tuple[str, ...] = ()
    if test is None:
        random = generator(seed, "data.test/own")
        rows = train_and_test_rows(train, settings.test_fraction, random)
        if not len(rows[1]):
            if not is_one_of_many:
                raise too_few_to_test(text, train, settings.test_fraction, group)
            warnings = (all_trained_on(text, len(train), group),)
        if train.client is not None and group != settings.client:
            rows = _with_every_client(train.client, train.group, *rows)
        train, test = train.take(rows[0]), train.take(rows[1])
    elif train.clients and test.clients:
        check_written_alike(text, train.clients, str(settings.test), test.clients)
    if path.is_dir() and settings.test is None and train_and_test_folders(path)[1] is not None:
        warnings += tuple(
            f"{text}/{other} is left out: only train and test are read"
            for other in beside_halves(path)
        )
    for folder in (path, None if settings.test is None else expanded(settings.test)):
        if folder is not None and folder.is_dir() and (tables := tables_in(folder)):
            warnings += (
                f"{folder}: {', '.join(tables[:3])}{', ...' if len(tables) > 3 else ''} "
                f"{'is' if len(tables) == 1 else 'are'} not read: the label of an image is the "
                "name of its folder",
            )
    if is_one_of_many and len(settings.sources) == 1:  # nobody here sees the other nodes' columns
        warnings += tuple(
            f"{text} has no column {name!r} to leave out (data.drop)"
            for name in settings.drop
            if name not in train.dropped and name != group
        )
    name = path.resolve().name if path.is_dir() else path.stem
    return Source(name, False, train, test, warnings)


def _check_labels_are_wanted(text: str, settings: Data) -> None:
    """Refuse a source whose examples have labels where quantities are asked for."""
    if settings.target == "quantity":
        raise DataError(
            f"{text} has labels, and data.target asks for quantities.",
            expected="a CSV, Parquet or .npz file with a column or an array of numbers",
            do="leave data.target out",
        )


def all_trained_on(name: str, examples: int, group: str | None = None) -> str:
    """Return the warning of data that are too few to set some aside for testing."""
    what = counted(examples, "example")
    if group is not None:
        what += f", all with the same {group}"
    return f"{name} has {what}: too few to set some aside for testing, so all are trained on"


def too_few_to_test(name: str, train: RawExamples, fraction: float, group: str | None) -> DataError:
    """Return the error of data that are too few to set some aside for testing."""
    if group is not None:
        return DataError(
            f"{name} has one value of {group!r} only.",
            got=f"partition.holdout_by = {group!r}",
            why="all examples of one value are trained on, or all are tested on",
            do="give test data of others (data.test)",
        )
    classes = len(np.unique(train.strata))
    return DataError(
        f"{name} has too few examples to set some aside for testing.",
        got=f"{counted(len(train), 'example')} in {counted(classes, 'class')}, "
        f"test_fraction {fraction:g}",
        do="give test data (data.test), more examples, or a larger data.test_fraction",
    )


def _check_dropped(sources: Sequence[Source], drop: Sequence[str]) -> None:
    """Refuse a column in data.drop that none of the tables has."""
    for name in drop:
        if any(name in half.dropped for source in sources for half in source.halves):
            continue
        present = {c for source in sources for c in (*source.train.columns, *source.train.dropped)}
        raise DataError(
            f"None of the tables has the column {name!r}, which data.drop names.",
            got=", ".join(source.name for source in sources),
            do=did_you_mean(name, present),
        )


def _with_every_client(
    client: Ints, group: Ints | None, train: Ints, test: Ints
) -> tuple[Ints, Ints]:
    """Move examples of clients that would have none to train on back to training.

    Where there are groups, their whole groups move. Where no client has two examples, all stays as
    it is: there would be nothing to test on.
    """
    lost = ~np.isin(client[test], client[train])
    if group is not None:
        lost = np.isin(group[test], group[test[lost]])
    if lost.all():
        return train, test
    return np.sort(np.concatenate([train, test[lost]])), test[~lost]


def check_path(path: Path, text: str) -> None:
    """Refuse a path that cannot be read, by what is wrong with it."""
    suffix = path.suffix.lower()
    if not os.path.exists(path):  # `Path.exists` raises where a name is too long
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


def read_path(
    path: Path, settings: Data, train: RawExamples | None = None, group: str | None = None
) -> RawExamples:
    """Read one file or folder of a user, which may lack columns that others have.

    Args:
        path: the file, or a folder with a folder for each class.
        settings: what its columns or arrays are.
        train: the training data, where test data is read.
        group: name of the column or array of groups.

    Raises:
        DataError: it cannot be read.
    """
    path = expanded(path)
    check_path(path, str(path))
    if path.is_dir():
        if group is not None:
            raise DataError(
                f"holdout_by = {group!r} names a column, and {path} is a folder of images.",
                do="give one group for each example: holdout_by=[...]",
            )
        return read_folder(path, settings.shape, None if train is None else train.label_names)
    return _read_file(path, settings, True, train, group)


def _read_own(
    path: Path, settings: Data, is_one_of_many: bool, group: str | None
) -> tuple[RawExamples, RawExamples | None]:
    """Read a user's file or folder, and its test data where there are any."""
    test_path = None
    if settings.test is not None:
        test_path = expanded(settings.test)
        check_path(test_path, settings.test)
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
    may_lack = is_one_of_many or test_path is not None
    train = _read_file(path, settings, may_lack, group=group)
    if test_path is None:
        return train, None
    return train, _read_file(test_path, settings, may_lack, train, group)


def _read_file(
    path: Path,
    settings: Data,
    may_lack_columns: bool,
    train: RawExamples | None = None,
    group: str | None = None,
) -> RawExamples:
    """Read a user's file by its suffix."""
    if path.suffix.lower() in TABLE_SUFFIXES:
        return read_table(path, settings, train, group, may_lack_columns)
    is_quantity = settings.target == "quantity"
    columns = settings.label, settings.client
    return read_arrays(path, *columns, train, is_quantity, group, settings.missing_targets)


def _limited(source: Source, settings: Data) -> Source:
    """Return the source with at most `settings.limit` training examples, in their order."""
    if settings.limit is None or len(source.train) <= settings.limit:
        return source
    random = generator(0, f"data.limit/{source.name if source.is_known else 'own'}")
    rows = np.sort(random.choice(len(source.train), settings.limit, replace=False))
    return replace(source, train=source.train.take(rows.astype(np.int64)))


def check_augment(settings: Data, is_image: bool) -> None:
    """Refuse to augment what is not an image.

    Raises:
        DataError: it is to be augmented.
    """
    if settings.augment == "crop_flip" and not is_image:
        raise DataError(
            f"data.augment = {settings.augment!r} is for images, and the data are not images.",
            do="drop data.augment",
        )
