"""Functions of states, called by their recordings: one for each form of what they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeel.engine.capture import Captured
from fedkeel.engine.graphs import Graphed
from fedkeel.tree import State, unwalk, walk

MOST = 128
"""Recordings that are kept."""


class NotTheSame(Exception):  # noqa: N818 - a reason to do without a recording
    """A recording gives another result than the function itself."""


@dataclass(frozen=True)
class _Recording:
    """A recorded function, and the paths of the state that it returns."""

    program: Callable[..., Sequence[Tensor]]
    paths: tuple[str, ...]


Named = list[list[tuple[str, Tensor]]]
"""Several states, as their tensors with paths."""


class Recordings:
    """Recordings of functions, by name and by the form of their last state."""

    def __init__(self) -> None:
        self._known: dict[Any, _Recording] = {}
        self.random = False  # whether one of the functions draws random numbers

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def run(
        self,
        name: str,
        function: Callable[..., State],
        given: Sequence[State],
        varies: int,
        owned: int | None = None,
        rate: Tensor | None = None,
    ) -> State:
        """Call a function by its recording, which is made, and tried, at the first such call.

        Args:
            name: what it is; of the same name there is one function, but for its shapes.
            function: of states, and of the rate where one is given; returns a state.
            given: the states.
            varies: which state's shapes decide which recording it is.
            owned: which state may be written over.
            rate: [] learning rate, on the CPU.

        Raises:
            NotTheSame: the recording does not give what the function gives.
            Exception: whatever is raised where a function cannot be recorded.
        """
        flat: Named = [list(walk(state)) for state in given]
        values = [tensor for part in flat for _, tensor in part]
        if rate is not None:
            values.append(rate)
        form: tuple[Any, ...] = (name, tuple((path, t.shape) for path, t in flat[varies]))
        on_gpu = values[0].is_cuda
        if on_gpu and rate is not None:
            form = (*form, float(rate))  # a graph has it built in
        known = self._known.get(form)
        if known is None:
            if len(self._known) >= MOST:
                self._known.clear()
            program, known, found = _record(function, flat, values, owned)
            self.random = self.random or program.random
            if on_gpu:
                known = replace(known, program=_graphed(known.program, values))
            self._known[form] = known
            return found
        return unwalk(dict(zip(known.paths, known.program(*values), strict=True)))


def _record(
    function: Callable[..., State], flat: Named, values: list[Tensor], owned: int | None
) -> tuple[Captured, _Recording, State]:
    """Record a function; also return what it gives, which is compared with the function's own."""
    names = [[path for path, _ in part] for part in flat]
    starts = [int(n) for n in np.cumsum([0, *map(len, names)])]
    paths: list[str] = []

    def of_tensors(*given: Tensor) -> list[Tensor]:
        states = [
            unwalk(dict(zip(part, given[a : a + len(part)], strict=True)))
            for part, a in zip(names, starts[:-1], strict=True)
        ]
        found = dict(walk(function(*states, *given[starts[-1] :])))
        paths[:] = list(found)
        return list(found.values())

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
        if not _close(one, other):
            raise NotTheSame(f"a recorded step gives another {name.split('/')[0]}")
    # what the recording gives, also this time: a run that goes on makes it anew
    states = unwalk(dict(zip(paths, found, strict=True)))
    return program, _Recording(program, tuple(paths)), states


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


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same up to rounding, whatever is not finite."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return bool(torch.equal(one, other))
    size, apart = float(one.abs().max()), float((one - other).abs().max())
    if not math.isfinite(size):
        return bool(torch.equal(torch.isfinite(one), torch.isfinite(other)))
    return apart <= size * math.sqrt(torch.finfo(one.dtype).eps)
