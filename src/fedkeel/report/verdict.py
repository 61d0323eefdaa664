"""The conclusion that the results support, in plain sentences.

A method is *clearly* ahead of another if, over at least three seeds each, its worst seed is above
the other's best. It is ahead *on every seed* if the ranges overlap but it is higher on each seed
that both ran, at least three of them. Otherwise its lead is smaller than the *spread* between
seeds. A clear lead or one on every seed counts as *too few examples* if it is smaller than two
standard errors of an accuracy on so many test examples, sqrt(p (1 - p) / n), which more seeds on
the same examples do not reduce. With fewer than three seeds, or with seeds that repeat one run, the
report states the difference and makes no claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedkeel.errors import counted
from fedkeel.records.statistics import LAST, Stat, is_tied, paired_difference
from fedkeel.report.formatting import (
    MethodName,
    Sentence,
    format_accuracy,
    format_number,
    format_percent,
    format_points,
    format_stat,
    join_names,
    join_phrases,
)
from fedkeel.report.summary import MethodSummary, Quantity

MIN_SEEDS = 3
"""Seeds below which the report makes no claim."""

_EQUAL_COSTS = 0.03
"""Costs that differ by a smaller share, or by less than their standard error, count as equal."""

Lead = Literal["clear", "every seed", "within spread", "too few examples", "too few seeds"]
_UNCERTAIN: tuple[Lead, ...] = ("within spread", "too few examples")
Status = Literal["clear", "ahead", "close", "none", "few", "single", "empty"]


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a report.

    Args:
        status: ``clear`` is ahead of all others, ``ahead`` is ahead of some only seed by seed,
            ``close`` has an uncertain lead over some, ``none`` is no clear winner, ``few`` seeds,
            ``single`` is one method, ``empty`` is nothing evaluated.
        headline: the conclusion.
        details: what qualifies it: the end of the runs, the target, costs, methods left out.
        winner: label of the method with the highest mean, or None.
    """

    status: Status
    headline: Sentence
    details: tuple[Sentence, ...]
    winner: str | None


@dataclass(frozen=True)
class _ScoredMethod:
    """A method that has been evaluated, with its best accuracy over seeds."""

    summary: MethodSummary
    best: Stat

    @property
    def name(self) -> MethodName:
        return MethodName(self.summary.method)


@dataclass(frozen=True)
class _Rival:
    """A method that the leader is compared with."""

    method: _ScoredMethod
    lead: Lead
    gap: float


def lead_over(leader: MethodSummary, other: MethodSummary, quantity: Quantity = "best") -> Lead:
    """Return how certain the lead of the method with the higher mean is."""
    first, second = leader.stat(quantity), other.stat(quantity)
    if first is None or second is None or min(first.count, second.count) < MIN_SEEDS:
        return "too few seeds"
    if leader.has_identical_runs or other.has_identical_runs:
        return "too few seeds"
    paired = paired_difference(leader.by_seed(quantity), other.by_seed(quantity))
    is_clear = first.min > second.max
    is_ahead = paired is not None and MIN_SEEDS <= paired.stat.count == paired.ahead
    if not is_clear and not is_ahead:
        return "within spread"
    if first.mean - second.mean < _sampling_error(leader, first, second):
        return "too few examples"
    return "clear" if is_clear else "every seed"


def _sampling_error(leader: MethodSummary, first: Stat, second: Stat) -> float:
    """Return two standard errors of the mean accuracy of both, on the leader's test examples."""
    if leader.test_examples is None:
        return 0.0
    share = min(1.0, max(0.0, (first.mean + second.mean) / 2))
    return 2 * math.sqrt(share * (1 - share) / leader.test_examples)


def verdict(methods: Sequence[MethodSummary]) -> Verdict:
    """Return the conclusion over methods, or over one method alone."""
    scored = [_ScoredMethod(m, best) for m in methods if (best := m.stat("best")) is not None]
    if not scored:
        return Verdict("empty", ("Nothing has been evaluated yet.",), (), None)
    complete = [method for method in scored if not method.summary.unfinished] or scored
    leader, *others = _compared(complete)
    rivals = [
        _Rival(other, lead_over(leader.summary, other.summary), leader.best.mean - other.best.mean)
        for other in others
    ]
    status, headline = _headline(leader, rivals)
    reference = _reference(rivals)
    details = [
        *_omissions(scored, complete, [leader, *others]),
        *_seed_caution(status, leader, rivals),
        *_leader_at_the_end(leader.summary, [other.summary for other in others]),
        *_rounds_to_target(leader, reference),
        *_costs(leader, reference),
        *_cheapest(status, leader, rivals),
    ]
    return Verdict(status, headline, tuple(details), leader.summary.method)


