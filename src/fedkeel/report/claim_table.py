"""The table of differences to the reference: what stands behind the claims."""

from __future__ import annotations

from fedkeel.report.claims import Claim, Claims, margin_text
from fedkeel.report.formatting import MISSING, format_signed

NOTE = (
    "Best scores, method minus reference, seed by seed. The t-interval assumes normal differences; "
    "the bootstrap (BCa) does not, and is too narrow for fewer than about ten seeds. Both are of "
    "one comparison. A p-value below 0.05 shows a difference (paired t-test), or that the method "
    "is alike, which means nearer to the reference than the margin (two one-sided tests); both are "
    "corrected for all comparisons (Holm). Open: neither is shown. More seeds: so many would "
    "probably show a difference."
)
"""What a reader of the table has to know."""


def headings(claims: Claims) -> list[str]:
    """Return the headings of the cells of a claim."""
    first = claims.claims[0]
    unit = f", {points}" if (points := first.score.unit_of_difference) else ""
    alike = "" if first.margin is None else f" (within {margin_text(first)})"
    return [
        f"difference{unit}",
        "95 % interval (t)",
        "95 % interval (bootstrap)",
        "p: it differs",
        f"p: it is alike{alike}",
        "what is shown",
        "more seeds",
    ]


def cells(claim: Claim) -> list[str]:
    """Return the cells of a claim as text."""
    mean = claim.score.scale * claim.difference.stat.mean
    seeds = claim.more_seeds
    return [
        format_signed(mean, 2 if claim.score.is_share else None),
        claim.interval_text(claim.difference.interval) or MISSING,
        claim.interval_text(claim.difference.bootstrap_interval) or MISSING,
        _p_text(claim.p_value),
        _p_text(claim.equivalence_p_value),
        claim.outcome,
        MISSING if seeds is None else f"{seeds:,}",
    ]


def _p_text(p_value: float | None) -> str:
    """Return a p-value as it is shown.

    >>> _p_text(0.01234), _p_text(1e-9), _p_text(None)
    ('0.012', '< 0.001', '–')
    """
    if p_value is None:
        return MISSING
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"
