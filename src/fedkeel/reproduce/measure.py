"""The number that a table shows of a run, computed from its rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from fedkeel.config.audit import InversionName
from fedkeel.records.audit import read_audit
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import mean_of_last
from fedkeel.report.summary import bytes_sent, fluctuation, rounds_to, summarise
from fedkeel.reproduce.table import CellMetric


def metric_value(
    metric: CellMetric, rows: Sequence[RoundRecord], reference: Sequence[RoundRecord] | None = None
) -> float | None:
    """Return a table's number of one run.

    Args:
        metric: what the number is.
        rows: the run's rounds, in order.
        reference: the rounds of the reference run with the same seed, for metrics that need one.

    Returns:
        Percent, rounds, points, models, 10^6 bytes or what is diagnosed; None where the run never
        reached the target, or was not evaluated or diagnosed then.
    """
    score = MetricInfo(metric.score, True, "%")
    if metric.diagnostic is not None:
        return _diagnosed(metric.diagnostic, rows)
    if metric.kind == "at":
        tests = (r.test for r in rows if r.round == metric.round and r.test is not None)
        return _percent(next((test[score.name] for test in tests), None))
    if metric.kind == "last_mean":
        scores = [row.test[score.name] for row in rows if row.test is not None and row.round > 0]
        return _percent(mean_of_last(scores, metric.window))
    if metric.kind in ("best", "last"):
        summary = summarise(rows, score=score)
        return _percent(summary.best if metric.kind == "best" else summary.last)
    if metric.kind.startswith("fluctuation"):
        steps = fluctuation(rows, score)
        return None if steps is None else getattr(steps, metric.kind.rpartition("_")[2])
    return _until_target(metric, score, rows, reference)


def audited_value(attack: InversionName, folder: Path) -> float | None:
    """Return the mean PSNR in dB of what an attack brought back; None where it did not apply."""
    return read_audit(folder).mean(attack, "psnr")


def _diagnosed(diagnostic: str, rows: Sequence[RoundRecord]) -> float | None:
    """Return the mean of a diagnostic over the rounds in which it is a finite number."""
    name, _, label = diagnostic.partition("/")
    recorded = (
        row.breakdowns.get(name, {}).get(label) if label else row.diagnostics.get(name)
        for row in rows
    )
    values = [value for value in recorded if value is not None and math.isfinite(value)]
    return statistics.fmean(values) if values else None


def _until_target(
    metric: CellMetric,
    score: MetricInfo,
    rows: Sequence[RoundRecord],
    reference: Sequence[RoundRecord] | None,
) -> float | None:
    """Return the rounds or bytes until a target."""
    if metric.kind == "rounds_to":
        return rounds_to(rows, metric.target, score)
    best = summarise(reference or (), score=score).best
    if best is None or metric.share is None:
        return None
    rounds = rounds_to(rows, metric.share * best, score)
    if rounds is None or metric.kind == "rounds_to_share":
        return rounds
    within = [row for row in rows if row.round <= rounds]
    if metric.kind == "models_to_share":
        return sum(_models_each_way(row) for row in within)
    return sum(map(bytes_sent, within)) / 1e6


def _models_each_way(row: RoundRecord) -> float:
    """Return what a client of a round sends and receives, in multiples of the model each way."""
    model = row.bytes_down.get("model", 0)
    return bytes_sent(row) / 2 / model if model else 0.0


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
