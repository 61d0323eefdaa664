"""The page shows everything, escapes its texts and needs no network."""

import ast
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

import fedkeel.report.page as page
from fedkeel.errors import RunError
from fedkeel.records.rows import Scores
from fedkeel.records.run_record import (
    DataRecord,
    EngineChoice,
    Environment,
    Estimate,
    ModelRecord,
    PartitionRecord,
    PartRecord,
)
from fedkeel.report.page import render_report, write_report
from fedkeel.report.page_content import commands, source_rows, tiles
from fedkeel.report.runs import load_runs

REPORT = Path(page.__file__).parent


class Reader(HTMLParser):
    """Tags, attributes and text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.parts, self.inside = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [v for k, v in attrs if k == "id"]
        if tag in ("script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.parts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.parts))

    def of(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    """The 4.8 MB of plotly are of no interest but to one test."""
    monkeypatch.setattr("fedkeel.report.html.get_plotlyjs", lambda: "/* plotly */")


@pytest.fixture
def comparison(make, tmp_path):
    methods = {
        "fedavg": {"top": 0.80},
        "fedgc": {"top": 0.90, "extra": 500_000, "diagnostics": ("fedgc.sgc.infeasible",)},
        "fedprox(mu=0.1)+gcfed": {"top": 0.85},
    }
    return make.comparison(tmp_path, methods, per_client=True, sources=("mnist", "usps"))


def read(folders, **own):
    return Reader(render_report(load_runs(folders), **own))


def test_a_comparison_has_everything(comparison):
    reader = read(comparison)
    for text_part in (
        "3 methods on cifar10",
        "Clear lead",
        "% (best round, 3 seeds)",
        "points above fedavg",
        "10 clients, dirichlet (alpha 0.15)",
        "Bold: the best mean of the column",
        "fedgc: local steps of gradient descent server: weighted mean",
        "@inproceedings{mcmahan2017fedavg,",
        "fedgc.sgc.infeasible",
        "All clients together",
        "model 1.00 MB, fedgc 2.00 MB",
        "stored for each client4.00 MB",
        "usps",
        "rounds to a share of the best of fedavg",
        "fedkeel compare fedavg-s0/config.toml --methods 'fedavg, fedgc, fedprox(mu=0.1)+gcfed'",
    ):
        assert text_part in reader.text, text_part
    drawn = {attrs["data-figure"] for attrs in reader.of("div") if "data-figure" in attrs}
    assert drawn == {
        "score_rounds",
        "score_megabytes",
        "loss_rounds",
        "loss_megabytes",
        "metric0_rounds",
        "metric0_megabytes",
        "traffic",
        "seconds",
        "partition",
    }
    assert {f"figure-{name}" for name in drawn} <= set(reader.ids)


def test_the_page_is_accessible(comparison):
    reader = read(comparison)
    assert reader.of("html") == [{"lang": "en"}]
    assert [tag for tag, _ in reader.tags].count("h1") == 1
    pictures = [a for t, a in reader.tags if t in ("svg", "div") and a.get("role") == "img"]
    assert pictures
    assert all(a["aria-label"] for a in pictures)
    loose = [a for t, a in reader.tags if t == "svg" and "role" not in a]
    assert all(a.get("aria-hidden") == "true" for a in loose)
    assert all(a.get("scope") for a in reader.of("th"))
    assert [t for t, _ in reader.tags].count("caption") == [t for t, _ in reader.tags].count(
        "table"
    )
    assert len(reader.ids) == len(set(reader.ids))
    links = [a["href"] for a in reader.of("a")]
    assert all(link[1:] in reader.ids for link in links)
    copied = [a["data-copy"] for a in reader.of("button") if "data-copy" in a]
    assert copied
    assert set(copied) <= set(reader.ids)


def test_the_page_needs_no_network(comparison, monkeypatch):
    monkeypatch.undo()
    html = render_report(load_runs(comparison))
    assert html.count(get_plotlyjs()) == 1
    own = html.replace(get_plotlyjs(), "")
    for tag, attrs in Reader(own).tags:
        for name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href"):
            assert attrs.get(name, "#").startswith("#"), (tag, attrs)
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
    code = "".join(re.findall(r"<(?:style|script)[^>]*>(.*?)</(?:style|script)>", own, re.S))
    assert not re.findall(r"https?:|//\w+\.|url\(|@import|fetch\(|XMLHttp|import\(", code)
    policy = [a["content"] for a in Reader(own).of("meta") if "http-equiv" in a]
    assert policy[0].startswith("default-src 'none'")
    assert "http" not in policy[0]


def pages_of(make, root, bad):
    """The page of a run whose record says `bad` everywhere, and that of two runs."""
    record = make.record(
        bad,
        name="bad",
        describe=bad,
        bibtex=bad,
        citations=[bad],
        parts=[PartRecord(bad, bad, [bad])],
        local=bad,
        participation=bad,
        weights=bad,
        status="failed",
        message=bad,
        environment=Environment(processor=bad),
        engine=EngineChoice(bad, reasons=[bad]),
        estimate=Estimate(up={bad: 1}),
    )
    record = replace(
        record,
        data=replace(record.data, sources=[bad], label_names=[bad] * 10),
        partition=replace(record.partition, kind=bad, names=[bad] * 10, settings={bad: bad}),
        model=replace(record.model, name=bad, head=bad),
    )
    rows = make.rows(
        rounds=3, per_client=True, diagnostics=(bad,), sources=(bad,), extra=9, part=bad
    )
    odd = make.save(root, record, rows)
    plain = make.save(root, make.record("fedavg"), make.rows(rounds=3))
    return [render_report(load_runs(folders), title=bad) for folders in ([odd], [plain, odd])]


def test_texts_of_records_are_escaped(make, tmp_path):
    for html in pages_of(make, tmp_path, '"><script>alert(1)</script><img src=x onerror=y>'):
        assert "<script>alert" not in html
        reader = Reader(html)
        assert not reader.of("img")
        assert len(reader.of("script")) == 2 + html.count('type="application/json"')


def texts(value):
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


def test_names_make_no_links_in_charts(make, tmp_path):
    """Plotly reads simple HTML in every text."""
    bad = '<a href="javascript:alert(1)">win</a>'
    for html in pages_of(make, tmp_path, bad):
        figures = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.S)
        found = [text for figure in figures for text in texts(json.loads(figure))]
        assert any("javascript:alert" in text for text in found)
        tags = {tag for text in found for tag in re.findall(r"</?(\w+)", text)}
        assert tags <= {"span", "br", "extra"}


def test_one_run_shows_its_last_round_beside_the_mean_of_ten(make, tmp_path):
    rows = make.rows(rounds=20)
    folder = make.save(tmp_path, make.record(), rows)
    shown = {tile.name: (tile.value, tile.note) for tile in tiles(load_runs([folder])[0])}
    last = f"{100 * rows[-1].test['accuracy']:.1f} %"
    mean = f"{100 * sum(row.test['accuracy'] for row in rows[-10:]) / 10:.1f} %"
    assert last != mean
    assert shown["Last accuracy"] == (last, "after the last round")
    assert shown["Mean of the last ten"] == (mean, "evaluations before the end")


def test_a_run_whose_data_are_on_nodes_is_repeated_with_nodes(make, tmp_path, monkeypatch):
    """Only nodes have such data: `fedkeel run` refuses the settings."""
    monkeypatch.chdir(tmp_path)
    record = make.record()
    record = replace(record, partition=replace(record.partition, kind="nodes", clients=2))
    found = commands(load_runs([make.save(Path("runs"), record, make.rows(rounds=2))]))
    assert found[1:] == [
        "fedkeel flower up runs/fedavg-s0/config.toml --data DATA_0 --data DATA_1 --out runs/again"
    ]
    assert found[0].startswith("# DATA_0")


def test_a_source_that_nobody_measured_has_no_score(make, tmp_path):
    rows = make.rows(rounds=3, sources=("north", "south"))
    rows[-1].sources["south"] = Scores(0, {"accuracy": 0.0, "top3": 0.0, "loss": 0.0})
    run = load_runs([make.save(tmp_path, make.record(), rows)])
    north, south = source_rows(run)
    assert (north.source, south.source) == ("north", "south")
    assert north.scores[0].count == 1
    assert south.scores == (None,)


def test_only_folder_names_are_shown(make, tmp_path):
    record = make.record(
        message="cannot read /srv/secret/x.npz",
        status="failed",
        environment=Environment(processor="/home/ann/data", python="/usr/bin/python3"),
    )
    data = replace(record.data, sources=["/home/ann/data/scans.npz"])
    record = replace(record, data=data)
    html = render_report(load_runs([make.save(tmp_path, record, make.rows(rounds=2))]))
    assert str(tmp_path) not in html
    assert not re.search(r"/srv|/home|/usr", html)
    assert "scans.npz" in html
    assert "fedkeel run fedavg-s0/config.toml" in html


def test_the_command_names_the_folder_as_the_user_gave_it(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Path("runs")
    one = make.save(place, make.record(), make.rows(rounds=2))
    two = make.save(place, make.record("momentum"), make.rows(rounds=2))
    assert commands(load_runs([one])) == ["fedkeel run runs/fedavg-s0/config.toml --out runs/again"]
    (both,) = commands(load_runs([one, two]))
    assert both.startswith(
        "fedkeel compare runs/fedavg-s0/config.toml --methods 'fedavg, momentum'"
    )
    assert both.endswith("--out runs/again")


def test_runs_of_several_settings_or_seeds_get_a_command_each(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Path("runs")

    def saved(method, seed, lr=0.3):
        folder = make.save(place, make.record(method, seed), make.rows(rounds=2))
        (folder.path / "config.toml").write_text(f"seed = {seed}\n[local]\nlr = {lr}\n")
        return folder

    one, two = saved("fedavg", 4), saved("fedavg", 5)
    both = [saved("momentum", 4), saved("momentum", 5)]
    (alike,) = commands(load_runs([two, one, *both]))
    assert alike.startswith("fedkeel compare runs/fedavg-s4/config.toml")
    assert "--seeds 2 " in alike
    other = saved("momentum", 4, lr=0.01)
    assert commands(load_runs([one, other])) == [
        "fedkeel run runs/fedavg-s4/config.toml --out runs/again/fedavg-s4",
        "fedkeel run runs/momentum-s4/config.toml --out runs/again/momentum-s4",
    ]
    again = commands(load_runs([one, two, saved("fedgh", 4)]))
    assert [line.split()[1] for line in again] == ["run"] * 3  # seeds 4 and 5, and 4 alone
    apart = [saved("fedavg", 4), saved("fedavg", 6)]
    assert [line.split()[1] for line in commands(load_runs(apart))] == ["run"] * 2


def test_a_single_run_shows_its_figures_large(make, tmp_path):
    reader = read([make.save(tmp_path, make.record("fedreg"), make.rows(top=0.9))])
    for text_part in (
        "fedreg-s0",
        "Best accuracy",
        "Rounds to 85 %",
        "Training",
        "(best round, one",
    ):
        assert text_part in reader.text
    assert "Clear lead" not in reader.text.split("What the numbers mean")[0]
    assert "results" not in [a.get("class") for a in reader.of("table")]


def test_the_state_of_unfinished_runs_is_shown(make, tmp_path):
    made = [
        make.save(tmp_path, make.record("fedavg"), make.rows()),
        make.save(
            tmp_path,
            make.record("fedgc", status="failed", message="every client failed"),
            make.rows(rounds=12),
        ),
        make.save(tmp_path, make.record("gcfed", status="running"), make.rows(rounds=5)),
    ]
    text = read(made).text
    assert "fedgc, seed 0: failed after 12 of 60 rounds. every client failed" in text
    assert "gcfed, seed 0: not finished when this page was written, 5 of 60 rounds." in text
    assert "fedgc and gcfed are left out of this verdict" in text
    assert "fedgc†" in text


def test_a_run_without_a_row_has_a_page(make, tmp_path):
    record = make.record(
        status="running",
        parts=[],
        data=DataRecord(),
        partition=PartitionRecord(),
        model=ModelRecord(),
        environment=Environment(),
        engine=EngineChoice(),
        target=None,
        bibtex="",
        citations=[],
    )
    reader = read([make.save(tmp_path, record, [])])
    assert "Not evaluated yet" in reader.text
    assert "0 of 60 rounds" in reader.text


def test_losses_that_are_not_finite_and_lost_clients_are_reported(make, tmp_path):
    rows = make.rows(rounds=30, nan_from=21, drop=0.5)
    text = read([make.save(tmp_path, make.record(), rows)]).text
    assert "fedavg: a loss was not finite in 10 of 31 rounds." in text
    lost = sum(len(row.dropped) for row in rows)
    assert f"{lost} of 30 times" in text
    assert "a selected client did not report" in text


@pytest.mark.parametrize(("loss", "is_reported"), [(23.0, False), (23.5, True), (math.nan, False)])
def test_divergence_with_finite_losses_is_reported(make, tmp_path, loss, is_reported):
    """A score at chance was the only sign of it."""
    rows = make.rows(rounds=20)
    rows[-1] = replace(rows[-1], test=make.scores(0.9, loss))
    text = read([make.save(tmp_path, make.record(), rows)]).text
    assert (
        "The last test loss is 23.5; that of the untrained model was 2.303" in text
    ) is is_reported
    assert ("training diverged" in text) is is_reported


@pytest.mark.parametrize(
    ("top", "rounds", "is_reported"), [(0.10, 20, True), (0.10, 4, False), (0.14, 20, False)]
)
def test_a_run_that_learnt_nothing_is_reported(make, tmp_path, top, rounds, is_reported):
    """Dead units have the loss of chance, and no number stood out."""
    rows = make.rows(rounds=rounds, noise=0.0)
    rows = [replace(r, test=make.scores(top if r.round else 0.1)) for r in rows]
    text = read([make.save(tmp_path, make.record(rounds=rounds), rows)]).text
    text_part = (
        "the model learnt nothing in 20 rounds. Its best accuracy is 10.0 %; that of the untrained"
    )
    assert (text_part in text) is is_reported
    assert ("learnt nothing" in text) is is_reported


def test_an_untrained_model_that_is_best_is_reported(make, tmp_path):
    """Its score counted as what the method reached, and no sentence said so."""
    folders = []
    for seed, start in enumerate((0.6, 0.1)):
        rows = make.rows(rounds=20, noise=0.0)
        rows = [replace(r, test=make.scores(0.5 if r.round else start)) for r in rows]
        record = make.record(seed=seed, rounds=20)
        folders.append(make.save(tmp_path / str(seed), record, rows[:4]))
    assert "fedavg: in 1 of 2 seeds the untrained model was best." in read(folders).text
    assert "fedavg: the untrained model was best." in read(folders[:1]).text
    assert "untrained model was best" not in read(folders[1:]).text


def test_faults_and_scores_of_fewer_clients_are_reported(make, tmp_path):
    """Faults were in rounds.jsonl only, and a partial score looked like any other."""
    rows = make.rows(rounds=20)
    for row in rows[5:8]:
        row.faults["no reply before the deadline"] = [row.round % 2]
        row.faults["not needed: enough had replied"] = [3]
    rows[9].faults["not connected"] = [2]
    few = replace(rows[-1].test, examples=rows[-1].test.examples - 40)
    text = read(
        [make.save(tmp_path, make.record(), [*rows[:-1], replace(rows[-1], test=few)])]
    ).text
    assert "fedavg: no reply before the deadline, in 3 of 21 rounds (clients 0, 1)." in text
    assert "fedavg: not connected, in 1 of 21 rounds (client 2)." in text
    assert "not needed" not in text
    scored = sum(row.test is not None for row in rows)
    assert f"1 of {scored} scores were measured on fewer examples than the others" in text
    assert f"at the least {few.examples:,} of {few.examples + 40:,}" in text


def test_five_hundred_clients(make, tmp_path):
    methods = {"fedavg": {}, "fedgh": {"top": 0.88}}
    folders = make.comparison(
        tmp_path, methods, seeds=2, clients=500, rounds=8, every=4, per_client=True
    )
    html = render_report(load_runs(folders))
    assert "500 clients" in html
    assert "Too few seeds for a claim" in html
    assert len(html) < 400_000


def test_write_names_the_file(make, tmp_path):
    folder = make.save(tmp_path, make.record(), make.rows(rounds=2))
    assert write_report([folder.path], folder.path) == folder.path / "report.html"
    out = tmp_path / "deep" / "er" / "x.html"
    assert write_report([folder], out, title="Mine") == out
    assert "<title>Mine · fedkeel</title>" in out.read_text(encoding="utf-8")
    with pytest.raises(RunError):
        write_report([], out)


def test_the_report_knows_records_errors_and_files_only():
    allowed = ("records", "errors", "base.named_files", "report", "base.feature")
    for file in REPORT.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                named = [node.module or ""]
            for name in named:
                assert name.split(".")[0] not in ("torch", "ray", "flwr"), (file.name, name)
                if name.split(".")[0] == "fedkeel":
                    assert name.removeprefix("fedkeel.").startswith(allowed), (file.name, name)
