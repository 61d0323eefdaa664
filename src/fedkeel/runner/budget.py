"""The privacy budget of a run: each row says what is spent, and no round overruns it."""

from __future__ import annotations

from dataclasses import replace

from fedkeel.privacy.budget import Budget, Spending
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback


class BudgetKeeper(Callback):
    """Counts what the rounds spend, and ends a run before a round would overrun its budget.

    It counts by the rows alone, so a continued run has spent what its rows say.

    Args:
        budget: the budget.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget, self._spending = budget, Spending(budget)

    def with_epsilon(self, row: RoundRecord) -> RoundRecord:
        """Return the row of a new round with what has been spent with it."""
        epsilon = self._spending.add([*row.clients, *row.dropped, *row.excluded])
        return replace(row, epsilon=epsilon)

    def stop_reason(self, row: RoundRecord) -> str:
        """Return why the run ends with this round, "" where the next one is in the budget."""
        while self._spending.rounds < row.round:  # of the rounds before an interrupt
            self.with_epsilon(row)
        if row.round >= self._budget.schedule.rounds:
            return ""
        next_epsilon = self._spending.overrun()
        if next_epsilon is None:
            return ""
        return (
            f"ended early after round {row.round}: the next round would bring epsilon from "
            f"{row.epsilon or 0.0:.4g} to {next_epsilon:.4g}, beyond privacy.epsilon "
            f"{self._budget.epsilon:g}"
        )
