"""What the results let a reader claim: each method against a reference, paired over seeds.

A claim is one of a table: its p-value is corrected for the number of methods that are compared with
the reference (Holm), so the probability that a table makes any false claim is at most 0.05. What
neither differs nor is shown to be alike stays open, with the number of seeds that would decide it.
A difference of accuracies that is smaller than two standard errors of an accuracy on so many test
examples, sqrt(p (1 - p) / n), does not count either: more seeds on the same examples do not help.
The step of a share of n examples, 1 / n, is added to the spread over seeds: equal differences of
coarse scores are no certainty.
With fewer than three seeds in common, or with seeds that repeat one run, nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedkeel.errors import RunError, counted, enumeration
from fedkeel.records.paired import LEVEL, Interval, PairedDifference, holm, paired_difference
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.report.formatting import format_difference, format_signed, quoted
from fedkeel.report.summary import MethodSummary, shared_score

MIN_SEEDS = 3
"""Seeds below which the report makes no claim."""

MARGIN = 0.005
"""Shares that differ by less count as alike, where no other margin is given: 0.5 points."""

Lead = Literal["clear", "within spread", "too few examples", "too few seeds"]
ClaimOutcome = Literal["better", "worse", "alike", "open", "too few examples"]


@dataclass(frozen=True)
class Claim:
    """A method against the reference.

    Args:
        method: the method.
        difference: best scores, method minus reference, seed by seed.
        score: what they are.
        test_examples: that they were measured on, None where that is not known.
        sampling_error: two standard errors of their mean accuracy on so many examples, else 0.
        p_value: that there is no difference, corrected for the number of comparisons.
        comparisons: their number.
        margin: differences below it count as none, in the unit of the records; None for no margin.
        equivalence_p_value: that the difference is not within the margin, corrected.
    """

    method: str
    difference: PairedDifference
    score: MetricInfo
    test_examples: int | None
    sampling_error: float
    p_value: float
    comparisons: int
    margin: float | None
    equivalence_p_value: float | None

    @property
    def lead(self) -> Lead:
        """How certain the better of the two is better."""
        return _certainty(self.difference, self.p_value, self.sampling_error)

    @property
    def is_alike(self) -> bool:
        """Whether the difference is shown to be within the margin."""
        return self.equivalence_p_value is not None and self.equivalence_p_value < LEVEL

    @property
    def outcome(self) -> ClaimOutcome:
        """What the results show of the method."""
        if self.lead == "clear":
            return "better" if self.score.sign * self.difference.stat.mean > 0 else "worse"
        if self.is_alike:
            return "alike"
        return "too few examples" if self.lead == "too few examples" else "open"

    @property
    def more_seeds(self) -> int | None:
        """Further seeds that would show an open difference of this mean and spread; None for none.

        With a power of 0.8, at the level of the first of Holm's steps.
        """
        needed = self.difference.seeds_needed(LEVEL / self.comparisons)
        if self.outcome != "open" or needed is None:
            return None
        return max(1, needed - len(self.difference.values))

    def interval_text(self, interval: Interval | None) -> str:
        """Return an interval as it is shown, in points for a share; "" for none.

        >>> difference = PairedDifference((0.02, 0.03, 0.04))
        >>> claim = Claim("a", difference, ACCURACY, None, 0.0, 0.03, 1, None, None)
        >>> claim.interval_text(difference.interval)
        '[0.52, 5.48]'
        """
        if interval is None:
            return ""
        ends = (self.score.scale * end for end in (interval.low, interval.high))
        texts = (format_signed(end, 2 if self.score.is_share else None) for end in ends)
        return f"[{', '.join(texts)}]"

    def to_json(self) -> dict[str, Any]:
        """Return plain values; shares are in [0, 1]."""
        interval, bootstrap = self.difference.interval, self.difference.bootstrap_interval
        return {
            "claim": self.outcome,
            "seeds": len(self.difference.values),
            "difference": self.difference.stat.mean,
            "low": interval.low if interval else None,
            "high": interval.high if interval else None,
            "bootstrap_low": bootstrap.low if bootstrap else None,
            "bootstrap_high": bootstrap.high if bootstrap else None,
            "p_value": self.p_value,
            "comparisons": self.comparisons,
            "margin": self.margin,
            "equivalence_p_value": self.equivalence_p_value,
            "more_seeds": self.more_seeds,
        }


@dataclass(frozen=True)
class Claims:
    """What may be claimed of a table.

    Args:
        reference: the method that the others are compared with.
        claims: one for each method with enough seeds in common with it.
        undecided: methods with too few.
    """

    reference: str
    claims: tuple[Claim, ...]
    undecided: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return what the results show, in a few sentences."""
        return self.sentence

    def of(self, method: str) -> Claim | None:
        """Return the claim of a method, None where there is none."""
        return next((claim for claim in self.claims if claim.method == method), None)

    @property
    def sentence(self) -> str:
        """What the results show, in a few sentences."""
        reference = quoted(self.reference)
        if not self.claims:
            few = f"fewer than {MIN_SEEDS} different runs with the same seeds"
            return f"Nothing can be said against {reference} yet: there are {few}."
        sentences = [
            *self._differences("better"),
            *self._differences("worse"),
            *self._alike(),
            *self._open(),
            *self._undecided(),
        ]
        first, *others = sentences
        seeds = sorted({len(claim.difference.values) for claim in self.claims})
        over = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seeds"
        corrected = (
            f", corrected for {len(self.claims)} comparisons (Holm)" if len(self.claims) > 1 else ""
        )
        how = f"best round, paired over {over}{corrected}"
        return " ".join([f"Against {reference} ({how}): {first}.", *(f"{s}." for s in others)])

    def _differences(self, outcome: ClaimOutcome) -> list[str]:
        texts = []
        for claim in self._with(outcome):
            size = format_difference(claim.difference.stat.mean, claim.score)
            within = f", less than {margin_text(claim)}" if claim.is_alike else ""
            interval = claim.interval_text(claim.difference.interval)
            texts.append(f"{quoted(claim.method)} is {outcome} by {size} {interval}{within}")
        return [enumeration(texts)] if texts else []

    def _alike(self) -> list[str]:
        claims = self._with("alike")
        if not claims:
            return []
        names = enumeration([quoted(claim.method) for claim in claims])
        verb = "differs" if len(claims) == 1 else "differ"
        return [f"{names} {verb} by less than {margin_text(claims[0])}"]

    def _open(self) -> list[str]:
        texts = []
        for claim in self._with("open"):
            mean, seeds = claim.difference.stat.mean, claim.more_seeds
            side = "lead" if claim.score.sign * mean > 0 else "deficit"
            size = f"{quoted(claim.method)}'s {side} of {format_difference(mean, claim.score)}"
            more = (
                "not even 1,000 seeds" if seeds is None else f"about {counted(seeds, 'more seed')}"
            )
            texts.append((size, f"{more} would show it"))
        shown = []
        if len(texts) == 1:
            shown = [f"Not shown yet: {'; '.join(texts[0])}"]
        elif texts:
            shown = [f"Not shown yet: {enumeration([f'{a} ({b})' for a, b in texts])}"]
        for claim in self._with("too few examples"):
            size = format_difference(claim.difference.stat.mean, claim.score)
            examples = counted(claim.test_examples or 0, "test example")
            shown.append(
                f"{quoted(claim.method)}'s {size} are too small a difference for {examples}"
            )
        return shown

    def _undecided(self) -> list[str]:
        if not self.undecided:
            return []
        names = enumeration([quoted(name) for name in self.undecided])
        have = "has" if len(self.undecided) == 1 else "have"
        return [f"{names} {have} too few seeds in common with {quoted(self.reference)}"]

    def _with(self, outcome: ClaimOutcome) -> list[Claim]:
        """Return the claims of a kind, the largest difference first."""
        claims = [claim for claim in self.claims if claim.outcome == outcome]
        return sorted(claims, key=lambda claim: -abs(claim.difference.stat.mean))


