"""The page: one HTML file that holds all it needs and asks no network for anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from plotly.offline import get_plotlyjs

from fedkeel.records.folder import RunFolder, write_text
from fedkeel.report import costs, figures, page_content, palette, partition, sparklines
from fedkeel.report.alerts import alerts
from fedkeel.report.chart_style import Drawing
from fedkeel.report.formatting import Name, plain
from fedkeel.report.runs import Entry, load
from fedkeel.report.tables import COLUMNS, columns, footnotes, table
from fedkeel.report.verdict import Status, verdict

_HERE = Path(__file__).parent

_BADGES: dict[Status, str] = {
    "clear": "Clear lead",
    "ahead": "Ahead on every seed",
    "close": "A lead, but not over all",
    "none": "No clear winner",
    "few": "Too few seeds for a claim",
    "single": "",
    "empty": "Not evaluated yet",
}


def write(
    runs: Sequence[Path | RunFolder],
    out: Path,
    *,
    title: str | None = None,
    target: float | None = None,
) -> Path:
    """Write the page of a run or of a comparison.

    Args:
        runs: run folders; seeds of a method are put together, methods stay in the order given.
        out: the file, or a folder that gets a ``report.html``.
        title: title of the page; None makes one.
        target: accuracy for rounds to target, in place of what the runs asked for.

    Returns:
        The file.

    Raises:
        RunError: there is nothing to report, or a folder holds no run.
    """
    return save(load(runs, target), out, title=title)


def save(entries: Sequence[Entry], out: Path, *, title: str | None = None) -> Path:
    """Write the page of runs that have been read, as `write`."""
    file = out / "report.html" if out.is_dir() else out
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render(entries, title=title))
    return file


def render(entries: Sequence[Entry], *, title: str | None = None) -> str:
    """Return the page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["name"] = lambda piece: isinstance(piece, Name)
    environment.filters["breakable"] = _breakable
    page = environment.get_template("page.html.j2")
    return page.render(
        title=title or page_content.title(entries),
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        methods_light=[light for light, _ in palette.METHODS],
        methods_dark=[dark for _, dark in palette.METHODS],
        swaps=dict(palette.swaps()),
        entries=entries,
        alone=len(entries) == 1,
        **_results(entries),
        **_drawings(entries),
        **_details(entries),
    )


def _breakable(label: str) -> markupsafe.Markup:
    """Return a label, escaped, that may go on in the next line after a sign."""
    pieces = re.split(r"(?<=[+,])", label)
    return markupsafe.Markup("<wbr>").join(pieces)


def _results(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return verdict, strip and table."""
    groups = [entry.group for entry in entries]
    rows = table(groups)
    said = verdict(groups)
    best = ["best" in row["marked"] for row in rows]
    strips, marks = sparklines.strips(entries, best)
    return {
        "verdict": said,
        "badge": _BADGES[said.status],
        "description": plain(said.headline),
        "strips": strips,
        "ticks": marks,
        "rows": rows,
        "columns": columns(rows, wide=True),
        "footnotes": footnotes(rows),
        "alerts": alerts(entries),
        "facts": page_content.facts(entries),
        "tiles": page_content.tiles(rows[0], entries[0]) if len(entries) == 1 else [],
        "glossary": [c for c in COLUMNS if c in columns(rows, wide=True)],
    }


def _drawings(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the figures by name; None where the records hold nothing to draw."""
    target = next((s.target for e in entries for s in e.group.summaries if s.target), None)
    accuracy, loss = figures.curves(entries, "top1", target), figures.curves(entries, "loss")
    shown = next((e.first for e in entries if e.first.partition.histogram), entries[0].first)
    drawn: dict[str, Drawing | None] = {
        **{f"accuracy_{axis}": drawing for axis, drawing in accuracy.items()},
        **{f"loss_{axis}": drawing for axis, drawing in loss.items()},
        "traffic": costs.traffic(entries),
        "seconds": costs.seconds(entries),
        "clients": costs.clients(entries),
        "partition": partition.partition(shown),
    }
    return {
        "drawings": {name: drawing for name, drawing in drawn.items() if drawing is not None},
        "partition_caption": partition.caption(shown),
        "partition_facts": partition.facts(shown),
        "partition_seed": shown.seed,
        "scores": costs.scores_table(entries),
        "measured_on": costs.measured_on(entries),
        "zoomed": any(one.figure.layout.yaxis.range for one in accuracy.values()),
        "banded": max(len(entry.runs) for entry in entries),
    }


def _details(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return what stands below the figures."""
    reference, steadiness = page_content.steadiness(entries)
    return {
        "reference": reference,
        "steadiness": steadiness,
        "shares": [f"{100 * share:g}" for share in page_content.SHARES],
        "notes": {entry.index: page_content.notes(entry) for entry in entries},
        "method_facts": {entry.index: page_content.method_facts(entry) for entry in entries},
        "lost": {entry.index: page_content.lost(entry) for entry in entries},
        "common": page_content.common_settings(entries),
        "data_facts": page_content.data_facts(entries),
        "environment": page_content.environment(entries),
        "sources": page_content.sources(entries),
        "runs": page_content.runs_table(entries),
        "repeat": page_content.repeat(entries),
        "dashes": {entry.index: palette.dash(entry.index) for entry in entries},
        "colours": {entry.index: entry.index % len(palette.METHODS) for entry in entries},
    }
