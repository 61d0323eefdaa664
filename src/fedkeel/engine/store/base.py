"""Slots, and which of them is whose: what stores in memory and in a file have in common."""

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

from fedkeel.engine.buffers import Allocate, Buffers, Layout
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.vectorized.low_rank import LEFT, RIGHT, factors, whole
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


def row_layout(spec: Mapping[str, TensorSpec], thin: Sequence[str] = ()) -> Layout:
    """Return where the tensors of a row lie. See `ClientStore`."""
    sides = {SIDES: TensorSpec((len(thin),), torch.int64)} if thin else {}
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
        spec: Mapping[str, TensorSpec],
        clients: int,
        allocate: Allocate,
        thin: Sequence[str] = (),
    ) -> None:
        one = TensorSpec((), torch.int64)
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
        self._give_up(self._reserved[self._next[self._reserved] != NOWHERE])
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


def clients_of(arrays: Arrays) -> Ints:
    """Return the clients [K] whose rows a checkpoint has."""
    return np.asarray(arrays["index"], dtype=np.int64)


def state_of(arrays: Arrays) -> State:
    """Return the rows [K, ...] of a checkpoint that holds them."""
    found = {k.removeprefix(STATE): v for k, v in arrays.items() if k.startswith(STATE)}
    return unwalk({path: torch.from_numpy(np.asarray(rows)) for path, rows in found.items()})
