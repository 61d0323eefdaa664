"""Watching operations one by one and taking gradients, without loading torch's compiler.

Both load it by themselves, which takes a process one to three seconds, and use nothing of it.
"""

from __future__ import annotations

import functools
import importlib
import sys
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
        with compiler_left_alone():
            return gradient(*args)

    return without_compiler


_COMPILER = "torch._dynamo"


class _Unloaded:
    """Stands for a module that is not loaded, and loads it once somebody asks for what is in it."""

    __spec__ = None  # an import statement asks for it

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        if sys.modules.get(self._module) is self:  # type: ignore[comparison-overlap]
            del sys.modules[self._module]
        return getattr(importlib.import_module(self._module), name)


@contextmanager
def compiler_left_alone() -> Iterator[None]:
    """Let torch keep its compiler off what is called here without loading the compiler.

    `torch.func` does so around each gradient, and so do the functions that say which form an
    operation's result has. As long as the compiler is not loaded, there is nothing to switch off.
    Whatever else asks for the compiler in the meantime gets it.
    """
    names = vars(torch)
    if "_dynamo" in names:
        yield
        return
    compiler: Any = _Unloaded(_COMPILER)
    compiler.compiled_autograd = _Unloaded(f"{_COMPILER}.compiled_autograd")
    compiler.compiled_autograd._disable = nullcontext
    compiler.disable = _disabled_once_loaded
    is_imported = _COMPILER in sys.modules
    names["_dynamo"] = compiler
    if not is_imported:
        sys.modules[_COMPILER] = compiler
    try:
        yield
    finally:
        if sys.modules.get(_COMPILER) is compiler:
            del sys.modules[_COMPILER]
        if names.get("_dynamo") is compiler:  # otherwise it has been loaded
            del names["_dynamo"]


def _disabled_once_loaded(function: Callable[..., Any], *how: Any, **more: Any) -> Any:  # noqa: ANN401 - torch's own
    """Return a function that torch keeps in place of one that its compiler leaves alone."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        compiler = sys.modules.get(_COMPILER)
        if compiler is None or isinstance(compiler, _Unloaded):
            return function(*args, **kwargs)
        return compiler.disable(function, *how, **more)(*args, **kwargs)

    return call
