"""What an audit found, for a terminal, and the sentences that the page has too."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedkeel.records.audit import (
    LABEL_GUESSES,
    RECOVERED,
    AttackResult,
    AuditRecord,
    auc_interval,
    largest_auc,
)

VIEWS = {
    "client": "the update of a single client, as a curious server without secure aggregation",
    "sum": "the mean of the round's updates, as a curious server with secure aggregation",
    "release": "the models before and after the round, as every client",
}

INVERSIONS = ("linear", "dlg", "cosine")
MEMBERSHIP = ("loss", "updates", "lira")


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
    unit = {"client": "a client", "example": "an example"}.get(record.unit or "", record.unit)
    return f"epsilon {record.epsilon:.3g} of {unit} spent by then, at delta {record.delta:g}"


def headline(record: AuditRecord) -> str:
    """Return in one or two sentences what the attacker learned, and what a guesser would have."""
    parts = [text for text in (_inputs(record), _labels(record), _members(record)) if text]
    text = "; ".join(parts) if parts else "No attack applies"
    return f"{text}. {_bound(record)}That an attack fails does not show that the data are safe."


def _members(record: AuditRecord) -> str:
    """Return whether members were told from others, with the interval of the best attack.

    The best of several may be so by chance, so its interval is wider, by Bonferroni's rule.
    """
    scores = {a: record.mean(a, "auc") for a in MEMBERSHIP if record.of(a)}
    aucs = {a: value for a, value in scores.items() if value is not None}
    if not aucs:
        return ""
    best = max(aucs, key=lambda a: aucs[a])
    numbers = [result.numbers for result in record.of(best)]
    sizes = [(n["members"] or 1.0, n["others"] or 1.0) for n in numbers]
    low, high = auc_interval(aucs[best], sizes, 1.0 - 0.05 / len(aucs))
    could = "could" if low > 0.5 else "could not"
    of = "" if len(aucs) == 1 else f", the best of {len(aucs)}"
    beside = (
        f"better than by guessing (AUC {aucs[best]:.2f} by `{best}`{of}, interval {low:.2f} to "
        f"{high:.2f}; guessing has 0.5)"
    )
    if record.mean(best, "others_alike") == 1.0:
        return f"who was trained on {could} be told {beside}"
    return (
        f"training examples {could} be told from test examples {beside}. But the test examples are "
        "of other clients, too: this also tells clients apart, and is no measure of who was "
        "trained on. To compare with examples of the same client, set partition.holdout, in Python "
        "holdout=0.25 of fedkeel.from_clients"
    )


def _bound(record: AuditRecord) -> str:
    """Return what a privacy budget of an example says of membership."""
    has_members = any(record.of(attack) for attack in MEMBERSHIP)
    if record.unit != "example" or not has_members or record.epsilon is None:
        return ""
    most = largest_auc(record.epsilon, record.delta or 0.0)
    return (
        f"Epsilon {record.epsilon:.3g} of an example allows an AUC of {most:.2f} at most, on "
        "average, in telling who was trained on. "
    )


def _inputs(record: AuditRecord) -> str:
    """Return which inputs the best attack recovered, beside other examples in their place."""
    recovered = {a: record.mean(a, "recovered") for a in INVERSIONS if record.of(a)}
    known = {a: value for a, value in recovered.items() if value is not None}
    if not known:
        return ""
    guesses = {a: record.mean(a, "recovered_of_others") for a in known}
    best = max(known, key=lambda a: known[a] - (guesses[a] or 0.0))
    if not known[best]:
        return _best_below(record)
    who = f"guessing with {_others(record, best)} recovers"
    beside = _beside(known[best], guesses[best], who, "")
    return f"`{best}` recovered {100 * known[best]:.0f} % of the inputs{beside}"


def _labels(record: AuditRecord) -> str:
    """Return how many labels were read off, beside the best guess of who saw no message."""
    right = record.mean("labels", "labels_right")
    if right is None:
        return ""
    shares = {name: record.mean("labels", f"labels_right_of_{name}") for name in LABEL_GUESSES}
    distance = record.mean("labels", "total_variation_of_even")
    if shares["even"] is None and distance is not None:
        shares["even"] = 1.0 - distance  # as an earlier version wrote it
    known = {name: share for name, share in shares.items() if share is not None}
    best = max(known, key=lambda name: known[name], default="even")
    count = sum(result.numbers.get("examples") or 0.0 for result in record.of("labels"))
    beside = _beside(right, known.get(best), f"guessing {LABEL_GUESSES[best]} has", " right", count)
    return f"{100 * right:.0f} % of the labels were read off{beside}"


def _beside(value: float, guess: float | None, who: str, what: str, count: float = math.inf) -> str:
    """Return what guessing comes to, and whether a value, a share of `count`, is better."""
    if guess is None:
        return ""
    shown, guessed = (f"{100 * share:.0f}" for share in (value, guess))
    chance = 1.96 * math.sqrt(guess * (1.0 - guess) / count) if count else 0.0
    if int(shown) <= int(guessed):
        worse = ": no better than guessing"
    else:
        worse = ": a difference within chance" if value - guess <= chance else ""
    return f", where {who} {guessed} %{what}{worse}"


def _others(record: AuditRecord, attack: str) -> str:
    """Return whose examples those of the client are compared with."""
    alike = record.mean(attack, "others_alike") in (None, 1.0)
    return "other examples" if alike else "test examples of any client"


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
    others, who = result.numbers.get("psnr_best_of_others"), _others(record, result.attack)
    beside = "" if others is None else f", where the nearest of {who} has {others:.1f}"
    if others is not None and best <= others:
        beside += ": no better than guessing"
    if best >= RECOVERED:  # of a table, in which other examples are as near
        return (
            f"No input was recovered: the best reconstruction, by `{result.attack}`, has "
            f"{best:.1f} dB{beside}"
        )
    bound = f"No reconstruction reached {RECOVERED:g} dB"
    return f"{bound}; the best, by `{result.attack}`, has {best:.1f}{look}{beside}"


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
        Text(""),
        Text(headline(record)),
    )


def _outcome(result: AttackResult) -> Text:
    text = Text(f"{result.says} ")
    text.append(f"[{result.target}; {result.budget}]", style="dim")
    return text
