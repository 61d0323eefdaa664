"""The server's message in memory that processes share, and a copy of it on a process's device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedkeel.engine.buffers import TensorBuffers
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.spec import TensorSpec
from fedkeel.tree import State, map_tensors


class SharedMessage:
    """A message that one process writes and others read.

    Args:
        spec: shape and type of each tensor of a message, by path.
        allocate: provides memory that the processes share.
    """

    def __init__(self, spec: Mapping[str, TensorSpec], allocate: Allocate) -> None:
        self._values = TensorBuffers(spec, None, allocate)
        self._written = TensorBuffers({"times": TensorSpec((), torch.int64)}, None, allocate)
        self._copied_at = 0
        self._copy: State = {}

    def write(self, state: State) -> None:
        """Write a message; what it lacks stays as it is."""
        self._values.write(state)
        self._written.tensors["times"] += 1

    def on(self, device: torch.device) -> State:
        """Return the message on a device: in the shared memory, or in a copy for each message."""
        if device.type == "cpu":
            return self._values.state()
        times = int(self._written.tensors["times"])
        if times != self._copied_at:
            self._copy = map_tensors(lambda t: t.to(device), self._values.state())
            self._copied_at = times
        return self._copy
