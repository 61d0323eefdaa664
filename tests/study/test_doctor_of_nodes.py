"""What the doctor says of statistics of sites: the numbers that it has of examples."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from fedkeel.data.read.scaling import Moments
from fedkeel.flower.server.statistics import collect, read_kinds
from fedkeel.report.doctor_page import render_doctor_page
from fedkeel.report.doctor_text import terminal_page
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
    assert record.histogram == ()


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
