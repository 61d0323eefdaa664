"""Passes that make a traced function's list of operations shorter or faster.

No pass changes the numbers. Parameter updates are fused in `fuse_updates.py`, and low-rank matrices
are found in `low_rank_pass.py`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fedkeel.base import matmul
from fedkeel.engine.compiler.fuse_updates import apply_update
from fedkeel.engine.compiler.graph_nodes import (
    SIGNS,
    insert_call,
    is_mutating,
    is_random,
    is_transposition,
    is_view,
    layout,
    layout_of,
    output_node,
    schema,
    storage_node,
    written_storage,
)

aten = torch.ops.aten

# ---- operations that write over their first argument ---------------------------------------------

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
"""Operation -> the same one that writes its result over its first argument."""

_OUT_OF_PLACE = {in_place: operation for operation, in_place in _IN_PLACE.items()}


def use_out_of_place_operations(graph: fx.Graph, temporary_inputs: set[fx.Node]) -> None:
    """Replace operations that write over a temporary tensor by ones that make a new tensor.

    The other passes can then move them. `write_in_place` undoes it where it is still possible.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _OUT_OF_PLACE:
            continue
        source = node.args[0]
        is_temporary = source.op == "call_function" or source in temporary_inputs
        if not is_temporary or any(is_view(other) for other in (source, *source.users)):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        result = _OUT_OF_PLACE[node.target](*args, **kwargs)
        if layout_of(result) != layout(source):
            continue
        node.target = _OUT_OF_PLACE[node.target]
        for user in list(source.users):
            if order[user] > order[node]:
                user.replace_input_with(source, node)


def write_in_place(graph: fx.Graph, owned: set[fx.Node]) -> None:
    """Write a result over the operation's first argument where nothing else needs that."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _IN_PLACE:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node):
            continue
        if source.op != "call_function" and source not in owned:
            continue
        if is_view(source) or source.target is apply_update or len(source.users) > 1:
            continue
        source_layout = layout(source)
        if source_layout is None or source_layout != layout(node) or 0 in source_layout[1]:
            continue
        if is_mutating(source) and source.target not in _OUT_OF_PLACE:
            continue
        node.target = _IN_PLACE[node.target]


# ---- operations that need not be done ------------------------------------------------------------


def remove_no_ops(graph: fx.Graph) -> None:
    """Remove views that change nothing, pairs of transpositions, and multiplications by one."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        equal = None
        if node.target is aten.mul.Scalar and node.args[1] == 1:
            equal = node.args[0]
        elif is_view(node) and node.target is not operator.getitem:
            equal = _equal_source(node, node.args[0])
        if equal is not None and layout(equal) == layout(node):
            node.replace_all_uses_with(equal)
            graph.erase_node(node)


def _equal_source(view: fx.Node, source: fx.Node | None) -> fx.Node | None:
    """Return the node that a view, or the last of several transpositions, shows unchanged."""
    while source is not None:
        if layout(source) == layout(view) is not None:
            return source
        transposed_twice = is_view(source) and is_transposition(source) and is_transposition(view)
        source = source.all_input_nodes[0] if transposed_twice else None
    return None


MAX_CONSTANT = 1 << 16
"""Entries of a tensor up to which it is kept as a constant."""

_SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""Operations that look at a tensor's shape and type, not at its numbers."""


def fold_constants(graph: fx.Graph) -> None:
    """Compute once what depends only on the arguments' shapes and is not written to later."""
    overwritten = {storage for node in graph.nodes for storage in written_storage(node)}
    constants: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or schema(node) is None or not isinstance(value, Tensor):
            continue
        if is_random(node) or is_mutating(node) or value.numel() > MAX_CONSTANT:
            continue
        if storage_node(node) in overwritten:
            continue
        if node.target in _SHAPE_ONLY:
            like = node.args[0].meta["val"]
            blank = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=node.meta["device"]
            )
            constants[node] = node.target(blank, *node.args[1:], **node.kwargs)
        elif all(source in constants for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), constants.__getitem__)
            constants[node] = node.target(*args, **kwargs)
    output = output_node(graph)
    for number, (node, constant) in enumerate(constants.items()):
        if all(user in constants for user in node.users):
            continue
        with graph.inserting_before(node):
            folded = graph.get_attr(f"constant_{number}")
            folded.meta["constant"] = constant.contiguous()
            folded.meta["val"] = node.meta["val"].contiguous()
            if output in node.users:  # the caller may write over what it gets
                folded = graph.call_function(aten.clone.default, (folded,))
            folded.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(folded)


