"""Showing the progress of runs, and ending the command when it is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedkeel.cli.common import say, stderr
from fedkeel.features.progress.display import ProgressDisplay, progress_display


@contextmanager
def shown_progress(
    quiet: bool, go_on: str = "the same command goes on from what was saved"
) -> Iterator[ProgressDisplay]:
    """Show the progress of runs; where they are stopped, say how to go on, and end the command."""
    try:
        with progress_display(stderr(), quiet) as display:
            yield display
    except KeyboardInterrupt:
        say(stderr(), f"stopped; {go_on}")
        raise typer.Exit(130) from None
