"""What is remembered of each client: rows by client index, in memory or in a file.

A row comes to be when its client first reports, so what nobody has written costs nothing. Whoever
trains a client writes its row, aside: it counts when the server has taken the round. In memory a
checkpoint takes the rows along. In a file they stay where they are: a row is never written over
while a checkpoint refers to it, so the checkpoint needs the table of places alone, and the file of
a run that was killed still holds every row of the last checkpoint.
"""

from __future__ import annotations

import heapq
import math
import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.buffers import Allocate, Buffers, Layout, Spec, aligned
from fedkeel.engine.thin import LEFT, RIGHT, factors, whole
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart, Ints
from fedkeel.tree import State, Tree, branches, unwalk, walk

Arrays = Mapping[str, NDArray[Any]]
Read = Callable[[str, int], Tensor]
"""(path, count) -> the first entries at a path, [count]."""

SLOT, SIZE, STATE = "slot", "bytes", "state/"
SIDES = "@sides"
"""Path at which a row says which of its matrices are products: their thin sides, 0 of others."""
NOWHERE = -1
"""Slot of a client that has no row."""


def row_layout(spec: Mapping[str, Spec], thin: Sequence[str] = ()) -> Layout:
    """Return where the tensors of a row lie. See `ClientStore`."""
    sides = {SIDES: Spec((len(thin),), torch.int64)} if thin else {}
    return Layout({**sides, **spec})


