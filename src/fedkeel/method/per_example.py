"""What is worked out for each example by itself, and which models that can be done with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedkeel import tree
from fedkeel.errors import ModelError
from fedkeel.task.network import Batch, Network
from fedkeel.tree import Tree

ENTRIES = 1 << 22
"""Entries of single examples' gradients that are held at a time."""

TOGETHER = 100
"""Examples that pass through the network at a time where their gradients are not made."""

_T = TypeVar("_T")


def map_examples(function: Callable[[Tensor, Tensor], _T], batch: Batch) -> _T:
    """Return what a function makes of each example's input and label, tensors [B, ...].

    The examples go through the model side by side, and one after the other where it does not bear
    that, as recurrent layers.

    Raises:
        ModelError: the model draws random numbers, keeps statistics of a batch, or makes its
            gradients in a way of its own.
    """
    try:
        found: _T = torch.func.vmap(function)(batch.x, batch.y)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = str(error)
        if "random operation" in text:
            has, do = "it draws random numbers, as dropout does", "leave the dropout out"
        elif "mutate a captured Tensor" in text or "in-place" in text:
            has = "it writes to its buffers, as batch normalisation does"
            do = "set model.buffers = 'average', or take group normalisation"
        elif "saved tensor hooks" in text:
            has, do = "it recomputes in the backward pass (checkpointing)", "leave that out"
        else:
            found = _stacked([function(x, y) for x, y in zip(batch.x, batch.y, strict=True)])
            return found
        raise ModelError(
            "The method takes each example's gradient by itself, which the model does not bear.",
            got=has,
            do=f"{do}, or choose another method",
        ) from error
    return found


def _stacked(found: Sequence[Any]) -> Any:  # noqa: ANN401 - as deep as what a function makes
    first = found[0]
    if isinstance(first, dict):
        return {k: _stacked([one[k] for one in found]) for k in first}
    if isinstance(first, (tuple, list)):
        return type(first)(map(_stacked, zip(*found, strict=True)))
    return torch.stack(list(found))


def sum_squared_grads(network: Network, params: Tree, buffers: Tree, batch: Batch) -> Tree:
    """Return the sum over a batch of the squared gradient of each example's task loss.

    An example's gradient by a linear layer's weights is the outer product of what the layer was
    given, x, and the loss's gradient d by what it returned. So the sum of the squares is
    (d^2)^T x^2, one product of matrices, and no example's gradient need be made. That holds for
    layers that are called once, with one row for each example, and whose parameters are used
    nowhere else; of all other parameters each example's gradient is made.

    Args:
        network: the model, which is in evaluation mode.
        params: where.
        buffers: the model's buffers.
        batch: B examples; padded ones count for nothing.

    Raises:
        ModelError: as in `map_examples`.
    """
    thin: Tree = {}
    if len(batch.x) * tree.numel(params) > ENTRIES:
        thin = _by_factors(network, params, buffers, batch)
    rest = {k: p for k, p in params.items() if k not in thin}
    full = _one_by_one(network, params, buffers, batch, tuple(rest)) if rest else {}
    return {k: thin[k] if k in thin else full[k] for k in params}


