"""The server's rows of clients, for methods with a `Table`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.spec import specs_of
from fedkeel.engine.store import client_store
from fedkeel.engine.store.record import ClientRecord
from fedkeel.method.compose import Plan
from fedkeel.method.context import Ints
from fedkeel.method.round_values import RoundResult, TableRows
from fedkeel.method.server_memory import initial_table_row
from fedkeel.tree import Tree, substates, unwalk, walk

PREFIX = "table/"


class ServerTable:
    """Rows of the clients that have taken part; empty for methods without a table.

    Args:
        plan: the method.
        params: the model, for shapes.
        clients: C.
        largest_cohort: the largest number of clients that take part in a round, which may be more
            than are expected.
        file: where the rows are; None for memory.
    """

    def __init__(
        self, plan: Plan, params: Tree, clients: int, largest_cohort: int, file: Path | None = None
    ) -> None:
        self._plan = plan
        self._store = None
        if plan.tables:
            spec = specs_of(dict(initial_table_row(plan, params)))
            self._store = client_store(spec, clients, private_memory, file, largest_cohort)

    def remembered(self, params: Tree, clients: Ints) -> TableRows | None:
        """Return the rows of clients [K], None for methods without a table.

        Args:
            params: the global model, from which the row of a new client is made.
            clients: [K] client indices.
        """
        if self._store is None:
            return None
        has_row = self._store.has_row[clients]
        rows = dict(walk(self._store.read_rows(clients)))
        is_new = torch.from_numpy(~has_row)
        for path, tensor in walk(dict(initial_table_row(self._plan, params))):
            rows[path][is_new] = tensor
        return TableRows(substates(unwalk(rows)), has_row)

    def put(self, result: RoundResult) -> None:
        """Take the new rows of a finished round."""
        if self._store is not None and len(result.clients):
            self._store.replace(result.clients, ClientRecord.of(dict(result.rows)))

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has to hold."""
        arrays = {} if self._store is None else self._store.snapshot()
        return {PREFIX + name: array for name, array in arrays.items()}

    def saved(self) -> None:
        """Hear that the checkpoint of the last snapshot is complete."""
        if self._store is not None:
            self._store.snapshot_saved()

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the rows of a checkpoint."""
        if self._store is not None:
            rows = {k.removeprefix(PREFIX): v for k, v in arrays.items() if k.startswith(PREFIX)}
            self._store.restore({k: np.asarray(v) for k, v in rows.items()})
