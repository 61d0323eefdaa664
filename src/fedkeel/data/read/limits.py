"""How large the content of a file may be: checked by what its header says, before it is decoded."""

from __future__ import annotations

from fedkeel.base.memory import format_bytes, free_memory
from fedkeel.errors import DataError

_COPIES = 3
"""How often an array is in memory while it is read: as in the file, as numbers, and joined."""

_MAX_EXPANSION = {10**8: 500, 10**9: 100}
"""How many times its size in the file an array may be that takes more than so many bytes: zeros are
compressed a thousandfold."""


def check_size(file: object, what: str, size: int, stored: int, do: str) -> None:
    """Refuse what is too large to be decoded.

    Args:
        file: the file, for messages.
        what: what is to be decoded, such as ``the array 'x'``.
        size: bytes that it takes in memory.
        stored: bytes that it takes in the file.
        do: what to do about it.

    Raises:
        DataError: it does not fit into memory, or is compressed as no data are.
    """
    most = min((times for large, times in _MAX_EXPANSION.items() if size > large), default=None)
    if most is not None and size > most * stored:
        raise DataError(
            f"{file}: {what} is much larger than the file.",
            got=f"{format_bytes(size)} in {format_bytes(stored)}",
            expected=f"at most {most} times its size in the file",
            why="so small a file could fill the memory",
            do=do,
        )
    free = free_memory()
    if free is not None and _COPIES * size > free:
        raise DataError(
            f"{file}: {what} does not fit into memory.",
            got=f"{format_bytes(size)}, of which {_COPIES} copies are made while it is read",
            expected=f"at most {format_bytes(free // _COPIES)}, as {format_bytes(free)} are free",
            do=do,
        )
