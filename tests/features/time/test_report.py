"""Virtual time in rows, tables, pages, figures and the progress."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from torch import nn

import fedkeel as fk
from fedkeel.features.progress.display import ProgressLines
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import ACCURACY
from fedkeel.report.columns import all_columns
from fedkeel.report.learning_curves import curve_charts
from fedkeel.report.page import write_report
from fedkeel.report.paper_figures import save_figures
from fedkeel.report.runs import load_runs
from fedkeel.runner.result import Result

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype("float32"), RNG.integers(0, 3, 60)
NEW = ("virtual_seconds", "staleness", "staleness_seconds")


def run(method: str, out: Path, system: fk.System | None = None) -> Result:
    return fk.run(
        method,
        task=fk.Task(lambda: nn.Linear(4, 3)),
        clients=fk.from_clients([(X[k::6], Y[k::6]) for k in range(6)]),
        test=(X, Y),
        rounds=4,
        local=fk.Local(lr=0.2, steps=2, batch_size=5),
        engine=fk.Engine(kind="sequential"),
        evaluation=fk.Evaluation(target=0.01),
        system=system,
        out=out,
        progress=False,
    )


HALF_AN_HOUR = fk.System(step_seconds=900.0)
"""A round of two steps takes half an hour."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    run("fedavg", root / "timed", HALF_AN_HOUR)
    run("fedbuff(buffer=2)", root / "buffered", HALF_AN_HOUR)
    run("fedprox", root / "plain")
    return {name: root / name for name in ("timed", "buffered", "plain")}


def test_rows_have_keys_where_they_have_values(folders: dict[str, Path]) -> None:
    lines = {
        name: [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
        for name, path in folders.items()
    }
    assert not any(key in row for row in lines["plain"] for key in NEW)
    assert [row["virtual_seconds"] for row in lines["timed"]] == [1800.0 * t for t in range(5)]
    assert not any(key in row for row in lines["timed"] for key in NEW[1:])
    first, *others = lines["buffered"]
    assert first["virtual_seconds"] == 0.0
    assert not any(key in first for key in NEW[1:])
    for row in others:
        assert len(row["staleness"]) == len(row["staleness_seconds"]) == len(row["clients"]) == 2
    for name, path in folders.items():
        for row, values in zip(RunFolder(path).rows(), lines[name], strict=True):
            assert row.virtual_seconds == values.get("virtual_seconds")
            assert row.staleness == values.get("staleness", [])
            assert row.staleness_seconds == values.get("staleness_seconds", [])


@pytest.mark.parametrize(
    ("key", "value"), [("virtual_seconds", "1"), ("staleness", [-1]), ("staleness_seconds", 3.0)]
)
def test_a_row_with_another_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        RoundRecord.from_json({"round": 1, key: value})


def test_the_time_until_a_target_has_a_column(folders: dict[str, Path]) -> None:
    (column,) = (c for c in all_columns(ACCURACY) if c.name == "virtual_seconds_to_target")
    assert (column.heading, column.unit, column.better) == ("to target", "hours", "low")
    assert column.description == "Virtual time until the accuracy reaches the target."
    timed, plain = (load_runs([folders[name]])[0] for name in ("timed", "plain"))
    reached = timed.summary.stat("rounds_to_target")
    found = timed.summary.stat("virtual_seconds_to_target")
    assert reached is not None
    assert found is not None
    assert found.mean == 1800.0 * reached.mean
    assert plain.summary.stat("virtual_seconds_to_target") is None
    (before,) = load_runs([folders["timed"]], target=0.999)
    assert before.summary.stat("virtual_seconds_to_target") is None


def test_curves_are_drawn_against_time_where_it_is_counted(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    methods = load_runs([folders["timed"], folders["plain"]])
    charts = curve_charts(methods, ACCURACY)
    assert list(charts) == ["rounds", "megabytes", "time"]
    figure = charts["time"].figure
    assert figure.layout.xaxis.title.text == "hours of virtual time"
    (line,) = figure.data
    assert list(line.x) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert charts["time"].description.startswith("Test accuracy against virtual time,")
    assert list(curve_charts(load_runs([folders["plain"]]), ACCURACY)) == ["rounds", "megabytes"]
    for file in save_figures(methods, None, tmp_path):
        if file.name != "curves-time.svg":
            continue
        texts = [
            text.strip() for e in ET.parse(file).iter() if "text" in e.tag for text in e.itertext()
        ]
        assert "hours of virtual time" in texts
        assert "fedavg" in texts
        assert "fedprox" not in texts
        break
    else:
        pytest.fail("there is no figure against time")


def test_the_page_has_time_where_a_run_has_it(folders: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report([folders["timed"], folders["plain"]], page)
    assert 'data-axis="time"' in page.read_text("utf-8")
    write_report([folders["plain"]], page)
    assert 'data-axis="time"' not in page.read_text("utf-8")


def test_the_progress_says_the_hours(folders: dict[str, Path]) -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = ProgressLines(console)
    lines.begin("run", 4, 0)
    lines.row("run", RunFolder(folders["timed"]).rows()[-1])
    lines.end("run", "finished")
    assert isinstance(console.file, io.StringIO)
    assert ", 2 virtual hours" in console.file.getvalue()
