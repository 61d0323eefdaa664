"""Settings of the C library's memory allocator: freed memory stays with the process.

By default the GNU C library returns every freed block above 128 KB to the system, and the system
fills it with zeros, page by page, when it is allocated again. Training frees and allocates tensors
of that size all the time: a copy of twenty models takes six times as long that way.

In a process that sets nothing, the library raises that size by itself, up to 32 MB, when larger
blocks are freed. Once the size was set, the library leaves it. So after a run it is set to 32 MB:
with the 128 KB of the beginning, all that the process computes later would be slow.

Tensors of 2 MB and more lie in huge pages where Linux gives them on request. The package's
``__init__`` lets torch request them (``THP_MEM_ALLOC_ENABLE``; set it to 0 for small pages).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # numbers of the GNU C library
_KEEP, _LARGEST_BY_ITSELF = 2**30, 2**25

_contexts = 0
"""Contexts of `keeping_freed_memory` that have not ended."""


def keep_freed_memory() -> None:
    """Keep freed memory from now on, where the C library has such a setting."""
    _set_thresholds(_KEEP)


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keep freed memory in this context, and return it to the system at the end.

    Several runs of this process may be in such a context at a time: the last one's end counts.
    """
    global _contexts
    _contexts += 1
    _set_thresholds(_KEEP)
    try:
        yield
    finally:
        _contexts -= 1
        if not _contexts:
            _set_thresholds(_LARGEST_BY_ITSELF)
            release_freed_memory()


def release_freed_memory() -> None:
    """Return freed memory to the system once, after work that needed much more than usual."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(size: int) -> None:
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_M_TRIM_THRESHOLD, min(2 * size, _KEEP))
        if not library.mallopt(_M_MMAP_THRESHOLD, size):  # before version 2.35 of the library
            library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BY_ITSELF)
