"""The doctor's findings and advice for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedkeel.records.doctor import Advice, DoctorRecord, Level
from fedkeel.report.formatting import enumeration, quoted

_MARKS: dict[Level, tuple[str, str]] = {
    "fine": ("·", "green"),
    "notable": ("!", "yellow"),
    "problem": ("‼", "red"),
    "unknown": ("?", "dim"),
}


def headline(record: DoctorRecord) -> str:
    """Return in one sentence what matters most."""
    problems = [item.title.lower() for item in record.findings if item.level == "problem"]
    summary = f"What stands out: {enumeration(problems, 5)}." if problems else "Nothing stands out."
    methods = enumeration([quoted(method) for method in record.methods])
    return f"{summary} Worth tuning: {methods}."


def overview(record: DoctorRecord) -> str:
    """Return in one line what was examined."""
    judged = "the clients' personal models" if record.judges_personal else "one model for all"
    return (
        f"{record.clients:,} clients, {record.per_round:,} in a round; {len(record.pilot)} pilot "
        f"runs of {record.rounds} rounds, scored by {record.score.label} on "
        f"{record.validation_examples:,} training examples held out; for {judged}"
    )


def terminal_page(record: DoctorRecord) -> RenderableType:
    """Return the page for a terminal of 80 columns or more."""
    parts: list[RenderableType] = [
        Text(record.name, style="bold"),
        Text(overview(record), style="dim"),
        Text(""),
        _findings(record),
        Text("Worth tuning", style="bold"),
        _advice(record.advised),
    ]
    if record.not_advised:
        parts += [Text("Not worth tuning here", style="bold"), _advice(record.not_advised)]
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


def _advice(advised: Sequence[Advice]) -> RenderableType:
    table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=20, style="bold", overflow="fold")
    table.add_column(ratio=1)
    for methods, advice in grouped(advised):
        text = Text(f"{advice.reason}. ")
        text.append(f"[{advice.ground}]", style="dim")
        table.add_row(Text(", ".join(methods)), text)
    return Padding(table, (0, 0, 0, 0))


def grouped(advised: Sequence[Advice]) -> list[tuple[list[str], Advice]]:
    """Return the methods of each rule together, with what the rule says, in their order."""
    by_rule: dict[tuple[str, str], tuple[list[str], Advice]] = {}
    for advice in advised:
        by_rule.setdefault((advice.rule, advice.reason), ([], advice))[0].append(advice.method)
    return list(by_rule.values())
