"""What is imported when it is first used: torch, and the names of a package.

Settings and methods are read, listed and composed without torch, which takes seconds to import. So
a module that declares a method takes `torch`, `Tensor` and `F` from here, and uses them in
functions only. A module that uses torch while it is imported, such as for a class of `torch.nn`,
imports torch itself.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["F", "Tensor", "loaded_when_used", "torch"]

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:

    class _Module:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> object:
            """Return an attribute of the module, and keep it: the next use finds it here."""
            value = getattr(import_module(self._name), attribute)
            setattr(self, attribute, value)
            return value

    class _TensorType(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torch.Tensor)

    torch, F = _Module("torch"), _Module("torch.nn.functional")

    class Tensor(metaclass=_TensorType):
        """Stands for `torch.Tensor` in annotations and in `isinstance`."""


def loaded_when_used(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package, which imports a name from its module at its first use.

    Args:
        package: name of the package.
        homes: name -> the module that has it.
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