def _compared(complete: Sequence[_ScoredMethod]) -> list[_ScoredMethod]:
    """Return the methods that the conclusion is about, the best first.

    If two methods or more have enough seeds, and no other has a higher mean, it is about these.
    """
    ranked = sorted(complete, key=lambda method: -method.best.mean)
    with_seeds = [method for method in ranked if method.best.count >= MIN_SEEDS]
    return with_seeds if len(with_seeds) > 1 and with_seeds[0] is ranked[0] else ranked


def _headline(leader: _ScoredMethod, rivals: Sequence[_Rival]) -> tuple[Status, Sentence]:
    so_far = "So far, " if leader.summary.unfinished else ""
    score = f"{format_accuracy(leader.best)} (best round, {counted(leader.best.count, 'seed')})"
    reached: Sentence = (so_far, leader.name, f" reached {score}")
    reference = _reference(rivals)
    if reference is None:
        return "single", (*reached, ".")
    ahead: Sentence = (*reached, ", ", *_above(reference))
    if reference is not rivals[0]:
        ahead += (" and ", *_above(rivals[0]), ", the next best")
    if any(rival.lead == "too few seeds" for rival in rivals):
        return "few", (*ahead, ".")
    uncertain = [rival for rival in rivals if rival.lead in _UNCERTAIN]
    if reference in uncertain:
        no_winner = f"{so_far}no clear winner" if so_far else "No clear winner"
        sentence: Sentence = (f"{no_winner}: ", leader.name, f" has the highest mean, {score}.")
        sentence += _uncertain_leads(leader, uncertain)
        certain = [rival for rival in rivals if rival not in uncertain]
        if certain:
            gap = format_points(certain[0].gap)
            sentence += (f" It is {gap} above ", certain[0].method.name, ".")
        return "none", sentence
    if uncertain:
        sentence = (*reached, ", ", *_above(reference), ".")
        return "close", sentence + _uncertain_leads(leader, uncertain)
    overlapping = [rival for rival in rivals if rival.lead == "every seed"]
    unnamed = [r.method.name for r in overlapping if r is not reference and r is not rivals[0]]
    if unnamed:
        ahead += (
            ". It is also ahead on every seed, although the ranges overlap, of ",
            *join_names(unnamed),
        )
    return ("ahead" if overlapping else "clear"), (*ahead, ".")


def _above(rival: _Rival) -> Sentence:
    if abs(rival.gap) < 5e-7:
        return ("level with ", rival.method.name)
    phrase: Sentence = (f"{format_points(rival.gap)} above ", rival.method.name)
    if rival.lead == "every seed":
        phrase += (" (ahead on every seed, although the ranges overlap)",)
    return phrase


def _uncertain_leads(leader: _ScoredMethod, rivals: Sequence[_Rival]) -> Sentence:
    """Return sentences on leads that are too small for the seeds, or for the test examples."""
    within_spread = [r.method.name for r in rivals if r.lead == "within spread"]
    too_few_examples = [r.method.name for r in rivals if r.lead == "too few examples"]
    sentences: Sentence = ()
    if within_spread:
        names = join_names(within_spread)
        sentences += (" Its lead over ", *names, " is smaller than the spread between seeds.")
    if too_few_examples:
        names = join_names(too_few_examples)
        examples = counted(leader.summary.test_examples or 0, "test example")
        sentences += (" Its lead over ", *names, f" is too small for {examples}.")
    return sentences


def _reference(rivals: Sequence[_Rival]) -> _Rival | None:
    """Return FedAvg if it is among the others, else the next best."""
    fedavg = (r for r in rivals if r.method.summary.method.split(" · ")[0] == "fedavg")
    return next(fedavg, rivals[0] if rivals else None)


def _seed_caution(
    status: Status, leader: _ScoredMethod, rivals: Sequence[_Rival]
) -> list[Sentence]:
    """Return a sentence on what too few seeds leave open."""
    methods = [leader.summary, *(rival.method.summary for rival in rivals)]
    fewest = min(len(method.runs) for method in methods)
    shows = "One seed shows nothing" if fewest == 1 else f"{fewest} seeds show little"
    about = f"{shows} about the spread between seeds"
    if status == "single" and fewest < MIN_SEEDS:
        return [(f"{about}.",)]
    if status != "few":
        return []
    identical = [method.method for method in methods if method.has_identical_runs]
    if identical:
        repeat = "repeats one run with every seed" if len(identical) == 1 else "repeat one run each"
        because = "because nothing in it is random. Treat this result as a hint."
        return [(*join_names(identical), f" {repeat}, {because}")]
    return [
        (f"{about}. Treat this result as a hint, and run three seeds or more for a conclusion.",)
    ]


