"""Encoding of messages: named tensors and a few plain values, in Flower's records.

A receiver knows which names, shapes and types to expect, and accepts nothing else. Tensors are read
from their bytes: nothing that was received is unpickled or evaluated, and no memory is allocated
for more than what is expected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import ValidationError
from torch import Tensor

from fedkeel.config import Settings
from fedkeel.engine.spec import TensorSpec
from fedkeel.errors import FedkeelError
from fedkeel.tree import State, unwalk, walk

FORMAT = 3
"""Version of the messages. Another version is refused."""

MAX_ARRAY_HEADER = 4096
"""Bytes that the description of an array may take before its numbers."""

HEADER, TENSORS, DIAGNOSTICS, SCORES = "header", "tensors", "diagnostics", "scores"
"""Names of the records of a message; the last three are also the first part of a client's own."""

_MAGIC = np.lib.format.magic(1, 0)
_ARRAY_HEADER = re.compile(
    rb"\{'descr': '([<>|=][A-Za-z?][0-9]*)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19},)?|[0-9]{1,19}(?:, [0-9]{1,19})+)\), \} *\n"
)
"""What numpy writes before an array's numbers. numpy's own reader accepts any Python literal and
raises errors of many kinds."""


class WireError(FedkeelError):
    """A received message is not what it should be."""

    def short(self) -> str:
        """Return the error in one line, for the round record."""
        return self.what + (f" got {self.got}" if self.got is not None else "")


class Header(Settings):
    """The plain values of every message and reply.

    Args:
        format: version of the messages.
        run: the server's name for the run: its key, and a random number.
        round: rounds completed before this one.
    """

    format: int
    run: str
    round: int

    def record(self) -> ConfigRecord:
        """Return the values as a record."""
        values = self.model_dump()
        return ConfigRecord({k: list(v) if isinstance(v, tuple) else v for k, v in values.items()})

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
        try:
            return cls.model_validate(dict(record))
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
    dtype = tensor.numpy().dtype
    expected = f"{list(spec.shape)} {dtype}"
    data = array.data
    if array.stype != "numpy.ndarray" or len(data) > spec.nbytes + MAX_ARRAY_HEADER:
        raise WireError(
            f"The tensor {path!r} is too large, or of an unknown kind.",
            got=f"{len(data)} bytes of {array.stype!r:.40}",
            expected=expected,
        )
    header = _array_header(data)
    if header is None:
        raise WireError(
            f"The tensor {path!r} cannot be read.", got="a header that numpy does not write"
        )
    body = memoryview(data)[header.size :]
    if (header.shape, header.dtype, len(body)) != (spec.shape, dtype.str, spec.nbytes):
        raise WireError(
            f"The tensor {path!r} has another shape or type.",
            got=f"{list(header.shape)} {header.dtype}, {len(body)} bytes"[:120],
            expected=expected,
        )
    if spec.nbytes:
        values = np.frombuffer(body, dtype=dtype).reshape(spec.shape, order=header.order)
        tensor.copy_(torch.from_numpy(values.copy()))
    return tensor


@dataclass(frozen=True)
class _ArrayHeader:
    """The description of an array: its shape, type, order in memory, and its own bytes."""

    shape: tuple[int, ...]
    dtype: str
    order: Literal["C", "F"]
    size: int


def _array_header(data: bytes) -> _ArrayHeader | None:
    """Return the description of an array, None where it is damaged."""
    start = len(_MAGIC) + 2
    if data[: len(_MAGIC)] != _MAGIC:
        return None
    end = start + int.from_bytes(data[start - 2 : start], "little")
    match = _ARRAY_HEADER.fullmatch(data[start:end]) if end - start <= MAX_ARRAY_HEADER else None
    if match is None:
        return None
    shape = tuple(int(size) for size in match[3].split(b",") if size)
    return _ArrayHeader(shape, match[1].decode(), "F" if match[2] == b"True" else "C", end)


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
