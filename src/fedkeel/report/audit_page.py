"""The audit's page: one HTML file in the report's style, originals beside reconstructions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedkeel.records.audit import LABEL_GUESSES, AttackResult, AuditRecord
from fedkeel.report.audit_text import headline, overview
from fedkeel.report.html import render_page, write_page

NUMBERS = {
    "psnr": "PSNR, dB",
    "psnr_of_others": "PSNR of other examples, dB",
    "ssim": "SSIM",
    "recovered": "share recovered",
    "recovered_of_others": "share that other examples would recover",
    "labels_right": "labels right",
    **{f"labels_right_of_{name}": f"by guessing {words}" for name, words in LABEL_GUESSES.items()},
    "auc": "AUC",
    "tpr_at_10%": "told at 10 % false alarms",
    "tpr_at_1%": "told at 1 % false alarms",
    "tpr_at_0.1%": "told at 0.1 % false alarms",
    "hidden_share": "hidden by the projection",
}
"""Numbers of the table, in its order."""


def write_audit_page(record: AuditRecord, out: Path) -> Path:
    """Write the page; return the file.

    Raises:
        RunError: it cannot be written.
    """
    return write_page(render_audit_page(record), out)


def render_audit_page(record: AuditRecord) -> str:
    """Return the page as HTML."""
    return render_page(
        "audit.html.j2",
        record=record,
        headline=headline(record),
        overview=overview(record),
        numbers=[list(_numbers(result)) for result in record.results],
    )


def _numbers(result: AttackResult) -> Iterator[tuple[str, str]]:
    """Yield the names and the numbers of a result that the page shows."""
    for name, label in NUMBERS.items():
        value = result.numbers.get(name)
        if value is not None:
            yield label, f"{value:.3g}"
