"""The privacy budget of a run: each row says what is spent, and no round overruns it."""

from __future__ import annotations

from dataclasses import replace

from fedkeel.features.budget.budget_account import Budget, Spending
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.feature_hooks import Hooks


class BudgetKeeper(Hooks):
    """Counts what the rounds spend, and ends a run before a round would overrun its budget.

    It counts by the rows only, so a continued run has spent what its rows say.

    Args:
        budget: the budget.
    """

    def __init__(self, budget: Budget) -> None:
        self._spending = Spending(budget)

    def recorded(self, row: RoundRecord) -> RoundRecord:
        """Return the row of a new round with what has been spent with it."""
        epsilon = 0.0
        if row.round > 0:
            epsilon = self._spending.add([*row.clients, *row.dropped, *row.excluded])
        return replace(row, features={**row.features, "epsilon": epsilon})

    def stop_reason(self, row: RoundRecord) -> str:
        """Return why the run ends with this round, "" where the next one is in the budget."""
        budget = self._spending.budget
        while self._spending.rounds < row.round:  # of the rounds before an interrupt
            self.recorded(row)
        if row.round >= budget.schedule.rounds:
            return ""
        next_epsilon = self._spending.overrun()
        if next_epsilon is None:
            return ""
        spent = row.features.get("epsilon") or 0.0
        return (
            f"ended early after round {row.round}: the next round would bring epsilon from "
            f"{spent:.4g} to {next_epsilon:.4g}, beyond privacy.epsilon {budget.epsilon:g}"
        )
