"""Traces a function of tensors: runs it once and writes down its operations as a graph.

torch's own tracers accept any program and take ten times as long. A local step needs no more than
the list of its operations.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import autograd_would_have_decomposed
from torch.utils._pytree import arg_tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fedkeel.base.dispatch import OperationMode
from fedkeel.engine.compiler.errors import CannotCompile, tracing
from fedkeel.engine.compiler.graph_nodes import is_random, storage_node, written_arguments

aten = torch.ops.aten

TRACE_SCALE = 0.75
"""The function is traced with its example arguments times this. A number of the example that gets
into the graph by another way than as an argument then changes the results: the trial sees it."""


def trace(function: Callable[..., Sequence[Tensor]], example: Sequence[Tensor]) -> fx.Graph:
    """Run a function once, and return its operations on tensors as a graph.

    Each node but the output describes its value: ``meta["val"]`` holds tensors without memory of
    the same shape, strides and type, ``meta["device"]`` the device of the first of them. A constant
    holds its tensor as ``meta["constant"]``.

    Args:
        function: of tensors; its Python may depend on their shapes and types, not on their numbers.
        example: arguments; the function is called with copies.

    Raises:
        CannotCompile: the function asks for numbers in a tensor, writes to a tensor that is not
            an argument, or raises something itself.
    """
    graph = fx.Graph()
    mode = _TraceMode(graph)
    args = [t.clone().mul_(TRACE_SCALE) if t.is_floating_point() else t.clone() for t in example]
    for name, tensor in zip(_argument_names(function, len(args)), args, strict=True):
        mode.add_argument(name, tensor)
    with tracing(), torch.no_grad(), mode, _TorchOnlyMode():
        results = function(*args)
    graph.output([mode.node_of(tensor) for tensor in results])
    return graph


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """Return a graph as a function, with its constants as buffers."""
    constants = {str(n.target): n.meta["constant"] for n in graph.nodes if n.op == "get_attr"}
    return fx.GraphModule(constants, graph)


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the function's parameters, or numbered names where it has ``*args``."""
    names = list(inspect.signature(function).parameters)
    return names if len(names) == count else [f"input_{position}" for position in range(count)]


class _TraceMode(OperationMode):
    """Does operations and adds them to a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self._constants = 0
        self._graph = graph
        self._nodes = WeakIdKeyDictionary()
        self._varying: set[fx.Node] = set()  # nodes whose value differs from call to call

    def add_argument(self, name: str, tensor: Tensor) -> None:
        """Take a tensor as one of the function's arguments."""
        node = self._graph.placeholder(name)
        self._varying.add(node)
        self._assign(node, tensor)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node that made a tensor; a tensor made elsewhere is a constant."""
        if tensor not in self._nodes:
            constant = self._graph.create_node("get_attr", f"kept_{self._constants}")
            constant.meta["constant"] = tensor
            self._constants += 1
            self._assign(constant, tensor)
        node: fx.Node = self._nodes[tensor]
        return node

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do an operation and add it to the graph."""
        kwargs = kwargs or {}
        if func._can_decompose():
            leaves = arg_tree_leaves(*args, **kwargs)
            # autograd decomposes these operations, but is off here
            if autograd_would_have_decomposed(func, leaves):
                with self:
                    return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:  # a tensor of Python numbers is made in each call
            func = aten.lift_fresh_copy.default
        node = self._add_operation(func, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._assign(node, out)
        elif isinstance(out, tuple | list):
            node.meta["val"] = tuple(
                _without_memory(t) if isinstance(t, Tensor) else t for t in out
            )
            for position, tensor in enumerate(out):
                if isinstance(tensor, Tensor):
                    node.meta.setdefault("device", tensor.device)
                    item = self._graph.call_function(operator.getitem, (node, position))
                    self._assign(item, tensor)
        elif not written_arguments(node):
            self._graph.erase_node(node)
        return out

    def _add_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:  # noqa: ANN401
        """Add an operation to the graph.

        Raises:
            CannotCompile: it looks at numbers, or writes to a constant.
        """
        name = func.overloadpacket.__name__
        node_args = fx.node.map_aggregate(
            (tuple(args), dict(kwargs)), lambda a: self.node_of(a) if isinstance(a, Tensor) else a
        )
        node = self._graph.create_node("call_function", func, *node_args, name=name)
        if not self._varying.isdisjoint(_deciding_arguments(node)):
            raise CannotCompile(f"the numbers in a tensor decide what is done ({name})")
        written = [storage_node(argument) for argument in written_arguments(node)]
        if is_random(node) or not self._varying.isdisjoint(node.all_input_nodes):
            self._varying.update([node, *written])
        if any(argument.op == "get_attr" for argument in written):
            raise CannotCompile(f"a tensor that is not an argument is written to ({name})")
        return node

    def _assign(self, node: fx.Node, tensor: Tensor) -> None:
        """Note that a node made a tensor."""
        node.meta.update(val=_without_memory(tensor), device=tensor.device)
        if not self._varying.isdisjoint(node.all_input_nodes):
            self._varying.add(node)
        self._nodes[tensor] = node


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _deciding_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments whose numbers decide what an operation does or the shape it gives."""
    if node.target is aten.index.Tensor:  # an index is a tensor of positions or a mask
        indices = [index for index in node.args[1] if isinstance(index, fx.Node)]  # type: ignore[union-attr]
        return [i for i in indices if i.meta["val"].dtype in (torch.bool, torch.uint8)]
    tags = getattr(node.target, "tags", ())
    data_dependent = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return [] if data_dependent.isdisjoint(tags) else node.all_input_nodes


_EXITS = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.__array__,
    Tensor.__dlpack__,
}
"""Methods that give away the numbers in a tensor without an operation of torch."""


class _TorchOnlyMode(TorchFunctionMode):
    """Refuses to leave torch, where nothing can be traced."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _EXITS:
            raise CannotCompile(f"Tensor.{func.__name__} leaves torch")
        if func is torch.nn.functional.one_hot:  # torch's own looks whether labels are negative
            return _one_hot(*args, **kwargs)
        return func(*args, **kwargs)


def _one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # the number of classes is then read from the labels, which is refused
        return torch.nn.functional.one_hot(labels)
    return (labels[..., None] == torch.arange(num_classes, device=labels.device)).long()
