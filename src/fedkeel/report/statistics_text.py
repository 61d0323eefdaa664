"""Statistics of sites for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fedkeel.records.node_statistics import (
    ColumnStatistics,
    Counts,
    NodeStatistics,
    QuantileValue,
    SiteStatistics,
)
from fedkeel.report.formatting import MISSING, format_number, format_percent, short
from fedkeel.report.text_table import TextTable

MOST_SITES = 5
"""Sites that have a column of their own in a table of labels."""

QUARTILES = (0.25, 0.5, 0.75)

WIDE = 17
"""Characters of a quantile and its bounds up to which they stand on one line."""

ZERO = 3e-11
"""Values up to this size share a cell with 0, see `value_cells`."""


def statistics_page(statistics: NodeStatistics) -> RenderableType:
    """Return the tables of statistics."""
    parts: list[RenderableType] = [Text(statistics.name, style="bold"), Text("")]
    parts.append(_sites(statistics).terminal())
    parts += [table.terminal(is_wrapped=True) for table in _tables(statistics)]
    parts += [Text(note, style="dim") for note in notes(statistics)]
    return Group(*parts)


def notes(statistics: NodeStatistics) -> list[str]:
    """Return what a reader of the tables has to know."""
    found = []
    if statistics.is_secure:
        found.append(
            "Secure sums: of a single site, nobody has seen more than how many examples it has."
        )
    total, kinds = statistics.total, statistics.kinds
    minimum, noise = total.minimum, total.noise
    if minimum > 1:
        found.append(
            f"A site tells of no count between 1 and {minimum - 1}: 0 may be one of these, and "
            "what is left counts under 'in no count'."
        )
    between = [column.missing_between for column in total.columns if column.missing_between]
    if any(low < high for low, high in between):
        found.append("The true number of missing values is between the two that are shown.")
    counted_as = {
        "moments": "with its mean (so mean and deviation are exact for a site, and nearly for all)",
        "categories": "in its most frequent category",
    }
    how = [text for kind, text in counted_as.items() if kind in kinds]
    if minimum > 1 and how and not noise:
        found.append(
            f"Where fewer than {minimum} values are missing at a site, they count "
            f"{' and '.join(how)}."
        )
    if noise:
        of_kinds = ", ".join(f"{kind} {value:.3g}" for kind, value in noise.items())
        found.append(f"Sites have added noise; deviation of a count of all: {of_kinds}.")
    if "quantiles" in kinds:
        bound = "is about" if noise else "certainly is"
        found.append(
            f"In brackets: between which values a quantile {bound}. Where these are far apart, or "
            "there is only one of them, it has no value."
        )
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
    total, kinds = statistics.total, statistics.kinds
    if total.labels is not None:
        yield _labels(statistics, total.labels)
    numbers = [column for column in total.columns if column.categories is None]
    if numbers and {"missing", "moments"} & set(kinds):
        yield _numbers(numbers, total)
    if numbers and "quantiles" in kinds:
        yield _quantiles(numbers)
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
    rows = [
        (
            column.name,
            _missing(column, lambda count: format_percent(count / max(total.examples, 1))),
            format_number(column.mean),
            format_number(column.deviation),
        )
        for column in columns
    ]
    return TextTable(("column", "missing\n%", "mean", "deviation"), rows)


def _missing(column: ColumnStatistics, text: Callable[[int], str]) -> str:
    """Return how many values are missing, or between which numbers that is."""
    if column.missing is None:
        return MISSING
    ends = map(text, column.missing_between or (column.missing,))
    return " to ".join(dict.fromkeys(ends))


def _quantiles(columns: Sequence[ColumnStatistics]) -> TextTable:
    by_share = [{item.share: item for item in column.quantiles} for column in columns]
    parts = [[_parts(items.get(share)) for share in QUARTILES] for items in by_share]
    widest = max(len(" ".join(part)) for row in parts for part in row)
    between = " " if widest <= WIDE else "\n"
    cells = [[between.join(part) for part in row] for row in parts]
    rows = [(column.name, *row) for column, row in zip(columns, cells, strict=True)]
    return TextTable(("column", "25 %", "median", "75 %"), rows)


def _parts(item: QuantileValue | None) -> list[str]:
    """Return a quantile's value and its bounds, each where it is known and says more."""
    if item is None or (item.low is None and item.high is None):
        return [MISSING]
    low, high = _end(item.low, math.floor), _end(item.high, math.ceil)
    value = [] if item.value is None else [format_number(item.value)]
    return [*value, f"[{low}, {high}]"] if low != high else value


def _end(bound: float | None, rounded: Callable[[float], int]) -> str:
    """Return a bound with three digits, rounded to the side on which it still holds.

    >>> [_end(bound, math.ceil) for bound in (1.0625, 232.0, -0.59375, 1024.0, 2.1e12, 3e-7, None)]
    ['1.07', '232', '-0.593', '1,030', '2.1e12', '3e-7', '...']
    """
    if bound is None:
        return "..."
    if abs(bound) <= ZERO:
        return "0"
    step = 10.0 ** (math.floor(math.log10(abs(bound))) - 2)
    return short(rounded(round(bound / step, 6)) * step)


def _categories(column: ColumnStatistics, counts: Counts, total: SiteStatistics) -> TextTable:
    rows = [
        (name, f"{count:,}", format_percent(count / max(total.examples, 1)))
        for name, count in zip(column.categories or (), counts.shown, strict=True)
    ]
    rows.append(("in no count", f"{counts.rest:,}", ""))
    if column.missing is not None:
        rows.append(("missing", _missing(column, lambda count: f"{count:,}"), ""))
    return TextTable((column.name, "examples", "%"), rows, has_code=False)
