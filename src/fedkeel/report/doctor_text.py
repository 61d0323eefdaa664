"""The doctor's findings and advice for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedkeel.errors import enumeration, printable
from fedkeel.records.doctor import Advice, DoctorRecord, Level
from fedkeel.report.formatting import quoted
from fedkeel.report.text_table import TextTable

_MARKS: dict[Level, tuple[str, str]] = {
    "fine": ("·", "green"),
    "notable": ("!", "yellow"),
    "problem": ("‼", "red"),
    "unknown": ("?", "dim"),
}


def headline(record: DoctorRecord) -> str:
    """Return in one sentence what matters most."""
    problems, notable, unknown = (
        [item.title.lower() for item in record.findings if item.level == level]
        for level in ("problem", "notable", "unknown")
    )
    summary = f"Nothing stands out{' of what is known' if unknown else ''}."
    if problems:
        summary = f"What stands out: {enumeration(problems, 5)}."
    elif notable:
        summary = f"Nothing stands out strongly. Worth a look: {enumeration(notable, 5)}."
    if not record.advised:
        return summary
    methods = enumeration([quoted(method) for method in record.methods])
    return f"{summary} Worth tuning: {methods}."


def overview(record: DoctorRecord) -> str:
    """Return in one line what was examined."""
    if not record.pilot:
        return f"{record.clients:,} sites of a federation, judged by their statistics"
    groups = f", whole values of {record.held_out_by!r}" if record.held_out_by else ""
    judged = "the clients' personal models" if record.judges_personal else "one model for all"
    return (
        f"{record.clients:,} clients, {record.per_round:,} in a round; {len(record.pilot)} pilot "
        f"runs of {record.rounds} rounds and trials of up to {record.trial_rounds}, scored by "
        f"{record.score.label} on {record.validation_examples:,} training examples held out"
        f"{groups}; for {judged}"
    )


def trial_text(advice: Advice, record: DoctorRecord) -> str:
    """Return the best trial of a method in words, "" where it was not tried."""
    trial = advice.trial
    if trial is None:
        return ""
    at = f"{trial.tuned}, learning rate {trial.lr:g}"
    if trial.score is None:
        return f"diverged within {trial.rounds} rounds at each of {trial.points} settings"
    return f"{record.score.format(trial.score)} in {trial.rounds} rounds with {at}"


def compared(record: DoctorRecord) -> str:
    """Return in one sentence what FedAvg has in trials as long, "" where it was not tried."""
    reference = record.reference
    if reference is None or reference.score is None:
        return ""
    score = record.score.format(reference.score)
    return (
        f"FedAvg has {score} in {reference.rounds} rounds. Each trial is one run with one "
        "seed: small differences are chance."
    )


def terminal_page(record: DoctorRecord) -> RenderableType:
    """Return the page for a terminal of 80 columns or more."""
    parts: list[RenderableType] = [
        Text(record.name, style="bold"),
        Text(overview(record), style="dim"),
        Text(""),
        _findings(record),
    ]
    if record.advised:
        parts += [
            Text("Worth tuning", style="bold"),
            _advice(record.advised, record),
            Text(compared(record), style="dim"),
            Text(""),
            Text("Tried, and behind", style="bold"),
            _behind(record),
        ]
    parts += [Text(f"{printable(note)}\n", style="dim") for note in record.notes]
    if record.excluded:
        parts += [Text("Not tried", style="bold"), _advice(record.excluded, record)]
    parts.append(Text(headline(record)))
    return Group(*parts)


def _findings(record: DoctorRecord) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 1, 0), pad_edge=False)
    table.add_column(width=1)
    table.add_column(width=20, style="bold")
    table.add_column(ratio=1)
    for finding in record.findings:
        mark, colour = _MARKS[finding.level]
        table.add_row(Text(mark, style=colour), Text(finding.title), Text(finding.says))
    return table


def _advice(advised: Sequence[Advice], record: DoctorRecord) -> RenderableType:
    table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=20, style="bold", overflow="fold")
    table.add_column(ratio=1)
    for advice in advised:
        text = Text(f"{advice.reason}. ")
        if tried := trial_text(advice, record):
            text.append(f"[{tried}]", style="dim")
        table.add_row(advice.method, text)
    return table


def _behind(record: DoctorRecord) -> RenderableType:
    rows = [
        (
            trial.tuned,
            str(trial.rounds),
            "diverged" if trial.score is None else record.score.format(trial.score),
            f"{trial.lr:g}",
        )
        for advice in record.not_advised
        if (trial := advice.trial) is not None
    ]
    marked = frozenset((index, 0) for index in range(len(rows)))
    heads = ("method", "rounds", record.score.label, "learning rate")
    return TextTable(heads, rows, marked).terminal()
