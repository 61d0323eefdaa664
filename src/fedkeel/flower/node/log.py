"""What a node says on its machine: what it sends, and errors, which the server hears in short."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import RecordDict

from fedkeel.errors import DataError, FedkeelError, RunError, counted
from fedkeel.features.budget.policy import PolicyError
from fedkeel.flower.protocol import (
    DESCRIBE,
    DESCRIBE_DATA,
    EVALUATE,
    PERSONAL,
    PICTURES,
    SURVEY,
    TRAIN,
)
from fedkeel.flower.secure_protocol import KEYS, MASKED, SHARES, UNMASK
from fedkeel.flower.statistics_protocol import STATISTICS, TOTALS
from fedkeel.flower.wire import HEADER, content_nbytes

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


SENT = {
    DESCRIBE: "a description of this site",
    DESCRIBE_DATA: "a description of this site",
    TRAIN: "what clients have trained",
    SURVEY: "answers before training",
    EVALUATE: "scores of the model",
    PERSONAL: "scores of the site's own models",
    PICTURES: "counts for the pictures of the report",
    STATISTICS: "statistics of the data",
    TOTALS: "masked statistics of the data",
    KEYS: "public keys for a secure sum",
    SHARES: "encrypted parts of secrets for a secure sum",
    MASKED: "a masked sum of what clients have trained",
    UNMASK: "parts of secrets that unmask the sum of all",
}
"""Type of a message -> what its reply holds."""


def log_reply(kind: str, content: RecordDict) -> None:
    """Write into the SuperNode's output what a reply holds, and how many bytes."""
    values = dict(content.get(HEADER) or {}).get("values")
    round = json.loads(values).get("round") if isinstance(values, str) else None
    when = f" after {counted(round, 'round')}" if round else ""
    text = f"for the server{when}: {SENT[kind]}, {content_nbytes(content):,} bytes"
    with suppress(OSError):
        print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {text}", file=sys.stderr, flush=True)


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
