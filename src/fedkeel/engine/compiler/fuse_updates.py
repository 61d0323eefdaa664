"""Turns updates p - rate * g of a traced graph into accumulations into p.

For a linear layer, g is the product of activations and back-propagated errors. The product is
accumulated into the weights and never exists by itself, which saves most of the memory traffic of
a local step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fedkeel.base.matmul import add_product
from fedkeel.engine.compiler.graph_nodes import (
    SIGNS,
    insert_call,
    layout,
    output_node,
    view_base,
)

aten = torch.ops.aten

UpdateTerm = tuple[float, tuple[fx.Node, ...]]
"""A factor, and one tensor or two tensors that stand for their matrix product."""

Pull = tuple[float, fx.Node]
"""A factor, and the tensor `other` of a term factor * (target - other), such as FedProx's."""


def fuse_updates(graph: fx.Graph, rate: fx.Node, owned: set[fx.Node]) -> None:
    """Turn each p - rate * (sum of terms) into one call of `apply_update`.

    Args:
        graph: traced.
        rate: the argument that is the learning rate.
        owned: arguments that may be written over; results of updates are added to them.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    last_read = _last_reads(graph, order)
    returned = {view_base(node) for node in output_node(graph).all_input_nodes}
    rate_as_number = None
    for node in list(graph.nodes):
        gradient = _gradient_of_update(node, rate)
        if gradient is None:
            continue
        target = node.all_input_nodes[0]
        terms = _merge_equal_terms(_terms_of(gradient, 1.0, owned))
        fits = _broadcasts_to(target, node) and all(
            layout(node) == _term_layout(term, node) for term in terms
        )
        if not (terms and fits):
            continue
        pull, terms = _split_pull(terms, target, owned)
        in_place = (
            target in owned
            and layout(target) == layout(node)
            and target not in returned
            and last_read[target] <= order[node]
            and not any(view_base(part) is target for _, parts in terms for part in parts)
        )
        if rate_as_number is None:
            with graph.inserting_after(rate):
                rate_as_number = graph.call_function(float, (rate,))
        with graph.inserting_before(node):
            args = (target, rate_as_number, pull, tuple(terms), in_place)
            fused = graph.call_function(apply_update, args)
        fused.meta.update(node.meta)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        order[fused] = order[node]
        last_read[fused] = last_read.get(node, -1)
        owned.add(fused)


def apply_update(
    target: Tensor,
    rate: float,
    pull: tuple[float, Tensor] | None,
    terms: Sequence[tuple[float, Sequence[Tensor]]],
    in_place: bool,
) -> Tensor:
    """Return target - rate * (factor * (target - other) + sum of factor * term).

    Args:
        target: [...] the parameters.
        rate: the learning rate.
        pull: factor and other, which take one pass together; None where there is no such term.
        terms: (factor, tensors) of each; two tensors stand for their matrix product.
        in_place: whether the target itself becomes the result.
    """
    out = target
    if pull is not None:
        share, other = rate * pull[0], pull[1]
        out = out.lerp_(other, share) if in_place else out.lerp(other, share)
        in_place = True
    for position, (factor, parts) in enumerate(terms):
        alpha = -rate * factor
        makes_new_tensor = position == 0 and not in_place
        if len(parts) == 1 and makes_new_tensor:
            out = torch.add(out, parts[0], alpha=alpha)
        elif len(parts) == 1:
            out = out.add_(parts[0], alpha=alpha)
        else:
            left, right = parts
            if makes_new_tensor:  # the target may be one and the same for all clients
                shape = (*left.shape[:-1], right.shape[-1])
                out = out.expand(shape).clone(memory_format=torch.contiguous_format)
            out = add_product(out, left, right, alpha)
    return out


def center_factors(graph: fx.Graph) -> None:
    """Subtract the row means of a product A B from the small factor B instead.

    A B - mean(A B) = A (B - mean(B)), so a centralised gradient stays a product.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.sub.Tensor or node.kwargs:
            continue
        product, mean = node.args
        if not _is_row_mean(mean, product) or set(product.users) != {node, mean}:
            continue
        left, right = product.args
        with graph.inserting_before(node):
            row_means = insert_call(graph, aten.mean.dim, right, *mean.args[1:])
            centered_right = insert_call(graph, aten.sub.Tensor, right, row_means)
            centered = insert_call(graph, product.target, left, centered_right)
        if layout(centered) == layout(node):
            node.replace_all_uses_with(centered)


