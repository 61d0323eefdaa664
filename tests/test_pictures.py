"""Counts of what the last model answers: measured once by every engine, written, read and drawn."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from safetensors.torch import load_file
from sklearn.metrics import confusion_matrix, roc_auc_score
from torch import Tensor, nn

import fedkeel as fk
from each import each
from fedkeel import config
from fedkeel.flower.node.configuration import make_node
from fedkeel.flower.server.serve import RunOptions, serve
from fedkeel.records.folder import RunFolder
from fedkeel.records.pictures import BINS, PICTURES, Pictures, area_below, roc_curve
from fedkeel.report.page import render_report
from fedkeel.report.prediction_charts import prediction_charts
from fedkeel.report.runs import MethodResults, load_runs
from fedkeel.task.losses import LOSSES
from fedkeel.task.metrics.base import TaskInfo
from fedkeel.task.metrics.pictures import picture_metrics
from in_process_grid import InProcessGrid

RNG = np.random.default_rng(7)
X, X_TEST = RNG.normal(size=(60, 3)), RNG.normal(size=(130, 3))


def clients_of(y: Any) -> Any:
    return fk.from_clients({"a": (X[:25], y[:25]), "b": (X[25:], y[25:])})


def predictions(folder: Path, outputs: int) -> Tensor:
    """What the saved model answers on the test set, only with torch."""
    module = nn.Linear(3, outputs).double()
    module.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        answers: Tensor = module(torch.from_numpy(X_TEST))
    return answers


class NoAnswer(nn.Linear):
    """A network without an answer for some examples, where it does not learn."""

    def forward(self, x: Tensor) -> Tensor:
        answers = super().forward(x)
        return answers if self.training else answers.masked_fill(x[:, :1] > 1, torch.nan)


def made(folder: Path, outputs: int, y: Any, y_test: Any, **own: Any) -> Pictures | None:
    net = own.pop("net", nn.Linear)
    task = fk.Task(lambda: net(3, outputs), **own.pop("task", {}))
    fk.run(
        "fedavg",
        task=task,
        clients=clients_of(y),
        test=(X_TEST, y_test),
        rounds=2,
        local=fk.Local(lr=0.1, epochs=1, batch_size=8),
        engine=fk.Engine(dtype="float64", **own),
        out=folder,
    )
    return RunFolder(folder).pictures()


LABELS, LABELS_TEST = RNG.integers(0, 3, 60), RNG.integers(0, 3, 130)


@pytest.mark.parametrize("kind", ["sequential", "workers", "vectorized"])
def test_every_engine_counts_the_same_answers(tmp_path: Path, kind: str) -> None:
    workers = {"workers": 2} if kind == "workers" else {}
    pictures = made(tmp_path / "run", 3, LABELS, LABELS_TEST, kind=kind, **workers)
    assert pictures is not None
    answers = predictions(tmp_path / "run", 3).argmax(dim=1)
    assert pictures.confusion is not None
    assert (pictures.confusion == confusion_matrix(LABELS_TEST, answers)).all()
    assert pictures.probabilities is None
    assert PICTURES in RunFolder(tmp_path / "run").read_run().digests


def test_two_classes_have_a_roc_curve(tmp_path: Path) -> None:
    y, y_test = LABELS % 2, LABELS_TEST % 2
    pictures = made(tmp_path / "run", 2, y, y_test, kind="sequential")
    assert pictures is not None
    assert pictures.probabilities is not None
    shares = predictions(tmp_path / "run", 2).softmax(dim=1)[:, 1]
    assert pictures.probabilities.sum(axis=0).tolist() == [(y_test == 0).sum(), y_test.sum()]
    false_alarms, hits = roc_curve(pictures.probabilities)
    area = np.sum(np.diff(false_alarms) * (hits[1:] + hits[:-1]) / 2)
    assert area == pytest.approx(roc_auc_score(y_test, shares), abs=2e-3)
    chart = prediction_charts(load_runs([tmp_path / "run"]))["roc"]
    assert f"fedavg: AUROC {100 * area:.1f} %" in chart.description  # no metric of that name


def test_quantities_are_counted_between_the_training_targets(tmp_path: Path) -> None:
    y, y_test = X @ [1.0, -2.0, 0.5], X_TEST @ [1.0, -2.0, 0.5]
    task = {"loss": "mse", "metrics": ["mae"]}
    pictures = made(tmp_path / "run", 1, y, y_test, kind="sequential", task=task)
    assert pictures is not None
    assert (pictures.low, pictures.high) == (y.min(), y.max())
    edges = np.linspace(y.min(), y.max(), BINS + 1)
    answers = predictions(tmp_path / "run", 1)[:, 0].numpy()
    inside = [np.clip(v, edges[0], edges[-1]) for v in (y_test, answers)]
    expected, _, _ = np.histogram2d(*inside, bins=[edges, edges])
    assert (pictures.quantities == expected).all()
    (method,) = load_runs([tmp_path / "run"])
    chart = prediction_charts([method])["predictions0"]
    heat = chart.figure.data[0]
    assert np.array(heat.customdata).T.tolist() == expected.tolist()
    assert "Predicted against true values of fedavg" in chart.description


@each(
    ("scores", "target", "classes", "loss", "names"),
    [
        ((10,), (), 10, "cross_entropy", ["confusion"]),
        ((2,), (), 2, "cross_entropy", ["confusion", "probabilities"]),
        ((1,), (), 2, "bce", ["confusion", "probabilities"]),
        ((51,), (), 51, "cross_entropy", []),
        ((64,), (), 10, "cross_entropy", []),  # scores that are of no class
        ((5,), (5,), 2, "bce", []),  # several labels
        ((3, 8, 8), (8, 8), 3, "cross_entropy", ["confusion"]),
        ((8, 8), (8, 8), 2, "dice", ["confusion"]),
        ((7, 20), (7,), 20, "token_cross_entropy", []),
        ((1,), (), 0, "mse", ["quantities"]),
        ((1,), (), 0, "poisson", ["quantities"]),
        ((2,), (2,), 0, "mse", []),
        ((1,), (2,), 0, "cox", []),
    ],
)
def test_which_tasks_have_which_pictures(
    scores: tuple[int, ...], target: tuple[int, ...], classes: int, loss: str, names: list[str]
) -> None:
    targets = torch.rand(4, *target) if not classes else torch.zeros(4, *target).long()
    metrics = picture_metrics(TaskInfo(scores, target, classes), LOSSES[loss], targets)
    assert [metric.name for metric in metrics] == names
    assert len(pickle.dumps(metrics)) < 2000  # workers that are spawned receive them


def test_answers_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    def run(name: str, outputs: int, y: Any, y_test: Any, loss: str) -> Pictures:
        pictures = made(
            tmp_path / name,
            outputs,
            y,
            y_test,
            kind="sequential",
            task={"loss": loss},
            net=NoAnswer,
        )
        assert pictures is not None
        return pictures

    silent = X_TEST[:, 0] > 1
    classes = run("classes", 3, LABELS, LABELS_TEST, "cross_entropy")
    assert classes.unanswered is not None
    assert classes.unanswered.tolist() == np.bincount(LABELS_TEST[silent], minlength=3).tolist()
    assert classes.confusion is not None
    assert classes.confusion.sum() == (~silent).sum()
    y_test = X_TEST[:, 1]
    quantities = run("quantities", 1, X[:, 1], y_test, "mse")
    assert quantities.unanswered is not None
    assert quantities.unanswered.tolist() == [silent.sum()]


def test_a_count_is_compared_with_what_the_model_means() -> None:
    info, targets = TaskInfo((1,), (), 0), torch.tensor([0.0, 40.0])
    (metric,) = picture_metrics(info, LOSSES["poisson"], targets)
    output = torch.tensor([[2.0], [9.0], [float("nan")]])  # exp(2) = 7.4, exp(9) is outside
    counts = metric.states(output, torch.tensor([5.0, -1.0, 3.0]), torch.zeros(3).long(), 1)
    assert counts.nonzero()[:, 1].tolist() == [0 * BINS + 39, 5 * BINS + 7, BINS**2]
    assert picture_metrics(info, LOSSES["mse"], torch.ones(3)) == ()
    assert picture_metrics(info, LOSSES["mse"], {"a": targets}) == ()


# ---- in the folder ------------------------------------------------------------------------------


def test_the_page_does_without_a_file_that_is_missing_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedkeel.report.html.get_plotlyjs", lambda: "")
    made(tmp_path / "run", 3, LABELS, LABELS_TEST, kind="sequential")
    methods = load_runs([tmp_path / "run"])
    html = render_report(methods)
    assert "Predictions of the last model" in html
    assert "figure-predictions0" in html
    assert "Numbers in the cells are percent of a true class." in html
    file = tmp_path / "run" / PICTURES
    file.write_bytes(file.read_bytes()[:-3])
    html = render_report(load_runs([tmp_path / "run"]))
    assert "pictures.safetensors cannot be read" in html
    assert "pictures.safetensors has changed since the run ended" in html
    assert "Predictions of the last model" not in html
    file.unlink()
    html = render_report(load_runs([tmp_path / "run"]))
    assert "Predictions of the last model" not in html
    assert "pictures.safetensors has been deleted since the run ended" in html


@each(
    "arrays",
    [
        {"confusion": np.ones((2, 3))},
        {"confusion": np.ones((51, 51))},
        {"confusion": -np.ones((2, 2))},
        {"confusion": np.ones((2, 2)), "unanswered": np.ones(3)},
        {"probabilities": np.ones((5, 3))},
        {"quantities": np.ones((40, 39)), "range": np.array([0.0, 1.0])},
        {"quantities": np.ones((40, 40))},
        {"quantities": np.ones((40, 40)), "range": np.array([1.0, 1.0])},
    ],
)
def test_other_arrays_are_refused(arrays: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"counts of another shape|no range"):
        Pictures.of_arrays(arrays)


# ---- charts -------------------------------------------------------------------------------------


def with_counts(method: MethodResults, *pictures: Pictures) -> MethodResults:
    run = method.runs[0]
    return replace(method, runs=tuple(replace(run, pictures=one) for one in pictures))


@pytest.fixture
def method(tmp_path: Path) -> MethodResults:
    made(tmp_path / "run", 3, LABELS, LABELS_TEST, kind="sequential")
    return load_runs([tmp_path / "run"])[0]


def test_seeds_are_added_up_in_a_confusion_matrix(method: MethodResults) -> None:
    first, second = np.array([[3, 1, 0], [0, 0, 4], [0, 0, 0]]), np.eye(3, dtype=int)
    both = with_counts(method, Pictures(first), Pictures(second))
    chart = prediction_charts([both])["predictions0"]
    heat = chart.figure.data[0]
    assert heat.z == ([0.8, 0.2, 0.0], [0.0, 0.2, 0.8], [0.0, 0.0, 1.0])
    assert list(heat.text[0]) == ["80", "20", ""]
    assert heat.customdata[1][2] == ["1", "2", 4]
    assert chart.description == (
        "Confusion matrix of fedavg: of a class 66.7 % are recognised on average. Most often "
        "wrong: 80.0 % of 1 are taken for 2."
    )
    assert chart.legend == ()
    many = with_counts(method, Pictures(np.eye(20, dtype=int)))
    chart = prediction_charts([many])["predictions0"]
    assert chart.figure.data[0].texttemplate == ""
    assert len(chart.legend) == 1
    assert "Most often wrong" not in chart.description


def test_answers_that_are_no_numbers_are_said(method: MethodResults) -> None:
    """They count as wrong in the shares, as in the metrics."""
    one = Pictures(np.diag([3, 0, 4]), unanswered=np.array([1, 2, 0]))
    chart = prediction_charts([with_counts(method, one)])["predictions0"]
    assert chart.figure.data[0].z == ([0.75, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0])
    assert chart.description == (
        "Confusion matrix of fedavg: of a class 58.3 % are recognised on average. 3 answers are "
        "NaN: they are in no column, and are wrong."
    )
    quantities = Pictures(quantities=np.eye(BINS, dtype=int), high=1.0, unanswered=np.array([5]))
    chart = prediction_charts([with_counts(method, quantities)])["predictions0"]
    assert "5 answers are NaN, and are left out." in chart.description
    assert Pictures.of_arrays(quantities.arrays()).unanswered == [5]


def test_names_of_classes_are_text(method: MethodResults) -> None:
    bad = '<a href="x">win</a>'
    record = method.record
    run = replace(
        method.runs[0],
        record=replace(record, data=replace(record.data, label_names=[bad, "b", "c"])),
        pictures=Pictures(np.eye(3, dtype=int)),
    )
    chart = prediction_charts([replace(method, runs=(run,))])["predictions0"]
    assert "<a" not in json.dumps(chart.figure.to_plotly_json())


def test_nothing_is_drawn_of_counts_that_are_all_zero(method: MethodResults) -> None:
    empty = Pictures(np.zeros((2, 2), dtype=int), np.array([[3, 0], [2, 0]]))
    assert prediction_charts([with_counts(method, empty)]) == {}


# ---- the models that the scores are of ----------------------------------------------------------


def own_labels() -> tuple[Any, Any]:
    """Return labels of two clients that disagree, and those of the test set, which are the first's.

    So an untrained model, the global one and each client's own have other scores.
    """
    truth = (X @ [1.0, -2.0, 0.5] > 0).astype(int)
    return np.concatenate([truth[:25], 1 - truth[25:]]), (X_TEST @ [1.0, -2.0, 0.5] > 0).astype(int)


JUDGED = [
    *(("local", "auto"), ("fedavg", "auto"), ("fedavg", "personal"), ("knnper", "personal")),
    *(("ditto", "auto"), ("ditto", "personal")),
    *(
        pytest.param(method, judge, marks=pytest.mark.slow)
        for method, judge in (
            *(("centralised", "auto"), ("knnper", "auto"), ("finetune", "auto")),
            *(("fedper", "auto"), ("local", "personal"), ("centralised", "personal")),
            *(("finetune", "personal"), ("fedper", "personal")),
        )
    ),
]


@pytest.mark.parametrize(("method", "judge"), JUDGED)
def test_pictures_are_of_the_models_that_the_table_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, judge: Any
) -> None:
    y, y_test = own_labels()
    for seed in (0, 1):
        fk.run(
            method,
            task=fk.Task(
                lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
                metrics=["accuracy", "auroc"],
            ),
            clients=clients_of(y),
            test=(X_TEST, y_test),
            rounds=2,
            local=fk.Local(lr=0.5, epochs=3, batch_size=8),
            evaluation=fk.Evaluation(model=judge),
            engine=fk.Engine(kind="vectorized" if seed else "sequential", dtype="float64"),
            seed=seed,
            out=tmp_path / str(seed),
        )
    methods = load_runs([tmp_path / "0", tmp_path / "1"])
    areas = []
    for run in methods[0].runs:
        assert run.pictures is not None
        confusion, last = run.pictures.confusion, run.rows[-1].test
        assert confusion is not None
        assert last is not None
        assert np.trace(confusion) / confusion.sum() == pytest.approx(last["accuracy"], abs=1e-12)
        areas.append(last["auroc"])
    description = prediction_charts(methods)["roc"].description
    assert f"AUROC {100 * np.mean(areas):.1f} %" in description
    is_own = judge == "personal" or method in ("local", "fedper")
    assert ("each client's own" in description) == is_own
    monkeypatch.setattr("fedkeel.report.html.get_plotlyjs", lambda: "")
    html = render_report(methods)
    assert ("Counts of the test set." in html) == (not is_own)
    assert "ROC curves are means over seeds" in html


# ---- nodes with data of their own ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "lie"),
    [("fedper(keep='fc2')", None), *(("fedavg", v) for v in (None, 1e9, -1.0, 0.5, float("nan")))],
)
def test_nodes_send_counts_and_no_examples(tmp_path: Path, method: str, lie: float | None) -> None:
    values = {
        "method": method,
        "rounds": 1,
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 8},
        "data": {"source": "nodes", "label": "kind", "labels": ["no", "yes"]},
        "partition": {"kind": "nodes", "clients": 2},
        "model": {"name": "mlp", "args": {"hidden": [5]}},
        "flower": {"deadline_seconds": 2.0, "poll_seconds": 0.01},
    }
    experiment = config.build(config.Experiment, values, "test")
    nodes = {}
    for i in range(2):
        lines = [f"{a:.4f},{b:.4f},{'yes' if a > 0 else 'no'}" for a, b, _ in X[i::2]]
        (tmp_path / f"{i}.csv").write_text("\n".join(["a,b,kind", *lines]) + "\n")
        place = {"partition-id": i, "data": str(tmp_path / f"{i}.csv"), "state": str(tmp_path)}
        nodes[100 + i] = make_node(experiment, place)
    grid = InProcessGrid(nodes)
    sizes = []

    def lies(kind: str, reply: RecordDict) -> RecordDict:
        if kind == "evaluate.pictures":
            states = reply["scores-0"]["states"]
            sizes.append(len(states))
            if lie is not None:
                reply["scores-0"]["states"] = [lie, *states[1:]]
        return reply

    grid.edits[100] = lies
    result = serve(grid, experiment, RunOptions(tmp_path / "run"))
    assert sizes[0] <= 30  # those that are not 0
    pictures = RunFolder(tmp_path / "run").pictures()
    assert pictures is not None
    assert pictures.confusion is not None
    last = result.rows[-1]
    assert last.test is not None
    counted = last.test if lie is None else last.sources["client 1"]
    assert pictures.confusion.sum() == counted.examples
    assert np.trace(pictures.confusion) / counted.examples == counted["accuracy"]


def test_a_task_without_pictures_writes_none(tmp_path: Path) -> None:
    task = {"loss": "mse"}
    y = RNG.normal(size=(60, 2))
    pictures = made(tmp_path / "run", 2, y, RNG.normal(size=(130, 2)), kind="sequential", task=task)
    assert pictures is None
    assert PICTURES not in RunFolder(tmp_path / "run").read_run().digests


def test_fewer_bins_hold_for_the_pictures_too(tmp_path: Path) -> None:
    """A site that asks for them sends no finer counts at the end of a run."""
    task = {"metrics": ["auprc", "auroc(bins=20)"]}
    y = (X[:, 0] > 0).astype(np.int64), (X_TEST[:, 0] > 0).astype(np.int64)
    pictures = made(tmp_path / "run", 2, *y, kind="sequential", task=task)
    assert pictures is not None
    assert pictures.probabilities is not None
    assert pictures.probabilities.shape == (22, 2)
    assert pictures.probabilities.sum() == len(X_TEST)
    last = RunFolder(tmp_path / "run").rows()[-1].test
    assert last is not None
    curve = roc_curve(pictures.probabilities)
    assert area_below(*curve) == pytest.approx(last["auroc"])
