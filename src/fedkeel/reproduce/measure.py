"""The number that a table shows of a run, computed from its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedkeel.records.rows import RoundRecord
from fedkeel.records.statistics import mean_of_last
from fedkeel.report.summary import fluctuation, rounds_to, summarise
from fedkeel.reproduce.table import Metric


def metric_value(
    metric: Metric, rows: Sequence[RoundRecord], reference: Sequence[RoundRecord] | None = None
) -> float | None:
    """Return a table's number of one run.

    Args:
        metric: what the number is.
        rows: the run's rounds, in order.
        reference: the rounds of the reference run with the same seed, for metrics that need one.

    Returns:
        Percent, rounds, points or 10^6 bytes; None where the run never reached the target, or was
        not evaluated then.
    """
    rows = with_score(rows, metric.score)
    if metric.kind == "at":
        at_round = (r.test.top1 for r in rows if r.round == metric.round and r.test is not None)
        return _percent(next(at_round, None))
    if metric.kind == "last_mean":
        scores = [row.test.top1 for row in rows if row.test is not None and row.round > 0]
        return _percent(mean_of_last(scores, metric.window))
    if metric.kind in ("best", "last"):
        summary = summarise(rows)
        return _percent(summary.best if metric.kind == "best" else summary.last)
    if metric.kind.startswith("fluctuation"):
        steps = fluctuation(rows)
        return None if steps is None else getattr(steps, metric.kind.rpartition("_")[2])
    return _until_target(metric, rows, reference)


def _until_target(
    metric: Metric, rows: Sequence[RoundRecord], reference: Sequence[RoundRecord] | None
) -> float | None:
    """Return the rounds or bytes until a target."""
    if metric.kind == "rounds_to":
        return rounds_to(rows, metric.target)
    best = summarise(with_score(reference or (), metric.score)).best
    if best is None or metric.share is None:
        return None
    rounds = rounds_to(rows, metric.share * best)
    if rounds is None or metric.kind == "rounds_to_share":
        return rounds
    within = [row for row in rows if row.round <= rounds]
    return sum(sum(r.bytes_down.values()) + sum(r.bytes_up.values()) for r in within) / 1e6


def with_score(rows: Sequence[RoundRecord], score: str) -> list[RoundRecord]:
    """Return the rows with another score in place of top-1.

    >>> from fedkeel.records.rows import Scores
    >>> with_score([RoundRecord(1, test=Scores(10, 0.5, 0.9, 1.0))], "top3")[0].test.top1
    0.9
    """
    if score == "top1":
        return list(rows)
    return [
        row if row.test is None else replace(row, test=replace(row.test, top1=row.test.top3))
        for row in rows
    ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
