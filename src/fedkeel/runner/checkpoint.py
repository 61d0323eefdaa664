"""The server as named arrays, and back, so that a run goes on with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.errors import RunError
from fedkeel.method.round_values import Server
from fedkeel.tree import State, substate, substates, tensors, walk

PREFIX = "server/"


def packed(server: Server) -> dict[str, NDArray[Any]]:
    """Return everything that a server knows but its round, by path."""
    return {PREFIX + path: tensor.contiguous().numpy() for path, tensor in walk(_state(server))}


def unpacked(arrays: Mapping[str, NDArray[Any]], like: Server, round: int) -> Server:
    """Return the server that was packed.

    Args:
        arrays: what `packed` returned, among others.
        like: a server of the same run, whose form the arrays have to fit.
        round: rounds completed.

    Raises:
        RunError: an array is missing, or has another shape or type.
    """

    def fill(state: Mapping[str, Tensor | State], prefix: str) -> State:
        out: State = {}
        for name, value in state.items():  # in this order: sums over tensors depend on it
            if not isinstance(value, Tensor):
                out[name] = fill(value, f"{prefix}{name}/")
                continue
            found = arrays.get(prefix + name)
            if found is None or found.shape != tuple(value.shape):
                raise RunError(
                    f"The checkpoint does not fit the run at {prefix}{name}.",
                    got="nothing" if found is None else f"shape {list(found.shape)}",
                    expected=f"shape {list(value.shape)}",
                )
            array = torch.from_numpy(np.array(found))
            if array.dtype != value.dtype:
                raise RunError(
                    f"The checkpoint does not fit the run at {prefix}{name}.",
                    got=str(found.dtype),
                    expected=str(value.dtype),
                )
            out[name] = torch.empty_like(value).copy_(array)
        return out

    state = fill(_state(like), PREFIX)
    return Server(
        params=tensors(substate(state, "params")),
        buffers=tensors(substate(state, "buffers")),
        memory=substates(substate(state, "memory")),
        round=round,
    )


def _state(server: Server) -> State:
    return {
        "params": dict(server.params),
        "buffers": dict(server.buffers),
        "memory": dict(server.memory),
    }
