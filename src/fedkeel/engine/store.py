"""What is remembered of each client: rows by client index, in memory or in a file.

A row comes to be when its client first reports, so what nobody has written costs nothing. In memory
a checkpoint takes the rows along. In a file they stay where they are: a row is never written over
while a checkpoint refers to it, so the checkpoint needs the table of places alone, and the file of
a run that was killed still holds every row of the last checkpoint.
"""

from __future__ import annotations

import heapq
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.buffers import Allocate, Buffers, Layout, Spec, aligned
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart, Ints
from fedkeel.tree import State, branches, unwalk, walk

Arrays = Mapping[str, NDArray[Any]]

SLOT, STATE = "slot", "state/"
NOWHERE = -1
"""Slot of a client that has no row."""


class ClientStore(ABC):
    """Rows of named tensors for C clients.

    Processes that were given the same store see the same rows. One of them writes, while the others
    do not read.
    """

    @property
    @abstractmethod
    def present(self) -> NDArray[np.bool_]:
        """[C] whether a client has a row."""

    @abstractmethod
    def rows(self, clients: Ints) -> State:
        """Return the rows [K, ...] of clients, a copy; zeros for those that have none."""

    @abstractmethod
    def get(self, client: int) -> ByPart | None:
        """Return one client's row, by part; None where it has none. Not to be written to."""

    @abstractmethod
    def put(
        self, clients: Ints, state: Mapping[str, Tensor | State], rows: Ints | None = None
    ) -> None:
        """Write the rows of clients: all of them, or none where the disk fails.

        Args:
            clients: [K] distinct client indices.
            state: tensors [N, ...].
            rows: [K] which of the N belong to the clients; None for the first K.

        Raises:
            RunError: the disk fails, or is full.
        """

    @abstractmethod
    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has to hold: ``index``, the clients that have rows, and more."""

    @abstractmethod
    def saved(self) -> None:
        """Hear that the checkpoint of the last snapshot is complete, and the one before gone."""

    @abstractmethod
    def restore(self, arrays: Arrays) -> None:
        """Take the rows of a checkpoint, and forget all others.

        Raises:
            RunError: rows of the checkpoint are missing in the file.
        """


def client_store(
    spec: Mapping[str, Spec], clients: int, allocate: Allocate, file: Path | None = None
) -> ClientStore:
    """Return a store without rows.

    Args:
        spec: shape and type of each tensor of a row, by path.
        clients: C.
        allocate: where memory comes from, which other processes may have to see.
        file: where the rows lie; None for memory.
    """
    if file is None:
        return MemoryStore(spec, clients, allocate)
    return DiskStore(spec, clients, allocate, file)


class MemoryStore(ClientStore):
    """Rows in memory, each at its client's index. See `client_store`."""

    def __init__(self, spec: Mapping[str, Spec], clients: int, allocate: Allocate) -> None:
        self._own = Buffers({"present": Spec((), torch.bool)}, clients, allocate)
        self._own.tensors["present"].zero_()
        layout = Layout(spec)
        self._tensors = layout.rows(aligned(layout.nbytes * clients, allocate), clients)

    @property
    def present(self) -> NDArray[np.bool_]:
        """[C] whether a client has a row, a view."""
        return np.asarray(self._own.tensors["present"].numpy())

    def rows(self, clients: Ints) -> State:
        """Return the rows [K, ...] of clients."""
        index, absent = torch.from_numpy(clients), torch.from_numpy(~self.present[clients])
        taken = {path: tensor[index] for path, tensor in self._tensors.items()}
        for tensor in taken.values():
            tensor[absent] = 0
        return unwalk(taken)

    def get(self, client: int) -> ByPart | None:
        """Return one client's row, as views."""
        if not self.present[client]:
            return None
        return branches(unwalk({path: tensor[client] for path, tensor in self._tensors.items()}))

    def put(
        self, clients: Ints, state: Mapping[str, Tensor | State], rows: Ints | None = None
    ) -> None:
        """Write the rows of clients."""
        index = torch.from_numpy(clients)
        take: slice | Tensor = slice(len(clients))
        if rows is not None and not np.array_equal(rows, np.arange(len(clients))):
            take = torch.from_numpy(rows)
        for path, tensor in walk(state):
            self._tensors[path].index_copy_(0, index, tensor[take])
        self.present[clients] = True

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the rows that there are."""
        clients = np.flatnonzero(self.present)
        index = torch.from_numpy(clients)
        rows = {STATE + path: tensor[index].numpy() for path, tensor in self._tensors.items()}
        return {"index": clients, **rows}

    def saved(self) -> None:
        """Nothing to do: the checkpoint has rows of its own."""

    def restore(self, arrays: Arrays) -> None:
        """Take the rows of a checkpoint."""
        if SLOT in arrays:
            raise RunError(
                "The state of the clients cannot be read.",
                got="a checkpoint whose rows lie in a file, and no such file",
            )
        self.present[:] = False
        self.put(_index(arrays), _state(arrays))


class DiskStore(ClientStore):
    """Rows in a file, in slots that clients are given when they are written. See `client_store`.

    Every `put` writes into slots that nothing refers to and then changes the table. A slot that
    clients have left is given out again, the lowest first: at once, or where the last complete
    checkpoint refers to it, after the next. So the file has room for the clients that took part,
    for what changed since the checkpoint, and for the rows of one `put`. It is read and written,
    not mapped: its pages count for no process.
    """

    def __init__(
        self, spec: Mapping[str, Spec], clients: int, allocate: Allocate, file: Path
    ) -> None:
        self._table = Buffers({"slot": Spec((), torch.int64)}, clients, allocate)
        self._table.tensors["slot"].fill_(NOWHERE)
        self._layout = Layout(spec)
        self._file = file
        self._forget()

    def _forget(self) -> None:
        self._slots[:] = NOWHERE
        self._begun = False  # whether the file holds anything of ours
        self._end = 0  # slots in the file
        self._free: list[int] = []  # a heap
        self._held: set[int] = set()  # slots that the last complete checkpoint refers to
        self._left: list[int] = []  # those of them that clients have left

    @property
    def _slots(self) -> Ints:
        return np.asarray(self._table.tensors["slot"].numpy())

    @property
    def present(self) -> NDArray[np.bool_]:
        """[C] whether a client has a row."""
        return np.asarray(self._slots != NOWHERE)

    def rows(self, clients: Ints) -> State:
        """Return the rows [K, ...] of clients."""
        return unwalk(self._read(self._slots[clients]))

    def get(self, client: int) -> ByPart | None:
        """Return one client's row."""
        slot = self._slots[client]
        if slot == NOWHERE:
            return None
        rows = self._read(np.array([slot]))
        return branches(unwalk({path: row[0] for path, row in rows.items()}))

    def put(
        self, clients: Ints, state: Mapping[str, Tensor | State], rows: Ints | None = None
    ) -> None:
        """Write the rows of clients."""
        slots = self._take(len(clients))
        try:
            self._write(slots, state, np.arange(len(clients)) if rows is None else rows)
        except OSError as error:
            for slot in slots:
                heapq.heappush(self._free, slot)
            raise _failed("written", self._file, error) from None
        before = self._slots[clients]
        self._slots[clients] = slots
        for slot in before[before != NOWHERE].tolist():
            if slot in self._held:
                self._left.append(slot)
            else:
                heapq.heappush(self._free, slot)

    def _take(self, count: int) -> list[int]:
        """Return slots that nothing refers to."""
        again = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = range(self._end, self._end + count - len(again))
        self._end = fresh.stop
        return [*again, *fresh]

    def _write(self, slots: list[int], state: Mapping[str, Tensor | State], rows: Ints) -> None:
        given, size = dict(walk(state)), self._layout.nbytes
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("r+b" if self._begun else "wb") as file:
            self._begun = True
            for slot, at in zip(slots, rows, strict=True):
                file.seek(slot * size)
                for piece in self._layout.pieces({k: t[at] for k, t in given.items()}):
                    file.write(piece)

    def _read(self, slots: Ints) -> dict[str, Tensor]:
        """Return the rows [K, ...] of slots, zeros where there is none."""
        size = self._layout.nbytes
        block = torch.zeros(len(slots) * size, dtype=torch.uint8)
        data = block.numpy().data
        if (slots == NOWHERE).all():
            return self._layout.rows(block, len(slots))
        try:
            with self._file.open("rb") as file:
                for i, slot in enumerate(slots.tolist()):
                    if slot != NOWHERE:
                        file.seek(slot * size)
                        if file.readinto(data[i * size : (i + 1) * size]) != size:
                            raise OSError(f"it ends in the row of slot {slot}")
        except OSError as error:
            raise _failed("read", self._file, error) from None
        return self._layout.rows(block, len(slots))

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the table of places, after all rows have reached the disk."""
        if self._begun:
            try:
                with self._file.open("rb") as file:
                    os.fsync(file.fileno())
            except OSError as error:
                raise _failed("written", self._file, error) from None
        clients = np.flatnonzero(self.present)
        return {"index": clients, SLOT: self._slots[clients]}

    def saved(self) -> None:
        """Give slots that only the checkpoint before referred to out again."""
        for slot in self._left:
            heapq.heappush(self._free, slot)
        self._left = []
        self._held = set(self._slots[self.present].tolist())

    def restore(self, arrays: Arrays) -> None:
        """Take the rows of a checkpoint, of either kind of store."""
        self._forget()
        if SLOT not in arrays:
            self.put(_index(arrays), _state(arrays))
            return
        slots = np.asarray(arrays[SLOT], dtype=np.int64)
        end = int(slots.max(initial=NOWHERE)) + 1
        try:
            size = self._file.stat().st_size if end else 0
            if size < end * self._layout.nbytes:
                raise OSError(f"{size} bytes in place of {end * self._layout.nbytes}")
            if end:
                os.truncate(self._file, end * self._layout.nbytes)
        except OSError as error:
            raise _failed("read", self._file, error) from None
        self._slots[_index(arrays)] = slots
        self._begun, self._end = end > 0, end
        self._held = set(slots.tolist())
        self._free = sorted(set(range(end)) - self._held)


def _index(arrays: Arrays) -> Ints:
    return np.asarray(arrays["index"], dtype=np.int64)


def _state(arrays: Arrays) -> State:
    found = {k.removeprefix(STATE): v for k, v in arrays.items() if k.startswith(STATE)}
    return unwalk({path: torch.from_numpy(np.asarray(rows)) for path, rows in found.items()})


def _failed(done: str, file: Path, error: OSError) -> RunError:
    return RunError(
        f"The state of the clients cannot be {done}.",
        got=f"{file}: {error.strerror or error}",
        do="see that the disk has room and the file is the run's own, then go on with --resume",
    )
