"""Making new inputs ready as those that a model was trained on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.named_files import expanded
from fedkeel.base.values import Values, only_tensor, shape_of
from fedkeel.config import Data
from fedkeel.data.dataset import dataset
from fedkeel.data.read.arrays import read_inputs
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.folders import read_new_images
from fedkeel.data.read.images import shape_text, write_images
from fedkeel.data.read.new_rows import is_table, read_new_rows
from fedkeel.data.read.new_texts import TextReader
from fedkeel.data.read.scaling import CONSTANT, Scale
from fedkeel.data.table_schema import Column, Missing, TableSchema
from fedkeel.data.user_arrays import as_tokens
from fedkeel.data.value_ranges import is_place_count, place_count
from fedkeel.errors import DataError, counted, did_you_mean
from fedkeel.records import run_record
from fedkeel.records.run_record import DataRecord
from fedkeel.task.predict.far_values import Scales, UsualValues, odd_values

NODES = "nodes"
"""The value of ``data.source`` where only the nodes of a federation have the data."""

Examples = Any
"""What `InputPreparation.apply` takes."""


@dataclass(frozen=True)
class NewInputs:
    """New inputs, made ready. N examples.

    Args:
        x: [N, ...] inputs as the model takes them.
        others: columns of a table that are not inputs, or the names of files, [N] texts each.
        warnings: what a user should know about them.
        resized: what was resized to the size of the training images, in words; "" for nothing.
    """

    x: Values
    others: dict[str, list[str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    resized: str = ""


@dataclass(frozen=True)
class InputPreparation:
    """What was done to the inputs of a run before it trained on them.

    Args:
        shape: shape of one input; of each by name, where there are several.
        dtype: type of the inputs that the model takes.
        schema: the columns of a table, None of anything else.
        scale: what inputs were standardised by, None where there is no such scale.
        client_scales: the same of each client by name, where each has its own.
        ranges: of each input by name the lowest and the highest values of the training, [F] each,
            as the model takes them; "" names a single one. Empty where they are not known.
        client_column: the column that says whose a row is, None where none does.
        is_of_files: whether the run has read files, of which all inputs are float32 first.
        whole: for each input by name whether it was whole numbers, such as tokens; "" names a
            single one. Empty where the run does not say.
        is_scaled_on_nodes: whether each node of a federation standardised its inputs by numbers
            that only it knows.
        resizes: whether images of any size were brought to the size of the training.
        texts: how text becomes inputs, None where the model was not trained on text.
    """

    shape: tuple[int, ...] | dict[str, tuple[int, ...]]
    dtype: torch.dtype
    schema: TableSchema | None = None
    scale: Scale | None = None
    client_scales: Mapping[str, Scale] = field(default_factory=dict)
    ranges: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    client_column: str | None = None
    is_of_files: bool = False
    whole: Mapping[str, bool] = field(default_factory=dict)
    is_scaled_on_nodes: bool = False
    resizes: bool = False
    texts: TextReader | None = None

    @classmethod
    def of(cls, record: DataRecord, settings: Data | None, dtype: torch.dtype) -> InputPreparation:
        """Return the preparation of a run.

        Args:
            record: what the run says of its data.
            settings: the settings of its data, None of a run from Python.
            dtype: type of the model's inputs.

        Raises:
            DataError: each known set was standardised apart, and nothing says of which set an input
                is.
        """
        if settings is not None and settings.normalize == "source" and record.scale is None:
            names = settings.sources
            known = [name for name in names if name in SOURCES and name != "digits"]
            if known and len(names) > 1:
                raise DataError(
                    "Each source of the run was standardised by numbers of its own.",
                    got=", ".join(names),
                    why="the run does not record them",
                    do='train with normalize = "standardize" in [data]',
                )
        shape = {name: tuple(side) for name, side in record.inputs.items()}
        nodes = settings if settings is not None and settings.source == NODES else None
        return cls(
            shape or tuple(record.shape),
            dtype,
            _schema(record, nodes),
            None if record.scale is None else _scale(record.scale),
            {name: _scale(scale) for name, scale in record.client_scales.items()},
            _ranges(record),
            None if settings is None else settings.client,
            settings is not None,
            {name: kind == "int64" for name, kind in record.types.items()},
            nodes is not None
            and nodes.normalize in ("client", "pixels")
            and record.types.get("") != "int64"
            and not record.inputs,  # several inputs are never standardised
            settings is not None and settings.shape is not None,
        )

    def of_client(self, client: str) -> InputPreparation:
        """Return the preparation of one client's inputs."""
        if client not in self.client_scales:
            return self
        return replace(self, scale=self.client_scales[client], client_scales={})

    def apply(
        self, value: Examples, name: str = "the examples", client: str | None = None
    ) -> NewInputs:
        """Make new inputs ready.

        Args:
            value: path of a table, of an ``.npz`` file with an array ``x``, of an image or of a
                folder of images; a frame of pandas or another table; or inputs [N, ...] as they
                were before they were standardised, or several by name. Of a model of text what
                `fedkeel.data.read.new_texts.ACCEPTED` names, or tokens by name.
            name: what to call them in messages.
            client: whose examples these are, where each client's inputs were standardised apart
                and no column says so.

        Raises:
            DataError: they cannot be read, or do not fit the model.
        """
        if self.is_scaled_on_nodes:
            raise DataError(
                f"{name}: it is not known how to standardise them.",
                why="each node standardised its inputs by its own mean and deviation, which the "
                "run does not have",
                do="scale them by scale-CLIENT-KEY.json in the state folder of a node, and give "
                'them to fedkeel.load(RUN).module; or train with data.normalize = "standardize"',
            )
        inputs = self._read(value, name)
        if shape_of(inputs.x) != self.shape:
            wanted = self.shape if isinstance(self.shape, dict) else shape_text(self.shape)
            got = shape_of(inputs.x)
            raise DataError(
                f"{name}: the inputs have another shape than those of the training.",
                got=got if isinstance(got, dict) else shape_text(got),
                expected=wanted,
            )
        if self.scale is None and not self.client_scales:
            scales: Scales = ()
            x = inputs.x
        else:
            raw = only_tensor(inputs.x, "standardising")
            scales, x = self._scales(raw, inputs, name, client), raw.clone()
            for rows, scale in scales:
                x[rows] = scale.applied(raw[rows])
        warnings = (*inputs.warnings, *self._odd_values(inputs.x, x, scales, name))
        return self._cast(replace(inputs, x=x, warnings=warnings))

    def _odd_values(self, raw: Values, x: Values, scales: Scales, name: str) -> Iterator[str]:
        """Yield a warning of each input with values unlike those of the training."""
        before, ready = (of if isinstance(of, dict) else {"": of} for of in (raw, x))
        is_table = self.schema is not None
        for key, values in ready.items():
            if not values.is_floating_point():
                continue
            if key in self.ranges:
                usual = UsualValues.of_range(*self.ranges[key], is_table, bool(scales))
            elif scales:
                channels = len(scales[0][1].mean)
                count = place_count(values.shape[1:], channels, is_table)
                usual = UsualValues.by_deviation(count, is_table)
            else:
                continue
            what = f"{name}: {key}" if key else name
            yield from odd_values(before[key], values, usual, scales, self.schema, what)

    def _read(self, value: Examples, name: str) -> NewInputs:
        """Return inputs before they are standardised."""
        if self.texts is not None and not self._are_by_name(value):
            texts = self.texts.read(value, name)
            labels = np.zeros(len(next(iter(texts.x.values()))), np.int64)
            data = dataset(texts.x, labels, classes=1, name=name, tokens=True)
            return NewInputs(data.x, texts.others, texts.warnings)
        if is_table(value):
            if self.schema is None:
                raise DataError(
                    f"{name} is a table, and the model was not trained on tables.",
                    expected=f"inputs of shape {self.shape}",
                    why="the training data had no names of columns",
                    do="give arrays or a .npz file, with inputs in the order of the training",
                )
            rows = read_new_rows(value, name, self.schema)
            return NewInputs(rows.x, rows.others, rows.warnings)
        if isinstance(value, (str, os.PathLike)):
            path = expanded(value)
            if path.suffix.lower() == ".npz":
                return self._as_images(read_inputs(path), name)
            files, x, sizes = read_new_images(path, self._image_shape(path))
            return self._resized(NewInputs(x, {"file": files}), sizes, name)
        is_whole = isinstance(value, Tensor) and value.dtype == torch.int64
        tokens = self.whole.get("", is_whole)
        count = len(next(iter(value.values()))) if isinstance(value, Mapping) else len(value)
        labels = np.zeros(count, np.int64)
        return NewInputs(dataset(value, labels, classes=1, name=name, tokens=tokens).x)

    def _are_by_name(self, value: Examples) -> bool:
        """Return whether these are the inputs by name, such as tokens, and no text."""
        if not isinstance(value, Mapping) or not isinstance(self.shape, dict):
            return False
        return self.shape.keys() <= value.keys()

    @property
    def _expected(self) -> str:
        """What new inputs are to be, in words."""
        if self.schema is not None:
            return "a table with the columns of the training: a .csv or .parquet file, or a frame"
        if isinstance(self.shape, dict):
            each = ", ".join(f"{key!r} [N, {shape_text(side)}]" for key, side in self.shape.items())
            return f"in Python, a mapping with the inputs by name: {each}"
        images = ", an image or a folder of images" if len(self.shape) == 3 else ""
        return f"a .npz file with an array x [N, {shape_text(self.shape)}]{images}"

    def _image_shape(self, path: Path) -> tuple[int, int, int]:
        """Return (channels, height, width) of the training images, to which a file is brought."""
        if isinstance(self.shape, dict) or len(self.shape) != 3:
            is_not = "is not a .csv or .parquet" if self.schema is not None else "is not an .npz"
            if isinstance(self.shape, dict):
                is_not = "cannot be taken: the model has several inputs, and reads no"
            if not path.exists():
                raise DataError(f"There is no file {str(path)!r}.", do="check the path")
            got = "a folder" if path.is_dir() else f"a file that ends in {path.suffix!r}"
            raise DataError(f"{path} {is_not} file.", got=got, expected=self._expected)
        channels, height, width = self.shape
        return channels, height, width

    def _as_images(self, x: Tensor, name: str) -> NewInputs:
        """Return images in the shape of the training; other inputs as they are."""
        if x.ndim != 4 or isinstance(self.shape, dict) or len(self.shape) != 3:
            return NewInputs(x)
        out = torch.empty((len(x), *self.shape))
        write_images(out, x, name)
        return self._resized(NewInputs(out), [(x.shape[2], x.shape[3])] * len(x), name)

    def _resized(self, inputs: NewInputs, sizes: Sequence[tuple[int, int]], name: str) -> NewInputs:
        """Return images that were of these (height, width), with a warning where that is new."""
        height, width = only_tensor(inputs.x, "an image").shape[2:]
        other = [row for row, size in enumerate(sizes) if size != (height, width)]
        if not other:
            return inputs
        some = f"{counted(len(other), 'image')} of {' x '.join(map(str, sizes[other[0]]))} pixels"
        some += " or of other sizes" if len({sizes[row] for row in other}) > 1 else ""
        warning = (
            f"{name}: {some} {'was' if len(other) == 1 else 'were'} resized to {height} x {width}, "
            "the size of the training images: see whether those were resized too, or cut out"
        )
        return replace(inputs, warnings=() if self.resizes else (warning,), resized=some)

    def _clients(self, inputs: NewInputs, name: str, client: str | None) -> list[str]:
        """Return whose each example is."""
        if client is not None:
            return [client] * len(only_tensor(inputs.x, "standardising"))
        if self.client_column in inputs.others:
            return inputs.others[str(self.client_column)]
        raise DataError(
            f"{name}: it is not known whose examples these are.",
            why="each client's inputs were standardised by its own mean and deviation",
            do=f"say so: client=, --client; {did_you_mean('', self.client_scales)}",
        )

    def _scales(self, x: Tensor, inputs: NewInputs, name: str, client: str | None) -> Scales:
        """Return by which scale each row is standardised."""
        if self.scale is not None:
            return [(torch.arange(len(x)), self.scale)]
        clients = np.array(self._clients(inputs, name, client))
        scales = []
        for owner in sorted(set(clients.tolist())):
            if owner not in self.client_scales:
                raise DataError(
                    f"{name}: there was no client {owner!r} in the training.",
                    why="each client's inputs were standardised by its own mean and deviation",
                    do=did_you_mean(owner, self.client_scales),
                )
            rows = torch.from_numpy(np.flatnonzero(clients == owner))
            scales.append((rows, self.client_scales[owner]))
        return scales

    def _cast(self, inputs: NewInputs) -> NewInputs:
        """Return inputs in the type that the model takes; whole numbers stay."""
        x = inputs.x
        if isinstance(x, Tensor) and x.is_floating_point():
            x = (x.to(torch.float32) if self.is_of_files else x).to(self.dtype)
        elif isinstance(x, dict):
            x = {name: self._as_trained(name, tensor) for name, tensor in x.items()}
        return replace(inputs, x=x)

    def _as_trained(self, name: str, tensor: Tensor) -> Tensor:
        """Return one of several inputs in the type that it had in training."""
        if self.whole.get(name, not tensor.is_floating_point()):
            return as_tokens(tensor, name) if tensor.is_floating_point() else tensor
        return tensor.to(self.dtype)


