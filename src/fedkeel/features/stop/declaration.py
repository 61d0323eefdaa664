"""What settings and records know of an early end."""

from __future__ import annotations

from fedkeel.base.feature import Declaration
from fedkeel.features.stop.settings import Stop


class StopDeclaration(Declaration):
    """The table [stop]. Every run has it, since every run keeps its best model."""

    feature = "fedkeel.features.stop.feature:EarlyEnd"
    table = "stop"
    settings_class = Stop
    default = Stop()
    needs = ("system",)  # for `hours`
    meaning = "when the run ends before its last round."
    example = "patience=10"
