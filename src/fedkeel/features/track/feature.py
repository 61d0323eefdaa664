"""Trackers as a feature of a run: what the run comes to is reported to them."""

from __future__ import annotations

from pathlib import Path

from fedkeel import config
from fedkeel.engine.prepared import Prepared
from fedkeel.features.track.base import check_installed
from fedkeel.features.track.settings import Track
from fedkeel.features.track.tracking import Tracking
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.feature import Feature, RunGroup


class ReportsToTrackers(Feature):
    """The trackers that settings name."""

    settings: Track

    def check(self, prepared: Prepared) -> None:
        """Refuse a tracker whose package is not installed."""
        check_installed(self.settings)

    def callbacks(
        self, settings: config.Run, folder: Path | None, group: RunGroup | None
    ) -> list[Callback]:
        """Return what reports the run; nothing where it reports to no tracker."""
        return [Tracking(settings, self.settings, folder, group)] if self.settings.to else []
