"""A user's own network, by its import path ``package.module:Class``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import nn

from fedkeel.errors import ModelError, did_you_mean


def load(path: str) -> Callable[..., object]:
    """Return the class, or the function that makes a module, at ``package.module:Class``.

    Modules are looked for in the current working directory first, then wherever Python looks.

    Raises:
        ModelError: the path cannot be read, the module cannot be imported, or it has no such class.
    """
    place, _, attribute = path.partition(":")
    words = (*place.split("."), attribute)
    if not all(word.isidentifier() for word in words) or place.endswith(".py"):
        raise ModelError(
            f"model {path!r} is not an import path",
            expected="package.module:Class",
            do="for the class Net in my_net.py write 'my_net:Net'",
        )
    module = _module(path, place)
    if attribute not in vars(module):
        nets = [name for name, value in vars(module).items() if _is_network(value)]
        raise ModelError(
            f"model {path!r}: the module {place!r} has no {attribute!r}",
            why=f"the module was found at {getattr(module, '__file__', 'no file')}",
            do=did_you_mean(attribute, nets) if nets else "write a torch.nn.Module there",
        )
    found: object = vars(module)[attribute]
    other_class = isinstance(found, type) and not _is_network(found)
    if other_class or isinstance(found, nn.Module) or not callable(found):
        raise ModelError(
            f"model {path!r} is not a class of torch.nn.Module",
            got="another class" if other_class else f"an object of {type(found).__name__}",
            do="name the class itself, or a function that returns a new module",
        )
    return found


def one_line(error: BaseException) -> str:
    """Return the kind and the first line of an error.

    >>> one_line(ValueError("bad", 1))
    "ValueError: ('bad', 1)"
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _module(path: str, place: str) -> ModuleType:
    try:
        with _working_directory_first():
            importlib.invalidate_caches()
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        if f"{place}.".startswith(f"{missing}."):
            raise ModelError(
                f"model {path!r}: there is no module {missing!r}",
                why=f"neither in {os.getcwd()} nor among the installed packages",
                do="run where the file is, or install its package",
            ) from error
        raise ModelError(
            f"model {path!r}: the module {place!r} imports {missing!r}, which is not installed",
            do=f"install {missing!r} in the environment of fedkeel",
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise ModelError(
            f"model {path!r}: the module {place!r} cannot be imported",
            got=one_line(error),
            do=f"correct it until 'python -c \"import {place}\"' works",
        ) from error


@contextmanager
def _working_directory_first() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        # By value: the module may have changed the list.
        if here in sys.path:
            sys.path.remove(here)


def _is_network(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
