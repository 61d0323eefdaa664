"""The end of a process that still works on a message when nobody takes its reply any more."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Message

MARGIN_SECONDS = 5.0
"""Time before a message expires at which the process that still works on it is ended: Flower takes
no reply to an expired message."""


@contextmanager
def ended_in_time(message: Message) -> Iterator[None]:
    """End this process when the message expires meanwhile; its output then shows where it hung."""
    left = message.metadata.created_at + message.metadata.ttl - time.time()
    # a thread that needs nothing of Python, so it also ends a model that never returns
    faulthandler.dump_traceback_later(max(left - MARGIN_SECONDS, 1.0), exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
