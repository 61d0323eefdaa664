"""What an audit found, for a terminal, and the sentences that the page has too."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedkeel.records.audit import RECOVERED, AttackResult, AuditRecord

VIEWS = {
    "client": "the update of a single client, as a curious server without secure aggregation",
    "sum": "the mean of the round's updates, as a curious server with secure aggregation",
    "release": "the models before and after the round, as every client",
}

INVERSIONS = ("linear", "dlg", "cosine")
MEMBERSHIP = ("loss", "updates", "lira")
TOLD_APART = 0.6
"""AUC from which the headline says that membership can be told."""


def overview(record: AuditRecord) -> str:
    """Return in one line what was attacked."""
    parts = [
        f"method {record.method}, round {record.round} of {record.rounds}",
        f"{record.clients} clients in it",
        f"the attacker sees {VIEWS[record.view]}",
        privacy(record),
    ]
    if record.score is not None:
        parts.append(f"{record.score_name} of the model then: {record.score:.3g}")
    return "; ".join(parts)


def privacy(record: AuditRecord) -> str:
    """Return what differential privacy the run has."""
    if record.epsilon is None:
        return "without differential privacy"
    return (
        f"epsilon {record.epsilon:.3g} of a {record.unit} spent by then, at delta {record.delta:g}"
    )


def headline(record: AuditRecord) -> str:
    """Return in one or two sentences what the attacker learned."""
    parts = []
    recovered = {a: record.mean(a, "recovered") for a in INVERSIONS if record.of(a)}
    known = {a: value for a, value in recovered.items() if value is not None}
    if known:
        best = max(known, key=lambda a: known[a])
        parts.append(
            f"`{best}` recovered {100 * known[best]:.0f} % of the inputs"
            if known[best] > 0
            else _best_below(record)
        )
    right = record.mean("labels", "labels_right")
    if right is not None:
        parts.append(f"{100 * right:.0f} % of the labels were read off")
    scores = {a: record.mean(a, "auc") for a in MEMBERSHIP if record.of(a)}
    aucs = {a: value for a, value in scores.items() if value is not None}
    if aucs:
        best = max(aucs, key=lambda a: aucs[a])
        how = "could be told" if aucs[best] >= TOLD_APART else "could hardly be told"
        parts.append(f"who was trained on {how} (AUC {aucs[best]:.2f} by `{best}`)")
    text = "; ".join(parts) if parts else "No attack applies"
    return f"{text}. That an attack fails does not show that the data are safe."


def _best_below(record: AuditRecord) -> str:
    """Return how near the best reconstruction came, where none counts as recovered.

    A person may recognise a picture below the bound, so it does not say that nothing was seen.
    """
    tried = [result for attack in INVERSIONS for result in record.of(attack)]
    known = [(best, r) for r in tried if (best := r.numbers.get("psnr_best")) is not None]
    if not known:
        return "No input was recovered"
    best, result = max(known, key=lambda pair: pair[0])
    look = " (look at it: some can be recognised below that)" if result.pictures else ""
    bound = f"No reconstruction reached {RECOVERED:g} dB"
    return f"{bound}; the best, by `{result.attack}`, has {best:.1f}{look}"


def terminal_page(record: AuditRecord) -> RenderableType:
    """Return what was found for a terminal of 80 columns or more."""
    table = Table(box=None, show_header=False, padding=(0, 1, 1, 0), pad_edge=False)
    table.add_column(width=9, style="bold")
    table.add_column(ratio=1)
    for result in record.results:
        table.add_row(result.attack, _outcome(result))
    for skipped in record.skipped:
        table.add_row(Text(skipped.attack, style="dim"), Text(f"Not made: {skipped.reason}."))
    return Group(
        Text(record.name, style="bold"),
        Text(overview(record), style="dim"),
        Text(""),
        table,
        Text(headline(record)),
    )


def _outcome(result: AttackResult) -> Text:
    text = Text(f"{result.says} ")
    text.append(f"[{result.target}; {result.budget}]", style="dim")
    return text
