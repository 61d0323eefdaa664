"""Runs a compiled function as one CUDA graph: its tensors keep their places in memory.

A step of a small network is dozens of kernels of some microseconds each, and starting a kernel
takes as long as running it. A captured graph starts them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedkeel.engine.compiler.compiled_function import CompiledResult
from fedkeel.engine.compiler.dropout_masks import Generators, MaskSpec

RunFunction = Callable[[], Sequence[CompiledResult]]
Capture = Callable[[RunFunction, Generators], tuple[Callable[[], None], Sequence[CompiledResult]]]
"""(what is run, the generators it draws from) -> (what runs it again, the tensors that each run
writes)."""


def becomes_graph(tensor: Tensor) -> bool:
    """Return whether a function of tensors that lie beside this one becomes a graph."""
    return tensor.is_cuda


def current_stream(tensor: Tensor) -> int:
    """Return the number of the stream on which work with a tensor is started now, 0 on a CPU."""
    return torch.cuda.current_stream(tensor.device).stream_id if tensor.is_cuda else 0


class CudaGraphFunction:
    """A function of tensors whose arguments and results keep their places in memory.

    A result that lies in an argument's memory needs no copy when it is the argument of the next
    call, as a model is from step to step. The next call overwrites the results.

    Args:
        function: of tensors, followed by dropout masks.
        values: arguments, which are copied.
        masks: the masks, which each call draws anew.
        generators: what the masks are drawn from, the same at each call.
        used: of each argument, whether it is read; others are not copied.
        capture: makes a graph of a run.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[CompiledResult]],
        values: Sequence[Tensor],
        masks: Sequence[MaskSpec] = (),
        generators: Generators = None,
        used: Sequence[bool] | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._function = function  # keeps its constants alive: a graph knows only addresses
        self._used = [True] * len(values) if used is None else list(used)
        pairs = zip(values, self._used, strict=True)
        self._inputs = [t.clone() if is_used else t.new_empty(0) for t, is_used in pairs]

        def run() -> Sequence[CompiledResult]:
            return function(*self._inputs, *(mask.draw(generators) for mask in masks))

        self._replay, self._outputs = (capture or capture_on_gpu)(run, generators)

    def __call__(self, *values: Tensor) -> Sequence[CompiledResult]:
        """Return what the function returns."""
        pairs = [
            (place, value)
            for place, value, is_used in zip(self._inputs, values, self._used, strict=True)
            if is_used and place.data_ptr() != value.data_ptr()
        ]
        copy_all(pairs)
        self._replay()
        return self._outputs


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first tensor of each pair the second one, all of a kind by one launch."""
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for place, source in pairs:
        places, sources = alike.setdefault((source.device, place.dtype), ([], []))
        places.append(place)
        sources.append(source)
    for places, sources in alike.values():
        torch._foreach_copy_(places, sources)


def capture_on_gpu(
    run: RunFunction, generators: Generators
) -> tuple[Callable[[], None], Sequence[CompiledResult]]:
    """Capture a run on the current GPU, after three runs in which libraries set themselves up.

    The generators' states are restored afterwards. A stream other than the default one captures by
    itself: libraries keep workspace for each stream, and graphs that run at the same time may not
    share it.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators or ():
        graph.register_generator_state(generator)
    states = [generator.get_state() for generator in generators or ()]
    default_state = torch.cuda.get_rng_state()
    current = torch.cuda.current_stream()
    stream = current
    if current == torch.cuda.default_stream():  # which cannot capture
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        current.wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            outputs = run()
    finally:
        torch.cuda.set_rng_state(default_state)
        for generator, state in zip(generators or (), states, strict=True):
            generator.set_state(state)
    return graph.replay, outputs
