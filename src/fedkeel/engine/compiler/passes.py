"""Passes over a recorded function's graph, which make its list of operations shorter or faster.

Each leaves the numbers as they are. How updates are joined is in `updates.py`, and how lanes are
kept as sums in `expand.py`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fedkeel import matmul
from fedkeel.engine.compiler.fuse_updates import accumulate
from fedkeel.engine.compiler.graph_nodes import (
    SIGNS,
    called,
    changed_by,
    form,
    form_of,
    is_random,
    is_view,
    memory,
    mutates,
    schema,
    turns,
    written,
)

aten = torch.ops.aten

# ---- what is written over ------------------------------------------------------------------------

_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.relu.default: aten.relu_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.clamp_min.default: aten.clamp_min_.default,
    aten.clamp_min.Tensor: aten.clamp_min_.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
}
"""Operations that may write their result over their first argument."""

_APART = {written: fresh for fresh, written in _IN_PLACE.items()}


def write_apart(graph: fx.Graph, fresh: set[fx.Node]) -> None:
    """Give what is written over a new tensor a tensor of its own: so it can be rearranged.

    Where it is still worth it in the end, `reuse` writes over the other one again.

    Args:
        graph: recorded.
        fresh: arguments that are new tensors, too.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _APART:
            continue
        source = node.args[0]
        made_here = source.op == "call_function" or source in fresh
        if not made_here or any(is_view(one) for one in (source, *source.users)):
            continue
        values = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        made = _APART[node.target](*values[0], **values[1])
        if form_of(made) != form(source):
            continue
        node.target = _APART[node.target]
        for user in list(source.users):
            if order[user] > order[node]:
                user.replace_input_with(source, node)


def skip_idle(graph: fx.Graph) -> None:
    """Take out views that change nothing, pairs of transpositions, and factors of one."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        idle = None
        if node.target is aten.mul.Scalar and node.args[1] == 1:
            idle = source
        elif is_view(node) and node.target is not operator.getitem:
            seen: fx.Node | None = source
            while seen is not None:
                if form(seen) == form(node) is not None:
                    idle = seen
                    break
                steps_back = is_view(seen) and turns(seen) and turns(node)
                seen = seen.all_input_nodes[0] if steps_back else None
        if idle is not None and form(idle) == form(node):
            node.replace_all_uses_with(idle)
            graph.erase_node(node)


# ---- what need not be worked out again -----------------------------------------------------------

_SMALL = 1 << 16
"""Entries of a constant that is kept, at most."""


def fold(graph: fx.Graph) -> None:
    """Work out once what depends on the arguments' forms alone, and is not written to later."""
    changed = written(graph)
    known: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or schema(node) is None or not isinstance(value, Tensor):
            continue
        if is_random(node) or mutates(node) or value.numel() > _SMALL:
            continue
        if memory(node) in changed:
            continue
        if node.target in _BLANK:
            given = node.args[0].meta["val"]
            like = torch.empty_strided(
                given.shape, given.stride(), dtype=given.dtype, device=node.meta["device"]
            )
            known[node] = node.target(like, *node.args[1:], **node.kwargs)
        elif all(one in known for one in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    output = next(node for node in graph.nodes if node.op == "output")
    for number, (node, constant) in enumerate(known.items()):
        if all(user in known for user in node.users):
            continue
        with graph.inserting_before(node):
            kept = graph.get_attr(f"constant_{number}")
            kept.meta["constant"] = constant.contiguous()
            kept.meta["val"] = node.meta["val"].contiguous()
            # what is returned may be written over by whoever gets it
            own = graph.call_function(aten.clone.default, (kept,)) if output in node.users else kept
            own.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(own)


_BLANK = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""Operations that look at a tensor's form, not at its numbers."""


def share(graph: fx.Graph) -> None:
    """Do once what is done twice to the same arguments."""
    if any(mutates(node) for node in graph.nodes):
        return
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node):
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def pool_first(graph: fx.Graph) -> None:
    """Take the maximum of each window before the ReLU, and the gradient through the ReLU first.

    max(relu(x)) = relu(max(x)), of a quarter of the entries or fewer. Where the maximum is not
    positive no gradient passes either way, and elsewhere the ReLU moves no maximum: same numbers.
    """
    pool, back = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
    for node in list(graph.nodes):
        if node.target is not pool or node.args[0].target is not aten.relu.default:
            continue
        relu, most = node.args[0], _item(node, 0)
        backward = [one for one in relu.users if one.target is back and one.args[1] is relu]
        through = [one for one in relu.users if one.target is aten.threshold_backward.default]
        known = {node, *backward, *through}
        pairs = len(through) == len(backward) and all(
            one.args[0] in backward and one.args[1:] == (relu, 0) and len(one.args[0].users) == 1
            for one in through
        )
        if most is None or not pairs or set(relu.users) != known:
            continue
        node.update_arg(0, relu.args[0])
        users = list(most.users)
        with graph.inserting_after(most):
            positive = graph.call_function(aten.relu.default, (most,))
        positive.meta["val"] = most.meta["val"]
        for user in users:
            user.replace_input_with(most, positive)
        for one in through:
            last = one.args[0]
            with graph.inserting_before(last):
                passed = graph.call_function(one.target, (last.args[0], positive, 0))
            passed.meta["val"] = last.args[0].meta["val"]
            last.update_arg(0, passed)
            last.update_arg(1, relu.args[0])
            one.replace_all_uses_with(last)


