"""A store whose rows lie in a file."""

from __future__ import annotations

import heapq
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.process.forking import is_orphaned
from fedkeel.engine.process.shared_memory import Allocate, allocate_aligned
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.base import (
    CHECKSUM,
    INDEX,
    NO_SLOT,
    ROW_BYTES,
    SLOT,
    Arrays,
    ClientStore,
    EncodedRows,
    ReadEntries,
)
from fedkeel.engine.store.layout import HEADER
from fedkeel.engine.store.record import RowCodec, Value
from fedkeel.errors import RunError
from fedkeel.method.context import Ints
from fedkeel.records.folder import ANOTHER
from fedkeel.tree import Tree


class DiskStore(ClientStore):
    """Rows in a file. See `engine.store.client_store`.

    A slot that the last complete checkpoint refers to is used again only after the next complete
    checkpoint. The file is read and written, not mapped, so no process holds its pages.

    Each row has a checksum, which lies apart from the file and is part of the checkpoint. A row is
    checked when it is read.
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
        slots = 3 * clients  # the current rows, those of the last checkpoint, and reserved ones
        self._checksum_memory = allocate_aligned(8 * slots, allocate).view(torch.int64)
        super().__init__(spec, clients, allocate, codec)

    def _clear(self) -> None:
        super()._clear()
        self._has_file = False  # whether the file holds rows of this store
        self._saved_slots: set[int] = set()  # slots that the last complete checkpoint refers to
        self._left_slots: list[int] = []  # saved slots that clients have left

    @property
    def _checksums(self) -> Ints:
        """[3 C] checksum of the row in each slot; 0 where it is not known."""
        return np.asarray(self._checksum_memory.numpy())

    def _check(self, slot: int, checksum: int) -> None:
        """Check the row that has been read from a slot.

        Raises:
            RunError: it is another row than was written.
        """
        if self._checksums[slot] not in (0, checksum):
            raise self._damaged(slot)

    def _damaged(self, slot: int) -> RunError:
        return RunError(
            "The state of the clients is damaged.",
            got=f"{self._file}: the row of slot {slot} has changed since it was written",
            do="take the run's folder from a copy, or delete it to run again from the start",
        )

    def _read_slot(self, slot: int) -> dict[str, Value]:
        if self._codec is not None:
            return super()._read_slot(slot)
        return {path: row[0] for path, row in self._read_slots(np.array([slot])).items()}

    @contextmanager
    def _open_slot(self, slot: int) -> Iterator[ReadEntries]:
        begin, checksum = slot * self._layout.nbytes, _Checksum()

        def read(path: str, count: int) -> Tensor:
            spec = self._layout.spec[path]
            if not 0 <= count <= math.prod(spec.shape):  # a damaged header says so
                raise self._damaged(slot)
            entries = torch.empty(count, dtype=spec.dtype)
            file.seek(begin + self._layout.starts[path])
            if file.readinto(entries.view(torch.uint8).numpy().data) != entries.nbytes:
                raise OSError(f"it ends in the row of slot {slot}")
            checksum.add(_bytes(entries))
            return entries

        with _reports_errors("read", self._file), self._file.open("rb", buffering=0) as file:
            yield read
        self._check(slot, checksum.value)

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
        rows = self._layout.rows(block, len(slots))
        for i, slot in enumerate(slots.tolist()):
            if slot != NO_SLOT:
                checksum = _Checksum()
                for tensor in rows.values():
                    checksum.add(_bytes(tensor[i]))
                self._check(slot, checksum.value)
        return rows

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
                checksum, counts = _Checksum(), self._entry_counts(on_cpu, i)
                for path, item in spec.items():
                    file.seek(slot * size + self._layout.starts[path])
                    left = counts[path] * item.dtype.itemsize  # bytes that a reader will read
                    for tensor in on_cpu[path]:
                        data = _bytes(tensor[i].to(item.dtype))
                        file.write(data)
                        checksum.add(data[:left])
                        left -= min(left, len(data))
                self._checksums[slot] = checksum.value
                if file.tell() < (slot + 1) * size:  # the file has to contain the whole row
                    file.seek((slot + 1) * size - 1)
                    file.write(b"\0")

    def _entry_counts(self, rows: EncodedRows, row: int) -> dict[str, int]:
        """Return by path how many entries of a row say something: a compact tensor has fewer."""
        counts = {path: math.prod(spec.shape) for path, spec in self._layout.spec.items()}
        if self._codec is not None:
            headers = rows[HEADER][0][row].tolist()
            for path, header in zip(self._codec.paths, headers, strict=True):
                if header:
                    counts[path] = self._codec.entries(header, self._layout.spec[path])
        return counts

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
        size, slots = np.array([self._layout.nbytes]), self._slots[clients]
        return {INDEX: clients, SLOT: slots, CHECKSUM: self._checksums[slots], ROW_BYTES: size}

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
        self._checksums[slots] = arrays.get(CHECKSUM, 0)  # versions before 0.2 have none
        self._has_file, self._slot_count = count > 0, count
        self._saved_slots = set(slots.tolist())
        self._free_slots = sorted(set(range(count)) - self._saved_slots)


class _Checksum:
    """The checksum of a row: CRC-32 of the bytes of its tensors, plus 1, so that it is not 0."""

    def __init__(self) -> None:
        self._crc = 0

    def add(self, data: memoryview) -> None:
        """Add the bytes that come next."""
        self._crc = zlib.crc32(data, self._crc)

    @property
    def value(self) -> int:
        """The checksum of what was added."""
        return self._crc + 1


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
