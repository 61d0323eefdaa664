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
        budget: the budget; None of a run without one.
    """

    def __init__(self, budget: Budget | None) -> None:
        self._spending = None if budget is None else Spending(budget)

    def with_epsilon(self, row: RoundRecord) -> RoundRecord:
        """Return the row of a new round with what has been spent with it."""
        if self._spending is None:
            return row
        if row.round == 0:
            return replace(row, epsilon=0.0)
        epsilon = self._spending.add([*row.clients, *row.dropped, *row.excluded])
        return replace(row, epsilon=epsilon)

    def stop_reason(self, row: RoundRecord) -> str:
        """Return why the run ends with this round, "" where the next one is in the budget."""
        if self._spending is None:
            return ""
        budget = self._spending.budget
        while self._spending.rounds < row.round:  # of the rounds before an interrupt
            self.with_epsilon(row)
        if row.round >= budget.schedule.rounds:
            return ""
        next_epsilon = self._spending.overrun()
        if next_epsilon is None:
            return ""
        return (
            f"ended early after round {row.round}: the next round would bring epsilon from "
            f"{row.epsilon or 0.0:.4g} to {next_epsilon:.4g}, beyond privacy.epsilon "
            f"{budget.epsilon:g}"
        )
