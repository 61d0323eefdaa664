"""Functions of each example by itself: side by side where the model allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedkeel import tree
from fedkeel.base.dispatch import grad
from fedkeel.base.values import Values, example, tensors_of
from fedkeel.errors import ModelError
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from fedkeel.tree import Tree

MAX_ENTRIES = 1 << 22
"""Largest number of entries of single examples' gradients in memory at a time."""

MAX_EXAMPLES = 100
"""Examples in one pass where no gradients of single examples are made."""

_T = TypeVar("_T")


def map_examples(function: Callable[[Values, Values], _T], batch: Batch) -> _T:
    """Return a function's values for each example's input and label, tensors [B, ...].

    The examples pass through the model side by side; where a layer does not support that, such as
    a recurrent one, they pass one after the other.

    Raises:
        ModelError: the model draws random numbers, keeps statistics of a batch, or recomputes in
            the backward pass.
    """
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the fused attentions do not have a further axis
            return torch.func.vmap(function)(batch.x, batch.y)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = str(error)  # torch gives these refusals no types of their own
        if "random operation" in text:
            reason, remedy = "it draws random numbers, as dropout does", "leave the dropout out"
        elif "mutate a captured Tensor" in text or "in-place" in text:
            reason = "it writes to its buffers, as batch normalisation does"
            remedy = "set model.buffers = 'average', or take group normalisation"
        elif "saved tensor hooks" in text:
            reason, remedy = "it recomputes in the backward pass (checkpointing)", "leave that out"
        else:
            values = [
                function(example(batch.x, row), example(batch.y, row)) for row in range(len(batch))
            ]
            return cast(_T, _stack(values))
        raise ModelError(
            "The method takes each example's gradient by itself, which the model does not allow.",
            got=reason,
            do=f"{remedy}, or choose another method",
        ) from error


