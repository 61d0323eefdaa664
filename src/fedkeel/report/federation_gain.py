"""Whether federation is worth it, by the baselines of a comparison, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fedkeel.records.baselines import CENTRALISED, LOCAL
from fedkeel.report.formatting import quoted
from fedkeel.report.summary import MethodSummary
from fedkeel.report.verdict import Lead, lead_over

_DOUBTS: dict[Lead, str] = {
    "within spread": "is smaller than the spread between seeds",
    "too few examples": "is too small for so few test examples",
    "too few seeds": "is of too few seeds",
}
"""What is said of a difference that shows nothing."""


def federation_gain(methods: Sequence[MethodSummary]) -> str:
    """Return whether the best federated method gains over clients that train alone.

    It compares the best scores, as the table does; "" where there is no baseline to compare with,
    or nothing has been evaluated.
    """
    scored = [method for method in methods if method.stat("best") is not None]
    federated = [method for method in scored if not method.baseline]
    baselines = {method.baseline: method for method in scored if method.baseline}
    if not federated or not baselines:
        return ""
    best = federated[0]
    for method in federated[1:]:
        best = method if _is_better(method, best) else best
    texts = [f"{quoted(best.method)} reached {_score(best)}"]
    for name, what in ((LOCAL, "each client alone"), (CENTRALISED, "all examples in one place")):
        if name in baselines:
            texts.append(f"{quoted(baselines[name].method)} ({what}) {_score(baselines[name])}")
    numbers = f"Is federation worth it? {', '.join(texts)}."
    return " ".join(filter(None, [numbers, _conclusion(best, baselines.get(LOCAL))]))


def _conclusion(best: MethodSummary, local: MethodSummary | None) -> str:
    if local is None:
        return ""
    gains = _is_better(best, local)
    lead = lead_over(best, local) if gains else lead_over(local, best)
    if doubt := _DOUBTS.get(lead):
        return f"The difference to {quoted(local.method)} {doubt}, so it shows nothing."
    return "So clients gain by federation." if gains else "So clients lose by federation."


def _mean(method: MethodSummary) -> float:
    stat = method.stat("best")
    return stat.mean if stat else float("nan")


def _is_better(method: MethodSummary, other: MethodSummary) -> bool:
    return method.runs[0].score.is_better(_mean(method), _mean(other))


def _score(method: MethodSummary) -> str:
    return method.runs[0].score.format(_mean(method))
