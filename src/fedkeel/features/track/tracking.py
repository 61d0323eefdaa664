"""Reporting a run to trackers."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from safetensors.torch import save_file

from fedkeel import config
from fedkeel.features.track.base import Numbers, TrackedRun, flat
from fedkeel.features.track.numbers import numbers
from fedkeel.features.track.settings import Track
from fedkeel.features.track.trackers import Trackers, read_ids
from fedkeel.records.folder import BEST_MODEL, MODEL, RunFolder
from fedkeel.records.row_file import ROWS
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.report.page import write_report
from fedkeel.runner.callbacks import Callback, GlobalModel, RunInfo
from fedkeel.runner.feature import RunGroup
from fedkeel.runner.result import Result

_SECONDS = 1.0
"""Seconds between two reports of a run; rounds in between are reported together."""


class Tracking(Callback):
    """Reports a run to trackers.

    Args:
        settings: of the run.
        track: those of the trackers.
        folder: the run folder, None for a run in memory.
        group: its comparison or search; None where it belongs to none.
    """

    def __init__(
        self, settings: config.Run, track: Track, folder: Path | None, group: RunGroup | None
    ) -> None:
        self._settings, self._track, self._folder, self._group = settings, track, folder, group
        self._is_trial = group is not None and group.kind == "search"
        self._shows_test = group is None or group.shows_test
        self._trackers: Trackers | None = None  # while the run is open
        self._record: RunRecord
        self._waiting: list[tuple[int, Numbers]] = []
        self._bytes, self._reported_at = 0, 0.0

    def on_run_begin(self, run: RunInfo) -> None:
        """Open the run at each tracker, and report the rounds that were made before."""
        if run.is_finished and set(self._track.to) <= read_ids(self._folder).keys():
            return
        self._record, self._bytes, self._waiting = run.record, 0, []
        ids = {} if self._group is None else self._group.ids
        self._trackers = Trackers(self._described(run.record), ids)
        if self._folder is not None and (run.rounds_done or run.is_finished):
            for row in RunFolder(self._folder).rows(run.rounds_done + 1):
                self._add(row)
        self._report()

    def on_evaluation(self, row: RoundRecord, model: GlobalModel) -> None:
        """Report the initial model; other rounds are reported when they end."""
        if row.round == 0:
            self._add(row)

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        """Report the round, with others that come soon."""
        self._add(row)
        if time.monotonic() - self._reported_at >= _SECONDS:
            self._report()

    def on_run_end(self, result: Result) -> None:
        """Report how the run ended, with its files where it is finished."""
        if self._trackers is None:
            return
        self._report()
        status = result.record.status
        if status == "finished":
            with tempfile.TemporaryDirectory() as temporary:
                self._upload(self._trackers, result, Path(temporary))
        has_scores = self._shows_test and result.scores()
        self._trackers.end(status, {"best": result.best, "last": result.last} if has_scores else {})
        self._trackers = None

    def _add(self, row: RoundRecord) -> None:
        self._bytes += sum(row.bytes_up.values()) + sum(row.bytes_down.values())
        breakdowns = self._track.breakdowns
        values = numbers(row, self._record, self._bytes, breakdowns, self._shows_test)
        self._waiting.append((row.round, values))

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        if self._trackers is not None and self._waiting:
            self._trackers.log(self._waiting)
            self._waiting = []

    def _upload(self, trackers: Trackers, result: Result, temporary: Path) -> None:
        """Upload what a finished run has left, and its report page."""
        artifacts = () if self._is_trial else self._track.artifacts
        if self._folder is not None:
            for name in ("config.toml", "run.json", ROWS):
                trackers.add_file(self._folder / name, "record")
        if "models" in artifacts:
            for path in _models(result, temporary):
                trackers.add_file(path, "model")
        if "report" in artifacts and self._folder is not None:
            trackers.add_file(write_report([self._folder], temporary / "report.html"), "report")

    def _described(self, record: RunRecord) -> TrackedRun:
        """Return what the trackers are told of the run when it begins."""
        facts: dict[str, str | int] = {
            "model.parameters": record.model.parameters,
            "data.fingerprint": record.data.fingerprint,
            "data.train": record.data.train,
            "partition.says": record.partition.says,
            "engine.runs": record.engine.kind,
            "fedkeel": record.environment.fedkeel,
            "torch": record.environment.torch,
            "processor": record.environment.processor,
        }
        track, name = self._track, f"{record.method}, seed {record.seed}"
        if self._is_trial and self._folder is not None:
            name = self._folder.name  # the trials of a method differ in their settings
        return TrackedRun(
            name,
            "run",
            track,
            {**flat(self._settings), **facts},
            {"method": record.method, "seed": str(record.seed), "key": record.key},
            self._folder,
            track.group or ("" if self._group is None else self._group.name),
        )


def _models(result: Result, temporary: Path) -> list[Path]:
    """Return the files of the models; those of a run in memory are written first."""
    if result.folder is not None:
        files = [result.folder / name for name in (MODEL, BEST_MODEL)]
        return [path for path in files if path.exists()]
    files = []
    for name, module in ((MODEL, result.module), (BEST_MODEL, result.best_module)):
        if module:
            tensors = {key: tensor.clone().contiguous() for key, tensor in module.items()}
            save_file(tensors, temporary / name)
            files.append(temporary / name)
    return files
