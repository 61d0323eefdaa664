"""What a user gives for examples: arrays, tables, files, and data sets of other libraries.

Tables and files are read as those that an experiment file names, and joined by the same rules;
everything else becomes arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedkeel.base.values import Values, joined, only_tensor, shape_of, tensors_of
from fedkeel.config import Data, build
from fedkeel.data.arrays_in_files import joined_in_file
from fedkeel.data.dataset import Dataset, MissingTargets, cast_inputs
from fedkeel.data.dataset import dataset as dataset_of_arrays
from fedkeel.data.ids import as_ids, distinct
from fedkeel.data.read.identifiers import encode, in_order
from fedkeel.data.read.join import Source, with_categories
from fedkeel.data.read.load import join, read_path
from fedkeel.data.read.raw_examples import RawExamples
from fedkeel.data.read.scaling import (
    Channels,
    Scale,
    check_channels,
    normalise,
    normalise_clients,
)
from fedkeel.data.read.tables import PANDAS_INDEX, examples_of_table
from fedkeel.data.table_schema import TableSchema
from fedkeel.data.user_objects import (
    has_images,
    is_data_set,
    is_hugging_face,
    target_of,
    unpack,
)
from fedkeel.errors import DataError

Array = ArrayLike | Tensor

Examples = Any
"""Examples of one client, or of all: a pair of arrays (x, y), a `Dataset`, a frame of pandas or
another table of Arrow, a map-style data set of torch, a Hugging Face data set, or a path."""

GroupIds = Any
"""What belongs together: the group of each example as an array, or the name of a column."""


@dataclass(frozen=True)
class Reading:
    """How examples are read that are not arrays.

    Args:
        target: name of the column or key of the target; None where its name says so.
        drop: names of columns that are not inputs.
        categories: as `fedkeel.config.Data` has it.
        missing: as `fedkeel.config.Data` has it.
        normalize: ``none``, ``standardize``, ``client`` or ``pixels`` of `fedkeel.config.Data`.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.
        group: name of the column of groups that are held out as wholes; None for no groups.
        channels: as `fedkeel.config.Data` has it.
        missing_targets: as `fedkeel.config.Data` has it, of arrays.
    """

    target: str | None = None
    drop: Sequence[str] = ()
    categories: Sequence[str] | Mapping[str, Sequence[str]] = ()
    missing: str = "refuse"
    normalize: str = "none"
    classes: int | None = None
    tokens: bool = False
    group: str | None = None
    channels: Channels = "first"
    missing_targets: MissingTargets = "refuse"

    def settings(self, label: str = "label") -> Data:
        """Return the settings of tables and files.

        Args:
            label: name of the column of labels.

        Raises:
            ConfigError: one of them cannot be used.
        """
        categories = self.categories
        values = {
            "source": "clients",
            "label": label,
            "drop": (*self.drop, *([] if self.group is None else [self.group])),
            "categories": dict(categories) if isinstance(categories, Mapping) else categories,
            "missing": self.missing,
            "normalize": self.normalize,
            "channels": self.channels,
            "target": "quantity" if self.classes == 0 else "label",
        }
        return build(Data, values, "data")


def dataset(
    x: Examples,
    y: Array | None = None,
    *,
    target: str | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] | Mapping[str, Sequence[str]] = (),
    missing: str = "refuse",
    group: GroupIds = None,
    classes: int | None = None,
    name: str = "data",
    tokens: bool = False,
    missing_targets: MissingTargets = "refuse",
    **more: Any,  # noqa: ANN401 - the remaining fields of Dataset
) -> Dataset:
    """Make a `Dataset` of a user's examples, and refuse what cannot be trained on.

    Args:
        x: [N, ...] inputs: numbers, of which float64 is kept and other types become float32. Or,
            without `y`, one object that holds inputs and targets: a frame of pandas or another
            table, a map-style data set of torch, a Hugging Face data set, a path, a pair.
        y: [N] labels, whole numbers from 0; or other targets, see `Dataset`.
        target: name of the column or key of the target, where `x` holds it.
        drop: names of columns of `x` that are not inputs.
        categories: columns of a table that hold categories; see `fedkeel.config.Data`.
        missing: what becomes of missing values of a table; see `fedkeel.config.Data`.
        group: [N] what belongs together, such as the patient of each example, and is held out as a
            whole; or the name of the column of `x` that says so, which is then no input.
        classes: Y; the largest label + 1 where it is not given.
        name: what to call the data in messages.
        tokens: whether inputs are whole numbers >= 0 that the model looks up, such as characters.
        missing_targets: ``leave_out`` takes quantities [N, D] of which some are NaN, not known, and
            leaves those out of losses and metrics; see `fedkeel.config.Data`.
        **more: further fields of `Dataset`.

    Raises:
        DataError: inputs are not real numbers, lengths differ, there are no examples, an input or
            a target is not finite, a token is not a whole number >= 0, a label lies outside 0..Y-1;
            an example of a data set cannot be read.

    >>> len(dataset([[0.0], [1.0]], [0, 1]))
    2
    """
    column = group if isinstance(group, str) else None
    if y is not None:
        if column is not None:
            raise _no_column(column)
        more["missing_targets"] = missing_targets
        data = dataset_of_arrays(x, y, classes=classes, name=name, tokens=tokens, **more)
    else:
        reading = Reading(target, drop, categories, missing, "none", classes, tokens, column)
        reading = replace(reading, missing_targets=missing_targets)
        data, _ = read_clients({name: x}, {}, reading, prefix="")
        plain = {"sources": (name,), "source": None, "clients": (), "client": None}
        data = replace(data, **{**plain, **more})
    if group is None or column is not None:
        return data
    numbers = distinct(as_ids(group, len(data), "group"))[1]
    return replace(data, grouped_by="group", group=numbers)


def _no_column(column: str) -> DataError:
    return DataError(
        f"{column!r} names a column of groups, and the examples are not a table.",
        expected="one group for each example, such as an array of patients",
    )


def read_clients(
    clients: Mapping[str, Examples],
    tests: Mapping[str, Examples],
    reading: Reading,
    prefix: str = "client ",
) -> tuple[Dataset, int]:
    """Return the examples of all clients, joined by one schema, and how many are for training.

    Args:
        clients: the training examples of each client by its name, at least one client.
        tests: the test examples of some of them.
        reading: how they are read.
        prefix: what stands before the name of a client in messages.

    Returns:
        All training examples, and then all test examples; `Dataset.client` says whose each is, in
        the order of `clients`. And the number of training examples.

    Raises:
        DataError: examples cannot be read, or those of one client do not fit those of others.
    """
    parts = [*clients.items(), *tests.items()]
    is_raw = [_is_raw(part) for _, part in parts]
    if all(is_raw):
        return _join_raw(clients, tests, reading)
    if any(is_raw):
        raise DataError(
            "Some clients have tables or files, and others arrays.",
            got=f"{parts[is_raw.index(True)][0]} and {parts[is_raw.index(False)][0]}",
            expected="one kind for all, so that their columns can be compared",
        )
    return _join_arrays(clients, tests, reading, prefix)


def like(train: Dataset, value: Examples, name: str, normalize: bool = True) -> Dataset:
    """Return other examples, made ready as training examples were.

    Args:
        train: training data that was read here.
        value: the other examples.
        name: what to call them in messages.
        normalize: whether to standardise arrays as `train` was; tables always are.

    Raises:
        DataError: they cannot be read, or do not fit the training data.
    """
    if isinstance(value, Dataset):
        return value.with_label_names(train.label_names, name) if train.label_names else value
    if _is_raw(value):
        if train.schema is None:
            raise DataError(
                f"{name} is a table or a file, and the training data are not.",
                do="give both in one form",
            )
        return _like_table(train, train.schema, value, name)
    tokens = isinstance(train.x, Tensor) and not train.x.is_floating_point()
    may_lack = any(y.is_floating_point() and bool(y.isnan().any()) for y in tensors_of(train.y))
    reading = Reading(tokens=tokens, missing_targets="leave_out" if may_lack else "refuse")
    data = _of_arrays(value, name, reading, "")
    if isinstance(train.shape, tuple) and len(train.shape) == 3:
        data = _with_channels(data, value, train.shape[0])
    if train.label_names:
        data = data.with_label_names(train.label_names, name)
    if not normalize or (train.scale is None and not train.client_scales):
        return data
    x = _scaled(only_tensor(data.x, "standardising"), train, name)
    return replace(data, x=x, scale=train.scale)


def _scaled(x: Tensor, train: Dataset, name: str) -> Tensor:
    """Return inputs standardised as the training data was, as new memory."""
    if train.client_scales:
        raise DataError(
            f"{name}: it is not known whose examples these are.",
            why="each client was standardised by its own examples",
            do="give each client its test part: fedkeel.from_clients({...}, test={...})",
        )
    if train.scale is None:
        return x
    x, scale = x.clone(), Scale.of(*train.scale)
    scale.apply_(x)
    return x


def _like_table(train: Dataset, schema: TableSchema, value: Examples, name: str) -> Dataset:
    """Return the examples of a table or file by the schema and the scale of the training data."""
    names = tuple(column.name for column in schema.columns)
    known = {c.name: c.categories for c in schema.columns if c.categories is not None}
    classes = 0 if train.classes == 0 else None
    reading = Reading(None, schema.dropped, dict(known), schema.missing, classes=classes)
    settings = reading.settings(schema.label)
    empty = np.empty(0, dtype=np.int64)
    x = only_tensor(train.x, "a table")[:0]
    form = RawExamples(x, empty, train.label_names, names, categories=known)
    warnings: list[str] = []
    raw = _read_raw(value, name, settings, form).with_columns(names)
    raw = with_categories(raw, known, name, schema.missing != "refuse", warnings)
    inputs = _scaled(schema.inputs_of(raw.x), train, name)
    return Dataset(
        cast_inputs(inputs, torch.float32, schema.inputs, "scale the column"),
        torch.from_numpy(raw.y),
        train.classes,
        sources=(name,),
        label_names=train.label_names,
        columns=schema.inputs,
        scale=train.scale,
        schema=schema,
        warnings=tuple(warnings),
    )


def is_examples(value: object) -> bool:
    """Return whether one object may hold inputs and targets."""
    return _is_raw(value) or is_data_set(value)


def _is_raw(value: Examples) -> bool:
    """Return whether examples are a table or a file."""
    if isinstance(value, (str, os.PathLike)):
        return True
    if is_hugging_face(value):
        scalar = all(getattr(kind, "dtype", "") in _SCALARS for kind in value.features.values())
        return scalar and value.format["type"] != "custom"
    return hasattr(value, "__arrow_c_stream__")


_SCALARS = frozenset(
    f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)
) | {"bool", "string", "large_string"}
"""Types of columns of a Hugging Face data set that are columns of a table."""


def _join_raw(
    clients: Mapping[str, Examples], tests: Mapping[str, Examples], reading: Reading
) -> tuple[Dataset, int]:
    """Return the joined examples of clients that have tables or files."""
    (first, value), *_ = clients.items()
    settings = reading.settings(_label(value, first, reading))
    sources = []
    for name, value in clients.items():
        train = _read_raw(value, name, settings, group=reading.group)
        test = train.take(np.empty(0, dtype=np.int64))
        if name in tests:
            test = _read_raw(tests[name], f"{name} (test)", settings, train, reading.group)
        sources.append(Source(name, False, train, test))
    train_data, test_data = join(sources, settings, group=reading.group)
    group = train_data.group
    if group is not None:
        of_test = np.full(len(test_data), -1) if test_data.group is None else test_data.group
        group = np.concatenate([group, of_test])
    both = replace(
        train_data,
        x=joined([train_data.x, test_data.x]),
        y=joined([train_data.y, test_data.y]),
        client=np.concatenate([train_data.source_ids, test_data.source_ids]),
        clients=train_data.sources,
        group=group,
        sources=("data",),
        source=None,
    )
    return both, len(train_data)


def _label(value: Examples, name: str, reading: Reading) -> str:
    """Return the name of the column of labels."""
    if isinstance(value, (str, os.PathLike)):
        return reading.target or "label"
    names = value.column_names if is_hugging_face(value) else list(_table(value).column_names)
    return target_of(names, name, reading.target)


def _table(value: Examples) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return a table of any library as one of Arrow; the index of pandas is not a column of it."""
    import pyarrow as pa  # slow to import

    table = value.with_format("arrow")[:] if is_hugging_face(value) else pa.table(value)
    index = [name for name in table.column_names if PANDAS_INDEX.fullmatch(name)]
    return table.drop_columns(index) if index else table


