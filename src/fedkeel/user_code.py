"""Importing a user's class or function by its path ``package.module:Name``."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fedkeel.errors import FedkeelError, did_you_mean


@dataclass(frozen=True)
class ImportTarget:
    """The kind of object that is imported, for messages.

    Args:
        noun: what a user calls it, e.g. "model".
        error: class of the errors that are raised.
        example: an import path as it should be written.
        is_candidate: whether a value of the module is of this kind.
        write: what to do where the module has no candidate.
    """

    noun: str
    error: type[FedkeelError]
    example: str
    is_candidate: Callable[[object], bool]
    write: str


def import_object(path: str, target: ImportTarget) -> object:
    """Return the object with the import path ``package.module:Name``.

    Modules are looked for in the current working directory first, then wherever Python looks; where
    a Flower app runs, in the app's folder before: it is the same at the server and on every node.

    Raises:
        FedkeelError: of the target's class: the path cannot be read, the module cannot be imported,
            or it has no such name.
    """
    module_name, _, name = path.partition(":")
    noun, error = target.noun, target.error
    parts = (*module_name.split("."), name)
    if not all(part.isidentifier() for part in parts) or module_name.endswith(".py"):
        raise error(
            f"{noun} {path!r} is not an import path",
            expected="package.module:Class",
            do=target.example,
        )
    module = _import_module(path, module_name, target)
    if name not in vars(module):
        candidates = [key for key, value in vars(module).items() if target.is_candidate(value)]
        raise error(
            f"{noun} {path!r}: the module {module_name!r} has no {name!r}",
            why=f"the module was found at {getattr(module, '__file__', 'no file')}",
            do=did_you_mean(name, candidates) if candidates else target.write,
        )
    result: object = vars(module)[name]
    return result


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
"""What the paths of files begin with that are no user's."""

_PACKAGES = frozenset({"site-packages", "dist-packages"})


def is_user_file(file: str) -> bool:
    """Return whether a user wrote a file: it is neither a library's nor fedkeel's own."""
    return not (file.startswith(_LIBRARIES) or _PACKAGES.intersection(Path(file).parts))


def where_raised(error: BaseException) -> str:
    """Return function, line and file in which an error was raised.

    It is the last line in a user's file, where there is one, and not in a library that it called.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"line {error.lineno} of {error.filename}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if is_user_file(f.filename)), frames[-1])
    return f"{last.name}, line {last.lineno} of {last.filename}"


def _import_module(path: str, module_name: str, target: ImportTarget) -> ModuleType:
    noun = target.noun
    try:
        with working_directory_first():
            importlib.invalidate_caches()
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if f"{module_name}.".startswith(f"{missing}."):
            raise target.error(
                f"{noun} {path!r}: there is no module {missing!r}",
                why=f"neither in {os.getcwd()} nor among the installed packages",
                do="run where the file is, or install its package",
            ) from error
        raise target.error(
            f"{noun} {path!r}: the module {module_name!r} imports {missing!r}, "
            "which is not installed",
            do=f"install {missing!r} in the environment of fedkeel",
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise target.error(
            f"{noun} {path!r}: the module {module_name!r} cannot be imported",
            got=one_line(error),
            why=f"raised in {where_raised(error)}",
            do=f"correct it until 'python -c \"import {module_name}\"' works",
        ) from error


_app_folders: set[str] = set()
"""Folders of Flower apps, which Flower puts first in `sys.path`."""


def add_flower_app(file: Path) -> None:
    """Remember the folder of a Flower app by a file in it, or in a package there."""
    _app_folders.update(str(folder) for folder in list(file.absolute().parents)[:2])


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Put the current working directory first in `sys.path`, or second after a Flower app's."""
    here = os.getcwd()
    sys.path.insert(1 if sys.path and sys.path[0] in _app_folders else 0, here)
    try:
        yield
    finally:
        # By value, as the module may have changed the list.
        if here in sys.path:
            sys.path.remove(here)
