"""Finds where a compiled round can use low-rank terms in place of clients' matrices.

`low_rank_terms.py` says what the terms are. The pass follows a model from what all clients received
through its steps, and what is made of it at the end: differences, and multiples by a number or by
one number for each client.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx

from fedkeel.engine.compiler.fuse_updates import apply_update
from fedkeel.engine.compiler.graph_nodes import (
    SIGNS,
    is_mutating,
    layout,
    output_node,
    remove_unused,
    shape_of,
    view_base,
)
from fedkeel.engine.compiler.low_rank_terms import (
    TermScale,
    dense,
    factors_or_dense,
    multiply,
    sum_of_entries,
    weighted_sum,
)

aten = torch.ops.aten

Key = tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]
"""The tensors of a term (one, or two that stand for their product), and the nodes it is scaled by.
"""

Sum = dict[Key, float]
"""Terms, with the numbers by which they are multiplied."""

MAX_CLIENT_MATRICES = 2
"""Terms [n, a, b] in a sum, at most: each step reads all of them."""

Use = tuple[fx.Node, str]
"""A node that uses a sum, and how: ``entries``, ``multiply``, ``transposed`` or ``weighted``."""


def use_low_rank_terms(graph: fx.Graph, low_rank: Set[int] = frozenset()) -> None:
    """Compute with the terms of sums in place of matrices where that is less work.

    Args:
        graph: traced; its updates have become calls of `apply_update`.
        low_rank: positions of results that may be returned as a tuple of two factors.
    """
    excluded: set[fx.Node] = set()
    while True:
        finder = _SumFinder(graph, excluded)
        sums = finder.sums
        updated = [node for node in sums if node.target is apply_update]
        new = finder.unsuitable | {_root(n) for n in updated if _is_needed_dense(n, sums)}
        if not new:
            break
        excluded |= new
    _replace_uses(graph, sums)
    _replace_results(graph, sums, low_rank)


class _SumFinder:
    """Finds the nodes of a graph that are sums with low-rank products among their terms.

    Models that begin at an excluded node are left as they are. A node is unsuitable if a model that
    begins there is not such a sum after a step, or if its sums do not save work.
    """

    def __init__(self, graph: fx.Graph, excluded: set[fx.Node]) -> None:
        self.sums: dict[fx.Node, Sum] = {}
        self.unsuitable: set[fx.Node] = set()
        self._other_sums: dict[fx.Node, Sum | None] = {}
        mutating = [node for node in graph.nodes if is_mutating(node)]
        self._overwritten = {view_base(s) for node in mutating for s in node.all_input_nodes}
        for node in graph.nodes:
            if node.op != "call_function" or len(shape_of(node)) != 3:
                continue
            if node.target is apply_update:
                root = _root(node)
                if root in excluded or shape_of(root) != shape_of(node)[1:]:
                    continue
                terms = self._after_update(node)
                if not _saves_work(terms, node):
                    self.unsuitable.add(root)
            elif any(source in self.sums for source in node.all_input_nodes):
                terms = self._combined(node)
            else:
                continue
            if terms is not None and _saves_work(terms, node):
                self.sums[node] = terms

    def _sum_of(self, node: Any, result: fx.Node) -> Sum | None:  # noqa: ANN401
        """Return the sum that an argument is, or itself as a term; None if it can be neither."""
        if not isinstance(node, fx.Node):
            return None
        if node in self.sums:
            return self.sums[node]
        if _is_zero(node):
            return {}
        present, wanted = layout(node), layout(result)
        if present is None or wanted is None or present[2] != wanted[2]:
            return None
        if present[0] not in (wanted[0], wanted[0][1:]):
            return None
        if node not in self._other_sums:
            parts: Any = tuple(node.args) if node.target is aten.bmm.default else (node,)
            stays = not any(self._may_be_overwritten(view_base(part)) for part in parts)
            itself: Sum | None = {(parts, ()): 1.0} if stays else None
            # e.g. a sum of what a client keeps and of what all were sent
            self._other_sums[node] = self._combined(node) or itself
        return self._other_sums[node]

    def _may_be_overwritten(self, node: fx.Node) -> bool:
        """Return whether a tensor may be written over before a term is used."""
        return node.target is apply_update or node in self._overwritten

    def _after_update(self, node: fx.Node) -> Sum | None:
        """Return a model after a step."""
        args: Any = node.args
        target, rate, pull, terms, _ = args
        before = self._sum_of(target, node)
        if before is None or not isinstance(rate, fx.Node):
            return None
        total = dict(before)
        if pull is not None:
            factor, other = pull
            other_sum = self._sum_of(other, node)
            if other_sum is None:
                return None
            _add(total, before, -factor, (rate,))
            _add(total, other_sum, factor, (rate,))
        for factor, parts in terms:
            product: Sum = {(tuple(parts), ()): 1.0}
            term = product if len(parts) == 2 else self._sum_of(parts[0], node)
            if term is None:
                return None
            _add(total, term, -factor, (rate,))
        return total

    def _combined(self, node: fx.Node) -> Sum | None:
        """Return a sum, a difference, or a multiple by a number or by one for each client."""
        args: Any = node.args
        total: Sum = {}
        if len(args) != 2:
            return None
        if node.target in SIGNS:
            first, second = self._sum_of(args[0], node), self._sum_of(args[1], node)
            alpha = node.kwargs.get("alpha", 1)
            if first is None or second is None or not isinstance(alpha, (int, float)):
                return None
            _add(total, first, 1.0)
            _add(total, second, SIGNS[node.target] * alpha)
            return total
        if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
            return None
        matrix, factor = args if shape_of(args[0]) == shape_of(node) else reversed(args)
        terms = self._sum_of(matrix, node)
        if terms is None:
            return None
        if isinstance(factor, (int, float)):
            _add(total, terms, float(factor))
            return total
        shape = shape_of(node)
        is_per_client = len(shape) == 3 and shape_of(factor) == (shape[0], 1, 1)
        if not is_per_client or factor.meta["val"].dtype != node.meta["val"].dtype:
            return None
        _add(total, terms, 1.0, (factor,))
        return total


def _root(node: Any) -> fx.Node:  # noqa: ANN401
    """Return the node that the first of a chain of updates begins with."""
    while node.target is apply_update:
        node = node.args[0]
    root: fx.Node = node
    return root


def _add(total: Sum, terms: Sum, number: float, scales: tuple[fx.Node, ...] = ()) -> None:
    """Add a multiple of a sum; terms that cancel exactly are removed."""
    for (parts, factors), value in terms.items():
        key = parts, tuple(sorted((*factors, *scales), key=lambda node: node.name))
        total[key] = total.get(key, 0.0) + number * value
        if total[key] == 0.0:
            del total[key]


def _is_zero(node: fx.Node) -> bool:
    """Return whether a tensor is made of zeros, such as a momentum at the start."""
    if node.op == "get_attr":
        return not node.meta["constant"].any()
    return node.target in (aten.zeros_like.default, aten.new_zeros.default)


def _saves_work(terms: Sum | None, node: fx.Node) -> bool:
    """Return whether computing with a matrix's terms is less work than with the matrix."""
    if terms is None:
        return False
    tensors = {parts for parts, _ in terms}
    rank = sum(shape_of(parts[0])[2] for parts in tensors if len(parts) == 2)
    per_client = sum(len(parts) == 1 and len(shape_of(parts[0])) == 3 for parts in tensors)
    _, a, b = shape_of(node)
    return 0 < 2 * rank * (a + b) <= a * b and per_client <= MAX_CLIENT_MATRICES


