"""Properties of single operations of a traced graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

SIGNS: dict[Any, float] = {aten.add.Tensor: 1.0, aten.sub.Tensor: -1.0}
"""Operations that add, with the sign of their second term."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a tensor."""


def schema(node: fx.Node) -> Any:  # noqa: ANN401
    """Return how an operation is declared, None where it is not an operation of torch."""
    return getattr(node.target, "_schema", None)


def output_node(graph: fx.Graph) -> fx.Node:
    """Return the node that lists the graph's results."""
    output: fx.Node = next(node for node in graph.nodes if node.op == "output")
    return output


def is_random(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers."""
    return draws_random_numbers(node.target, node.args, node.kwargs)


def draws_random_numbers(
    operation: Any,  # noqa: ANN401
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    """Return whether an operation draws random numbers; attention without dropout draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return bool((args[position] if position < len(args) else default) != 0.0)
    return True


def is_mutating(node: fx.Node) -> bool:
    """Return whether an operation writes to an argument; batch norm does without declaring it."""
    declared = schema(node)
    return declared is not None and (declared.is_mutable or "batch_norm" in declared.name)


_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
}


def is_view(node: fx.Node) -> bool:
    """Return whether a node's value lies in another one's memory."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or node.target in _UNDECLARED_VIEWS:
        return True
    return _returns_alias(node, written=False)


def _returns_alias(node: fx.Node, written: bool) -> bool:
    """Return whether an operation is declared to return memory of an argument, written or not."""
    declared = schema(node)
    return declared is not None and any(
        result.alias_info is not None and result.alias_info.is_write == written
        for result in declared.returns
    )


def view_base(node: fx.Node) -> fx.Node:
    """Return the node in whose memory this one's value lies, through views."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def storage_node(node: fx.Node) -> fx.Node:
    """Return the node that made the memory of this one's value, through views and writes."""
    while (
        node.op == "call_function"
        and node.all_input_nodes
        and (is_view(node) or _returns_alias(node, written=True))
    ):
        node = node.all_input_nodes[0]
    return node


def written_storage(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory an operation writes to: all where it declares none."""
    if node.op != "call_function" or not is_mutating(node):
        return []
    return [storage_node(arg) for arg in written_arguments(node) or node.all_input_nodes]


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation is declared to write to."""
    declared = schema(node)
    values: list[Any] = []
    for position, argument in enumerate(declared.arguments if declared is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positional = position < len(node.args)
            value = node.args[position] if positional else node.kwargs.get(argument.name)
            values += value if isinstance(value, list) else [value]
    return [value for value in values if isinstance(value, fx.Node)]


def layout(node: fx.Node) -> Layout | None:
    """Return shape, strides and type of a node's tensor, None where it is not a tensor."""
    value = node.meta.get("val")
    return layout_of(value) if isinstance(value, Tensor) else None


def layout_of(tensor: Tensor) -> Layout:
    """Return shape, strides and type; an axis of one entry counts as of stride 1."""
    shape = tuple(tensor.shape)
    strides = tuple(1 if n == 1 else s for n, s in zip(shape, tensor.stride(), strict=True))
    return shape, strides, tensor.dtype


def shape_of(node: object) -> tuple[int, ...]:
    """Return the shape of a node's tensor, () where it is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def is_transposition(node: fx.Node) -> bool:
    """Return whether a view only exchanges two axes."""
    return node.target in (aten.t.default, aten.transpose.int)


def remove_unused(graph: fx.Graph) -> None:
    """Remove operations whose results nothing uses; fx's own way checks the whole graph before."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def insert_call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401
    """Return a new node that calls a function, with its value described."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)
    return node
