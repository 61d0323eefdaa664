"""The figures of one run, and of one method over its seeds, computed from round records.

A score is the metric of the test set by which models are judged; a share is in [0, 1], and
differences of shares are in percentage points; bytes are bytes and times are seconds. A figure that
the records do not hold is None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeVar, get_args

from fedkeel.base.feature import baselines, figures
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import ACCURACY, LOSS, MetricInfo
from fedkeel.records.statistics import SeedValues, Stat, finite_or_none, mean_of_last

TRAINING = "train"
"""Phases whose name begins so are local training; the phases of a round do not overlap."""

Quantity = Literal[
    "best",
    "last",
    "last_mean",
    "rounds_to_target",
    "bytes_to_target",
    "down",
    "up",
    "sent",
    "traffic",
    "seconds_per_client",
    "processor_seconds_per_client",
    "seconds_per_round",
    "seconds",
]
"""A figure of `RunSummary` that is averaged over seeds; those of features have their own names."""

ByName = Literal["bytes_down", "bytes_up", "seconds_by_phase"]
"""A figure of `RunSummary` that has a value for each part or phase."""

_SCORES: tuple[Quantity, ...] = ("best", "last", "last_mean")
_TRAFFIC: tuple[Quantity, ...] = ("bytes_to_target", "down", "up", "sent", "traffic")
_ROUNDING = 1e-12
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class RunSummary:
    """The figures of one run.

    Args:
        rounds: rounds completed.
        evaluations: rounds with a test score.
        examples: examples that the last of them was measured on.
        train_loss: mean training loss over the rounds that have one.
        score: the metric by which models are judged.
        loss: name of the loss; "" where it is not known.
        judges: whose scores these are: the global model's, on the test set, or those of the
            clients' personal models, on their own examples.
        best: best score.
        best_round: the first round with that score.
        last: score of the last evaluation.
        last_mean: mean score of the last ten evaluations, without the untrained model.
        target: score for `rounds_to_target`.
        rounds_to_target: smallest number of completed rounds with a score at least as good.
        bytes_to_target: bytes sent both ways until then.
        fluctuation: statistics of the changes of the score between evaluations, in points.
        bytes_down: bytes sent to clients, by part.
        bytes_up: bytes sent to the server, by part.
        trainings: local trainings: clients, over rounds, that sent an update.
        selections: clients selected, over rounds.
        traffic: (down + up) / 2 for each selected client and round, in multiples of the model.
        seconds_by_phase: seconds, by phase.
        seconds: seconds over all phases and rounds.
        seconds_per_round: mean over the rounds with training.
        seconds_per_client: training seconds for each local training, in the median round: the
            first round of a process also pays for loading and warming up.
        processor_seconds_per_client: processor seconds for each local training, in the median round
            too; unlike the seconds they do not grow with what else the machine does. None where a
            round has none.
        losses_not_finite: rounds with a training or test loss that was not finite.
        features: the numbers of features, by key.
        has_personal: whether its clients were also scored with models of their own.
    """

    rounds: int
    evaluations: int
    examples: int | None
    train_loss: float | None
    score: MetricInfo
    loss: str
    judges: str
    best: float | None
    best_round: int | None
    last: float | None
    last_mean: float | None
    target: float | None
    rounds_to_target: int | None
    bytes_to_target: int | None
    fluctuation: Stat | None
    bytes_down: dict[str, int]
    bytes_up: dict[str, int]
    trainings: int
    selections: int
    traffic: float | None
    seconds_by_phase: dict[str, float]
    seconds: float
    seconds_per_round: float | None
    seconds_per_client: float | None
    processor_seconds_per_client: float | None
    losses_not_finite: int
    features: dict[str, float] = field(default_factory=dict)
    has_personal: bool = False

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

    def value(self, quantity: str) -> float | None:
        """Return a figure by its name.

        A run without a completed round has no score: that of the untrained model says nothing. One
        that sends nothing, such as a baseline, has no traffic.
        """
        if quantity not in get_args(Quantity):
            return self.features.get(quantity)
        is_known = self.rounds or quantity not in _SCORES
        if quantity in _TRAFFIC and not (self.bytes_down or self.bytes_up):
            is_known = False
        value = getattr(self, quantity) if is_known else None
        return None if value is None else float(value)


@dataclass(frozen=True)
class MethodSummary:
    """The figures of one method over its seeds.

    Args:
        method: label of the method.
        runs: the figures of each seed's run.
        seeds: the seeds, in the same order; empty where they are not known.
        unfinished: how many of the runs are not finished.
        failed: how many of these failed, and so cannot be continued.
    """

    method: str
    runs: tuple[RunSummary, ...]
    seeds: tuple[int, ...] = ()
    unfinished: int = 0
    failed: int = 0

    @property
    def baseline(self) -> str:
        """The name of the baseline that it is, "" for a method."""
        name = self.method.split(" · ")[0]
        return name if name in baselines() else ""

    def values(self, quantity: str) -> list[float]:
        """Return a figure for each seed that has it."""
        values = (run.value(quantity) for run in self.runs)
        return [value for value in values if value is not None]

    def stat(self, quantity: str) -> Stat | None:
        """Return mean and deviation of a figure over the seeds that have it."""
        return Stat.of(self.values(quantity))

    def by_seed(self, quantity: str) -> SeedValues:
        """Return a figure by seed; empty where the seeds are not known."""
        if len(self.seeds) != len(self.runs):
            return {}
        values = (run.value(quantity) for run in self.runs)
        return dict(zip(self.seeds, values, strict=True))

    def fluctuation(self, quantity: Literal["mean", "std", "min"]) -> Stat | None:
        """Return a statistic of the changes of the score between evaluations, over seeds."""
        changes = [run.fluctuation for run in self.runs if run.fluctuation is not None]
        values = [getattr(change, quantity) for change in changes]
        return Stat.of(values)

    def by_name(self, quantity: ByName) -> dict[str, float]:
        """Return the mean over seeds for each part or phase."""
        tables: list[Mapping[str, float]] = [getattr(run, quantity) for run in self.runs]
        names = dict.fromkeys(name for table in tables for name in table)
        return {name: statistics.fmean(table.get(name, 0) for table in tables) for name in names}

    @property
    def has_identical_runs(self) -> bool:
        """Whether the seeds repeat one run, because nothing in it is random."""
        scores = {(run.train_loss, run.best, run.last) for run in self.runs}
        return len(self.runs) > len(scores) == 1 and None not in next(iter(scores))

    @property
    def target(self) -> float | None:
        """Score for rounds to target."""
        return next((run.target for run in self.runs if run.target is not None), None)

    @property
    def score(self) -> MetricInfo:
        """The metric by which models are judged."""
        return self.runs[0].score if self.runs else ACCURACY

    @property
    def judged_by(self) -> str:
        """The score in words, with all that keeps two from being compared.

        These are the name of a loss, and whether personal models are judged.
        """
        loss = self.runs[0].loss if self.runs else ""
        is_loss = self.score.name == LOSS and loss
        facts = [loss if is_loss else "", "personal" if self.judges == "personal" else ""]
        words = ", ".join(filter(None, facts))
        return f"{self.score.label} ({words})" if words else self.score.label

    @property
    def judges(self) -> str:
        """Whose scores they are: ``global`` or ``personal`` models."""
        return self.runs[0].judges if self.runs else "global"

    @property
    def hides_personal(self) -> bool:
        """Whether its clients have models of their own, and its scores are of the global one."""
        has_personal = any(run.has_personal for run in self.runs)
        return has_personal and self.judges == "global" and not self.baseline

    @property
    def test_examples(self) -> int | None:
        """The smallest number of test examples that a run was measured on."""
        return min((run.examples for run in self.runs if run.examples), default=None)


def shared_score(methods: Sequence[MethodSummary]) -> MetricInfo | None:
    """Return the score of all methods, None where they are judged by several."""
    scores = {(method.score, method.judged_by) for method in methods}
    return methods[0].score if len(scores) == 1 else ACCURACY if not scores else None


def summarise(
    rows: Sequence[RoundRecord],
    target: float | None = None,
    *,
    score: MetricInfo = ACCURACY,
    loss: str = "",
    judges: str = "global",
    model_bytes: int | None = None,
) -> RunSummary:
    """Return the figures of one run.

    Args:
        rows: its round records, in order; any of them may lack a test score.
        target: score for rounds to target.
        score: the metric by which models are judged.
        loss: name of the loss.
        judges: whose scores they are: ``global`` or ``personal`` models.
        model_bytes: bytes of the model once; None takes what was sent down as ``model``.
    """
    scores = _scores(rows, score)
    best = max(scores, key=lambda item: (score.sign * item[1], -item[0]), default=None)
    trained = [value for number, value in scores if number > 0] or [value for _, value in scores]
    rounds_to_target = rounds_to(rows, target, score)
    bytes_to_target = None
    if rounds_to_target is not None:
        bytes_to_target = sum(bytes_sent(row) for row in rows if row.round <= rounds_to_target)
    tested = [row.test.examples for row in rows if row.test is not None]
    losses = [value for row in rows if (value := finite_or_none(row.train_loss)) is not None]
    seconds_by_phase = _totals(row.seconds for row in rows)
    bytes_down = _totals(row.bytes_down for row in rows)
    bytes_up = _totals(row.bytes_up for row in rows)
    selections = sum(len(r.clients) + len(r.dropped) + len(r.excluded) for r in rows)
    trainings = sum(len(r.clients) + len(r.excluded) for r in rows)
    after_start = [row for row in rows if row.round > 0]
    models = bytes_down.get("model", 0) if model_bytes is None else model_bytes * selections
    return RunSummary(
        rounds=max((row.round for row in rows), default=0),
        evaluations=len(scores),
        examples=tested[-1] if tested else None,
        train_loss=statistics.fmean(losses) if losses else None,
        score=score,
        loss=loss,
        judges=judges,
        best=best[1] if best else None,
        best_round=best[0] if best else None,
        last=scores[-1][1] if scores else None,
        last_mean=mean_of_last(trained),
        target=target,
        rounds_to_target=rounds_to_target,
        bytes_to_target=bytes_to_target,
        fluctuation=fluctuation(rows, score),
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        trainings=trainings,
        selections=selections,
        traffic=_ratio((sum(bytes_down.values()) + sum(bytes_up.values())) / 2, models),
        seconds_by_phase=seconds_by_phase,
        seconds=math.fsum(seconds_by_phase.values()),
        seconds_per_round=_ratio(
            sum(sum(row.seconds.values()) for row in after_start), len(after_start)
        ),
        seconds_per_client=_in_the_median_round(after_start, _training_seconds),
        processor_seconds_per_client=_in_the_median_round(
            after_start, lambda row: row.processor_seconds
        ),
        losses_not_finite=sum(_has_loss_not_finite(row) for row in rows),
        features=_feature_numbers(rows, rounds_to_target),
        has_personal=any(row.personal for row in rows),
    )


def _feature_numbers(rows: Sequence[RoundRecord], rounds_to_target: int | None) -> dict[str, float]:
    """Return the numbers of features of a run, by key."""
    numbers = {}
    reached = [row for row in rows if row.round == rounds_to_target]
    for figure in figures():
        among = reached if figure.of_run == "target" else rows
        values = [v for row in among if (v := figure.value(row.features)) is not None]
        if values:
            numbers[figure.key_of_run] = math.fsum(values) if figure.of_run == "sum" else values[-1]
    return numbers


def _training_seconds(row: RoundRecord) -> float:
    return math.fsum(s for phase, s in row.seconds.items() if phase.startswith(TRAINING))


def _in_the_median_round(
    rows: Sequence[RoundRecord], seconds: Callable[[RoundRecord], float | None]
) -> float | None:
    """Return the seconds of a local training in the median round; None where a round lacks them."""
    trained = [(row, len(row.clients) + len(row.excluded)) for row in rows]
    values = [(seconds(row), count) for row, count in trained if count]
    known = [value / count for value, count in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def rounds_to(
    rows: Iterable[RoundRecord], target: float | None, score: MetricInfo = ACCURACY
) -> int | None:
    """Return the smallest number of completed rounds whose score is as good as this, or None.

    >>> from fedkeel.records.rows import Scores
    >>> tests = [Scores(100, {"accuracy": a}) for a in (0.1, 0.5, 0.4)]
    >>> rows = [RoundRecord(r, test=scores) for r, scores in enumerate(tests)]
    >>> rounds_to(rows, 0.4), rounds_to(rows, 0.6)
    (1, None)
    """
    if target is None:
        return None
    eased = target - score.sign * _ROUNDING
    return next((number for number, a in _scores(rows, score) if score.reaches(a, eased)), None)


def fluctuation(rows: Iterable[RoundRecord], score: MetricInfo = ACCURACY) -> Stat | None:
    """Return statistics of the changes of the score between evaluations, as it is shown."""
    values = [score.scale * value for _, value in _scores(rows, score)]
    return Stat.of(after - before for before, after in pairwise(values))


def bytes_sent(row: RoundRecord) -> int:
    """Return the bytes that a round sent both ways."""
    return sum(row.bytes_down.values()) + sum(row.bytes_up.values())


def _scores(rows: Iterable[RoundRecord], score: MetricInfo) -> list[tuple[int, float]]:
    """Return (round, score) of the rounds with a test score."""
    tests = ((row.round, row.test) for row in rows if row.test is not None)
    scores = ((number, finite_or_none(test[score.name])) for number, test in tests)
    return [(number, value) for number, value in scores if value is not None]


def _totals(tables: Iterable[Mapping[str, _Number]]) -> dict[str, _Number]:
    totals: dict[str, _Number] = {}
    for table in tables:
        for name, value in table.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def _ratio(value: float, count: float) -> float | None:
    return value / count if count else None


def _has_loss_not_finite(row: RoundRecord) -> bool:
    has_trained = bool(row.clients or row.excluded)
    return (has_trained and finite_or_none(row.train_loss) is None) or (
        row.test is not None and finite_or_none(row.test[LOSS]) is None
    )
