"""Whether federation is worth it: what the baselines show, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedkeel.features.baselines.report import BaselinesReport, federation_gain
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.score import MetricInfo
from fedkeel.report.page import render_report
from fedkeel.report.runs import MethodResults, RunResults
from fedkeel.report.summary import MethodSummary, summarise
from fedkeel.report.tables import result_rows, result_table
from fedkeel.report.verdict import verdict


def group(
    method: str, *bests: float, metric: MetricInfo | None = None, examples: int = 100_000
) -> MethodSummary:
    """Runs of one evaluated round; a baseline sends nothing."""
    metric = metric or MetricInfo("accuracy", unit="%")
    sent = {} if method in ("local", "centralised") else {"model": 100}
    runs = [
        summarise(
            [
                RoundRecord(
                    1,
                    clients=[0],
                    bytes_down=sent,
                    bytes_up=sent,
                    test=Scores(examples, {metric.name: best, "loss": 1.0}),
                )
            ],
            score=metric,
            model_bytes=100,
        )
        for best in bests
    ]
    return MethodSummary(method, tuple(runs), tuple(range(len(bests))))


FEDAVG, LOCAL = group("fedavg", 0.80, 0.81, 0.82), group("local", 0.70, 0.71, 0.72)
POOLED = group("centralised", 0.9, 0.91, 0.92)


def test_a_clear_gain() -> None:
    text = federation_gain([LOCAL, group("fedprox", 0.75, 0.76, 0.77), FEDAVG, POOLED])
    assert text == (
        "Is federation worth it? In the best round, `fedavg` reached 81.0 %, "
        "`local` (each client alone) 71.0 %, "
        "`centralised` (all examples in one place) 91.0 %. "
        "So federation gains on the common test set."
    )


@pytest.mark.parametrize(
    ("local", "conclusion"),
    [
        (group("local", 0.90, 0.91, 0.92), "So federation loses on the common test set."),
        (
            group("local", 0.79, 0.82, 0.80),
            "The difference between `fedavg` and `local` is within the chance of seeds, so it "
            "shows nothing.",
        ),
        (
            group("local", 0.7),
            "The difference between `fedavg` and `local` is of too few seeds, so it shows nothing.",
        ),
    ],
)
def test_no_gain_or_none_that_is_shown(local: MethodSummary, conclusion: str) -> None:
    assert federation_gain([FEDAVG, local]).endswith(conclusion)


def test_a_gain_too_small_for_the_test_set() -> None:
    bests = {"fedavg": (0.80, 0.801, 0.802), "local": (0.79, 0.791, 0.792)}
    many, few = ([group(m, *b, examples=n) for m, b in bests.items()] for n in (10**6, 50))
    assert federation_gain(many).endswith("So federation gains on the common test set.")
    assert "is too small for so few test examples, so it shows nothing." in federation_gain(few)


def test_without_a_baseline_or_a_method_nothing_is_said() -> None:
    assert federation_gain([FEDAVG]) == federation_gain([LOCAL, POOLED]) == ""
    assert federation_gain([FEDAVG, group("local")]) == ""
    assert federation_gain([FEDAVG, POOLED]).endswith("(all examples in one place) 91.0 %.")


def test_a_lower_error_is_better() -> None:
    mae = MetricInfo("mae", higher_is_better=False)
    methods = [
        group(m, v, metric=mae) for m, v in (("fedavg", 3.0), ("fedprox", 2.5), ("local", 4))
    ]
    begin = "Is federation worth it? In the best round, `fedprox` reached 2.5, "
    assert federation_gain(methods).startswith(begin)


@pytest.fixture
def results(make: Any) -> Any:
    """Makes the results of a method that three clients were scored with, the last without any."""

    def made(
        method: str,
        values: list[float | None],
        held_out: int = 100,
        personal: list[float | None] | None = None,
        seed: int = 0,
        tested: float = 0.5,
        size: float = 50.0,
        judges: str = "global",
    ) -> MethodResults:
        record = make.record(method, seed=seed, clients=3)
        record = replace(
            record, judges=judges, partition=replace(record.partition, held_out=held_out)
        )
        examples: list[float | None] = [size, 99 * size, 0.0 if values[-1] is None else size]
        columns = {"examples": examples, "accuracy": values}
        own = None if personal is None else {"examples": examples, "accuracy": personal}
        rows = (RoundRecord(1, test=make.scores(tested), per_client=columns, personal=own),)
        run = RunResults(method, record, rows, summarise(rows))
        return MethodResults(method, 0, (run,))

    return made


def test_what_clients_hold_out_answers(results: Any) -> None:
    """Each client counts the same, and one without examples not at all."""

    fedavg, local = (
        results("fedavg", [0.5, 0.7, None], 100),
        results("local", [0.9, 0.8, None], 100),
    )
    assert BaselinesReport.notes([fedavg]) == []
    assert BaselinesReport.notes([fedavg, local]) == [
        "Is federation worth it? On the examples that clients hold out, after the last round, the "
        "mean over clients is `fedavg` 60.0 %, `local` (each client alone) 85.0 %. "
        "The difference between `fedavg` and `local` is of too few seeds, so it shows nothing."
    ]
    trained_on = results("local", [0.9, 0.8, None], 0)
    (of_table,) = BaselinesReport.notes([fedavg, trained_on])
    assert "In the best round, `fedavg` reached 50.0 %" in of_table


def test_examples_that_clients_train_on_answer_nothing(results: Any) -> None:
    methods = [
        results(name, [value] * 3, held_out=0, judges="personal")
        for name, value in (("fedavg", 0.6), ("local", 0.9))
    ]
    (told,) = BaselinesReport.notes(methods)
    assert told.startswith("Is federation worth it? These numbers cannot tell: ")
    assert BaselinesReport.notes(methods[:1]) == []


@pytest.mark.parametrize(("size", "shown"), [(10_000, True), (5, False)])
def test_what_is_shown_of_the_clients_own_examples(results: Any, size: int, shown: bool) -> None:
    """The test set says the opposite of what clients see, and a sentence says why."""
    own = {"fedavg": (0.60, 0.61, 0.62), "local": (0.70, 0.71, 0.72)}
    tested = {"fedavg": 0.8, "local": 0.5}
    methods = [
        MethodResults(
            name,
            0,
            tuple(
                results(name, [v, v, v], seed=seed, tested=tested[name], size=size).runs[0]
                for seed, v in enumerate(values)
            ),
        )
        for name, values in own.items()
    ]
    answer, why = BaselinesReport.notes(methods)
    assert "`fedavg` 61.0 %, `local` (each client alone) 71.0 %" in answer
    end = "So federation loses on the clients' own examples."
    few = (
        "The difference between `fedavg` and `local` is too small for so few test examples, so it "
        "shows nothing."
    )
    assert answer.endswith(end if shown else few)
    assert why == (
        "The table points the other way: in the best round, `fedavg` reached 80.0 %, `local` 50.0 "
        "%; it scores each model of `local` on the whole test set, not only on its client's own "
        "examples."
    )


def test_personal_models_speak_where_a_method_has_them(results: Any) -> None:
    """The global model of ditto is that of fedavg: its row says so, and the sentence is of both."""
    methods = [
        results("fedavg", [0.5, 0.7, None]),
        results("local", [0.9, 0.8, None]),
        results("ditto", [0.5, 0.7, None], personal=[0.75, 0.65, None]),
    ]
    assert (
        "`ditto (personal)` 70.0 %, `local` (each client alone) 85.0 %, `fedavg` 60.0 %."
        in BaselinesReport.notes(methods)[0]
    )
    rows = result_rows([method.summary for method in methods])
    assert [row.label for row in rows] == ["fedavg", "local", "ditto ‡"]
    table = result_table(rows)
    assert table.notes[-2].startswith("‡: the scores of its global model, on the test set. ")
    assert "evaluation.model = 'personal'" in table.notes[-2]
    assert r"ditto $^\ddagger$" in table.latex()
    assert ">‡</abbr>" in render_report(methods)
    judged = replace(methods[2].runs[0].summary, judges="personal")
    assert not MethodSummary("ditto", (judged,)).hides_personal


def test_baselines_do_not_compete() -> None:
    methods = [LOCAL, FEDAVG, group("fedprox", 0.75, 0.76, 0.77), POOLED]
    conclusion = verdict(methods)
    assert conclusion.headline.startswith("`fedavg` reached 81.0")
    assert "centralised" not in conclusion.headline
    rows = result_rows(methods)
    assert [row.marked for row in rows if row.summary.baseline] == [(), ()]
    assert "best" in rows[1].marked
    assert rows[1].gap is None  # the best of those that compete
    assert rows[3].gap is not None
    assert rows[3].gap.mean == pytest.approx(0.1)
    assert rows[0].to_json()["sent"] is rows[0].to_json()["traffic"] is None
    table = result_table(rows).markdown()
    assert "local: each client trains alone; the score is the mean over the clients' models, " in (
        table
    )
    assert "each on the whole test set, so on the examples of other clients too." in table
    assert "the best mean of the column but for the baselines" in table
    assert "centralised: one model is trained on the examples of all clients" in table
    assert verdict([LOCAL, POOLED]).headline.startswith("`centralised` reached 91.0")
