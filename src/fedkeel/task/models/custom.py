"""A user's own network, by its import path ``package.module:Class``."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import nn

from fedkeel.errors import ModelError
from fedkeel.user_code import ImportTarget, import_object
from fedkeel.user_code import one_line as one_line


def load(path: str) -> Callable[..., object]:
    """Return the class, or the function that makes a module, at ``package.module:Class``.

    Modules are looked for in the current working directory first, then wherever Python looks.

    Raises:
        ModelError: the path cannot be read, the module cannot be imported, or it has no such class.
    """
    network = import_object(path, _NETWORK)
    other_class = isinstance(network, type) and not _is_network(network)
    if other_class or isinstance(network, nn.Module) or not callable(network):
        raise ModelError(
            f"model {path!r} is not a class of torch.nn.Module",
            got="another class" if other_class else f"an object of {type(network).__name__}",
            do="name the class itself, or a function that returns a new module",
        )
    return network


def suggested(name: str) -> str:
    """Return what to write where the name is that of a file here, "" where there is none."""
    stem = name.removesuffix(".py")
    return (
        f"write '{stem}:Net' for the class Net in {stem}.py" if os.path.isfile(f"{stem}.py") else ""
    )


def _is_network(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


_NETWORK = ImportTarget(
    noun="model",
    error=ModelError,
    example="for the class Net in my_net.py write 'my_net:Net'",
    is_candidate=_is_network,
    write="write a torch.nn.Module there",
)
