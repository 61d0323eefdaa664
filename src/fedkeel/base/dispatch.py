"""Watching operations one by one and taking gradients, without loading torch's compiler.

Both load it by themselves, which takes a process one to three seconds, and use nothing of it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `TorchDispatchMode` that torch's compiler knows nothing of.

    torch wraps every other one so that its compiler leaves it as it is. At the first operation that
    loads the compiler, and each further operation passes through the wrapper.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """Leave the class as it is, where `TorchDispatchMode` would wrap its operations."""


def grad(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Return `torch.func.grad` of a function, by its first argument.

    Args:
        function: as `torch.func.grad` takes it.
        has_aux: whether it returns a pair, whose second half is passed on as it is.
    """
    gradient = torch.func.grad(function, has_aux=has_aux)

    @functools.wraps(function)
    def without_compiler(*args: Any) -> Any:  # noqa: ANN401 - what the function takes and returns
        with _compiler_left_alone():
            return gradient(*args)

    return without_compiler


class _Unloaded:
    """Stands for a module that is not loaded, and loads it once somebody asks for what is in it."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self._module), name)


@contextmanager
def _compiler_left_alone() -> Iterator[None]:
    """Let torch switch its compiled automatic differentiation off without loading the compiler.

    `torch.func` does so around each gradient. As long as the compiler is not loaded, there is
    nothing to switch off. Whatever else asks for the compiler in the meantime gets it.
    """
    names = vars(torch)
    if "_dynamo" in names:
        yield
        return
    compiler: Any = _Unloaded("torch._dynamo")
    compiler.compiled_autograd = _Unloaded("torch._dynamo.compiled_autograd")
    compiler.compiled_autograd._disable = nullcontext
    names["_dynamo"] = compiler
    try:
        yield
    finally:
        if names.get("_dynamo") is compiler:  # otherwise it has been loaded
            del names["_dynamo"]
