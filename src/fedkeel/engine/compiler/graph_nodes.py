"""What can be said of one operation of a recorded graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

SIGNS: dict[Any, float] = {aten.add.Tensor: 1.0, aten.sub.Tensor: -1.0}
"""Operations that add, with the sign of their second term."""


def schema(node: fx.Node) -> Any:  # noqa: ANN401
    """Return how an operation is declared; None of what is no operation of torch."""
    return getattr(node.target, "_schema", None)


def is_random(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def mutates(node: fx.Node) -> bool:
    """Return whether an operation writes to an argument; batch norm does, and does not say so."""
    known = schema(node)
    if known is None:
        return False
    return bool(known.is_mutable) or "batch_norm" in known.name


_VIEWS = {aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default}
"""Operations that give views, and do not say so."""


def is_view(node: fx.Node) -> bool:
    """Return whether a node looks at another one's memory."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or node.target in _VIEWS:
        return True
    known = schema(node)
    return known is not None and any(
        one.alias_info is not None and not one.alias_info.is_write for one in known.returns
    )


def base(node: fx.Node) -> fx.Node:
    """Return the node whose memory this one looks at."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def memory(node: fx.Node) -> fx.Node:
    """Return the node that made the memory in which this one's value lies."""
    while node.op == "call_function" and node.all_input_nodes and (is_view(node) or _gives(node)):
        node = node.all_input_nodes[0]
    return node


def _gives(node: fx.Node) -> bool:
    """Return whether an operation returns the argument that it has written to."""
    known = schema(node)
    return known is not None and any(
        one.alias_info is not None and one.alias_info.is_write for one in known.returns
    )


def written(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose memory is written to by a later one."""
    return {one for node in graph.nodes for one in changed_by(node)}


def changed_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes to whose memory this one writes: all where it does not say which."""
    if node.op != "call_function" or not mutates(node):
        return []
    return [memory(one) for one in writes(node) or node.all_input_nodes]


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation says that it writes to."""
    known = schema(node)
    declared = [
        node.args[place] if place < len(node.args) else node.kwargs.get(one.name)
        for place, one in enumerate(known.arguments if known is not None else ())
        if one.alias_info is not None and one.alias_info.is_write
    ]
    flat = [one for given in declared for one in (given if isinstance(given, list) else [given])]
    return [one for one in flat if isinstance(one, fx.Node)]


def form(node: fx.Node) -> tuple[Any, ...] | None:
    """Return shape, strides and type of a tensor; None of anything else."""
    value = node.meta.get("val")
    return form_of(value) if isinstance(value, Tensor) else None


def form_of(value: Tensor) -> tuple[Any, ...]:
    """Return shape, strides and type; an axis of one entry has a stride of 1, as any would do."""
    sizes = tuple(value.shape)
    strides = tuple(1 if n == 1 else s for n, s in zip(sizes, value.stride(), strict=True))
    return sizes, strides, value.dtype


def turns(node: fx.Node) -> bool:
    """Return whether a view only exchanges two axes."""
    return node.target in (aten.t.default, aten.transpose.int)


def called(graph: fx.Graph, target: Any, *args: Any, **named: Any) -> fx.Node:  # noqa: ANN401
    """Return a new node, which knows its value's form."""
    node = graph.call_function(target, args, named)
    node.meta["val"] = target(*fx.map_arg(args, lambda one: one.meta["val"]), **named)
    return node
