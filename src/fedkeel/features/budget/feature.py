"""A privacy budget as a feature of a run: it adds noise to the method, and counts what is spent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fedkeel import config
from fedkeel.config import ChosenWeights
from fedkeel.engine.prepared import Draft, Prepared
from fedkeel.features.budget.budget_account import Budget, described, weak_points
from fedkeel.features.budget.declaration import PrivacyDeclaration
from fedkeel.features.budget.hooks import BudgetKeeper
from fedkeel.features.budget.legality import (
    EXAMPLE_PART,
    check_participation,
    check_server_examples,
)
from fedkeel.features.budget.noise_forecast import loud_noise, noise_without_account
from fedkeel.features.budget.private_method import with_privacy
from fedkeel.features.budget.record import SERVER_EXAMPLES, PrivacyRecord
from fedkeel.features.budget.secret import key_digest, server_seed
from fedkeel.features.budget.settings import Privacy
from fedkeel.method.part import Capability
from fedkeel.runner.feature import Feature


class PrivacyBudget(Feature):
    """A budget of differential privacy that settings ask for."""

    @property
    def weights(self) -> ChosenWeights | None:
        """Equal weights where clients are protected: else one could change the sum by more."""
        return "uniform" if self.settings.unit == "client" else None

    def wrap(self, draft: Draft) -> Draft:
        """Return the run with noise that keeps the budget."""
        check_participation(draft)
        check_server_examples(draft)
        training, account = with_privacy(
            draft.settings,
            self.settings,
            draft.training,
            draft.federation,
            draft.provides,
            callable(draft.augment),
        )
        seed = partial(server_seed, draft.settings.seed, self.settings)
        draft = replace(draft, training=training, make_server_seed=seed)
        return draft.with_feature(AccountedBudget(self.settings, account))

    def identity(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with the digest of the secret key in place of its file."""
        return {**values, "key_file": key_digest(self.settings)}

    @classmethod
    def warnings(cls, prepared: Prepared) -> list[str]:
        """Return what weakens the guarantee, or that noise has none, and if it is very loud."""
        account = account_of(prepared)
        points = noise_without_account(prepared) if account is None else weak_points(account)
        return [*points, loud_noise(prepared, account)]


class AccountedBudget(PrivacyBudget):
    """The budget of a run whose method is known, with the noise that keeps it.

    Args:
        settings: the budget that is asked for.
        account: what the run spends.
    """

    def __init__(self, settings: Privacy, account: Budget) -> None:
        super().__init__(settings)
        self.account = account

    def record(self, prepared: Prepared) -> PrivacyRecord:
        """Return the budget, its noise and what is counted."""
        account, settings = self.account, self.settings
        is_of_examples = settings.unit == "example"
        has_own = Capability.ROOT_EXAMPLES in prepared.plan.needs
        return PrivacyRecord(
            unit=settings.unit,
            epsilon=settings.epsilon,
            delta=settings.delta,
            part=EXAMPLE_PART if is_of_examples else prepared.plan.reduction.name,
            sigma=account.sigma,
            is_calibrated=account.is_calibrated,
            accountant=account.kind,
            says=described(account) + (f"; {SERVER_EXAMPLES}" if has_own else ""),
        )

    def hooks(self, prepared: Prepared) -> BudgetKeeper:
        """Return what counts the spending, and ends the run before a round would overrun it."""
        return BudgetKeeper(self.account)


def privacy_of(settings: config.Run) -> Privacy | None:
    """Return the budget that settings ask for, None for none."""
    privacy: Privacy | None = getattr(settings, PrivacyDeclaration.table)
    return privacy


def account_of(prepared: Prepared) -> Budget | None:
    """Return what a run spends, None of a run without a budget."""
    feature = prepared.feature(AccountedBudget)
    return None if feature is None else feature.account
