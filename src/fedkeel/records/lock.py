"""The lock of a folder that one process, and one thread in it, writes into at a time.

The folder itself is locked, by ``flock``: a file in it could be deleted, and another process would
take a new one. Some file systems, such as NFS, lock no folders; there it is a file, ``.lock``.
A forked process would share the lock, and keep it after a kill of its parent, so it closes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_locked: dict[Path, FolderLock] = {}
"""The locks of this process by folder."""


@dataclass
class FolderLock:
    """A lock that is held.

    Args:
        path: what is locked.
        handle: it, open; None where nothing can be locked.
    """

    path: Path
    handle: int | None = None

    def is_ours(self) -> bool:
        """Return whether what is locked is still there, and nothing else in its place."""
        if self.handle is None:
            return True
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.handle))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Give the lock up; in a forked process, keep only the parent's."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


@contextmanager
def locked(folder: Path) -> Iterator[FolderLock]:
    """Lock a folder, which is made where there is none; the lock ends with the process, too.

    Raises:
        BlockingIOError: another ``process`` or another ``thread`` has the lock; `strerror` says
            which.
        OSError: the folder cannot be made.
    """
    path = folder.resolve()
    lock = FolderLock(path)
    if _locked.setdefault(path, lock) is not lock:
        raise BlockingIOError(errno.EAGAIN, "thread")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _take(lock)
        yield lock
    finally:
        _locked.pop(path, None)  # a forked process has none
        lock.close()


@contextmanager
def waited_for(file: Path) -> Iterator[None]:
    """Lock a file, which is made where there is none, and wait for who has the lock.

    Raises:
        OSError: the file cannot be made or locked.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _take(lock: FolderLock) -> None:
    """Lock the folder, or a file in it where the file system locks no folders."""
    if fcntl is None:
        return
    for path, flags in ((lock.path, os.O_RDONLY), (lock.path / ".lock", os.O_RDWR | os.O_CREAT)):
        lock.path, lock.handle = path, os.open(path, flags)
        try:
            fcntl.flock(lock.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            raise BlockingIOError(errno.EAGAIN, "process") from None
        except OSError:
            lock.close()


def _forget() -> None:
    """Close in a forked process what its parent has locked."""
    for lock in _locked.values():
        lock.close()
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