def merge_equal_operations(graph: fx.Graph) -> None:
    """Do an operation once that is done several times to the same arguments."""
    if any(is_mutating(node) for node in graph.nodes):
        return
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node):
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def pool_before_relu(graph: fx.Graph) -> None:
    """Take the maximum of each window before the ReLU, and the gradient through the ReLU first.

    max(relu(x)) = relu(max(x)), and the ReLU then has at most a quarter of the entries. Where the
    maximum is not positive, no gradient passes either way; elsewhere the ReLU moves no maximum. So
    the numbers are the same.
    """
    pool = aten.max_pool2d_with_indices.default
    pool_back = aten.max_pool2d_with_indices_backward.default
    for node in list(graph.nodes):
        if node.target is not pool or node.args[0].target is not aten.relu.default:
            continue
        relu, maxima = node.args[0], _first_result(node)
        pool_gradients = [u for u in relu.users if u.target is pool_back and u.args[1] is relu]
        relu_gradients = [u for u in relu.users if u.target is aten.threshold_backward.default]
        are_paired = len(relu_gradients) == len(pool_gradients) and all(
            gradient.args[0] in pool_gradients
            and gradient.args[1:] == (relu, 0)
            and len(gradient.args[0].users) == 1
            for gradient in relu_gradients
        )
        has_other_users = set(relu.users) != {node, *pool_gradients, *relu_gradients}
        if maxima is None or not are_paired or has_other_users:
            continue
        node.update_arg(0, relu.args[0])
        users = list(maxima.users)
        with graph.inserting_after(maxima):
            positive = graph.call_function(aten.relu.default, (maxima,))
        positive.meta["val"] = maxima.meta["val"]
        for user in users:
            user.replace_input_with(maxima, positive)
        for gradient in relu_gradients:
            pool_gradient = gradient.args[0]
            with graph.inserting_before(pool_gradient):
                passed = graph.call_function(gradient.target, (pool_gradient.args[0], positive, 0))
            passed.meta["val"] = pool_gradient.args[0].meta["val"]
            pool_gradient.update_arg(0, passed)
            pool_gradient.update_arg(1, relu.args[0])
            gradient.replace_all_uses_with(pool_gradient)


def _first_result(node: fx.Node) -> fx.Node | None:
    """Return the first tensor of an operation that returns several, None where it is not used."""
    items = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
    return items[0] if items else None


def fuse_multiply_add(graph: fx.Graph) -> None:
    """Add or subtract a product of entries in the pass that computes it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = [(order[node], storage) for node in graph.nodes for storage in _overwritten_by(node)]
    for node in list(graph.nodes):
        if node.target not in SIGNS or node.kwargs:
            continue
        for position in (1, 0) if node.target is aten.add.Tensor else (1,):
            product, other = node.args[position], node.args[1 - position]
            if not (_is_entrywise_product(product, node) and isinstance(other, fx.Node)):
                continue
            if layout(other) != layout(node):
                continue
            read = {storage_node(source) for source in product.all_input_nodes}
            if any(s in read and order[product] < at < order[node] for at, s in writes):
                continue
            with graph.inserting_before(node):
                fused = graph.call_function(
                    aten.addcmul.default, (other, *product.args), {"value": SIGNS[node.target]}
                )
            fused.meta.update(node.meta)
            order[fused] = order[node]
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            break


def _is_entrywise_product(argument: Any, user: fx.Node) -> bool:  # noqa: ANN401
    """Return whether an argument multiplies two tensors' entries, and only for this user."""
    if not isinstance(argument, fx.Node) or argument.target is not aten.mul.Tensor:
        return False
    factors = [factor for factor in argument.args if isinstance(factor, fx.Node)]
    dtypes = {node.meta["val"].dtype for node in (*factors, user)}
    used_once = len(argument.users) == 1 and layout(argument) == layout(user)
    return used_once and len(factors) == 2 and len(dtypes) == 1


