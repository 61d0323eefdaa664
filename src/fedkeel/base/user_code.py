"""Which files are the user's, where modules are looked for, and where an error was raised."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def one_line(error: BaseException) -> str:
    """Return the kind and the first line of an error.

    >>> one_line(ValueError("bad", 1))
    "ValueError: ('bad', 1)"
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_import_path(text: str) -> bool:
    """Return whether a text has the form ``package.module:Name``.

    >>> is_import_path("mine.nets:Net"), is_import_path("timm:vit.small")
    (True, False)
    """
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name))


_LIBRARIES = (
    "<",
    f"{Path(__file__).parents[1]}{os.sep}",
    *(
        f"{sysconfig.get_path(name)}{os.sep}"
        for name in ("stdlib", "purelib", "platlib", "scripts")
    ),
)
"""What the paths of files begin with that do not belong to a user."""

_PACKAGES = frozenset({"site-packages", "dist-packages"})


def is_user_file(file: str) -> bool:
    """Return whether a user wrote a file: it is neither a library's nor fedkeel's own."""
    is_of_library = f"{file}{os.sep}".startswith(_LIBRARIES)
    return not (is_of_library or _PACKAGES.intersection(Path(file).parts))


def where_raised(error: BaseException) -> str:
    """Return function, line and file in which an error was raised.

    It is the last line in a user's file, where there is one, and not in a library that it called.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"line {error.lineno} of {error.filename}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if is_user_file(f.filename)), frames[-1])
    return f"{last.name}, line {last.lineno} of {last.filename}"


_app_folders: set[str] = set()
"""Folders of Flower apps, which Flower puts first in `sys.path`."""


def add_flower_app(file: Path) -> None:
    """Remember the folder of a Flower app by a file in it, or in a package there."""
    _app_folders.update(str(folder) for folder in list(file.absolute().parents)[:2])


def app_folders() -> frozenset[str]:
    """Return the folders of the Flower apps that run in this process."""
    return frozenset(_app_folders)


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
