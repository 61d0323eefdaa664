"""Keeps compiled functions of states, one for each form of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeel.base import matmul
from fedkeel.config import Precision
from fedkeel.engine.compiler.compiled_function import CompiledFunction, CompiledResult
from fedkeel.engine.compiler.cuda_graphs import CudaGraphFunction, becomes_graph, current_stream
from fedkeel.engine.compiler.dropout_masks import AxisOrder, DrawnMasks, Generators, MaskSpec
from fedkeel.engine.compiler.errors import CannotCompile, tracing
from fedkeel.engine.compiler.low_rank_matrix import LowRank, Matrix, dense
from fedkeel.engine.process import malloc
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.method.context import Ints
from fedkeel.tree import State, Tree, unwalk, walk

MAX_FUNCTIONS = 128
"""Compiled functions that are kept, at most."""


@dataclass(frozen=True)
class FlatState:
    """A state as a list of values with their paths, as compiled functions take and return it.

    Args:
        paths: path of each value.
        values: tensors; matrices of client states may be low-rank.
    """

    paths: tuple[str, ...]
    values: Sequence[Matrix]

    @classmethod
    def of(cls, state: Mapping[str, Tensor | State]) -> FlatState:
        """Return a state as a list."""
        return cls.of_values(dict(walk(state)))

    @classmethod
    def of_values(cls, values: Mapping[str, Matrix]) -> FlatState:
        """Return values by path as a list."""
        return cls(tuple(values), list(values.values()))

    @classmethod
    def of_results(cls, paths: Sequence[str], results: Sequence[CompiledResult]) -> FlatState:
        """Return what a compiled function returns: a tuple holds the factors of a matrix."""
        values = [r if isinstance(r, Tensor) else LowRank(*r) for r in results]
        return cls(tuple(paths), values)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a compiled function takes: of a low-rank matrix both factors."""
        tensors: list[Tensor] = []
        for value in self.values:
            tensors += (value,) if isinstance(value, Tensor) else (value.left, value.right)
        return tensors

    @property
    def ranks(self) -> list[tuple[str, int]]:
        """Paths and ranks of the low-rank matrices."""
        pairs = zip(self.paths, self.values, strict=True)
        return [(path, value.rank) for path, value in pairs if isinstance(value, LowRank)]

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

    def map(self, change: Callable[[Tensor], Tensor]) -> FlatState:
        """Return it with every tensor changed."""
        values = [change(v) if isinstance(v, Tensor) else v.map(change) for v in self.values]
        return FlatState(self.paths, values)

    def with_tensors(self, tensors: Sequence[Tensor]) -> FlatState:
        """Return the same state with other tensors, as many as `tensors` has."""
        remaining = iter(tensors)
        return self.map(lambda _: next(remaining))


@dataclass(frozen=True)
class Call:
    """A function of states and how it may be compiled.

    Args:
        name: of the function; functions of the same name differ only by shapes.
        function: of states, and of the rate where there is one; returns a state.
        shape_states: positions of the states by whose shapes compiled functions are told apart.
        owned: position of the state that may be written over; None for none.
        low_rank: prefixes of paths under which matrices may be returned as factors.
        moved_from: of a result that says how far a tensor has moved, by its path, that tensor.
        weights: with which such moves are added up; None where they are not.
    """

    name: str
    function: Callable[..., State]
    shape_states: Sequence[int]
    owned: int | None = None
    low_rank: tuple[str, ...] = ()
    moved_from: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None

    def rounded_size(self, path: str) -> float:
        """Return how large the numbers are whose rounding a result has; 0 for its own size."""
        if path not in self.moved_from:
            return 0.0
        total = 1.0 if self.weights is None else float(self.weights.sum())
        return total * float(self.moved_from[path].abs().max())


