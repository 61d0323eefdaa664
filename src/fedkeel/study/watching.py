"""Showing the progress of a call of the Python interface, and ending it on an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from fedkeel.engine.process.interrupts import interrupts
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.features.progress.display import ProgressDisplay, progress_display
from fedkeel.features.progress.notebook import NotebookBars


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
    with interrupts(display.stopping) as stop:
        yield
    if stop.is_set():
        raise KeyboardInterrupt


@contextmanager
def watched(progress: bool | None) -> Iterator[ProgressDisplay]:
    """Show the progress of many runs, which wait for other threads and may be interrupted."""
    with display_of(progress) as display, interruptible(display), one_at_a_time(display.waiting):
        yield display