def _item(node: fx.Node, number: int) -> fx.Node | None:
    """Return one of the tensors that an operation returns; None where nobody looks at it."""
    found = [one for one in node.users if one.target is operator.getitem and one.args[1] == number]
    return found[0] if found else None


def multiply_and_add(graph: fx.Graph) -> None:
    """Add, or take off, a product of entries in the pass that makes it."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    writers = [(order[node], one) for node in graph.nodes for one in _changed_by(node)]
    for node in list(graph.nodes):
        if node.target not in SIGNS or node.kwargs:
            continue
        for place in (1, 0) if node.target is aten.add.Tensor else (1,):
            product, other = node.args[place], node.args[1 - place]
            if not (_multiplied(product, node) and isinstance(other, fx.Node)):
                continue
            if form(other) != form(node):
                continue
            read = {memory(one) for one in product.all_input_nodes}
            if any(one in read and order[product] < at < order[node] for at, one in writers):
                continue
            with graph.inserting_before(node):
                made = graph.call_function(
                    aten.addcmul.default, (other, *product.args), {"value": SIGNS[node.target]}
                )
            made.meta.update(node.meta)
            order[made] = order[node]
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            break


def _multiplied(product: Any, node: fx.Node) -> bool:  # noqa: ANN401 - any argument of an operation
    """Return whether an argument is a product of two tensors' entries for this node alone."""
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return False
    pair = [one for one in product.args if isinstance(one, fx.Node)]
    types = {one.meta["val"].dtype for one in (*pair, node)}
    alone = len(product.users) == 1 and form(product) == form(node)
    return alone and len(pair) == 2 and len(types) == 1


def _changed_by(node: fx.Node) -> list[fx.Node]:
    if node.target is not accumulate:
        return changed_by(node)
    target, *_, in_place = node.args
    return [memory(target)] if in_place else []  # type: ignore[arg-type]


# ---- layout -------------------------------------------------------------------------------------


def line_up(graph: fx.Graph) -> None:
    """Lay out what flows back into a pooling or a ReLU as what went in, or torch takes longer."""
    last = torch.channels_last
    for node in graph.nodes:
        if node.target not in _BACK:
            continue
        back, ahead = (one.meta.get("val") for one in node.args[:2])
        if not (isinstance(back, Tensor) and isinstance(ahead, Tensor)) or ahead.ndim != 4:
            continue
        if ahead.is_contiguous(memory_format=last) and not back.is_contiguous(memory_format=last):
            with graph.inserting_before(node):
                turned = graph.call_function(
                    aten.clone.default, (node.args[0],), {"memory_format": last}
                )
            turned.meta["val"] = back.contiguous(memory_format=last)
            node.update_arg(0, turned)
        if node.target is aten.threshold_backward.default and back.shape == ahead.shape:
            node.meta["val"] = torch.empty_like(ahead)


