"""A function of tensors, recorded once as a list of tensor operations and run again without Python.

What a local step costs on a small network is Python, automatic differentiation and vmap, not
arithmetic. All of that decides the same thing in every step. So the step is recorded once for each
form of its inputs, gradients and all, and afterwards the list of operations runs alone.

The list is also shorter than what was recorded. A parameter's update is added to it where it lies:
for a linear layer the product of activations and back-propagated errors is accumulated into the
weights and never exists by itself, which saves most of the memory traffic of a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fedkeel.engine.factors import factor

Flat = Sequence[Tensor]
Function = Callable[..., Sequence[Tensor]]
"""Tensors -> tensors."""

aten = torch.ops.aten


class Captured:
    """A recorded function.

    Args:
        function: of tensors, whose Python may depend on their shapes and types, not on values.
        example: tensors of the form of the arguments.
        rate: which argument is the learning rate, [] on the CPU; None where there is none.
        owned: which arguments may be written over.

    Raises:
        Exception: whatever the function or torch raises where it cannot be recorded: it branches on
            values, leaves torch, or draws random numbers under vmap.
    """

    def __init__(
        self,
        function: Function,
        example: Flat,
        rate: int | None = None,
        owned: frozenset[int] = frozenset(),
    ) -> None:
        seen: set[int] = set()
        apart = []  # a tensor that is given twice would be recorded as one
        for tensor in example:
            apart.append(tensor.clone() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        with torch.no_grad():
            module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*apart)
        graph = module.graph
        self.random = any(_is_random(node) for node in graph.nodes)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        graph.eliminate_dead_code()
        _skip_idle(graph)
        _fold(module)
        _share(graph)
        graph.eliminate_dead_code()
        if rate is not None:
            _fuse_updates(graph, inputs[rate], {inputs[i] for i in owned})
            factor(graph, accumulate)
            graph.eliminate_dead_code()
        _line_up(graph)
        _reuse(graph, {inputs[i] for i in owned})
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()
        self.operations = sum(node.op == "call_function" for node in graph.nodes)
        self._module = module
        self._forward = module.forward

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return what the function returns, up to rounding; owned arguments are lost."""
        found: Sequence[Tensor] = self._forward(*tensors)
        return found

    @property
    def code(self) -> str:
        """The list of operations, as Python."""
        return str(self._module.code)


def _schema(node: fx.Node) -> Any:  # noqa: ANN401
    return getattr(node.target, "_schema", None)


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _mutates(node: fx.Node) -> bool:
    """Return whether an operation writes to an argument; batch norm does, and does not say so."""
    schema = _schema(node)
    if schema is None:
        return False
    return bool(schema.is_mutable) or "batch_norm" in schema.name


_VIEWS = {aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default}
"""Operations that give views, and do not say so."""


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or node.target in _VIEWS:
        return True
    schema = _schema(node)
    return schema is not None and any(
        one.alias_info is not None and not one.alias_info.is_write for one in schema.returns
    )


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose memory this one looks at."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _form(node: fx.Node) -> tuple[Any, ...] | None:
    """Return shape, strides and type of a tensor; None of anything else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape), value.stride(), value.dtype


def _skip_idle(graph: fx.Graph) -> None:
    """Take out views that change nothing, pairs of transpositions, and factors of one."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        idle = None
        if node.target is aten.mul.Scalar and node.args[1] == 1:
            idle = source
        elif _is_view(node) and node.target is not operator.getitem:
            seen: fx.Node | None = source
            while seen is not None:
                if _form(seen) == _form(node) is not None:
                    idle = seen
                    break
                steps_back = _is_view(seen) and _turns(seen) and _turns(node)
                seen = seen.all_input_nodes[0] if steps_back else None
        if idle is not None and _form(idle) == _form(node):
            node.replace_all_uses_with(idle)
            graph.erase_node(node)


def _turns(node: fx.Node) -> bool:
    """Return whether a view only exchanges two axes."""
    return node.target in (aten.t.default, aten.transpose.int)


# ---- what need not be worked out again -----------------------------------------------------------

_SMALL = 1 << 16
"""Entries of a constant that is kept, at most."""