def claims_of(
    methods: Sequence[MethodSummary], reference: str | None = None, margin: float | None = None
) -> Claims | None:
    """Return what may be claimed of methods; baselines are not among them.

    Args:
        methods: the methods.
        reference: label of the one that the others are compared with; None for FedAvg, or the first
            where FedAvg is not among them.
        margin: a smaller difference counts as none, > 0, in points for a share; None for 0.5 points
            of a share, and for no test of equivalence of other scores.

    Returns:
        The claims; None where there is one method, and where scores differ.

    Raises:
        RunError: no method has the label of the reference, or the margin is not above 0.
    """
    _check(methods, reference, margin)
    compared = competing(methods)
    score = shared_score(compared)
    if len(compared) < 2 or score is None:
        return None
    chosen = next((m for m in methods if m.method == reference), None) or _default(compared)
    others = [method for method in compared if method is not chosen]
    limit = MARGIN if score.is_share else None
    if margin is not None:
        limit = margin / score.scale
    pairs = [(m, d) for m in others if (d := _shared_difference(m, chosen)) is not None]
    corrected = holm([d.p_value or 0.0 for _, d in pairs])
    alike: Sequence[float | None] = [None] * len(pairs)
    if limit is not None:
        alike = holm([d.equivalence_p_value(limit) or 0.0 for _, d in pairs])
    claims = tuple(
        Claim(
            method.method,
            difference,
            score,
            method.test_examples,
            _sampling_error(method, chosen),
            p_value,
            len(pairs),
            limit,
            p_alike,
        )
        for (method, difference), p_value, p_alike in zip(pairs, corrected, alike, strict=True)
    )
    with_claim = {claim.method for claim in claims}
    undecided = tuple(m.method for m in others if m.method not in with_claim)
    return Claims(chosen.method, claims, undecided)