_BACK = {aten.max_pool2d_with_indices_backward.default, aten.threshold_backward.default}
"""Operations whose first two arguments are what flows back, and what went in."""


# ---- temporaries --------------------------------------------------------------------------------


def reuse(graph: fx.Graph, owned: set[fx.Node]) -> None:
    """Write a result over its first argument where nobody else looks at that."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _IN_PLACE:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node):
            continue
        if source.op != "call_function" and source not in owned:
            continue
        if is_view(source) or source.target is accumulate or len(source.users) > 1:
            continue
        own = form(source)
        if own is None or own != form(node) or 0 in own[1]:
            continue
        if mutates(source) and source.target not in _IN_PLACE.values():
            continue
        node.target = _IN_PLACE[node.target]


# ---- what is joined ------------------------------------------------------------------------------

_INTO: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.sub.Tensor: aten.sub.out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}
"""Operations that may write their result where they are told."""


def place(graph: fx.Graph) -> None:
    """Work out what is joined end to end where it will lie, so that it is not copied there.

    What a method looks at as one vector, such as a model's gradient, is joined from tensors that
    nobody else looks at. Nothing may be taken out of the graph after this.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not aten.cat.default or node.meta["val"].numel() <= _SMALL:
            continue
        pieces, whole = node.args[0], node.meta["val"]
        if not all(_flat(piece, whole.dtype) for piece in pieces):
            continue
        made = [_made_for(piece) if pieces.count(piece) == 1 else None for piece in pieces]
        first = min((one for one in made if one), key=order.__getitem__, default=None)
        if first is None:
            continue
        with graph.inserting_before(first):
            given = first.all_input_nodes[0]
            joined = called(
                graph, aten.new_empty.default, given, list(whole.shape), dtype=whole.dtype
            )
        start = 0
        for piece, one in zip(pieces, made, strict=True):
            end = start + piece.meta["val"].numel()
            with graph.inserting_before(one or node):
                there = called(graph, aten.slice.Tensor, joined, 0, start, end)
                if one is None:
                    called(graph, aten.copy_.default, there, piece)
                else:
                    one.target = _INTO[one.target]
                    shape = list(one.meta["val"].shape)
                    there = called(graph, aten.view.default, there, shape)
                    one.kwargs = {**one.kwargs, "out": there}
            start = end
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        for piece, one in zip(pieces, made, strict=True):
            while one and piece is not one:
                piece, idle = piece.args[0], piece
                graph.erase_node(idle)


def _flat(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether a value is a vector of this type without gaps."""
    value = node.meta["val"]
    return value.ndim == 1 and value.dtype == dtype and bool(value.is_contiguous())


def _made_for(piece: fx.Node) -> fx.Node | None:
    """Return what makes a piece for nobody else, and could write it anywhere."""
    found = piece
    while len(found.users) == 1:
        if found.target in _INTO:
            return found if found.meta["val"].is_contiguous() else None
        if found.target is not aten.view.default:
            return None
        found = found.args[0]  # type: ignore[assignment]
    return None


# ---- products -----------------------------------------------------------------------------------

_PRODUCTS: dict[Any, Any] = {
    aten.mm.default: matmul.mm,
    aten.mm.out: matmul.mm,
    aten.addmm.default: matmul.addmm,
    aten.bmm.default: matmul.bmm,
}
"""Products of matrices, and what chooses by their shapes how to make them."""


def choose_products(graph: fx.Graph) -> None:
    """Let products be made by whichever of torch's libraries is the faster one."""
    for node in graph.nodes:
        node.target = _PRODUCTS.get(node.target, node.target)
