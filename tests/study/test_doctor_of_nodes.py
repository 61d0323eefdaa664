"""What the doctor says of statistics of sites: the numbers that it has of examples."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from commands import call
from fedkeel.config import to_toml
from fedkeel.data.read.scaling import Moments
from fedkeel.flower.server.statistics import collect, read_kinds
from fedkeel.records.node_statistics import (
    FILE,
    ColumnStatistics,
    Counts,
    NodeStatistics,
    SiteStatistics,
)
from fedkeel.report.doctor_page import render_doctor_page
from fedkeel.report.doctor_text import headline, terminal_page
from fedkeel.study.doctor.heterogeneity import label_skew, moment_skew, size_skew
from fedkeel.study.doctor.nodes import judge_statistics
from sites import QUICK, SIZES, experiment, grid_of, write_tables


def test_sites_are_judged_by_their_statistics(tmp_path: Path) -> None:
    tables, made = write_tables(tmp_path), experiment()
    record = judge_statistics(made, collect(grid_of(tmp_path, made), made, read_kinds("all")))
    histogram = [[table["kind"].count(name) for name in ("no", "yes")] for table in tables]
    labels, sizes, inputs = (record.finding(key) for key in ("labels", "sizes", "inputs"))
    assert labels is not None
    assert labels.numbers["total_variation"] == label_skew(np.array(histogram)).variation
    assert sizes is not None
    assert sizes.numbers["gini"] == size_skew(SIZES).gini
    moments = []
    for table in tables:
        known = [
            np.array([value for value in table[name] if value is not None])
            for name in ("age", "dose", "balance")
        ]
        mean, squares = ([f(column) for column in known] for f in (np.mean, np.var))
        count = len(table["age"])
        moments.append(Moments(count, torch.tensor(mean), count * torch.tensor(squares)))
    skew = moment_skew(moments, SIZES)
    assert skew is not None
    assert inputs is not None
    assert inputs.numbers["distance"] == pytest.approx(skew.distance, rel=1e-5)
    assert inputs.level == "fine"
    assert record.client_names == ("site 0", "site 1", "site 2")
    stream = StringIO()
    Console(width=80, file=stream).print(terminal_page(record))
    text = stream.getvalue()
    page = render_doctor_page(record)
    for words in ("Nothing was trained", "Label skew", "Nothing stands out."):
        assert words in text
        assert words in page
    assert "Worth tuning" not in text + page
    assert max(map(len, text.splitlines())) <= 80


def test_of_secure_sums_only_sizes_are_known(tmp_path: Path) -> None:
    write_tables(tmp_path)
    made = experiment(flower={**QUICK, "secure_aggregation": True})
    record = judge_statistics(made, collect(grid_of(tmp_path, made), made, ("labels", "moments")))
    levels = {finding.key: finding.level for finding in record.findings}
    assert levels == {"labels": "unknown", "sizes": "fine", "inputs": "unknown"}
    assert headline(record) == "Nothing stands out of what is known."
    assert record.histogram == ()


def test_a_federation_is_asked_for_the_kinds_that_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables(tmp_path)
    made, file = experiment(), tmp_path / "sites.toml"
    file.write_text(to_toml(made))
    policy = '[statistics]\nkinds = ["labels", "missing", "categories", "quantiles"]\n'

    def asked(_: object, out: Path, name: str, kinds: str) -> NodeStatistics:
        assert name == "here"
        return collect(grid_of(tmp_path, made, policy), made, read_kinds(kinds))

    monkeypatch.setattr("fedkeel.flower.local.statistics.of_federation", asked)
    words = ["doctor", file, "--federation", "here", "--out", tmp_path / "out", "--json"]
    refused = call(*words)
    assert refused.code == 2
    assert "site 0, site 1, site 2" in refused.err
    assert "labels, missing, categories, quantiles\n" in refused.err
    done = call(*words, "--kinds", "quantiles,labels")
    assert done.code == 0, done.err
    levels = {finding["key"]: finding["level"] for finding in done.json["findings"]}
    assert levels["labels"] != "unknown"
    assert levels["inputs"] == "unknown"


def test_sites_whose_means_are_far_apart_stand_out(tmp_path: Path) -> None:
    write_tables(tmp_path)
    made = experiment()
    found = collect(grid_of(tmp_path, made), made, ("labels", "moments"))
    *others, last = found.sites
    shifted = tuple(
        column if column.mean is None else replace(column, mean=column.mean + 500.0)
        for column in last.columns
    )
    record = judge_statistics(made, replace(found, sites=(*others, replace(last, columns=shifted))))
    inputs = record.finding("inputs")
    assert inputs is not None
    assert inputs.level == "problem"
    assert inputs.numbers["between"] == pytest.approx(1.0, abs=0.35)


def sites_of(
    labels: list[tuple[tuple[int, ...], int]], means: list[dict[str, float | None]]
) -> NodeStatistics:
    """Statistics of sites whose counts are from 10 on; each column has a deviation of its mean."""
    sites = []
    for number, ((shown, rest), of_site) in enumerate(zip(labels, means, strict=True)):
        size = sum(shown) + rest
        columns = tuple(
            ColumnStatistics(name, known=0)
            if mean is None
            else ColumnStatistics(name, known=size, mean=mean, deviation=mean)
            for name, mean in of_site.items()
        )
        counts = Counts(shown, rest)
        sites.append(SiteStatistics(f"site {number}", size, 10, {}, counts, columns))
    total = SiteStatistics("all", sum(site.examples for site in sites), 10)
    return NodeStatistics("sites", ("labels", "moments"), False, ("no", "yes"), (*sites,), total)


def test_a_site_that_tells_of_no_label_is_named_and_not_called_alike() -> None:
    """Of four hospitals 45, 33, 94 and 75 % are ill; the third hides that 6 are not."""
    means: list[dict[str, float | None]] = [{"age": 50.0}] * 4
    labels = [((159, 129), 0), ((188, 91), 0), ((0, 0), 108), ((47, 138), 0)]
    record = judge_statistics(experiment(), sites_of(labels, means))
    found = record.finding("labels")
    assert found is not None
    assert found.level == "notable"
    assert "alike" not in found.says
    assert "differ between clients, by less than what counts as skew" in found.says
    assert "Without site 2, where a label is too rare for any to be told" in found.says
    assert "Nearly all examples have the same label at site 2" in found.says
    assert any("108 at site 2" in note for note in record.notes)
    assert record.label_names == ("no", "yes", "in no count")
    assert record.histogram[2] == (0, 0, 108)
    assert "Worth a look: label skew." in headline(record)
    few = judge_statistics(experiment(), sites_of([*labels[:2], ((0, 0), 15)], means[:3]))
    found = few.finding("labels")
    assert found is not None
    assert "Without site 2" in found.says
    assert "Nearly all" not in found.says  # both labels may have fewer than ten


def test_columns_that_sites_differ_in_are_named() -> None:
    labels = [((150, 150), 0)] * 3
    means: list[dict[str, float | None]] = [
        {"age": 50.0, "cholesterol": 248.0, "vessels": 1.0},
        {"age": 50.0, "cholesterol": 0.0, "vessels": None},
        {"age": 50.0, "cholesterol": 240.0, "vessels": None},
    ]
    found = judge_statistics(experiment(), sites_of(labels, means)).finding("inputs")
    assert found is not None
    assert "Most in 'cholesterol' (" in found.says
    assert "'age'" not in found.says
    assert "Constant: 'cholesterol' at site 1." in found.says
    assert "Not told by every site, and left out: 'vessels'." in found.says


def test_labels_are_called_alike_only_where_they_are() -> None:
    means: list[dict[str, float | None]] = [{"age": 50.0}] * 2
    for ill, alike in ((150, True), (155, True), (190, False), (250, False)):
        labels = [((150, 150), 0), ((300 - ill, ill), 0)]
        found = judge_statistics(experiment(), sites_of(labels, means)).finding("labels")
        assert found is not None
        assert ("are distributed alike" in found.says) == alike


def test_the_command_judges_a_file_of_statistics(tmp_path: Path) -> None:
    write_tables(tmp_path)
    made, file = experiment(), tmp_path / "sites.toml"
    file.write_text(to_toml(made))
    found = collect(grid_of(tmp_path, made), made, ("labels", "moments"))
    found.write(tmp_path)
    out = tmp_path / "out"
    words = ["doctor", file, "--out", out, "--statistics"]
    done = call(*words, tmp_path / FILE, "--json")
    assert done.code == 0, done.err
    assert done.json == judge_statistics(made, found).to_json()
    assert (out / "doctor.html").exists()
    assert json.loads((out / "doctor.json").read_text()) == done.json
    wrong = call(*words, file)
    assert wrong.code == 2
    assert "The statistics of the sites cannot be read" in wrong.err
    both = call(*words, tmp_path / FILE, "--federation", "here")
    assert "and not both" in both.err


def test_mistakes_of_the_command(tmp_path: Path) -> None:
    write_tables(tmp_path)
    file = tmp_path / "sites.toml"
    file.write_text(to_toml(experiment()))
    words = ["flower", "stats", file]
    data = [word for i in range(3) for word in ("--data", tmp_path / f"{i}.csv")]
    cases = (
        (words, "0 times --data"),
        ([*words, *data, "--federation", "here"], "beside --federation"),
        ([*words, *data], "A site answers only as far as its policy consents"),
        ([*words, *data, "--kinds", "labels,names"], "There are no such statistics"),
        (["doctor", file], "--statistics FILE, judges the statistics"),
        (["doctor", file, "--kinds", "labels"], "--kinds goes with --federation"),
        (["doctor", file, "--federation", "here", "--kinds", "names"], "no such statistics"),
        ([*words, "--federation", "here", "--secure"], "have policies and keys of their own"),
        ([*words, "--federation", "here", "--policy", file], "have policies and keys of their own"),
        (["doctor", file, "--statistics", file, "--methods", "fedavg"], "--methods goes neither"),
        (["doctor", file, "--federation", "here", "--jobs", "1"], "--jobs goes neither"),
        (["doctor", file, "--statistics", file, "--rounds", "2"], "--rounds goes neither"),
    )
    for case, reason in cases:
        done = call(*case)
        assert done.code == 2
        assert reason in done.err
