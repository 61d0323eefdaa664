"""The blocks of a table as text: one for each column, the same in terminal, HTML and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.records.paired import PairedDifference
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import Stat
from fedkeel.report.formatting import MISSING
from fedkeel.reproduce.outcome import TableLine
from fedkeel.reproduce.table import CellMetric, PaperColumn, PaperTable

HEADS = (
    "method",
    "lr",
    "published",
    "measured",
    "difference",
    "gain, 95 % interval",
    "gain published",
    "same sign",
    "best %",
    "last %",
)

_PUBLISHED_HEADS = ("published", "difference", "gain published", "same sign")
"""Heads that need a published number."""

_DIGITS = {"%": 2, "points": 2, "rounds": 0, "MB": 1, "models": 1, "dB": 1, "": 3}


@dataclass(frozen=True)
class TableBlock:
    """One column of the paper's table, as text.

    Args:
        column: the setting.
        title: the setting and its metric.
        notes: remarks for readers.
        lines: one for each method.
        heads: the members of `HEADS` that are shown.
        cells: for each line one text for each head.
    """

    column: PaperColumn
    title: str
    notes: tuple[str, ...]
    lines: tuple[TableLine, ...]
    heads: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, column: PaperColumn, metric: CellMetric, lines: Sequence[TableLine]) -> TableBlock:
        """Return the block of a column."""
        title = f"{column.name}{' (ours)' if column.ours else ''}: {metric_text(metric)}"
        failed = [f"{line.row.name} failed: {why}" for line in lines for why in line.failures]
        notes = tuple(note for note in (column.note, column.missing, *failed) if note)
        hidden: list[str] = []
        if all(line.published is None for line in lines):
            hidden += _PUBLISHED_HEADS
        if len({line.lr for line in lines}) == 1:  # shown once, with the other local settings
            hidden.append("lr")
        shown = [i for i, head in enumerate(HEADS) if head not in hidden]
        heads = tuple(HEADS[i] for i in shown)
        cells = tuple(tuple(line_cells(line)[i] for i in shown) for line in lines)
        return cls(column, title, notes, tuple(lines), heads, cells)


def table_blocks(table: PaperTable, lines: Sequence[TableLine]) -> list[TableBlock]:
    """Return a block for each column that has lines."""
    by_column = [
        (column, [line for line in lines if line.column.id == column.id])
        for column in table.columns
    ]
    return [
        TableBlock.of(column, table.metric_of(column), of_column)
        for column, of_column in by_column
        if of_column
    ]


def metric_text(metric: CellMetric) -> str:
    """Return a metric as text.

    >>> metric_text(CellMetric(kind="rounds_to", target=0.95))
    'rounds to 95 % accuracy'
    """
    if metric.attack is not None:
        return f"PSNR of what the attack {metric.attack} brings back, dB"
    if metric.diagnostic is not None:
        return f"mean of {metric.diagnostic} over rounds"
    score = MetricInfo(metric.score).label
    until_share = {
        "rounds_to_share": "rounds",
        "bytes_to_share": "MB sent",
        "models_to_share": "models sent each way by a client",
    }
    if unit := until_share.get(metric.kind):
        return f"{unit} to {metric.share:g} of the best {score} of {metric.reference}"
    target = f"{100 * metric.target:g} % {score}" if metric.target is not None else ""
    return {
        "best": f"best {score} over rounds, %",
        "last": f"{score} after the last round, %",
        "last_mean": f"{score}, mean of the last {metric.window} evaluations, %",
        "at": f"{score} after round {metric.round}, %",
        "rounds_to": f"rounds to {target}",
        "fluctuation_mean": f"mean change of {score} between evaluations, points",
        "fluctuation_std": f"deviation of the change of {score} between evaluations, points",
        "fluctuation_min": f"deepest fall of {score} between evaluations, points",
    }[metric.kind]


def line_cells(line: TableLine) -> tuple[str, ...]:
    """Return a line as one text for each of `HEADS`."""
    digits = _DIGITS[line.metric.unit]
    same_sign = MISSING
    if line.has_same_sign is not None:
        same_sign = "yes" if line.has_same_sign else "no"
        same_sign += "" if line.is_certain else ", open"
    return (
        f"{line.row.name}{' (ours)' if line.row.ours else ''}",
        MISSING if line.lr is None else f"{line.lr:g}",
        _published(line, digits),
        _measured(line, digits),
        _signed(line.difference, digits),
        _gain(line.gain, digits),
        _signed(line.published_gain, digits),
        same_sign,
        _mean_and_spread(Stat.of(line.best.values()), 2),
        _mean_and_spread(Stat.of(line.last.values()), 2),
    )


def _published(line: TableLine, digits: int) -> str:
    published = line.published
    if published is None:
        return MISSING
    if isinstance(published.value, str):
        return published.value
    spread = "" if published.spread is None else f" ± {published.spread:.{digits}f}"
    return f"{published.value:.{digits}f}{spread}"


def _measured(line: TableLine, digits: int) -> str:
    """Return mean and spread, and the number of seeds where it is not the wanted one."""
    if not line.values:
        return "failed" if line.failures else line.state
    is_never = line.stat is None and line.metric.counts_until_target
    text = "never" if is_never else _mean_and_spread(line.stat, digits)
    count = line.stat.count if line.stat else len(line.values)  # "never" counts all seeds
    return text if count >= line.wanted else f"{text} ({count}/{line.wanted})"


def _mean_and_spread(stat: Stat | None, digits: int) -> str:
    if stat is None:
        return MISSING
    spread = "" if stat.std is None else f" ± {stat.std:.{digits}f}"
    return f"{stat.mean:.{digits}f}{spread}"


def _gain(gain: PairedDifference | None, digits: int) -> str:
    if gain is None:
        return MISSING
    interval = gain.interval
    if interval is None:
        return _signed(gain.stat.mean, digits)
    digits = max(digits, 1)
    ends = f"[{_signed(interval.low, digits)}, {_signed(interval.high, digits)}]"
    return f"{_signed(gain.stat.mean, digits)} {ends}"


def _signed(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:+.{digits}f}"