class ClientStore(ABC):
    """Rows of named tensors for C clients, in slots that clients are given when they are written.

    A row is written into a slot that nothing refers to, by whichever process trains the client,
    and is the client's when the process that reserved the slot says so: until then the row before
    is. Slots that clients have left are given out again, the lowest first, so there is room for the
    clients that took part and for the rows that are being written. Processes that were given the
    same store see the same rows; one of them reserves and commits.

    Args:
        spec: shape and type of each tensor of a row, by path.
        clients: C.
        allocate: where memory comes from, which other processes may have to see.
        thin: which matrices of a row may be given as products (`engine.thin`), and are then kept so
            in their place, by path.
    """

    def __init__(
        self,
        spec: Mapping[str, Spec],
        clients: int,
        allocate: Allocate,
        thin: Sequence[str] = (),
    ) -> None:
        one = Spec((), torch.int64)
        self._table = Buffers({"slot": one, "next": one}, clients, allocate)
        self._thin, self._layout = tuple(thin), row_layout(spec, thin)
        self._forget()

    def _forget(self) -> None:
        self._slots[:] = self._next[:] = NOWHERE
        self._reserved = np.array([], dtype=np.int64)  # clients
        self._end = 0  # slots that were ever given out
        self._free: list[int] = []  # a heap

    @property
    def _slots(self) -> Ints:
        """[C] where each client's row is."""
        return np.asarray(self._table.tensors["slot"].numpy())

    @property
    def _next(self) -> Ints:
        """[C] where the row of each client of a round is written, for which a slot is reserved."""
        return np.asarray(self._table.tensors["next"].numpy())

    @property
    def present(self) -> NDArray[np.bool_]:
        """[C] whether a client has a row."""
        return np.asarray(self._slots != NOWHERE)

    def rows(self, clients: Ints) -> State:
        """Return the rows [K, ...] of clients, a copy; zeros for those that have none.

        Raises:
            ValueError: matrices may be thin, so rows differ in form.
            RunError: the disk fails.
        """
        if self._thin:
            raise ValueError("rows that may hold products differ in form; read each by itself")
        return unwalk(self._rows(self._slots[clients]))

    @abstractmethod
    def _rows(self, slots: Ints) -> Tree:
        """Return the rows [K, ...] of slots by path, a copy; zeros where there is none."""

    def kept(self, client: int) -> ByPart | None:
        """Return one client's row, by part; None where it has none. Not to be written to.

        Matrices that were given as products are products.

        Raises:
            RunError: the disk fails.
        """
        slot = int(self._slots[client])
        return None if slot == NOWHERE else branches(unwalk(self._row(slot)))

    def _row(self, slot: int) -> Tree:
        """Return what a slot holds, by path, in the order that recordings rest on."""
        row: Tree = {}
        with self._reading(slot) as read:
            sides = read(SIDES, len(self._thin)).tolist() if self._thin else []
            known = dict(zip(self._thin, sides, strict=True))
            for path, one in self._layout.spec.items():
                if side := known.get(path, 0):
                    flat = read(path, side * sum(one.shape))
                    row[path + LEFT], row[path + RIGHT] = factors(flat, one.shape, side)
                elif path != SIDES:
                    row[path] = read(path, math.prod(one.shape)).view(one.shape)
        return row

    @abstractmethod
    def _reading(self, slot: int) -> AbstractContextManager[Read]:
        """Open what a slot holds."""

    def get(self, client: int) -> ByPart | None:
        """Return one client's row as `kept` does, with all matrices made."""
        own = self.kept(client)
        return None if own is None else branches(whole(own))

    def reserve(self, clients: Ints) -> None:
        """Make room for the rows that clients [K], distinct, will have; earlier room is given up.

        Raises:
            RunError: the disk fails, or is full.
        """
        self._give_up(self._reserved)
        self._next[clients] = self._take(len(clients))
        self._reserved = clients

    def write(self, clients: Ints, state: Mapping[str, Tensor | State]) -> None:
        """Write rows [K, ...] for which there is room, again where one was written before.

        Raises:
            RunError: the disk fails, or is full.
        """
        slots, given = self._room(clients), dict(walk(state))
        if self._thin and SIDES not in given:  # there is one where a checkpoint's rows are taken
            sides = [given[k + LEFT].shape[-1] if k + LEFT in given else 0 for k in self._thin]
            given[SIDES] = torch.tensor([sides] * len(slots))
        self._write(slots, given)

    @abstractmethod
    def _write(self, slots: Ints, given: Mapping[str, Tensor]) -> None:
        """Write what slots [K] are to hold, [K, ...] by path."""

    def commit(self, clients: Ints) -> None:
        """Take the rows that were written for clients; of others that were reserved, give up."""
        before, after = self._slots[clients], self._room(clients)
        self._slots[clients] = after
        self._next[clients] = NOWHERE
        for slot in before[before != NOWHERE].tolist():
            self._leave(slot)
        self._give_up(np.setdiff1d(self._reserved, clients))
        self._reserved = np.array([], dtype=np.int64)

    def put(self, clients: Ints, state: Mapping[str, Tensor | State]) -> None:
        """Write the rows [K, ...] of clients: all of them, or none where the disk fails.

        Raises:
            RunError: the disk fails, or is full.
        """
        self.reserve(clients)
        self.write(clients, state)
        self.commit(clients)

    def _take(self, count: int) -> list[int]:
        """Return slots that nothing refers to."""
        again = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = range(self._end, self._end + count - len(again))
        self._end = fresh.stop
        return [*again, *fresh]

    def _room(self, clients: Ints) -> Ints:
        """Return the slots that were reserved for clients."""
        slots = self._next[clients]
        if (slots == NOWHERE).any():
            raise ValueError(f"no room was made for client {clients[slots == NOWHERE][0]}")
        return np.asarray(slots)

    def _give_up(self, clients: Ints) -> None:
        """Take back the slots that were reserved for clients."""
        for slot in self._next[clients].tolist():
            heapq.heappush(self._free, slot)
        self._next[clients] = NOWHERE

    def _leave(self, slot: int) -> None:
        """Take back a slot that a client has left."""
        heapq.heappush(self._free, slot)

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
    spec: Mapping[str, Spec],
    clients: int,
    allocate: Allocate,
    file: Path | None = None,
    most: int | None = None,
    thin: Sequence[str] = (),
) -> ClientStore:
    """Return a store without rows.

    Args:
        spec: as `ClientStore`.
        clients: C.
        allocate: as `ClientStore`.
        file: where the rows lie; None for memory.
        most: clients that are written at a time, at most; None for all.
        thin: as `ClientStore`.
    """
    if file is None:
        return MemoryStore(spec, clients, allocate, clients if most is None else most, thin)
    return DiskStore(spec, clients, allocate, file, thin)