def _read_raw(
    value: Examples,
    name: str,
    settings: Data,
    train: RawExamples | None = None,
    group: str | None = None,
) -> RawExamples:
    """Read the table or the file of one client."""
    if isinstance(value, (str, os.PathLike)):
        return read_path(Path(value), settings, train, group)
    import pyarrow as pa

    table = _table(value)
    if table.num_rows == 0:
        raise DataError(f"{name}: there are no examples.", do="check the file or the split")
    columns = dict(zip(table.column_names, table.columns, strict=True))
    label = settings.label
    if is_hugging_face(value) and (names := getattr(value.features[label], "names", None)):
        columns[label] = pa.chunked_array(
            [[names[number] for number in columns[label].to_pylist()]]
        )
    return examples_of_table(name, columns, settings, train, group, may_lack_columns=True)


def _join_arrays(
    clients: Mapping[str, Examples],
    tests: Mapping[str, Examples],
    reading: Reading,
    prefix: str,
) -> tuple[Dataset, int]:
    """Return the joined examples of clients that have arrays, or data sets of other libraries."""
    settings = reading.settings()
    if reading.group is not None:
        raise _no_column(reading.group)
    if settings.categories_of or settings.missing != "refuse":
        raise DataError(
            "'categories' and 'missing' are for tables, and the clients have none.",
            do="give frames of pandas, or paths of tables",
        )
    parts = [
        (f"{prefix}{name}{of}", name, value)
        for values, of in ((clients, ""), (tests, " (test)"))
        for name, value in values.items()
    ]
    datasets = [_of_arrays(value, what, reading, what) for what, _, value in parts]
    datasets = _in_one_mode(datasets, [value for _, _, value in parts])
    first = datasets[0]
    for (what, _, _), part in zip(parts, datasets, strict=True):
        pairs = (part.shape, first.shape), (shape_of(part.y), shape_of(first.y))
        for of, (shape, expected) in zip(("inputs", "targets"), pairs, strict=True):
            if shape != expected:
                raise DataError(
                    f"{what}: {of} have another shape than those of {parts[0][0]}.",
                    got=f"{shape} for one example",
                    expected=f"{expected}",
                    why="one model is trained for all, so an example has one form everywhere",
                    do="give all the same columns in the same order, or pad or crop what is longer;"
                    " tables as files may lack columns, see data.missing",
                )
    names = _common_names([what for what, _, _ in parts], datasets)
    datasets = [
        part.with_label_names(names, what)
        for (what, _, _), part in zip(parts, datasets, strict=True)
    ]
    places = {name: k for k, name in enumerate(clients)}
    in_files = any(
        isinstance(value, (tuple, list)) and isinstance(value[0], np.memmap)
        for _, _, value in parts
    )
    has_quantities = any(part.classes == 0 for part in datasets)
    classes = 0 if has_quantities else max(part.classes for part in datasets)
    both = Dataset(
        _joined_inputs([part.x for part in datasets], in_files),
        joined([part.y for part in datasets]),
        classes,
        client=np.repeat([places[name] for _, name, _ in parts], [len(part) for part in datasets]),
        clients=tuple(clients),
        label_names=names,
        warnings=tuple(warning for part in datasets for warning in part.warnings),
    )
    count = sum(len(part) for part in datasets[: len(clients)])
    is_image = any(is_data_set(value) and has_images(value) for _, _, value in parts)
    if isinstance(both.shape, tuple):
        check_channels(both.shape, reading.channels, is_image, "channels")
    return _normalised(both, count, settings.normalize, reading.channels), count


