"""What a user wrote in a file of their own, by its import path ``package.module:Name``."""

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


def import_object(path: str, wanted: ImportTarget) -> object:
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

_PACKAGES = frozenset({"site-packages", "dist-packages"})


def is_user_file(file: str) -> bool:
    """Return whether a user wrote a file: it is neither a library's nor fedkeel's own."""
    return not (file.startswith(_LIBRARIES) or _PACKAGES.intersection(Path(file).parts))


def where_raised(error: BaseException) -> str:
    """Return function, line and file in which an error was raised.

    It is the last line that a user wrote, where there is one: it says more than those of libraries
    that it called.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"line {error.lineno} of {error.filename}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if is_user_file(f.filename)), frames[-1])
    return f"{last.name}, line {last.lineno} of {last.filename}"


def _module(path: str, place: str, wanted: ImportTarget) -> ModuleType:
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


def add_flower_app(file: Path) -> None:
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
