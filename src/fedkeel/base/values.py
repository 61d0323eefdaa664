"""Inputs and targets: a tensor, or a mapping of tensors with one leading axis.

A mapping is a plain dict, so that everything of torch that takes trees of tensors takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedkeel.base.lazy import Tensor, torch

Values = Tensor | dict[str, Tensor]
"""[N, ...] of examples, or several of these by name."""


def map_values(function: Callable[[Tensor], Tensor], values: Values) -> Values:
    """Return values with a function of each tensor."""
    if isinstance(values, torch.Tensor):
        return function(values)
    return {name: function(tensor) for name, tensor in values.items()}


def tensors_of(values: Values) -> list[Tensor]:
    """Return the tensors, at least one."""
    return [values] if isinstance(values, torch.Tensor) else list(values.values())


def count_of(values: Values) -> int:
    """Return N, the number of examples."""
    return int(tensors_of(values)[0].shape[0])


def rows_of(values: Values, index: Tensor | slice | Sequence[int] | tuple[int, slice]) -> Values:
    """Return some examples."""
    return map_values(lambda tensor: tensor[index], values)


def example(values: Values, row: int) -> Values:
    """Return one example, without the leading axis."""
    return map_values(lambda tensor: tensor[row], values)


def as_state(values: Values) -> Tensor | dict[str, Any]:
    """Return the values as a state of tensors may hold them, see `fedkeel.tree`."""
    return values if isinstance(values, torch.Tensor) else dict(values)


def joined(parts: Sequence[Values]) -> Values:
    """Return the examples of several values, one after the other."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    return {name: torch.cat([part[name] for part in parts]) for name in first}  # type: ignore[index]


def copy_of(values: Values) -> Values:
    """Return a copy that begins at a multiple of 64 bytes."""
    return map_values(torch.Tensor.clone, values)


def only_tensor(values: Values, what: str) -> Tensor:
    """Return the values where they are one tensor.

    Raises:
        TypeError: they are a mapping.
    """
    if isinstance(values, torch.Tensor):
        return values
    raise TypeError(f"{what} needs one tensor, and these are {', '.join(values)}")


def shape_of(values: Values) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    """Return the shape of one example, without the leading N."""
    if isinstance(values, torch.Tensor):
        return tuple(values.shape[1:])
    return {name: tuple(tensor.shape[1:]) for name, tensor in values.items()}


def shape_text(values: Values) -> str:
    """Return the shapes in words.

    >>> shape_text({"ids": torch.zeros(2, 5), "mask": torch.zeros(2, 5)})
    'ids [2, 5], mask [2, 5]'
    """
    if isinstance(values, torch.Tensor):
        return str(list(values.shape))
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in values.items())
