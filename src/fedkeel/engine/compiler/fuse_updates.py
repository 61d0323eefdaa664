"""Updates of a recorded graph, p - rate * g, as accumulations into p.

For a linear layer the product of activations and back-propagated errors is accumulated into the
weights and never exists by itself, which saves most of the memory traffic of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fedkeel.engine.compiler.graph_nodes import SIGNS, base, called, form
from fedkeel.matmul import add_product

aten = torch.ops.aten

Term = tuple[float, tuple[fx.Node, ...]]
"""A factor, and one tensor or two whose matrix product is meant."""


def fuse(graph: fx.Graph, rate: fx.Node, owned: set[fx.Node]) -> None:
    """Turn p - rate * (sum of terms) into an accumulation into p, where p may be written over."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = _last_uses(graph, order)
    output = next(node for node in graph.nodes if node.op == "output")
    returned = {base(node) for node in output.all_input_nodes}
    step = None
    for node in list(graph.nodes):
        scaled = _update_of(node, rate)
        if scaled is None:
            continue
        target = node.all_input_nodes[0]
        found = _together(_terms(scaled, 1.0, owned))
        fits = _fits(target, node) and all(form(node) == _term_form(t, node) for t in found)
        if not (found and fits):
            continue
        pull, terms = _pull(found, target, owned)
        in_place = (
            target in owned
            and form(target) == form(node)
            and target not in returned
            and last[target] <= order[node]
            and not any(base(one) is target for _, parts in terms for one in parts)
        )
        if step is None:
            with graph.inserting_after(rate):
                step = graph.call_function(float, (rate,))
        with graph.inserting_before(node):
            fused = graph.call_function(accumulate, (target, step, pull, terms, in_place))
        fused.meta.update(node.meta)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        order[fused] = order[node]
        last[fused] = last.get(node, -1)
        owned.add(fused)


def _together(terms: Sequence[Term]) -> list[Term]:
    """Return terms of which those of the same tensors are one, and none where they cancel."""
    found: dict[tuple[fx.Node, ...], float] = {}
    for factor, parts in terms:
        found[parts] = found.get(parts, 0.0) + factor
    return [(factor, parts) for parts, factor in found.items() if factor or len(parts) > 1]


def _pull(
    terms: Sequence[Term], target: fx.Node, owned: set[fx.Node]
) -> tuple[tuple[float, fx.Node] | None, tuple[Term, ...]]:
    """Return a term factor * (target - other) of a sum, such as FedProx's, and the other terms."""
    for term in terms:
        factor, parts = term
        one = parts[0]
        pair = one.args if one.target is aten.sub.Tensor and not one.kwargs else ()
        alone = len(parts) == 1 and len(one.users) == 1 and pair[:1] == (target,)
        other = pair[1] if alone else None
        if isinstance(other, fx.Node) and base(other) not in owned and _fits(other, one):
            return (factor, other), tuple(own for own in terms if own is not term)
    return None, tuple(terms)


def centre(graph: fx.Graph) -> None:
    """Take the mean of each row of a product off the rows of its second factor, which is thin.

    A B - mean(A B) = A (B - mean(B)): so centralised gradients stay products.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.sub.Tensor or node.kwargs:
            continue
        product, mean = node.args
        if not _is_row_mean(mean, product) or set(product.users) != {node, mean}:
            continue
        first, second = product.args
        with graph.inserting_before(node):
            mean_of_rows = called(graph, aten.mean.dim, second, *mean.args[1:])
            thin = called(graph, aten.sub.Tensor, second, mean_of_rows)
            centred = called(graph, product.target, first, thin)
        if form(centred) == form(node):
            node.replace_all_uses_with(centred)


def _is_row_mean(mean: Any, product: Any) -> bool:  # noqa: ANN401 - any argument of an operation
    """Return whether the one is the mean over the last axis of the other, a matrix product."""
    if not (isinstance(mean, fx.Node) and isinstance(product, fx.Node)):
        return False
    if mean.target is not aten.mean.dim or mean.args[0] is not product or mean.kwargs:
        return False
    if product.target not in (aten.mm.default, aten.bmm.default) or len(mean.args) < 3:
        return False
    axes: Any = mean.args[1]
    last = len(product.meta["val"].shape) - 1
    return list(axes) in ([last], [-1]) and mean.args[2] is True


def _fits(target: fx.Node, result: fx.Node) -> bool:
    """Return whether a target has a result's form, or is the same for all lanes of it."""
    one, other = form(target), form(result)
    if one is None or other is None or one == other:
        return one == other is not None
    return bool(one[0] == other[0][1:] and one[2] == other[2])