def _overwritten_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory an operation, or an update of parameters, writes over."""
    if node.target is not apply_update:
        return written_storage(node)
    target, *_, in_place = node.args
    return [storage_node(target)] if in_place else []  # type: ignore[arg-type]


# ---- memory layout -------------------------------------------------------------------------------

_GRADIENT_OPERATIONS = {
    aten.max_pool2d_with_indices_backward.default,
    aten.threshold_backward.default,
}
"""Operations whose first two arguments are an output's gradient and the input."""


def lay_out_gradients_as_inputs(graph: fx.Graph) -> None:
    """Give the gradient at a pooling or ReLU the layout of its input: torch is faster then."""
    channels_last = torch.channels_last
    for node in graph.nodes:
        if node.target not in _GRADIENT_OPERATIONS:
            continue
        gradient, inputs = (arg.meta.get("val") for arg in node.args[:2])
        if not (isinstance(gradient, Tensor) and isinstance(inputs, Tensor)) or inputs.ndim != 4:
            continue
        if inputs.is_contiguous(memory_format=channels_last) and not gradient.is_contiguous(
            memory_format=channels_last
        ):
            with graph.inserting_before(node):
                turned = graph.call_function(
                    aten.clone.default, (node.args[0],), {"memory_format": channels_last}
                )
            turned.meta["val"] = gradient.contiguous(memory_format=channels_last)
            node.update_arg(0, turned)
        if node.target is aten.threshold_backward.default and gradient.shape == inputs.shape:
            node.meta["val"] = torch.empty_like(inputs)


# ---- concatenations ------------------------------------------------------------------------------

_WITH_OUT: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.sub.Tensor: aten.sub.out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}
"""Operation -> the same one that writes its result into a given tensor."""


def write_into_concatenation(graph: fx.Graph) -> None:
    """Compute the pieces of a concatenation in their place in it, so that none is copied.

    A method that treats a model's gradient as one vector concatenates tensors that nothing else
    uses. No node may be removed from the graph after this pass: the writes have no users.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not aten.cat.default or node.meta["val"].numel() <= MAX_CONSTANT:
            continue
        pieces, result = node.args[0], node.meta["val"]
        if not all(_is_dense_vector(piece, result.dtype) for piece in pieces):
            continue
        makers = [_movable_maker(piece) if pieces.count(piece) == 1 else None for piece in pieces]
        first = min((maker for maker in makers if maker), key=order.__getitem__, default=None)
        if first is None:
            continue
        with graph.inserting_before(first):
            like, shape = first.all_input_nodes[0], list(result.shape)
            joined = insert_call(graph, aten.new_empty.default, like, shape, dtype=result.dtype)
        start = 0
        for piece, maker in zip(pieces, makers, strict=True):
            end = start + piece.meta["val"].numel()
            with graph.inserting_before(maker or node):
                place = insert_call(graph, aten.slice.Tensor, joined, 0, start, end)
                if maker is None:
                    insert_call(graph, aten.copy_.default, place, piece)
                else:
                    shape = list(maker.meta["val"].shape)
                    place = insert_call(graph, aten.view.default, place, shape)
                    maker.target = _WITH_OUT[maker.target]
                    maker.kwargs = {**maker.kwargs, "out": place}
            start = end
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        for piece, maker in zip(pieces, makers, strict=True):
            while maker and piece is not maker:
                piece, unused = piece.args[0], piece
                graph.erase_node(unused)


def _is_dense_vector(node: fx.Node, dtype: torch.dtype) -> bool:
    value = node.meta["val"]
    return value.ndim == 1 and value.dtype == dtype and bool(value.is_contiguous())


def _movable_maker(piece: fx.Node) -> fx.Node | None:
    """Return what makes a piece, if nothing else uses it and it can write anywhere."""
    node = piece
    while len(node.users) == 1:
        if node.target in _WITH_OUT:
            return node if node.meta["val"].is_contiguous() else None
        if node.target is not aten.view.default:
            return None
        node = node.args[0]  # type: ignore[assignment]
    return None


# ---- matrix products -----------------------------------------------------------------------------

_PRODUCTS: dict[Any, Any] = {
    aten.mm.default: matmul.mm,
    aten.mm.out: matmul.mm,
    aten.addmm.default: matmul.addmm,
    aten.bmm.default: matmul.bmm,
}


def choose_matmul_library(graph: fx.Graph) -> None:
    """Let `fedkeel.base.matmul` choose by their shapes which library computes matrix products."""
    for node in graph.nodes:
        node.target = _PRODUCTS.get(node.target, node.target)
