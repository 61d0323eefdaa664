"""The conclusion that the results support, in plain sentences.

A method leads *clearly* if its difference to the other is beyond the chance of seeds, by a paired
t-test that is corrected for the number of methods: see `fedkeel.report.claims`, which has also when
test examples or seeds are too few. Otherwise the lead is within the chance of seeds.
What is better is the direction of the score. Methods with different scores are not ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedkeel.errors import counted, enumeration
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.records.statistics import LAST, Stat, is_tied
from fedkeel.report.claims import MIN_SEEDS, Claims, Lead, lead_over
from fedkeel.report.formatting import (
    extreme_of,
    format_difference,
    format_number,
    format_score,
    format_stat,
    format_target,
    quoted,
)
from fedkeel.report.summary import MethodSummary, Quantity, shared_score

_EQUAL_COSTS = 0.03
"""Costs that differ by a smaller share, or by less than their standard error, count as equal."""

_UNCERTAIN: tuple[Lead, ...] = ("within spread", "too few examples")
Status = Literal["clear", "close", "none", "few", "single", "apart", "empty"]


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a report. Labels of methods stand between backticks.

    Args:
        status: ``clear`` is ahead of all others, ``close`` has an uncertain lead over some,
            ``none`` is no clear winner, ``few`` seeds, ``single`` is one method, ``apart`` is
            methods with different scores, ``empty`` is nothing evaluated.
        headline: the conclusion.
        details: what qualifies it: the end of the runs, the target, costs, methods left out.
    """

    status: Status
    headline: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Scored:
    """A method that has been evaluated, with its best score over seeds."""

    summary: MethodSummary
    best: Stat

    @property
    def name(self) -> str:
        return quoted(self.summary.method)

    @property
    def score(self) -> MetricInfo:
        return self.summary.score


@dataclass(frozen=True)
class _Rival(_Scored):
    """A method that the leader is compared with: how certain the lead is, and how large."""

    lead: Lead
    gap: float

    @property
    def above(self) -> str:
        """How far the leader is above it, or below it where lower is better."""
        if abs(self.gap) < (5e-7 if self.score.is_share else 1e-6 * abs(self.best.mean)):
            return f"level with {self.name}"
        return f"{format_difference(self.gap, self.score)} {_side(self.score)} {self.name}"


def _side(score: MetricInfo) -> str:
    """Return where the better of two scores is."""
    return "above" if score.higher_is_better else "below"


def _named(score: MetricInfo) -> str:
    """Return the name of a score before its value; an accuracy needs none."""
    return "" if score == ACCURACY else f"{score.label} "


def verdict(methods: Sequence[MethodSummary], claims: Claims | None = None) -> Verdict:
    """Return the conclusion over methods, or over a single method; baselines do not compete.

    Args:
        methods: the methods.
        claims: what may be claimed of them; a lead over its reference, or of the reference, is the
            claim's.
    """
    methods = [method for method in methods if not method.baseline] or methods
    scored = [_Scored(m, best) for m in methods if (best := m.stat("best")) is not None]
    if not scored:
        return Verdict("empty", "Nothing has been evaluated yet.")
    if shared_score([method.summary for method in scored]) is None:
        return Verdict("apart", _different_scores(scored))
    complete = [method for method in scored if not method.summary.unfinished] or scored
    leader, *others = compared = _compared(complete)
    rivals = [
        _Rival(
            m.summary,
            m.best,
            _lead(leader.summary, m.summary, len(others), claims),
            leader.best.mean - m.best.mean,
        )
        for m in others
    ]
    fedavg = (rival for rival in rivals if rival.summary.method.split(" · ")[0] == "fedavg")
    reference = next(fedavg, rivals[0] if rivals else None)
    status, headline = _headline(leader, rivals, reference)
    few_seeds = [m.name for m in complete if m not in compared]
    unfinished = [m.name for m in scored if m not in complete]
    details = [
        _omission(unfinished, "some of the runs are not finished"),
        _omission(few_seeds, f"fewer than {MIN_SEEDS} seeds"),
        _seed_caution(status, compared),
        _leader_at_the_end([method.summary for method in compared]),
        _rounds_to_target(leader, reference),
        _costs(leader, reference),
        _cheapest(status, leader, rivals),
    ]
    return Verdict(status, headline, tuple(filter(None, details)))


