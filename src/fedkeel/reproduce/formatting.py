"""A table's lines in words: the same cells for the terminal, the page and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.records.statistics import Stat
from fedkeel.report.formatting import MISSING
from fedkeel.reproduce.outcome import Interval, Line, Values
from fedkeel.reproduce.table import Column, Metric, Table
from fedkeel.reproduce.tuning import words as searched

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

_PUBLISHED: tuple[str, ...] = ("published", "difference", "gain published", "same sign")
"""Heads of what a setting that is in no paper has nothing of."""

_DIGITS = {"%": 2, "points": 2, "rounds": 0, "MB": 1}


@dataclass(frozen=True)
class Block:
    """What is shown of one column of the paper's table.

    Args:
        column: the setting.
        title: the setting and what the numbers are.
        notes: what to know of it.
        lines: one for each method.
        heads: those of `HEADS` that it has something of.
        cells: the lines in words, as many each as heads.
    """

    column: Column
    title: str
    notes: tuple[str, ...]
    lines: tuple[Line, ...]
    heads: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


def blocks(table: Table, found: Sequence[Line]) -> list[Block]:
    """Return a block for each column that has lines."""
    out = []
    for column in table.columns:
        lines = tuple(line for line in found if line.column.id == column.id)
        if lines:
            metric = table.metric_of(column)
            title = f"{column.name}{' (ours)' if column.ours else ''}: {metric_words(metric)}"
            failed = [f"{one.row.name} failed: {why}" for one in lines for why in one.failures]
            notes = tuple(note for note in (column.note, column.missing, *failed) if note)
            out.append(Block(column, title, notes, lines, *_shown(lines)))
    return out


def _shown(lines: Sequence[Line]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the heads of a block, and its lines in words."""
    left_out = _PUBLISHED if all(line.published is None for line in lines) else ()
    if len({line.lr for line in lines}) == 1:  # told once, with all else of local training
        left_out += ("lr",)
    kept = [i for i, head in enumerate(HEADS) if head not in left_out]
    words = [cells(line) for line in lines]
    return tuple(HEADS[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in words)


def metric_words(metric: Metric) -> str:
    """Return what a metric is, in words.

    >>> metric_words(Metric(kind="rounds_to", target=0.95))
    'rounds to 95 % top-1'
    """
    score = "top-1" if metric.score == "top1" else "top-3"
    if metric.kind in ("rounds_to_share", "bytes_to_share"):
        what = "rounds" if metric.kind == "rounds_to_share" else "MB sent"
        return f"{what} to {metric.share:g} of the best {score} of {metric.reference}"
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


def cells(line: Line) -> tuple[str, ...]:
    """Return a line in words, one for each of `HEADS`."""
    digits = _DIGITS[line.metric.unit]
    name = f"{line.row.name}{' (ours)' if line.row.ours else ''}"
    return (
        name,
        MISSING if line.lr is None else f"{line.lr:g}",
        _published(line, digits),
        _measured(line, digits),
        MISSING if line.difference is None else f"{line.difference:+.{digits}f}",
        _interval(line.gain, digits),
        MISSING if line.published_gain is None else f"{line.published_gain:+.{digits}f}",
        _sign(line),
        _spread(line.best, 2),
        _spread(line.last, 2),
    )


def _published(line: Line, digits: int) -> str:
    given = line.published
    if given is None:
        return MISSING
    if isinstance(given.value, str):
        return given.value
    spread = "" if given.spread is None else f" ± {given.spread:.{digits}f}"
    return f"{given.value:.{digits}f}{spread}"


def _measured(line: Line, digits: int) -> str:
    """Return the mean, its deviation, and on how many seeds, where not on all that were asked."""
    if not line.values:
        return "failed" if line.failures else line.state
    there = [v for v in line.values.values() if v is not None]
    told = _stat(Stat.of(there), digits) if there or not line.metric.reaches else "never"
    counted = len(there) or len(line.values)  # "never" is of all that were run
    if counted < line.wanted:
        told += f" ({counted}/{line.wanted})"
    return told


def _stat(found: Stat | None, digits: int) -> str:
    if found is None:
        return MISSING
    spread = "" if found.std is None else f" ± {found.std:.{digits}f}"
    return f"{found.mean:.{digits}f}{spread}"


def _spread(values: Values, digits: int) -> str:
    return _stat(Stat.of(v for v in values.values() if v is not None), digits)


def _interval(gain: Interval | None, digits: int) -> str:
    if gain is None:
        return MISSING
    digits = max(digits, 1) if gain.count > 1 else digits
    if gain.low is None or gain.high is None:
        return f"{gain.mean:+.{digits}f}"
    return f"{gain.mean:+.{digits}f} [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}]"


def _sign(line: Line) -> str:
    """Return whether the gains have one sign.

    It is open where 0 lies in the interval, on one seed, and where the interval cannot count every
    seed that was asked for: one never reached the target, or its run is not finished.
    """
    if line.same_sign is None:
        return MISSING
    told = "yes" if line.same_sign else "no"
    known = line.gain is not None and line.gain.clear and line.gain.count == line.wanted
    return told if known else f"{told}, open"


FOOT = (
    "Measured: mean ± sample deviation over seeds. Gain: over the baseline, paired by seed, with "
    "the 95 % t-interval. Same sign, of the published and the measured gain; open: the interval "
    "holds 0 or cannot count every seed, or there is one seed. Best and last: top-1 in percent, "
    "over rounds and after the last one."
)


def text(block: Block) -> list[str]:
    """Return a block as lines of plain text."""
    rows = [block.heads, *block.cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(block.heads))]
    out = [block.title, *block.notes]
    for row in rows:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        out.append("  ".join((first, *rest)).rstrip())
    return out


def report(
    table: Table, found: Sequence[Line], quick: bool = False, tuned: bool = False
) -> list[str]:
    """Return a table as lines of plain text, each marked where it is the smaller version."""
    out = [
        table.title,
        *about(table, quick, tuned),
        *(w for w in (table.missing, table.waits) if w),
    ]
    for block in blocks(table, found):
        out += ["", *text(block)]
    missing = [f"not run: {one.name}: {one.missing}" for one in table.columns if one.missing]
    told = mark(table, quick)
    return [f"{told}{line}".rstrip() for line in (*out, "", FOOT, *missing)]


def mark(table: Table, quick: bool) -> str:
    """Return what every line of a smaller version begins with."""
    return "quick: " if quick and table.quick else ""


def about(table: Table, quick: bool, tuned: bool) -> list[str]:
    """Return sentences on what is not the paper's setting, where anything is not."""
    out = []
    if quick and table.quick:
        out.append(f"This is not the paper's setting: {table.quick.name}.")
    if tuned and table.tune:
        out.append(searched(table.tune))
    return out
