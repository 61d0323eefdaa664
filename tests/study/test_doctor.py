"""The doctor says what was planted, repeats itself, and leaves a file that runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.config import load
from fedkeel.errors import DataError, TrainingError
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.doctor import DoctorRecord, Finding
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.report.doctor_page import render_doctor_page
from fedkeel.runner.ingredients import gather
from fedkeel.study.doctor.candidates import FOR_ONE_MODEL, candidates, reason_against
from fedkeel.study.doctor.data import measure_data
from fedkeel.study.doctor.examine import _experiment, examine
from fedkeel.study.doctor.findings import findings
from fedkeel.study.doctor.measurements import Measurements
from fedkeel.study.tune import tune

RANDOM = np.random.default_rng(0)
CENTRES = 3.0 * RANDOM.normal(size=(4, 6))
SEQUENTIAL = fk.Engine(kind="sequential")


def clients(
    sizes: list[int], classes: list[list[int]], shift: float = 0.0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Clients with so many examples of these classes, whose inputs are moved apart by `shift`."""
    made = {}
    for k, (size, own) in enumerate(zip(sizes, classes, strict=True)):
        y = np.resize(own, size)
        x = CENTRES[y] + RANDOM.normal(size=(size, 6)) + shift * np.eye(6)[k % 6]
        made[f"client {k}"] = x.astype(np.float32), y.astype(np.int64)
    return made


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def ask(data: dict[str, tuple[np.ndarray, np.ndarray]], **settings: object) -> DoctorRecord:
    model, buffers = settings.pop("model", plain), settings.pop("buffers", "refuse")
    federation = fk.from_clients(data, test=data, classes=4)
    local = settings.pop("local", fk.Local(lr=0.1, epochs=1, batch_size=10))
    return fk.doctor(
        task=fk.Task(model, buffers=buffers),
        clients=federation,
        rounds=2,
        local=local,
        engine=SEQUENTIAL,
        **settings,
    )


def measured(data: dict[str, tuple[np.ndarray, np.ndarray]]) -> Measurements:
    return measure_data(fk.from_clients(data, classes=4), 0)


def levels(found: Sequence[Finding]) -> dict[str, str]:
    return {finding.key: finding.level for finding in found}


ALL = [[0, 1, 2, 3]] * 4


def test_nothing_is_said_of_clients_that_are_alike() -> None:
    of_data = measured(clients([80] * 4, ALL))
    assert of_data.label_skew == 0.0
    assert of_data.input_skew < 0.2
    assert of_data.sizes.gini == 0.0


def test_one_class_at_each_client_is_label_skew() -> None:
    of_data = measured(clients([40] * 4, [[0], [1], [2], [3]]))
    assert of_data.labels is not None
    assert of_data.labels.variation == pytest.approx(0.75)
    found = levels(findings(of_data))
    assert found["labels"] == "problem"
    assert found["inputs"] == "fine"  # other labels do not make other inputs
    assert found["sizes"] == "fine"


def test_columns_that_differ_or_do_not_vary_are_named() -> None:
    data = clients([80] * 4, ALL)
    for place, (x, _) in enumerate(data.values()):
        x[:, 1] += 20.0 * place
        x[:, 2] = 0.0 if place == 3 else x[:, 2]
    federation = fk.from_clients(data, classes=4)
    names = tuple("abcdef")
    named = replace(federation, data=replace(federation.data, columns=names))
    of_data = measure_data(named, 0)
    assert of_data.columns_apart[0][0] == "b"
    assert len(of_data.columns_apart) <= 3
    assert of_data.constant == (("c", "client 3"),)
    (says,) = [item.says for item in findings(of_data) if item.key == "inputs"]
    assert " Most in 'b' (1." in says
    assert says.endswith(" Constant: 'c' at client 3.")
    (plain_says,) = [f.says for f in findings(measure_data(federation, 0)) if f.key == "inputs"]
    assert "Most in" not in plain_says  # its columns have no names


