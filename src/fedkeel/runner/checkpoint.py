"""Checkpoints: saving all state of a run between rounds, and restoring it to the bit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.base import TrainingEngine
from fedkeel.errors import RunError
from fedkeel.method.round_values import Server
from fedkeel.records.checkpoint import Checkpoint
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.feature_hooks import Hooks
from fedkeel.runner.server_table import ServerTable
from fedkeel.tree import State, substate, substates, tensors, walk

PREFIX = "server/"
"""What the names of the server's arrays in a checkpoint begin with."""


class Checkpoints:
    """Saves and restores a run: the server, the clients' state, the server's table.

    Args:
        folder: the run folder.
        key: digest of all that decides the numbers of the run.
        engine: has the clients' state.
        table: the server's rows of clients.
        hooks: of the run's features.
        earlier_keys: keys of the run when it had fewer rounds.

    Attributes:
        damaged: what is wrong with a newer checkpoint than the one restored; "" mostly.
    """

    def __init__(
        self,
        folder: RunFolder,
        key: str,
        engine: TrainingEngine,
        table: ServerTable,
        hooks: Sequence[Hooks] = (),
        earlier_keys: Sequence[str] = (),
    ) -> None:
        self._folder, self._key, self._earlier_keys = folder, key, earlier_keys
        self._engine, self._table, self._hooks = engine, table, hooks
        self._saved_at = time.monotonic()
        self.damaged = ""

    def restore(self, server: Server) -> tuple[Server, list[RoundRecord]] | None:
        """Return server and rows of the newest whole checkpoint, None where there is none.

        Raises:
            RunError: the checkpoint belongs to another run, or cannot be read.
        """
        saved = self._folder.load()
        if saved is None:
            return None
        self.damaged = saved.damaged
        if saved.state.get("key") not in (self._key, *self._earlier_keys):
            raise RunError(f"The checkpoint in {self._folder} belongs to another run.")
        server = unpacked(saved.arrays, server, saved.round)
        self._engine.restore(saved.arrays)
        self._table.restore(saved.arrays)
        rows = self._folder.keep_rows(saved.round, saved.rows)
        for hooks in self._hooks:
            hooks.restore(saved.arrays, rows)
        return server, rows

    def save(self, server: Server, min_age: float = 0.0) -> None:
        """Save a checkpoint, unless the last one is younger than `min_age` seconds."""
        if time.monotonic() - self._saved_at < min_age:
            return
        arrays = {
            **packed(server),
            **self._engine.state(),
            **self._table.snapshot(),
        }
        for hooks in self._hooks:
            arrays |= hooks.state()
        self._folder.save(Checkpoint(server.round, arrays, {"key": self._key}))
        self._engine.saved()
        self._table.saved()
        self._saved_at = time.monotonic()


def packed(server: Server) -> dict[str, NDArray[Any]]:
    """Return everything that a server knows but its round, by path."""
    state = walk(_state(server))
    return {PREFIX + path: tensor.contiguous().cpu().numpy() for path, tensor in state}


def unpacked(arrays: Mapping[str, NDArray[Any]], like: Server, round: int) -> Server:
    """Return the server that was packed.

    Args:
        arrays: what `packed` returned, among others.
        like: a server of the same run, whose names, shapes and types the arrays have to fit.
        round: rounds completed.

    Raises:
        RunError: an array is missing, or has another shape or type.
    """

    def fill(state: Mapping[str, Tensor | State], prefix: str) -> State:
        out: State = {}
        for name, value in state.items():  # in this order: sums over tensors depend on it
            if isinstance(value, Tensor):
                out[name] = _tensor(arrays, prefix + name, value)
            else:
                out[name] = fill(value, f"{prefix}{name}/")
        return out

    state = fill(_state(like), PREFIX)
    return Server(
        params=tensors(substate(state, "params")),
        buffers=tensors(substate(state, "buffers")),
        memory=substates(substate(state, "memory")),
        round=round,
    )


def _tensor(arrays: Mapping[str, NDArray[Any]], path: str, like: Tensor) -> Tensor:
    """Return an array of a checkpoint as a tensor, or refuse one that does not fit `like`."""
    array = arrays.get(path)
    got, expected = "nothing", f"shape {list(like.shape)}"
    if array is not None and array.shape == tuple(like.shape):
        tensor = torch.from_numpy(np.array(array))
        if tensor.dtype == like.dtype:
            return torch.empty_like(like).copy_(tensor)
        got, expected = str(array.dtype), str(like.dtype)
    elif array is not None:
        got = f"shape {list(array.shape)}"
    raise RunError(f"The checkpoint does not fit the run at {path}.", got=got, expected=expected)


def _state(server: Server) -> State:
    return {
        "params": dict(server.params),
        "buffers": dict(server.buffers),
        "memory": dict(server.memory),
    }
