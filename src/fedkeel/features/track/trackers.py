"""One run, comparison or search at all its trackers. A tracker that fails ends nothing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedkeel.errors import TrackerFailed, first_line
from fedkeel.features.track.base import FileKind, Numbers, OpenRun, TrackedRun, open_run
from fedkeel.features.track.settings import Tracker
from fedkeel.records.files import parse_json, write_text

TRACK_FILE = "track.json"
"""File in the folder of a run, a comparison or a search with what each tracker calls it."""


class Trackers:
    """A run, a comparison or a search, open at each tracker that has not failed.

    A tracker whose call raises an error is told nothing more, and the user is warned.

    Args:
        run: what each tracker is told.
        parents: what each tracker calls the comparison or search of the run.
    """

    def __init__(self, run: TrackedRun, parents: Mapping[str, str]) -> None:
        self._run = run
        self._open: dict[Tracker, OpenRun] = {}
        saved = read_ids(run.folder)
        for tracker in run.track.to:
            described = replace(run, id=saved.get(tracker, ""), parent=parents.get(tracker, ""))
            with self._watched(tracker):
                self._open[tracker] = open_run(tracker, described)
        if run.folder is not None and self.ids:
            text = json.dumps({**saved, **self.ids}, indent=1)
            write_text(run.folder / TRACK_FILE, text + "\n")

    @property
    def ids(self) -> dict[str, str]:
        """What each tracker calls it."""
        return {tracker: opened.id for tracker, opened in self._open.items()}

    def log(self, rounds: Sequence[tuple[int, Numbers]]) -> None:
        """Report rounds, to each tracker those that it has not."""
        self._each(lambda run: run.log([row for row in rounds if row[0] > run.last_round]))

    def add_file(self, path: Path, kind: FileKind) -> None:
        """Upload a file."""
        self._each(lambda run: run.add_file(path, kind))

    def add_table(self, name: str, markdown: str) -> None:
        """Report a table."""
        self._each(lambda run: run.add_table(name, markdown))

    def end(self, status: str, summary: Numbers) -> None:
        """Report the end."""
        self._each(lambda run: run.end(status, summary))
        self._open.clear()

    def _each(self, call: Callable[[OpenRun], None]) -> None:
        for tracker, opened in list(self._open.items()):
            with self._watched(tracker):
                call(opened)

    @contextmanager
    def _watched(self, tracker: Tracker) -> Iterator[None]:
        """Turn an error of a tracker into a warning: the run is worth more."""
        try:
            yield
        except Exception as error:  # of its library, its files or its network
            self._open.pop(tracker, None)
            text = (
                f"{self._run.name}: {tracker} failed and is told nothing more of this "
                f"{self._run.kind}, which goes on. {type(error).__name__}: {first_line(error)}"
            )
            warnings.warn(TrackerFailed(text), stacklevel=2)


def read_ids(folder: Path | None) -> dict[str, str]:
    """Return what each tracker calls the run of a folder; nothing where none was told of it."""
    if folder is None or not (folder / TRACK_FILE).exists():
        return {}
    try:
        values = parse_json((folder / TRACK_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in values.items()} if isinstance(values, dict) else {}
