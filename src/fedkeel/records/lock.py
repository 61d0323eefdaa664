"""A folder that one writes into at a time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_held: set[Path] = set()
_look = threading.Lock()
"""Folders that this process is writing into: a file's lock is that of the process as a whole."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made where there is none, for as long as this process lives.

    Raises:
        BlockingIOError: another ``process`` or another ``thread`` holds it; `strerror` says which.
        OSError: it cannot be made or written to.
    """
    own = folder.resolve()
    with _look:  # before the file is opened: to close it would free the folder
        if own in _held:
            raise BlockingIOError(errno.EAGAIN, "thread")
        _held.add(own)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("ab") as file:
            try:
                if fcntl is not None:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers do not inherit it
            except BlockingIOError:
                raise BlockingIOError(errno.EAGAIN, "process") from None
            except OSError:
                pass  # a file system without locks
            yield
    finally:
        _held.discard(own)
