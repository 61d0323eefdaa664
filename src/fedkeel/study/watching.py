"""Showing the progress of a call of the Python interface, and ending it on an interrupt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console

from fedkeel.engine.process.interrupts import interrupts
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.features.progress.display import ProgressDisplay, progress_display
from fedkeel.features.progress.notebook import NotebookBars

STOPPED = "stopped; with out= the same call goes on from what was saved"
"""What a script says at its end where an interrupt ended it."""


def display_of(progress: bool | None) -> ProgressDisplay:
    """Return what shows the progress of a call; with None on a terminal, and in a notebook."""
    console = Console(stderr=True)
    if console.is_jupyter and progress is not False:
        return NotebookBars()
    quiet = not (console.is_terminal if progress is None else progress)
    return progress_display(console, quiet)


@contextmanager
def interruptible(display: ProgressDisplay) -> Iterator[None]:
    """Let a first interrupt end the call after the round at hand, and raise it then."""
    with without_traceback():
        with interrupts(display.stopping) as stop:
            yield
        if stop.is_set():
            raise KeyboardInterrupt


@contextmanager
def without_traceback() -> Iterator[None]:
    """Let a script that does not catch an interrupt end with a line, and no traceback of ours."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = error.args or (STOPPED,)
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _without_traceback
        raise


def _without_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception as Python does, but an interrupt of a call of ours in a line."""
    if kind is KeyboardInterrupt and error.args == (STOPPED,):
        print(STOPPED, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


@contextmanager
def watched(progress: bool | None) -> Iterator[ProgressDisplay]:
    """Show the progress of many runs, which wait for other threads and may be interrupted."""
    with display_of(progress) as display, interruptible(display), one_at_a_time(display.waiting):
        yield display