def competing(methods: Sequence[MethodSummary]) -> list[MethodSummary]:
    """Return the methods that are compared: with scores, and finished where any are."""
    scored = [m for m in methods if not m.baseline and m.stat("best") is not None]
    return [method for method in scored if not method.unfinished] or scored


def lead_over(leader: MethodSummary, other: MethodSummary, comparisons: int = 1) -> Lead:
    """Return how certain the lead of the method with the better mean is.

    Args:
        leader: it may have been chosen by its score.
        other: the other method.
        comparisons: methods that the leader is compared with; the p-value is multiplied with it.
            This holds for a leader that was chosen by its score too (Hsu, Multiple Comparisons with
            the Best, 1984): a wrong claim says of the truly best method that another is better, and
            there are so many others.
    """
    difference = _shared_difference(leader, other)
    if difference is None:
        return "too few seeds"
    if leader.score.sign * difference.stat.mean <= 0:
        return "within spread"
    p_value = min(1.0, comparisons * (difference.p_value or 0.0))
    return _certainty(difference, p_value, _sampling_error(leader, other))


def _certainty(difference: PairedDifference, p_value: float, sampling_error: float) -> Lead:
    if abs(difference.stat.mean) < sampling_error and (p_value < LEVEL or difference.is_coarse):
        return "too few examples"
    return "within spread" if p_value >= LEVEL else "clear"


def _sampling_error(first: MethodSummary, second: MethodSummary) -> float:
    """Return two standard errors of the mean accuracy of both, on the first's test examples."""
    best, other = first.stat("best"), second.stat("best")
    if first.test_examples is None or first.score != ACCURACY or best is None or other is None:
        return 0.0
    share = min(1.0, max(0.0, (best.mean + other.mean) / 2))
    return 2 * math.sqrt(share * (1 - share) / first.test_examples)


def _shared_difference(first: MethodSummary, second: MethodSummary) -> PairedDifference | None:
    """Return the paired difference of best scores, None where too few seeds are in common."""
    if first.has_identical_runs or second.has_identical_runs:
        return None
    counts = [n for method in (first, second) if (n := method.test_examples)]
    step = first.score.step(min(counts, default=None))
    difference = paired_difference(first.by_seed("best"), second.by_seed("best"), step)
    has_enough = difference is not None and len(difference.values) >= MIN_SEEDS
    return difference if has_enough else None


def _default(methods: Sequence[MethodSummary]) -> MethodSummary:
    fedavg = (m for m in methods if m.method.split(" · ")[0] == "fedavg")
    return next(fedavg, methods[0])


def _check(methods: Sequence[MethodSummary], reference: str | None, margin: float | None) -> None:
    labels = [method.method for method in methods]
    if reference is not None and reference not in labels:
        raise RunError(
            "The reference is not one of the methods.",
            got=reference,
            expected=f"one of {', '.join(labels)}",
        )
    if margin is not None and not 0 < margin < math.inf:
        raise RunError(
            "The margin of equivalence has to be above 0.",
            got=f"{margin:g}",
            do="give the largest difference that does not matter, such as 0.5 points",
        )


def margin_text(claim: Claim) -> str:
    """Return the margin in words.

    >>> difference = PairedDifference((0.0, 0.001, 0.002))
    >>> margin_text(Claim("a", difference, ACCURACY, None, 0.0, 1.0, 1, 0.005, 0.01))
    '0.5 points'
    """
    return format_difference(claim.margin or 0.0, claim.score)