# ---- what uses the sums --------------------------------------------------------------------------


def _is_needed_dense(node: fx.Node, sums: dict[fx.Node, Sum]) -> bool:
    """Return whether something uses a node that cannot use its terms."""
    return any(user not in sums and not _uses(node, user, sums[node]) for user in node.users)


def _uses(node: fx.Node, user: fx.Node, terms: Sum) -> list[Use]:
    """Return what uses a sum, through one view at most; nothing where terms do not suffice."""
    args: Any = user.args
    if user.target is aten.sum.dim_IntList and list(args[1:]) == [[1, 2]]:
        return [(user, "entries")]
    users = [(after_view, user) for after_view in user.users]
    if user.target is aten.bmm.default:
        users, operation, how = [(user, node)], aten.bmm.default, "multiply"
    elif user.target is aten.transpose.int and sorted(args[1:]) == [1, 2]:
        operation, how = aten.bmm.default, "transposed"
    elif user.target is aten.view.default and len(shape_of(user)) == 2:
        operation, how = aten.mm.default, "weighted"
    else:
        return []
    for after_view, matrix in users:
        is_second = after_view.args[1:2] == (matrix,) and after_view.args[0] is not matrix
        if after_view.target is not operation or not is_second:
            return []
        if how == "weighted" and shape_of(after_view.args[0]) != (1, shape_of(node)[0]):
            return []
    if how != "weighted" and not any(_is_common(*key) for key in terms):
        return []
    return [(after_view, how) for after_view, _ in users]


