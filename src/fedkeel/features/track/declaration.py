"""What settings know of trackers."""

from __future__ import annotations

from fedkeel.base.feature import Declaration
from fedkeel.features.track.settings import Track


class TrackDeclaration(Declaration):
    """The table [track]; a run reports to no tracker by itself."""

    feature = "fedkeel.features.track.feature:ReportsToTrackers"
    table = "track"
    settings_class = Track
    default = Track()
    shorthand = "to"
    places = ("tensorboard_folder", "mlflow_uri")
    decides_numbers = False
    meaning = "which trackers the run reports to."
    example = "to=['tensorboard']"
