"""Encoding of messages: named tensors and a few plain values, in Flower's records.

A receiver knows which names, shapes and types to expect, and accepts nothing else. A tensor's bytes
begin with the header that numpy writes for the expected shape and type, or the tensor is refused.
So nothing that was received is parsed, unpickled or evaluated, and no memory is allocated for more
than what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import ValidationError
from torch import Tensor

from fedkeel.config import Settings
from fedkeel.engine.spec import TensorSpec
from fedkeel.errors import FedkeelError
from fedkeel.tree import State, unwalk, walk

FORMAT = 4
"""Version of the messages. Another version is refused."""

HEADER, TENSORS, DIAGNOSTICS, SCORES = "header", "tensors", "diagnostics", "scores"
"""Names of the records of a message; the last three are also the first part of a client's own."""

STATES, PLACES = "states", "places"
"""In the record of a client's scores: the sums that make its metrics, and where most of them are 0,
the places of the others."""

NUMBER = 8
"""Bytes of a number of a sum, of a loss or of a diagnostic."""

_MAGIC = np.lib.format.magic(1, 0)


class WireError(FedkeelError):
    """A received message is not what it should be."""

    def short(self) -> str:
        """Return the error in one line, for the round record."""
        return self.what + (f" got {self.got}" if self.got is not None else "")


class Header(Settings):
    """The plain values of a message or reply.

    Args:
        run: the server's name for the run: its key, and a random number.
        round: rounds completed before this one.
    """

    run: str = ""
    round: int = 0

    def record(self) -> ConfigRecord:
        """Return the values as a record."""
        return ConfigRecord({"format": FORMAT, "values": self.model_dump_json()})

    @classmethod
    def read(cls, content: RecordDict) -> Self:
        """Return the values of a received message.

        Raises:
            WireError: a value is missing, unknown or of another type.
        """
        record = content.get(HEADER)
        if not isinstance(record, ConfigRecord):
            raise WireError("A message has no header.", got=f"records {sorted(content)[:4]}")
        if record.get("format") != FORMAT:
            raise WireError(
                "A message was written by another version.",
                got=f"format {record.get('format')!r:.40}",
                expected=f"format {FORMAT}",
                do="install the same version of fedkeel at the server and on every node",
            )
        values = record.get("values")
        try:
            return cls.model_validate_json(values if isinstance(values, str) else "")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(str(part) for part in first["loc"]) or HEADER
            raise WireError(f"A message's {name!r:.40} is wrong.", why=first["msg"]) from None


def of_client(name: str, client: int) -> str:
    """Return the name of one client's record.

    >>> of_client("tensors", 3)
    'tensors-3'
    """
    return f"{name}-{client}"


def pack(state: Mapping[str, Tensor | State]) -> ArrayRecord:
    """Return a state as a record: one contiguous array for each tensor, by path."""
    arrays = {path: t.detach().cpu().contiguous().numpy() for path, t in walk(state)}
    return ArrayRecord({path: Array(array) for path, array in arrays.items()})


def unpack(content: RecordDict, name: str, expected: Mapping[str, TensorSpec]) -> State:
    """Return the state of a received record, in memory of its own.

    Args:
        content: the message.
        name: name of the record.
        expected: shape and type of every tensor, by path. The state gets this order, because sums
            over tensors depend on it.

    Raises:
        WireError: a tensor is missing, unknown, or has another shape or type.
    """
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise WireError(f"A message has no tensors {name!r}.", got=f"{sorted(content)[:4]}")
    if set(record) != set(expected):
        missing, unknown = set(expected) - set(record), set(record) - set(expected)
        raise WireError(
            "A message has other tensors than it should have.",
            got=f"{len(unknown)} unknown, such as {min(unknown)!r:.60}" if unknown else "fewer",
            expected=f"also {min(missing)!r}" if missing else f"{len(expected)} known ones",
        )
    return unwalk({path: _tensor(path, record[path], spec) for path, spec in expected.items()})


