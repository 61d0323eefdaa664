"""From the rounds of a run to the number that a table shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedkeel.records.rows import RoundRecord
from fedkeel.report.summary import fluctuation, rounds_to, rounds_to_share, summarise
from fedkeel.reproduce.table import Metric


def value(
    metric: Metric, rows: Sequence[RoundRecord], reference: Sequence[RoundRecord] | None = None
) -> float | None:
    """Return a table's number of one run.

    Args:
        metric: what it is.
        rows: the run's rounds, in order.
        reference: rounds of the reference with the same seed, for what is relative to one.

    Returns:
        Percent, rounds, points or 10^6 bytes; None where the run has no such number: it never
        reached the target, or was not evaluated then.
    """
    rows = scored(rows, metric.score)
    if metric.kind == "at":
        there = (r.test.top1 for r in rows if r.round == metric.round and r.test is not None)
        return _percent(next(there, None))
    if metric.kind == "last_mean":
        points = [row.test.top1 for row in rows if row.test is not None and row.round > 0]
        last = points[-metric.window :]
        return 100 * sum(last) / len(last) if last else None
    if metric.kind in ("best", "last"):
        found = summarise(rows)
        return _percent(found.best if metric.kind == "best" else found.last)
    if metric.kind.startswith("fluctuation"):
        steps = fluctuation(rows)
        return None if steps is None else getattr(steps, metric.kind.rpartition("_")[2])
    return _reached(metric, rows, reference)


def _reached(
    metric: Metric, rows: Sequence[RoundRecord], reference: Sequence[RoundRecord] | None
) -> float | None:
    """Return the rounds or bytes until a target."""
    if metric.kind == "rounds_to":
        return rounds_to(rows, metric.target)
    best = summarise(scored(reference or (), metric.score)).best
    if best is None or metric.share is None:
        return None
    after = rounds_to_share(rows, metric.share, best)
    if after is None or metric.kind == "rounds_to_share":
        return after
    within = [row for row in rows if row.round <= after]
    return sum(sum(r.bytes_down.values()) + sum(r.bytes_up.values()) for r in within) / 1e6


def scored(rows: Sequence[RoundRecord], score: str) -> list[RoundRecord]:
    """Return the rows with another score in the place of top-1.

    >>> from fedkeel.records.rows import Scores
    >>> scored([RoundRecord(1, test=Scores(10, 0.5, 0.9, 1.0))], "top3")[0].test.top1
    0.9
    """
    return [
        row
        if row.test is None or score == "top1"
        else replace(row, test=replace(row.test, top1=row.test.top3))
        for row in rows
    ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
