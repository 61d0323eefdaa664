"""Statistics of sites for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fedkeel.records.node_statistics import (
    ColumnStatistics,
    Counts,
    NodeStatistics,
    QuantileValue,
    SiteStatistics,
)
from fedkeel.report.formatting import format_number, format_percent
from fedkeel.report.text_table import TextTable

MOST_SITES = 5
"""Sites that have a column of their own in a table of labels."""

QUARTILES = (0.25, 0.5, 0.75)


def statistics_page(statistics: NodeStatistics) -> RenderableType:
    """Return the tables of statistics."""
    parts: list[RenderableType] = [Text(statistics.name, style="bold"), Text("")]
    parts.append(_sites(statistics).terminal())
    parts += [table.terminal() for table in _tables(statistics)]
    parts += [Text(note, style="dim") for note in notes(statistics)]
    return Group(*parts)


def notes(statistics: NodeStatistics) -> list[str]:
    """Return what a reader of the tables has to know."""
    found = []
    if statistics.is_secure:
        found.append("Secure sums: nobody has seen the numbers of a single site.")
    minimum, noise = statistics.total.minimum, statistics.total.noise
    if minimum > 1:
        found.append(
            f"A site tells of no count between 1 and {minimum - 1}: 0 may be one of these, and "
            "what is left counts under 'in no count'."
        )
    if noise:
        kinds = ", ".join(f"{kind} {value:.3g}" for kind, value in noise.items())
        found.append(f"Sites have added noise; deviation of a count of all: {kinds}.")
    if "quantiles" in statistics.kinds:
        bound = "about where they are" if noise else "certain to be"
        found.append(f"In brackets: between which values the median is {bound}.")
    for reason, clients in statistics.faults.items():
        found.append(f"Without client {', '.join(map(str, clients))}: {reason}")
    return found


def _sites(statistics: NodeStatistics) -> TextTable:
    rows = [
        (site.name, f"{site.examples:,}", str(site.minimum), "yes" if site.noise else "no")
        for site in (*statistics.sites, statistics.total)
    ]
    return TextTable(("site", "examples", "smallest count", "noise"), rows, has_code=False)


def _tables(statistics: NodeStatistics) -> Iterator[TextTable]:
    total = statistics.total
    if total.labels is not None:
        yield _labels(statistics, total.labels)
    numbers = [column for column in total.columns if column.categories is None]
    if numbers and statistics.kinds != ("labels",):
        yield _numbers(numbers, total)
    for column in total.columns:
        if column.categories is not None and column.counts is not None:
            yield _categories(column, column.counts, total)


def _labels(statistics: NodeStatistics, total: Counts) -> TextTable:
    known = [site for site in statistics.sites if site.labels is not None][:MOST_SITES]
    counts = [*(site.labels for site in known if site.labels is not None), total]
    names = statistics.label_names or tuple(map(str, range(len(total.shown))))
    rows = [(name, *(f"{c.shown[i]:,}" for c in counts)) for i, name in enumerate(names)]
    rows.append(("in no count", *(f"{c.rest:,}" for c in counts)))
    return TextTable(("label", *(site.name for site in known), "all"), rows, has_code=False)


def _numbers(columns: Sequence[ColumnStatistics], total: SiteStatistics) -> TextTable:
    rows = []
    for column in columns:
        missing = None if column.missing is None else column.missing / max(total.examples, 1)
        found = {item.share: item for item in column.quantiles}
        rows.append(
            (
                column.name,
                format_percent(missing),
                format_number(column.mean),
                format_number(column.deviation),
                *(format_number(_value(found.get(share))) for share in QUARTILES),
                _bounds(found.get(0.5)),
            )
        )
    heads = ("column", "missing\n%", "mean", "deviation", "25 %", "median", "75 %", "")
    return TextTable(heads, rows, has_code=False)


def _value(item: QuantileValue | None) -> float | None:
    return None if item is None else item.value


def _bounds(item: QuantileValue | None) -> str:
    if item is None or (item.low is None and item.high is None):
        return ""
    low, high = ("..." if end is None else f"{end:.4g}" for end in (item.low, item.high))
    return f"[{low}, {high}]"


def _categories(column: ColumnStatistics, counts: Counts, total: SiteStatistics) -> TextTable:
    rows = [
        (name, f"{count:,}", format_percent(count / max(total.examples, 1)))
        for name, count in zip(column.categories or (), counts.shown, strict=True)
    ]
    rows.append(("in no count", f"{counts.rest:,}", ""))
    if column.missing is not None:
        rows.append(("missing", f"{column.missing:,}", ""))
    return TextTable((column.name, "examples", "%"), rows, has_code=False)
