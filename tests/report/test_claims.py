"""Claims: what differs, what is alike, what stays open, and how many seeds would decide it."""

from __future__ import annotations

import pytest
from scipy import stats

from fedkeel.errors import RunError
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.report.claim_table import cells, headings
from fedkeel.report.claims import claims_of
from fedkeel.report.page import render_report
from fedkeel.report.runs import load_runs
from fedkeel.report.summary import MethodSummary, summarise
from fedkeel.report.tables import result_rows
from fedkeel.report.verdict import verdict

MAE = MetricInfo("mae", False)


def group(
    method: str,
    *bests: float,
    metric: MetricInfo = ACCURACY,
    examples: int = 10_000_000,
    unfinished: int = 0,
) -> MethodSummary:
    """Runs of one evaluated round."""
    runs = [
        summarise(
            [RoundRecord(1, train_loss=b, test=Scores(examples, {metric.name: b, "loss": 1.0}))],
            score=metric,
            model_bytes=100,
        )
        for b in bests
    ]
    return MethodSummary(method, tuple(runs), tuple(range(len(bests))), unfinished)


FEDAVG = group("fedavg", 0.80, 0.81, 0.82, 0.79)
BETTER = group("up", 0.82, 0.831, 0.839, 0.81)
WORSE = group("down", 0.75, 0.76, 0.77, 0.741)
ALIKE = group("same", 0.8005, 0.81, 0.82, 0.7895)
OPEN = group("noisy", 0.84, 0.79, 0.86, 0.78)


def test_the_sentence_says_what_may_be_claimed() -> None:
    claims = claims_of([OPEN, FEDAVG, BETTER, WORSE, ALIKE])
    assert claims is not None
    assert claims.reference == "fedavg"
    outcomes = {claim.method: claim.outcome for claim in claims.claims}
    assert outcomes == {"noisy": "open", "up": "better", "down": "worse", "same": "alike"}
    more = claims.of("noisy").more_seeds
    assert claims.sentence == (
        "Against `fedavg` (best round, paired over 4 seeds, corrected for 4 comparisons (Holm)): "
        "`up` is better by 2.0 points [1.87, 2.13]. `down` is worse by 5.0 points [−5.05, −4.90]. "
        "`same` differs by less than 0.5 points. Not shown yet: `noisy`'s lead of 1.2 points; "
        f"about {more} more seeds would show it."
    )


def test_the_numbers_are_those_of_the_corrected_tests() -> None:
    claims = claims_of([FEDAVG, BETTER, OPEN])
    assert claims is not None
    base = FEDAVG.values("best")
    raw = {m.method: stats.ttest_rel(m.values("best"), base).pvalue for m in (BETTER, OPEN)}
    up, noisy = claims.claims
    assert up.p_value == pytest.approx(2 * raw["up"], rel=1e-9)  # the smaller of two
    assert noisy.p_value == pytest.approx(raw["noisy"], rel=1e-9)
    assert up.comparisons == 2
    needed = noisy.difference.seeds_needed(0.025)
    assert needed is not None
    assert noisy.more_seeds == needed - 4
    assert up.more_seeds is None


def test_a_claim_of_one_comparison_may_not_survive_many() -> None:
    weak = group("weak", 0.81, 0.818, 0.832, 0.808)  # 1, 0.8, 1.2 and 1.8 points: p = 0.012
    alone = claims_of([FEDAVG, weak])
    assert alone is not None
    assert alone.claims[0].outcome == "better"
    others = [group(f"m{i}", 0.84, 0.79, 0.86 + i / 500, 0.78) for i in range(5)]
    many = claims_of([FEDAVG, weak, *others])
    assert many is not None
    assert many.of("weak").outcome == "open"
    assert many.of("weak").p_value == pytest.approx(6 * alone.claims[0].p_value)


def test_a_difference_may_be_certain_and_too_small_to_matter() -> None:
    small = group("small", 0.802, 0.812, 0.822, 0.792)
    claims = claims_of([FEDAVG, small])
    assert claims is not None
    assert "`small` is better by 0.2 points [0.20, 0.20], less than 0.5 points." in claims.sentence
    wide = claims_of([FEDAVG, small], margin=0.1)
    assert wide is not None
    assert wide.claims[0].margin == pytest.approx(0.001)
    assert "less than" not in wide.sentence


