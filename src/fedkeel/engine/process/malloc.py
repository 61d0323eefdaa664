"""Memory that is freed and soon wanted again stays with the process.

By default the C library gives every block above 128 KB back to the system when it is freed, and the
system fills it with zeros, page by page, when it is wanted again. Training does little else than
free and want tensors of that size: a copy of twenty models costs six times as much that way.

Tensors of 2 MB and more lie in huge pages where Linux gives them to those who ask: the package asks
torch to ask (`THP_MEM_ALLOC_ENABLE` in its ``__init__``; who sets it to 0 has small ones).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of the GNU C library
_LARGE, _MOST, _USUAL = 2**30, 2**25, 128 * 1024


def keep() -> None:
    """Keep freed memory from now on, where the C library can be told."""
    _set(_LARGE)


@contextmanager
def kept() -> Iterator[None]:
    """Keep freed memory for a while, and give it back at the end."""
    _set(_LARGE)
    try:
        yield
    finally:
        _set(_USUAL)
        trim()


def trim() -> None:
    """Give back what is free now: after work that wanted much more than what comes will."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set(size: int) -> None:
    with suppress(OSError, AttributeError):  # another C library, which has no such setting
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM, size)
        if not library.mallopt(_MMAP, size):
            library.mallopt(_MMAP, _MOST)  # before version 2.35 larger ones are refused
