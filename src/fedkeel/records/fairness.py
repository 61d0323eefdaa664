"""How a score is distributed over clients: its spread, its worst tenth, and who gains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import finite_or_none, sample_deviation

ScoreColumns = Mapping[str, Sequence[float | None]]
"""Scores by client, as `per_client` and `personal` of a round have them."""


@dataclass(frozen=True)
class Spread:
    """How a score is distributed over clients, each counting the same.

    Args:
        clients: how many have the score.
        mean: their mean.
        std: their sample standard deviation (ddof 1); None for one client.
        worst_tenth: mean of the worst tenth, of one client at least.
        best_tenth: mean of the best tenth.
        jain: Jain's index of fairness (sum x)^2 / (n sum x^2), from 1 / n, where one client has
            all, to 1, where all are equal; None for a score where lower is better or that may be
            negative.
    """

    clients: int
    mean: float
    std: float | None
    worst_tenth: float
    best_tenth: float
    jain: float | None

    @property
    def variance(self) -> float | None:
        """The sample variance over clients; None for one client."""
        return None if self.std is None else self.std**2


@dataclass(frozen=True)
class Gain:
    """What clients gain against a reference, each counting the same.

    Args:
        values: of each client that both have measured, ascending: above 0 the client gains.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean gain."""
        return statistics.fmean(self.values)

    @property
    def share(self) -> float:
        """The share of clients that gain, in [0, 1]; a client with the same score does not."""
        return sum(value > 0 for value in self.values) / len(self.values)

    @property
    def share_that_lose(self) -> float:
        """The share of clients that lose, in [0, 1]."""
        return sum(value < 0 for value in self.values) / len(self.values)


def client_values(columns: ScoreColumns | None, score: MetricInfo) -> dict[int, float]:
    """Return the score of each client that has examples and a finite score, by its index."""
    values = (columns or {}).get(score.name) or []
    sizes = (columns or {}).get("examples") or [1.0] * len(values)
    return {
        client: value
        for client, (size, item) in enumerate(zip(sizes, values, strict=False))
        if size and (value := finite_or_none(item)) is not None
    }


def spread(values: Sequence[float], score: MetricInfo) -> Spread | None:
    """Return how values of a score are distributed; None where there is none.

    Jain, Chiu and Hawe 1984, "A quantitative measure of fairness and discrimination for resource
    allocation in shared computer systems", DEC TR-301; the worst tenth and the variance as in Li et
    al. 2020, "Fair resource allocation in federated learning", where the variance is over n.

    >>> clients = spread([1.0, 0.5, 0.5, 0.0], MetricInfo("accuracy", unit="%"))
    >>> clients.mean, clients.worst_tenth, round(clients.jain, 4), round(clients.variance, 4)
    (0.5, 0.0, 0.6667, 0.1667)
    """
    if not values:
        return None
    from_worst = sorted(values, key=lambda value: score.sign * value)
    tenth = max(1, len(values) // 10)
    squares = math.fsum(value * value for value in values)
    has_index = score.higher_is_better and min(values) >= 0 and squares > 0
    return Spread(
        clients=len(values),
        mean=statistics.fmean(values),
        std=sample_deviation(values),
        worst_tenth=statistics.fmean(from_worst[:tenth]),
        best_tenth=statistics.fmean(from_worst[-tenth:]),
        jain=math.fsum(values) ** 2 / (len(values) * squares) if has_index else None,
    )


def gain(
    values: Mapping[int, float], reference: Mapping[int, float], score: MetricInfo
) -> Gain | None:
    """Return what clients gain against a reference; None where both share no client.

    Args:
        values: score by client.
        reference: what it is compared with, by client.
        score: what it is; a gain is positive where the value is better.

    >>> accuracy = MetricInfo("accuracy", unit="%")
    >>> gains = gain({0: 0.5, 1: 1.0, 2: 0.25}, {0: 0.75, 1: 0.5, 3: 0.0}, accuracy)
    >>> gains.values, gains.mean, gains.share
    ((-0.25, 0.5), 0.125, 0.5)
    """
    shared = values.keys() & reference.keys()
    gains = sorted(score.sign * (values[client] - reference[client]) for client in shared)
    return Gain(tuple(gains)) if gains else None


def mean_over_clients(columns: ScoreColumns | None, score: MetricInfo) -> float | None:
    """Return the mean of a metric over clients by their examples, None where it is not known.

    Args:
        columns: `per_client` or `personal` of a round.
        score: the metric.
    """
    columns = columns or {}
    pairs = zip(columns.get("examples", ()), columns.get(score.name, ()), strict=False)
    known = [(count, value) for count, value in pairs if count and value is not None]
    total = sum(count for count, _ in known)
    return sum(count * value for count, value in known) / total if total else None