@dataclass(frozen=True)
class Arguments:
    """What a function of states is called with.

    Args:
        states: the states.
        generators: what dropout masks are drawn from.
        rate: [] learning rate, on the CPU; None where the function takes none.
        real_examples: [n] each client's examples that are not padding: masks are drawn only for
            these. None where all are real.
    """

    states: Sequence[FlatState]
    generators: Generators
    rate: Tensor | None = None
    real_examples: Ints | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in order, the rate last."""
        tensors = [tensor for state in self.states for tensor in state.tensors]
        return tensors if self.rate is None else [*tensors, self.rate]


@dataclass(frozen=True)
class _Compiled:
    """A compiled function, the paths of its results, and the masks that it takes.

    `used` says of each argument whether it is read, `draws` whether the function draws from torch's
    default generator.
    """

    program: Callable[..., Sequence[CompiledResult]]
    paths: tuple[str, ...]
    masks: tuple[MaskSpec, ...]
    used: tuple[bool, ...]
    draws: bool


class CompileCache:
    """Compiled functions, by name and by the shapes of their arguments.

    Args:
        precision: of the factors of matrix products.
        mask_orders: axis orders of the masks of one forward pass.
    """

    def __init__(
        self, precision: Precision = "float32", mask_orders: Sequence[AxisOrder] = ()
    ) -> None:
        self._rounds_factors, self._mask_orders = precision in ("tf32", "bf16"), mask_orders
        self._type = torch.bfloat16 if precision == "bf16-mixed" else None
        self._compiled: dict[Any, _Compiled] = {}
        self._graphs: dict[Any, tuple[float | None, _Compiled]] = {}  # by stream, with the rate

    @property
    def draws(self) -> bool:
        """Whether a compiled function draws random numbers from torch's default generator."""
        return any(c.draws for c in self._compiled.values())

    def clear(self) -> None:
        """Forget all compiled functions."""
        if self._graphs and torch.cuda.is_available():
            torch.cuda.synchronize()  # graphs may still run, in memory that is freed with them
        self._compiled.clear()
        self._graphs.clear()

    def run(self, call: Call, arguments: Arguments) -> FlatState:
        """Call a function; it is compiled and compared with itself at the first such call.

        Raises:
            CannotCompile: the function cannot be compiled, or gives other results compiled.
        """
        values, real_examples = arguments.tensors, arguments.real_examples
        key: tuple[Any, ...] = (call.name,)
        for state in (arguments.states[position] for position in call.shape_states):
            key = (*key, state.paths, *[t.shape for t in state.tensors])
        key = (*key, *[(i, *state.ranks) for i, state in enumerate(arguments.states)])
        as_graph = becomes_graph(values[0])
        if as_graph:  # which has memory for one shape of each tensor
            key = (*key, *[t.shape for t in values])
            key = (*key, real_examples is None)  # masks for some examples are drawn outside of it
        results: FlatState | None = None
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= MAX_FUNCTIONS:
                self.clear()
            masks = DrawnMasks(arguments.generators, real_examples, self._mask_orders)
            compiled, results = _compile(call, arguments, masks, self._rounds_factors, self._type)
            self._compiled[key] = compiled
        if as_graph:
            compiled = self._graph((*key, current_stream(values[0])), compiled, arguments)
        if results is not None:
            malloc.release_freed_memory()  # the function needed more than it compiled
            return results
        drawn = [mask.draw(arguments.generators, real_examples) for mask in compiled.masks]
        return FlatState.of_results(compiled.paths, compiled.program(*values, *drawn))

    def _graph(self, key: tuple[Any, ...], compiled: _Compiled, arguments: Arguments) -> _Compiled:
        """Return a compiled function as a CUDA graph, if CUDA can.

        Masks for some of the examples are drawn outside of it, all others inside. A graph holds the
        learning rate as a number, so another rate takes another graph, in place of the last one.
        """
        rate = None if arguments.rate is None else float(arguments.rate)
        rate = None if rate is None or math.isnan(rate) else rate  # NaN: clients have their own
        if key not in self._graphs or self._graphs[key][0] != rate:
            self._graphs.pop(key, None)
            values, generators = arguments.tensors, arguments.generators
            inside = compiled.masks if arguments.real_examples is None else ()
            if not inside:
                values += [
                    torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in compiled.masks
                ]
            self._graphs[key] = rate, _as_cuda_graph(compiled, values, inside, generators)
        return self._graphs[key][1]


