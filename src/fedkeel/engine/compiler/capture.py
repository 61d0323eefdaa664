"""A function of tensors, recorded once as a list of tensor operations and run again without Python.

What a local step costs on a small network is Python, automatic differentiation and vmap, not
arithmetic. All of that decides the same thing in every step. So the step is recorded once for each
form of its inputs, gradients and all, and afterwards the list of operations runs alone.

The list is also shorter than what was recorded. A parameter's update is added to it where it lies:
for a linear layer the product of activations and back-propagated errors is accumulated into the
weights and never exists by itself, which saves most of the memory traffic of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedkeel.engine.compiler import passes
from fedkeel.engine.compiler.fuse_updates import centre, fuse
from fedkeel.engine.compiler.grouped_conv import multiply
from fedkeel.engine.compiler.low_rank_pass import expand
from fedkeel.engine.compiler.trace import module_of, trace

Flat = Sequence[Tensor]
Function = Callable[..., Sequence[Tensor]]
"""Tensors -> tensors."""


class Captured:
    """A recorded function.

    Args:
        function: of tensors, whose Python may depend on their shapes and types, not on values.
        example: tensors of the form of the arguments.
        rate: which argument is the learning rate, [] on the CPU; None where there is none.
        owned: which arguments may be written over.
        fresh: which arguments are made for this call alone; the function may write over them.
        thin: which results may be given as the factors of matrices of lanes, in a tuple.

    Raises:
        Exception: whatever the function or torch raises where it cannot be recorded: it branches on
            values or leaves torch.
    """

    def __init__(
        self,
        function: Function,
        example: Flat,
        rate: int | None = None,
        owned: frozenset[int] = frozenset(),
        fresh: frozenset[int] = frozenset(),
        thin: frozenset[int] = frozenset(),
    ) -> None:
        graph = trace(function, example)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        graph.eliminate_dead_code()
        passes.skip_idle(graph)
        graph.eliminate_dead_code()
        passes.write_apart(graph, {inputs[i] for i in fresh})
        passes.fold(graph)
        passes.share(graph)
        passes.pool_first(graph)
        multiply(graph)
        if rate is not None:
            centre(graph)
            graph.eliminate_dead_code()
            fuse(graph, inputs[rate], {inputs[i] for i in owned})
            expand(graph, thin)
            graph.eliminate_dead_code()
        passes.multiply_and_add(graph)
        graph.eliminate_dead_code()
        passes.line_up(graph)
        passes.reuse(graph, {inputs[i] for i in owned | fresh})
        graph.eliminate_dead_code()
        passes.place(graph)
        passes.choose_products(graph)
        graph.lint()
        self.operations = sum(node.op == "call_function" for node in graph.nodes)
        self._module = module_of(graph)
        self._forward = self._module.forward

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor | tuple[Tensor, ...]]:
        """Return what the function returns, up to rounding; owned arguments are lost."""
        found: Sequence[Tensor | tuple[Tensor, ...]] = self._forward(*tensors)
        return found

    @property
    def constants(self) -> list[Tensor]:
        """Tensors that it reads and is not given."""
        return list(self._module.buffers())

    @property
    def code(self) -> str:
        """The list of operations, as Python."""
        return str(self._module.code)


def warm_up() -> None:
    """Let the first recording of a process, for which torch loads much, be of next to nothing."""

    def loss(w: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(w, y)

    lanes = torch.func.vmap(torch.func.grad(loss))
    Captured(
        lambda w, y: [lanes(w, y)], [torch.zeros(2, 1, 2), torch.zeros(2, 1, dtype=torch.long)]
    )
