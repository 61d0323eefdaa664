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

TOGETHER = 1_000
"""Examples that pass through the network at a time where their gradients are not made."""

_T = TypeVar("_T")


def by_example(function: Callable[[Tensor, Tensor], _T], batch: Batch) -> _T:
    """Return what a function makes of each example's input and label, tensors [B, ...].

    Raises:
        ModelError: the model draws random numbers, or keeps statistics of a batch.
    """
    try:
        found: _T = torch.func.vmap(function)(batch.x, batch.y)
    except RuntimeError as error:
        text = str(error)
        if "random operation" in text:
            has, do = "it draws random numbers, as dropout does", "leave the dropout out"
        elif "mutate a captured Tensor" in text or "in-place" in text:
            has = "it writes to its buffers, as batch normalisation does"
            do = "set model.buffers = 'average', or take group normalisation"
        else:
            raise
        raise ModelError(
            "The method takes each example's gradient by itself, which the model does not bear.",
            got=has,
            do=f"{do}, or choose another method",
        ) from error
    return found


def squared_grads(network: Network, params: Tree, buffers: Tree, batch: Batch) -> Tree:
    """Return the sum over a batch of the squared gradient of each example's task loss.

    An example's gradient by a linear layer's weights is the outer product of what the layer was
    given, x, and the loss's gradient d by what it returned. So the sum of the squares is
    (d^2)^T x^2, one product of matrices, and no example's gradient need be made. Where that is not
    so (a layer that is called twice, or examples that see each other), and for all other
    parameters, each is made.

    Args:
        network: the model, which is in evaluation mode.
        params: where.
        buffers: the model's buffers.
        batch: B examples; padded ones count for nothing.

    Raises:
        ModelError: as in `by_example`.
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
    """Return the sums of `squared_grads` for some of the parameters, from each example's."""
    chosen = {k: params[k] for k in names}

    def squared(x: Tensor, y: Tensor) -> Tree:
        def loss(own: Tree) -> Tensor:
            return network.loss({**params, **own}, buffers, Batch(x[None], y[None]), train=False)

        return {k: g.square() for k, g in torch.func.grad(loss)(chosen).items()}

    total = tree.zeros_like(chosen)
    for piece in _pieces(batch, max(1, ENTRIES // tree.numel(chosen))):
        found, real = by_example(squared, piece), _real(piece, network.dtype)
        total = {k: t + torch.einsum("b,b...->...", real, found[k]) for k, t in total.items()}
    return total


def _by_factors(network: Network, params: Tree, buffers: Tree, batch: Batch) -> Tree:
    """Return the sums of `squared_grads` for those parameters of linear layers that bear it.

    Those are compared with the gradient of the first example, taken by itself.
    """
    total: Tree = {}
    for number, piece in enumerate(_pieces(batch, TOGETHER)):
        factors = _factors(network, params, buffers, piece)
        if number == 0:
            first = Batch(batch.x[:1], batch.y[:1])
            alone = _one_by_one(network, params, buffers, first, tuple(factors)) if factors else {}
            factors = {k: f for k, f in factors.items() if _alike(f.squares(slice(1)), alone[k])}
            total = {k: torch.zeros_like(params[k]) for k in factors}
        if not total:
            return {}
        real = _real(piece, network.dtype)
        total = {k: t + factors[k].squares(slice(None), real) for k, t in total.items()}
    return total


@dataclass(frozen=True)
class _Factors:
    """Each example's gradient by a linear layer's weights or biases.

    Args:
        slope: [B, M] the gradient of its loss by what the layer returned.
        given: [B, N] what the layer was given; None for biases.
    """

    slope: Tensor
    given: Tensor | None

    def squares(self, rows: slice, weight: Tensor | None = None) -> Tensor:
        """Return the sum of squares over some of the examples, [M, N] or [M]."""
        slopes = self.slope[rows].square()
        if weight is not None:
            slopes = slopes * weight[:, None]
        if self.given is None:
            return slopes.sum(dim=0)
        return slopes.t() @ self.given[rows].square()


def _factors(network: Network, params: Tree, buffers: Tree, batch: Batch) -> dict[str, _Factors]:
    """Return the factors of what linear layers that are called once have among the parameters."""
    given = {k: p.detach() for k, p in params.items()}
    with torch.enable_grad(), _LinearCalls(given) as calls:
        logits = network.logits(given, network.throwaway(buffers), batch.x, train=False)
        losses = network.task_losses(logits, batch.y)
        if losses.ndim != 1 or not calls.once:
            return {}
        outputs = [output for _, output in calls.once.values()]
        slopes = torch.autograd.grad(losses.sum(), outputs, allow_unused=True)
    return {
        name: _Factors(slope, x)
        for (name, (x, _)), slope in zip(calls.once.items(), slopes, strict=True)
        if slope is not None
    }


class _LinearCalls(TorchFunctionMode):
    """Watches calls of `torch.nn.functional.linear` with rows of numbers, one for each example.

    Args:
        params: the model's parameters, by name.
    """

    def __init__(self, params: Tree) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self.once: dict[str, tuple[Tensor | None, Tensor]] = {}
        """Of each parameter in one call: what was given, None for a bias, and what came out."""
        self._seen: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = F.linear(input, weight, bias)
        if not output.requires_grad:
            output.requires_grad_()
        for tensor, given in ((weight, input.detach()), (bias, None)):
            name = self._names.get(id(tensor))
            if name is None:
                continue
            self.once.pop(name, None)
            if name not in self._seen and input.ndim == 2:
                self.once[name] = given, output
            self._seen.add(name)
        return output.clone()  # the next layer may write over it


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Return whether two sums of squares differ by no more than rounding."""
    close = 1e-3 if found.dtype == torch.float32 else 1e-9
    return bool((found - expected).abs().max() <= close * expected.abs().max())


def _pieces(batch: Batch, size: int) -> Iterator[Batch]:
    """Cut a batch into batches of at most `size` examples."""
    for first in range(0, len(batch.x), size):
        part = slice(first, first + size)
        weight = None if batch.weight is None else batch.weight[part]
        yield Batch(batch.x[part], batch.y[part], weight)


def _real(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Return [B] 1 for each real example, 0 for padding."""
    ones = batch.x.new_ones(len(batch.x), dtype=dtype)
    return ones if batch.weight is None else batch.weight
