"""The inputs of all sources: brought to one shape, encoded, joined and normalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeel.base.memory import format_bytes, free_memory
from fedkeel.config import Data
from fedkeel.data.dataset import ScalePair, cast_inputs
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.images import shape_text, write_images
from fedkeel.data.read.join import Clients, Source, common_shape, with_same_categories
from fedkeel.data.read.scaling import (
    Scale,
    check_channels,
    measure_scale,
    normalise,
    normalise_clients,
)
from fedkeel.data.table_schema import TableSchema
from fedkeel.errors import DataError, counted


@dataclass(frozen=True)
class Inputs:
    """The inputs of both halves, and what was done to them. N and M examples.

    Args:
        train: [N, ...] float32.
        test: [M, ...] float32.
        scale: what all were standardised by, None where there is no such scale.
        client_scales: what each client's were, where clients were standardised apart.
        schema: what the columns of tables became, None of anything else.
    """

    train: Tensor
    test: Tensor
    scale: ScalePair | None = None
    client_scales: dict[str, ScalePair] = field(default_factory=dict)
    schema: TableSchema | None = None


def make_inputs(
    sources: Sequence[Source],
    settings: Data,
    clients: tuple[Clients, Clients],
    is_one_of_many: bool = False,
) -> tuple[list[Source], Inputs]:
    """Return the sources with what became of them, and their inputs.

    Args:
        sources: with the same columns.
        settings: how inputs are made ready.
        clients: of both halves, the clients where each is standardised by its own inputs.
        is_one_of_many: whether other nodes have more of the data.

    Raises:
        DataError: they do not fit each other, or memory.
    """
    columns = sources[0].train.columns
    may_have_gaps = settings.missing != "refuse"
    sources, categories = with_same_categories(sources, settings.categories_of, may_have_gaps)
    train, test, scale = _joined(sources, settings)
    schema, binary = None, None
    if columns:
        schema = TableSchema.of(
            train,
            columns,
            categories,
            settings.missing,
            settings.label,
            settings.drop,
            is_one_of_many,
        )
        _check_memory(len(train) + len(test), (len(schema.inputs),), train.dtype)
        train, test = schema.inputs_of(train), schema.inputs_of(test)
        columns, binary = schema.inputs, schema.is_binary
    is_image = any(half.is_image for source in sources for half in source.halves)
    check_channels(train.shape[1:], settings.channels, is_image, "channels")
    client_scales: dict[str, ScalePair] = {}
    if settings.normalize == "client":
        (names, index), (_, test_index) = ((c.names, c.index) for c in clients)
        scales = normalise_clients(train, test, index, test_index, binary, settings.channels)
        client_scales = {names[k]: scale.recorded() for k, scale in scales.items()}
    else:
        how, channels = settings.normalize, settings.channels
        scale = normalise(train, test, how, binary, channels) or scale
    do = 'normalize = "standardize" in [data], or divide the column by a large number'
    train, test = (cast_inputs(x, torch.float32, columns, do) for x in (train, test))
    recorded = None if scale is None else scale.recorded()
    return list(sources), Inputs(train, test, recorded, client_scales, schema)


def _joined(sources: Sequence[Source], settings: Data) -> tuple[Tensor, Tensor, Scale | None]:
    """Return the inputs of both halves, resized and joined, and the published scale of a set."""
    scale: Scale | None = None
    shape = common_shape(sources, settings.shape)
    first = sources[0].train
    needs_double = not first.is_image and any(
        half.x.dtype == torch.float64 for source in sources for half in source.halves
    )
    dtype = torch.float64 if needs_double else torch.float32
    _check_memory(sum(len(half) for s in sources for half in s.halves), shape, dtype)
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
    return train, test, scale


def _check_memory(examples: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse inputs that do not fit into memory, such as images that `data.shape` enlarges."""
    needed, free = examples * math.prod(shape) * dtype.itemsize, free_memory()
    if free is not None and needed > free:
        raise DataError(
            "The inputs do not fit into memory.",
            got=f"{counted(examples, 'input')} of shape {shape_text(shape)}, "
            f"{format_bytes(needed)}",
            expected=f"at most {format_bytes(free)}, which are free",
            do="set a smaller data.shape, or take fewer examples with data.limit",
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