def test_a_lead_of_training_alone_is_never_fine() -> None:
    of_data = replace(measured(clients([40] * 4, ALL)), scores_by_lr={1.0: 0.755}, noise=0.03)

    def level(own: float, personal: bool = True) -> tuple[str, str]:
        found = findings(replace(of_data, local_own=own, judges_personal=personal))
        (finding,) = [item for item in found if item.key == "local"]
        return finding.level, finding.says

    assert level(0.75)[0] == "fine"
    assert level(0.80)[0] == "notable"
    assert "ahead by less than two standard errors of a score (6.0 %)" in level(0.80)[1]
    assert level(0.83)[0] == "problem"
    assert level(0.83, personal=False)[0] == "notable"
    assert "ahead by more than" in level(0.83)[1]


def test_unequal_sizes_are_quantity_skew() -> None:
    of_data = measured(clients([8, 8, 8, 200], ALL))
    assert of_data.sizes.ratio == 25.0
    found = levels(findings(of_data))
    assert found["sizes"] == "problem"
    assert found["labels"] == "fine"


def test_a_method_is_left_out_only_where_it_cannot_help() -> None:
    alike = replace(measured(clients([40] * 4, ALL)), steps=(4, 4))
    assert "4 local steps, where it is FedAvg exactly" in reason_against("fednova", alike)
    assert reason_against("fednova", replace(alike, steps=(1, 20))) == ""
    assert "no batch normalisation" in reason_against("fedbn+finetune", alike)
    assert reason_against("fedbn", replace(alike, has_batch_norm=True)) == ""
    assert {reason_against(c.method, alike) for c in FOR_ONE_MODEL if c.method != "fednova"} == {""}


def test_a_difference_within_chance_is_no_reason_for_a_method() -> None:
    near = replace(
        measured(clients([40] * 4, ALL)), local_own=0.90, scores_by_lr={0.1: 0.89}, noise=0.01
    )
    (aim,) = {c.aim(near) for c in candidates(True) if c.method in ("fedper", "ditto", "apfl")}
    assert "cannot be told" in aim
    assert "89" not in aim
    far = replace(near, scores_by_lr={0.1: 0.80})
    (aim,) = {c.aim(far) for c in candidates(True) if c.method in ("fedper", "ditto", "apfl")}
    assert "90.0 %" in aim
    assert "80.0 %" in aim