class MemoryStore(ClientStore):
    """Rows in memory. See `client_store`."""

    def __init__(
        self,
        spec: Mapping[str, Spec],
        clients: int,
        allocate: Allocate,
        most: int,
        thin: Sequence[str] = (),
    ) -> None:
        super().__init__(spec, clients, allocate, thin)
        slots = clients + most
        self._tensors = self._layout.rows(aligned(self._layout.nbytes * slots, allocate), slots)

    def _rows(self, slots: Ints) -> Tree:
        """Return the rows [K, ...] of slots."""
        index, absent = torch.from_numpy(slots.clip(min=0)), torch.from_numpy(slots == NOWHERE)
        taken = {path: tensor[index] for path, tensor in self._tensors.items()}
        for tensor in taken.values():
            tensor[absent] = 0
        return taken

    @contextmanager
    def _reading(self, slot: int) -> Iterator[Read]:
        """Open what a slot holds: what is read are views."""
        yield lambda path, count: self._tensors[path][slot].view(-1)[:count]

    def _write(self, slots: Ints, given: Mapping[str, Tensor]) -> None:
        """Write what slots are to hold."""
        for path, into in self._tensors.items():
            if path not in given:
                left, right = given[path + LEFT], given[path + RIGHT]
                for at, slot in enumerate(slots.tolist()):
                    places = factors(into[slot].view(-1), into.shape[1:], left.shape[2])
                    for place, one in zip(places, (left[at], right[at]), strict=True):
                        place.copy_(one)
            elif len(slots) == 1:
                into[slots[0]].copy_(given[path][0])
            else:
                into.index_copy_(0, torch.from_numpy(slots), given[path].to(into))

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the rows that there are."""
        clients = np.flatnonzero(self.present)
        index = torch.from_numpy(self._slots[clients])
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
        self._forget()
        self.put(_index(arrays), _state(arrays))


class DiskStore(ClientStore):
    """Rows in a file. See `client_store`.

    A slot that the last complete checkpoint refers to is given out again after the next, not
    before. The file is read and written, not mapped: its pages count for no process.
    """

    def __init__(
        self,
        spec: Mapping[str, Spec],
        clients: int,
        allocate: Allocate,
        file: Path,
        thin: Sequence[str] = (),
    ) -> None:
        self._file = file
        super().__init__(spec, clients, allocate, thin)

    def _forget(self) -> None:
        super()._forget()
        self._begun = False  # whether the file holds anything of ours
        self._held: set[int] = set()  # slots that the last complete checkpoint refers to
        self._left: list[int] = []  # those of them that clients have left

    def _row(self, slot: int) -> Tree:
        """Return what a slot holds, in one go where all of it is wanted."""
        if self._thin:
            return super()._row(slot)
        return {path: row[0] for path, row in self._rows(np.array([slot])).items()}

    @contextmanager
    def _reading(self, slot: int) -> Iterator[Read]:
        """Open what a slot holds: the file, once."""
        begin = slot * self._layout.nbytes

        def read(path: str, count: int) -> Tensor:
            out = torch.empty(count, dtype=self._layout.spec[path].dtype)
            file.seek(begin + self._layout.starts[path])
            if file.readinto(out.view(torch.uint8).numpy().data) != out.nbytes:
                raise OSError(f"it ends in the row of slot {slot}")
            return out

        try:
            with self._file.open("rb", buffering=0) as file:
                yield read
        except OSError as error:
            raise _failed("read", self._file, error) from None

    def reserve(self, clients: Ints) -> None:
        """Make room for the rows that clients will have."""
        if not self._begun:
            try:
                self._file.parent.mkdir(exist_ok=True)
                self._file.write_bytes(b"")
            except OSError as error:
                raise _failed("written", self._file, error) from None
            self._begun = True
        super().reserve(clients)

    def _write(self, slots: Ints, given: Mapping[str, Tensor]) -> None:
        """Write what slots are to hold."""
        size, given = self._layout.nbytes, {path: one.cpu() for path, one in given.items()}
        if orphaned():  # whoever goes on with the run may have given the slots out again
            raise RunError("The process that gave out this work is gone.")
        try:
            with self._file.open("r+b") as file:
                for at, slot in enumerate(slots.tolist()):
                    for path, one in self._layout.spec.items():
                        file.seek(slot * size + self._layout.starts[path])
                        for name in (path, path + LEFT, path + RIGHT):
                            if name in given:
                                file.write(_bytes(given[name][at].to(one.dtype)))
                    if file.tell() < (slot + 1) * size:  # to the row's end, whatever is there
                        file.seek((slot + 1) * size - 1)
                        file.write(b"\0")
        except OSError as error:
            raise _failed("written", self._file, error) from None

    def _leave(self, slot: int) -> None:
        if slot in self._held:
            self._left.append(slot)
        else:
            super()._leave(slot)

    def _rows(self, slots: Ints) -> Tree:
        """Return the rows [K, ...] of slots."""
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
        size = np.array([self._layout.nbytes])
        return {"index": clients, SLOT: self._slots[clients], SIZE: size}

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
        wanted, row = self._layout.nbytes, arrays.get(SIZE)
        if int(row[0]) != wanted if row is not None else self._thin:
            raise RunError(
                "The state of the clients cannot be read.",
                got="a file whose rows have another layout, of another version of fedkeel",
                expected=f"rows of {wanted:,} bytes",
                do="choose another folder (--out, in Python out=...), which starts the run anew",
            )
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


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy where that can be."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def orphaned() -> bool:
    """Return whether the process that started this one has ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return False
    return os.getppid() != parent.pid or not parent.is_alive()  # the latter is for Windows


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
