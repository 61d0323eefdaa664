"""Tables, verdict and page are right for a score of any name, direction and unit."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedkeel.errors import RunError
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.score import ACCURACY, MetricInfo, TaskRecord
from fedkeel.records.statistics import Stat
from fedkeel.report.alerts import differences, problems
from fedkeel.report.claims import claims_of
from fedkeel.report.client_scores import client_score_chart, client_scores
from fedkeel.report.columns import all_columns
from fedkeel.report.formatting import format_score
from fedkeel.report.learning_curves import curve_charts
from fedkeel.report.page import render_report
from fedkeel.report.page_content import common_settings, metric_columns, rounds_to_shares, tiles
from fedkeel.report.runs import load_runs
from fedkeel.report.sparklines import score_axis
from fedkeel.report.summary import MethodSummary, shared_score, summarise
from fedkeel.report.tables import result_rows, result_table, terminal_table
from fedkeel.report.verdict import lead_over, verdict
from fedkeel.study.tuning_result import TunedMethod
from fedkeel.study.tuning_table import cells, footnotes, tuning_table

LOSS = MetricInfo("loss", False)
MAE, AUROC = MetricInfo("mae", False), MetricInfo("auroc", True, "%")
REGRESSION = TaskRecord("mse", [MAE, MetricInfo("r2"), LOSS], "mae")
BINARY = TaskRecord("bce", [AUROC, ACCURACY, LOSS], "auroc")


def group(method, score, *bests, end=None, target=None, examples=100_000, loss=""):
    """Runs of two rounds: the best score, then the one at the end."""
    runs = []
    for seed, best in enumerate(bests):
        rows = [
            RoundRecord(
                i + 1,
                clients=[0],
                train_loss=1.0 + seed / 8 + best,
                bytes_down={"model": 100},
                bytes_up={"model": 100},
                test=Scores(examples, {score.name: value, "loss": value}),
            )
            for i, value in enumerate((best, best if end is None else end))
        ]
        runs.append(summarise(rows, target, score=score, loss=loss, model_bytes=100))
    return MethodSummary(method, tuple(runs), tuple(range(len(bests))))


def conclusion(*groups):
    result = verdict(groups)
    return result.status, result.headline.replace("`", "")


def details_of(*groups):
    return " ".join(verdict(groups).details).replace("`", "")


FEDAVG = group("fedavg", MAE, 0.50, 0.51, 0.52, target=0.45)
FEDGC = group("fedgc", MAE, 0.40, 0.41, 0.42, target=0.45)


def test_the_lowest_error_leads_and_the_gap_has_its_own_unit():
    status, headline = conclusion(FEDAVG, FEDGC)
    assert status == "clear"
    assert headline == (
        "fedgc reached MAE 0.4100 ± 0.0100 (best round, 3 seeds; lower is better), "
        "0.100 below fedavg."
    )
    assert "fedgc reached MAE 0.45 after 1 ± 0 rounds, fedavg never did." in details_of(
        FEDAVG, FEDGC
    )


def test_a_share_that_is_no_accuracy_says_its_name():
    low, high = group("fedavg", AUROC, 0.80, 0.81, 0.82), group("a", AUROC, 0.90, 0.91, 0.92)
    assert conclusion(low, high)[1] == (
        "a reached AUROC 91.0 ± 1.0 % (best round, 3 seeds), 10.0 points above fedavg."
    )


def test_a_low_error_that_is_worse_on_one_seed_is_no_lead():
    every = group("fedgc", MAE, 0.495, 0.505, 0.515)
    assert lead_over(every, FEDAVG) == "clear"
    assert lead_over(group("x", MAE, 0.49, 0.52, 0.51), FEDAVG) == "within spread"
    status, headline = conclusion(FEDAVG, group("x", MAE, 0.49, 0.52, 0.51))
    assert status == "none"
    assert headline == (
        "No clear winner: x has the lowest mean MAE, 0.5067 ± 0.0153 (best round, 3 seeds; lower "
        "is better). Its lead over fedavg is within the chance of seeds."
    )


def test_two_standard_errors_are_known_of_an_accuracy_alone():
    for score, lead in ((ACCURACY, "too few examples"), (AUROC, "clear")):
        few = [group(m, score, *[a] * 3, examples=100) for m, a in (("a", 0.80), ("b", 0.85))]
        assert lead_over(few[1], few[0]) == lead


def test_another_leader_at_the_end_by_direction():
    peak = group("peak", MAE, 0.10, 0.11, 0.12, end=0.60)
    steady = group("steady", MAE, 0.25, 0.25, 0.25)
    assert "steady is ahead: 0.2500 ± 0.0000 against 0.3550" not in details_of(peak, steady)
    assert "(mean of the last ten evaluations) steady is ahead: 0.2500 against 0.3550." in (
        details_of(peak, steady)
    )


def test_tiny_errors_are_not_level():
    near = group("fedavg", MAE, 2e-9, 2.1e-9, 2.2e-9), group("b", MAE, 1e-9, 1.1e-9, 1.2e-9)
    assert conclusion(*near)[0] == "clear"
    assert "level with" not in conclusion(*near)[1]
    assert "1.100e-09 ± 1.0e-10" in conclusion(*near)[1]


@pytest.mark.parametrize(
    ("one", "other", "scores"),
    [
        (FEDGC, group("acc", ACCURACY, 0.9, 0.9, 0.9), "`fedgc` by MAE; `acc` by accuracy"),
        (
            group("a", LOSS, 0.1, loss="mse"),
            group("b", LOSS, 0.2, loss="huber"),
            "`a` by loss (mse); `b` by loss (huber)",
        ),
    ],
)
def test_methods_with_different_scores_are_not_ranked(one, other, scores):
    result = verdict([one, other])
    assert result.status == "apart"
    assert result.headline == (
        f"The methods are judged by different scores, so they are not ranked: {scores}."
    )
    rows = result_rows([one, other])
    assert all(row.gap is None for row in rows)
    assert not {"best", "last", "last_mean", "rounds_to_target"} & {
        name for row in rows for name in row.marked
    }
    assert shared_score([one, other]) is None
    assert score_axis([one, other]) is None
    text = result_table(rows).markdown()
    assert text.startswith("| method | best |")
    assert "Score: the methods are judged by different ones, so they are not ranked." in text
    assert one.judged_by in text
    assert other.judged_by in text
    same = replace(one, method="b")
    assert shared_score([one, same]) == one.score


def test_the_lowest_error_is_bold_and_columns_say_what_they_hold():
    rows = result_rows([FEDAVG, FEDGC])
    assert ["best" in row.marked for row in rows] == [False, True]
    assert rows[1].gap is None
    assert rows[0].gap.mean == pytest.approx(0.1)
    lines = result_table(rows).markdown().splitlines()
    assert lines[0].startswith("| method | best MAE | last MAE | to target rounds |")
    assert lines[3].startswith("| `fedgc` | **0.4100 ± 0.0100** |")
    assert "Best: the lowest test MAE of any round. The test data choose that round" in (
        result_table(rows).markdown()
    )
    assert "Rounds to 0.45 test MAE" in result_table(rows).markdown()
    out = io.StringIO()
    Console(file=out, width=100, no_color=True).print(terminal_table(rows, 100))
    assert out.getvalue().splitlines()[2].split()[1:3] == ["MAE", "MAE"]
    assert [row.to_json()["score"] for row in rows] == ["mae", "mae"]
    assert json.loads(json.dumps(rows[0].to_json()))["best"] == pytest.approx(0.51)
    described = {column.name: column.description for column in all_columns(AUROC)}
    assert described["best"] == "Highest test AUROC of any round."
    assert [column.unit for column in all_columns(AUROC)][:3] == ["AUROC, %", "points", "AUROC, %"]


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (12345.6, 12.3, "12,346 ± 12"),
        (123.456, 1.0, "123.5 ± 1.0"),
        (0.0012, 0.3, "0.0012 ± 0.3000"),
        (-0.5, None, "−0.5000"),
        (1e20, 1e19, "1.000e+20 ± 1.0e+19"),
        (0.0, 0.0, "0 ± 0"),
    ],
)
def test_plain_scores_have_about_four_digits(mean, std, text):
    assert format_score(Stat(mean, std, 3, 0, 0), MAE) == text


def test_the_settings_are_chosen_by_the_score():
    best = {"chosen": {}, "spread": 0.02, "seeds": 3, "trials": 4, "offered": 4, "failed": 0}
    row = TunedMethod("fedavg", value=0.4321, edge={}, on="test", metric="last", score=MAE, **best)
    assert cells(row)[1] == "0.4321 ± 0.0200"
    assert "so these scores are too low" in str(footnotes([row], None)[0])
    assert "the MAE after the last round; mean" in str(footnotes([row], None)[1])
    assert tuning_table([row]).headings[1] == "last\nMAE"


# ---- pages --------------------------------------------------------------------------------------


def errors(row):
    """The row of a regression whose error falls as the accuracy of the original rises."""

    def measured(test):
        error = 1 - test["accuracy"]
        return Scores(test.examples, {"mae": error, "r2": 1 - error**2, "loss": error**2})

    columns = row.per_client
    if columns is not None:
        falls = [None if value is None else 1 - value for value in columns["accuracy"]]
        columns = {"examples": columns["examples"], "mae": falls, "loss": columns["loss"]}
    return replace(
        row,
        test=None if row.test is None else measured(row.test),
        sources={name: measured(test) for name, test in row.sources.items()},
        per_client=columns,
    )


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    monkeypatch.setattr("fedkeel.report.html.get_plotlyjs", lambda: "/* plotly */")


def regression(make, root: Path, methods=("fedavg", "fedgc"), *, task=REGRESSION, **own):
    folders = []
    for place, method in enumerate(methods):
        for seed in range(3):
            record = make.record(method, seed, task=task, target=0.3)
            rows = make.rows(seed, top=0.8 + 0.1 * place, **own)
            folders.append(make.save(root, record, [errors(row) for row in rows]))
    return folders


def test_a_page_of_a_regression_never_says_accuracy(make, tmp_path):
    folders = regression(make, tmp_path, per_client=True, sources=("north", "south"), clients=24)
    html = render_report(load_runs(folders))
    body = html.split("<body>")[1]
    assert "accuracy" not in body.lower()
    for text in (
        "Best test MAE, lower is better.",
        "MAE on the test set",
        "MAE of single clients",
        "MAE by source of the test data, last evaluation<",
        "change between evaluations, MAE",
        "steepest rise",
        "the differences seed by seed are beyond chance",
        "The lowest test MAE of any round.",
    ):
        assert text in body, text
    for text in ("points", "rounds to a share", "two standard errors"):
        assert text not in body.split("What the numbers mean")[0], text
    assert "figure-score_rounds" in html
    assert "figure-loss_rounds" in html


def test_worst_clients_have_the_highest_error(make, tmp_path):
    methods = load_runs(regression(make, tmp_path, rounds=12, per_client=True))
    clients = client_scores(methods)[0]
    values = sorted(clients.values)
    assert clients.spread.worst_tenth == pytest.approx(sum(values[-2:]) / 2)  # a tenth of 27
    assert clients.spread.best_tenth == pytest.approx(sum(values[:2]) / 2)
    chart = client_score_chart(client_scores(methods))
    assert "%" not in chart.description
    assert chart.figure.layout.xaxis.title.text == "MAE on a client's own examples"
    assert chart.figure.data[0].median[0] == pytest.approx(sorted(values)[13], rel=1e-5)


def test_tiles_and_settings_of_one_regression(make, tmp_path):
    rows = [errors(row) for row in make.rows(rounds=20)]
    methods = load_runs([make.save(tmp_path, make.record(task=REGRESSION, target=0.3), rows)])
    shown = {tile.name: tile.value for tile in tiles(methods[0])}
    lowest = min(row.test["mae"] for row in rows)
    assert shown["Best MAE"] == f"{lowest:.4f}"
    assert shown["Rounds to 0.3"] == str(next(r.round for r in rows if r.test["mae"] <= 0.3))
    facts = {fact.name: fact.value for fact in common_settings(methods)}
    assert facts["target MAE"] == "0.3000"
    assert (facts["loss"], facts["score"], facts["metrics"]) == ("mse", "MAE", "MAE, R², loss")


def test_shares_of_the_best_are_of_a_share_that_grows(make, tmp_path):
    errors_alone = load_runs(regression(make, tmp_path, ["fedavg"], rounds=5))
    assert rounds_to_shares(errors_alone) == []
    plain = load_runs([make.save(tmp_path / "a", make.record(), make.rows(rounds=5))])
    assert len(rounds_to_shares(plain)) == 1


@pytest.mark.parametrize(("level", "is_reported"), [(0.9, True), (0.87, False), (1.2, True)])
def test_an_error_that_does_not_fall_is_reported(make, tmp_path, level, is_reported):
    tests = [Scores(100, {"mae": 0.9 if r == 0 else level, "loss": 1.0}) for r in range(7)]
    rows = [RoundRecord(r, test=test) for r, test in enumerate(tests)]
    record = make.record(task=REGRESSION, rounds=6)
    text = " ".join(problems(load_runs([make.save(tmp_path, record, rows)])))
    sentence = (
        f"the test MAE hardly improved in 6 rounds. Its best is {level:#.4g}; that of the "
        "untrained model is 0.9000."
    )
    assert (sentence in text) is is_reported


def test_runs_with_different_tasks_are_told_apart(make, tmp_path):
    other = TaskRecord("huber", [*REGRESSION.metrics], "r2")
    folders = [
        *regression(make, tmp_path / "a", ["fedavg"], rounds=3),
        *regression(make, tmp_path / "b", ["fedgc"], task=other, rounds=3),
    ]
    methods = load_runs(folders)
    said = differences(methods)
    assert "The methods differ in loss: mse (fedavg); huber (fedgc)." in said
    assert "The methods differ in score: MAE (fedavg); R² (fedgc)." in said
    html = render_report(methods)
    assert "Not ranked" in html
    assert "are not ranked: <" in html
    assert "clear lead" not in html
    one_method = load_runs(
        [
            *regression(make, tmp_path / "c", ["fedavg"], rounds=3)[:1],
            make.save(
                tmp_path / "d",
                replace(make.record("fedavg", 0, task=other), key="other"),
                [errors(row) for row in make.rows(rounds=3)],
            ),
        ]
    )
    assert [method.label for method in one_method] == [
        "fedavg · loss mse · score MAE",
        "fedavg · loss huber · score R²",
    ]


def test_a_target_is_in_the_range_of_its_score(make, tmp_path):
    folder = make.save(tmp_path / "a", make.record(), make.rows(rounds=2))
    errors_alone = regression(make, tmp_path / "b", ["fedavg"], rounds=2)
    assert load_runs(errors_alone, 12.5)[0].summary.target == 12.5
    for target in (85, float("nan")):
        with pytest.raises(RunError, match="The target is not a value of accuracy"):
            load_runs([folder], target)


def test_small_errors_keep_their_digits_in_a_chart(make, tmp_path):
    tests = [Scores(100, {"mae": 4e-4 / (r + 1), "loss": 1.0}) for r in range(3)]
    rows = [RoundRecord(r, test=test) for r, test in enumerate(tests)]
    methods = load_runs([make.save(tmp_path, make.record(task=REGRESSION), rows)])
    (line,) = curve_charts(methods, MAE, 1e-4)["rounds"].figure.data
    assert line.hovertemplate.startswith("%{y:.7f}%{customdata}")
    texts = [
        note.text for note in curve_charts(methods, MAE, 1e-4)["rounds"].figure.layout.annotations
    ]
    assert texts == ["target 0.0001"]


def test_an_axis_of_small_errors():
    tiny = [group("a", MAE, 2.1e-5, 2.3e-5), group("b", MAE, 1.9e-5)]
    axis = score_axis(tiny)
    assert [axis.label(tick) for tick in axis.ticks] == [
        "0.000019", "0.000020", "0.000021", "0.000022", "0.000023",
    ]  # fmt: skip
    assert 2 <= axis.position(1.9e-5) < axis.position(2.3e-5) <= 98


# ---- further metrics ----------------------------------------------------------------------------


def test_all_metrics_at_the_end_are_in_a_table(make, tmp_path):
    methods = load_runs(regression(make, tmp_path, rounds=4))
    columns = metric_columns(methods)
    assert [column.metric.label for column in columns] == ["MAE", "R²", "loss"]
    last = [run.rows[-1].test["r2"] for run in methods[1].runs]
    assert columns[1].stats[1] == Stat.of(last)
    text = render_report(methods)
    assert "All metrics at the last evaluation" in text
    assert f"<td>{format_score(Stat.of(last), MetricInfo('r2'))}</td>" in text
    assert "Higher is better for R², lower for MAE and loss." in text


def test_a_metric_that_is_not_defined_stays_in_the_table_and_one_alone_makes_none(make, tmp_path):
    gone = [
        replace(row, test=Scores(10, {"mae": 0.5, "r2": float("nan"), "loss": 1.0}))
        for row in make.rows(rounds=2)
    ]
    methods = load_runs([make.save(tmp_path / "a", make.record(task=REGRESSION), gone)])
    assert [column.metric.name for column in metric_columns(methods)] == ["mae", "r2", "loss"]
    page = render_report(methods)
    assert page.count("<td>–</td>") >= 1
    assert "R² has no number where the table has –" in page
    alone = make.record(task=TaskRecord("mse", [LOSS], "loss"))
    methods = load_runs([make.save(tmp_path / "b", alone, gone)])
    assert metric_columns(methods) == []
    untrained = load_runs([make.save(tmp_path / "c", make.record(), make.rows(rounds=0))])
    assert metric_columns(untrained) == []


def test_every_further_metric_has_curves(make, tmp_path):
    html = render_report(load_runs(regression(make, tmp_path, ["fedavg"], rounds=4)))
    figures = dict(re.findall(r'id="figure-(\w+_rounds)">(.*?)</script>', html, re.S))
    assert set(figures) == {"score_rounds", "metric0_rounds", "loss_rounds"}
    titles = {n: json.loads(f)["layout"]["yaxis"]["title"]["text"] for n, f in figures.items()}
    assert titles == {
        "score_rounds": "test MAE",
        "metric0_rounds": "test R²",
        "loss_rounds": "test loss",
    }
    assert "<summary><h3>R²</h3></summary>" in html


def test_a_unit_that_is_no_share_stands_after_values_and_differences():
    distance = MetricInfo("distance", False, "mm")
    groups = [group("fedavg", distance, 4.1, 4.2, 4.3), group("near", distance, 3.1, 3.2, 3.3)]
    assert conclusion(*groups)[1] == (
        "near reached distance 3.200 ± 0.100 mm (best round, 3 seeds; lower is better), "
        "1.00 mm below fedavg."
    )
    assert [column.unit for column in all_columns(distance)][:2] == ["distance, mm"] * 2
    assert distance.scale == 1
    few = [group(g.method, distance, *g.values("best"), examples=10) for g in groups]
    found = claims_of(few)
    assert found is not None  # a length has no step of 1 / 10
    assert [claim.difference.resolution for claim in found.claims] == [0.0]