def _common_names(whats: Sequence[str], datasets: Sequence[Dataset]) -> tuple[str, ...]:
    """Return the names of labels by which all clients are numbered, () where there are none.

    Raises:
        DataError: some clients name their labels, each in its own order, and others do not.
    """
    named = {part.label_names for part in datasets if part.label_names}
    if len(named) < 2:
        return named.pop() if named else ()
    for what, part in zip(whats, datasets, strict=True):
        if not part.label_names and part.has_labels:
            raise DataError(
                f"{what} has numbers as labels, and others have names in several orders.",
                why="it is not known which name a number means",
                do="give it names too: fedkeel.dataset(x, y, label_names=[...])",
            )
    return in_order(set().union(*named))


def _in_one_mode(datasets: Sequence[Dataset], values: Sequence[Examples]) -> list[Dataset]:
    """Return data sets of images with one number of channels: grey ones become coloured."""
    out = list(datasets)
    shapes = [part.shape for part in out]
    if len(set(map(str, shapes))) == 1:
        return out
    widest = max((s[0] for s in shapes if isinstance(s, tuple) and len(s) == 3), default=0)
    for k, (part, value) in enumerate(zip(datasets, values, strict=True)):
        out[k] = _with_channels(part, value, widest)
    return out


def _with_channels(data: Dataset, value: Examples, channels: int) -> Dataset:
    """Return grey images of a data set with as many channels; anything else as it is."""
    is_grey = isinstance(data.shape, tuple) and len(data.shape) == 3 and data.shape[0] == 1
    if channels <= 1 or not is_grey or not is_data_set(value) or not has_images(value):
        return data
    x = only_tensor(data.x, "an image")
    return replace(data, x=x.expand(-1, channels, -1, -1).contiguous())