def test_the_advised_file_has_fedavg_as_the_reference(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    experiment = load(tmp_path / "small.toml")
    data = replace(measured(clients([40] * 4, ALL)), scores_by_lr={0.1: 0.5})
    for methods in (["scaffold", "fedgc"], ["scaffold", "fedavg"]):
        text = _experiment(experiment, data, list(candidates(False, methods)))
        (tmp_path / "advised.toml").write_text(text)
        advised = load(tmp_path / "advised.toml")
        assert advised.compare.methods.count("fedavg") == 1
        assert set(methods) <= set(advised.compare.methods)
        assert advised.method == methods[0]
        assert ("and of fedavg as the reference" in text) == ("fedavg" not in methods)


def test_other_inputs_with_batch_normalisation_ask_for_personal_normalisation() -> None:
    torch.manual_seed(0)

    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    record = ask(
        clients([60] * 4, ALL, shift=12.0),
        model=model,
        buffers="local",
        evaluation=fk.Evaluation(model="personal"),
        methods=["fedavg", "fedbn", "fedprox+nonsense"],
    )
    found = levels(record.findings)
    assert found["inputs"] == "problem"
    assert found["labels"] == "fine"
    assert "fedbn" in [run.method for run in record.pilot]
    assert set(record.methods) == {"fedavg", "fedbn"}
    assert [advice.method for advice in record.excluded] == ["fedprox+nonsense"]


def test_a_learning_rate_that_is_too_large_is_named() -> None:
    record = ask(
        clients([40] * 4, ALL),
        local=fk.Local(lr=20.0, epochs=1, batch_size=10),
        methods=["fedavg"],
    )
    found = record.finding("rate")
    assert found is not None
    assert found.level == "problem"
    assert found.numbers["best"] == pytest.approx(2.0)
    assert "too large" in found.says or "diverges" in found.says


FILE = """
name = "small"
rounds = 3
[data]
source = "digits"
limit = 300
[partition]
kind = "dirichlet"
clients = 5
alpha = 0.1
min_size = 10
[model]
name = "mlp"
args = { hidden = [8] }
[local]
lr = 0.1
epochs = 1
[cohort]
clients = 3
[engine]
kind = "sequential"
[tune]
trials = 1
"""


class Begun(ProgressDisplay):
    """Counts what is planned, and the runs that are begun."""

    def __init__(self) -> None:
        self.planned, self.begun, self.expected = 0, 0, ""

    def plan(self, runs: int, rounds: int, expected: str = "") -> None:
        self.planned, self.expected = runs, expected

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        self.begun += done < rounds


METHODS = ("fedavg", "fedgh", "fedgc", "scaffold", "fedexp", "fedprox(mu=0.1)")


def load_plain(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text())


def score_by_hand(run: Path) -> float:
    """The mean accuracy over the second half of a run's rounds."""
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    last = [row["test"]["accuracy"] for row in rows if row["round"] > rows[-1]["round"] / 2]
    return sum(last) / len(last)


def test_the_best_trials_are_advised_and_the_file_runs(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    experiment = load(tmp_path / "small.toml")
    parts, display = gather(experiment), Begun()
    record = examine(experiment, parts, None, tmp_path / "pilot", display, methods=METHODS)
    assert 0 < display.begun <= display.planned
    assert display.expected.startswith("about ")

    tried = [*record.advised, *record.not_advised]
    assert sorted(advice.method for advice in tried) == sorted(METHODS)
    assert record.reference is not None
    assert {advice.trial.rounds for advice in record.advised} == {3}  # all rounds
    assert record.reference.rounds == 3
    lengths = [advice.trial.rounds for advice in tried]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths.count(2) == 1  # half of the rounds, and not better than five others
    longest = [advice.trial.score for advice in tried if advice.trial.rounds == 3]
    assert longest == sorted(longest, reverse=True)
    best = record.advised[0].trial
    runs = [
        folder
        for folder in (tmp_path / "pilot").iterdir()
        if (settings := load_plain(folder))["method"] == best.tuned
        and settings["rounds"] == 3
        and settings["local"]["lr"] == best.lr
    ]
    assert [score_by_hand(run) for run in runs] == [pytest.approx(best.score)]

    again = Begun()
    second = examine(experiment, parts, None, tmp_path / "pilot", again, methods=METHODS)
    assert json.dumps(record.to_json()) == json.dumps(second.to_json())
    assert again.begun == 0  # finished runs are read
    page = render_doctor_page(record)
    assert all(advice.trial.tuned in page for advice in tried)

    (tmp_path / "advised.toml").write_text(record.experiment)
    advised = load(tmp_path / "advised.toml")
    beside = () if "fedavg" in record.methods else ("fedavg",)
    assert advised.compare.methods == (*beside, *record.methods)
    assert advised.local.lr == record.finding("rate").numbers["best"]
    assert len(set(record.methods)) == 3
    result = tune(advised, gather(advised), record.methods, advised.tune, tmp_path / "tune")
    assert [row.method for row in result.rows] == list(record.methods)
    assert all(row.value is not None for row in result.rows)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["global", "personal"])
def test_every_usual_method_can_be_tried(model: str) -> None:
    evaluation = fk.Evaluation(model=model)
    record = ask(clients([40, 20, 40, 60], ALL), evaluation=evaluation)
    usual = {candidate.method for candidate in candidates(model == "personal")}
    tried = {advice.method for advice in (*record.advised, *record.not_advised)}
    left_out = {advice.method for advice in record.excluded}
    assert tried | left_out == usual
    assert left_out == ({"fedbn", "fedbn+finetune"} if model == "personal" else set())
    assert len(record.advised) == 3


def test_methods_that_diverge_in_all_trials_are_no_advice() -> None:
    with pytest.raises(TrainingError, match="diverged in each of its trials"):
        ask(clients([20, 20], ALL[:2]), methods=["fedadam(lr=1e30)"])


def test_clients_without_examples_to_hold_out_are_refused() -> None:
    data = {k: (x[:2], y[:2]) for k, (x, y) in clients([10] * 4, ALL).items()}
    with pytest.raises(DataError, match="hold any out"):
        ask(data)
