"""What a notebook shows: tables, curves, pages, partitions, bars; and the notebooks of the docs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import fedkeel as fk
from fedkeel.study.comparison import Comparison
from toys import Net, federation, held

PAGES = Path(__file__).parents[2] / "docs" / "getting-started"
NOTEBOOKS = ("first-comparison", "own-data-and-model", "own-method", "is-it-worth-it")


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return fk.compare(
        "fedavg, fedprox(mu=0.1)",
        task=fk.Task(Net),
        clients=federation(),
        test=held(),
        rounds=2,
        seeds=2,
        local=fk.Local(lr=0.05, epochs=1, batch_size=8),
        engine=fk.Engine(kind="sequential"),
        progress=False,
    )


def test_a_comparison_and_a_run_show_themselves(comparison: Comparison) -> None:
    shown = comparison._repr_html_()
    rows = re.findall(r"<tr><th><code>(.*?)</code>", shown)
    assert rows == ["fedavg", "fedprox(mu=0.1)"]
    last = comparison.rows[0]["last"]
    assert f"{100 * last:.2f}" in shown
    assert "Nothing can be said against" in shown
    result = comparison.results[0]
    assert "fedavg</code></b>, seed 0: finished" in result._repr_html_()
    frame = comparison.to_frame("rounds")
    one = frame[(frame["method"] == "fedavg") & (frame["seed"] == 0)]
    assert list(zip(one["round"], one["accuracy"], strict=True)) == result.scores()
    methods = comparison.to_frame()
    assert list(methods["method"]) == rows
    assert methods["last"][0] == last


def test_a_comparison_names_the_metrics_that_its_table_has_not() -> None:
    def ones(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(labels))

    shared = {
        "clients": federation(),
        "test": held(),
        "rounds": 1,
        "local": fk.Local(lr=0.05, epochs=1),
        "engine": fk.Engine(kind="sequential"),
    }
    study = fk.Simulation(task=fk.Task(Net, metrics=["accuracy", fk.metric(ones)]), **shared)
    found = study.compare("fedavg", seeds=1, progress=False)
    line = 'Also measured: ones and loss; see to_frame("rounds"), or report().'
    assert str(found).splitlines()[-1] == line
    assert str(found) == repr(found)
    assert "Also measured: ones and loss" in found._repr_html_()
    assert not any("Also measured" in note for note in found.notes)  # the command has no to_frame
    assert list(found.to_frame("rounds")["ones"]) == [1.0, 1.0]
    assert "ones" in found.report().html
    only = fk.Simulation(task=fk.Task(Net, metrics=["accuracy"]), **shared)
    assert "Also measured" not in str(only.compare("fedavg", seeds=1, progress=False))


def test_curves_and_the_page(comparison: Comparison, tmp_path: Path) -> None:
    lines = [trace for trace in comparison.plot().data if trace.fill != "toself"]
    assert [trace.name for trace in lines] == ["fedavg", "fedprox(mu=0.1)"]
    seeds = [result.scores() for result in comparison.results if result.record.method == "fedavg"]
    means = [50 * (a[1] + b[1]) for a, b in zip(*seeds, strict=True)]
    assert list(lines[0].y) == pytest.approx(means, rel=1e-5)
    assert comparison.plot("loss").layout.yaxis.title.text.startswith("test loss")
    with pytest.raises(fk.FedkeelError, match="no metric 'f1'"):
        comparison.plot("f1")
    page = comparison.report()
    assert page.save(tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    assert page._repr_html_().startswith("<iframe")
    assert '"' not in page._repr_html_().split('srcdoc="')[1].split('" style=')[0]


def test_a_partition_shows_who_has_what() -> None:
    x, y = [[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1]
    shown = fk.by_client(x, y, ["north", "<b>", "north", "north"])._repr_html_()
    cells = re.findall(r"<td[^>]*>(.*?)</td>", shown)
    assert re.findall(r"<tr><th>(.*?)</th>", shown) == ["client", "&lt;b&gt;", "north"]
    assert cells == ["1", "1", "0", "3", "1", "2"]
    assert "2 clients, 4 training examples." in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_of_the_docs_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a kernel, as when the site is built; its bars are drawn into an output of the cell."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read(PAGES / f"{name}.ipynb", 4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    kinds = {
        kind
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        for kind in output.get("data", ())
    }
    assert "application/vnd.plotly.v1+json" in kinds
    assert name == "is-it-worth-it" or "text/html" in kinds
