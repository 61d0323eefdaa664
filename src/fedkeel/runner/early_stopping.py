"""Ending a run before its last round, by what its rows say: the same wherever it is taken up."""

from __future__ import annotations

import math

from fedkeel.config import Stop
from fedkeel.records.rows import RoundRecord


def least(share: float, count: int) -> int:
    """Return the smallest whole number that is this share of so many, or more.

    >>> least(0.5, 3), least(0.56, 25)
    (2, 14)
    """
    return math.ceil(round(share * count, 9))  # 0.56 * 25 is a little more than 14


class Early:
    """Looks at each row, and knows from when on a run has no more to do.

    Args:
        settings: when a run ends.
        needed: sources of the test set that have to be measured for a score to be looked at: in a
            federation with data of its own per node, the quorum.
    """

    def __init__(self, settings: Stop, needed: int = 1) -> None:
        self._settings, self._needed = settings, needed
        self._best, self._round = -math.inf, 0
        self.reason = ""

    def see(self, row: RoundRecord) -> bool:
        """Look at the next row, and return whether the run ends with it; `reason` says why.

        The untrained model's row is the one to rise from, and ends nothing.
        """
        measured = sum(score.examples > 0 for score in row.sources.values())
        few = bool(row.sources) and measured < self._needed
        if row.test is not None and row.test.examples and not few and not self.reason:
            self._look(row.round, row.test.top1)
        return bool(self.reason)

    def _look(self, round: int, accuracy: float) -> None:
        settings = self._settings
        if accuracy > self._best + (settings.min_delta if math.isfinite(self._best) else 0.0):
            self._best, self._round = accuracy, round
        if round == 0:
            return
        if settings.target is not None and accuracy >= settings.target:
            self.reason = (
                f"ended early after round {round}: the test accuracy {accuracy:.4g} "
                f"has reached stop.target {settings.target:g}"
            )
        elif settings.patience is not None and round - self._round >= settings.patience:
            more = f"by more than {settings.min_delta:g} " if settings.min_delta else ""
            self.reason = (
                f"ended early after round {round}: the test accuracy has not risen {more}above "
                f"{self._best:.4g} since round {self._round} (stop.patience {settings.patience})"
            )
