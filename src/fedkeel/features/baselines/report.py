"""Whether federation is worth it, by the baselines of a comparison, in plain sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedkeel.features.baselines.declaration import CENTRALISED
from fedkeel.records.baselines import LOCAL
from fedkeel.report.claims import Lead, lead_over
from fedkeel.report.client_scores import ClientScores, client_scores
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
    means = [(scores, mean) for method in methods for scores, mean in _mean_over_clients(method)]
    if len(means) < len(methods) or not means:
        return ""
    score = methods[0].record.score
    texts = []
    for scores, mean in means:
        is_own = scores.label != scores.method.label
        models = " (personal models)" if is_own else ""
        texts.append(f"{quoted(scores.method.label)}{models} {score.format(mean)}")
    where = "On the examples that clients hold out, after the last round"
    return f"{where}, the mean over clients is {', '.join(texts)}."


def _mean_over_clients(method: MethodResults) -> list[tuple[ClientScores, float]]:
    """Return the mean over clients and seeds, of personal models where a method has them.

    Of the last round in which they were evaluated; nothing where a run has no such scores.
    """
    *_, scores = [None, *client_scores([method])]  # personal models come last
    has_all = scores is not None and len(scores.runs) == len(method.runs)
    if scores is None or not has_all or any(not r.record.partition.held_out for r in method.runs):
        return []
    return [(scores, statistics.fmean(statistics.fmean(run.values) for run in scores.runs))]


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
