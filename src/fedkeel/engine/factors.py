"""Models of lanes kept as what they differ from a common one by: sums of products.

After a few steps from a common model P, a lane's matrix is P - rate * sum of f * A B, where A and B
are as thin as a batch is small. As long as they are, nothing as large as the model need exist for
each lane: inputs are multiplied by P for all lanes in one product, and by the thin matrices; the
weighted sum of the lanes' updates is one product too.

Letters: n lanes, B rows of a batch, r the thin side, a x b the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fedkeel.engine.updates import accumulate

aten = torch.ops.aten

Products = Sequence[tuple[float, tuple[Tensor, Tensor]]]
"""f, and A [n, a, r] and B [n, r, b]."""


def times(x: Tensor, common: Tensor, rate: float, products: Products, turned: bool) -> Tensor:
    """Return x times each lane's matrix, or its transpose where `turned`.

    Args:
        x: [n, B, a], or [n, B, b] where turned.
        common: [a, b].
        rate: what the products are subtracted with.
        products: by which the lanes differ.
        turned: whether the matrices are transposed.
    """
    lanes, rows, _ = x.shape
    out = torch.mm(x.reshape(lanes * rows, -1), common.t() if turned else common)
    out = out.view(lanes, rows, -1)
    for factor, (a, b) in products:
        first, second = (b.mT, a.mT) if turned else (a, b)
        out.baddbmm_(torch.bmm(x, first), second, alpha=-rate * factor)
    return out


def entries(rate: float, products: Products) -> Tensor:
    """Return [n] the sum of all entries of each lane's update."""
    each = [-rate * f * (a.sum(1) * b.sum(2)).sum(1) for f, (a, b) in products]
    return torch.stack(each).sum(0)


def added(weights: Tensor, rate: float, products: Products) -> Tensor:
    """Return [1, a * b] the sum of the lanes' updates, by weights [1, n]."""
    scale = weights.view(-1, 1, 1)
    total: Tensor | None = None
    for factor, (a, b) in products:
        left = (a.mT * scale).flatten(0, 1).t()
        right = b.reshape(-1, b.shape[2])
        alpha = -rate * factor
        if total is None:
            total = torch.mm(left, right).mul_(alpha)
        else:
            total.addmm_(left, right, alpha=alpha)
    if total is None:
        raise ValueError("there are no products to add up")
    return total.view(1, -1)


@dataclass(frozen=True)
class _Apart:
    """A model's matrix in each lane, or where `common` is None its update."""

    common: fx.Node | None
    rate: fx.Node
    products: tuple[Any, ...]


def factor(graph: fx.Graph) -> None:
    """Work with factors in a recorded round, where that is less work.

    Args:
        graph: recorded; its updates have been made calls of `accumulate`.
    """
    known: dict[fx.Node, _Apart] = {}
    thick: set[fx.Node | None] = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is accumulate:
            before = _before(node, known)
            found = None if before is None else _accumulated(node, before)
            if found is not None:
                known[node] = found
            elif before is not None:
                thick.add(before.common)  # it has to be made in any case
    known = {node: one for node, one in known.items() if one.common not in thick}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.sub.Tensor and not node.kwargs:
            model = known.get(node.args[0])
            if model is not None and model.common is node.args[1]:
                known[node] = _Apart(None, model.rate, model.products)
        else:
            _use(graph, node, known)


def _shape(node: object) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _before(node: fx.Node, known: dict[fx.Node, _Apart]) -> _Apart | None:
    """Return the model before a step, where it is apart from a common one, or is that itself."""
    target, rate, _, _ = node.args
    if not isinstance(target, fx.Node) or not isinstance(rate, fx.Node):
        return None
    if target in known:
        return known[target]
    lanes = len(_shape(node)) == 3 and _shape(target) == _shape(node)[1:]
    return _Apart(target, rate, ()) if lanes else None


def _accumulated(node: fx.Node, before: _Apart) -> _Apart | None:
    """Return the model after a step, where only thin products were subtracted."""
    terms: Any = node.args[2]
    if not all(len(parts) == 2 for _, parts in terms):
        return None
    products = (*before.products, *terms)
    thin = sum(_shape(first)[2] for _, (first, _) in products)
    _, a, b = _shape(node)
    if 2 * thin * (a + b) > a * b:
        return None
    return _Apart(before.common, before.rate, products)


def _use(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, _Apart]) -> None:
    """Replace what is done with a lane's model or update by the same done with factors."""
    call: tuple[Any, tuple[Any, ...]] | None = None
    args: Any = node.args
    if node.target is aten.bmm.default:
        x, matrix = args
        turned = _turned(matrix)
        one = known.get(turned or matrix)
        if one is not None and one.common is not None:
            call = times, (x, one.common, one.rate, one.products, turned is not None)
    elif node.target is aten.sum.dim_IntList and list(args[1:]) == [[1, 2]]:
        one = known.get(args[0])
        if one is not None and one.common is None:
            call = entries, (one.rate, one.products)
    elif node.target is aten.mm.default:
        weights, flat = args
        if flat.target is aten.view.default and _shape(weights) == (1, _shape(flat)[0]):
            one = known.get(flat.args[0])
            if one is not None and one.common is None and len(_shape(flat)) == 2:
                call = added, (weights, one.rate, one.products)
    if call is None:
        return
    with graph.inserting_before(node):
        other = graph.call_function(*call)
    other.meta.update(node.meta)
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _turned(node: fx.Node) -> fx.Node | None:
    """Return the node whose last two axes this one exchanges, None where it does not."""
    if node.target is not aten.transpose.int:
        return None
    args: Any = node.args
    return args[0] if sorted(args[1:]) == [1, 2] else None