def _fold(module: fx.GraphModule) -> None:
    """Work out once what depends on the arguments' forms alone."""
    graph = module.graph
    known: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or _schema(node) is None or not isinstance(value, Tensor):
            continue
        if _is_random(node) or _mutates(node) or value.numel() > _SMALL:
            continue
        if node.target in _BLANK:
            given = node.args[0].meta["val"]
            like = torch.empty_strided(
                given.shape, given.stride(), dtype=given.dtype, device=given.device
            )
            known[node] = node.target(like, *node.args[1:], **node.kwargs)
        elif all(one in known for one in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    output = next(node for node in graph.nodes if node.op == "output")
    for number, (node, constant) in enumerate(known.items()):
        if all(user in known for user in node.users):
            continue
        name = f"constant_{number}"
        module.register_buffer(name, constant.contiguous())
        with graph.inserting_before(node):
            kept = graph.get_attr(name)
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


def _share(graph: fx.Graph) -> None:
    """Do once what is done twice to the same arguments."""
    if any(_mutates(node) for node in graph.nodes):
        return
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _is_random(node):
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


# ---- updates ------------------------------------------------------------------------------------

Term = tuple[float, tuple[fx.Node, ...]]
"""A factor, and one tensor or two whose matrix product is meant."""


def _fuse_updates(graph: fx.Graph, rate: fx.Node, owned: set[fx.Node]) -> None:
    """Turn p - rate * (sum of terms) into an accumulation into p, where p may be written over."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = _last_uses(graph, order)
    output = next(node for node in graph.nodes if node.op == "output")
    returned = {_base(node) for node in output.all_input_nodes}
    step = None
    for node in list(graph.nodes):
        scaled = _update_of(node, rate)
        if scaled is None:
            continue
        target = node.all_input_nodes[0]
        terms = _terms(scaled, 1.0, owned)
        if not _fits(target, node) or any(_form(node) != _term_form(t, node) for t in terms):
            continue
        in_place = (
            target in owned
            and _form(target) == _form(node)
            and target not in returned
            and last[target] <= order[node]
            and not any(_base(one) is target for _, parts in terms for one in parts)
        )
        if step is None:
            with graph.inserting_after(rate):
                step = graph.call_function(float, (rate,))
        with graph.inserting_before(node):
            fused = graph.call_function(accumulate, (target, step, tuple(terms), in_place))
        fused.meta.update(node.meta)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        order[fused] = order[node]
        last[fused] = last.get(node, -1)
        owned.add(fused)


def _fits(target: fx.Node, result: fx.Node) -> bool:
    """Return whether a target has a result's form, or is the same for all lanes of it."""
    one, other = _form(target), _form(result)
    if one is None or other is None or one == other:
        return one == other is not None
    return bool(one[0] == other[0][1:] and one[2] == other[2])


def _last_uses(graph: fx.Graph, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Return where each node's memory is last read, also through views."""
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[_base(used)] = max(last.get(_base(used), -1), order[node])
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


_SIGNS: dict[Any, float] = {aten.add.Tensor: 1.0, aten.sub.Tensor: -1.0}
"""Operations that add, with the sign of their second term."""


def _terms(node: fx.Node, factor: float, owned: set[fx.Node]) -> list[Term]:
    """Return the terms of a sum that nobody else needs.

    What reads owned memory stays where it is: later on it may have been written over.
    """
    pair = [one for one in node.args[:2] if isinstance(one, fx.Node)]
    lone: list[Term] = [(factor, (node,))]
    if len(node.users) > 1 or node.op != "call_function" or any(_base(n) in owned for n in pair):
        return lone
    if node.target in (aten.mm.default, aten.bmm.default):
        return [(factor, tuple(pair))]
    sign = _SIGNS.get(node.target)
    alpha = node.kwargs.get("alpha", 1)
    alike = len(pair) == 2 and all(_form(one) == _form(node) for one in pair)
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
        one, other = _form(parts[0]), _form(like)
        if one is None or other is None:
            return None
        return (one[0], other[1], one[2])  # strides need not agree
    return _form(like)


def accumulate(
    target: Tensor, rate: float, terms: Sequence[tuple[float, Flat]], in_place: bool
) -> Tensor:
    """Return target - rate * sum of factor * term; a term of two tensors is their product.

    Args:
        target: [...] what is accumulated into.
        rate: the learning rate.
        terms: (factor, tensors) of each.
        in_place: whether the target itself becomes the result.
    """
    out = target
    for number, (scale, parts) in enumerate(terms):
        alpha = -rate * scale
        fresh = number == 0 and not in_place
        if len(parts) == 1:
            out = torch.add(out, parts[0], alpha=alpha) if fresh else out.add_(*parts, alpha=alpha)
        elif parts[0].ndim == 2:
            out = (
                torch.addmm(out, *parts, alpha=alpha) if fresh else out.addmm_(*parts, alpha=alpha)
            )
        else:
            out = (
                torch.baddbmm(out, *parts, alpha=alpha)
                if fresh
                else out.baddbmm_(*parts, alpha=alpha)
            )
    return out


# ---- layout -------------------------------------------------------------------------------------


def _line_up(graph: fx.Graph) -> None:
    """Lay out what flows back into a pooling as what went in; torch takes longer by itself."""
    for node in list(graph.nodes):
        if node.target is not aten.max_pool2d_with_indices_backward.default:
            continue
        back, pooled = node.args[0].meta.get("val"), node.args[1].meta.get("val")
        if not (isinstance(back, Tensor) and isinstance(pooled, Tensor)) or pooled.ndim != 4:
            continue
        last = torch.channels_last
        if pooled.is_contiguous(memory_format=last) and not back.is_contiguous(memory_format=last):
            with graph.inserting_before(node):
                turned = graph.call_function(
                    aten.clone.default, (node.args[0],), {"memory_format": last}
                )
            turned.meta["val"] = back.contiguous(memory_format=last)
            node.update_arg(0, turned)


# ---- temporaries --------------------------------------------------------------------------------

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
}
"""Operations that may write their result over their first argument."""


def _reuse(graph: fx.Graph, owned: set[fx.Node]) -> None:
    """Write a result over its first argument where nobody else looks at that."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _IN_PLACE:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node):
            continue
        if source.op != "call_function" and source not in owned:
            continue
        if _is_view(source) or source.target is accumulate or len(source.users) > 1:
            continue
        form = _form(source)
        if form is None or form != _form(node) or 0 in form[1]:
            continue
        if _mutates(source) and source.target not in _IN_PLACE.values():
            continue
        node.target = _IN_PLACE[node.target]