def _compile(
    call: Call,
    arguments: Arguments,
    masks: DrawnMasks,
    rounds_factors: bool,
    narrowest: torch.dtype | None,
) -> tuple[_Compiled, FlatState]:
    """Compile a function and compare it with the function itself; also return its results.

    For the comparison matrix products are torch's own, with factors that are not rounded, even if
    training rounds them (`rounds_factors`). Numbers may differ as far as their own type rounds, or
    the `narrowest` one in which the network computes.
    """
    values = arguments.tensors
    starts = np.cumsum([0, *(len(state.tensors) for state in arguments.states)]).tolist()
    paths: list[str] = []

    def of_tensors(*tensors: Tensor) -> list[Tensor]:
        states = [
            state.with_tensors(tensors[start:end]).state
            for state, start, end in zip(arguments.states, starts[:-1], starts[1:], strict=True)
        ]
        result = FlatState.of(call.function(*states, *tensors[starts[-1] : len(values)]))
        paths[:] = result.paths
        return list(result.tensors)

    def of_tensors_and_masks(*tensors: Tensor) -> list[Tensor]:
        with masks.replaying(tensors[len(values) :]):
            return of_tensors(*tensors)

    rate = None if arguments.rate is None else starts[-1]
    before: dict[str, int] = {}  # position of the tensor that a result of the same path replaces
    if call.owned is not None:
        owned_paths = arguments.states[call.owned].paths
        before = {path: starts[call.owned] + i for i, path in enumerate(owned_paths)}
    owned = frozenset(before.values())
    rng_state = torch.random.get_rng_state()  # both runs draw the same beside the masks
    exact: Precision = "float32" if narrowest is None else "bf16-mixed"
    with use_numerics(exact, searches=not rounds_factors), matmul.without_onednn():
        with tracing(), masks.drawing():
            expected = of_tensors(*values)
        if masks.specs and not masks.orders:
            raise CannotCompile("how the masks lie in memory is not known")
        if masks.specs and masks.other_draws:  # masks that are drawn first would change these
            raise CannotCompile("masks and other random numbers are drawn in turn")
        rng_state_after = torch.random.get_rng_state()
        inputs = [*values, *masks.masks]
        temporary = frozenset(range(len(values), len(inputs)))
        low_rank = frozenset(i for i, path in enumerate(paths) if path.startswith(call.low_rank))
        program = CompiledFunction(of_tensors_and_masks, inputs, rate, owned, temporary, low_rank)

        def trial() -> Sequence[CompiledResult]:
            torch.random.set_rng_state(rng_state)
            with tracing():
                return program(
                    *[t.clone() if i in owned | temporary else t for i, t in enumerate(inputs)]
                )

        @cache
        def agrees_in_float64() -> bool:
            return _agrees_in_float64(of_tensors, values, rate, before, paths)

        unowned = [t for i, t in enumerate(inputs) if i not in owned | temporary]
        unowned += program.constants
        versions = [t._version for t in unowned]  # how often each has been written to
        results = trial()
        state = FlatState.of_results(paths, results).dense
        for path, tensor in zip(paths, expected, strict=True):
            old = values[before[path]] if path in before else None
            size = 0.0 if masks.specs else call.rounded_size(path)
            if _are_close(tensor, state[path], old, narrowest, size):
                continue
            same_finite = torch.equal(torch.isfinite(tensor), torch.isfinite(state[path]))
            if masks.specs or not same_finite or not agrees_in_float64():
                raise CannotCompile(f"a compiled step gives another {path.split('/')[0]}")
        if versions != [t._version for t in unowned]:
            raise CannotCompile("a compiled step changes its inputs or constants")
    # later calls choose libraries and round factors, so a run that is resumed needs this one to
    results = trial() if rounds_factors or matmul.onednn_is_faster() else results
    torch.random.set_rng_state(rng_state_after)
    draws = program.draws or (bool(masks.specs) and arguments.generators is None)
    compiled = _Compiled(program, tuple(paths), tuple(masks.specs), program.used, draws)
    return compiled, FlatState.of_results(paths, results)


def _agrees_in_float64(
    function: Callable[..., list[Tensor]],
    values: Sequence[Tensor],
    rate: int | None,
    before: Mapping[str, int],
    paths: Sequence[str],
) -> bool:
    """Return whether a function gives the same compiled as by itself in float64.

    If so, and it does not in float32, rounding makes the difference: the method takes the sign of a
    slope that is nearly 0, or divides by one, and neither result is nearer to the truth.
    """
    wide = [t.double() if t.is_floating_point() else t for t in values]
    if all(t is value for t, value in zip(wide, values, strict=True)):
        return False
    owned = frozenset(before.values())
    try:
        with tracing(), use_numerics("float32", searches=False):
            expected = function(*wide)
            program = CompiledFunction(function, wide, rate, owned)
            results = program(*[t.clone() if i in owned else t for i, t in enumerate(wide)])
    except (CannotCompile, torch.OutOfMemoryError):  # e.g. the model holds numbers in float32
        return False
    state = FlatState.of_results(paths, results).dense
    return all(
        _are_close(tensor, state[path], wide[before[path]] if path in before else None)
        for path, tensor in zip(paths, expected, strict=True)
    )


def _as_cuda_graph(
    compiled: _Compiled,
    values: Sequence[Tensor],
    masks_inside: Sequence[MaskSpec],
    generators: Generators,
) -> _Compiled:
    """Return a compiled function as a CUDA graph that draws some masks inside, if CUDA can."""
    try:
        graph = CudaGraphFunction(
            compiled.program, values, masks_inside, generators, compiled.used[: len(values)]
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return compiled
    return replace(compiled, program=graph, masks=compiled.masks[len(masks_inside) :])


def _are_close(
    first: Tensor,
    second: Tensor,
    before: Tensor | None = None,
    narrowest: torch.dtype | None = None,
    rounded_size: float = 0.0,
) -> bool:
    """Return whether two tensors are the same up to rounding, whatever is not finite.

    The rounding is that of the `narrowest` type, where it is not their own, or of a few last places
    of numbers of a size.

    Where both come from a tensor `before`, their changes are compared: these may be far smaller.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point() or not first.numel():
        return bool(torch.equal(first, second))
    size, difference = float(first.abs().max()), float((first - second).abs().max())
    if not math.isfinite(size):
        return bool(torch.equal(torch.isfinite(first), torch.isfinite(second)))
    own, eps = torch.finfo(first.dtype).eps, torch.finfo(narrowest or first.dtype).eps
    allowed = size * math.sqrt(eps)
    if before is not None and before.shape == first.shape:
        change = float((first - before).abs().max())
        allowed = min(allowed, change * eps**0.25 + 8 * own * size)
    return difference <= max(allowed, 8 * own * rounded_size)
