"""What crosses the network: named tensors and a few plain values, in Flower's records.

Whoever receives knows what to expect, by name, shape and type, and takes nothing else. Tensors are
read from their bytes: nothing that was received is unpickled or evaluated, and no memory is taken
for more than what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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

FORMAT = 2
"""Version of the messages; another one is refused."""

HEADER = 4096
"""Bytes that the description of an array may take before its numbers."""

HEAD, TENSORS = "head", "tensors"

_MAGIC = np.lib.format.magic(1, 0)
_FORM = re.compile(
    rb"\{'descr': '([<>|=][A-Za-z?][0-9]*)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19},)?|[0-9]{1,19}(?:, [0-9]{1,19})+)\), \} *\n"
)
"""What numpy writes before an array's numbers. Its own reader takes any Python literal, and raises
errors of many kinds."""


class WireError(FedkeelError):
    """A message that is not what it should be."""

    def short(self) -> str:
        """Return it in one line, for the record."""
        return self.what + (f" got {self.got}" if self.got is not None else "")


class Head(Settings):
    """What every message and reply says of itself, beyond its tensors.

    Args:
        format: version of the messages.
        run: what the server calls the run: its key, and a number of its own.
        round: rounds completed before this one.
    """

    format: int
    run: str
    round: int

    def record(self) -> ConfigRecord:
        """Return the values as a record."""
        return ConfigRecord({k: _plain(v) for k, v in self.model_dump().items()})

    @classmethod
    def read(cls, content: RecordDict) -> Self:
        """Return the values of a received message.

        Raises:
            WireError: a value is missing, unknown or of another type.
        """
        record = content.get(HEAD)
        if not isinstance(record, ConfigRecord):
            raise WireError("A message has no head.", got=f"records {sorted(content)[:4]}")
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
            name = ".".join(str(part) for part in first["loc"]) or "head"
            raise WireError(f"A message's {name!r:.40} is wrong.", why=first["msg"]) from None


class Order(Head):
    """What a node is told to do.

    Args:
        terms: digest of what server and nodes have to agree on.
        data: digest of the node's data, as the run began with them.
        lr: local learning rate of the round.
        clients: which clients are meant.
        done: local steps that each has made.
        kept: the round after which each one's state was last taken by the server; 0 for none.
        digest: digest of that state, "" for none.
        back: the same round at the server's last checkpoint, to which it may go back.
    """

    terms: str
    data: str
    lr: float
    clients: tuple[int, ...]
    done: tuple[int, ...]
    kept: tuple[int, ...]
    digest: tuple[str, ...]
    back: tuple[int, ...]


class Answer(Head):
    """What a node says of its clients, one entry for each.

    Args:
        clients: which clients.
        status: "ok", "restarted" (trained without what it had kept), "lost" (not trained, because
            what it had kept is gone), or what went wrong, in words.
        steps: local steps made.
        seen: examples processed.
        digest: digest of what the client now keeps, "" for nothing.
    """

    clients: tuple[int, ...]
    status: tuple[str, ...]
    steps: tuple[int, ...]
    seen: tuple[int, ...]
    digest: tuple[str, ...]


def of_client(name: str, client: int) -> str:
    """Return the name of one client's record.

    >>> of_client("tensors", 3)
    'tensors-3'
    """
    return f"{name}-{client}"


def pack(state: Mapping[str, Tensor | State]) -> ArrayRecord:
    """Return a state as a record: one array for each tensor, by path, row after row."""
    rows = {path: t.detach().cpu().contiguous().numpy() for path, t in walk(state)}
    return ArrayRecord({path: Array(array) for path, array in rows.items()})


def unpack(content: RecordDict, name: str, spec: Mapping[str, TensorSpec]) -> State:
    """Return the state of a received record, in memory of torch's own.

    Args:
        content: the message.
        name: name of the record.
        spec: shape and type of every tensor that is expected, by path, in the order that the state
            will have: sums over tensors depend on it.

    Raises:
        WireError: a tensor is missing, unknown, or has another shape or type.
    """
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise WireError(f"A message has no tensors {name!r}.", got=f"{sorted(content)[:4]}")
    if set(record) != set(spec):
        missing, more = set(spec) - set(record), set(record) - set(spec)
        raise WireError(
            "A message has other tensors than it should have.",
            got=f"{len(more)} unknown, such as {min(more)!r:.60}" if more else "fewer",
            expected=f"also {min(missing)!r}" if missing else f"{len(spec)} known ones",
        )
    return unwalk({path: _tensor(path, record[path], one) for path, one in spec.items()})


def _tensor(path: str, array: Array, spec: TensorSpec) -> Tensor:
    """Return a tensor of exactly the expected form, read from its bytes."""
    out = torch.empty(spec.shape, dtype=spec.dtype)
    expected = f"{list(spec.shape)} {_numpy(spec.dtype)}"
    data = array.data
    if array.stype != "numpy.ndarray" or len(data) > spec.nbytes + HEADER:
        raise WireError(
            f"The tensor {path!r} is too large, or of an unknown kind.",
            got=f"{len(data)} bytes of {array.stype!r:.40}",
            expected=expected,
        )
    found = _form(data)
    if found is None:
        raise WireError(
            f"The tensor {path!r} cannot be read.", got="a header that numpy does not write"
        )
    shape, fortran, dtype, start = found
    body = memoryview(data)[start:]
    if shape != spec.shape or dtype != _numpy(spec.dtype).str or len(body) != spec.nbytes:
        raise WireError(
            f"The tensor {path!r} has another form.",
            got=f"{list(shape)} {dtype}, {len(body)} bytes"[:120],
            expected=expected,
        )
    if spec.nbytes:
        order: Literal["C", "F"] = "F" if fortran else "C"
        rows = np.frombuffer(body, dtype=dtype).reshape(shape, order=order)
        out.copy_(torch.from_numpy(rows.copy()))
    return out


def _form(data: bytes) -> tuple[tuple[int, ...], bool, str, int] | None:
    """Return shape, whether by columns, type, and where the numbers begin; None if damaged."""
    start = len(_MAGIC) + 2
    if data[: len(_MAGIC)] != _MAGIC:
        return None
    end = start + int.from_bytes(data[start - 2 : start], "little")
    found = _FORM.fullmatch(data[start:end]) if end - start <= HEADER else None
    if found is None:
        return None
    shape = tuple(int(word) for word in found[3].split(b",") if word)
    return shape, found[2] == b"True", found[1].decode(), end


def values(content: RecordDict, name: str, expected: set[str]) -> dict[str, float]:
    """Return the numbers of a received record.

    Raises:
        WireError: one is missing, unknown, or not a single number.
    """
    record = content.get(name)
    found = dict(record) if isinstance(record, MetricRecord) else {}
    if set(found) != expected or any(isinstance(v, list) for v in found.values()):
        raise WireError(
            f"A message's numbers {name!r} are wrong.",
            got=f"{sorted(found)[:4]}",
            expected=f"{sorted(expected)[:4]}",
        )
    return {k: float(v) for k, v in found.items() if not isinstance(v, list)}


def _numpy(dtype: torch.dtype) -> np.dtype[np.generic]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _plain(value: object) -> int | float | str | list[int] | list[str]:
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, (int, float, str)):
        raise TypeError(f"a field of a head is a {type(value).__name__}")
    return value
