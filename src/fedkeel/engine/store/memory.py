"""A store whose rows lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.engine.process.shared_memory import Allocate, allocate_aligned
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.base import (
    INDEX,
    NO_SLOT,
    SLOT,
    STATE,
    Arrays,
    ClientStore,
    EncodedRows,
    ReadEntries,
)
from fedkeel.engine.store.record import RowCodec
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
        written_at_once: int,
        codec: RowCodec | None = None,
    ) -> None:
        super().__init__(spec, clients, allocate, codec)
        slots = clients + written_at_once
        block = allocate_aligned(self._layout.nbytes * slots, allocate)
        self._tensors = self._layout.rows(block, slots)

    def _read_slots(self, slots: Ints) -> Tree:
        index, absent = torch.from_numpy(slots.clip(min=0)), torch.from_numpy(slots == NO_SLOT)
        rows = {path: tensor[index] for path, tensor in self._tensors.items()}
        for tensor in rows.values():
            tensor[absent] = 0
        return rows

    @contextmanager
    def _open_slot(self, slot: int) -> Iterator[ReadEntries]:
        """Open a slot for reading; what is read are views."""
        yield lambda path, count: self._tensors[path][slot].view(-1)[:count]

    def _write_slots(self, slots: Ints, rows: EncodedRows) -> None:
        for path, target in self._tensors.items():
            first, *others = rows[path]
            if first.shape[1:] == target.shape[1:] and not others:
                if len(slots) == 1:
                    target[slots[0]].copy_(first[0])
                else:
                    target.index_copy_(0, torch.from_numpy(slots), first.to(target))
                continue
            for i, slot in enumerate(slots.tolist()):
                entries, start = target[slot].view(-1), 0
                for tensor in rows[path]:
                    end = start + tensor[i].numel()
                    entries[start:end].view(tensor[i].shape).copy_(tensor[i])
                    start = end

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the clients that have rows, and the rows."""
        clients = np.flatnonzero(self.has_row)
        index = torch.from_numpy(self._slots[clients])
        rows = {STATE + path: tensor[index].numpy() for path, tensor in self._tensors.items()}
        return {INDEX: clients, **rows}

    def snapshot_saved(self) -> None:
        """Do nothing: the checkpoint has its own copy of the rows."""

    def restore(self, arrays: Arrays) -> None:
        """Take the rows of a checkpoint."""
        if SLOT in arrays:
            raise RunError(
                "The state of the clients cannot be read.",
                got="a checkpoint whose rows lie in a file, and no such file",
            )
        self._clear()
        self._restore_rows(arrays)
