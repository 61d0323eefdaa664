"""The common part of stores in memory and on disk: slots, and which client has which slot."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.buffers import TensorBuffers
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.layout import HEADER, row_layout
from fedkeel.engine.store.record import ClientRecord, RowCodec, Value
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart, Ints
from fedkeel.tree import State, Tree, unwalk

Arrays = Mapping[str, NDArray[Any]]
EncodedRows = Mapping[str, Sequence[Tensor]]
"""By path the tensors [K, ...] that lie one after another in each of K rows."""

ReadEntries = Callable[[str, int], Tensor]
"""(path, count) -> the first entries at a path of one row, [count]."""

INDEX, SLOT, CHECKSUM, ROW_BYTES, STATE = "index", "slot", "checksum", "bytes", "state/"
"""Names of arrays in a checkpoint; `STATE` is a prefix."""

OLD_HEADER = "@sides"
"""Earlier name of `HEADER` in checkpoints."""

NO_SLOT = -1
"""Slot of a client that has no row."""


class ClientStore(ABC):
    """Rows of named tensors for C clients; a client gets a slot when its row is written.

    A new row is written into a free slot, by the process that trains the client. It becomes the
    client's row when the process that reserved the slot commits it; until then the client has its
    previous row. Slots that clients have left are used again, the lowest first. So the store holds
    the clients that took part and the rows that are being written. Processes that hold the same
    store see the same rows; one of them reserves and commits.

    Args:
        spec: shape and type of each tensor of a row, by path.
        clients: C.
        allocate: provides memory, which other processes may have to see.
        codec: stores some tensors of a row in compact form; None stores all tensors as they are.
    """

    def __init__(
        self,
        spec: Mapping[str, TensorSpec],
        clients: int,
        allocate: Allocate,
        codec: RowCodec | None = None,
    ) -> None:
        scalar = TensorSpec((), torch.int64)
        self._table = TensorBuffers({"slot": scalar, "reserved": scalar}, clients, allocate)
        self._codec, self._layout = codec, row_layout(spec, codec)
        self._clear()

    def _clear(self) -> None:
        self._slots[:] = self._reserved_slots[:] = NO_SLOT
        self._reserved_clients: Ints = np.array([], dtype=np.int64)
        self._slot_count = 0  # slots that were ever given out
        self._free_slots: list[int] = []  # a heap

    @property
    def _slots(self) -> Ints:
        """[C] slot of each client's row."""
        return np.asarray(self._table.tensors["slot"].numpy())

    @property
    def _reserved_slots(self) -> Ints:
        """[C] slot into which each client's next row is written."""
        return np.asarray(self._table.tensors["reserved"].numpy())

    @property
    def has_row(self) -> NDArray[np.bool_]:
        """[C] whether a client has a row."""
        return np.asarray(self._slots != NO_SLOT)

    # ---- reading ----------------------------------------------------------------------------

    def read_rows(self, clients: Ints) -> State:
        """Return the rows [K, ...] of clients, a copy; zeros for clients without a row.

        Raises:
            ValueError: the store has a codec, so rows differ in form.
            RunError: the disk fails.
        """
        if self._codec is not None:
            raise ValueError("rows of a store with a codec differ in form; read them one by one")
        return unwalk(self._read_slots(self._slots[clients]))

    @abstractmethod
    def _read_slots(self, slots: Ints) -> Tree:
        """Return the rows [K, ...] of slots by path, a copy; zeros for `NO_SLOT`."""

    def read(self, client: int) -> ClientRecord | None:
        """Return one client's record, None where it has none. It must not be written to.

        Raises:
            RunError: the disk fails.
        """
        slot = int(self._slots[client])
        return None if slot == NO_SLOT else ClientRecord(self._read_slot(slot))

    def read_state(self, client: int) -> ByPart | None:
        """Return one client's state by part, with dense tensors. See `read`."""
        record = self.read(client)
        return None if record is None else record.state

    def _read_slot(self, slot: int) -> dict[str, Value]:
        """Return the values of a slot by path, in the order of the spec."""
        values: dict[str, Value] = {}
        with self._open_slot(slot) as read:
            headers = {}
            if self._codec is not None:
                numbers = read(HEADER, len(self._codec.paths)).tolist()
                headers = dict(zip(self._codec.paths, numbers, strict=True))
            for path, spec in self._layout.spec.items():
                if path == HEADER:
                    continue
                if self._codec is not None and (header := headers.get(path, 0)):
                    entries = read(path, self._codec.entries(header, spec))
                    values[path] = self._codec.decode(header, entries, spec)
                else:
                    values[path] = read(path, math.prod(spec.shape)).view(spec.shape)
        return values

    @abstractmethod
    def _open_slot(self, slot: int) -> AbstractContextManager[ReadEntries]:
        """Open a slot for reading."""

    # ---- writing ----------------------------------------------------------------------------

    def reserve(self, clients: Ints) -> None:
        """Reserve slots for the next rows of clients [K], all different; drop earlier reservations.

        Raises:
            RunError: the disk fails, or is full.
        """
        self._release_reserved(self._reserved_clients)
        count = len(clients)
        reused = [heapq.heappop(self._free_slots) for _ in range(min(count, len(self._free_slots)))]
        new = range(self._slot_count, self._slot_count + count - len(reused))
        self._slot_count = new.stop
        self._reserved_slots[clients] = [*reused, *new]
        self._reserved_clients = clients

    def write(self, clients: Ints, record: ClientRecord) -> None:
        """Write rows [K, ...] into the reserved slots of clients; they may be written again.

        Raises:
            RunError: the disk fails, or is full.
        """
        self._write_slots(self._slots_reserved_for(clients), self._encode(record, len(clients)))

    def _encode(self, record: ClientRecord, count: int) -> EncodedRows:
        """Return the tensors that `count` rows hold, with the codec's header."""
        tensors: dict[str, Sequence[Tensor]] = {}
        headers = {} if self._codec is None else dict.fromkeys(self._codec.paths, 0)
        for path, value in record.values.items():
            if isinstance(value, Tensor):
                tensors[path] = (value,)
            elif self._codec is None:
                tensors[path] = (value.dense(),)
            else:
                headers[path], tensors[path] = self._codec.encode(value)
        if headers:
            tensors[HEADER] = (torch.tensor([list(headers.values())] * count),)
        return tensors

    @abstractmethod
    def _write_slots(self, slots: Ints, rows: EncodedRows) -> None:
        """Write rows [K, ...] into slots [K]."""

    def commit(self, clients: Ints) -> None:
        """Make the written rows of clients their current rows; drop all other reservations."""
        before, after = self._slots[clients], self._slots_reserved_for(clients)
        self._slots[clients] = after
        self._reserved_slots[clients] = NO_SLOT
        for slot in before[before != NO_SLOT].tolist():
            self._free(slot)
        reserved = self._reserved_clients
        self._release_reserved(reserved[self._reserved_slots[reserved] != NO_SLOT])
        self._reserved_clients = np.array([], dtype=np.int64)

    def replace(self, clients: Ints, record: ClientRecord) -> None:
        """Replace the rows [K, ...] of clients: all of them, or none where the disk fails.

        Raises:
            RunError: the disk fails, or is full.
        """
        self.reserve(clients)
        self.write(clients, record)
        self.commit(clients)

    def _slots_reserved_for(self, clients: Ints) -> Ints:
        slots = self._reserved_slots[clients]
        if (slots == NO_SLOT).any():
            raise ValueError(f"no slot is reserved for client {clients[slots == NO_SLOT][0]}")
        return np.asarray(slots)

    def _release_reserved(self, clients: Ints) -> None:
        """Free the slots that are reserved for clients."""
        for slot in self._reserved_slots[clients].tolist():
            heapq.heappush(self._free_slots, slot)
        self._reserved_slots[clients] = NO_SLOT

    def _free(self, slot: int) -> None:
        """Free a slot that a client has left."""
        heapq.heappush(self._free_slots, slot)

    # ---- checkpoints ------------------------------------------------------------------------

    @abstractmethod
    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of a checkpoint: `INDEX`, the clients that have rows, and more."""

    @abstractmethod
    def snapshot_saved(self) -> None:
        """Learn that the checkpoint of the last snapshot is complete, and the one before gone."""

    @abstractmethod
    def restore(self, arrays: Arrays) -> None:
        """Take the rows of a checkpoint, and forget all others.

        Raises:
            RunError: rows of the checkpoint are missing in the file.
        """

    def _restore_rows(self, arrays: Arrays) -> None:
        """Write the rows of a checkpoint that holds the rows themselves."""
        clients = np.asarray(arrays[INDEX], dtype=np.int64)
        rows: dict[str, Sequence[Tensor]] = {
            name.removeprefix(STATE): (torch.from_numpy(np.asarray(array)),)
            for name, array in arrays.items()
            if name.startswith(STATE)
        }
        if OLD_HEADER in rows:
            rows[HEADER] = rows.pop(OLD_HEADER)
        if self._codec is None and HEADER in rows and rows[HEADER][0].any():
            raise RunError(
                "The state of the clients cannot be read.",
                got="a checkpoint with low-rank rows, and an engine that cannot read them",
            )
        if self._codec is not None:
            rows.setdefault(HEADER, (torch.zeros(len(clients), len(self._codec.paths)),))
        self.reserve(clients)
        self._write_slots(self._slots_reserved_for(clients), rows)
        self.commit(clients)
