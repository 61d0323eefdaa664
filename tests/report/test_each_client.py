"""Each client by name: gains that can be checked by hand, and what may be said of them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from commands import call
from fedkeel.records.comparison import write_index
from fedkeel.records.doctor import DoctorRecord, Finding
from fedkeel.records.run_record import EngineChoice, PartitionRecord
from fedkeel.report import page
from fedkeel.report.claims import claims_of
from fedkeel.report.client_scores import client_scores
from fedkeel.report.each_client import each_client
from fedkeel.report.runs import load_runs
from fedkeel.study.comparison import Comparison

NAMES = ["North", "South", "East"]
SEEDS = 5


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    monkeypatch.setattr("fedkeel.report.html.get_plotlyjs", lambda: "/* plotly */")


def comparison(
    make, root, gains, *, seeds=SEEDS, names=NAMES, examples=4000, clients=3, **division
):
    """Runs of clients alone, which score 0.7 with little chance, and of methods that gain so much.

    Args:
        gains: method -> gain of each client, or (gain, deviation over seeds) of each.
        division: what the partition record has besides.
    """
    folders = []
    for method, of_clients in {"local": [0.0] * clients, **gains}.items():
        for seed in range(seeds):
            noise = np.random.default_rng([7, seed]).normal(0, 0.01, clients)
            other = np.random.default_rng([len(method), seed]).normal(0, 1, clients)
            values = []
            for k, gain in enumerate(of_clients):
                mean, deviation = gain if isinstance(gain, tuple) else (gain, 0.002)
                deviation = 0.0 if method == "local" else deviation
                values.append(float(0.7 + noise[k] + mean + deviation * other[k]))
            columns = {
                "examples": [float(examples)] * clients,
                "accuracy": values,
                "loss": [1 - v for v in values],
            }
            *first, last = make.rows(seed, rounds=2, clients=clients)
            is_personal = method == "ditto"
            last = replace(last, per_client=columns, personal=columns if is_personal else None)
            settings = {"holdout": 0.25, "seed": seed} | division
            partition = PartitionRecord(
                kind="client",
                clients=clients,
                sizes=[3 * examples] * clients,
                names=list(names),
                held_out=clients * examples,
                settings=settings,
            )
            made = make.record(method, seed, clients=clients, rounds=2, partition=partition)
            folders.append(make.save(root, replace(made, judges="personal"), [*first, last]))
    return load_runs(folders)


def found(methods):
    return each_client(client_scores(methods))


def test_the_gain_is_paired_by_seed_with_its_t_interval(make, tmp_path):
    methods = comparison(make, tmp_path, {"fedavg": [(0.05, 0.01)] * 3})
    of = found(methods)
    values = {
        (method.label, run.record.seed): run.rows[-1].per_client["accuracy"]
        for method in methods
        for run in method.runs
    }
    for line in of.lines:
        k = NAMES.index(line.name)
        differences = [values["fedavg", s][k] - values["local", s][k] for s in range(SEEDS)]
        cell = line.cells[1]
        assert cell.score.mean == pytest.approx(np.mean([values["fedavg", s][k] for s in range(5)]))
        assert cell.over_local.mean == pytest.approx(np.mean(differences))
        low, high = stats.t.interval(0.95, SEEDS - 1, np.mean(differences), stats.sem(differences))
        assert cell.over_local.interval_text == (
            f"[{100 * low:+.1f}, {100 * high:+.1f}]".replace("-", "−")
        )
    gains = [line.cells[1].over_local.mean for line in of.lines]
    assert gains == sorted(gains, reverse=True)


def test_examples_are_counted_where_a_method_has_only_personal_scores(make, tmp_path):
    """As with parameters that stay at the clients, or several models: it may be the first."""
    methods = comparison(make, tmp_path, {"ditto": [0.05] * 3})
    only = []
    for method in methods:
        runs = [
            replace(run, rows=tuple(replace(row, per_client=None) for row in run.rows))
            if run.rows[-1].personal
            else run
            for run in method.runs
        ]
        only.append(replace(method, runs=tuple(runs)))
    for order in (only, only[::-1]):
        assert {line.examples for line in found(order).lines} == {4000}


def test_who_gains_who_loses_and_who_is_open(make, tmp_path):
    gains = {
        "fedavg": [0.06, -0.03, (0.01, 0.04)],
        "ditto": [0.02, (0.03, 0.03), (0.012, 0.04)],
        "centralised": [0.2, 0.2, 0.2],
    }
    of = found(comparison(make, tmp_path, gains))
    by_name = {line.name: line.cells for line in of.lines}
    assert [by_name[n][1].over_local.outcome for n in NAMES] == ["gains", "loses", "open"]
    shown, left = of.sentences
    fedavg = [by_name[name][1].over_local.text for name in NAMES]
    ditto = [by_name[name][2].over_local.text for name in NAMES]
    assert shown == (
        "Over 5 seeds, after the last round and beside training alone, federation is worth it "
        f"for North ({fedavg[0]} "
        f"points with `fedavg`); South loses {fedavg[1][1:]} points with `fedavg` and none with "
        f"`ditto` ({ditto[1]})."
    )
    leading = "fedavg" if of.leading == 1 else "ditto"
    assert left.startswith(f"Open for the others, measured so far with `{leading}` (best on av")
    assert "East (" in left
    assert "North" not in left
    assert "more seeds would show it for East." in left
    assert of.comparisons == 9


def test_a_client_that_gains_with_one_method_and_loses_with_another(make, tmp_path):
    gains = {"fedavg": [-0.05] * 3, "ditto": [0.04] * 3}
    (sentence,) = found(comparison(make, tmp_path, gains)).sentences
    assert "federation is worth it for" in sentence
    assert sentence.count("; with `fedavg` it loses ") == 3
    assert " loses 5" in sentence


def test_a_client_with_a_number_is_called_client(make, tmp_path):
    of = found(comparison(make, tmp_path, {"fedavg": [-0.14, 0.1, 0.0]}, names=["0", "1", "2"]))
    text = " ".join(of.sentences)
    assert "; client 0 loses " in text
    assert "for client 1 (" in text
    assert "client 2 (" in text
    assert [line.name for line in of.lines] == ["1", "2", "0"]


def test_the_command_prints_what_compare_prints(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison(make, tmp_path / "runs", {"fedavg": [0.06, -0.03, 0.0]})
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    write_index(tmp_path / "runs", "runs", folders, EngineChoice("sequential"))
    same = Comparison([], folder=Path("runs"))
    done = call("report", "runs")
    assert done.code == 0, done.err
    assert "4,000 examples" in done.out
    assert "▲" in done.out
    said = " ".join(done.err.split())
    for sentence in same.notes:
        assert " ".join(sentence.split()) in said
    assert any(note.startswith("Over 5 seeds") for note in same.notes)
    markdown = call("report", "runs", "--markdown").out
    assert "North 4,000 examples" in markdown
    assert "Over 5 seeds" in markdown


def test_who_loses_with_every_method(make, tmp_path):
    gains = {"fedavg": [-0.05, 0.1, 0.1], "fedprox": [-0.08, 0.1, 0.1]}
    (sentence,) = found(comparison(make, tmp_path, gains)).sentences
    assert sentence.endswith(" points with `fedavg` and with every other method.")
    one = comparison(make, tmp_path / "one", {"fedavg": [-0.05, 0.1, 0.1]})
    assert found(one).sentences[0].endswith(" points with `fedavg`.")


def test_one_seed_shows_nothing_and_has_no_interval(make, tmp_path):
    of = found(comparison(make, tmp_path, {"fedavg": [0.2, -0.2, 0.0]}, seeds=1))
    assert [line.cells[1].over_local.outcome for line in of.lines] == ["too few seeds"] * 3
    assert of.lines[0].cells[1].over_local.interval_text == ""
    assert of.sentences[0] == (
        "One seed shows of no client whether federation is worth it: run 3 or more."
    )
    assert of.notes[-1] == "One seed has no spread, so no interval, and shows no gain."
    two = found(comparison(make, tmp_path / "two", {"fedavg": [0.2, -0.2, 0.0]}, seeds=2))
    assert two.lines[0].cells[1].over_local.interval_text != ""
    assert two.sentences[0].startswith("2 seeds show of no client")


def test_seeds_that_agree_by_chance_of_few_examples_show_nothing(make, tmp_path):
    """Three seeds, each with two of 25 examples fewer: no spread, so a t-test would be certain."""
    gains = {"fedavg": [(-0.08, 0.0)] * 3}
    three = found(comparison(make, tmp_path / "three", gains, seeds=3, examples=25))
    assert three.lines[0].cells[1].over_local.outcome == "too few examples"
    eight = found(comparison(make, tmp_path / "eight", gains, seeds=8, examples=25))
    assert eight.lines[0].cells[1].over_local.outcome == "too few examples"
    for few in (three, eight):
        assert few.sentences[0].endswith("no client is shown to gain or to lose by federation.")
    many = found(comparison(make, tmp_path / "many", gains, seeds=3, examples=400))
    assert many.lines[0].cells[1].over_local.outcome == "loses"


def test_equal_differences_are_no_certainty(make, tmp_path):
    """Steps of a score of 25 examples are 4 points, so the true spread may be as large."""
    gains = {"fedavg": [(-0.16, 0.0), (-0.16, 0.0), (-0.2, 0.02)]}
    of = found(comparison(make, tmp_path, gains, seeds=3, examples=25))
    gain = next(line for line in of.lines if line.name == "North").cells[1].over_local
    assert gain.mark == ""
    assert gain.difference.stat.std == pytest.approx(0)
    error = 0.04 / 3**0.5
    p_value = 2 * stats.t.sf(0.16 / error, 2)
    assert (gain.outcome, gain.difference.is_coarse) == ("open", True)
    assert gain.difference.p_value == pytest.approx(p_value, rel=1e-6)
    half = 100 * stats.t.isf(0.025, 2) * error
    assert gain.interval_text == f"[−{16 + half:.1f}, −{16 - half:.1f}]"


def test_seeds_that_draw_other_examples_have_seen_more_of_them(make, tmp_path):
    gains = {"fedavg": [(-0.05, 0.0)] * 3}
    anew = found(comparison(make, tmp_path / "anew", gains, examples=100))
    same = found(comparison(make, tmp_path / "same", gains, examples=100, seed=0))
    noise = [of.lines[0].cells[1].over_local.noise for of in (anew, same)]
    assert noise[1] == pytest.approx(2 * noise[0])  # four seeds draw all, the fifth nothing new
    level = 0.675
    assert noise[1] == pytest.approx(2 * (level * (1 - level) / 100) ** 0.5, rel=0.02)


def test_a_lower_loss_is_a_gain(make, tmp_path):
    methods = comparison(make, tmp_path, {"fedavg": [0.05] * 3})
    task = replace(methods[0].record.task, score="loss")
    methods = [
        replace(m, runs=tuple(replace(r, record=replace(r.record, task=task)) for r in m.runs))
        for m in methods
    ]
    of = found(methods)
    assert {line.cells[1].over_local.outcome for line in of.lines} == {"gains"}
    assert of.lines[0].cells[1].over_local.text.startswith("+0.05")


def test_clients_that_are_others_with_each_seed_have_no_table(make, tmp_path):
    gains = {"fedavg": [0.05] * 3}
    assert found(comparison(make, tmp_path / "drawn", gains, names=[])) is None
    same = found(comparison(make, tmp_path / "same", gains, names=[], seed=0))
    assert {line.name for line in same.lines} == {"client 0", "client 1", "client 2"}
    assert same.sentences == []
    many = [f"school {k}" for k in range(31)]
    made = comparison(make, tmp_path / "many", {}, clients=31, names=many, seeds=1)
    assert found(made) is None
    made = comparison(make, tmp_path / "thirty", {}, clients=30, names=many[:30], seeds=1)
    assert len(found(made).lines) == 30


def test_nothing_is_said_without_local_or_a_part_that_is_held_out(make, tmp_path):
    methods = comparison(make, tmp_path, {"fedavg": [0.05] * 3})
    alone = found(methods[1:])
    assert (alone.sentences, alone.has_local) == ([], False)
    trained_on = [
        replace(
            m,
            runs=tuple(
                replace(
                    r,
                    record=replace(r.record, partition=replace(r.record.partition, held_out=0)),
                )
                for r in m.runs
            ),
        )
        for m in methods
    ]
    assert found(trained_on).sentences == []
    assert "in Python holdout=0.25 of fedkeel.from_clients" in found(trained_on).notes[1]


def test_the_terminal_has_it_in_80_columns(make, tmp_path):
    gains = {m: [0.05, -0.03, (0.0, 0.04)] for m in ("fedavg", "scaffold", "ditto")}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(found(comparison(make, tmp_path, gains)).table().terminal(is_wrapped=True))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if "North" in line)
    assert line.count("▲") == 3
    assert next(line for line in text.splitlines() if "South" in line).count("▼") == 3
    assert "4,000 examples" in text
    markdown = found(comparison(make, tmp_path, gains)).table().markdown()
    assert "| North 4,000 examples | 70." in markdown.replace("`", "")


def test_the_page_begins_with_it_and_draws_no_boxes(make, tmp_path):
    gains = {"fedavg": [0.06, -0.03, (0.0, 0.04)], "ditto": [0.06, 0.0, 0.0]}
    text = page.render_report(comparison(make, tmp_path, gains))
    assert text.index('<p class="verdict">Over 5 seeds') < text.index("verdict second")
    assert text.index("Each client with each method") < text.index('id="curves"')
    assert '<td class="gains"><span role="img" aria-label="gains">▲</span> +' in text
    assert '<td class="loses"><span role="img" aria-label="loses">▼</span> −' in text
    assert "gain over fedavg" in text
    assert 'data-figure="clients"' not in text
    assert "worst tenth" not in text
    many = [f"school {k}" for k in range(20)]
    schools = comparison(make, tmp_path / "many", {}, clients=20, names=many, seeds=2)
    text = page.render_report(schools)
    assert 'data-figure="clients"' in text
    assert "worst tenth" in text


def test_plain_values(make, tmp_path):
    of = found(comparison(make, tmp_path, {"fedavg": [0.06, -0.03, (0.0, 0.04)]}))
    north = next(c for c in of.to_json("fedavg") if c["client"] == "North")
    assert (north["outcome"], north["examples"]) == ("gains", 4000)
    assert north["gain_over_local_low"] < north["gain_over_local"] < north["gain_over_local_high"]
    assert of.to_json("local")[0]["gain_over_local"] is None
    assert of.to_json("another") == []


def test_what_a_comparison_says_is_printed_in_a_few_lines(make, tmp_path):
    """Printed, it was a hundred thousand characters of nested records."""
    methods = comparison(make, tmp_path, {"fedavg": [0.05, 0.0, -0.05], "fedprox": [0.05] * 3})
    table = found(methods)
    text = repr(table)
    assert text.startswith("| client")
    assert table.sentences[0] in text
    assert len(text) < 3000
    claims = claims_of([method.summary for method in methods])
    assert str(claims) == repr(claims) == claims.sentence
    assert repr(methods[0]) == "<MethodResults of local: 5 runs>"
    record = repr(methods[0].record)
    assert record.startswith("RunRecord of local, seed 0, 2 rounds: finished\n")
    assert len(record) < 1500


def test_what_a_doctor_found_is_printed_in_a_few_lines():
    finding = Finding("labels", "Labels", "problem", "Clients have few labels.")
    found = DoctorRecord("ward", 3, 3, 1, 1, 10, findings=(finding,), sizes=(5,) * 5000)
    assert repr(found) == (
        "DoctorRecord of ward, 3 clients\n  Labels (problem): Clients have few labels."
    )
