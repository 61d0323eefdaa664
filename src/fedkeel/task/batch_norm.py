"""Batch normalisation of a batch that is filled up with examples of weight 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class RealExamples(TorchFunctionMode):
    """Within it, batch normalisation takes mean and variance of only the real examples.

    Numbers are those of torch for these examples, up to rounding. There have to be two of them, or
    several places in each.

    Args:
        weight: [B] 1 for a real example and 0 for padding.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Take the place of `torch.nn.functional.batch_norm`."""
        if func is F.batch_norm:
            return _batch_norm(self._weight, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    real: Tensor,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return [B, C, ...], as `torch.nn.functional.batch_norm` of the `real` examples [B].

    Running statistics [C] are changed in place.
    """
    if not training or len(x) != len(real):
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    every = [0, *range(2, x.ndim)]
    wide = (1, -1, *[1] * (x.ndim - 2))
    counted = real.view(-1, *[1] * (x.ndim - 1))
    count = real.sum() * x[0, 0].numel()
    mean = (x * counted).sum(every) / count
    apart = x - mean.view(wide)
    squares = (apart * apart * counted).sum(every)
    out = apart * torch.rsqrt(squares / count + eps).view(wide)
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1.0 - momentum).add_(mean.detach() * momentum)
        running_var.mul_(1.0 - momentum).add_(squares.detach() / (count - 1.0) * momentum)
    if weight is not None:
        out = out * weight.view(wide)
    return out if bias is None else out + bias.view(wide)
