"""What is worked out for each example by itself, and which models that can be done with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.network import Batch

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