def _lead(
    leader: MethodSummary, other: MethodSummary, comparisons: int, claims: Claims | None
) -> Lead:
    """Return how certain a lead is, as the claims say where they are about it."""
    claim = None
    if claims is not None and claims.reference == other.method:
        claim = claims.of(leader.method)
    elif claims is not None and claims.reference == leader.method:
        claim = claims.of(other.method)
    if claim is None or claim.outcome == ("better" if claim.method == other.method else "worse"):
        return lead_over(leader, other, comparisons)
    return claim.lead


def _different_scores(methods: Sequence[_Scored]) -> str:
    names: dict[str, list[str]] = {}
    for method in methods:
        names.setdefault(method.summary.judged_by, []).append(method.name)
    scores = "; ".join(f"{enumeration(of_score)} by {score}" for score, of_score in names.items())
    return f"The methods are judged by different scores, so they are not ranked: {scores}."


def _compared(complete: Sequence[_Scored]) -> list[_Scored]:
    """Return the methods that the conclusion is about, the best first.

    If two methods or more have enough seeds, and no other has a better mean, it is about these.
    """
    ranked = sorted(complete, key=lambda method: -method.score.sign * method.best.mean)
    with_seeds = [method for method in ranked if method.best.count >= MIN_SEEDS]
    return with_seeds if len(with_seeds) > 1 and with_seeds[0] is ranked[0] else ranked


def _headline(
    leader: _Scored, rivals: Sequence[_Rival], reference: _Rival | None
) -> tuple[Status, str]:
    so_far = "So far, " if leader.summary.unfinished else ""
    score = leader.score
    value = format_score(leader.best, score, 1, has_unit=True)
    lower = "" if score.higher_is_better else "; lower is better"
    value += f" (best round, {counted(leader.best.count, 'seed')}{lower})"
    reached = f"{so_far}{leader.name} reached {_named(score)}{value}"
    if reference is None:
        return "single", f"{reached}."
    ahead = f"{reached}, {reference.above}"
    uncertain = [rival for rival in rivals if rival.lead in _UNCERTAIN]
    is_few = any(rival.lead == "too few seeds" for rival in rivals)
    if uncertain and not is_few:
        if reference not in uncertain:
            return "close", " ".join([f"{ahead}.", *_uncertain_leads(leader, uncertain)])
        no_winner = "So far, no clear winner" if so_far else "No clear winner"
        certain = [rival for rival in rivals if rival not in uncertain]
        sentences = [
            f"{no_winner}: {leader.name} has the {extreme_of(score)} mean{_of(score)}, {value}.",
            *_uncertain_leads(leader, uncertain),
            *(f"It is {rival.above}." for rival in certain[:1]),
        ]
        return "none", " ".join(sentences)
    if reference is not rivals[0]:
        ahead += f" and {rivals[0].above}, the next best"
    if is_few:
        return "few", f"{ahead}."
    return "clear", f"{ahead}."


def _of(score: MetricInfo) -> str:
    return "" if score == ACCURACY else f" {score.label}"


def _uncertain_leads(leader: _Scored, rivals: Sequence[_Rival]) -> list[str]:
    """Return sentences on leads that are too small for the seeds, or for the test examples."""
    examples = counted(leader.summary.test_examples or 0, "test example")
    sentences = []
    for lead, reason in (
        ("within spread", "within the chance of seeds"),
        ("too few examples", f"too small for {examples}"),
    ):
        names = [rival.name for rival in rivals if rival.lead == lead]
        if names:
            sentences.append(f"Its lead over {enumeration(names)} is {reason}.")
    return sentences


def _omission(names: Sequence[str], reason: str) -> str:
    """Return a sentence on methods that the conclusion is not about."""
    verb = "is" if len(names) == 1 else "are"
    return f"{enumeration(names)} {verb} left out of this verdict: {reason}." if names else ""


def _seed_caution(status: Status, compared: Sequence[_Scored]) -> str:
    """Return a sentence on what too few seeds leave open."""
    fewest = min(len(method.summary.runs) for method in compared)
    shows = "One seed shows nothing" if fewest == 1 else f"{fewest} seeds show little"
    about = f"{shows} about the spread between seeds."
    if status == "single":
        return about if fewest < MIN_SEEDS else ""
    if status != "few":
        return ""
    identical = [method.name for method in compared if method.summary.has_identical_runs]
    if identical:
        repeat = "repeats one run with every seed" if len(identical) == 1 else "repeat one run each"
        because = "because nothing in it is random. Treat this result as a hint."
        return f"{enumeration(identical)} {repeat}, {because}"
    return f"{about} Treat this result as a hint, and run three seeds or more for a conclusion."


