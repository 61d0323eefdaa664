"""What a private run has spent: epsilon, of which unit, at which delta, by which mechanism."""

from __future__ import annotations

from collections.abc import Sequence

from fedkeel.features.budget.record import SERVER_EXAMPLES, PrivacyRecord
from fedkeel.report.feature_report import FeatureReport
from fedkeel.report.formatting import quoted
from fedkeel.report.runs import MethodResults

_PROTECTED = {
    "client": "a client with all its examples",
    "example": "a single example",
}
"""Unit of a guarantee -> whom it protects."""


class PrivacyReport(FeatureReport):
    """What private runs have spent, and what it means."""

    @classmethod
    def notes(cls, methods: Sequence[MethodResults]) -> list[str]:
        """Return a sentence for each private method."""
        return list(filter(None, map(_spent, methods)))


def _spent(method: MethodResults) -> str:
    """Return what a method has spent, "" where it has no budget."""
    record = method.record.features.get("privacy")
    spent = method.summary.values("epsilon")
    if not isinstance(record, PrivacyRecord) or not spent:
        return ""
    most = " at most" if len(set(spent)) > 1 else ""
    unprotected = f"; {SERVER_EXAMPLES}" if SERVER_EXAMPLES in record.says else ""
    return (
        f"Privacy of {quoted(method.label)}: epsilon{most} {max(spent):.3g} of {record.epsilon:g} "
        f"is spent at delta {record.delta:g}; it protects {_PROTECTED[record.unit]} "
        f"({record.unit} level){unprotected}. Mechanism: {quoted(record.part)} clips, and adds "
        f"Gaussian noise of {record.sigma:.4g} times the bound; "
        f"{record.accountant.upper()} accounting."
    )
