"""What is remembered of each client: rows by client index, in memory or in a file.

A row comes to be when its client first reports, so what nobody has written costs nothing. Whoever
trains a client writes its row, aside: it counts when the server has taken the round. In memory a
checkpoint takes the rows along. In a file they stay where they are: a row is never written over
while a checkpoint refers to it, so the checkpoint needs the table of places alone, and the file of
a run that was killed still holds every row of the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedkeel.engine.buffers import Allocate
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.base import ClientStore
from fedkeel.engine.store.disk import DiskStore
from fedkeel.engine.store.memory import MemoryStore


def client_store(
    spec: Mapping[str, TensorSpec],
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
