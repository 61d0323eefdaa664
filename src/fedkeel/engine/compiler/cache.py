"""Functions of states, called by their recordings: one for each form of what they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeel import matmul
from fedkeel.config import Precision
from fedkeel.engine.compiler.capture import Captured
from fedkeel.engine.compiler.cuda_graphs import Graphed
from fedkeel.engine.compiler.dropout_masks import Draw, Drawn, Sources
from fedkeel.engine.process import malloc
from fedkeel.engine.process.numerics import arithmetic
from fedkeel.engine.vectorized.low_rank import LowRank, Matrix, dense
from fedkeel.method.context import Ints
from fedkeel.tree import State, Tree, unwalk, walk

MOST = 128
"""Recordings that are kept."""


class NotTheSame(Exception):  # noqa: N818 - a reason to do without a recording
    """A recording gives another result than the function itself."""


@dataclass(frozen=True)
class Flat:
    """A state as a list of values with their paths: what a compiled function takes and returns.

    Args:
        paths: path of each value.
        values: tensors; matrices of what clients keep may be low-rank.
    """

    paths: tuple[str, ...]
    values: Sequence[Matrix]

    @classmethod
    def of(cls, state: Mapping[str, Tensor | State]) -> Flat:
        """Return a state as a list."""
        return cls.from_values(dict(walk(state)))

    @classmethod
    def from_values(cls, values: Mapping[str, Matrix]) -> Flat:
        """Return values by path as a list."""
        return cls(tuple(values), list(values.values()))

    @classmethod
    def returned(cls, paths: Sequence[str], values: Sequence[Tensor | tuple[Tensor, ...]]) -> Flat:
        """Return what a compiled function returns: a tuple holds the factors of a matrix."""
        return cls(tuple(paths), [v if isinstance(v, Tensor) else LowRank(*v) for v in values])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a compiled function takes: of a low-rank matrix both factors."""
        pairs = ((v,) if isinstance(v, Tensor) else (v.left, v.right) for v in self.values)
        return [tensor for pair in pairs for tensor in pair]

    def replace(self, tensors: Sequence[Tensor]) -> Flat:
        """Return the same state with other tensors, as many as `tensors` has."""
        rest = iter(tensors)
        return self.map(lambda _: next(rest))

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks of the low-rank matrices, by path."""
        return {path: v.rank for path, v in self.by_path.items() if isinstance(v, LowRank)}

    @property
    def by_path(self) -> dict[str, Matrix]:
        """The values by path."""
        return dict(zip(self.paths, self.values, strict=True))

    @property
    def dense(self) -> Tree:
        """The tensors by path, with dense matrices."""
        return {path: dense(value) for path, value in self.by_path.items()}

    @property
    def state(self) -> State:
        """The nested state, with dense matrices."""
        return unwalk(self.dense)

    def map(self, change: Callable[[Tensor], Tensor]) -> Flat:
        """Return it with every tensor changed."""
        values = [change(v) if isinstance(v, Tensor) else v.map(change) for v in self.values]
        return Flat(self.paths, values)


@dataclass(frozen=True)
class _Recording:
    """A recorded function, the paths of the state that it returns, and the masks that it takes."""

    program: Callable[..., Sequence[Any]]
    paths: tuple[str, ...]
    draws: tuple[Draw, ...]


class Recordings:
    """Recordings of functions, by name and by the form of one of their states.

    Args:
        precision: of the factors of products.
        orders: of the masks of one forward pass, as `Draw` has them.
    """

    def __init__(
        self, precision: Precision = "float32", orders: Sequence[tuple[int, ...]] = ()
    ) -> None:
        self._rounds, self._orders = precision != "float32", orders
        self._known: dict[Any, _Recording] = {}

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def run(
        self,
        name: str,
        function: Callable[..., State],
        given: Sequence[Flat],
        varies: Sequence[int],
        sources: Sources,
        real: Ints | None = None,
        owned: int | None = None,
        rate: Tensor | None = None,
        again: bool = True,
        thin: tuple[str, ...] = (),
    ) -> Flat:
        """Call a function by its recording, which is made, and tried, at the first such call.

        Args:
            name: what it is; of the same name there is one function, but for its shapes.
            function: of states, and of the rate where one is given; returns a state.
            given: the states.
            varies: which states' shapes decide which recording it is.
            sources: where masks come from.
            real: [n] examples of each lane that are no padding, None where all are real: masks are
                drawn for these alone.
            owned: which state may be written over.
            rate: [] learning rate, on the CPU.
            again: whether what it gave is of no more use when it is called again.
            thin: how paths begin at which a product of thin matrices may be returned as such.

        Raises:
            NotTheSame: the recording does not give what the function gives.
            Exception: whatever is raised where a function cannot be recorded.
        """
        values = [tensor for flat in given for tensor in flat.tensors]
        if rate is not None:
            values.append(rate)
        form: tuple[Any, ...] = (name,)
        for decides in (given[at] for at in varies):
            form = (*form, decides.paths, *[t.shape for t in decides.tensors])
        form = (*form, *[(i, *flat.ranks.items()) for i, flat in enumerate(given) if flat.ranks])
        on_gpu = values[0].is_cuda and again
        if on_gpu:  # a graph has the rate built in, and room for tensors of one shape each
            form = (*form, None if rate is None else float(rate), *[t.shape for t in values])
            form = (*form, real is None)  # or masks are drawn outside of the graph
        known = self._known.get(form)
        if known is None:
            if len(self._known) >= MOST:
                self._known.clear()
            drawn = Drawn(sources, real, self._orders)
            known, found = _record(function, given, values, drawn, owned, self._rounds, thin)
            if on_gpu and real is None:
                known = _graphed(known, values, known.draws, sources)
            elif on_gpu:
                known = _graphed(known, [*values, *drawn.masks], (), sources)
            self._known[form] = known
            malloc.trim()  # the function itself made what its recording does not
            return found
        masks = [draw.make(sources, real) for draw in known.draws]
        return Flat.returned(known.paths, known.program(*values, *masks))


def _record(
    function: Callable[..., State],
    given: Sequence[Flat],
    values: list[Tensor],
    drawn: Drawn,
    owned: int | None,
    rounds: bool,
    thin: tuple[str, ...],
) -> tuple[_Recording, Flat]:
    """Record a function; also return what it gives, which is compared with the function's own.

    For this comparison products are torch's own, with factors that are not rounded (`rounds`).
    """
    starts = [int(n) for n in np.cumsum([0, *(len(flat.tensors) for flat in given)])]
    paths: list[str] = []

    def of_tensors(*own: Tensor) -> list[Tensor]:
        states = [
            flat.replace(own[a:b]).state
            for flat, a, b in zip(given, starts[:-1], starts[1:], strict=True)
        ]
        found = Flat.of(function(*states, *own[starts[-1] : len(values)]))
        paths[:] = found.paths
        return list(found.tensors)

    def with_masks(*own: Tensor) -> list[Tensor]:
        with drawn.again(own[len(values) :]):
            return of_tensors(*own)

    rate = starts[-1] if len(values) > starts[-1] else None
    before: dict[str, int] = {}
    if owned is not None:
        before = {path: starts[owned] + i for i, path in enumerate(given[owned].paths)}
    mine = frozenset(before.values())
    state = torch.random.get_rng_state()  # what is drawn elsewhere than for masks, both draw alike
    with arithmetic("float32"), matmul.by_torch():
        with drawn.fresh():
            expected = of_tensors(*values)
        if drawn.draws and not drawn.ordered:
            raise NotTheSame("how the masks lie in memory is not known")
        if drawn.draws and drawn.others:  # of which masks, drawn beforehand, would now come first
            raise NotTheSame("masks and other random numbers are drawn in turn")
        after, every = torch.random.get_rng_state(), [*values, *drawn.masks]
        fresh = frozenset(range(len(values), len(every)))
        slim = frozenset(i for i, path in enumerate(paths) if path.startswith(thin))
        program = Captured(with_masks, every, rate, mine, fresh, slim)

        def recorded() -> Sequence[Tensor | tuple[Tensor, ...]]:
            torch.random.set_rng_state(state)
            return program(*[t.clone() if i in mine | fresh else t for i, t in enumerate(every)])

        @cache
        def in_float64() -> bool:
            return _agree_in_float64(of_tensors, values, rate, mine, before, paths)

        stays = [t for i, t in enumerate(every) if i not in mine | fresh] + program.constants
        versions = [t._version for t in stays]  # how often each has been written to
        found = recorded()
        made = Flat.returned(paths, found).dense
        for name, one in zip(paths, expected, strict=True):
            if _close(one, made[name], values[before[name]] if name in before else None):
                continue
            as_finite = torch.equal(torch.isfinite(one), torch.isfinite(made[name]))
            if drawn.draws or not as_finite or not in_float64():
                raise NotTheSame(f"a recorded step gives another {name.split('/')[0]}")
        if versions != [t._version for t in stays]:
            raise NotTheSame("a recorded step leaves something behind")
    # what the recording gives, also this time: a run that goes on makes it anew
    found = recorded() if rounds or matmul.faster() else found
    torch.random.set_rng_state(after)
    recording = _Recording(program, tuple(paths), tuple(drawn.draws))
    return recording, Flat.returned(paths, found)


def _agree_in_float64(
    function: Callable[..., list[Tensor]],
    values: Sequence[Tensor],
    rate: int | None,
    mine: frozenset[int],
    before: Mapping[str, int],
    paths: Sequence[str],
) -> bool:
    """Return whether a function and its recording are the same in float64.

    Where they are, and are not in float32, it is rounding that makes them differ: the method takes
    the sign of a slope that is nearly 0, or divides by one, and neither is nearer to the truth.

    Args:
        function: of `values`.
        values: what it is given.
        rate: which of them is the learning rate, None none.
        mine: those that may be written over.
        before: which of them become what has their name, as in `_close`.
        paths: names of what the function gives.
    """
    wide = [t.double() if t.is_floating_point() else t for t in values]
    if all(one is other for one, other in zip(wide, values, strict=True)):
        return False
    try:
        expected = function(*wide)
        program = Captured(function, wide, rate, mine)
        found = program(*[t.clone() if i in mine else t for i, t in enumerate(wide)])
    except Exception:  # it holds numbers in float32, or there is no room
        return False
    made = Flat.returned(paths, found).dense
    return all(
        _close(one, made[name], wide[before[name]] if name in before else None)
        for name, one in zip(paths, expected, strict=True)
    )


def _graphed(
    known: _Recording, values: Sequence[Tensor], inside: Sequence[Draw], sources: Sources
) -> _Recording:
    """Return a recording as a graph, or as it is where the GPU's libraries cannot capture it.

    Some of its masks are drawn `inside` the graph, the others are among the values.
    """
    try:
        graph = Graphed(known.program, values, inside, sources)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return known
    return _Recording(graph, known.paths, known.draws[len(inside) :])


def _close(one: Tensor, other: Tensor, before: Tensor | None = None) -> bool:
    """Return whether two tensors are the same up to rounding, whatever is not finite.

    Where they are said to come from one `before`, so must be the changes: these may be far smaller.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return bool(torch.equal(one, other))
    size, apart = float(one.abs().max()), float((one - other).abs().max())
    if not math.isfinite(size):
        return bool(torch.equal(torch.isfinite(one), torch.isfinite(other)))
    eps = torch.finfo(one.dtype).eps
    allowed = size * math.sqrt(eps)
    if before is not None and before.shape == one.shape:
        allowed = min(allowed, float((one - before).abs().max()) * eps**0.25 + 8 * eps * size)
    return apart <= allowed
