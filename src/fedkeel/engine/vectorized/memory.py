"""How many clients fit into memory side by side, by one measured step: before memory runs out.

Two clients make a step that is not compiled. What it takes at its peak, beside what is there before
it, is counted by the allocator of a GPU, and on a processor tensor by tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from fedkeel.base.dispatch import OperationMode
from fedkeel.base.memory import format_bytes, free_on
from fedkeel.engine.compiler.cache import Arguments, Call, CompileCache, FlatState
from fedkeel.engine.compiler.errors import CannotCompile, tracing
from fedkeel.engine.vectorized.compiled_loop import CompiledLoop
from fedkeel.method.local_training import ClientTraining

USABLE = 0.8
"""Share of the free memory that groups may take."""

COMPILED = 3.0
"""Bytes that a group takes while its step is compiled and compared with itself, for each byte of a
step that is not compiled, at most. Measured: see ``docs/benchmarks/log.md``."""


class Peak:
    """Bytes of tensors that were made in `measuring` and existed at the same time, at most."""

    def __init__(self) -> None:
        self.nbytes = 0

    @contextmanager
    def measuring(self, device: torch.device) -> Iterator[None]:
        """Measure what is done in this context."""
        if device.type != "cuda":
            counter = _LiveBytes()
            with counter:
                yield
            self.nbytes = counter.most
            return
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        self.nbytes = torch.cuda.max_memory_allocated(device) - before


class _LiveBytes(OperationMode):
    """Counts the bytes of the memory that operations allocate and that has not been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._seen: dict[int, object] = {}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do an operation, and count what it returns unless it lies in memory of its arguments."""
        kwargs = kwargs or {}
        known = {_place(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        for tensor in tree_iter(out):
            is_real = isinstance(tensor, Tensor) and not tensor.is_meta
            if is_real and _place(tensor) not in known:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place in self._seen:
            return
        size = storage.nbytes()
        self._now += size
        self.most = max(self.most, self._now)
        self._seen[place] = weakref.finalize(storage, self._remove, place, size)

    def _remove(self, place: int, size: int) -> None:
        self._now -= size
        del self._seen[place]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class NotCompiled(CompileCache):
    """Calls functions as they are, for a step that is only measured."""

    def run(self, call: Call, arguments: Arguments) -> FlatState:
        """Call a function."""
        rate = [] if arguments.rate is None else [arguments.rate]
        with tracing():
            return FlatState.of(call.function(*(s.state for s in arguments.states), *rate))


def uncompiled(training: ClientTraining) -> CompiledLoop:
    """Return a local loop that compiles nothing."""
    loop = CompiledLoop(training)
    loop.compiled = NotCompiled()
    return loop


class MemoryBound:
    """Tells how many clients fit into the memory of a device side by side.

    Args:
        device: where they train.
        processes: how many processes share its memory.
    """

    def __init__(self, device: torch.device, processes: int = 1) -> None:
        self._device, self._processes = device, processes
        self._client_bytes, self._width = 0.0, 0  # of a client in a step of so many examples
        self._most = 2  # clients that have been found to fit; two are measured

    def clients(self, count: int, width: int, two_clients: Callable[[], None]) -> int:
        """Return how many of some clients fit, at least one.

        Args:
            count: number of the clients.
            width: examples in a step of one client.
            two_clients: makes a step of two of them.
        """
        if (count <= self._most and width <= self._width) or count <= 2:
            return count
        if width > self._width:
            self._client_bytes, self._width = self._measured(two_clients), width
        free = self.free()
        if not self._client_bytes or free is None:
            return count
        fitting = int(free * USABLE / self._processes / (COMPILED * self._client_bytes))
        self._most = max(1, min(count, fitting))
        return self._most

    def _measured(self, two_clients: Callable[[], None]) -> float:
        """Return the bytes of a client in a step; 0 where it could not be made."""
        peak, state = Peak(), torch.random.get_rng_state()
        try:
            with peak.measuring(self._device):
                two_clients()
        except (CannotCompile, torch.OutOfMemoryError):  # as the group will, which then says why
            return 0.0
        finally:
            torch.random.set_rng_state(state)
        return peak.nbytes / 2

    def free(self) -> int | None:
        """Return the bytes that are free on the device, None where the system does not tell."""
        return free_on(self._device)

    def reason(self, clients: int) -> str:
        """Return why no more clients are trained side by side."""
        needed = format_bytes(int(COMPILED * self._client_bytes))
        return (
            f"at most {clients} clients are trained side by side: by a measured step each takes up "
            f"to {needed} while it is compiled"
        )
