"""How a user's code is written, as a digest: a run is taken again only while it is the same."""

from __future__ import annotations

import abc
import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn, strided, uint8

from fedkeel.user_code import is_user_file, working_directory_first

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object lies, in its repr: another place in every process."""


def without_addresses(text: str) -> str:
    """Return a text without the places of objects in memory.

    >>> without_addresses("<function relu at 0x7f1c2a>")
    '<function relu>'
    """
    return _ADDRESS.sub("", text)


_OTHERS = frozenset({"fedkeel", "torch", "builtins", "collections", "typing", "abc"})
"""Packages whose version decides, not their files."""

_KINDS = (int, float, np.generic, np.ndarray, Tensor, nn.Module)
"""What a function may name where it stands, and what counts with it; in a session words too, which
in a file may be where it lies."""


def source_digest(value: object) -> str:
    """Return a digest of how a function, a class or an object is written; "" of fedkeel's own.

    It is that of the file and of a user's files which that imports (`module_digest`); but in a
    script or an interactive session, where much else changes, that of the definition, its source or
    its byte code where there is no source, and of a user's functions and classes that it names.
    What a function has closed over and cannot grow, numbers and tensors that it names where it
    stands, an object's attributes and a module's parameters and buffers count too.
    """
    text = _written(value)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text else ""


def _written(value: object, seen: tuple[object, ...] = ()) -> str:
    """Return in words how something is written; `seen` is what has led here, in a circle maybe."""
    if any(value is one for one in seen):
        return ""
    seen = (*seen, value)
    if isinstance(value, functools.partial):
        given = [*value.args, *sorted(value.keywords.items())]
        return f"{_written(value.func, seen)} {describe_value(given, seen)}"
    if isinstance(value, MethodType):
        return _written(value.__func__, seen) + _written(value.__self__, seen)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        inner = [value.__defaults__, value.__kwdefaults__, *cells]
        lasting = [() if isinstance(one, (list, dict, set)) else one for one in inner]
        if _foreign(value):
            return ""
        told = [
            (_written(one, seen) if callable(one) else "") or describe_value(one, seen)
            for one in (*lasting, *(named for named in _named(value) if isinstance(named, _KINDS)))
            if not any(one is other for other in seen)
        ]
        told += _reached(value, seen)
        return " ".join([_definition(value), _code(value.__code__), *told])
    if isinstance(value, type):
        kinds = [kind for kind in value.__mro__ if not _foreign(kind)]
        return "".join("".join([_definition(kind), *_reached(kind, seen)]) for kind in kinds)
    if isinstance(value, nn.Module):
        return _module_written(value, seen)
    if hasattr(value, "__dict__"):
        return _written(type(value), seen) + describe_attributes(value, seen)
    return ""


def _module_written(module: nn.Module, seen: tuple[object, ...]) -> str:
    """Return how a module and those in it are written, with all their numbers."""
    told = []
    for name, one in module.named_modules():
        kind = f"{type(one).__module__}.{type(one).__qualname__}"
        told.append(f"{name}: {kind} {_written(type(one), seen)}{describe_attributes(one, seen)}")
        for key, tensor in {**one._parameters, **one._buffers}.items():
            told.append(f"{key}: {describe_value(tensor, seen)}")
        told += describe_hooks(one, seen)
    return "\n".join(told)


def describe_hooks(module: nn.Module, seen: tuple[object, ...] = ()) -> list[str]:
    """Return how what is called before or after a module is written; what is `seen` is left out."""
    found = [(kind, hook) for kind in _HOOKS for hook in vars(module)[kind].values()]
    return [f"{kind}: {describe_value(hook, (*seen, module))}" for kind, hook in found]


def describe_attributes(value: object, seen: tuple[object, ...] = ()) -> str:
    """Return an object's attributes as text; those of `seen` are left out.

    Private ones count where a user wrote the class: not those by which a library does its work.
    """
    private = all(kind in _BARE or _users(kind) for kind in type(value).__mro__)
    hidden = [k for k in vars(value) if k.startswith("_") and (k in _INNER or not private)]
    return describe_value({k: v for k, v in vars(value).items() if k not in hidden}, seen)


def _users(kind: type | FunctionType) -> bool:
    """Return whether a class stands in a file, or in a session, that a user wrote."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_user_file(file))


