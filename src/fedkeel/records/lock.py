"""The lock of a folder that one process, and one thread in it, writes into at a time.

A library's lock by ``flock`` would not do: a forked worker inherits it, and keeps the folder locked
for a while after a kill of its parent.
"""

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

_locked: set[Path] = set()
"""Folders that this process writes into: the lock of a file is that of the whole process."""

_guard = threading.Lock()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which is made where there is none; the lock ends with the process, too.

    Raises:
        BlockingIOError: another ``process`` or another ``thread`` has the lock; `strerror` says
            which.
        OSError: the folder cannot be made or written to.
    """
    path = folder.resolve()
    with _guard:  # before the file is opened, because to close it would end the lock
        if path in _locked:
            raise BlockingIOError(errno.EAGAIN, "thread")
        _locked.add(path)
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
        _locked.discard(path)