def _is_row_mean(mean: Any, product: Any) -> bool:  # noqa: ANN401
    """Return whether a node is the mean over the last axis of another, a matrix product."""
    if not (isinstance(mean, fx.Node) and isinstance(product, fx.Node)):
        return False
    if mean.target is not aten.mean.dim or mean.args[0] is not product or mean.kwargs:
        return False
    if product.target not in (aten.mm.default, aten.bmm.default) or len(mean.args) < 3:
        return False
    axes: Any = mean.args[1]
    last_axis = len(product.meta["val"].shape) - 1
    return list(axes) in ([last_axis], [-1]) and mean.args[2] is True


def _last_reads(graph: fx.Graph, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Return where each node's memory is last read, also through views."""
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            base = view_base(source)
            last[base] = max(last.get(base, -1), order[node])
    return last


def _gradient_of_update(node: fx.Node, rate: fx.Node) -> fx.Node | None:
    """Return g of a node p - rate * g, None of any other node."""
    if node.op != "call_function" or node.target is not aten.sub.Tensor or node.kwargs:
        return None
    scaled = node.args[1]
    if not isinstance(scaled, fx.Node) or scaled.target is not aten.mul.Tensor:
        return None
    factors = list(scaled.args)
    if rate not in factors or len(scaled.users) > 1 or not isinstance(node.args[0], fx.Node):
        return None
    factors.remove(rate)
    gradient = factors[0]
    return gradient if isinstance(gradient, fx.Node) and gradient is not rate else None


def _terms_of(node: fx.Node, factor: float, owned: set[fx.Node]) -> list[UpdateTerm]:
    """Return the terms of a sum that nothing else uses.

    A node that reads owned memory is one term: later that memory may have been written over.
    """
    sources = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    itself: list[UpdateTerm] = [(factor, (node,))]
    reads_owned = any(view_base(source) in owned for source in sources)
    if len(node.users) > 1 or node.op != "call_function" or reads_owned:
        return itself
    if node.target in (aten.mm.default, aten.bmm.default):
        return [(factor, tuple(sources))]
    sign = SIGNS.get(node.target)
    alpha = node.kwargs.get("alpha", 1)
    alike = len(sources) == 2 and all(layout(source) == layout(node) for source in sources)
    if sign is not None and alike and isinstance(alpha, (int, float)):
        second = _terms_of(sources[1], factor * sign * alpha, owned)
        return _terms_of(sources[0], factor, owned) + second
    is_scaled = node.target in (aten.mul.Tensor, aten.mul.Scalar)
    if is_scaled and len(sources) == 1 and isinstance(node.args[1], (int, float)):
        return _terms_of(sources[0], factor * node.args[1], owned)
    return itself


def _merge_equal_terms(terms: Sequence[UpdateTerm]) -> list[UpdateTerm]:
    """Return terms with those of the same tensors added up; single tensors may cancel."""
    factors: dict[tuple[fx.Node, ...], float] = {}
    for factor, parts in terms:
        factors[parts] = factors.get(parts, 0.0) + factor
    return [(factor, parts) for parts, factor in factors.items() if factor or len(parts) > 1]


def _split_pull(
    terms: list[UpdateTerm], target: fx.Node, owned: set[fx.Node]
) -> tuple[Pull | None, list[UpdateTerm]]:
    """Return a term factor * (target - other) as a `Pull`, and the other terms."""
    for term in terms:
        factor, parts = term
        node = parts[0]
        args = node.args if node.target is aten.sub.Tensor and not node.kwargs else ()
        is_pull = len(parts) == 1 and len(node.users) == 1 and args[:1] == (target,)
        other = args[1] if is_pull else None
        is_kept = isinstance(other, fx.Node) and view_base(other) not in owned
        if isinstance(other, fx.Node) and is_kept and _broadcasts_to(other, node):
            return (factor, other), [t for t in terms if t is not term]
    return None, terms


def _broadcasts_to(target: fx.Node, result: fx.Node) -> bool:
    """Return whether a target has a result's layout, or is one tensor for all clients of it."""
    first, second = layout(target), layout(result)
    if first is None or second is None or first == second:
        return first == second is not None
    return first[0] == second[0][1:] and first[2] == second[2]


def _term_layout(term: UpdateTerm, result: fx.Node) -> Any:  # noqa: ANN401
    """Return the layout of a term as it is added to a result: strides need not agree."""
    _, parts = term
    wanted = layout(result)
    if len(parts) == 2:
        return wanted
    source = layout(parts[0])
    return None if source is None or wanted is None else (source[0], wanted[1], source[2])
