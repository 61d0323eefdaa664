"""Files that settings name, or that a run folder holds: only regular ones, of a bounded size.

A device such as ``/dev/zero``, or a pipe, has no end that anybody could wait for.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from fedkeel.errors import RunError

SETTINGS_BYTES, TABLE_BYTES = 2**24, 2**30
"""The largest file of settings or of a key, and the largest table beside the data."""

RECORD_BYTES, ROWS_BYTES = 2**28, 2**34
"""The largest record of a run, and the largest file of its rows or of a checkpoint's state."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path in which a leading ``~`` or ``~user`` is the folder of this or that user.

    A shell does the same, but not where a path stands in quotes, in a file or in Python.

    Raises:
        RunError: there is no such user: a folder of that name would be made.

    >>> expanded("~").is_absolute(), expanded("./~").name
    (True, '~')
    """
    text = os.path.expanduser(path)
    if text.startswith("~"):
        name = Path(text).parts[0]
        raise RunError(
            f"There is no user {name[1:]!r}, whose folder {name} would be.",
            got=str(path),
            do=f"write the folder in full; for one that is called so, ./{name}",
        )
    return Path(text)


@contextmanager
def writing(problem: str, do: str | None = None) -> Iterator[None]:
    """Say of what cannot be written why not.

    Args:
        problem: what cannot be written, a sentence.
        do: what the user can do.

    Raises:
        RunError: the disk refuses it.
    """
    try:
        yield
    except OSError as error:
        raise RunError(problem, got=error, do=do) from None


def open_regular(path: Path, most: int = sys.maxsize) -> BufferedReader:
    """Open a regular file of at most so many bytes, to be read.

    Raises:
        OSError: it cannot be opened, is not a regular file, or is larger.
    """
    # a pipe would be waited for without O_NONBLOCK, which changes nothing for a regular file
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISREG(status.st_mode):
        reason = f"larger than {most / 2**20:,.0f} MiB"
        raise OSError(errno.EFBIG, reason, str(path))
    raise OSError(errno.EINVAL, "a device or a pipe, and no file", str(path))


def read_regular(path: Path, most: int = SETTINGS_BYTES) -> bytes:
    """Return the content of a regular file of at most so many bytes.

    Raises:
        OSError: as for `open_regular`.
    """
    with open_regular(path, most) as file:
        return file.read()


def read_within(path: Path, most: int = SETTINGS_BYTES) -> bytes:
    """Return the content of a file, or of what a pipe brings, of at most so many bytes.

    Raises:
        OSError: it cannot be read, or is larger.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most / 2**20:,.0f} MiB", str(path))
    return data
