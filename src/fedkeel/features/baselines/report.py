"""Whether federation is worth it, by the baselines of a comparison, in plain sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from fedkeel.features.baselines.declaration import CENTRALISED
from fedkeel.records.baselines import LOCAL
from fedkeel.report.claims import Lead, lead_over
from fedkeel.report.client_scores import client_scores
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

_TRAINED_ON = (
    "Is federation worth it? These numbers cannot tell: clients are measured on the examples that "
    "they are trained on, where each client alone is best. Set partition.holdout, in Python "
    "holdout=0.25 of fedkeel.from_clients."
)


class BaselinesReport(FeatureReport):
    """Whether federation is worth it, where a comparison has a baseline."""

    @classmethod
    def notes(cls, methods: Sequence[MethodResults]) -> list[str]:
        """Return what the baselines show: on what clients hold out, or else as the table has it.

        Where the table points the other way, a second sentence says why.
        """
        of_table = [method.summary for method in methods]
        own = [scores for method in methods if (scores := _on_own_examples(method))]
        if len(own) < len(methods):
            answer = federation_gain(of_table)
            is_own = methods[0].record.judges == "personal"
            if answer and is_own and not all(map(_holds_out, methods)):
                answer = _TRAINED_ON
            return list(filter(None, [answer]))
        answer = federation_gain(own, is_own=True)
        return list(filter(None, [answer, _opposite_of(of_table, own) if answer else ""]))


def _holds_out(method: MethodResults) -> bool:
    return all(run.record.partition.held_out for run in method.runs)


def _on_own_examples(method: MethodResults) -> MethodSummary | None:
    """Return a summary whose score is the mean over clients, on the examples that they hold out.

    Each client counts the same, with its personal model where it has one, after the last round in
    which they were evaluated. None where a run lacks such scores or holds nothing out: on examples
    that it is trained on, each client alone is best.
    """
    *_, scores = [None, *client_scores([method])]  # personal models come last
    if scores is None or len(scores.runs) < len(method.runs) or not _holds_out(method):
        return None
    runs = tuple(
        replace(run, best=statistics.fmean(own.values), examples=own.examples, judges="personal")
        for run, own in zip(method.summary.runs, scores.runs, strict=True)
    )
    return replace(method.summary, method=scores.label, runs=runs)


def federation_gain(methods: Sequence[MethodSummary], *, is_own: bool = False) -> str:
    """Return whether the best federated method gains over clients that train alone.

    "" where there is no baseline to compare with, or nothing has been evaluated.

    Args:
        methods: the methods, compared by their best scores.
        is_own: whether these are means over clients, as no table has them.
    """
    best, baselines = _best_and_baselines(methods)
    if best is None or not baselines:
        return ""
    federated = [method for method in methods if method.stat("best") and not method.baseline]
    texts = [f"{quoted(best.method)} {'' if is_own else 'reached '}{_score(best)}"]
    for name, what in ((LOCAL, "each client alone"), (CENTRALISED, "all examples in one place")):
        if name in baselines:
            texts.append(f"{quoted(baselines[name].method)} ({what}) {_score(baselines[name])}")
    where = "In the best round,"
    if is_own:
        where = "On the examples that clients hold out, after the last round, the mean over clients"
        where += " is"
        texts += [f"{quoted(m.method)} {_score(m)}" for m in federated if m is not best]
    conclusion = _conclusion(best, baselines.get(LOCAL), len(federated))
    return f"Is federation worth it? {where} {', '.join(texts)}. {conclusion}".rstrip()


def _best_and_baselines(
    methods: Sequence[MethodSummary],
) -> tuple[MethodSummary | None, dict[str, MethodSummary]]:
    """Return the best federated method, None for none, and the baselines by name.

    Nothing where the methods are judged by different scores.
    """
    scored = [method for method in methods if method.stat("best") is not None]
    if shared_score(scored) is None:
        return None, {}
    best = None
    for method in scored:
        if not method.baseline:
            best = method if best is None or _is_better(method, best) else best
    return best, {method.baseline: method for method in scored if method.baseline}


def _opposite_of(table: Sequence[MethodSummary], own: Sequence[MethodSummary]) -> str:
    """Return why the table points the other way than the clients' own examples, "" if it does not.

    Only methods that the table judges as `local` count.
    """
    judged_by = next((method.judged_by for method in table if method.baseline == LOCAL), "")
    alike = [method for method in table if method.judged_by == judged_by]
    (best, of_table), (best_own, of_own) = map(_best_and_baselines, (alike, own))
    local, local_own = of_table.get(LOCAL), of_own.get(LOCAL)
    if best is None or best_own is None or local is None or local_own is None:
        return ""
    if _is_better(best, local) == _is_better(best_own, local_own):
        return ""
    why = (
        "it counts all clients' examples together, so large clients count more"
        if local.judges == "personal"
        else f"it scores each model of {quoted(local.method)} on the whole test set, not only on "
        "its client's own examples"
    )
    return (
        f"The table points the other way: in the best round, {quoted(best.method)} reached "
        f"{_score(best)}, {quoted(local.method)} {_score(local)}; {why}."
    )


def _conclusion(best: MethodSummary, local: MethodSummary | None, comparisons: int) -> str:
    if local is None:
        return ""
    gains = _is_better(best, local)
    lead = lead_over(*((best, local) if gains else (local, best)), comparisons)
    if doubt := _DOUBTS.get(lead):
        pair = f"{quoted(best.method)} and {quoted(local.method)}"
        return f"The difference between {pair} {doubt}, so it shows nothing."
    where = "the clients' own examples" if best.judges == "personal" else "the common test set"
    return f"So federation {'gains' if gains else 'loses'} on {where}."


def _mean(method: MethodSummary) -> float:
    stat = method.stat("best")
    return stat.mean if stat else float("nan")


def _is_better(method: MethodSummary, other: MethodSummary) -> bool:
    return method.runs[0].score.is_better(_mean(method), _mean(other))


def _score(method: MethodSummary) -> str:
    return method.runs[0].score.format(_mean(method))