def _stack(values: Sequence[Any]) -> Any:  # noqa: ANN401 - nested as a function's value is
    first = values[0]
    if isinstance(first, dict):
        return {key: _stack([value[key] for value in values]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(map(_stack, zip(*values, strict=True)))
    return torch.stack(list(values))


def sum_squared_grads(network: Network, params: Tree, buffers: Tree, batch: Batch) -> Tree:
    """Return the sum over a batch of the squared gradient of each example's task loss.

    An example's gradient with respect to a linear layer's weights is the outer product of the
    layer's input x and the loss's gradient d with respect to its output. So the sum of the squares
    is the matrix product (d^2)^T x^2, without any example's gradient. That holds for layers that
    are called once, with one row for each example, and whose parameters are used nowhere else; for
    all other parameters the gradient of each example is computed.

    Args:
        network: the model, which is in evaluation mode.
        params: where.
        buffers: the model's buffers.
        batch: B examples; padded ones have weight 0.

    Raises:
        ModelError: as in `map_examples`.
    """
    factored: Tree = {}
    if len(batch) * tree.numel(params) > MAX_ENTRIES:
        factored = _by_factors(network, params, buffers, batch)
    rest = tuple(name for name in params if name not in factored)
    full = _by_gradients(network, params, buffers, batch, rest) if rest else {}
    return {name: factored[name] if name in factored else full[name] for name in params}


def _by_gradients(
    network: Network, params: Tree, buffers: Tree, batch: Batch, names: Sequence[str]
) -> Tree:
    """Return the sums for some of the parameters, from the gradients of each example."""
    chosen = {k: params[k] for k in names}

    def squared(x: Values, y: Values) -> Tree:
        def loss(some: Tree) -> Tensor:
            return network.loss({**params, **some}, buffers, Batch.of_one(x, y), train=False)

        return {k: g.square() for k, g in grad(loss)(chosen).items()}

    total = tree.zeros_like(chosen)
    for piece in _pieces(batch, max(1, MAX_ENTRIES // max(1, tree.numel(chosen)))):
        squares, real = map_examples(squared, piece), piece.real(network.dtype)
        total = {k: t + torch.einsum("b,b...->...", real, squares[k]) for k, t in total.items()}
    return total


def _by_factors(network: Network, params: Tree, buffers: Tree, batch: Batch) -> Tree:
    """Return the sums for those parameters of linear layers for which matrix products do.

    Each example passes through the network by itself, as in `_by_gradients`. The sum of the first
    example is compared with the result of `_by_gradients`.
    """
    detached = {k: p.detach() for k, p in params.items()}
    first = batch.part(slice(1))
    one_by_one = _by_gradients(network, params, buffers, first, tuple(params))
    expected, names = _calls(network, detached, buffers, first)
    if not names:
        return {}

    def factors(x: Values, y: Values) -> tuple[list[Tensor], list[Tensor]]:
        def loss(taps: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            watched = _LinearCalls(detached, taps)
            with watched:
                value = network.loss(detached, buffers, Batch.of_one(x, y), train=False)
            if not _same(watched.calls, expected):
                raise _CallsDifferError
            return value, [call.input[0] for call in watched.calls]

        like = tensors_of(x)[0]
        taps = [like.new_zeros(call.width, dtype=network.dtype) for call in expected]
        return cast(tuple[list[Tensor], list[Tensor]], grad(loss, has_aux=True)(taps))

    def sums(piece: Batch) -> Tree:
        slopes, inputs = map_examples(factors, piece)
        return _sums(expected, slopes, inputs, piece.real(network.dtype))

    try:
        result = sums(first)
        total = {
            k: torch.zeros_like(result[k]) for k in names if _is_close(result[k], one_by_one[k])
        }
        for piece in _pieces(batch, MAX_EXAMPLES):
            result = sums(piece)
            total = {k: t + result[k] for k, t in total.items()}
    except (_CallsDifferError, ModelError):
        return {}
    return total


@dataclass(frozen=True)
class _Call:
    """A call of a linear layer with one row.

    Args:
        weight: name of its weights; None where they are not a parameter.
        bias: the same of its biases.
        input: [1, N] the layer's input.
        width: M, the width of its output.
    """

    weight: str | None
    bias: str | None
    input: Tensor
    width: int


class _CallsDifferError(Exception):
    """Layers are called in another way than for one example by itself."""


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
            raise _CallsDifferError
        return output + self._taps[number]


def _calls(
    network: Network, params: Tree, buffers: Tree, example: Batch
) -> tuple[list[_Call], list[str]]:
    """Return the calls of linear layers with one row that an example makes.

    Also return the parameters that one of these calls uses once and nothing else uses: the loss
    does not depend on them once the calls are detached from them.
    """
    if network.traits.writes_parameters:
        return [], []
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    watched = _LinearCalls(leaves)
    with torch.enable_grad(), watched:
        loss = network.loss(leaves, network.copy_buffers(buffers), example, train=False)
    names = [name for c in watched.calls for name in (c.weight, c.bias) if name is not None]
    once = [name for name in names if names.count(name) == 1]
    if not once or not loss.requires_grad:
        return watched.calls, once
    others = torch.autograd.grad(loss, [leaves[name] for name in once], allow_unused=True)
    return watched.calls, [k for k, other in zip(once, others, strict=True) if other is None]


def _same(calls: Sequence[_Call], others: Sequence[_Call]) -> bool:
    """Return whether two examples call the same layers in the same order."""
    return [(c.weight, c.bias, c.width) for c in calls] == [
        (c.weight, c.bias, c.width) for c in others
    ]


def _sums(
    calls: Sequence[_Call], slopes: Sequence[Tensor], inputs: Sequence[Tensor], real: Tensor
) -> Tree:
    """Return the sums of squares over examples, [M, N] and [M], by name.

    Args:
        calls: which layers.
        slopes: [B, M] of each, the gradients of the examples' losses by its output.
        inputs: [B, N] of each, its inputs.
        real: [B] weights of the examples.
    """
    sums: Tree = {}
    for call, slope, x in zip(calls, slopes, inputs, strict=True):
        squares = slope.square() * real[:, None]
        if call.weight is not None:
            sums[call.weight] = squares.t() @ x.square()
        if call.bias is not None:
            sums[call.bias] = squares.sum(dim=0)
    return sums


def _is_close(result: Tensor, expected: Tensor) -> bool:
    """Return whether two sums of squares differ by no more than rounding."""
    tolerance = 1e-9 if result.dtype == torch.float64 else 1e-3
    size = expected.amax() if expected.numel() else 0.0
    return bool(((result - expected).abs() <= tolerance * size).all())  # false for NaN


def _pieces(batch: Batch, size: int) -> Iterator[Batch]:
    """Cut a batch into batches of at most `size` examples."""
    return (batch.part(slice(first, first + size)) for first in range(0, len(batch), size))
