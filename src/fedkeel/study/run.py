"""A run that shows its progress, and that Ctrl-C ends after the round at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedkeel import config
from fedkeel.engine.prepared import Ingredients
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.features.progress.display import run_name
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.features import callbacks_of
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.watching import display_of, interruptible, without_traceback


def run(
    settings: config.Run,
    ingredients: Ingredients,
    out: Path | None,
    resume: bool,
    progress: bool | None,
    callbacks: Sequence[Callback],
) -> Result:
    """Make a run; the arguments are those of `fedkeel.Simulation.run`."""
    with display_of(progress) as display, without_traceback(), one_at_a_time(display.waiting):
        display.prepare()
        prepared = prepare(settings, ingredients)
        shown = display.follow(run_name(settings))
        following = [*callbacks_of(settings, out), *callbacks, shown]
        with interruptible(display):
            return start(prepared, out, resume, following)
