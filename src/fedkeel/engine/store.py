"""Client state by client index: only the rows of a cohort are ever touched.

A row is written when its client first reports. Memory that nobody has written costs nothing, so
ten thousand clients of whom a hundred have taken part cost a hundred rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.engine.buffers import Allocate, Buffers, Spec
from fedkeel.method.context import ByPart, Ints
from fedkeel.tree import State, walk

PREFIX = "clients/"


class ClientStore:
    """State of C clients, and how many local steps each has made.

    Args:
        spec: shape and type of each tensor of one client's state, by path.
        clients: C.
        allocate: where the memory comes from.
    """

    def __init__(self, spec: Mapping[str, Spec], clients: int, allocate: Allocate) -> None:
        own = {"present": Spec((), torch.bool), "done": Spec((), torch.int64)}
        self._own = Buffers(own, clients, allocate)
        self._own.tensors["present"].zero_()
        self._own.tensors["done"].zero_()
        self._rows = Buffers(spec, clients, allocate)
        self._clients = clients

    @property
    def done(self) -> Ints:
        """[C] local steps made, a view."""
        return np.asarray(self._own.tensors["done"].numpy())

    @property
    def present(self) -> NDArray[np.bool_]:
        """[C] whether a client has state, a view."""
        return np.asarray(self._own.tensors["present"].numpy())

    def get(self, client: int) -> ByPart | None:
        """Return a client's state as views, None the first time."""
        if not self.present[client]:
            return None
        state = self._rows.row(client)
        return {k: v for k, v in state.items() if isinstance(v, dict)}

    def put(self, clients: Ints, rows: Ints, state: Mapping[str, State], steps: Ints) -> None:
        """Write rows of stacked states [K, ...] for clients, and add to their steps."""
        index = torch.from_numpy(clients)
        take = torch.from_numpy(rows)
        for path, tensor in walk(dict(state)):
            self._rows.tensors[path].index_copy_(0, index, tensor[take])
        self.present[clients] = True
        self.done[clients] += steps[rows]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the rows that exist, for a checkpoint."""
        clients = np.flatnonzero(self.present)
        index = torch.from_numpy(clients)
        out: dict[str, NDArray[Any]] = {
            PREFIX + "index": clients,
            PREFIX + "done": self.done[clients],
        }
        for path, tensor in self._rows.tensors.items():
            out[PREFIX + "state/" + path] = tensor[index].numpy()
        return out

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the rows of a checkpoint."""
        clients = np.asarray(arrays[PREFIX + "index"], dtype=np.int64)
        self.present[:] = False
        self.present[clients] = True
        self.done[clients] = arrays[PREFIX + "done"]
        for path, tensor in self._rows.tensors.items():
            saved = torch.from_numpy(np.asarray(arrays[PREFIX + "state/" + path]))
            tensor[torch.from_numpy(clients)] = saved
