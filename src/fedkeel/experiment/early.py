"""Ending a run before its last round, by what its rows say: the same wherever it is taken up."""

from __future__ import annotations

import math

from fedkeel.config import Stop
from fedkeel.records.rows import RoundRecord


class Early:
    """Looks at each row, and knows from when on a run has no more to do.

    Args:
        settings: when a run ends.
    """

    def __init__(self, settings: Stop) -> None:
        self._settings = settings
        self._best, self._round = -math.inf, 0
        self.reason = ""

    def see(self, row: RoundRecord) -> bool:
        """Look at the next row, and return whether the run ends with it; `reason` says why.

        The untrained model's row is the one to rise from, and ends nothing.
        """
        if row.test is not None and row.test.examples and not self.reason:
            self._look(row.round, row.test.top1)
        return bool(self.reason)

    def _look(self, round: int, accuracy: float) -> None:
        settings = self._settings
        if accuracy > self._best + (settings.rise if math.isfinite(self._best) else 0.0):
            self._best, self._round = accuracy, round
        if round == 0:
            return
        if settings.target is not None and accuracy >= settings.target:
            self.reason = (
                f"ended early after round {round}: the test accuracy {accuracy:.4g} "
                f"has reached stop.target {settings.target:g}"
            )
        elif settings.patience is not None and round - self._round >= settings.patience:
            self.reason = (
                f"ended early after round {round}: the test accuracy has not risen above "
                f"{self._best:.4g} since round {self._round} (stop.patience {settings.patience})"
            )
