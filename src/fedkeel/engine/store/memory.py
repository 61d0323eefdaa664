"""Rows in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.buffers import Allocate, aligned
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.base import (
    NOWHERE,
    SLOT,
    STATE,
    Arrays,
    ClientStore,
    Read,
    clients_of,
    state_of,
)
from fedkeel.engine.vectorized.low_rank import LEFT, RIGHT, factors
from fedkeel.errors import RunError
from fedkeel.method.context import Ints
from fedkeel.tree import Tree


class MemoryStore(ClientStore):
    """Rows in memory. See `engine.store.client_store`."""

    def __init__(
        self,
        spec: Mapping[str, TensorSpec],
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
        self.put(clients_of(arrays), state_of(arrays))
