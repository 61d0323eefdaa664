"""Weights & Biases: a project with a run for each run, grouped by comparison or search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import wandb

from fedkeel.features.track.base import FileKind, Numbers, OpenRun, TrackedRun


def open_run(run: TrackedRun) -> OpenRun:
    """Begin a run, or open the one that was begun before.

    Offline nobody knows what was reported before: a run that continues reports all its rounds
    again, in a folder of the same id, which takes the place of the earlier one.
    """
    opened = wandb.init(
        project=run.track.project,
        mode=run.track.wandb_mode,
        name=run.name,
        id=run.id or None,
        resume="allow" if run.id else None,
        group=run.group or None,
        job_type=run.tags.get("method", run.kind)[:64],
        config=dict(run.settings),
        tags=[f"{key}: {value}"[:64] for key, value in run.tags.items()],
        reinit="create_new",  # a run that the user has opened stays as it is
        settings=wandb.Settings(console="off"),
    )
    return _WandbRun(opened)


class _WandbRun(OpenRun):
    """A run in Weights & Biases; a step is a round."""

    def __init__(self, run: wandb.Run) -> None:
        super().__init__(run.id, run.step - 1)
        self._run = run

    def log(self, rounds: Sequence[tuple[int, Numbers]]) -> None:
        for round, values in rounds:
            self._run.log(dict(values), step=round, commit=True)

    def add_file(self, path: Path, kind: FileKind) -> None:
        artifact = wandb.Artifact(f"{self.id}-{path.stem}", type=kind)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def add_table(self, name: str, markdown: str) -> None:
        self._run.summary[name] = markdown

    def end(self, status: str, summary: Numbers) -> None:
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=1 if status == "failed" else 0)
