"""A store for each network: clients of different networks keep tensors of different shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.base import Arrays, ClientStore
from fedkeel.engine.store.disk import DiskStore
from fedkeel.engine.store.memory import MemoryStore
from fedkeel.engine.store.record import ClientRecord
from fedkeel.method.context import ByPart, Ints


class StoreByNetwork:
    """What clients of different networks keep; each client's row lies in its network's store.

    Args:
        specs: shape and type of each tensor of a row, by path, for each network.
        of_client: [C] which network each client has.
        allocate: provides memory, which other processes may have to see.
        written_at_once: largest number of clients whose rows are written at a time.
        file: file of the rows, beside which each network has its own; None keeps them in memory.
    """

    def __init__(
        self,
        specs: Sequence[Mapping[str, TensorSpec]],
        of_client: Ints,
        allocate: Allocate,
        written_at_once: int,
        file: Path | None = None,
    ) -> None:
        self._of_client = of_client
        self._place = np.zeros_like(of_client)  # [C] number of a client within its network's store
        self._stores: list[ClientStore] = []
        for number, spec in enumerate(specs):
            clients = np.flatnonzero(of_client == number)
            self._place[clients] = np.arange(len(clients))
            if file is None:
                at_once = min(written_at_once, len(clients))
                self._stores.append(MemoryStore(spec, len(clients), allocate, at_once))
            else:
                own = file.with_name(f"{file.stem}-{number}{file.suffix}")
                self._stores.append(DiskStore(spec, len(clients), allocate, own))

    @property
    def has_row(self) -> NDArray[np.bool_]:
        """[C] whether a client has a row."""
        found = np.zeros(len(self._of_client), dtype=np.bool_)
        for number, store in enumerate(self._stores):
            found[self._of_client == number] = store.has_row
        return found

    def read(self, client: int) -> ClientRecord | None:
        """Return one client's record, None where it has none. It must not be written to."""
        return self._store_of(client).read(int(self._place[client]))

    def read_state(self, client: int) -> ByPart | None:
        """Return one client's state by part. See `read`."""
        return self._store_of(client).read_state(int(self._place[client]))

    def _store_of(self, client: int) -> ClientStore:
        return self._stores[int(self._of_client[client])]

    def reserve(self, clients: Ints) -> None:
        """Reserve slots for the next rows of clients [K]; drop earlier reservations."""
        for store, places in self._divided(clients):
            store.reserve(places)

    def write(self, clients: Ints, record: ClientRecord) -> None:
        """Write rows [K, ...] into the reserved slots of clients, all of one network."""
        (number,) = set(self._of_client[clients].tolist())
        self._stores[number].write(self._place[clients], record)

    def commit(self, clients: Ints) -> None:
        """Make the written rows of clients their current rows; drop all other reservations."""
        for store, places in self._divided(clients):
            store.commit(places)

    def _divided(self, clients: Ints) -> Iterator[tuple[ClientStore, Ints]]:
        """Yield each store with the places of its clients among these, which may be none."""
        for number, store in enumerate(self._stores):
            yield store, self._place[clients[self._of_client[clients] == number]]

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of a checkpoint: those of each store, under its number."""
        return {
            f"{number}/{name}": array
            for number, store in enumerate(self._stores)
            for name, array in store.snapshot().items()
        }

    def snapshot_saved(self) -> None:
        """Learn that the checkpoint of the last snapshot is complete, and the one before gone."""
        for store in self._stores:
            store.snapshot_saved()

    def restore(self, arrays: Arrays) -> None:
        """Take the rows of a checkpoint, and forget all others."""
        for number, store in enumerate(self._stores):
            prefix = f"{number}/"
            own = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
            store.restore(own)