_BARE = (object, abc.ABC, Generic, nn.Module)
_INNER = frozenset(vars(nn.Module()))
"""Attributes by which torch keeps a module's tensors, modules and hooks."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def describe_value(value: object, seen: tuple[object, ...] = ()) -> str:
    """Return numbers, words and collections of these as text; of other things what they are.

    A tensor or an array is told by its shape, its type and a digest of its numbers, which is the
    same wherever it lies. One that is among `seen` is left out.
    """
    if isinstance(value, dict):
        named = {str(k): v for k, v in value.items()}
        return (
            "{" + ", ".join(f"{k}: {describe_value(named[k], seen)}" for k in sorted(named)) + "}"
        )
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [describe_value(one, seen) for one in value]
        return "[" + ", ".join(items if isinstance(value, (list, tuple)) else sorted(items)) + "]"
    if isinstance(value, np.generic):
        return repr(value.item())
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return "" if any(value is one for one in seen) else _numbers(value)
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, FunctionType) and not _foreign(value):
        return f"{value.__qualname__} {_written(value, seen)}"
    if isinstance(value, (functools.partial, MethodType, nn.Module)):
        return f"{name} {_written(value, seen)}"
    if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        return f"{name} {_written(value, seen)}"
    return name


def _numbers(value: Tensor | NDArray[Any]) -> str:
    """Return the shape, the type and a digest of the numbers of a tensor or an array."""
    said = f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, Tensor):
        if value.is_meta:
            return said
        dense = value.detach() if value.layout == strided else value.detach().to_dense()
        here = dense.cpu().resolve_conj().resolve_neg().contiguous()
        value = here.reshape(-1).view(uint8).numpy()
    if value.dtype.hasobject:
        return f"{said} {describe_value(value.tolist())}"
    digest = hashlib.blake2b(
        np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, digest_size=8
    )
    return f"{said} {digest.hexdigest()}"


def _named(function: FunctionType) -> list[object]:
    """Return the values of all global names in a function, and in those within it."""
    names: list[str] = []
    codes = [function.__code__]
    for code in codes:
        names += code.co_names
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    scope = function.__globals__
    found = [name for name in dict.fromkeys(names) if not name.startswith("__")]
    return [scope[name] for name in found if name in scope]


def _reached(value: type | FunctionType, seen: tuple[object, ...]) -> list[str]:
    """Return how what a definition in a session names is written, and what that names in turn."""
    told, left = [], [value]
    for one in left:  # which grows
        if one.__module__ != "__main__":
            continue
        for named in [named for function in _functions(one) for named in _named(function)]:
            if isinstance(named, ModuleType):
                told.append(module_digest(named.__name__) if _users_module(named) else "")
            elif isinstance(named, (FunctionType, type)):
                known = _foreign(named) or any(named is other for other in (*left, *seen))
                left += [] if known or not _users(named) else [named]
            elif isinstance(named, (*_KINDS, str, tuple)):
                told.append(describe_value(named, seen))
    return [*told, *map(_definition, left[1:])]


def _functions(value: type | FunctionType) -> list[FunctionType]:
    """Return a function by itself, or the functions of which a class is made."""
    if isinstance(value, FunctionType):
        return [value]
    found = []
    for one in vars(value).values():
        inner = [getattr(one, name, None) for name in ("__func__", "fget", "fset", "func")]
        found += [f for f in (one, *inner) if isinstance(f, FunctionType)]
    return found


def _foreign(value: type | FunctionType) -> bool:
    return str(value.__module__).split(".")[0] in _OTHERS


def _filled(cell: object) -> bool:
    with suppress(ValueError):
        _ = cell.cell_contents  # type: ignore[attr-defined]
        return True
    return False


def _definition(value: type | FunctionType) -> str:
    """Return the file in which something is defined, or its own definition where that says more."""
    if value.__module__ != "__main__":
        with suppress(OSError):
            if found := module_digest(value.__module__):
                return found
    with suppress(OSError, TypeError, IndentationError):
        return inspect.getsource(value)
    functions = [value] if isinstance(value, FunctionType) else vars(value).values()
    return " ".join(_code(one.__code__) for one in functions if isinstance(one, FunctionType))


# ---- files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """A module's file, as it was when the module was loaded.

    Args:
        loaded: its specification, another one whenever it is loaded anew; before it is loaded, when
            the file was changed.
        file: where it is.
        digest: of the file.
        imports: names of the modules that it may import; () of a library's.
    """

    loaded: object
    file: str
    digest: str
    imports: tuple[str, ...] = ()


_read: dict[str, _Read] = {}


def module_digest(name: str) -> str:
    """Return the digest of a module's file and of the files of a user's that it imports.

    They are told as they were when the modules were loaded, or first asked for. Of what a library
    imports its version decides; "" of a module that is in no file.
    """
    own = _module(name)
    if own is None:
        return ""
    found: dict[str, str] = {}
    left = list(own.imports)
    for one in left:  # which grows
        read = None if one in found or one == name else _module(one)
        if read is not None and is_user_file(read.file):
            found[one] = read.digest
            left += read.imports
    text = " ".join([own.digest, *(f"{one} {found[one]}" for one in sorted(found))])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _module(name: str) -> _Read | None:
    """Return what is known of a module's file, None where there is no such file."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) if module else _found(name)
    if file is None or not Path(file).is_file():
        return None
    changed = Path(file).stat().st_mtime_ns
    loaded = getattr(module, "__spec__", None) if module else changed
    known = _read.get(name)
    if known is None or known.loaded is not loaded:
        package = getattr(module, "__package__", None) or ""
        names = imported(Path(file), package) if is_user_file(file) else ()
        known = _read[name] = _Read(loaded, file, file_digest(file, changed), tuple(names))
    return known


def _found(name: str) -> str | None:
    """Return the file of a module that is imported later, where it is no part of a package."""
    with suppress(Exception), working_directory_first():  # whatever stands in the path
        spec = None if "." in name else PathFinder.find_spec(name)
        return spec.origin if spec is not None and spec.has_location else None
    return None


def imported(file: Path, package: str = "") -> list[str]:
    """Return the names of the modules that a file may import, wherever in it that stands.

    Args:
        file: of a module.
        package: in which it lies, from which names that begin with a dot are looked up.
    """
    try:
        statements = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # no source
        return []
    names: list[str] = []
    for one in statements:
        if isinstance(one, ast.Import):
            names += [alias.name for alias in one.names]
        elif isinstance(one, ast.ImportFrom):
            with suppress(ImportError):  # beyond the top of its package
                place = importlib.util.resolve_name("." * one.level + (one.module or ""), package)
                names += [place, *(f"{place}.{alias.name}" for alias in one.names)]
    every = [".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)]
    return list(dict.fromkeys(every))


def _users_module(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return module is not None and file is not None and is_user_file(file)


@functools.lru_cache(maxsize=256)
def file_digest(path: str, state: object) -> str:
    """Return the digest of a file, read once for each state: when it was loaded or changed."""
    with Path(path).open("rb") as file:  # which may be data, larger than memory
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _code(code: CodeType) -> str:
    inner = [_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *inner])
