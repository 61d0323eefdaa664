"""What a checkpoint holds of the clients: the state that they keep and the steps they have made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.engine.store.base import ClientStore
from fedkeel.errors import RunError
from fedkeel.method.context import Ints
from fedkeel.records.folder import ANOTHER

CLIENTS_PREFIX = "clients/"
"""Start of the names of the clients' arrays in a checkpoint."""

AWAY = "away"
"""Name of the array that says that client state lies on other machines."""


def checkpoint_arrays(
    store: ClientStore, steps_done: Ints, on_nodes: bool = False
) -> dict[str, NDArray[Any]]:
    """Return the arrays that a checkpoint holds of the clients.

    Args:
        store: what the clients keep.
        steps_done: [C] local steps that each client has made.
        on_nodes: whether the clients keep their state themselves, on other machines.
    """
    arrays = {**store.snapshot(), "done": steps_done[store.has_row]}
    if on_nodes:
        arrays[AWAY] = np.ones(1, dtype=np.bool_)
    return {CLIENTS_PREFIX + name: array for name, array in arrays.items()}


def restore_clients(
    arrays: Mapping[str, NDArray[Any]],
    store: ClientStore,
    steps_done: Ints,
    on_nodes: bool = False,
) -> None:
    """Write the clients' arrays of a checkpoint into the store and into `steps_done`.

    Raises:
        RunError: the checkpoint has the clients' state in another place than this run.
    """
    client_arrays = {
        name.removeprefix(CLIENTS_PREFIX): array
        for name, array in arrays.items()
        if name.startswith(CLIENTS_PREFIX)
    }
    if (AWAY in client_arrays) != on_nodes:
        raise RunError(
            "The checkpoint does not hold the clients' state that this engine needs.",
            why="in a federation of nodes it lies on the nodes, elsewhere with the run",
            do=f"go on as the run was begun, or {ANOTHER}",
        )
    store.restore(client_arrays)
    steps_done[:] = 0
    steps_done[store.has_row] = client_arrays["done"]
