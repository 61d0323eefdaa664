"""Who gains by personal models: numbers that can be checked by hand, and where they are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedkeel.features.baselines.report import federation_gain
from fedkeel.records.fairness import client_values, gain, spread
from fedkeel.records.score import MetricInfo
from fedkeel.report import page
from fedkeel.report.client_gains import (
    client_table,
    gain_chart,
    personal_rows,
)
from fedkeel.report.client_scores import client_scores
from fedkeel.report.runs import load_runs
from fedkeel.report.summary import shared_score
from fedkeel.report.tables import footnotes, result_rows, result_table

ACCURACY, MAE = MetricInfo("accuracy", unit="%"), MetricInfo("mae", higher_is_better=False)


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    monkeypatch.setattr("fedkeel.report.html.get_plotlyjs", lambda: "/* plotly */")


def columns(*values):
    sizes = [0.0 if value is None else 10.0 for value in values]
    return {"examples": sizes, "accuracy": list(values), "loss": list(values)}


def runs(make, root, *, judges="personal"):
    """Two seeds of clients alone, of a global model, and of one with personal models beside it."""
    made = {
        "local": (columns(0.5, 0.9, 0.6, None), None),
        "fedavg": (columns(0.6, 0.4, 0.6, None), None),
        "ditto": (columns(0.6, 0.4, 0.6, None), columns(0.7, 0.8, 0.6, None)),
    }
    folders = []
    for method, (whole, own) in made.items():
        for seed in range(2):
            *first, last = make.rows(seed, rounds=3, clients=4)
            last = replace(last, per_client=whole, personal=own)
            record = make.record(method, seed, clients=4, rounds=3, judges=judges)
            folders.append(make.save(root, record, [*first, last]))
    return load_runs(folders)


def test_fairness_by_hand():
    of = spread([0.8, 0.4], ACCURACY)
    assert of.jain == pytest.approx(1.2**2 / (2 * (0.64 + 0.16)))
    assert of.variance == pytest.approx(0.08)
    equal = spread([0.3] * 7, ACCURACY)
    assert (equal.jain, equal.std) == (pytest.approx(1.0), pytest.approx(0.0))
    assert spread([0.0, 0.0, 0.0, 1.0], ACCURACY).jain == pytest.approx(1 / 4)
    assert spread([], ACCURACY) is None
    values = [float(k) for k in range(25)]
    assert spread(values, ACCURACY).worst_tenth == 0.5  # of two clients
    assert spread(values, MAE).worst_tenth == 23.5
    assert spread(values, MAE).jain is None


def test_a_lower_error_is_a_gain():
    found = gain({0: 1.0, 1: 3.0, 2: 2.0}, {0: 2.0, 1: 1.0, 2: 2.0}, MAE)
    assert found.values == (-2.0, 0.0, 1.0)
    assert (found.share, found.share_that_lose) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert gain({0: 1.0}, {1: 1.0}, MAE) is None


def test_clients_without_examples_or_a_finite_score_are_left_out():
    values = {"examples": [5.0, 0.0, 3.0], "accuracy": [0.5, None, float("nan")]}
    assert client_values(values, ACCURACY) == {0: 0.5}
    assert client_values(None, ACCURACY) == {}


def test_gains_are_paired_client_by_client(make, tmp_path):
    rows = personal_rows(runs(make, tmp_path))
    found = {(row.scores.method.label, row.scores.model): row for row in rows}
    assert list(found) == [
        ("local", "personal"),
        ("fedavg", "global"),
        ("ditto", "global"),
        ("ditto", "personal"),
    ]
    own = found["ditto", "personal"]
    assert own.spread.mean == pytest.approx(0.7)
    assert own.over_global.values == pytest.approx((0.0, 0.0, 0.1, 0.1, 0.4, 0.4))
    assert own.over_global.share == pytest.approx(2 / 3)
    assert own.over_local.values == pytest.approx((-0.1, -0.1, 0.0, 0.0, 0.2, 0.2))
    whole = found["fedavg", "global"]
    assert whole.over_global is None
    assert whole.over_local.values == pytest.approx((-0.5, -0.5, 0.0, 0.0, 0.1, 0.1))
    assert found["local", "personal"].over_local is None


def test_the_tables_have_these_numbers(make, tmp_path):
    rows = personal_rows(runs(make, tmp_path))
    line = client_table(rows).markdown().splitlines()[5]
    assert line == "| `ditto` | personal | 70.0 | 8.9 | 0.987 | 66.7 | 33.3 |"
    assert client_table(rows).terminal().row_count == 4
    values = rows[-1].to_json()
    assert values["share_that_gains_over_local"] == pytest.approx(1 / 3)
    assert values["gain_over_global"] == pytest.approx(0.5 / 3)


def test_without_personal_models_there_is_no_table(make, tmp_path):
    assert personal_rows(load_runs(make.comparison(tmp_path, {"fedavg": {}}, rounds=2))) == []


def test_the_picture_has_each_client_from_the_smallest_gain(make, tmp_path):
    methods = runs(make, tmp_path)
    chart = gain_chart(client_scores(methods))
    assert [line.name for line in chart.figure.data] == ["fedavg", "ditto", "ditto (personal)"]
    assert list(chart.figure.data[2].y) == pytest.approx([-10, -10, 0, 0, 20, 20])
    assert "ditto (personal): 33.3 % of the clients gain, 33.3 % lose" in chart.description
    alone = gain_chart(client_scores(methods[2:]))  # without clients alone: over the global model
    assert [line.name for line in alone.figure.data] == ["ditto (personal)"]
    assert list(alone.figure.data[0].y) == pytest.approx([0, 0, 10, 10, 40, 40])
    assert gain_chart(client_scores(methods[1:2])) is None
    text = page.render_report(methods)
    assert "Accuracy on each client&#39;s own examples</h3>" in text
    assert "Who gains" in text
    assert "Jain" in text


def test_scores_of_personal_and_global_models_are_not_ranked_together(make, tmp_path):
    personal = runs(make, tmp_path / "personal")
    whole = runs(make, tmp_path / "global", judges="global")
    mixed = [method.summary for method in (*whole[:2], personal[2])]
    assert shared_score(mixed) is None
    table = result_rows(mixed)
    assert not any(row.marked for row in table)
    assert "accuracy (personal) " in result_table(table).markdown()
    assert "evaluation.model = 'personal'" in str(footnotes(table)[0])
    assert federation_gain(mixed) == ""
    same = [method.summary for method in personal]
    assert shared_score(same) == ACCURACY
    assert "on the clients' own examples" in federation_gain(same) or "shows nothing" in (
        federation_gain(same)
    )
    told = [str(note) for note in footnotes(result_rows(same))]
    assert told[0].startswith("Accuracy: of the clients' models")
    assert "local: each client trains alone." in told
