"""What a user wrote in a file of their own, by its import path ``package.module:Name``."""

from __future__ import annotations

import abc
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn, strided, uint8

from fedkeel.errors import FedkeelError, did_you_mean


@dataclass(frozen=True)
class Wanted:
    """What is looked for, in the words of the messages.

    Args:
        noun: what a user calls it, e.g. "model".
        error: what is raised where it cannot be found.
        example: an import path as it should be written.
        suits: whether a value of the module could be meant.
        write: what to do where the module has nothing that suits.
    """

    noun: str
    error: type[FedkeelError]
    example: str
    suits: Callable[[object], bool]
    write: str


def find(path: str, wanted: Wanted) -> object:
    """Return what stands at ``package.module:Name``.

    Modules are looked for in the current working directory first, then wherever Python looks; where
    a Flower app runs, in the app's folder before: it is the same at the server and on every node.

    Raises:
        FedkeelError: of the kind wanted: the path cannot be read, the module cannot be imported,
            or it has no such name.
    """
    place, _, name = path.partition(":")
    noun, error = wanted.noun, wanted.error
    words = (*place.split("."), name)
    if not all(word.isidentifier() for word in words) or place.endswith(".py"):
        raise error(
            f"{noun} {path!r} is not an import path",
            expected="package.module:Class",
            do=wanted.example,
        )
    module = _module(path, place, wanted)
    if name not in vars(module):
        known = [word for word, value in vars(module).items() if wanted.suits(value)]
        raise error(
            f"{noun} {path!r}: the module {place!r} has no {name!r}",
            why=f"the module was found at {getattr(module, '__file__', 'no file')}",
            do=did_you_mean(name, known) if known else wanted.write,
        )
    found: object = vars(module)[name]
    return found


def one_line(error: BaseException) -> str:
    """Return the kind and the first line of an error.

    >>> one_line(ValueError("bad", 1))
    "ValueError: ('bad', 1)"
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_LIBRARIES = (
    "<",
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
"""Where files lie that a user has not written."""


def where_raised(error: BaseException) -> str:
    """Return function, line and file in which an error was raised.

    It is the last line that a user wrote, where there is one: it says more than those of libraries
    that it called.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"line {error.lineno} of {error.filename}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if not f.filename.startswith(_LIBRARIES)), frames[-1])
    return f"{last.name}, line {last.lineno} of {last.filename}"