def _is_common(parts: tuple[fx.Node, ...], scales: tuple[fx.Node, ...]) -> bool:
    """Return whether a term is the same for all clients."""
    return len(shape_of(parts[0])) == 2 and not any(len(shape_of(s)) == 3 for s in scales)


def _replace_uses(graph: fx.Graph, sums: dict[fx.Node, Sum]) -> None:
    """Compute with terms what is computed with sums."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    uses = [
        (use, how, node)
        for node, terms in sums.items()
        for user in node.users
        if user not in sums
        for use, how in _uses(node, user, terms)
    ]
    totals: dict[fx.Node, fx.Node] = {}
    for use, how, node in sorted(uses, key=lambda item: order[item[0]]):
        terms = _as_arguments(sums[node])
        with graph.inserting_before(use):
            if how == "entries":
                entry_sums = tuple(_sum_of_tensor(graph, parts, totals) for parts, _ in terms)
                new = graph.call_function(sum_of_entries, (terms, entry_sums))
            elif how == "weighted":
                new = graph.call_function(weighted_sum, (use.args[0], terms))
            else:
                new = graph.call_function(multiply, (use.args[0], how == "transposed", terms))
        new.meta.update(use.meta)
        use.replace_all_uses_with(new)
    remove_unused(graph)


def _replace_results(graph: fx.Graph, sums: dict[fx.Node, Sum], low_rank: Set[int]) -> None:
    """Compute the matrices that are needed, or their factors where these may be returned."""
    output = output_node(graph)
    returned: Any = output.args[0]
    for node in [node for node in graph.nodes if node in sums]:
        users = [user for user in node.users if user not in sums]
        if users:
            positions = {i for i, result in enumerate(returned) if result is node}
            may_be_factors = users == [output] and positions <= low_rank
            function = factors_or_dense if may_be_factors else dense
            with graph.inserting_before(node):
                result = graph.call_function(function, (_as_arguments(sums[node]),))
            result.meta.update(node.meta)
            for user in users:
                user.replace_input_with(node, result)
    remove_unused(graph)


def _as_arguments(terms: Sum) -> tuple[Any, ...]:
    """Return a sum as `low_rank_terms` takes it: the scales of the same tensors together."""
    scales_by_parts: dict[tuple[fx.Node, ...], list[TermScale]] = {}
    for (parts, factors), number in terms.items():
        scales_by_parts.setdefault(parts, []).append((number, factors))
    return tuple((parts, tuple(scales)) for parts, scales in scales_by_parts.items())


def _sum_of_tensor(
    graph: fx.Graph, parts: tuple[fx.Node, ...], known: dict[fx.Node, fx.Node]
) -> fx.Node | None:
    """Return the sum of the entries of a term of one tensor, made once; None of a product."""
    tensor = parts[0]
    if len(parts) == 2:
        return None
    if tensor not in known:
        axes = ([1, 2],) if len(shape_of(tensor)) == 3 else ()
        target = aten.sum.dim_IntList if axes else aten.sum.default
        known[tensor] = graph.call_function(target, (tensor, *axes))
        known[tensor].meta["val"] = target(tensor.meta["val"], *axes)
    return known[tensor]
