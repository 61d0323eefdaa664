"""A function of tensors, watched while it runs once, as a graph of the operations that it did.

torch has tracers of its own, which do much more, for any program, and take ten times as long. A
step needs a list of its operations and nothing else.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils._pytree import arg_tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fedkeel.engine.compiler.graph_nodes import is_random, memory, writes

aten = torch.ops.aten

APART = 0.75
"""What a function is watched with is its example times this. Should numbers of the example get
into the graph by another way than as arguments, its results are other ones: seen at once."""


def trace(function: Callable[..., Sequence[Tensor]], example: Sequence[Tensor]) -> fx.Graph:
    """Run a function once, and return its operations on tensors as a graph.

    Each node but the output knows what it gives: ``meta["val"]`` has the forms of its tensors, on
    torch's device without memory, ``meta["device"]`` where the first of them lies. That of a
    constant holds it as ``meta["constant"]``.

    Args:
        function: of tensors, whose Python may depend on their forms and not on their numbers.
        example: what it is called with; copies are.

    Raises:
        RuntimeError: the function asks for numbers in a tensor, or writes to a tensor of its own.
        Exception: whatever it raises itself.
    """
    graph = fx.Graph()
    watch = _Watch(graph)
    given = [t.clone().mul_(APART) if t.is_floating_point() else t.clone() for t in example]
    for name, tensor in zip(_names(function, len(given)), given, strict=True):
        watch.argument(name, tensor)
    with torch.no_grad(), watch, _Calls():
        found = function(*given)
    graph.output([watch.node(tensor) for tensor in found])
    return graph


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """Return a graph as a function again, with its constants as buffers."""
    kept = {str(n.target): n.meta["constant"] for n in graph.nodes if n.op == "get_attr"}
    return fx.GraphModule(kept, graph)


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """Return names for the arguments: those that the function has, as far as it has any."""
    known = list(inspect.signature(function).parameters)
    return known if len(known) == count else [f"given_{place}" for place in range(count)]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does operations, and writes them down.

    Args:
        graph: where.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constants = 0
        self._graph = graph
        self._nodes = WeakIdKeyDictionary()
        self._varies: set[fx.Node] = set()  # what is not the same in every call

    def argument(self, name: str, tensor: Tensor) -> None:
        """Take a tensor as one of the function's arguments."""
        node = self._graph.placeholder(name)
        self._varies.add(node)
        self._made(node, tensor)

    def node(self, tensor: Tensor) -> fx.Node:
        """Return what made a tensor; where that was not seen, it is a constant."""
        if tensor not in self._nodes:
            kept = self._graph.create_node("get_attr", f"kept_{self._constants}")
            kept.meta["constant"] = tensor
            self._constants += 1
            self._made(kept, tensor)
        found: fx.Node = self._nodes[tensor]
        return found

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do an operation."""
        kwargs = kwargs or {}
        if func._can_decompose():
            leaves = arg_tree_leaves(*args, **kwargs)
            if autograd_would_have_decomposed(func, leaves):  # and has not: no gradients here
                with self:
                    return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:  # a tensor made of numbers, anew in each call
            func = aten.lift_fresh_copy.default
        node = self._written_down(func, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._made(node, out)
        elif isinstance(out, tuple | list):
            node.meta["val"] = tuple(_form(one) if isinstance(one, Tensor) else one for one in out)
            for place, one in enumerate(out):
                if isinstance(one, Tensor):
                    node.meta.setdefault("device", one.device)
                    self._made(self._graph.call_function(operator.getitem, (node, place)), one)
        elif not writes(node):
            self._graph.erase_node(node)
        return out

    def _written_down(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:  # noqa: ANN401
        """Return the node of an operation, if it may be done.

        Raises:
            RuntimeError: it looks at numbers, or writes to a constant.
        """
        name = func.overloadpacket.__name__
        given = fx.node.map_aggregate(
            (tuple(args), dict(kwargs)),
            lambda one: self.node(one) if isinstance(one, Tensor) else one,
        )
        node = self._graph.create_node("call_function", func, *given, name=name)
        if not self._varies.isdisjoint(_decisive(node)):
            raise RuntimeError(f"the numbers in a tensor decide what is done ({name})")
        changed = [memory(one) for one in writes(node)]
        if is_random(node) or not self._varies.isdisjoint(node.all_input_nodes):
            self._varies.update([node, *changed])
        if any(one.op == "get_attr" for one in changed):
            raise RuntimeError(f"a tensor that is no argument is written to ({name})")
        return node

    def _made(self, node: fx.Node, tensor: Tensor) -> None:
        node.meta.update(val=_form(tensor), device=tensor.device)
        if not self._varies.isdisjoint(node.all_input_nodes):
            self._varies.add(node)
        self._nodes[tensor] = node


def _form(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _decisive(node: fx.Node) -> list[fx.Node]:
    """Return the arguments whose numbers decide what is done, or the form of what it gives."""
    if node.target is aten.index.Tensor:  # by places, or by masks
        places = [one for one in node.args[1] if isinstance(one, fx.Node)]  # type: ignore[union-attr]
        return [one for one in places if one.meta["val"].dtype in (torch.bool, torch.uint8)]
    tags = getattr(node.target, "tags", ())
    decide = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return [] if decide.isdisjoint(tags) else node.all_input_nodes


_LEAVES = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.__array__,
    Tensor.__dlpack__,
}
"""Ways to the numbers in a tensor that are no operations."""


class _Calls(TorchFunctionMode):
    """Refuses to leave torch: what is done there cannot be watched."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _LEAVES:
            raise RuntimeError(f"Tensor.{func.__name__} leaves torch")
        if func is torch.nn.functional.one_hot:  # which looks whether labels are negative
            return _one_hot(*args, **kwargs)
        return func(*args, **kwargs)


def _one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # which is refused as any look at numbers
        return torch.nn.functional.one_hot(labels)
    return (labels[..., None] == torch.arange(num_classes, device=labels.device)).long()
