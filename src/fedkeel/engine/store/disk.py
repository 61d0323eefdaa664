"""Rows in a file."""

from __future__ import annotations

import heapq
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.buffers import Allocate
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.base import (
    NOWHERE,
    SIZE,
    SLOT,
    Arrays,
    ClientStore,
    Read,
    clients_of,
    state_of,
)
from fedkeel.engine.vectorized.low_rank import LEFT, RIGHT
from fedkeel.errors import RunError
from fedkeel.method.context import Ints
from fedkeel.records.folder import ANOTHER
from fedkeel.tree import Tree


class DiskStore(ClientStore):
    """Rows in a file. See `engine.store.client_store`.

    A slot that the last complete checkpoint refers to is given out again after the next, not
    before. The file is read and written, not mapped: its pages count for no process.
    """

    def __init__(
        self,
        spec: Mapping[str, TensorSpec],
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
            self.put(clients_of(arrays), state_of(arrays))
            return
        wanted, row = self._layout.nbytes, arrays.get(SIZE)
        if int(row[0]) != wanted if row is not None else self._thin:
            raise RunError(
                "The state of the clients cannot be read.",
                got="a file whose rows have another layout, of another version of fedkeel",
                expected=f"rows of {wanted:,} bytes",
                do=f"{ANOTHER}, which starts the run anew",
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
        self._slots[clients_of(arrays)] = slots
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


def _failed(done: str, file: Path, error: OSError) -> RunError:
    return RunError(
        f"The state of the clients cannot be {done}.",
        got=f"{file}: {error.strerror or error}",
        do="see that the disk has room and the file is the run's own, then go on with --resume",
    )
