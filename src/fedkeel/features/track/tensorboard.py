"""TensorBoard: event files that `tensorboard --logdir` shows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard import summary as events

from fedkeel.base.named_files import expanded
from fedkeel.features.track.base import FileKind, Numbers, OpenRun, TrackedRun


def open_run(run: TrackedRun) -> OpenRun:
    """Begin an event file; the numbers of an earlier one of the same run are written again.

    A reader drops what was there before, so rounds that an interrupt has lost are seen once.
    """
    return _TensorBoardRun(run, Path(run.id) if run.id else _folder(run))


def _folder(run: TrackedRun) -> Path:
    """Return a folder of its own for the event files of a run."""
    if run.track.tensorboard_folder is None and run.folder is not None:
        return (run.folder / "tensorboard").resolve()
    parts = [run.group, run.name if run.kind == "run" else ""]
    folder = expanded(run.track.tensorboard_folder or "tensorboard").resolve()
    folder = folder.joinpath(*(re.sub(r"[^\w.=-]+", "-", part).strip("-.") for part in parts))
    if not folder.exists():
        return folder
    return next(
        other
        for number in count(2)
        if not (other := folder.with_name(f"{folder.name}-{number}")).exists()
    )


def _writer(folder: Path, is_continued: bool) -> Any:  # noqa: ANN401 - torch declares no types
    """Return a writer; a continued run begins again at round 0."""
    return SummaryWriter(str(folder), purge_step=0 if is_continued else None)


class _TensorBoardRun(OpenRun):
    """A folder of event files."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        super().__init__(str(folder))
        self._writer = _writer(folder, is_continued=bool(run.id))
        self._events = self._writer._get_file_writer()
        values = json.dumps(dict(run.settings), indent=1)
        self._writer.add_text("settings", "\n".join(f"    {line}" for line in values.splitlines()))
        self._end: Any = None
        if run.kind == "run":
            metrics = {"best": 0.0, "last": 0.0}  # only the names are kept
            hparams: Any = events.hparams
            experiment, begin, self._end = hparams(dict(run.settings), metrics)
            self._events.add_summary(experiment)
            self._events.add_summary(begin)

    def log(self, rounds: Sequence[tuple[int, Numbers]]) -> None:
        for round, values in rounds:
            for name, value in values.items():
                self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def add_file(self, path: Path, kind: FileKind) -> None:
        """Say where the file is: TensorBoard keeps no files."""
        self._writer.add_text(f"files/{path.name}", f"`{path.resolve()}`")

    def add_table(self, name: str, markdown: str) -> None:
        self._writer.add_text(name, markdown)

    def end(self, status: str, summary: Numbers) -> None:
        for name, value in summary.items():
            self._writer.add_scalar(name, value)
        if self._end is not None and status == "finished":
            self._events.add_summary(self._end)
        self._writer.close()
