"""The doctor's trials: every method that can run gets short runs, and the better half longer ones.

This is successive halving (Jamieson and Talwalkar, AISTATS 2016) in two stages, over methods, with
one seed: each method is tried at a grid of a few points for half of the rounds, and the better half
of the methods, again at their two best points, for all. FedAvg goes through both, so that others
can be compared with it. The paper halves single configurations; here a method keeps two, so that
it is not lost by its worst ones. Shorter first runs would favour methods that start fast: a
server's momentum takes some rounds to build up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedkeel.config import Run as RunSettings
from fedkeel.config import Space
from fedkeel.records.doctor import BestTrial
from fedkeel.records.score import MetricInfo
from fedkeel.study.doctor.candidates import Candidate, search_space
from fedkeel.study.doctor.runs import ShortRun, ShortRuns, final_score, for_rounds
from fedkeel.study.samplers import GridSampler
from fedkeel.study.search_space import Point, search_axes, settings_at

REFERENCE = "fedavg"

PARTS = (2, 1)
"""A stage's runs have this part of the rounds."""

POINTS = 2
"""Points of a method in the second stage."""

FEWEST = 5
"""Methods of the second stage, at least."""


@dataclass(frozen=True)
class TrialStage:
    """One stage.

    Args:
        rounds: rounds of a run.
        methods: methods that take part, without FedAvg as the reference.
        runs: runs, with FedAvg's.
    """

    rounds: int
    methods: int
    runs: int


def stages(candidates: Sequence[Candidate], rounds: int) -> list[TrialStage]:
    """Return the stages, at most this much work: points that are worse are not tried again.

    Args:
        candidates: the methods.
        rounds: rounds of a run of the second stage.
    """
    axes = [search_axes(c.method, search_space([c], 1.0, Space())) for c in candidates]
    grid = sum(math.prod(axis.size or 1 for axis in of_method) for of_method in axes)
    half = max(math.ceil(len(candidates) / 2), min(FEWEST, len(candidates)))
    lengths = [max(1, math.ceil(rounds / part)) for part in PARTS]
    is_extra = half < len(candidates)  # FedAvg, where it is not of the better half
    runs = [grid, POINTS * (half + is_extra)]
    return [
        TrialStage(*stage) for stage in zip(lengths, (len(candidates), half), runs, strict=True)
    ]


@dataclass(frozen=True)
class _Tried:
    """A point of a method and its score, None where training diverged."""

    point: Point
    score: float | None


class Trials:
    """Tries methods.

    Args:
        settings: as `short_settings` returns them.
        candidates: the methods; all of them can run.
        lr: the pilot's best learning rate.
        rounds: rounds of a run of the second stage.
        score: the metric by which models are judged.
    """

    def __init__(
        self,
        settings: RunSettings,
        candidates: Sequence[Candidate],
        lr: float,
        rounds: int,
        score: MetricInfo,
    ) -> None:
        self._settings, self._score = settings, score
        self._stages = stages(candidates, rounds)
        self._axes = {
            c.method: search_axes(c.method, search_space([c], lr, Space())) for c in candidates
        }

    def make(self, runs: ShortRuns) -> tuple[BestTrial, ...]:
        """Return the best trial of each method, the best method first.

        A method that went on to the second stage is before one that did not.

        Raises:
            KeyboardInterrupt: after the round at hand; the same call goes on there.
        """
        points: dict[str, list[Point]] = {
            method: GridSampler(axes, None, 0).ask() for method, axes in self._axes.items()
        }
        trials: dict[str, BestTrial] = {}
        for number, stage in enumerate(self._stages):
            tried = self._try(runs, points, stage.rounds)
            of_stage = {
                method: self._trial(method, of_method, stage.rounds)
                for method, of_method in tried.items()
            }
            trials |= of_stage
            if number + 1 < len(self._stages):
                chosen = self._best(of_stage, self._stages[number + 1].methods)
                points = {method: self._points(tried[method]) for method in chosen}
        order = list(self._axes)
        ranked = sorted(
            trials.values(),
            key=lambda t: (-t.rounds, -self._score.rank(t.score), order.index(t.method)),
        )
        return tuple(ranked)

    def _try(
        self, runs: ShortRuns, points: Mapping[str, Sequence[Point]], rounds: int
    ) -> dict[str, list[_Tried]]:
        """Make the runs of a stage; return what was tried, by method."""
        base = for_rounds(self._settings, rounds, self._settings.evaluation.model)
        pairs = [(method, point) for method, of_method in points.items() for point in of_method]
        wanted = []
        for method, point in pairs:
            settings = settings_at(point, self._axes[method], method, base)
            name = f"{settings.method}, lr {settings.local.lr:g}, {rounds} rounds"
            wanted.append(ShortRun(name, settings))
        tried: dict[str, list[_Tried]] = {}
        for (method, point), rows in zip(pairs, runs.make(wanted), strict=True):
            tried.setdefault(method, []).append(_Tried(point, final_score(rows, self._score)))
        return tried

    def _best(self, trials: Mapping[str, BestTrial], count: int) -> list[str]:
        """Return the best methods, and FedAvg."""
        ranked = sorted(trials, key=lambda method: -self._score.rank(trials[method].score))
        return list(dict.fromkeys([*ranked[:count], *(m for m in trials if m == REFERENCE)]))

    def _points(self, tried: Sequence[_Tried]) -> list[Point]:
        ranked = sorted(tried, key=lambda trial: -self._score.rank(trial.score))
        return [trial.point for trial in ranked[:POINTS]]

    def _trial(self, method: str, tried: Sequence[_Tried], rounds: int) -> BestTrial:
        """Return the best of what was tried, the first of equals."""
        best = max(tried, key=lambda trial: self._score.rank(trial.score))
        settings = settings_at(best.point, self._axes[method], method, self._settings)
        return BestTrial(method, settings.method, settings.local.lr, best.score, rounds, len(tried))