def _tensor(path: str, array: Array, spec: TensorSpec) -> Tensor:
    """Return a tensor of exactly the expected shape and type, read from its bytes."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    dtype, data, start = tensor.numpy().dtype, array.data, len(_MAGIC) + 2
    end = start + int.from_bytes(data[start - 2 : start], "little")
    header = data[start:end].decode("latin-1").rstrip(" \n")
    orders: dict[str, Literal["C", "F"]] = {
        _array_header(dtype, spec.shape, fortran=False): "C",
        _array_header(dtype, spec.shape, fortran=True): "F",
    }
    is_numpy = array.stype == "numpy.ndarray" and data[: len(_MAGIC)] == _MAGIC
    if not is_numpy or header not in orders or len(data) - end != spec.nbytes:
        raise WireError(
            f"The tensor {path!r} has another shape or type.",
            got=f"{array.stype:.20} {header[:80]!r} with {len(data) - end} bytes",
            expected=f"{list(spec.shape)} {dtype}",
        )
    if spec.nbytes:
        values = np.frombuffer(memoryview(data)[end:], dtype=dtype)
        tensor.copy_(torch.from_numpy(values.reshape(spec.shape, order=orders[header]).copy()))
    return tensor


def _array_header(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> str:
    """Return what numpy writes before an array's numbers, without padding."""
    return f"{{'descr': {dtype.str!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}"


def numbers(content: RecordDict, name: str, expected: set[str]) -> dict[str, float]:
    """Return the numbers of a received record.

    Raises:
        WireError: one is missing, unknown, or not a single number.
    """
    record = content.get(name)
    values = dict(record) if isinstance(record, MetricRecord) else {}
    if set(values) != expected or any(isinstance(v, list) for v in values.values()):
        raise WireError(
            f"A message's numbers {name!r} are wrong.",
            got=f"{sorted(values)[:4]}",
            expected=f"{sorted(expected)[:4]}",
        )
    return {k: float(v) for k, v in values.items() if not isinstance(v, list)}


def lists(content: RecordDict, name: str, expected: Mapping[str, int]) -> dict[str, list[float]]:
    """Return the lists of numbers of a received record, each of the expected length.

    Raises:
        WireError: one is missing, unknown, or of another length.
    """
    record = content.get(name)
    values = dict(record) if isinstance(record, MetricRecord) else {}
    result = {k: [float(x) for x in v] for k, v in values.items() if isinstance(v, list)}
    if {k: len(v) for k, v in result.items()} != dict(expected) or len(result) != len(values):
        raise WireError(
            f"A message's lists {name!r} are wrong.",
            got=f"{sorted((k, len(v)) for k, v in result.items())[:4]}",
            expected=f"{sorted(expected.items())[:4]}",
        )
    return result


def sums_record(sums: Tensor) -> MetricRecord:
    """Return sums [S] as a record: all of them, or those that are not 0 where these are few."""
    places = sums.nonzero().flatten()
    if 2 * len(places) >= len(sums) or not len(places):
        return MetricRecord({STATES: sums.tolist()})
    return MetricRecord({PLACES: places.tolist(), STATES: sums[places].tolist()})


def sums_nbytes(content: RecordDict) -> int:
    """Return the bytes of the numbers in all sums of a reply, and of their places."""
    records = (record for record in content.values() if isinstance(record, MetricRecord))
    lengths = (len(v) for record in records for v in record.values() if isinstance(v, list))
    return NUMBER * sum(lengths)


def content_nbytes(content: RecordDict) -> int:
    """Return the bytes of what a node's own message holds: tensors, numbers and texts."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in record.values())
        elif isinstance(record, MetricRecord):
            total += NUMBER * sum(len(v) if isinstance(v, list) else 1 for v in record.values())
        else:
            total += sum(len(v) for v in record.values() if isinstance(v, str | bytes))
    return total


def read_sums(content: RecordDict, name: str, size: int) -> Tensor:
    """Return sums [S] of a received record, see `sums_record`.

    Raises:
        WireError: there are others, or their places are none.
    """
    record = content.get(name)
    sent_places = dict(record).get(PLACES) if isinstance(record, MetricRecord) else None
    if not isinstance(sent_places, list):
        return torch.tensor(lists(content, name, {STATES: size})[STATES], dtype=torch.float64)
    numbers_by_name = lists(content, name, {PLACES: len(sent_places), STATES: len(sent_places)})
    places = torch.tensor(numbers_by_name[PLACES], dtype=torch.float64)
    is_place = (places == places.floor()) & (places >= 0) & (places < size)
    if not bool(is_place.all()) or not bool((places.diff() > 0).all()):
        raise WireError(
            f"A message's lists {name!r} are wrong.",
            got="places that do not exist, or in another order",
            expected=f"ascending ones below {size}",
        )
    sums = torch.zeros(size, dtype=torch.float64)
    sums[places.long()] = torch.tensor(numbers_by_name[STATES], dtype=torch.float64)
    return sums
