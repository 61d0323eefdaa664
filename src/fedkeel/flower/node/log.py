"""Errors on a node: in full in its log and its output, as a short reason for the server."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from fedkeel.errors import DataError, FedkeelError, RunError
from fedkeel.features.budget.policy import PolicyError

LOG = "node.log"
"""File of the log in a node's folder."""

MAX_LOG_BYTES = 1_000_000


def log_error(folder: Path, error: Exception) -> None:
    """Write an error into the node's log and into the SuperNode's output.

    An error that is not fedkeel's own is written with its traceback. The first megabyte of the log
    is kept. Where it cannot be written, the output says so too.
    """
    if isinstance(error, FedkeelError):
        message = "\n".join(error.lines())
    else:
        message = "".join(traceback.format_exception(error))
    file, text = folder / LOG, f"{datetime.now(UTC).isoformat()}\n{message.rstrip()}\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.stat().st_size < MAX_LOG_BYTES:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as refused:
        text += f"{file} cannot be written to ({refused.strerror or type(refused).__name__})\n"
    with suppress(OSError):  # the output may be on the same full disk
        print(text, end="", file=sys.stderr, flush=True)


def public_reason(error: FedkeelError) -> str:
    """Return what the server may know of an error: a message about data may name a patient."""
    if isinstance(error, DataError):
        return f"DataError: the node's data cannot be used; its {LOG} says why"
    what = error.short() if isinstance(error, PolicyError) else error.what
    return f"{type(error).__name__}: {what}"[:200]


@contextmanager
def disk_errors(problem: str, then: str = "") -> Iterator[None]:
    """Turn an error of the disk into one that the server may be told: it names no file.

    Args:
        problem: what cannot be done.
        then: what comes of it.

    Raises:
        RunError: the disk fails.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{problem}: {error.strerror or type(error).__name__}.",
            do=f"see that the node's disk has space and that the node may write to it{then}",
        ) from None
