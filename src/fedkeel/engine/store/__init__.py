"""What is stored of each client: rows by client index, in memory or in a file.

A client has no row before its first report, so clients that never took part cost nothing. The
process that trains a client writes the client's new row beside the current one; the new row counts
when the server has completed the round. In memory, a checkpoint copies the rows. In a file the rows
stay where they are: a row that a checkpoint refers to is never overwritten, so a checkpoint only
needs the table of slots, and the file of a killed run still holds every row of the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.base import ClientStore
from fedkeel.engine.store.by_network import StoreByNetwork
from fedkeel.engine.store.disk import DiskStore
from fedkeel.engine.store.memory import MemoryStore
from fedkeel.engine.store.record import RowCodec

AnyStore = ClientStore | StoreByNetwork
"""What keeps a row for each client, of the same shapes or of those of its network."""


def client_store(
    spec: Mapping[str, TensorSpec],
    clients: int,
    allocate: Allocate,
    file: Path | None = None,
    written_at_once: int | None = None,
    codec: RowCodec | None = None,
) -> ClientStore:
    """Return a store without rows.

    Args:
        spec: shape and type of each tensor of a row, by path.
        clients: C.
        allocate: provides memory, which other processes may have to see.
        file: file of the rows; None keeps them in memory.
        written_at_once: largest number of clients whose rows are written at a time; None for all.
        codec: as `ClientStore`.
    """
    if file is None:
        count = clients if written_at_once is None else written_at_once
        return MemoryStore(spec, clients, allocate, count, codec)
    return DiskStore(spec, clients, allocate, file, codec)
