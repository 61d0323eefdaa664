"""Early stopping: a run ends before its last round by its test score, or by virtual time."""

from __future__ import annotations

import math

from fedkeel.features.stop.settings import Stop
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import MetricInfo
from fedkeel.runner.callbacks import Callback


def score_on_test(row: RoundRecord, score: MetricInfo, sources_needed: int = 1) -> float | None:
    """Return the test score of a round, None where it was not evaluated on enough examples.

    Args:
        row: the round.
        score: the metric by which models are judged.
        sources_needed: how many sources of the test set have to be measured. In a federation whose
            nodes have their own test data, this is the quorum.
    """
    measured = sum(scores.examples > 0 for scores in row.sources.values())
    if row.test is None or not row.test.examples or (row.sources and measured < sources_needed):
        return None
    return row.test[score.name]


class EarlyStopping(Callback):
    """Ends a run at a target, or when the test score has not improved for some rounds.

    The decision depends only on the rows, so a continued run ends with the same round.

    Args:
        settings: when a run ends.
        score: the metric by which models are judged.
        sources_needed: as in `score_on_test`.
    """

    def __init__(self, settings: Stop, score: MetricInfo, sources_needed: int = 1) -> None:
        self._settings, self._score, self._sources_needed = settings, score, sources_needed
        self._best: float | None = None
        self._best_round = 0
        self._reason = ""

    def stop_reason(self, row: RoundRecord) -> str:
        """Return why the run ends with this round; the initial model is scored and ends nothing."""
        score = score_on_test(row, self._score, self._sources_needed)
        if score is not None and not self._reason:
            self._reason = self._reason_at(row.round, score)
        hours, seconds = self._settings.hours, row.features.get("virtual_seconds")
        if not self._reason and hours is not None and seconds and seconds >= 3600.0 * hours:
            self._reason = (
                f"ended early after round {row.round}: {seconds / 3600.0:.4g} hours of virtual "
                f"time have passed (stop.hours {hours:g})"
            )
        return self._reason

    def _reason_at(self, round: int, value: float) -> str:
        settings, score = self._settings, self._score
        is_first = self._best is None or not math.isfinite(self._best)
        if is_first or score.is_better(value, self._best or 0.0, settings.min_delta):
            self._best, self._best_round = value, round
        if round == 0:
            return ""
        if settings.target is not None and score.reaches(value, settings.target):
            return (
                f"ended early after round {round}: the test {score.label} {value:.4g} "
                f"has reached stop.target {settings.target:g}"
            )
        if settings.patience is not None and round - self._best_round >= settings.patience:
            more = f"by more than {settings.min_delta:g} " if settings.min_delta else ""
            changed = "risen" if score.higher_is_better else "fallen"
            return (
                f"ended early after round {round}: the test {score.label} has not {changed} {more}"
                f"{'above' if score.higher_is_better else 'below'} "
                f"{self._best:.4g} since round {self._best_round} "
                f"(stop.patience {settings.patience})"
            )
        return ""
