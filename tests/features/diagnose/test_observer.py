"""What a run measures of its rounds, against NumPy; and that measuring changes no bit of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
import toys
from fedkeel.cli.common import ExperimentSource
from fedkeel.cli.experiment import read_experiment
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError, RunError
from fedkeel.features.diagnose.settings import KINDS
from fedkeel.records.rows import RoundRecord
from fedkeel.report.page import write_report
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start

FROM_UPDATES = "drift, conflict"
FROM_MODELS = "forgetting, global_forgetting, participation"


def zero_model() -> nn.Module:
    """A linear model that begins at zero."""
    model = nn.Sequential(nn.Linear(5, 3))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def linear_run(kinds: str, rounds: int = 3, **more: object) -> Result:
    """A run of softmax regression in float64, whose clients make one step on all their examples."""
    return fk.run(
        "fedavg",
        task=fk.Task(zero_model),
        clients=toys.federation(clients=5),
        test=toys.held(),
        rounds=rounds,
        local=fk.Local(lr=0.8, epochs=1, batch_size="all"),
        clients_per_round=3,
        engine=fk.Engine(kind="sequential", dtype="float64"),
        diagnose=kinds,
        **more,
    )


class Restated:
    """The same run in NumPy, from the equations: parameters [3, 6], the bias last."""

    def __init__(self, result: Result) -> None:
        data, federation = toys.federation(clients=5).data, toys.federation(clients=5)
        self.x = np.c_[data.x.double().numpy(), np.ones(len(data))]
        self.y, self.rows = data.y.numpy(), [federation.client(k) for k in range(5)]
        self.cohorts = [row.clients for row in result.rows[1:]]
        self.test = toys.held()

    def loss(self, theta: np.ndarray, rows: np.ndarray) -> float:
        return float(-self.log_p(theta, self.x[rows])[np.arange(len(rows)), self.y[rows]].mean())

    @staticmethod
    def log_p(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        scores = x @ theta.T
        return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    def update(self, theta: np.ndarray, client: int) -> np.ndarray:
        x, y = self.x[self.rows[client]], self.y[self.rows[client]]
        slope = (np.exp(self.log_p(theta, x)) - np.eye(3)[y]).T @ x / len(y)
        return -0.8 * slope

    def mean(self, theta: np.ndarray, clients: list[int]) -> np.ndarray:
        sizes = np.array([len(self.rows[k]) for k in clients], dtype=float)
        updates = np.array([self.update(theta, k) for k in clients])
        return np.tensordot(sizes / sizes.sum(), updates, axes=1)

    def accuracies(self, theta: np.ndarray) -> np.ndarray:
        x = np.c_[self.test.x.double().numpy(), np.ones(len(self.test))]
        hit = (x @ theta.T).argmax(axis=1) == self.test.y.numpy()
        return np.array([hit[self.test.y.numpy() == c].mean() for c in range(3)])


@pytest.fixture(scope="module")
def result() -> Result:
    return linear_run(f"{FROM_MODELS}, {FROM_UPDATES}")


@pytest.fixture(scope="module")
def thetas(result: Result) -> list[np.ndarray]:
    """The global model after each round."""
    restated = Restated(result)
    end = np.c_[result.params["0.weight"].numpy(), result.params["0.bias"].numpy()]
    path = [np.zeros((3, 6))]
    for cohort in restated.cohorts:
        path.append(path[-1] + restated.mean(path[-1], cohort))
    np.testing.assert_allclose(path[-1], end, atol=1e-10)
    return path


def test_forgetting_is_that_of_fedreg_and_fedgc(result: Result, thetas: list[np.ndarray]) -> None:
    restated = Restated(result)
    for t in (2, 3):
        theta, cohort, previous = thetas[t - 1], restated.cohorts[t - 1], restated.cohorts[t - 2]
        models = [theta + restated.update(theta, j) for j in cohort]
        before = [restated.loss(theta, restated.rows[i]) for i in previous]
        after = [np.mean([restated.loss(m, restated.rows[i]) for m in models]) for i in previous]
        found, by_client = result.rows[t].diagnostics, result.rows[t].breakdowns
        assert found["forgetting.loss_before"] == pytest.approx(np.mean(before), abs=1e-10)
        assert found["forgetting.loss_after"] == pytest.approx(np.mean(after), abs=1e-10)
        expected = {str(i): a - b for i, a, b in zip(previous, after, before, strict=True)}
        assert by_client["forgetting.increase.client"] == pytest.approx(expected, abs=1e-10)
        everybody = np.concatenate(restated.rows)
        assert found["global_forgetting.loss_before"] == pytest.approx(
            restated.loss(theta, everybody), abs=1e-10
        )
        assert found["global_forgetting.loss_after"] == pytest.approx(
            np.mean([[restated.loss(m, rows) for m in models] for rows in restated.rows]), abs=1e-10
        )
        history = np.array([restated.accuracies(theta) for theta in thetas[1 : t + 1]])
        lost = history[:-1].max(axis=0) - history[-1]
        assert found["forgetting.by_class"] == pytest.approx(lost.mean())
        assert list(by_client["forgetting.lost_accuracy.class"].values()) == pytest.approx(lost)
    assert "forgetting.increase" not in result.rows[1].diagnostics  # there is no round before


def test_distances_between_models(result: Result, thetas: list[np.ndarray]) -> None:
    restated = Restated(result)
    theta, after, cohort = thetas[2], thetas[3], restated.cohorts[2]
    u = np.array([restated.update(theta, k).ravel() for k in cohort])
    mean, every = restated.mean(theta, cohort), restated.mean(theta, list(range(5)))
    found = result.rows[3].diagnostics
    for name, value in {
        "drift.norm": np.linalg.norm(u, axis=1).mean(),
        "drift.to_mean": np.linalg.norm(u - mean.ravel(), axis=1).mean(),
        "drift.to_server": np.linalg.norm(theta.ravel() + u - after.ravel(), axis=1).mean(),
        "participation.distance": np.linalg.norm(mean - every),
        "participation.relative": np.linalg.norm(mean - every) / np.linalg.norm(every),
        "participation.cosine": (mean * every).sum() / np.linalg.norm(mean) / np.linalg.norm(every),
    }.items():
        assert found[name] == pytest.approx(value, abs=1e-10), name
    products = [u[i] @ u[j] for i in range(3) for j in range(i)]
    assert found["conflict.share"] == np.mean([p < 0 for p in products])
    assert result.rows[3].breakdowns["drift.norm.layer"] == {
        "0": pytest.approx(found["drift.norm"])
    }


def test_the_entries_are_what_pandas_takes(result: Result) -> None:
    entries = result.diagnostics()
    assert {tuple(entry) for entry in entries} == {("round", "name", "axis", "label", "value")}
    shares = [e["value"] for e in entries if (e["name"], e["axis"]) == ("conflict.share", None)]
    assert shares == [row.diagnostics["conflict.share"] for row in result.rows[1:]]
    of_layer = [e for e in entries if e["round"] == 2 and e["axis"] == "layer"]
    assert {e["label"] for e in of_layer} == {"0"}


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("scaffold", {"kind": "workers", "workers": 2}),
        ("fedavg", {"kind": "vectorized", "workers": 1, "parallel_clients": 4}),  # only sums
        ("fedacg", {"kind": "vectorized", "workers": 2, "parallel_clients": 2}),
    ],
)
def test_no_bit_of_a_run_changes(method: str, engine: dict[str, object]) -> None:
    plain = start(prepare_toy(method, "", engine))
    seen = start(prepare_toy(method, f"{FROM_MODELS}, {FROM_UPDATES}", engine))
    assert plain.record.key == seen.record.key
    assert all(torch.equal(plain.params[k], seen.params[k]) for k in plain.params)
    assert [row.test for row in plain.rows] == [row.test for row in seen.rows]
    assert [row.train_loss for row in plain.rows] == [row.train_loss for row in seen.rows]
    assert "conflict.share" in seen.rows[2].diagnostics
    assert "conflict.share" not in seen.rows[1].diagnostics  # every = 2
    reference = start(prepare_toy(method, f"{FROM_MODELS}, {FROM_UPDATES}", {"kind": "sequential"}))
    for name, value in reference.rows[-1].diagnostics.items():
        assert seen.rows[-1].diagnostics[name] == pytest.approx(value, abs=2e-5), name


def prepare_toy(method: str, kinds: str, engine: dict[str, object], every: int = 2) -> Prepared:
    """A run of three rounds with dropout."""
    prepared = toys.prepared(method, lambda: toys.Net(dropout=0.3), name="seen", **engine)
    if not kinds:
        return prepared
    settings = prepared.settings.model_copy(
        update={"diagnose": fk.Diagnose(kinds=kinds, every=every)}
    )
    return prepare(settings, prepared.ingredients)


def test_a_run_that_was_killed_goes_on_with_its_diagnostics(tmp_path: Path) -> None:
    kinds = "forgetting, drift, participation, fisher"
    whole = start(prepare_toy("scaffold", kinds, {"kind": "sequential"}, every=1))

    class Stop(fk.Callback):
        def on_round_end(self, row: RoundRecord, model: object) -> None:
            if row.round == 2:
                raise ArithmeticError

    prepared = prepare_toy("scaffold", kinds, {"kind": "sequential"}, every=1)
    with pytest.raises(ArithmeticError):
        start(prepared, tmp_path / "run", callbacks=[Stop()])
    resumed = start(prepared, tmp_path / "run", resume=True)
    assert toys.same(whole, resumed)
    with pytest.raises(RunError, match="finished, without the diagnostics cka"):
        start(prepare_toy("scaffold", "cka", {"kind": "sequential"}), tmp_path / "run")
    read = start(prepare_toy("scaffold", "", {"kind": "sequential"}), tmp_path / "run")
    assert read.diagnostics() == whole.diagnostics()
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text("utf-8")
    for figure in ("forgetting_increase", "drift_norm_layer", "participation_relative"):
        assert f'id="figure-{figure}"' in page


def own_loss(output: Tensor, y: Tensor) -> Tensor:
    """A loss of which nobody knows whether it is a likelihood."""
    return nn.functional.cross_entropy(output, y, reduction="none")


def test_what_cannot_be_measured_is_refused_with_the_reason() -> None:
    data = toys.federation()

    def refused(method: str, kinds: str, task: fk.Task | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            fk.run(
                method,
                task=task or fk.Task(toys.Net),
                clients=data,
                test=toys.held(),
                rounds=1,
                local=fk.Local(lr=0.05, epochs=1, batch_size=8),
                diagnose=kinds,
            )
        return str(caught.value)

    text = refused("fedper", "drift, landscape")
    assert "'landscape' cannot be measured in a run of 'fedper'" in text
    assert "no global model is whole" in text
    assert "what can be measured: drift, conflict, participation" in text
    assert "not a log-likelihood" in refused("fedavg", "fisher", fk.Task(toys.Net, loss=own_loss))
    assert all(f"'{kind}'" in refused("fedavg", "forgeting") for kind in KINDS)


def test_a_comparison_with_baselines_diagnoses_the_methods() -> None:
    compared = fk.compare(
        "local, centralised, fedavg",
        task=fk.Task(toys.Net),
        clients=toys.federation(),
        test=toys.held(),
        rounds=1,
        seeds=1,
        local=fk.Local(lr=0.05, epochs=1, batch_size=8),
        engine=fk.Engine(kind="sequential"),
        diagnose=["conflict"],
    )
    found = {r.record.method: "conflict.share" in r.rows[-1].diagnostics for r in compared.results}
    assert found == {"local": False, "centralised": False, "fedavg": True}


def test_tasks_without_labels_have_what_has_a_meaning() -> None:
    """Quantities: no accuracy by class, and a score that is an error."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 5)).astype(np.float32)
    y = (x @ random.normal(size=(5, 1))).astype(np.float32)
    result = fk.run(
        "fedavg",
        task=fk.Task(lambda: nn.Linear(5, 1), loss="mse", metrics=["mae"], score="mae"),
        clients=fk.iid(x, y, clients=4, classes=0),
        test=(x, y),
        rounds=2,
        local=fk.Local(lr=0.05, epochs=1, batch_size=8),
        engine=fk.Engine(kind="sequential"),
        diagnose="forgetting, global_forgetting, cka, landscape, sharpness",
    )
    found, tables = result.rows[-1].diagnostics, result.rows[-1].breakdowns
    assert "forgetting.increase" in found
    assert "forgetting.by_class" not in found
    assert found["global_forgetting.loss_before"] == pytest.approx(result.rows[1].test["loss"])
    assert tables["landscape.global_score.position"]["0"] == pytest.approx(
        result.rows[2].test["mae"]
    )
    # The Hessian of the mean squared error of a linear model is 2 / n * X^T X, bias included.
    inputs = np.c_[x, np.ones(60)]
    expected = np.linalg.eigvalsh(2 / 60 * inputs.T @ inputs)[-1]
    assert found["sharpness.eigenvalue"] == pytest.approx(expected, rel=1e-3)


def test_the_command_takes_kinds() -> None:
    digits = ExperimentSource(None, "digits", (), trust=False)
    found = read_experiment(digits, "diagnose.every=3", "diagnose.kinds=forgetting,cka")
    assert found.diagnose == fk.Diagnose(kinds=("forgetting", "cka"), every=3)
    assert read_experiment(digits).diagnose == fk.Diagnose()
    with pytest.raises(ConfigError, match="'kinds' has 'cka' twice"):
        fk.Diagnose(kinds="cka, cka")
