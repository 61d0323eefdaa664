"""A module called with given parameters and buffers, at little cost.

`torch.func.functional_call` looks through the whole module at every call, which for a small network
costs as much as its forward pass. Here the places where tensors belong are looked up once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedkeel.base.values import Values

TensorPlace = tuple[dict[str, Any], str]
"""A module's own table of tensors, and the key in it."""


class Functional:
    """A module as a function of named parameters and buffers.

    Modules that watch their attributes, such as recurrent ones, which keep a second list of their
    weights, are called through `torch.func.functional_call`.

    Args:
        module: the module; its own tensors are back in place after every call.
        copied: whether each call is made to a copy, in which the given tensors stand wherever the
            module's own do, and stay.
    """

    def __init__(self, module: nn.Module, copied: bool = False) -> None:
        self.module = module
        self._copied = copied
        self._places = None if _watches(module) else _places(module)

    def __call__(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Values
    ) -> Any:  # noqa: ANN401 - whatever a module returns
        """Return the module's output for `x`, several inputs by their names.

        Layers may change `buffers` in place.
        """
        args, named = ((x,), {}) if isinstance(x, Tensor) else ((), x)
        if self._copied:
            return self._call_copy({**params, **buffers}, buffers, x)
        if self._places is None:
            values = {**params, **buffers}
            out = functional_call(
                self.module, values, args, named
            )  # assigned buffers are put there
            for name, tensor in buffers.items():
                if values[name] is not tensor:
                    tensor.copy_(values[name])
            return out
        before: list[tuple[TensorPlace, Any]] = []
        try:
            for tensors in (params, buffers):
                for name, tensor in tensors.items():
                    for place in self._places[name]:
                        table, key = place
                        before.append((place, table[key]))
                        table[key] = tensor
            out = self.module(*args, **named)
            for name, tensor in buffers.items():  # a module may assign a buffer, not only fill it
                table, key = self._places[name][0]
                if table[key] is not tensor:
                    tensor.copy_(table[key])
            return out
        finally:
            for (table, key), held in before:
                table[key] = held

    def _call_copy(
        self, values: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Values
    ) -> Any:  # noqa: ANN401 - whatever a module returns
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        module = copy.deepcopy(self.module, {id(t): values.get(name, t) for name, t in named})
        out = module(x) if isinstance(x, Tensor) else module(**x)
        for name, tensor in module.named_buffers():
            if name in buffers and tensor is not buffers[name]:
                buffers[name].copy_(tensor)
        return out


def _watches(module: nn.Module) -> bool:
    return any(type(sub).__setattr__ is not nn.Module.__setattr__ for sub in module.modules())


def _places(module: nn.Module) -> dict[str, list[TensorPlace]]:
    """Return where each named parameter and buffer belongs: several places where it is tied."""
    named = [*module.named_parameters(), *module.named_buffers()]
    places: dict[str, list[TensorPlace]] = {name: [] for name, _ in named}
    names = {id(tensor): name for name, tensor in named}
    for sub in module.modules():
        for table in (sub._parameters, sub._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    places[names[id(tensor)]].append((table, key))
    return places
