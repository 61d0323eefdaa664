"""Where a recorded round can work with sums in place of matrices: see `recording.factors`.

What is followed is a model's way from what all lanes received through its steps, and what is made
of it in the end: differences, and multiples by a number or by one for each lane.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, fx

from fedkeel.engine.compiler.fuse_updates import accumulate
from fedkeel.engine.compiler.graph_nodes import SIGNS, base, form, mutates
from fedkeel.engine.compiler.low_rank_terms import Scale, added, entries, made, slim, times

aten = torch.ops.aten

Key = tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]
"""The parts of a term, and the nodes by which it is multiplied."""

Sum = dict[Key, float]
"""Terms, with the numbers by which they are multiplied."""

LANES = 2
"""Tensors [n, a, b] in a sum, at most: a step reads each of them."""


def expand(graph: fx.Graph, thin: Set[int] = frozenset()) -> None:
    """Work with the terms of sums where that is less work.

    Args:
        graph: recorded; its updates have been made calls of `accumulate`.
        thin: places of what is returned at which the factors of a matrix will do, as a tuple.
    """
    banned: set[fx.Node] = set()
    while True:
        sums = _Sums(graph, banned)
        known = sums.known
        asked = {_root(node) for node in known if node.target is accumulate and _asked(node, known)}
        made_anyway = sums.unfit | asked
        if not made_anyway:
            break
        banned |= made_anyway
    _replace(graph, known, thin)


class _Sums:
    """The nodes of a graph that are sums with thin products among their terms.

    Args:
        graph: recorded.
        banned: models that begin there are left alone.

    Attributes:
        known: what was found.
        unfit: where models begin of which a step is no such sum, or for which it does not pay.
    """

    def __init__(self, graph: fx.Graph, banned: set[fx.Node]) -> None:
        self.known: dict[fx.Node, Sum] = {}
        self.unfit: set[fx.Node] = set()
        self._others: dict[fx.Node, Sum | None] = {}
        self._written = {base(one) for n in graph.nodes if mutates(n) for one in n.all_input_nodes}
        for node in graph.nodes:
            if node.op != "call_function" or len(_shape(node)) != 3:
                continue
            if node.target is accumulate:
                root = _root(node)
                if root in banned or _shape(root) != _shape(node)[1:]:
                    continue
                found = self._accumulated(node)
                if not _pays(found, node):
                    self.unfit.add(root)
            elif any(one in self.known for one in node.all_input_nodes):
                found = self._combined(node)
            else:
                continue
            if found is not None and _pays(found, node):
                self.known[node] = found

    def _of(self, node: Any, like: fx.Node) -> Sum | None:  # noqa: ANN401
        """Return the sum that a node is, or itself as a term; None of what cannot be one."""
        if not isinstance(node, fx.Node):
            return None
        if node in self.known:
            return self.known[node]
        if _nothing(node):
            return {}
        own, whole = form(node), form(like)
        if own is None or whole is None or own[2] != whole[2]:
            return None
        if own[0] not in (whole[0], whole[0][1:]):
            return None
        if node not in self._others:
            args: Any = node.args
            parts = tuple(args) if node.target is aten.bmm.default else (node,)
            lasts = not any(self._fleeting(base(part)) for part in parts)
            itself: Sum | None = {(parts, ()): 1.0} if lasts else None
            # of what a lane keeps and what all were sent, say
            self._others[node] = self._combined(node) or itself
        return self._others[node]

    def _fleeting(self, node: fx.Node) -> bool:
        """Return whether a tensor may be written over before a term is looked at."""
        return node.target is accumulate or node in self._written

    def _accumulated(self, node: fx.Node) -> Sum | None:
        """Return a model after a step."""
        args: Any = node.args
        target, rate, pull, terms, _ = args
        found = self._of(target, node)
        if found is None or not isinstance(rate, fx.Node):
            return None
        out = dict(found)
        if pull is not None:
            factor, other = pull
            towards = self._of(other, node)
            if towards is None:
                return None
            _add(out, found, -factor, (rate,))
            _add(out, towards, factor, (rate,))
        for number, parts in terms:
            product: Sum = {(tuple(parts), ()): 1.0}
            one = product if len(parts) == 2 else self._of(parts[0], node)
            if one is None:
                return None
            _add(out, one, -number, (rate,))
        return out

    def _combined(self, node: fx.Node) -> Sum | None:
        """Return a sum, a difference, or a multiple by a number or by one for each lane."""
        args: Any = node.args
        out: Sum = {}
        if len(args) != 2:
            return None
        if node.target in SIGNS:
            first, second = self._of(args[0], node), self._of(args[1], node)
            alpha = node.kwargs.get("alpha", 1)
            if first is None or second is None or not isinstance(alpha, (int, float)):
                return None
            _add(out, first, 1.0)
            _add(out, second, SIGNS[node.target] * alpha)
            return out
        if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
            return None
        one, factor = args if _shape(args[0]) == _shape(node) else reversed(args)
        found = self._of(one, node)
        if found is None:
            return None
        if isinstance(factor, (int, float)):
            _add(out, found, float(factor))
            return out
        scales = len(_shape(node)) == 3 and _shape(factor) == (_shape(node)[0], 1, 1)
        if not scales or factor.meta["val"].dtype != node.meta["val"].dtype:
            return None
        _add(out, found, 1.0, (factor,))
        return out


def _shape(node: object) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _root(node: Any) -> fx.Node:  # noqa: ANN401 - any argument of an operation
    """Return what the first of a chain of accumulations begins with."""
    while node.target is accumulate:
        node = node.args[0]
    found: fx.Node = node
    return found


def _add(out: Sum, other: Sum, number: float, scales: tuple[fx.Node, ...] = ()) -> None:
    """Add a multiple of a sum; what cancels exactly is left out."""
    for (parts, known), own in other.items():
        key = parts, tuple(sorted((*known, *scales), key=lambda one: one.name))
        out[key] = out.get(key, 0.0) + number * own
        if out[key] == 0.0:
            del out[key]


def _nothing(node: fx.Node) -> bool:
    """Return whether a tensor is made of zeros, such as a momentum at the start."""
    if node.op == "get_attr":
        return not node.meta["constant"].any()
    return node.target in (aten.zeros_like.default, aten.new_zeros.default)


def _pays(found: Sum | None, node: fx.Node) -> bool:
    """Return whether working with the terms of a matrix is less work than with the matrix."""
    if found is None:
        return False
    every = {parts for parts, _ in found}
    thin = sum(_shape(parts[0])[2] for parts in every if len(parts) == 2)
    lanes = sum(len(parts) == 1 and len(_shape(parts[0])) == 3 for parts in every)
    _, a, b = _shape(node)
    return 0 < 2 * thin * (a + b) <= a * b and lanes <= LANES


# ---- what is done with them ----------------------------------------------------------------------


def _asked(node: fx.Node, known: dict[fx.Node, Sum]) -> bool:
    """Return whether a node is used in a way that wants it whole."""
    return any(user not in known and not _uses(node, user, known[node]) for user in node.users)


def _uses(node: fx.Node, user: fx.Node, found: Sum) -> list[tuple[fx.Node, str]]:
    """Return what is done with a node, through one view at most; nothing if terms will not do."""
    args: Any = user.args
    if user.target is aten.sum.dim_IntList and list(args[1:]) == [[1, 2]]:
        return [(user, "entries")]
    through = [(one, user) for one in user.users]
    if user.target is aten.bmm.default:
        through, kind, how = [(user, node)], aten.bmm.default, "times"
    elif user.target is aten.transpose.int and sorted(args[1:]) == [1, 2]:
        kind, how = aten.bmm.default, "turned"
    elif user.target is aten.view.default and len(_shape(user)) == 2:
        kind, how = aten.mm.default, "added"
    else:
        return []
    for one, seen in through:
        if one.target is not kind or one.args[1] is not seen or one.args[0] is seen:
            return []
        if how == "added" and _shape(one.args[0]) != (1, _shape(node)[0]):
            return []
    if how != "added" and not any(_alike(*key) for key in found):
        return []
    return [(one, how) for one, _ in through]


def _alike(parts: tuple[fx.Node, ...], scales: tuple[fx.Node, ...]) -> bool:
    """Return whether a term is the same for all lanes."""
    return len(_shape(parts[0])) == 2 and not any(len(_shape(one)) == 3 for one in scales)


def _replace(graph: fx.Graph, known: dict[fx.Node, Sum], thin: Set[int]) -> None:
    """Do with terms what is done with nodes, and make what is wanted whole."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    found = [
        (use, how, node)
        for node, own in known.items()
        for user in node.users
        if user not in known
        for use, how in _uses(node, user, own)
    ]
    totals: dict[fx.Node, fx.Node] = {}
    for use, how, node in sorted(found, key=lambda one: order[one[0]]):
        terms = _terms(known[node])
        with graph.inserting_before(use):
            if how == "entries":
                sums = tuple(_total(graph, parts, totals) for parts, _ in terms)
                other = graph.call_function(entries, (terms, sums))
            elif how == "added":
                other = graph.call_function(added, (use.args[0], terms))
            else:
                other = graph.call_function(times, (use.args[0], how == "turned", terms))
        other.meta.update(use.meta)
        use.replace_all_uses_with(other)
    graph.eliminate_dead_code()
    output = next(node for node in graph.nodes if node.op == "output")
    returned: Any = output.args[0]
    for node in [one for one in graph.nodes if one in known]:
        users = [user for user in node.users if user not in known]
        if users:
            places = {place for place, one in enumerate(returned) if one is node}
            way = slim if users == [output] and places <= thin else made
            with graph.inserting_before(node):
                whole = graph.call_function(way, (_terms(known[node]),))
            whole.meta.update(node.meta)
            for user in users:
                user.replace_input_with(node, whole)
    graph.eliminate_dead_code()


def _terms(found: Sum) -> tuple[Any, ...]:
    """Return a sum as `recording.factors` takes it: the scales of the same parts together."""
    out: dict[tuple[fx.Node, ...], list[Scale]] = {}
    for (parts, scales), number in found.items():
        out.setdefault(parts, []).append((number, scales))
    return tuple((parts, tuple(scales)) for parts, scales in out.items())


def _total(
    graph: fx.Graph, parts: tuple[fx.Node, ...], known: dict[fx.Node, fx.Node]
) -> fx.Node | None:
    """Return the sum of the entries of a term of one tensor, made once; None of a product."""
    one = parts[0]
    if len(parts) == 2:
        return None
    if one not in known:
        axes = ([1, 2],) if len(_shape(one)) == 3 else ()
        target = aten.sum.dim_IntList if axes else aten.sum.default
        known[one] = graph.call_function(target, (one, *axes))
        known[one].meta["val"] = target(one.meta["val"], *axes)
    return known[one]