def _module(path: str, place: str, wanted: Wanted) -> ModuleType:
    noun = wanted.noun
    try:
        with working_directory_first():
            importlib.invalidate_caches()
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        if f"{place}.".startswith(f"{missing}."):
            raise wanted.error(
                f"{noun} {path!r}: there is no module {missing!r}",
                why=f"neither in {os.getcwd()} nor among the installed packages",
                do="run where the file is, or install its package",
            ) from error
        raise wanted.error(
            f"{noun} {path!r}: the module {place!r} imports {missing!r}, which is not installed",
            do=f"install {missing!r} in the environment of fedkeel",
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise wanted.error(
            f"{noun} {path!r}: the module {place!r} cannot be imported",
            got=one_line(error),
            why=f"raised in {where_raised(error)}",
            do=f"correct it until 'python -c \"import {place}\"' works",
        ) from error


_apps: set[str] = set()
"""Folders of Flower apps, which Flower puts before all others in the path of modules."""


def app_of(file: Path) -> None:
    """Hear of a file of a Flower app, in the app's folder or in a package there."""
    _apps.update(str(folder) for folder in list(file.absolute().parents)[:2])


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Look for modules in the current working directory before anywhere but in a Flower app."""
    here = os.getcwd()
    sys.path.insert(1 if sys.path and sys.path[0] in _apps else 0, here)
    try:
        yield
    finally:
        # By value: the module may have changed the list.
        if here in sys.path:
            sys.path.remove(here)


# ---- how it is written --------------------------------------------------------------------------

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object lies, in its repr: another place in every process."""


def placeless(text: str) -> str:
    """Return a text without the places of objects in memory.

    >>> placeless("<function relu at 0x7f1c2a>")
    '<function relu>'
    """
    return _ADDRESS.sub("", text)


_OTHERS = frozenset({"fedkeel", "torch", "builtins", "collections", "typing", "abc"})
"""Packages whose version decides, not their files."""


def written(value: object) -> str:
    """Return a digest of how a function, a class or an object is written; "" of fedkeel's own.

    It is that of the file, but in a script or an interactive session, where much else changes, that
    of the definition alone: its source, or its byte code where there is no source. What a function
    has closed over and cannot grow, numbers and tensors that it names where it stands, an object's
    attributes and a module's parameters and buffers count too.
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
        return f"{_written(value.func, seen)} {plain(given, seen)}"
    if isinstance(value, MethodType):
        return _written(value.__func__, seen) + _written(value.__self__, seen)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        inner = [value.__defaults__, value.__kwdefaults__, *cells]
        lasting = [() if isinstance(one, (list, dict, set)) else one for one in inner]
        if _foreign(value):
            return ""
        told = [
            (_written(one, seen) if callable(one) else "") or plain(one, seen)
            for one in (*lasting, *_named(value))
            if not any(one is other for other in seen)
        ]
        return " ".join([_definition(value), _code(value.__code__), *told])
    if isinstance(value, type):
        return "".join(_definition(kind) for kind in value.__mro__ if not _foreign(kind))
    if isinstance(value, nn.Module):
        return _module_written(value, seen)
    if hasattr(value, "__dict__"):
        return _written(type(value), seen) + attributes(value, seen)
    return ""


def _module_written(module: nn.Module, seen: tuple[object, ...]) -> str:
    """Return how a module and those in it are written, with all their numbers."""
    told = []
    for name, one in module.named_modules():
        kind = f"{type(one).__module__}.{type(one).__qualname__}"
        told.append(f"{name}: {kind} {_written(type(one), seen)}{attributes(one, seen)}")
        for key, tensor in {**one._parameters, **one._buffers}.items():
            told.append(f"{key}: {plain(tensor, seen)}")
    return "\n".join(told)


def attributes(value: object, seen: tuple[object, ...] = ()) -> str:
    """Return an object's attributes as text; those of `seen` are left out.

    Private ones count where a user wrote the class: not those by which a library does its work.
    """
    private = all(kind in _BARE or _users(kind) for kind in type(value).__mro__)
    hidden = [k for k in vars(value) if k.startswith("_") and (k in _INNER or not private)]
    return plain({k: v for k, v in vars(value).items() if k not in hidden}, seen)


def _users(kind: type) -> bool:
    """Return whether a class stands in a file, or in a session, that a user wrote."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not file.startswith(_LIBRARIES))


_BARE = (object, abc.ABC, Generic, nn.Module)
_INNER = frozenset(vars(nn.Module()))
"""Attributes by which torch keeps a module's tensors, modules and hooks."""


def plain(value: object, seen: tuple[object, ...] = ()) -> str:
    """Return numbers, words and collections of these as text; of other things what they are.

    A tensor or an array is told by its shape, its type and a digest of its numbers, which is the
    same wherever it lies. One that is among `seen` is left out.
    """
    if isinstance(value, dict):
        named = {str(k): v for k, v in value.items()}
        return "{" + ", ".join(f"{k}: {plain(named[k], seen)}" for k in sorted(named)) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [plain(one, seen) for one in value]
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
        return f"{said} {plain(value.tolist())}"
    digest = hashlib.blake2b(
        np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, digest_size=8
    )
    return f"{said} {digest.hexdigest()}"


def _named(function: FunctionType) -> list[object]:
    """Return the numbers, tensors and modules that a function names where it stands."""
    names: list[str] = []
    codes = [function.__code__]
    for code in codes:
        names += code.co_names
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    found = [function.__globals__.get(name) for name in dict.fromkeys(names)]
    kinds = (int, float, np.generic, np.ndarray, Tensor, nn.Module)
    return [one for one in found if isinstance(one, kinds)]


def _foreign(value: type | FunctionType) -> bool:
    return str(value.__module__).split(".")[0] in _OTHERS


def _filled(cell: object) -> bool:
    with suppress(ValueError):
        _ = cell.cell_contents  # type: ignore[attr-defined]
        return True
    return False


def _definition(value: type | FunctionType) -> str:
    """Return the file in which something is defined, or its own definition where that says more."""
    module = sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    if file is not None and value.__module__ != "__main__":
        with suppress(OSError):
            return file_digest(file, id(getattr(module, "__spec__", None)))
    with suppress(OSError, TypeError, IndentationError):
        return inspect.getsource(value)
    functions = [value] if isinstance(value, FunctionType) else vars(value).values()
    return " ".join(_code(one.__code__) for one in functions if isinstance(one, FunctionType))


@functools.lru_cache(maxsize=256)
def file_digest(path: str, state: object) -> str:
    """Return the digest of a file, read once for each state: when it was loaded or changed."""
    with Path(path).open("rb") as file:  # which may be data, larger than memory
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _code(code: CodeType) -> str:
    inner = [_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *inner])
