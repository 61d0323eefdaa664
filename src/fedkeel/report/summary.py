"""The figures of a run and of several seeds: pure functions on rows.

Accuracy is top-1 on the test set as a share in [0, 1]; differences of accuracy are in percentage
points; bytes are bytes and times are seconds. A figure that the rows do not hold is None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from fedkeel.records.rows import RoundRecord

TRAINING = "train"
"""Phases whose name begins so are local training; the phases of a round do not overlap."""

LAST = 10
"""Evaluations in the mean that a run is judged by at its end."""

_ROUNDING = 1e-12
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Fluctuation:
    """First differences of accuracy between consecutive evaluated rounds, in percentage points.

    Args:
        mean: their mean.
        std: their sample standard deviation (ddof 1); None where there is one difference.
        min: the deepest fall.
    """

    mean: float
    std: float | None
    min: float


@dataclass(frozen=True)
class Summary:
    """The figures of one run.

    Args:
        rounds: rounds completed.
        evaluations: rows with a test score.
        examples: examples that the last of them was measured on.
        train_loss: mean training loss over the rounds that have one.
        best: highest accuracy.
        best_round: the first round with that accuracy.
        last: accuracy of the last evaluation.
        last_mean: mean accuracy of the last ten evaluations, the untrained model left aside.
        target: accuracy for `rounds_to_target`.
        rounds_to_target: smallest number of completed rounds with at least that accuracy.
        bytes_to_target: bytes sent both ways until then.
        fluctuation: how much accuracy moves between evaluations.
        bytes_down: bytes sent to clients, by part.
        bytes_up: bytes sent to the server, by part.
        trainings: local trainings: clients, over rounds, whose update arrived.
        selections: clients selected, over rounds.
        traffic: (down + up) / 2 for each selected client and round, in multiples of the model.
        seconds_by_phase: seconds, by phase.
        seconds: seconds over all phases and rounds.
        seconds_per_round: mean over the rounds with training.
        seconds_per_client: training seconds for each local training.
        dropped: clients, over rounds, that were selected and did not report.
        excluded: clients, over rounds, whose update was not finite.
        losses_not_finite: rounds with a training or test loss that was not finite.
    """

    rounds: int
    evaluations: int
    examples: int | None
    train_loss: float | None
    best: float | None
    best_round: int | None
    last: float | None
    last_mean: float | None
    target: float | None
    rounds_to_target: int | None
    bytes_to_target: int | None
    fluctuation: Fluctuation | None
    bytes_down: dict[str, int]
    bytes_up: dict[str, int]
    trainings: int
    selections: int
    traffic: float | None
    seconds_by_phase: dict[str, float]
    seconds: float
    seconds_per_round: float | None
    seconds_per_client: float | None
    dropped: int
    excluded: int
    losses_not_finite: int

    @property
    def down(self) -> int:
        """Bytes sent to clients in all."""
        return sum(self.bytes_down.values())

    @property
    def up(self) -> int:
        """Bytes sent to the server in all."""
        return sum(self.bytes_up.values())

    @property
    def sent(self) -> int:
        """Bytes sent both ways in all."""
        return self.down + self.up


@dataclass(frozen=True)
class Stat:
    """A figure over seeds.

    Args:
        mean: mean over the seeds that have it.
        std: sample standard deviation (ddof 1); None for one seed.
        count: seeds that have it.
        min: smallest value.
        max: largest value.
    """

    mean: float
    std: float | None
    count: int
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Stat | None:
        """Return the figure over `values`, or None where there are none.

        >>> Stat.of([1.0, 3.0])
        Stat(mean=2.0, std=1.4142135623730951, count=2, min=1.0, max=3.0)
        """
        known = list(values)
        if not known:
            return None
        return cls(statistics.fmean(known), _deviation(known), len(known), min(known), max(known))


_SCORES = ("best", "last", "last_mean")


@dataclass(frozen=True)
class Group:
    """One method over its seeds.

    Args:
        method: label of the method.
        summaries: one for each seed.
        seeds: the seeds, in the same order; empty where they are not known.
        unfinished: how many of the runs are not finished.
        failed: how many of these cannot be, for training could not go on.
    """

    method: str
    summaries: tuple[Summary, ...]
    seeds: tuple[int, ...] = field(default=())
    unfinished: int = 0
    failed: int = 0

    def values(self, figure: str) -> list[float]:
        """Return a figure of `Summary` for each seed that has it.

        A run that has made no round has no score: that of the untrained model says nothing.
        """
        found = (_figure(summary, figure) for summary in self.summaries)
        return [value for value in found if value is not None]

    def stat(self, figure: str) -> Stat | None:
        """Return mean and sample deviation of a figure of `Summary`, such as ``best``."""
        return Stat.of(self.values(figure))

    def fluctuation(self, figure: str) -> Stat | None:
        """Return a figure of `Fluctuation` over seeds: ``mean``, ``std`` or ``min``."""
        known = [s.fluctuation for s in self.summaries if s.fluctuation is not None]
        values = [getattr(one, figure) for one in known]
        return Stat.of(value for value in values if value is not None)

    def by_name(self, figure: str) -> dict[str, float]:
        """Return the mean over seeds of each entry of a figure such as ``bytes_up``."""
        tables: list[Mapping[str, float]] = [getattr(s, figure) for s in self.summaries]
        names = dict.fromkeys(name for table in tables for name in table)
        return {name: statistics.fmean(table.get(name, 0) for table in tables) for name in names}

    @property
    def copies(self) -> bool:
        """Whether its seeds are one run made several times: nothing in them is random."""
        told = {(one.train_loss, one.best, one.last) for one in self.summaries}
        return len(self.summaries) > len(told) == 1 and None not in next(iter(told))

    @property
    def reached(self) -> int:
        """Seeds that reached the target."""
        return len(self.values("rounds_to_target"))


@dataclass(frozen=True)
class Paired:
    """Two methods compared seed by seed: they share initial model, clients and batches.

    Args:
        difference: first minus second over the seeds that both have.
        ahead: seeds on which the first is higher.
    """

    difference: Stat
    ahead: int


def summarise(
    rows: Sequence[RoundRecord], target: float | None = None, *, model_bytes: int | None = None
) -> Summary:
    """Return the figures of one run.

    Args:
        rows: its rows, in order; any of them may lack a test score.
        target: accuracy for rounds to target.
        model_bytes: bytes of the model once; None takes what was sent down as ``model``.
    """
    scored = _scored(rows)
    best = max(scored, key=lambda point: (point[1], -point[0]), default=None)
    trained = [accuracy for number, accuracy in scored if number > 0] or [a for _, a in scored]
    reached = rounds_to(rows, target)
    tested = [row.test.examples for row in rows if row.test is not None]
    losses = [loss for row in rows if (loss := finite(row.train_loss)) is not None]
    phases = _total(row.seconds for row in rows)
    down, up = _total(r.bytes_down for r in rows), _total(r.bytes_up for r in rows)
    selections = sum(len(r.clients) + len(r.dropped) + len(r.excluded) for r in rows)
    trainings = sum(len(r.clients) + len(r.excluded) for r in rows)
    active = [r for r in rows if r.round > 0]
    training = sum(s for phase, s in phases.items() if phase.startswith(TRAINING))
    return Summary(
        rounds=max((r.round for r in rows), default=0),
        evaluations=len(scored),
        examples=tested[-1] if tested else None,
        train_loss=statistics.fmean(losses) if losses else None,
        best=best[1] if best else None,
        best_round=best[0] if best else None,
        last=scored[-1][1] if scored else None,
        last_mean=statistics.fmean(trained[-LAST:]) if trained else None,
        target=target,
        rounds_to_target=reached,
        bytes_to_target=None if reached is None else _sent(rows, reached),
        fluctuation=fluctuation(rows),
        bytes_down=down,
        bytes_up=up,
        trainings=trainings,
        selections=selections,
        traffic=_traffic(down, up, selections, model_bytes),
        seconds_by_phase=phases,
        seconds=math.fsum(phases.values()),
        seconds_per_round=_ratio(sum(sum(r.seconds.values()) for r in active), len(active)),
        seconds_per_client=_ratio(training, trainings),
        dropped=sum(len(r.dropped) for r in rows),
        excluded=sum(len(r.excluded) for r in rows),
        losses_not_finite=sum(_loss_not_finite(r) for r in rows),
    )


def rounds_to(rows: Iterable[RoundRecord], target: float | None) -> int | None:
    """Return the smallest number of completed rounds with at least this accuracy, or None.

    >>> from fedkeel.records.rows import Scores
    >>> rows = [RoundRecord(r, test=Scores(100, a, a, 1.0)) for r, a in enumerate((0.1, 0.5, 0.4))]
    >>> rounds_to(rows, 0.4), rounds_to(rows, 0.6)
    (1, None)
    """
    if target is None:
        return None
    return next((r for r, a in _scored(rows) if a >= target - _ROUNDING), None)


def rounds_to_share(rows: Iterable[RoundRecord], share: float, reference_best: float) -> int | None:
    """Return FedReg's R_a: rounds until the accuracy is `share` of a reference's best.

    Args:
        rows: rows of the run.
        share: a, in (0, 1].
        reference_best: A, the highest accuracy of the reference over its rounds.
    """
    return rounds_to(rows, share * reference_best)


def fluctuation(rows: Iterable[RoundRecord]) -> Fluctuation | None:
    """Return how accuracy moves between consecutive evaluations, or None below two of them."""
    accuracy = [100 * a for _, a in _scored(rows)]
    steps = [after - before for before, after in pairwise(accuracy)]
    if not steps:
        return None
    return Fluctuation(statistics.fmean(steps), _deviation(steps), min(steps))


def paired(first: Group, second: Group, figure: str = "best") -> Paired | None:
    """Return the difference over the seeds that both methods ran, or None where there are none."""
    if len(first.seeds) != len(first.summaries) or len(second.seeds) != len(second.summaries):
        return None
    one = dict(zip(first.seeds, first.summaries, strict=True))
    two = dict(zip(second.seeds, second.summaries, strict=True))
    pairs = [(_figure(one[s], figure), _figure(two[s], figure)) for s in one if s in two]
    steps = [a - b for a, b in pairs if a is not None and b is not None]
    difference = Stat.of(steps)
    return Paired(difference, sum(step > 0 for step in steps)) if difference else None


def _figure(summary: Summary, name: str) -> float | None:
    """Return a figure of one run; None of a score where no round was made."""
    value = getattr(summary, name) if summary.rounds or name not in _SCORES else None
    return None if value is None else float(value)


def pooled_error(one: Stat, two: Stat) -> float | None:
    """Return the pooled standard error of the difference of two means.

    None where both have one seed, which says nothing about spread.
    """
    freedom = one.count + two.count - 2
    if freedom < 1:
        return None
    squares = sum((s.count - 1) * (s.std or 0.0) ** 2 for s in (one, two))
    return math.sqrt(squares / freedom * (1 / one.count + 1 / two.count))


def tied(one: Stat, two: Stat) -> bool:
    """Return whether two means are within one pooled standard error."""
    gap = abs(one.mean - two.mean)
    error = pooled_error(one, two) or 0.0
    return gap <= error + _ROUNDING * max(1.0, abs(one.mean))


def finite(value: float | None) -> float | None:
    """Return the number, or None where it is missing, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def _deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation, or None for one value."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _scored(rows: Iterable[RoundRecord]) -> list[tuple[int, float]]:
    """Return (round, accuracy) of the rows with a test score."""
    pairs = ((row.round, finite(row.test.top1)) for row in rows if row.test is not None)
    return [(number, accuracy) for number, accuracy in pairs if accuracy is not None]


def _total(tables: Iterable[Mapping[str, _Number]]) -> dict[str, _Number]:
    total: dict[str, _Number] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total[name] + value if name in total else value
    return total


def _sent(rows: Iterable[RoundRecord], until: int) -> int:
    within = (row for row in rows if row.round <= until)
    return sum(sum(r.bytes_down.values()) + sum(r.bytes_up.values()) for r in within)


def _traffic(
    down: Mapping[str, int], up: Mapping[str, int], selections: int, model_bytes: int | None
) -> float | None:
    once = down.get("model", 0) if model_bytes is None else model_bytes * selections
    return _ratio((sum(down.values()) + sum(up.values())) / 2, once)


def _ratio(value: float, count: float) -> float | None:
    return value / count if count else None


def _loss_not_finite(row: RoundRecord) -> bool:
    trained = bool(row.clients or row.excluded)
    train = trained and finite(row.train_loss) is None
    return train or (row.test is not None and finite(row.test.loss) is None)
