"""The lines of a table: published next to measured, with differences and gains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedkeel.records.folder import RunFolder
from fedkeel.records.paired import PairedDifference, paired_difference
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.records.statistics import SeedValues, Stat
from fedkeel.reproduce.measure import audited_value, metric_value
from fedkeel.reproduce.plan import CellKey, TableRun
from fedkeel.reproduce.table import CellMetric, PaperColumn, PaperTable, Published, Row

LAST = CellMetric(kind="last")
BEST = CellMetric(kind="best")
LAST_TEN = CellMetric(kind="last_mean")


@dataclass(frozen=True)
class TableLine:
    """One method in one setting, published and measured.

    Args:
        row: the method.
        column: the setting.
        metric: what the numbers are.
        published: the paper's number; None where it has none.
        published_gain: over the baseline's; None where one of them is not a number.
        values: measured numbers by seed.
        best: highest top-1 in percent by seed.
        last: top-1 after the last round in percent by seed.
        last_ten: mean top-1 of the last ten evaluations by seed.
        baseline: name of the row that gains are over; None for that row itself.
        gain: measured gain, paired by seed.
        has_same_sign: whether published and measured gain have the same sign; None where one of
            them is missing or zero.
        records: run records, one for each seed.
        wanted: number of seeds that were asked for.
        absent: data sets that are not on this machine.
        expression: the method that ran.
        lr: its local learning rate; None where nothing is to be run.
        failures: why runs could not go on.
        seconds: wall time of all rounds of each finished run, by the name of its folder.
    """

    row: Row
    column: PaperColumn
    metric: CellMetric
    published: Published | None
    published_gain: float | None
    values: SeedValues
    best: SeedValues
    last: SeedValues
    last_ten: SeedValues
    baseline: str | None
    gain: PairedDifference | None
    has_same_sign: bool | None
    records: tuple[RunRecord, ...]
    wanted: int
    absent: tuple[str, ...]
    expression: str
    lr: float | None = None
    failures: tuple[str, ...] = field(default=())
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def stat(self) -> Stat | None:
        """Mean and deviation over the seeds that have a number."""
        return Stat.of(self.values.values())

    @property
    def difference(self) -> float | None:
        """Measured mean minus published number."""
        if self.published is None or isinstance(self.published.value, str) or self.stat is None:
            return None
        return self.stat.mean - self.published.value

    @property
    def is_certain(self) -> bool:
        """Whether the gain counts every seed, and its interval lies on one side of 0."""
        if self.gain is None or self.gain.interval is None:
            return False
        return self.gain.interval.excludes_zero and self.gain.stat.count == self.wanted

    @property
    def state(self) -> str:
        """How many of its runs are finished, as text."""
        if self.row.missing or self.column.missing or not self.wanted:
            return "cannot be run"
        if len(self.values) == self.wanted:
            return "done"
        if self.absent and not self.values:
            return f"needs {', '.join(self.absent)}"
        return f"{len(self.values)} of {self.wanted} seeds" if self.values else "not run"

    def to_json(self, table: PaperTable, quick: bool) -> dict[str, object]:
        """Return plain values; accuracies and differences are in percent."""
        stat, gain = self.stat, self.gain
        interval = gain.interval if gain else None
        return {
            "table": table.id,
            "quick": table.quick.name if quick and table.quick else None,
            "column": self.column.id,
            "column_name": self.column.name,
            "row": self.row.name,
            "method": self.expression,
            "lr": self.lr,
            "ours": self.row.ours or self.column.ours,
            "metric": self.metric.kind,
            "unit": self.metric.unit,
            "published": self.published.value if self.published else None,
            "published_spread": self.published.spread if self.published else None,
            "measured": stat.mean if stat else None,
            "measured_std": stat.std if stat else None,
            "values": {str(seed): value for seed, value in self.values.items()},
            "seeds": len(self.values),
            "seeds_asked": self.wanted,
            "difference": self.difference,
            "baseline": self.baseline,
            "published_gain": self.published_gain,
            "gain": gain.stat.mean if gain else None,
            "gain_low": interval.low if interval else None,
            "gain_high": interval.high if interval else None,
            "same_sign": self.has_same_sign,
            "best": _mean(self.best),
            "last": _mean(self.last),
            "last_ten": _mean(self.last_ten),
            "state": self.state,
            "failures": list(self.failures),
        }


def _mean(values: SeedValues) -> float | None:
    stat = Stat.of(values.values())
    return stat.mean if stat else None


def table_lines(
    table: PaperTable, runs: Sequence[TableRun], failures: Mapping[str, str] | None = None
) -> list[TableLine]:
    """Return a table's lines, column by column; without runs they have only published numbers.

    `failures` says why a run could not go on, by the name of its folder.
    """
    results = _Results(runs)
    return [
        _line(table, results, row, column, failures or {})
        for column in table.columns
        for row in table.rows
        # without the rows that were not asked for, or have nothing to show
        if results.runs(row.name, column) or (not runs and column.id in row.published)
    ]


class _Results:
    """The finished runs of a table, each read once."""

    def __init__(self, runs: Sequence[TableRun]) -> None:
        self._runs: dict[CellKey, list[TableRun]] = {}
        for run in runs:
            self._runs.setdefault(run.key, []).append(run)
        self._read: dict[str, tuple[RunRecord, list[RoundRecord]]] = {}

    def runs(self, row: str, column: PaperColumn) -> list[TableRun]:
        """Return all runs of a cell."""
        return self._runs.get(CellKey(row, column.id), [])

    def finished(self, row: str, column: PaperColumn) -> dict[int, TableRun]:
        """Return the finished runs of a cell by seed."""
        return {run.seed: run for run in self.runs(row, column) if run.is_finished}

    def read(self, run: TableRun) -> tuple[RunRecord, list[RoundRecord]]:
        """Return the record of a run, and its rounds."""
        name = str(run.folder)
        if name not in self._read:
            folder = RunFolder(run.folder)
            record, rows = folder.read_run(), folder.rows()
            folder.check_results(record, rows)
            self._read[name] = record, rows
        return self._read[name]

    def seconds(self, run: TableRun) -> float:
        """Return the wall time of all rounds of a run."""
        return sum(sum(row.seconds.values()) for row in self.read(run)[1])

    def values(self, row: str, column: PaperColumn, metric: CellMetric) -> SeedValues:
        """Return a number of each finished run by seed.

        A metric with a reference leaves out the seeds whose reference run is not finished.
        """
        values: dict[int, float | None] = {}
        references = self.finished(metric.reference, column) if metric.reference else {}
        for seed, run in self.finished(row, column).items():
            if metric.reference and seed not in references:
                continue
            if metric.attack is not None:
                values[seed] = audited_value(metric.attack, run.audit_folder)
                continue
            reference = self.read(references[seed])[1] if metric.reference else None
            values[seed] = metric_value(metric, self.read(run)[1], reference)
        return values


def _line(
    table: PaperTable, results: _Results, row: Row, column: PaperColumn, failures: Mapping[str, str]
) -> TableLine:
    metric = table.metric_of(column)
    baseline = row.baseline or column.baseline or table.baseline
    baseline = None if baseline == row.name else baseline
    runs = results.runs(row.name, column)
    values = results.values(row.name, column, metric)
    baseline_values = results.values(baseline, column, metric) if baseline else {}
    baseline_row = next((other for other in table.rows if other.name == baseline), None)
    published = row.published.get(column.id)
    published_gain = _published_gain(
        published, baseline_row.published.get(column.id) if baseline_row else None
    )
    has_gain = published_gain is not None and math.isfinite(published_gain)
    return TableLine(
        row=row,
        column=column,
        metric=metric,
        published=published,
        published_gain=published_gain if has_gain else None,
        values=values,
        best=results.values(row.name, column, BEST),
        last=results.values(row.name, column, LAST),
        last_ten=results.values(row.name, column, LAST_TEN),
        baseline=baseline,
        gain=paired_difference(values, baseline_values),
        has_same_sign=_has_same_sign(
            published_gain, _measured_gain(values, baseline_values, metric.counts_until_target)
        ),
        records=tuple(results.read(run)[0] for run in runs if run.is_finished),
        wanted=len(runs),
        absent=tuple(dict.fromkeys(name for run in runs for name in run.absent)),
        expression=runs[0].experiment.method if runs else row.method,
        lr=runs[0].experiment.local.lr if runs else None,
        failures=tuple(why for run in runs if (why := _failure(run, failures))),
        seconds={run.folder.name: results.seconds(run) for run in runs if run.is_finished},
    )


def _failure(run: TableRun, failures: Mapping[str, str]) -> str:
    """Return why a run could not go on, now or at its last try; "" where it could."""
    folder = RunFolder(run.folder)
    if run.folder.name in failures or not folder.exists():
        return failures.get(run.folder.name, "")
    record = folder.read_run()
    return record.message if record.status == "failed" else ""


def _published_gain(published: Published | None, baseline: Published | None) -> float | None:
    return _difference(_number(published), _number(baseline))


def _number(published: Published | None) -> float | None:
    """Return a published number; a target that was never reached counts as infinite."""
    if published is None or published.value == "failed":
        return None
    return math.inf if isinstance(published.value, str) else published.value


def _measured_gain(
    values: SeedValues, baseline: SeedValues, counts_until_target: bool
) -> float | None:
    """Return the mean gain over shared seeds; a target that was never reached counts as infinite.

    A metric without a target leaves out seeds without a number.
    """
    seeds = [seed for seed in values if seed in baseline]
    if not counts_until_target:
        seeds = [seed for seed in seeds if None not in (values[seed], baseline[seed])]
    if not seeds:
        return None
    return _difference(
        *(_mean_or_inf([side[seed] for seed in seeds]) for side in (values, baseline))
    )


def _mean_or_inf(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else math.inf


def _difference(value: float | None, baseline: float | None) -> float | None:
    """Return the difference; None where a value is missing, or both are infinite."""
    if value is None or baseline is None or value == baseline == math.inf:
        return None
    return value - baseline


def _has_same_sign(published: float | None, measured: float | None) -> bool | None:
    """Return whether two gains have the same sign; None where one is missing or exactly 0."""
    if not published or not measured:
        return None
    return (published > 0) == (measured > 0)
