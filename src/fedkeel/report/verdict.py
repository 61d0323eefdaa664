"""What the numbers allow one to say, in plain words, and no more than that.

A method is *clearly* ahead of another where, over at least three seeds each, its worst seed is
above the other's best. It is ahead *on every seed* where the ranges overlap and yet it is higher
on each seed that both ran, at least three of them. Otherwise the two are *within the spread*.
Neither is said of a difference *within chance*: smaller than two standard errors of an accuracy
on so many test examples, sqrt(p (1 - p) / n), which more seeds on the same examples do not lessen.
With fewer than three seeds, or copies of one run, there is a difference and no claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedkeel.errors import counted
from fedkeel.report.formatting import (
    Name,
    Sentence,
    join,
    names,
    number,
    percent,
    points,
    spread,
)
from fedkeel.report.summary import LAST, Group, Stat, paired, tied

ENOUGH = 3
"""Seeds below which no claim is made."""

_ALIKE = 0.03
"""Costs that differ by a smaller share, or by less than their standard error, are called alike."""

Relation = Literal["clear", "every seed", "within the spread", "within chance", "too few"]
_LEVEL = ("within the spread", "within chance")
Status = Literal["clear", "ahead", "close", "none", "few", "single", "empty"]


@dataclass(frozen=True)
class Verdict:
    """What a report says first.

    Args:
        status: how far the claim goes: ``clear`` of all others, ``ahead`` of some of them only
            seed by seed, ``close`` to some, ``none`` is no clear winner, ``few`` seeds, ``single``
            is one method, ``empty`` is nothing evaluated.
        headline: the sentence to remember.
        more: what qualifies it: the end of the runs, the target, costs, what was left out.
        winner: label of the method with the highest mean, or None.
    """

    status: Status
    headline: Sentence
    more: tuple[Sentence, ...]
    winner: str | None


@dataclass(frozen=True)
class _Standing:
    """A method with its accuracy, and how the leader stands to it."""

    group: Group
    best: Stat
    relation: Relation
    gap: float


class _Scored(NamedTuple):
    """A method that has been evaluated, with its accuracy over seeds."""

    group: Group
    best: Stat


def relation(leader: Group, other: Group, figure: str = "best") -> Relation:
    """Return what may be said of two methods, the first of which has the higher mean."""
    one, two = leader.stat(figure), other.stat(figure)
    if one is None or two is None or min(one.count, two.count) < ENOUGH:
        return "too few"
    if leader.copies or other.copies:
        return "too few"
    pair = paired(leader, other, figure)
    claim: Relation = "within the spread"
    if one.min > two.max:
        claim = "clear"
    elif pair and pair.difference.count >= ENOUGH and pair.ahead == pair.difference.count:
        claim = "every seed"
    small = one.mean - two.mean < chance(leader, one, two)
    return "within chance" if small and claim != "within the spread" else claim


def chance(leader: Group, one: Stat, two: Stat) -> float:
    """Return two standard errors of an accuracy between both, on the examples it is measured on."""
    counts = [s.examples for s in leader.summaries if s.examples]
    p = min(1.0, max(0.0, (one.mean + two.mean) / 2))
    return 2 * math.sqrt(p * (1 - p) / min(counts)) if counts else 0.0


def verdict(groups: Sequence[Group]) -> Verdict:
    """Return the verdict over methods, or over one method alone."""
    scored = [_Scored(g, best) for g in groups if (best := g.stat("best")) is not None]
    if not scored:
        return Verdict("empty", ("Nothing has been evaluated yet.",), (), None)
    complete = [one for one in scored if not one.group.unfinished] or scored
    judged = _judged(complete)
    leader, best = judged[0]
    others = [_Standing(g, s, relation(leader, g), best.mean - s.mean) for g, s in judged[1:]]
    so_far = "So far, " if leader.unfinished else ""
    if not others:
        status: Status = "single"
        headline: Sentence = (so_far, *_reached(leader, best), ".")
    elif any(o.relation == "too few" for o in others):
        status, headline = "few", (so_far, *_few(leader, best, others))
    else:
        status, headline = _claim(leader, best, others, so_far)
    more = [
        *_left_out([one for one in scored if one not in judged], complete),
        *_caution(status, leader, others),
        *_end(leader, [o.group for o in others]),
        *_target(leader, _reference(others)),
        *_cost(leader, _reference(others)),
        *_cheapest(status, leader, others),
    ]
    return Verdict(status, headline, tuple(more), leader.method)


def _judged(complete: Sequence[_Scored]) -> list[_Scored]:
    """Return the methods that the verdict is about, the best first.

    Where two methods or more have seeds enough, and no other has a higher mean, it is about these.
    """
    ranked = sorted(complete, key=lambda one: -one.best.mean)
    enough = [one for one in ranked if one.best.count >= ENOUGH]
    return enough if len(enough) > 1 and enough[0] is ranked[0] else ranked


def _reached(group: Group, best: Stat) -> Sentence:
    """Return "fedgc reached 91.2 ± 0.8 % (best round, 3 seeds)"."""
    return (Name(group.method), f" reached {_accuracy(best)} (best round, {_seeds(best)})")


def _claim(
    leader: Group, best: Stat, others: Sequence[_Standing], so_far: str
) -> tuple[Status, Sentence]:
    """Return the headline where there are seeds enough."""
    reference = _reference(others) or others[0]
    level = [o for o in others if o.relation in _LEVEL]
    if reference in level:
        rest = [o for o in others if o not in level]
        told: Sentence = (
            f"{so_far or ''}{'no' if so_far else 'No'} clear winner: ",
            Name(leader.method),
            f" has the highest mean, {_accuracy(best)} (best round, {_seeds(best)}), and ",
            *_within(leader, level),
        )
        if rest:
            told += (f"; it is {points(rest[0].gap)} above ", Name(rest[0].group.method))
        return "none", (*told, ".")
    told = (so_far, *_reached(leader, best), ", ", *_above(reference))
    if level:
        return "close", (*told, "; ", *_within(leader, level), ".")
    if reference is not others[0]:
        told += (" and ", *_above(others[0]), ", the next best")
    narrow = [o for o in others if o.relation == "every seed"]
    untold = [o.group.method for o in narrow if o is not reference and o is not others[0]]
    if untold:
        told += ("; it is ahead on every seed, though the ranges overlap, of ", *names(untold))
    return ("ahead" if narrow else "clear"), (*told, ".")


def _few(leader: Group, best: Stat, others: Sequence[_Standing]) -> Sentence:
    reference = _reference(others) or others[0]
    told = (*_reached(leader, best), ", ", *_above(reference))
    if reference is not others[0]:
        told += (" and ", *_above(others[0]), ", the next best")
    return (*told, ".")


def _above(other: _Standing) -> Sentence:
    if abs(other.gap) < 5e-7:
        return ("level with ", Name(other.group.method))
    told = (f"{points(other.gap)} above ", Name(other.group.method))
    if other.relation == "every seed":
        return (*told, " (ahead on every seed, though the ranges overlap)")
    return told


def _within(leader: Group, level: Sequence[_Standing]) -> Sentence:
    spread = [o.group.method for o in level if o.relation == "within the spread"]
    near = [o.group.method for o in level if o.relation == "within chance"]
    told: list[Sentence] = []
    if spread:
        told.append(
            (*names(spread), f" {'is' if len(spread) == 1 else 'are'} within the spread of it")
        )
    if near:
        counts = [s.examples for s in leader.summaries if s.examples]
        told.append(
            (f"{counted(min(counts), 'test example')} cannot tell ", *names(near), " from it")
        )
    return join(told)


def _reference(others: Sequence[_Standing]) -> _Standing | None:
    """Return FedAvg where it is among the others, else the next best, None where there is none."""
    plain = (o for o in others if o.group.method.split(" · ")[0] == "fedavg")
    return next(plain, others[0] if others else None)


def _accuracy(best: Stat) -> str:
    return f"{spread(best, scale=100, digits=1)} %"


def _seeds(best: Stat) -> str:
    return counted(best.count, "seed")


def _caution(status: Status, leader: Group, others: Sequence[_Standing]) -> list[Sentence]:
    if status == "single" and len(leader.summaries) < ENOUGH:
        one = len(leader.summaries) == 1
        told = "One seed shows nothing" if one else f"{len(leader.summaries)} seeds show little"
        return [(f"{told} of the spread between seeds.",)]
    if status != "few":
        return []
    copied = [g.method for g in (leader, *(o.group for o in others)) if g.copies]
    if copied:
        one = len(copied) == 1
        made = "the seeds are" if one else "each one's seeds are"
        return [
            (
                *names(copied),
                f": {made} copies of one run, in which nothing is random: take this as a hint.",
            )
        ]
    fewest = min(len(g.summaries) for g in (leader, *(o.group for o in others)))
    verb = "says" if fewest == 1 else "say"
    what = "nothing" if fewest == 1 else "little"
    return [
        (
            f"{counted(fewest, 'seed').capitalize()} {verb} {what} about the spread between seeds: "
            "take this as a hint, and run at least three before claiming a winner.",
        )
    ]


def _end(leader: Group, others: Sequence[Group]) -> list[Sentence]:
    """Return a sentence where another method leads at the end of the runs.

    None where some ended so early that the mean would be of other stretches of training.
    """
    made = {one.evaluations for group in (leader, *others) for one in group.summaries if one.rounds}
    if len(made) > 1 and min(made) <= LAST:
        return []
    ends = [(g, s) for g in (leader, *others) if (s := g.stat("last_mean")) is not None]
    if len(ends) < 2 or ends[0][0] is not leader:
        return []
    top, end = max(ends, key=lambda pair: pair[1].mean)
    if top is leader or tied(end, ends[0][1]):
        return []
    return [
        (
            "At the end (mean of the last ten evaluations) ",
            Name(top.method),
            f" is ahead: {percent(end.mean)} % against {percent(ends[0][1].mean)} %.",
        )
    ]


def _target(leader: Group, reference: _Standing | None) -> list[Sentence]:
    """Return a sentence on rounds to target."""
    target = next((s.target for s in leader.summaries if s.target is not None), None)
    if target is None:
        return []
    told: Sentence = (Name(leader.method), *_needed(leader, f"{100 * target:g} %"))
    if reference is not None:
        told += (", ", Name(reference.group.method), *_needed(reference.group, None))
    return [(*told, ".")]


def _needed(group: Group, target: str | None) -> Sentence:
    rounds, seeds = group.stat("rounds_to_target"), len(group.summaries)
    if rounds is None:
        return (f" never reached {target}" if target else " never did",)
    text = spread(rounds, digits=0)
    part = "" if rounds.count == seeds else f" (on {rounds.count} of {seeds} seeds)"
    verb = f" reached {target} after" if target else " after"
    unit = "round" if text == "1" else "rounds"
    return (f"{verb} {text} {unit}{part}",)


def _cost(leader: Group, reference: _Standing | None) -> list[Sentence]:
    """Return a sentence on traffic and time."""
    traffic = leader.stat("traffic")
    if traffic is None:
        return []
    name = Name(leader.method)
    if reference is None:
        return [(name, f" sent {number(traffic.mean)} times the model for each client and round.")]
    other = reference.group
    sent = _times(leader, other, "traffic")
    took = _times(leader, other, "seconds_per_client")
    told: list[Sentence] = []
    if sent is not None:
        much = "as much" if sent == "1.00" else f"{sent} times as much"
        told.append((f"sent {much} as ", Name(other.method)))
    if took is not None:
        long = "about as long" if took == "1.00" else f"{took} times as long"
        told.append((f"took {long} to train",))
    if sent is None and took is not None:
        told[-1] += (" as ", Name(other.method))
    return [(name, " ", *join(told), ".")] if told else []


def _times(one: Group, two: Group, figure: str) -> str | None:
    """Return how many times the other's figure it is, as text."""
    first, second = one.stat(figure), two.stat(figure)
    if first is None or second is None or second.mean <= 0:
        return None
    ratio = first.mean / second.mean
    return "1.00" if abs(ratio - 1) < _ALIKE or tied(first, second) else number(ratio)


def _cheapest(status: Status, leader: Group, others: Sequence[_Standing]) -> list[Sentence]:
    """Return a sentence on the method that sends least among those that cannot be told apart."""
    if status not in ("close", "none"):
        return []
    level = [leader, *(o.group for o in others if o.relation in _LEVEL)]
    costs = [(g, s.mean) for g in level if (s := g.stat("traffic")) is not None]
    if len(costs) < 2:
        return []
    least, cost = min(costs, key=lambda pair: pair[1])
    if least is leader or cost > 0.99 * costs[0][1]:
        return []
    return [("Of the methods that cannot be told apart, ", Name(least.method), " sends least.")]


def _left_out(missing: Sequence[_Scored], complete: Sequence[_Scored]) -> list[Sentence]:
    """Return a sentence on the methods that the verdict is not about, for each reason."""
    told: list[Sentence] = []
    for few in (False, True):
        left = [one.group.method for one in missing if (one in complete) is few]
        if left:
            verb, them = ("is", "it") if len(left) == 1 else ("are", "them")
            why = f"fewer than {ENOUGH} seeds" if few else f"not every run of {them} is finished"
            told.append((*names(left), f" {verb} left out of this verdict: {why}."))
    return told