def _leader_at_the_end(leader: MethodSummary, others: Sequence[MethodSummary]) -> list[Sentence]:
    """Return a sentence if another method leads at the end of the runs.

    None if some runs ended so early that their means cover other stretches of training.
    """
    methods = [leader, *others]
    evaluations = {run.evaluations for method in methods for run in method.runs if run.rounds}
    if len(evaluations) > 1 and min(evaluations) <= LAST:
        return []
    ends = [(m, stat) for m in methods if (stat := m.stat("last_mean")) is not None]
    if len(ends) < 2 or ends[0][0] is not leader:
        return []
    leader_end = ends[0][1]
    first, first_end = max(ends, key=lambda end: end[1].mean)
    if first is leader or is_tied(first_end, leader_end):
        return []
    against = f"{format_percent(first_end.mean)} % against {format_percent(leader_end.mean)} %"
    at_the_end = "At the end (mean of the last ten evaluations) "
    return [(at_the_end, MethodName(first.method), f" is ahead: {against}.")]


def _rounds_to_target(leader: _ScoredMethod, reference: _Rival | None) -> list[Sentence]:
    if leader.summary.target is None:
        return []
    target = f"{100 * leader.summary.target:g} %"
    sentence: Sentence = (leader.name, *_rounds_needed(leader.summary, target))
    if reference is not None:
        other = reference.method
        sentence += (", ", other.name, *_rounds_needed(other.summary, None))
    return [(*sentence, ".")]


def _rounds_needed(method: MethodSummary, target: str | None) -> Sentence:
    """Return " reached 85 % after 12 ± 1 rounds", without the verb where the target is None."""
    rounds, seeds = method.stat("rounds_to_target"), len(method.runs)
    if rounds is None:
        return (f" never reached {target}" if target else " never did",)
    text = format_stat(rounds, decimals=0)
    some_seeds = "" if rounds.count == seeds else f" (on {rounds.count} of {seeds} seeds)"
    verb = f" reached {target} after" if target else " after"
    unit = "round" if text == "1" else "rounds"
    return (f"{verb} {text} {unit}{some_seeds}",)


def _costs(leader: _ScoredMethod, reference: _Rival | None) -> list[Sentence]:
    """Return a sentence on traffic and time."""
    traffic = leader.summary.stat("traffic")
    if traffic is None:
        return []
    if reference is None:
        times = format_number(traffic.mean)
        return [(leader.name, f" sent {times} times the model for each client and round.")]
    other = reference.method
    traffic_ratio = _ratio(leader.summary, other.summary, "traffic")
    time_ratio = _ratio(leader.summary, other.summary, "seconds_per_client")
    phrases: list[Sentence] = []
    if traffic_ratio is not None:
        amount = "as much" if traffic_ratio == "1.00" else f"{traffic_ratio} times as much"
        phrases.append((f"sent {amount} as ", other.name))
    if time_ratio is not None:
        duration = "about as long" if time_ratio == "1.00" else f"{time_ratio} times as long"
        phrases.append((f"took {duration} to train",))
    if traffic_ratio is None and time_ratio is not None:
        phrases[-1] += (" as ", other.name)
    return [(leader.name, " ", *join_phrases(phrases), ".")] if phrases else []


def _ratio(method: MethodSummary, other: MethodSummary, quantity: Quantity) -> str | None:
    """Return a figure as a multiple of the other method's, as text."""
    first, second = method.stat(quantity), other.stat(quantity)
    if first is None or second is None or second.mean <= 0:
        return None
    ratio = first.mean / second.mean
    is_equal = abs(ratio - 1) < _EQUAL_COSTS or is_tied(first, second)
    return "1.00" if is_equal else format_number(ratio)


def _cheapest(status: Status, leader: _ScoredMethod, rivals: Sequence[_Rival]) -> list[Sentence]:
    """Return a sentence if one of the uncertain rivals sends less than the leader."""
    if status not in ("close", "none"):
        return []
    level = [leader, *(rival.method for rival in rivals if rival.lead in _UNCERTAIN)]
    costs = [(m, stat.mean) for m in level if (stat := m.summary.stat("traffic")) is not None]
    if len(costs) < 2:
        return []
    cheapest, cost = min(costs, key=lambda item: item[1])
    if cheapest is leader or cost > 0.99 * costs[0][1]:
        return []
    return [("Among the methods without a clear difference, ", cheapest.name, " sends least.")]


def _omissions(
    scored: Sequence[_ScoredMethod],
    complete: Sequence[_ScoredMethod],
    compared: Sequence[_ScoredMethod],
) -> list[Sentence]:
    """Return a sentence for each reason why methods are left out."""
    unfinished = [m.name for m in scored if m not in complete]
    few_seeds = [m.name for m in complete if m not in compared]
    sentences = []
    for names, reason in (
        (unfinished, "some of the runs are not finished"),
        (few_seeds, f"fewer than {MIN_SEEDS} seeds"),
    ):
        if names:
            verb = "is" if len(names) == 1 else "are"
            sentences.append((*join_names(names), f" {verb} left out of this verdict: {reason}."))
    return sentences
