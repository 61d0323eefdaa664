"""What an engine knows of its clients between rounds: their state, and the steps they have made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.base import (
    ClientJob,
    PersonalScores,
    ServerModel,
    TrainedCohort,
    TrainingSetup,
)
from fedkeel.engine.networks import OtherNetworks
from fedkeel.engine.personal import (
    ReadState,
    count_personal,
    measure_personal,
    personal_model,
)
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store import AnyStore, client_store
from fedkeel.engine.store.by_network import StoreByNetwork
from fedkeel.engine.store.record import RowCodec
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart, Ints
from fedkeel.records.folder import ANOTHER
from fedkeel.tree import Tree

CLIENTS_PREFIX = "clients/"
"""Start of the names of the clients' arrays in a checkpoint."""

AWAY = "away"
"""Name of the array that says that client state lies on other machines."""


class ClientStates:
    """The state and the local steps of each client.

    Args:
        clients: C, the number of clients.
        spec: shape and type of each tensor that a client keeps, by path.
        capacity: the largest cohort.
        allocate: provides the memory.
        file: file of client state; None keeps it in memory.
        codec: stores some of the clients' state in compact form; None stores it as it is.
        others: the networks of clients that keep tensors of other shapes.
        on_nodes: whether the clients keep their state themselves, on other machines.
    """

    def __init__(
        self,
        clients: int,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        allocate: Allocate,
        file: Path | None = None,
        codec: RowCodec | None = None,
        others: OtherNetworks | None = None,
        on_nodes: bool = False,
    ) -> None:
        own_spec = {} if on_nodes else spec
        self.store: AnyStore
        if others is None:
            self.store = client_store(own_spec, clients, allocate, file, capacity, codec)
        else:
            of_networks = [own_spec, *others.kept], others.of_client
            self.store = StoreByNetwork(*of_networks, allocate, capacity, file)
        self._steps_done = np.zeros(clients, dtype=np.int64)  # [C]
        self._on_nodes = on_nodes

    def jobs(self, clients: Ints) -> list[ClientJob]:
        """Return a job for each client of a cohort [K]."""
        return [ClientJob(row, int(k), int(self._steps_done[k])) for row, k in enumerate(clients)]

    def begin_round(self, clients: Ints) -> list[ClientJob]:
        """Return a job for each client of a cohort [K], with room for the state it will keep."""
        self.store.reserve(clients)
        return self.jobs(clients)

    def steps_done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""
        return self._steps_done[clients]

    def commit(self, trained: TrainedCohort, keep: Ints) -> None:
        """Make the state that the clients `keep` have written count, and add to their steps."""
        rows = np.isin(trained.replies.clients, keep)
        clients = trained.replies.clients[rows]
        self.store.commit(clients)
        self._steps_done[clients] += trained.steps[rows]

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that a checkpoint holds of the clients."""
        arrays = {**self.store.snapshot(), "done": self._steps_done[self.store.has_row]}
        if self._on_nodes:
            arrays[AWAY] = np.ones(1, dtype=np.bool_)
        return {CLIENTS_PREFIX + name: array for name, array in arrays.items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the clients' arrays of a checkpoint.

        Raises:
            RunError: the checkpoint has the clients' state in another place than this run.
        """
        client_arrays = {
            name.removeprefix(CLIENTS_PREFIX): array
            for name, array in arrays.items()
            if name.startswith(CLIENTS_PREFIX)
        }
        if (AWAY in client_arrays) != self._on_nodes:
            raise RunError(
                "The checkpoint does not hold the clients' state that this engine needs.",
                why="in a federation of nodes it lies on the nodes, elsewhere with the run",
                do=f"go on as the run was begun, or {ANOTHER}",
            )
        self.store.restore(client_arrays)
        self._steps_done[:] = 0
        self._steps_done[self.store.has_row] = client_arrays["done"]


class KeepsClientStates:
    """The methods of an engine that concern client state; the same for all on one machine.

    Attributes:
        clients: the clients' states, which the engine sets.
        warnings: what the run's record warns of.
    """

    clients: ClientStates
    warnings: Sequence[str] = ()

    def done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""
        return self.clients.steps_done(clients)

    def client_state(self, client: int) -> ByPart | None:
        """Return what a client keeps, by part, for reading; None where there is nothing here."""
        return self.clients.store.read_state(client)

    def measure_personal(self, setup: TrainingSetup, server: ServerModel) -> PersonalScores:
        """Return the scores of the clients' personal models, measured in this process."""
        setup, server, read_state = self._personal(setup, server)
        with use_numerics(setup.precision):
            return measure_personal(setup, server, read_state)

    def count_personal(self, setup: TrainingSetup, server: ServerModel) -> Tensor:
        """Return [C, S] counts of what the clients' personal models answer."""
        setup, server, read_state = self._personal(setup, server)
        with use_numerics(setup.precision):
            return count_personal(setup, server, read_state)

    def personal_model(
        self, setup: TrainingSetup, server: ServerModel, client: int
    ) -> tuple[Tree, Tree]:
        """Return parameters and buffers of a client's personal model."""
        setup, server, read_state = self._personal(setup, server)
        with use_numerics(setup.precision), torch.no_grad():
            return personal_model(setup, server, client, read_state(client))

    def _personal(
        self, setup: TrainingSetup, server: ServerModel
    ) -> tuple[TrainingSetup, ServerModel, ReadState]:
        """Return what personal models are made of, where they are measured: in this process."""
        return setup, server, self.client_state

    def commit(self, trained: TrainedCohort, keep: Ints) -> None:
        """Make the new state of the clients `keep` count."""
        self.clients.commit(trained, keep)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return client state as arrays, for a checkpoint."""
        return self.clients.snapshot()

    def saved(self) -> None:
        """Hear that the checkpoint of the last state is complete."""
        self.clients.store.snapshot_saved()

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take client state from a checkpoint."""
        self.clients.restore(arrays)
