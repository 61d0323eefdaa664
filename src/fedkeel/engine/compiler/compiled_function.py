"""Compiles a function of tensors: traces it once, and afterwards runs its list of operations.

On a small network a local step spends its time on Python, automatic differentiation and vmap, not
on arithmetic. All of these do the same in every step. So a step is traced once for each form of its
inputs, with its gradients, and from then on only the list of its operations runs.

Passes make the list shorter than what was traced. In particular an update of parameters is added to
them where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fedkeel.base.dispatch import compiler_left_alone
from fedkeel.engine.compiler import passes
from fedkeel.engine.compiler.fuse_updates import center_factors, fuse_updates
from fedkeel.engine.compiler.graph_nodes import is_random, remove_unused
from fedkeel.engine.compiler.grouped_conv import replace_grouped_convolutions
from fedkeel.engine.compiler.low_rank_pass import use_low_rank_terms
from fedkeel.engine.compiler.trace import module_of, trace

Function = Callable[..., Sequence[Tensor]]
"""Tensors -> tensors."""

CompiledResult = Tensor | tuple[Tensor, ...]
"""A tensor, or the two factors of matrices of clients."""


class CompiledFunction:
    """A compiled function.

    Args:
        function: of tensors; its Python may depend on their shapes and types, not on their numbers.
        example: tensors of the form of the arguments.
        rate: position of the argument that is the learning rate, [] on the CPU; None for none.
        owned: positions of arguments that may be written over.
        temporary: positions of arguments that are made for only one call; the function itself
            writes over them.
        low_rank: positions of results that may be returned as the factors of matrices.

    Attributes:
        used: of each argument, whether it is read.
        draws: whether random numbers are drawn.

    Raises:
        CannotCompile: its Python depends on numbers, it leaves torch, or it raises an error.
    """

    @compiler_left_alone()
    def __init__(
        self,
        function: Function,
        example: Sequence[Tensor],
        rate: int | None = None,
        owned: frozenset[int] = frozenset(),
        temporary: frozenset[int] = frozenset(),
        low_rank: frozenset[int] = frozenset(),
    ) -> None:
        graph = trace(function, example)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        remove_unused(graph)
        passes.remove_no_ops(graph)
        remove_unused(graph)
        passes.use_out_of_place_operations(graph, {inputs[i] for i in temporary})
        passes.fold_constants(graph)
        passes.merge_equal_operations(graph)
        passes.pool_before_relu(graph)
        replace_grouped_convolutions(graph)
        if rate is not None:
            center_factors(graph)
            remove_unused(graph)
            fuse_updates(graph, inputs[rate], {inputs[i] for i in owned})
            use_low_rank_terms(graph, low_rank)
            remove_unused(graph)
        passes.fuse_multiply_add(graph)
        remove_unused(graph)
        passes.lay_out_gradients_as_inputs(graph)
        passes.write_in_place(graph, {inputs[i] for i in owned | temporary})
        remove_unused(graph)
        passes.write_into_concatenation(graph)
        passes.choose_matmul_library(graph)
        graph.lint()
        self.used = tuple(bool(node.users) for node in inputs)
        self.draws = any(node.op == "call_function" and is_random(node) for node in graph.nodes)
        self._module = module_of(graph)
        self._forward = self._module.forward

    def __call__(self, *tensors: Tensor) -> Sequence[CompiledResult]:
        """Return what the function returns, up to rounding; owned arguments are written over."""
        results: Sequence[CompiledResult] = self._forward(*tensors)
        return results

    @property
    def constants(self) -> list[Tensor]:
        """Tensors that it reads beside its arguments."""
        return list(self._module.buffers())

    @property
    def code(self) -> str:
        """The list of operations, as Python."""
        return str(self._module.code)
