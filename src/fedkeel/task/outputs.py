"""What a module returns: a tensor, a tuple, a mapping, or a Hugging Face output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedkeel.base.lazy import Tensor, torch

Outputs = Any
"""What a module returns for a batch: the loss and the metrics of a task receive it unchanged."""


Target = Any
"""What an output is compared with: a tensor [B, ...], or a mapping of tensors."""


def scores_of(output: Outputs) -> Tensor:
    """Return the tensor of an output that named losses, named metrics and methods look at.

    That is the output itself where it is a tensor, the entry ``logits`` of a mapping (a Hugging
    Face output is one), else its first tensor; and the first tensor of a tuple.

    Raises:
        TypeError: there is no tensor in it.
    """
    if isinstance(output, Mapping) and isinstance(output.get("logits"), torch.Tensor):
        scores: Tensor = output["logits"]
        return scores
    tensors = tensors_in(output)
    if not tensors:
        raise TypeError(f"the output holds no tensor: {type(output).__name__}")
    return tensors[0]


def tensors_in(output: Outputs) -> list[Tensor]:
    """Return the tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors_in(item)]
    return []


def map_output(function: Callable[[Tensor], Tensor], output: Outputs) -> Outputs:
    """Return an output with a function of each of its tensors."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if isinstance(output, Mapping):
        items = {key: map_output(function, value) for key, value in output.items()}
        return items if type(output) is dict else type(output)(**items)
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(map_output(function, item) for item in output))
    if isinstance(output, list | tuple):
        return type(output)(map_output(function, item) for item in output)
    return output


def describe_output(output: Outputs) -> str:
    """Return the shape of a tensor, and the shapes in anything else.

    >>> import torch
    >>> describe_output({"logits": torch.zeros(2, 3)})
    'dict of logits [2, 3]'
    """
    if isinstance(output, torch.Tensor):
        return str(list(output.shape))
    kind = type(output).__name__
    if isinstance(output, Mapping):
        items = [f"{key} {describe_output(value)}" for key, value in output.items()]
        return f"{kind} of {', '.join(items)}"
    if isinstance(output, list | tuple):
        return f"{kind} of {', '.join(map(describe_output, output))}"
    return kind