def _leader_at_the_end(methods: Sequence[MethodSummary]) -> str:
    """Return a sentence if another method than the first leads at the end of the runs.

    None if some runs ended so early that their means cover other stretches of training.
    """
    evaluations = {run.evaluations for method in methods for run in method.runs if run.rounds}
    if len(evaluations) > 1 and min(evaluations) <= LAST:
        return ""
    ends = [(m, stat) for m in methods if (stat := m.stat("last_mean")) is not None]
    if len(ends) < 2 or ends[0][0] is not methods[0]:
        return ""
    score = methods[0].score
    first, end = max(ends, key=lambda item: score.sign * item[1].mean)
    leader_end = ends[0][1]
    if first is methods[0] or is_tied(end, leader_end):
        return ""
    values = [format_score(stat.mean, score, 1, has_unit=True) for stat in (end, leader_end)]
    at_the_end = "At the end (mean of the last ten evaluations)"
    return f"{at_the_end} {quoted(first.method)} is ahead: {' against '.join(values)}."


def _rounds_to_target(leader: _Scored, reference: _Rival | None) -> str:
    if leader.summary.target is None:
        return ""
    target = f"{_named(leader.score)}{format_target(leader.summary.target, leader.score)}"
    rounds = _rounds_needed(leader)
    needed = f"never reached {target}" if rounds is None else f"reached {target} after {rounds}"
    if reference is None:
        return f"{leader.name} {needed}."
    reference_rounds = _rounds_needed(reference)
    if rounds is None and reference_rounds is None:
        return f"Neither {leader.name} nor {reference.name} reached {target}."
    did = "did " if rounds is None else ""
    other = "never did" if reference_rounds is None else f"{did}after {reference_rounds}"
    return f"{leader.name} {needed}, {reference.name} {other}."


def _rounds_needed(method: _Scored) -> str | None:
    """Return "12 ± 1 rounds (on 2 of 3 seeds)", or None where no seed reached the target."""
    rounds, seeds = method.summary.stat("rounds_to_target"), len(method.summary.runs)
    if rounds is None:
        return None
    text = format_stat(rounds, decimals=0)
    some_seeds = "" if rounds.count == seeds else f" (on {rounds.count} of {seeds} seeds)"
    return f"{text} {'round' if text == '1' else 'rounds'}{some_seeds}"


def _costs(leader: _Scored, reference: _Rival | None) -> str:
    """Return a sentence on traffic and processor time."""
    traffic = leader.summary.stat("traffic")
    if traffic is None:
        return ""
    if reference is None:
        times = format_number(traffic.mean)
        return f"{leader.name} sent {times} times the model for each client and round."
    sent = _ratio(leader, reference, "traffic")
    took = _ratio(leader, reference, "processor_seconds_per_client")
    phrases = []
    if sent is not None:
        amount = "as much" if sent == 1 else f"{format_number(sent)} times as much"
        phrases.append(f"sent {amount} as {reference.name}")
    if took is not None:
        amount = "about as much" if took == 1 else f"{format_number(took)} times as much"
        than = f" as {reference.name}" if sent is None else ""
        phrases.append(f"took {amount} processor time to train{than}")
    return f"{leader.name} {enumeration(phrases)}." if phrases else ""


def _ratio(method: _Scored, other: _Scored, quantity: Quantity) -> float | None:
    """Return a figure as a multiple of the other method's, 1 where they count as equal."""
    first, second = method.summary.stat(quantity), other.summary.stat(quantity)
    if first is None or second is None or second.mean <= 0:
        return None
    ratio = first.mean / second.mean
    return 1 if abs(ratio - 1) < _EQUAL_COSTS or is_tied(first, second) else ratio


def _cheapest(status: Status, leader: _Scored, rivals: Sequence[_Rival]) -> str:
    """Return a sentence if one of the uncertain rivals sends less than the leader."""
    traffic = leader.summary.stat("traffic")
    costs = [
        (stat.mean, rival.name)
        for rival in rivals
        if rival.lead in _UNCERTAIN and (stat := rival.summary.stat("traffic")) is not None
    ]
    if status not in ("close", "none") or traffic is None or not costs:
        return ""
    cost, name = min(costs)
    is_cheaper = cost <= 0.99 * traffic.mean
    return (
        f"Among the methods without a clear difference, {name} sends least." if is_cheaper else ""
    )