def _one_by_one(
    network: Network, params: Tree, buffers: Tree, batch: Batch, names: Sequence[str]
) -> Tree:
    """Return the sums of `sum_squared_grads` for some of the parameters, from each example's."""
    chosen = {k: params[k] for k in names}

    def squared(x: Tensor, y: Tensor) -> Tree:
        def loss(own: Tree) -> Tensor:
            return network.loss({**params, **own}, buffers, Batch(x[None], y[None]), train=False)

        return {k: g.square() for k, g in torch.func.grad(loss)(chosen).items()}

    total = tree.zeros_like(chosen)
    for piece in _pieces(batch, max(1, ENTRIES // max(1, tree.numel(chosen)))):
        found, real = map_examples(squared, piece), piece.real(network.dtype)
        total = {k: t + torch.einsum("b,b...->...", real, found[k]) for k, t in total.items()}
    return total


def _by_factors(network: Network, params: Tree, buffers: Tree, batch: Batch) -> Tree:
    """Return the sums of `sum_squared_grads` for those parameters of linear layers that bear it.

    Each example passes through the network by itself, as in `_one_by_one`. The sum of the first one
    is compared with what that gives.
    """
    given = {k: p.detach() for k, p in params.items()}
    first = Batch(batch.x[:1], batch.y[:1])
    alone = _one_by_one(network, params, buffers, first, tuple(params))
    expected, names = _calls(network, given, buffers, first)
    if not names:
        return {}

    def factors(x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        def loss(taps: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            watched = _LinearCalls(given, taps)
            with watched:
                value = network.loss(given, buffers, Batch(x[None], y[None]), train=False)
            if not _same(watched.calls, expected):
                raise _Otherwise
            return value, [call.given[0] for call in watched.calls]

        taps = [x.new_zeros(call.width, dtype=network.dtype) for call in expected]
        found: tuple[list[Tensor], list[Tensor]] = torch.func.grad(loss, has_aux=True)(taps)
        return found

    def sums(piece: Batch) -> Tree:
        slopes, inputs = map_examples(factors, piece)
        return _sums(expected, slopes, inputs, piece.real(network.dtype))

    try:
        own = sums(first)
        total = {k: torch.zeros_like(own[k]) for k in names if _alike(own[k], alone[k])}
        for piece in _pieces(batch, TOGETHER):
            own = sums(piece)
            total = {k: t + own[k] for k, t in total.items()}
    except (_Otherwise, ModelError):
        return {}
    return total


@dataclass(frozen=True)
class _Call:
    """A call of a linear layer with one row.

    Args:
        weight: name of its weights; None where they are no parameter.
        bias: the same of its biases.
        given: [1, N] what it was given.
        width: M, how much it returned.
    """

    weight: str | None
    bias: str | None
    given: Tensor
    width: int


class _Otherwise(Exception):  # noqa: N818 - a way that is not open
    """Layers are called otherwise than for one example by itself."""


class _LinearCalls(TorchFunctionMode):
    """Watches calls of `torch.nn.functional.linear` with one row, by parameters.

    The parameters are cut off there: gradients by them are those of their other uses.

    Args:
        params: the model's parameters, by name.
        taps: [M] of each call, added to what it returns; None where there are none.
    """

    def __init__(self, params: Tree, taps: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self._taps = taps
        self.calls: list[_Call] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        function = self._linear if func is F.linear else func
        return function(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        names = self._names.get(id(weight)), self._names.get(id(bias))
        row = input.ndim == weight.ndim == 2 and len(input) == 1
        fits = row and (bias is None or bias.shape == weight.shape[:1])
        if names == (None, None) or not fits:
            return F.linear(input, weight, bias)
        number = len(self.calls)
        output = F.linear(input, weight.detach(), None if bias is None else bias.detach())
        self.calls.append(_Call(*names, input.detach().clone(), len(weight)))
        if self._taps is None:
            return output
        if number >= len(self._taps):
            raise _Otherwise
        return output + self._taps[number]


def _calls(
    network: Network, params: Tree, buffers: Tree, one: Batch
) -> tuple[list[_Call], list[str]]:
    """Return the calls of linear layers with one row that an example makes.

    Also return the parameters that are used in one of them, once, and nowhere else. Those are the
    ones of which the loss does not depend where calls are cut off from them, whatever the numbers
    are.
    """
    if network.traits.writes_parameters:
        return [], []
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    watched = _LinearCalls(leaves)
    with torch.enable_grad(), watched:
        loss = network.loss(leaves, network.copy_buffers(buffers), one, train=False)
    named = [name for c in watched.calls for name in (c.weight, c.bias) if name is not None]
    once = [name for name in named if named.count(name) == 1]
    if not once or not loss.requires_grad:
        return watched.calls, once
    others = torch.autograd.grad(loss, [leaves[name] for name in once], allow_unused=True)
    return watched.calls, [k for k, grad in zip(once, others, strict=True) if grad is None]


def _same(calls: Sequence[_Call], others: Sequence[_Call]) -> bool:
    """Return whether two examples call the same layers in the same order."""
    return [(c.weight, c.bias, c.width) for c in calls] == [
        (c.weight, c.bias, c.width) for c in others
    ]


def _sums(
    calls: Sequence[_Call], slopes: Sequence[Tensor], given: Sequence[Tensor], real: Tensor
) -> Tree:
    """Return the sums of squares over examples, [M, N] and [M], by name.

    Args:
        calls: which layers.
        slopes: [B, M] of each, the gradients of examples' losses by what it returned.
        given: [B, N] of each, what it was given.
        real: [B] weights of the examples.
    """
    sums: Tree = {}
    for call, slope, x in zip(calls, slopes, given, strict=True):
        squares = slope.square() * real[:, None]
        if call.weight is not None:
            sums[call.weight] = squares.t() @ x.square()
        if call.bias is not None:
            sums[call.bias] = squares.sum(dim=0)
    return sums


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Return whether two sums of squares differ by no more than rounding."""
    close = 1e-9 if found.dtype == torch.float64 else 1e-3
    size = expected.amax() if expected.numel() else 0.0
    return bool(((found - expected).abs() <= close * size).all())  # not where there is NaN


def _pieces(batch: Batch, size: int) -> Iterator[Batch]:
    """Cut a batch into batches of at most `size` examples."""
    return (batch.part(slice(first, first + size)) for first in range(0, len(batch.x), size))
