"""A recording as one graph on a GPU: its tensors lie still, and a call is one launch.

A step of a small network is dozens of kernels of some microseconds, and starting each takes as long
as running it. A captured graph starts them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Run = Callable[[], Sequence[Tensor]]
Capture = Callable[[Run], tuple[Callable[[], None], Sequence[Tensor]]]
"""What is run -> what runs it again, and the tensors that each run writes."""


class Graphed:
    """A function of tensors whose arguments and results keep their places in memory.

    A result that lies in an argument's memory needs no copy when it is the argument of the next
    call, as a model is from step to step. Results are overwritten by the next call.

    Args:
        function: of tensors.
        values: arguments, which are copied.
        capture: what makes a graph of a run.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor]],
        values: Sequence[Tensor],
        capture: Capture | None = None,
    ) -> None:
        self._inputs = [t.clone() for t in values]
        self._replay, self._outputs = (capture or on_cuda)(lambda: function(*self._inputs))

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        """Return what the function returns."""
        for own, given in zip(self._inputs, values, strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
        self._replay()
        return self._outputs


def on_cuda(run: Run) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Capture a run on the current GPU, after the runs that libraries need to set themselves up."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph.replay, outputs
