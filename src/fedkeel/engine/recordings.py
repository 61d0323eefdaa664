"""Functions of states, called by their recordings: one for each form of what they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeel.config import Precision
from fedkeel.engine import heap
from fedkeel.engine.arithmetic import EPS
from fedkeel.engine.capture import Captured
from fedkeel.engine.graphs import Graphed
from fedkeel.tree import State, unwalk, walk

MOST = 128
"""Recordings that are kept."""


class NotTheSame(Exception):  # noqa: N818 - a reason to do without a recording
    """A recording gives another result than the function itself."""


@dataclass(frozen=True)
class Flat:
    """A state as its tensors in order, with their paths: what a step takes and gives, unwalked.

    Args:
        paths: of the tensors.
        tensors: as many.
    """

    paths: tuple[str, ...]
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, state: State) -> Flat:
        """Return a state, flat."""
        found = dict(walk(state))
        return cls(tuple(found), list(found.values()))

    @property
    def state(self) -> State:
        """The nested state."""
        return unwalk(dict(zip(self.paths, self.tensors, strict=True)))

    def map(self, change: Callable[[Tensor], Tensor]) -> Flat:
        """Return it with every tensor changed."""
        return Flat(self.paths, [change(t) for t in self.tensors])


@dataclass(frozen=True)
class _Recording:
    """A recorded function, and the paths of the state that it returns."""

    program: Callable[..., Sequence[Tensor]]
    paths: tuple[str, ...]


class Recordings:
    """Recordings of functions, by name and by the form of one of their states.

    Args:
        precision: of the factors of products.
    """

    def __init__(self, precision: Precision = "float32") -> None:
        self._eps = EPS[precision]
        self._known: dict[Any, _Recording] = {}
        self.random = False  # whether one of the functions draws random numbers

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def run(
        self,
        name: str,
        function: Callable[..., State],
        given: Sequence[Flat],
        varies: int,
        owned: int | None = None,
        rate: Tensor | None = None,
        again: bool = True,
    ) -> Flat:
        """Call a function by its recording, which is made, and tried, at the first such call.

        Args:
            name: what it is; of the same name there is one function, but for its shapes.
            function: of states, and of the rate where one is given; returns a state.
            given: the states.
            varies: which state's shapes decide which recording it is.
            owned: which state may be written over.
            rate: [] learning rate, on the CPU.
            again: whether what it gave is of no more use when it is called again.

        Raises:
            NotTheSame: the recording does not give what the function gives.
            Exception: whatever is raised where a function cannot be recorded.
        """
        values = [tensor for flat in given for tensor in flat.tensors]
        if rate is not None:
            values.append(rate)
        decides = given[varies]
        form: tuple[Any, ...] = (name, decides.paths, *[t.shape for t in decides.tensors])
        on_gpu = values[0].is_cuda and again
        if on_gpu and rate is not None:
            form = (*form, float(rate))  # a graph has it built in
        known = self._known.get(form)
        if known is None:
            if len(self._known) >= MOST:
                self._known.clear()
            program, known, found = _record(function, given, values, owned, self._eps)
            self.random = self.random or program.random
            if on_gpu:
                known = replace(known, program=_graphed(known.program, values))
            self._known[form] = known
            heap.trim()  # the function itself made what its recording does not
            return found
        return Flat(known.paths, known.program(*values))


def _record(
    function: Callable[..., State],
    given: Sequence[Flat],
    values: list[Tensor],
    owned: int | None,
    eps: float,
) -> tuple[Captured, _Recording, Flat]:
    """Record a function; also return what it gives, which is compared with the function's own."""
    starts = [int(n) for n in np.cumsum([0, *(len(flat.paths) for flat in given)])]
    paths: list[str] = []

    def of_tensors(*own: Tensor) -> list[Tensor]:
        states = [
            Flat(flat.paths, own[a : a + len(flat.paths)]).state
            for flat, a in zip(given, starts[:-1], strict=True)
        ]
        found = Flat.of(function(*states, *own[starts[-1] :]))
        paths[:] = found.paths
        return list(found.tensors)

    rate = starts[-1] if len(values) > starts[-1] else None
    mine = frozenset[int]()
    if owned is not None:
        mine = frozenset(range(starts[owned], starts[owned + 1]))
    program = Captured(of_tensors, values, rate, mine)
    state = torch.random.get_rng_state()  # both draw the same
    expected = of_tensors(*values)
    torch.random.set_rng_state(state)
    found = program(*[t.clone() if i in mine else t for i, t in enumerate(values)])
    for name, one, other in zip(paths, expected, found, strict=True):
        if not _close(one, other, eps):
            raise NotTheSame(f"a recorded step gives another {name.split('/')[0]}")
    # what the recording gives, also this time: a run that goes on makes it anew
    return program, _Recording(program, tuple(paths)), Flat(tuple(paths), found)


def _graphed(
    program: Callable[..., Sequence[Tensor]], values: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]]:
    """Return a recording as a graph, or as it is where the GPU's libraries cannot capture it."""
    try:
        return Graphed(program, values)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return program


def _close(one: Tensor, other: Tensor, eps: float) -> bool:
    """Return whether two tensors are the same up to rounding, whatever is not finite."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return bool(torch.equal(one, other))
    size, apart = float(one.abs().max()), float((one - other).abs().max())
    if not math.isfinite(size):
        return bool(torch.equal(torch.isfinite(one), torch.isfinite(other)))
    return apart <= size * math.sqrt(max(eps, torch.finfo(one.dtype).eps))
