"""Methods ranked over several experiments, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedkeel.errors import enumeration
from fedkeel.records.comparison import runs_of
from fedkeel.records.paired import LEVEL
from fedkeel.records.ranks import RankTest, rank_test
from fedkeel.report.claims import competing
from fedkeel.report.formatting import quoted
from fedkeel.report.runs import load_runs


def rank_methods(comparisons: Sequence[Path]) -> RankTest:
    """Rank the methods that all comparisons have, each by the mean of its best scores over seeds.

    Scores may differ between comparisons, as only ranks count; baselines do not take part.

    Args:
        comparisons: their folders, one for each experiment.

    Raises:
        RunError: there are fewer than two experiments, or fewer than two methods in all of them.
    """
    tables = []
    for path in comparisons:
        methods = competing([method.summary for method in load_runs(runs_of(path))])
        means = ((m, stat.mean) for m in methods if (stat := m.stat("best")) is not None)
        tables.append({m.method: m.score.sign * mean for m, mean in means})
    first = tables[0] if tables else {}
    names = [name for name in first if all(name in table for table in tables)]
    return rank_test([[table[name] for name in names] for table in tables], names)


def rank_sentence(test: RankTest) -> str:
    """Return what the ranks let a reader claim, in one sentence."""
    over = f"over {test.experiments} experiments"
    friedman = f"Friedman's test {over}, best round: p = {test.p_value:.3g}"
    limit = f"Nemenyi's critical difference: {test.critical_difference:.2f} ranks"
    if not test.separated and test.p_value < LEVEL:
        return (
            f"The methods differ as a whole ({friedman}), but no two of them by as much as one "
            f"has to differ from another ({limit}): the results show no method above another."
        )
    if not test.separated:
        reason = "differences of ranks are within chance"
        return f"The results show no method to rank above another ({friedman}; {limit}): {reason}."
    below: dict[str, list[str]] = {}
    for better, worse in test.separated:
        below.setdefault(better, []).append(quoted(worse))
    texts = [f"{quoted(better)} above {enumeration(worse)}" for better, worse in below.items()]
    return f"What the results show ({friedman}; {limit}): {enumeration(texts)}."