def _last_uses(graph: fx.Graph, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Return where each node's memory is last read, also through views."""
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[base(used)] = max(last.get(base(used), -1), order[node])
    return last


def _update_of(node: fx.Node, rate: fx.Node) -> fx.Node | None:
    """Return g of a node p - rate * g, None of any other."""
    if node.op != "call_function" or node.target is not aten.sub.Tensor or node.kwargs:
        return None
    scaled = node.args[1]
    if not isinstance(scaled, fx.Node) or scaled.target is not aten.mul.Tensor:
        return None
    pair = list(scaled.args)
    if rate not in pair or len(scaled.users) > 1 or not isinstance(node.args[0], fx.Node):
        return None
    pair.remove(rate)
    return pair[0] if isinstance(pair[0], fx.Node) and pair[0] is not rate else None


def _terms(node: fx.Node, factor: float, owned: set[fx.Node]) -> list[Term]:
    """Return the terms of a sum that nobody else needs.

    What reads owned memory stays where it is: later on it may have been written over.
    """
    pair = [one for one in node.args[:2] if isinstance(one, fx.Node)]
    lone: list[Term] = [(factor, (node,))]
    if len(node.users) > 1 or node.op != "call_function" or any(base(n) in owned for n in pair):
        return lone
    if node.target in (aten.mm.default, aten.bmm.default):
        return [(factor, tuple(pair))]
    sign = SIGNS.get(node.target)
    alpha = node.kwargs.get("alpha", 1)
    alike = len(pair) == 2 and all(form(one) == form(node) for one in pair)
    if sign is not None and alike and isinstance(alpha, (int, float)):
        right = _terms(pair[1], factor * sign * alpha, owned)
        return _terms(pair[0], factor, owned) + right
    scales = node.target in (aten.mul.Tensor, aten.mul.Scalar)
    if scales and len(pair) == 1 and isinstance(node.args[1], (int, float)):
        return _terms(pair[0], factor * node.args[1], owned)
    return lone


def _term_form(term: Term, like: fx.Node) -> tuple[Any, ...] | None:
    """Return the form of a term; of a product that of what it is added to, if that fits."""
    _, parts = term
    if len(parts) == 1:
        one, other = form(parts[0]), form(like)
        if one is None or other is None:
            return None
        return (one[0], other[1], one[2])  # strides need not agree
    return form(like)


def accumulate(
    target: Tensor,
    rate: float,
    pull: tuple[float, Tensor] | None,
    terms: Sequence[tuple[float, Sequence[Tensor]]],
    in_place: bool,
) -> Tensor:
    """Return target - rate * (factor * (target - other) + sum of factor * term).

    Args:
        target: [...] what is accumulated into.
        rate: the learning rate.
        pull: factor and other, which take one pass together; None where there are none.
        terms: (factor, tensors) of each; two tensors are a product.
        in_place: whether the target itself becomes the result.
    """
    out = target
    if pull is not None:
        share, other = rate * pull[0], pull[1]
        out = out.lerp_(other, share) if in_place else out.lerp(other, share)
        in_place = True
    for number, (scale, parts) in enumerate(terms):
        alpha = -rate * scale
        fresh = number == 0 and not in_place
        if len(parts) == 1:
            out = torch.add(out, parts[0], alpha=alpha) if fresh else out.add_(*parts, alpha=alpha)
        else:
            left, right = parts
            if fresh:  # the target may be one and the same for all lanes
                shape = (*left.shape[:-1], right.shape[-1])
                out = out.expand(shape).clone(memory_format=torch.contiguous_format)
            out = add_product(out, left, right, alpha)
    return out