def test_lower_is_better_and_no_margin_without_one() -> None:
    base = group("fedavg", 0.50, 0.51, 0.52, metric=MAE)
    good = group("good", 0.40, 0.412, 0.42, metric=MAE)
    same = group("same", 0.501, 0.509, 0.521, metric=MAE)
    claims = claims_of([base, good, same])
    assert claims is not None
    assert [claim.outcome for claim in claims.claims] == ["better", "open"]
    assert claims.claims[1].equivalence_p_value is None
    with_margin = claims_of([base, good, same], margin=0.01)
    assert with_margin is not None
    assert [claim.outcome for claim in with_margin.claims] == ["better", "alike"]


def test_too_few_test_examples_are_no_claim() -> None:
    base = group("fedavg", 0.80, 0.81, 0.82, examples=100)
    better = group("up", 0.82, 0.83, 0.84, examples=100)
    claims = claims_of([base, better])
    assert claims is not None
    assert claims.claims[0].outcome == "too few examples"
    assert claims.sentence.endswith(
        ": `up`'s 2.0 points are too small a difference for 100 test examples."
    )


def test_too_few_seeds_claim_nothing() -> None:
    two = [group("fedavg", 0.8, 0.81), group("up", 0.9, 0.91)]
    claims = claims_of(two)
    assert claims is not None
    assert claims.sentence == (
        "Nothing can be said against `fedavg` yet: there are fewer than 3 different runs with the "
        "same seeds."
    )
    same = MethodSummary("same", group("same", 0.9).runs * 4, (0, 1, 2, 3))
    claims = claims_of([FEDAVG, BETTER, group("new", 0.9), same])
    assert claims is not None
    assert claims.undecided == ("new", "same")
    assert claims.sentence.endswith(" `new` and `same` have too few seeds in common with `fedavg`.")
    assert len(claims.claims) == 1


def test_what_is_not_compared() -> None:
    assert claims_of([FEDAVG]) is None
    assert claims_of([FEDAVG, group("mae", 0.1, 0.2, 0.3, metric=MAE)]) is None
    claims = claims_of([FEDAVG, BETTER, group("local", 0.1, 0.11, 0.12), group("centralised", 0.9)])
    assert claims is not None
    assert [claim.method for claim in claims.claims] == ["up"]
    claims = claims_of([FEDAVG, BETTER, group("half", 0.1, 0.2, 0.3, unfinished=1)])
    assert claims is not None
    assert [claim.method for claim in claims.claims] == ["up"]


def test_the_reference_is_chosen() -> None:
    claims = claims_of([FEDAVG, BETTER], reference="up")
    assert claims is not None
    assert claims.claims[0].method == "fedavg"
    assert claims.claims[0].outcome == "worse"
    first = claims_of([BETTER, WORSE])
    assert first is not None
    assert first.reference == "up"
    with pytest.raises(RunError, match="not one of the methods"):
        claims_of([FEDAVG, BETTER], reference="fedprox")
    with pytest.raises(RunError, match="above 0"):
        claims_of([FEDAVG, BETTER], margin=0.0)


def test_the_verdict_says_the_same_as_the_claims() -> None:
    for others in ([BETTER], [OPEN], [BETTER, OPEN, WORSE], [WORSE, ALIKE]):
        methods = [FEDAVG, *others]
        claims = claims_of(methods)
        assert claims is not None
        result = verdict(methods, claims)
        leader = max(methods, key=lambda m: sum(m.values("best")))
        claim = claims.of(leader.method) if leader is not FEDAVG else None
        if claim is not None:
            is_uncertain = "over `fedavg` is within" in result.headline
            assert is_uncertain == (claim.lead == "within spread")


def test_rows_and_table_hold_the_numbers() -> None:
    methods = [FEDAVG, BETTER, OPEN]
    claims = claims_of(methods)
    assert claims is not None
    base, up, _ = (row.to_json()["claim"] for row in result_rows(methods, claims))
    assert base is None
    assert up["claim"] == "better"
    assert up["seeds"] == 4
    assert up["difference"] == pytest.approx(0.02)
    assert up["low"] < up["bootstrap_low"] < 0.02 < up["bootstrap_high"] < up["high"]
    assert headings(claims)[0] == "difference, points"
    assert headings(claims)[3:6] == [
        "p: it differs",
        "p: it is alike (within 0.5 points)",
        "what is shown",
    ]
    shown = cells(claims.claims[0])
    assert shown[:2] == ["2.00", "[1.87, 2.13]"]
    assert shown[5:] == ["better", "–"]


def test_the_page_shows_them(make, tmp_path) -> None:
    folders = make.comparison(tmp_path, {"fedavg": {"top": 0.8}, "fedgc": {"top": 0.9}}, seeds=4)
    html = render_report(load_runs(folders))
    assert 'Against <span class="name">fedavg</span> (best round' in html
    assert "Differences to fedavg" in html
    assert "<td>better</td>" in html
