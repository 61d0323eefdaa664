"""Whether federation is worth it, by the baselines of a comparison, in plain sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedkeel.features.baselines.declaration import CENTRALISED
from fedkeel.records.baselines import LOCAL
from fedkeel.report.claims import Lead, lead_over
from fedkeel.report.feature_report import FeatureReport
from fedkeel.report.formatting import quoted
from fedkeel.report.runs import MethodResults
from fedkeel.report.summary import MethodSummary, shared_score

_DOUBTS: dict[Lead, str] = {
    "within spread": "is within the chance of seeds",
    "too few examples": "is too small for so few test examples",
    "too few seeds": "is of too few seeds",
}
"""What is said of a difference that shows nothing."""


class BaselinesReport(FeatureReport):
    """Whether federation is worth it, where a comparison has a baseline."""

    @classmethod
    def notes(cls, methods: Sequence[MethodResults]) -> list[str]:
        """Return what the baselines show: on the test set, and on what the clients hold out."""
        gain = federation_gain([method.summary for method in methods])
        return list(filter(None, [gain, _on_own_examples(methods) if gain else ""]))


def _on_own_examples(methods: Sequence[MethodResults]) -> str:
    """Return a sentence on the mean over clients, on the examples that they hold out.

    "" where some hold out none: on examples that it is trained on, each client alone is best.
    """
    if methods[0].record.judges == "personal":
        return ""  # the table of clients says it
    means = {
        method.label: mean for method in methods if (mean := _mean_over_clients(method)) is not None
    }
    if len(means) < len(methods) or not means:
        return ""
    score = methods[0].record.score
    texts = [f"{quoted(label)} {score.format(mean)}" for label, mean in means.items()]
    return f"On the examples that clients hold out, the mean over clients is {', '.join(texts)}."


def _mean_over_clients(method: MethodResults) -> float | None:
    """Return the mean over clients and seeds in the last round in which they were evaluated."""
    values: list[float] = []
    for run in method.runs:
        columns = next((row.per_client for row in reversed(run.rows) if row.per_client), None)
        if columns is None or not run.record.partition.held_out:
            return None
        pairs = zip(columns["examples"], columns.get(run.record.score.name, ()), strict=False)
        known = [value for count, value in pairs if count and value is not None]
        if not known:
            return None
        values.append(statistics.fmean(known))
    return statistics.fmean(values) if values else None


def federation_gain(methods: Sequence[MethodSummary]) -> str:
    """Return whether the best federated method gains over clients that train alone.

    It compares the best scores, as the table does; "" where there is no baseline to compare with,
    or nothing has been evaluated.
    """
    scored = [method for method in methods if method.stat("best") is not None]
    if shared_score(scored) is None:
        return ""
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
    numbers = f"Is federation worth it? In the best round, {', '.join(texts)}."
    return " ".join(
        filter(None, [numbers, _conclusion(best, baselines.get(LOCAL), len(federated))])
    )


def _conclusion(best: MethodSummary, local: MethodSummary | None, comparisons: int) -> str:
    if local is None:
        return ""
    gains = _is_better(best, local)
    lead = lead_over(*((best, local) if gains else (local, best)), comparisons)
    if doubt := _DOUBTS.get(lead):
        return f"The difference to {quoted(local.method)} {doubt}, so it shows nothing."
    where = "the clients' own examples" if best.judges == "personal" else "the common test set"
    return f"So federation {'gains' if gains else 'loses'} on {where}."


def _mean(method: MethodSummary) -> float:
    stat = method.stat("best")
    return stat.mean if stat else float("nan")


def _is_better(method: MethodSummary, other: MethodSummary) -> bool:
    return method.runs[0].score.is_better(_mean(method), _mean(other))


def _score(method: MethodSummary) -> str:
    return method.runs[0].score.format(_mean(method))
