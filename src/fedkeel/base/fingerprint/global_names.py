"""Whether a module is the user's, and the values of the global names in a user's function."""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType

from fedkeel.base.fingerprint.source_digest import module_digest, path_of_module
from fedkeel.base.user_code import is_user_file

_VERSIONED = frozenset({"fedkeel", "torch"})
"""Packages whose version counts, and not their files; Python's own are others."""

_WITHOUT_EFFECT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"})
"""Steps of Python's that stand between a name and what is done with it."""


def is_dunder(name: str) -> bool:
    """Return whether Python itself gives a name its meaning, as that of ``__init__``."""
    return name.startswith("__") and name.endswith("__")


def is_versioned(module: str | None) -> bool:
    """Return whether a module is fedkeel's, torch's or Python's, whose versions count.

    >>> is_versioned("torch.nn"), is_versioned("json"), is_versioned("torchvision")
    (True, True, False)
    """
    top = _top_package(module)
    return top in _VERSIONED or top in sys.stdlib_module_names


def _top_package(module: str | None) -> str:
    return (module or "builtins").split(".")[0]


def is_users_module(name: str | None) -> bool:
    """Return whether a module is a user's file, a script, a session or made while it runs."""
    if name == "__main__":
        return True
    if is_versioned(name):
        return False
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    if file is not None:
        return is_user_file(file)
    return getattr(module, "__spec__", None) is None


def is_users_scope(scope: Mapping[str, object]) -> bool:
    """Return whether the global names of a function are those of a user's module."""
    file = scope.get("__file__")
    if isinstance(file, str):
        return is_user_file(file)
    return is_users_module(str(scope.get("__name__")))


def library_digest(module: str | None) -> str:
    """Return the digest of an installed module's file; "" where its version counts, or Python's."""
    with suppress(OSError):
        return "" if module is None or is_versioned(module) else module_digest(module)
    return ""


def attribute_of(module: str | None, qualname: str) -> object:
    """Return what a module has under a name, None where it has nothing."""
    value: object = sys.modules.get(module or "")
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value


def global_values(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the global values that a function names, also within, and what it imports itself.

    Of a module it is what is taken from it, or the module where that is used as a whole. What a
    function imports is imported here, if it is a user's file: its values are known only then.
    """
    scope = function.__globals__
    for names in dict.fromkeys(_names_of(function.__code__, str(scope.get("__package__") or ""))):
        first, *further = names
        value = scope.get(first)
        if first.startswith("import "):
            value = _imported(first.removeprefix("import "))
        elif first not in scope or is_dunder(first):
            continue
        for name in further:
            if not isinstance(value, ModuleType) or not is_users_module(value.__name__):
                break
            yield value.__name__, module_digest(value.__name__)
            is_there = hasattr(value, name)
            value = getattr(value, name) if is_there else _imported(f"{value.__name__}.{name}")
        yield ".".join(names).removeprefix("import "), value


def _imported(name: str) -> object:
    """Return a user's module, imported if it is not yet; None where there is none."""
    with suppress(Exception):  # a user's module may raise anything
        if name in sys.modules or is_user_file(path_of_module(_top_package(name)) or "<none>"):
            return importlib.import_module(name)
    return None


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType, package: str) -> tuple[tuple[str, ...], ...]:
    """Return the global names in some code, and in the code within it, with their attributes.

    ``settings.model.scale`` is ("settings", "model", "scale"); an import within a function is
    ("import settings",), or ("import settings", "scale") where it takes a name from it.
    """
    names: list[tuple[str, ...]] = []
    steps = [step for step in dis.get_instructions(code) if step.opname not in _WITHOUT_EFFECT]
    for i, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = [step.argval]
            for later in steps[i + 1 :]:
                if later.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                    break
                chain.append(later.argval)
            names.append(tuple(chain))
        elif step.opname == "IMPORT_NAME":
            level, taken = steps[i - 2].argval, steps[i - 1].argval
            with suppress(ImportError):  # beyond the top of its package
                module = importlib.util.resolve_name("." * level + step.argval, package)
                names += [(f"import {module}", name) for name in taken or ()]
                names += [] if taken else [(f"import {module}",)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names_of(constant, package)
    return tuple(names)
