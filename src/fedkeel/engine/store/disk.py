"""A store whose rows lie in a file."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.process.forking import is_orphaned
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.base import (
    INDEX,
    NO_SLOT,
    ROW_BYTES,
    SLOT,
    Arrays,
    ClientStore,
    EncodedRows,
    ReadEntries,
)
from fedkeel.engine.store.record import RowCodec, Value
from fedkeel.errors import RunError
from fedkeel.method.context import Ints
from fedkeel.records.folder import ANOTHER
from fedkeel.tree import Tree


class DiskStore(ClientStore):
    """Rows in a file. See `engine.store.client_store`.

    A slot that the last complete checkpoint refers to is used again only after the next complete
    checkpoint. The file is read and written, not mapped, so no process holds its pages.
    """

    def __init__(
        self,
        spec: Mapping[str, TensorSpec],
        clients: int,
        allocate: Allocate,
        file: Path,
        codec: RowCodec | None = None,
    ) -> None:
        self._file = file
        super().__init__(spec, clients, allocate, codec)

    def _clear(self) -> None:
        super()._clear()
        self._has_file = False  # whether the file holds rows of this store
        self._saved_slots: set[int] = set()  # slots that the last complete checkpoint refers to
        self._left_slots: list[int] = []  # saved slots that clients have left

    def _read_slot(self, slot: int) -> dict[str, Value]:
        if self._codec is not None:
            return super()._read_slot(slot)
        return {path: row[0] for path, row in self._read_slots(np.array([slot])).items()}

    @contextmanager
    def _open_slot(self, slot: int) -> Iterator[ReadEntries]:
        begin = slot * self._layout.nbytes

        def read(path: str, count: int) -> Tensor:
            entries = torch.empty(count, dtype=self._layout.spec[path].dtype)
            file.seek(begin + self._layout.starts[path])
            if file.readinto(entries.view(torch.uint8).numpy().data) != entries.nbytes:
                raise OSError(f"it ends in the row of slot {slot}")
            return entries

        with _reports_errors("read", self._file), self._file.open("rb", buffering=0) as file:
            yield read

    def _read_slots(self, slots: Ints) -> Tree:
        size = self._layout.nbytes
        block = torch.zeros(len(slots) * size, dtype=torch.uint8)
        data = block.numpy().data
        if (slots == NO_SLOT).all():
            return self._layout.rows(block, len(slots))
        with _reports_errors("read", self._file), self._file.open("rb") as file:
            for i, slot in enumerate(slots.tolist()):
                if slot != NO_SLOT:
                    file.seek(slot * size)
                    if file.readinto(data[i * size : (i + 1) * size]) != size:
                        raise OSError(f"it ends in the row of slot {slot}")
        return self._layout.rows(block, len(slots))

    def reserve(self, clients: Ints) -> None:
        """Reserve slots for the next rows of clients; make the file before the first one."""
        if not self._has_file:
            with _reports_errors("written", self._file):
                self._file.parent.mkdir(exist_ok=True)
                self._file.write_bytes(b"")
            self._has_file = True
        super().reserve(clients)

    def _write_slots(self, slots: Ints, rows: EncodedRows) -> None:
        if is_orphaned():  # a resumed run may have given these slots to other clients
            raise RunError("The process that gave out this work is gone.")
        size, spec = self._layout.nbytes, self._layout.spec
        on_cpu = {path: [tensor.cpu() for tensor in rows[path]] for path in spec}
        with _reports_errors("written", self._file), self._file.open("r+b") as file:
            for i, slot in enumerate(slots.tolist()):
                for path, item in spec.items():
                    file.seek(slot * size + self._layout.starts[path])
                    for tensor in on_cpu[path]:
                        file.write(_bytes(tensor[i].to(item.dtype)))
                if file.tell() < (slot + 1) * size:  # the file has to contain the whole row
                    file.seek((slot + 1) * size - 1)
                    file.write(b"\0")

    def _free(self, slot: int) -> None:
        if slot in self._saved_slots:
            self._left_slots.append(slot)
        else:
            super()._free(slot)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return which client has which slot, after all rows have reached the disk."""
        if self._has_file:
            with _reports_errors("written", self._file), self._file.open("rb") as file:
                os.fsync(file.fileno())
        clients = np.flatnonzero(self.has_row)
        size = np.array([self._layout.nbytes])
        return {INDEX: clients, SLOT: self._slots[clients], ROW_BYTES: size}

    def snapshot_saved(self) -> None:
        """Free the slots that only the checkpoint before referred to."""
        for slot in self._left_slots:
            heapq.heappush(self._free_slots, slot)
        self._left_slots = []
        self._saved_slots = set(self._slots[self.has_row].tolist())

    def restore(self, arrays: Arrays) -> None:
        """Take the rows of a checkpoint, of either kind of store."""
        self._clear()
        if SLOT not in arrays:
            self._restore_rows(arrays)
            return
        size = self._layout.nbytes
        row_bytes = arrays.get(ROW_BYTES)
        if self._codec is not None if row_bytes is None else int(row_bytes[0]) != size:
            raise RunError(
                "The state of the clients cannot be read.",
                got="a file whose rows have another layout, of another version of fedkeel",
                expected=f"rows of {size:,} bytes",
                do=f"{ANOTHER}, which starts the run anew",
            )
        slots = np.asarray(arrays[SLOT], dtype=np.int64)
        count = int(slots.max(initial=NO_SLOT)) + 1
        with _reports_errors("read", self._file):
            file_size = self._file.stat().st_size if count else 0
            if file_size < count * size:
                raise OSError(f"{file_size} bytes in place of {count * size}")
            if count:
                os.truncate(self._file, count * size)
        self._slots[np.asarray(arrays[INDEX], dtype=np.int64)] = slots
        self._has_file, self._slot_count = count > 0, count
        self._saved_slots = set(slots.tolist())
        self._free_slots = sorted(set(range(count)) - self._saved_slots)


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy where the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _reports_errors(action: Literal["read", "written"], file: Path) -> Iterator[None]:
    """Say that the clients' state cannot be read or written where the disk fails."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"The state of the clients cannot be {action}.",
            got=f"{file}: {error.strerror or error}",
            do="see that the disk has room and the file is the run's own, then go on with --resume",
        ) from None