def _joined_inputs(parts: Sequence[Values], in_files: bool) -> Values:
    """Return the inputs of all clients, which stay in files where they are in such."""
    if len(parts) == 1:
        return parts[0]
    if not in_files:
        return joined(parts)
    return joined_in_file([only_tensor(part, "an array in a file") for part in parts])


def _of_arrays(value: Examples, name: str, reading: Reading, what: str) -> Dataset:
    """Return the examples of one client, without a schema."""
    if isinstance(value, Dataset):
        return value
    more: dict[str, Any] = {}
    if is_data_set(value):
        read = unpack(value, name, reading.target, reading.drop)
        value, more = (read.x, read.y), {"warnings": read.warnings}
        if read.label_names and reading.classes in (None, len(read.label_names)):
            more["label_names"] = read.label_names
        elif isinstance(read.y, np.ndarray) and read.y.dtype.kind == "U":
            numbers, more["label_names"] = encode(read.y)
            value = (read.x, numbers)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise DataError(
            f"{what or name} has no pair of arrays.",
            got=f"an object of type {type(value).__name__}",
            expected="a pair (x, y) of inputs and targets, a table, or a data set",
        )
    names = more.get("label_names")
    classes = len(names) if names else reading.classes
    more |= {"tokens": reading.tokens, "missing_targets": reading.missing_targets}
    return dataset_of_arrays(*value, classes=classes, name=name, **more)


def _normalised(data: Dataset, count: int, how: str, channels: Channels) -> Dataset:
    """Return joined arrays normalised by the first `count` of them, the training examples."""
    if how in ("none", "source"):
        return data
    if not isinstance(data.x, Tensor) or not data.x.is_floating_point():
        raise DataError(
            f"normalize = {how!r} is for one array of numbers.",
            got="several inputs" if isinstance(data.x, dict) else "tokens",
            do="scale them before, or in the model",
        )
    x = data.x.clone()
    halves = x[:count], x[count:]
    if how == "client":
        if data.client is None:
            raise DataError(
                "normalize = 'client' scales each client's examples by themselves.",
                got="examples that name no client",
                do="name the clients, or set normalize = 'standardize'",
            )
        index = data.client[:count], data.client[count:]
        scales = normalise_clients(*halves, *index, channels=channels)
        named = {data.clients[k]: scale.recorded() for k, scale in scales.items()}
        return replace(data, x=x, client_scales=named)
    scale = normalise(*halves, how, channels=channels)
    return replace(data, x=x, scale=None if scale is None else scale.recorded())