def _scale(record: run_record.ScaleRecord) -> Scale:
    """Return the scale of a record, which has a huge deviation for what never varied."""
    scale = Scale.of(tuple(record.mean), tuple(record.deviation))
    constant = scale.std == CONSTANT
    return Scale(scale.mean, torch.where(constant, torch.zeros_like(scale.std), scale.std))


def _ranges(record: DataRecord) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the ranges of a record that fit its inputs."""
    shapes = {name: tuple(side) for name, side in (record.inputs or {"": record.shape}).items()}
    ranges = {}
    for name, ends in record.ranges.items():
        low, high = (torch.tensor(end, dtype=torch.float64) for end in (ends.low, ends.high))
        shape = shapes.get(name)
        if shape is not None and len(low) == len(high) and is_place_count(len(low), shape):
            ranges[name] = (low, high)
    return ranges


def _schema(record: DataRecord, nodes: Data | None) -> TableSchema | None:
    """Return the schema of a table, None of anything else.

    Args:
        record: what the run says of its data.
        nodes: the settings of data that only nodes have, None of other data.
    """
    if nodes is not None and record.columns:
        mean = None if record.scale is None else record.scale.mean
        return TableSchema.of_nodes(record.columns, nodes.categories_of, nodes.missing, mean)
    if not record.schema:
        return None
    columns = tuple(
        Column(
            column["name"],
            tuple(column["categories"]) if "categories" in column else None,
            tuple(column.get("fill", ())),
            column.get("indicator", False),
        )
        for column in record.schema
    )
    has_indicator = any(column.indicator for column in columns)
    fills: Missing = "indicator" if has_indicator else "mean"
    return TableSchema(columns, fills if any(column.fill for column in columns) else "refuse")
