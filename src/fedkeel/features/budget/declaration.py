"""What records and report know of a privacy budget."""

from __future__ import annotations

from fedkeel.base.feature import Declaration, Figure
from fedkeel.features.budget.record import PrivacyRecord
from fedkeel.features.budget.settings import Privacy


class PrivacyDeclaration(Declaration):
    """The table [privacy], its record, and the epsilon that a run has spent."""

    feature = "fedkeel.features.budget.feature:PrivacyBudget"
    table = "privacy"
    needs = ("root",)  # whose examples no budget covers
    settings_class = Privacy
    hides_values = True
    meaning = "the budget of differential privacy; None runs without."
    record_class = PrivacyRecord
    report = "fedkeel.features.budget.report:PrivacyReport"
    places = ("key_file",)
    example = "epsilon=8.0, delta=1e-5"
    figures = (
        Figure(
            key="epsilon",
            heading="epsilon",
            unit="spent",
            description="What the run has spent of its budget of differential privacy.",
            progress="epsilon {:.3g}",
            tracked="privacy/epsilon",
            tile="Epsilon spent",
            footnote="spent of the budget of differential privacy, whose delta and unit the run "
            "names.",
        ),
    )

    @classmethod
    def text(cls, record: PrivacyRecord) -> str:
        """Return the budget in a few words."""
        return record.text

    @classmethod
    def tile_note(cls, record: PrivacyRecord) -> str:
        """Return of which budget it was spent."""
        return f"of {record.epsilon:g}; {record.unit} level, delta {record.delta:g}"
