"""A recording as one graph on a GPU: its tensors lie still, and a call is one launch.

A step of a small network is dozens of kernels of some microseconds, and starting each takes as long
as running it. A captured graph starts them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedkeel.engine.compiler.dropout_masks import Draw, Sources

Run = Callable[[], Sequence[Tensor]]
Capture = Callable[[Run, Sources], tuple[Callable[[], None], Sequence[Tensor]]]
"""What is run, and the generators that it draws from -> what runs it again, and the tensors that
each run writes."""


class Graphed:
    """A function of tensors whose arguments and results keep their places in memory.

    A result that lies in an argument's memory needs no copy when it is the argument of the next
    call, as a model is from step to step. Results are overwritten by the next call.

    Args:
        function: of tensors, and of masks after them.
        values: arguments, which are copied.
        draws: the masks, which each call draws anew.
        sources: what from; the same generators at each call.
        capture: what makes a graph of a run.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor]],
        values: Sequence[Tensor],
        draws: Sequence[Draw] = (),
        sources: Sources = None,
        capture: Capture | None = None,
    ) -> None:
        self._function = function  # with its constants, of which a graph knows the addresses alone
        self._inputs = [t.clone() for t in values]

        def run() -> Sequence[Tensor]:
            return function(*self._inputs, *(draw.make(sources) for draw in draws))

        self._replay, self._outputs = (capture or on_cuda)(run, sources)

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        """Return what the function returns."""
        moved: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for own, given in zip(self._inputs, values, strict=True):
            if own.data_ptr() != given.data_ptr():
                to, what = moved.setdefault((given.device, own.dtype), ([], []))
                to.append(own)
                what.append(given)
        for to, what in moved.values():  # all of a kind by one launch
            torch._foreach_copy_(to, what)
        self._replay()
        return self._outputs


def on_cuda(run: Run, sources: Sources) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Capture a run on the current GPU, after the runs that libraries need to set themselves up.

    Generators are as they were, afterwards.
    """
    graph = torch.cuda.CUDAGraph()
    own = sources or []
    for source in own:
        graph.register_generator_state(source)
    states = [source.get_state() for source in own]
    default = torch.cuda.get_rng_state()
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(aside):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            outputs = run()
    finally:
        torch.cuda.set_rng_state(default)
        for source, state in zip(own, states, strict=True):
            source.set_state(state)
    return graph.replay, outputs
