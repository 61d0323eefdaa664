"""Published next to measured: means over seeds, differences, and whether gains have one sign."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import t as student

from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.records.statistics import Stat
from fedkeel.reproduce.measure import value
from fedkeel.reproduce.plan import Cell
from fedkeel.reproduce.table import Column, Metric, Published, Row, Table

CONFIDENCE = 0.95

LAST = Metric(kind="last")
BEST = Metric(kind="best")
LAST_TEN = Metric(kind="last_mean")

Values = dict[int, float | None]
"""A number by seed; None where a run has none."""


@dataclass(frozen=True)
class Interval:
    """A mean of paired differences over seeds, with its 95 % t-interval.

    Args:
        mean: mean difference.
        low: lower end; None for one seed, which says nothing about spread.
        high: upper end.
        count: seeds.
    """

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def clear(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low is not None and self.high is not None and self.low * self.high > 0

    @classmethod
    def of(cls, differences: Sequence[float]) -> Interval | None:
        """Return the interval, or None where there are no differences.

        >>> found = Interval.of([1.0, 2.0, 3.0])
        >>> round(found.low, 3), round(found.high, 3)
        (-0.484, 4.484)
        """
        n = len(differences)
        if n == 0:
            return None
        mean = statistics.fmean(differences)
        if n == 1:
            return cls(mean, None, None, 1)
        half = (
            statistics.stdev(differences) / math.sqrt(n) * student.ppf((1 + CONFIDENCE) / 2, n - 1)
        )
        return cls(mean, float(mean - half), float(mean + half), n)


@dataclass(frozen=True)
class Line:
    """One method in one setting, published and measured.

    Args:
        row: the method.
        column: the setting.
        metric: what the numbers are.
        published: the paper's number, None where it has none.
        published_gain: over the baseline's, None where one of them is no number.
        values: measured, by seed.
        best: highest top-1 in percent, by seed.
        last: top-1 after the last round in percent, by seed.
        last_ten: mean top-1 of the last ten evaluations, by seed.
        baseline: name of the row that gains are over; None for that row itself.
        gain: measured, paired by seed.
        same_sign: whether published and measured gain have one sign; None where that cannot be
            said.
        records: what ran, one for each seed.
        wanted: number of seeds that were asked for.
        absent: data sets that are not here.
        expression: the method that ran.
        lr: its local learning rate, None where nothing is to be run.
        failures: why runs could not go on.
    """

    row: Row
    column: Column
    metric: Metric
    published: Published | None
    published_gain: float | None
    values: Values
    best: Values
    last: Values
    last_ten: Values
    baseline: str | None
    gain: Interval | None
    same_sign: bool | None
    records: tuple[RunRecord, ...]
    wanted: int
    absent: tuple[str, ...]
    expression: str
    lr: float | None = None
    failures: tuple[str, ...] = field(default=())

    @property
    def stat(self) -> Stat | None:
        """Mean and deviation over the seeds that have a number."""
        return Stat.of(v for v in self.values.values() if v is not None)

    @property
    def difference(self) -> float | None:
        """Measured mean minus published."""
        if self.published is None or isinstance(self.published.value, str) or self.stat is None:
            return None
        return self.stat.mean - self.published.value

    def as_row(self, table: Table, quick: bool) -> dict[str, Any]:
        """Return plain values, ready for JSON; accuracies and differences are in percent."""
        found, gain = self.stat, self.gain
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
            "published": None if self.published is None else self.published.value,
            "published_spread": None if self.published is None else self.published.spread,
            "measured": None if found is None else found.mean,
            "measured_std": None if found is None else found.std,
            "values": {str(seed): one for seed, one in self.values.items()},
            "seeds": len(self.values),
            "seeds_asked": self.wanted,
            "difference": self.difference,
            "baseline": self.baseline,
            "published_gain": self.published_gain,
            "gain": None if gain is None else gain.mean,
            "gain_low": None if gain is None else gain.low,
            "gain_high": None if gain is None else gain.high,
            "same_sign": self.same_sign,
            "best": _mean(self.best),
            "last": _mean(self.last),
            "last_ten": _mean(self.last_ten),
            "state": self.state,
            "failures": list(self.failures),
        }

    @property
    def state(self) -> str:
        """How far it is, in words."""
        if self.row.missing or self.column.missing:
            return "cannot be run"
        if len(self.values) == self.wanted:
            return "done"
        if self.absent and not self.values:
            return f"needs {', '.join(self.absent)}"
        return f"{len(self.values)} of {self.wanted} seeds" if self.values else "not run"


def _mean(values: Values) -> float | None:
    found = Stat.of(v for v in values.values() if v is not None)
    return None if found is None else found.mean


def lines(
    table: Table, cells: Sequence[Cell], failures: Mapping[str, str] | None = None
) -> list[Line]:
    """Return a table's lines, column by column, from the runs that are finished.

    Args:
        table: the table.
        cells: its runs; where there are none the lines have the published numbers alone.
        failures: by a run's folder name, why it could not go on.
    """
    runs = _Runs(table, cells)
    found: list[Line] = []
    for column in table.columns:
        for row in table.rows:
            there = runs.cells.get((row.name, column.id), [])
            if not there and (cells or column.id not in row.published):
                continue  # not asked for, or nothing to show
            found.append(_line(table, runs, row, column, failures or {}))
    return found


class _Runs:
    """The finished runs of a table, each read once."""

    def __init__(self, table: Table, cells: Sequence[Cell]) -> None:
        self.table = table
        self.cells: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            self.cells.setdefault((cell.row.name, cell.column.id), []).append(cell)
        self._read: dict[str, tuple[RunRecord, list[RoundRecord]]] = {}

    def finished(self, row: str, column: str) -> dict[int, Cell]:
        """Return the finished runs of a cell by seed."""
        return {c.seed: c for c in self.cells.get((row, column), []) if c.finished}

    def read(self, cell: Cell) -> tuple[RunRecord, list[RoundRecord]]:
        """Return what ran, and its rounds."""
        name = str(cell.folder)
        if name not in self._read:
            folder = RunFolder(cell.folder)
            self._read[name] = folder.read_run(), folder.rows()
        return self._read[name]

    def values(self, row: str, column: Column, metric: Metric) -> Values:
        """Return a number of each finished run, by seed.

        What is relative to a reference is None in a seed in which the reference is not finished.
        """
        found: Values = {}
        others = self.finished(metric.reference, column.id) if metric.reference else {}
        for seed, cell in self.finished(row, column.id).items():
            if metric.reference and seed not in others:
                continue
            reference = self.read(others[seed])[1] if seed in others else None
            found[seed] = value(metric, self.read(cell)[1], reference)
        return found


def _line(table: Table, runs: _Runs, row: Row, column: Column, failures: Mapping[str, str]) -> Line:
    metric = table.metric_of(column)
    baseline = row.baseline or column.baseline or table.baseline
    baseline = None if baseline == row.name else baseline
    there = runs.cells.get((row.name, column.id), [])
    own = runs.values(row.name, column, metric)
    other = runs.values(baseline, column, metric) if baseline else {}
    above = next((r for r in table.rows if r.name == baseline), None)
    published = row.published.get(column.id)
    gains = _gains(published, above.published.get(column.id) if above else None)
    return Line(
        row=row,
        column=column,
        metric=metric,
        published=published,
        published_gain=gains if gains is None or math.isfinite(gains) else None,
        values=own,
        best=runs.values(row.name, column, BEST),
        last=runs.values(row.name, column, LAST),
        last_ten=runs.values(row.name, column, LAST_TEN),
        baseline=baseline,
        gain=_paired(own, other),
        same_sign=_same(gains, _signed(own, other, metric.reaches)),
        records=tuple(runs.read(c)[0] for c in there if c.finished),
        wanted=len(there),
        absent=tuple(dict.fromkeys(name for cell in there for name in cell.absent)),
        expression=there[0].experiment.method if there else row.method,
        lr=there[0].experiment.local.lr if there else None,
        failures=tuple(why for cell in there if (why := _failure(cell, failures))),
    )


def _failure(cell: Cell, failures: Mapping[str, str]) -> str:
    """Return why a run could not go on, now or when it was last tried; "" where it could."""
    folder = RunFolder(cell.folder)
    if cell.folder.name in failures or not folder.exists():
        return failures.get(cell.folder.name, "")
    record = folder.read_run()
    return record.message if record.status == "failed" else ""


def _number(published: Published | None) -> float | None:
    """Return a published number; a target that was never reached is infinitely far away."""
    if published is None or published.value == "failed":
        return None
    return math.inf if isinstance(published.value, str) else published.value


def _gains(own: Published | None, other: Published | None) -> float | None:
    one, two = _number(own), _number(other)
    if one is None or two is None or one == two == math.inf:
        return None
    return one - two


def _paired(own: Values, other: Values) -> Interval | None:
    pairs = [(v, other.get(seed)) for seed, v in own.items()]
    return Interval.of([a - b for a, b in pairs if a is not None and b is not None])


def _signed(own: Values, other: Values, reaches: bool) -> float | None:
    """Return the gain, infinite where one of the two never reached the target in some seed.

    Of what `reaches` for no target a seed without a number is left out.
    """
    shared = [seed for seed in own if seed in other]
    if not reaches:
        shared = [seed for seed in shared if None not in (own[seed], other[seed])]
    if not shared:
        return None
    one, two = (
        math.inf
        if any(v[s] is None for s in shared)
        else statistics.fmean(v[s] or 0.0 for s in shared)
        for v in (own, other)
    )
    return None if one == two == math.inf else one - two


def _same(published: float | None, measured: float | None) -> bool | None:
    """Return whether two gains have one sign; None where either is missing or exactly 0."""
    if published is None or measured is None or published == 0.0 or measured == 0.0:
        return None
    return (published > 0) == (measured > 0)
