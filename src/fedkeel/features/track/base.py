"""What a tracker is told of a run, and the calls that every tracker answers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal

from fedkeel.base import optional
from fedkeel.base.settings import Settings
from fedkeel.features.track.settings import Track, Tracker

Kind = Literal["run", "comparison", "search"]
"""What is tracked: one run; or a comparison or a search, which has runs."""

FileKind = Literal["report", "model", "record"]
"""What a file is that is uploaded."""

Values = Mapping[str, str | int | float | bool]
"""Settings and facts by dotted key."""

Numbers = Mapping[str, float]
"""Named numbers, all of them finite."""


@dataclass(frozen=True)
class TrackedRun:
    """A run, a comparison or a search, as a tracker is told of it when it begins.

    Args:
        name: what it is called.
        kind: what it is.
        track: the settings of the trackers.
        settings: every setting, by its dotted key.
        tags: what it is searched by: the method, the seed, the version.
        folder: its folder, None where it stays in memory.
        group: name of its comparison or search, "" for none.
        parent: what this tracker calls that comparison or search, "" for none.
        id: what this tracker calls the run where it was begun before, "" for a new one.
    """

    name: str
    kind: Kind
    track: Track
    settings: Values = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    group: str = ""
    parent: str = ""
    id: str = ""


class OpenRun(ABC):
    """A run that is open at a tracker.

    Args:
        id: what the tracker calls it; the run continues under it after an interrupt.
        last_round: the last round that the tracker has of it, -1 for none.
    """

    def __init__(self, id: str, last_round: int = -1) -> None:
        self.id, self.last_round = id, last_round

    @abstractmethod
    def log(self, rounds: Sequence[tuple[int, Numbers]]) -> None:
        """Report the numbers of rounds, ascending."""

    @abstractmethod
    def add_file(self, path: Path, kind: FileKind) -> None:
        """Upload a file."""

    @abstractmethod
    def add_table(self, name: str, markdown: str) -> None:
        """Report a table that people read."""

    @abstractmethod
    def end(self, status: str, summary: Numbers) -> None:
        """Report how the run ended: `finished`, `failed` or `interrupted`, and its last numbers."""


def open_run(tracker: Tracker, run: TrackedRun) -> OpenRun:
    """Open a run at a tracker: a new one, or the one that `run.id` names."""
    module = import_module(f"fedkeel.features.track.{tracker}")
    opened: OpenRun = module.open_run(run)
    return opened


def flat(settings: Settings) -> dict[str, str | int | float | bool]:
    """Return settings by dotted key, without those of trackers and those that are not set.

    >>> flat(Track(to=("mlflow",)))["to"], flat(Track())["breakdowns"]
    ('["mlflow"]', False)
    """
    values: dict[str, str | int | float | bool] = {}

    def add(table: Mapping[str, object], before: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                add(value, f"{before}{key}.")
            else:
                plain = value if isinstance(value, bool | int | float | str) else json.dumps(value)
                values[before + key] = plain

    dumped = settings.model_dump(mode="json", exclude_none=True)
    dumped.pop("track", None)
    add(dumped, "")
    return values


def check_installed(track: Track) -> None:
    """Refuse a tracker whose package is not installed (ConfigError)."""
    for tracker in track.to:
        optional.check_installed(tracker, f"track.to = {tracker!r}")
