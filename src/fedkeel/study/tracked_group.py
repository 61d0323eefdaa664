"""A comparison or a search at trackers: its runs are grouped below it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedkeel import config
from fedkeel.features.track.base import Numbers, TrackedRun, flat
from fedkeel.features.track.declaration import TrackDeclaration
from fedkeel.features.track.settings import Track
from fedkeel.features.track.trackers import Trackers
from fedkeel.report.page import save_report
from fedkeel.report.runs import MethodResults
from fedkeel.runner.feature import GroupKind, RunGroup


class TrackedGroup:
    """A comparison or a search, open at its trackers.

    Args:
        settings: of its runs.
        kind: what it is.
        folder: its folder, which is there; None where it stays in memory.
        shows_test: whether its runs report scores on the test set.
    """

    def __init__(
        self,
        settings: config.Run,
        kind: GroupKind,
        folder: Path | None,
        shows_test: bool,
    ) -> None:
        track: Track = getattr(settings, TrackDeclaration.table)
        name = (
            f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}" if folder is None else folder.resolve().name
        )
        name = track.group or name
        self._trackers: Trackers | None = None
        if track.to:
            tags = {"first seed": str(settings.seed)}
            described = TrackedRun(name, kind, track, flat(settings), tags, folder, name)
            self._trackers = Trackers(described, {})
        ids = {} if self._trackers is None else self._trackers.ids
        self.runs = RunGroup(name, kind, ids, shows_test)
        """What its runs are told."""
        self._artifacts = track.artifacts
        self._status, self._numbers = "finished", dict[str, float]()

    @property
    def is_open(self) -> bool:
        """Whether any tracker is told."""
        return self._trackers is not None

    def report(
        self,
        table: str,
        numbers: Numbers,
        methods: Sequence[MethodResults] = (),
        complete: bool = True,
    ) -> None:
        """Report the table of results, its numbers, and the page of the runs."""
        self._status = "finished" if complete else "interrupted"
        self._numbers = dict(numbers)
        if self._trackers is None:
            return
        self._trackers.add_table("results", table)
        if methods and "report" in self._artifacts:
            with tempfile.TemporaryDirectory() as temporary:
                page = save_report(methods, Path(temporary) / "report.html", title=self.runs.name)
                self._trackers.add_file(page, "report")

    def end(self, status: str = "") -> None:
        """Say that it has ended."""
        if self._trackers is not None:
            self._trackers.end(status or self._status, self._numbers)


@contextmanager
def tracked_group(
    settings: config.Run,
    kind: GroupKind,
    folder: Path | None,
    shows_test: bool = True,
) -> Iterator[TrackedGroup]:
    """Open a comparison or a search at its trackers; an error ends it there as failed."""
    group = TrackedGroup(settings, kind, folder, shows_test)
    try:
        yield group
    except Exception:
        group.end("failed")
        raise
    except BaseException:  # Ctrl-C
        group.end("interrupted")
        raise
    group.end()
