"""A user's own network, by its import path ``package.module:Class``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, get_type_hints

from torch import nn

from fedkeel.base.named_code import ImportTarget, called, import_object
from fedkeel.errors import ModelError


def load(path: str) -> Callable[..., object]:
    """Return the class, or the function that makes a module, at ``package.module:Class``.

    It is one of the user's own modules, or of the model libraries below; see
    `fedkeel.base.named_code`.

    Raises:
        ModelError: the path cannot be read, the module may not be named or cannot be imported, or
            it has no such class.
    """
    network: Any = import_object(path, _NETWORK)
    build: Callable[..., object] = network
    if (other := _other_result(build)) is not None:
        raise ModelError(
            f"model {path!r} is not {_NETWORK.kind}", got=f"a function that returns {other}"
        )
    return build


def suggested(name: str) -> str:
    """Return what to write where the name is that of a file here, "" where there is none."""
    stem = name.removesuffix(".py")
    return (
        f"write '{stem}:Net' for the class Net in {stem}.py" if os.path.isfile(f"{stem}.py") else ""
    )


def _other_result(build: Callable[..., object]) -> str | None:
    """Return what a function says that it returns, None where that may be a module."""
    try:
        result = get_type_hints(called(build)).get("return", nn.Module)
    except Exception:  # an annotation may raise anything
        return None
    if not isinstance(result, type) or issubclass(result, nn.Module):
        return None
    return None if issubclass(nn.Module, result) else result.__name__


def _is_network(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


_NETWORK = ImportTarget(
    noun="model",
    error=ModelError,
    example="for the class Net in my_net.py write 'my_net:Net'",
    is_kind=_is_network,
    kind="a class of torch.nn.Module, or a function that returns a new one",
    write="write a torch.nn.Module there, or name the class itself",
    libraries=("torch.nn", "torchvision.models"),
    function_libraries=("torchvision.models",),
)
"""Libraries whose classes build networks of plain values. Functions of libraries may do anything
with their arguments, such as read a file: those of torchvision.models only build its networks.
Some classes of monai and of segmentation_models_pytorch read weights from an address or a file, by
pickle in some versions: such a library is named in `FEDKEEL_MODULES`, or in a function of the
user's. transformers and timm have names of their own, ``hf:`` and ``timm:``."""
