"""What features add to the reports of runs, and where it is found."""

from __future__ import annotations

from collections.abc import Sequence

from fedkeel.base.feature import declarations, loaded
from fedkeel.report.runs import MethodResults


class FeatureReport:
    """What a feature adds to reports. Every method adds nothing until overridden."""

    @classmethod
    def notes(cls, methods: Sequence[MethodResults]) -> list[str]:
        """Return sentences that stand beside a table of methods, and on their page."""
        return []


def feature_notes(methods: Sequence[MethodResults]) -> list[str]:
    """Return the sentences that all features add."""
    reports = (loaded(kind.report) for kind in declarations().values() if kind.report)
    return [text for report in reports for text in report.notes(methods)]
