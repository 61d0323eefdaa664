"""Streams of a GPU on which single clients are trained in turn, so that some train at once.

One client's kernels leave a part of a GPU idle: a small batch fills few of its processors, and a
kernel that waits for memory computes nothing. The kernels of another client run there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fedkeel.base.memory import free_on
from fedkeel.engine.vectorized.memory import USABLE

MAX_STREAMS = 8
"""Clients that are trained at once on streams of their own, at most."""


class Streams:
    """Streams on which clients take turns. On a processor there is one, which is the usual order.

    Args:
        device: where clients train.
        processes: how many processes share its memory.

    Attributes:
        count: the streams in use.
    """

    def __init__(self, device: torch.device, processes: int = 1) -> None:
        self._most = MAX_STREAMS if device.type == "cuda" else 1  # for which there is memory
        self.count = self._most
        self._device, self._processes = device, processes
        self._streams: list[torch.cuda.Stream] = []
        self._turns = 0

    def share(self, clients: int) -> None:
        """Use as many streams for some clients that all have about the same number of them."""
        self.count = math.ceil(clients / math.ceil(clients / self._most)) if clients else 1

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Train a client on the next stream, after all that has been started outside of streams.

        What the first client leaves in memory says how many have room beside it.
        """
        if self.count == 1:
            yield
            return
        if not self._streams:
            new: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
            self._streams = [new(self._device) for _ in range(self._most)]
        stream = self._streams[self._turns % self.count]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        before = torch.cuda.memory_reserved(self._device)
        with torch.cuda.stream(stream):
            yield
        self._turns += 1
        if self._turns == 1:
            used = torch.cuda.memory_reserved(self._device) - before
            free = (free_on(self._device) or 0) * USABLE / self._processes
            self._most = min(self._most, 1 + int(free / max(used, 1)))
            self.count = min(self.count, self._most)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *error: object) -> None:
        """Let all that is started from now on wait for what the streams have yet to do."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def reduce(self) -> bool:
        """Use half as many streams, after memory has run out; return whether there were several."""
        had_several = self.count > 1
        self._most = self.count = max(1, self.count // 2)
        return had_several
