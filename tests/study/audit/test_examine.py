"""An audit as users make it: in Python and by the command, resumed, refused, and on a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel import config
from fedkeel.config import build
from fedkeel.errors import ConfigError, RunError
from fedkeel.records.audit import AttackResult, AuditRecord, Picture, read_audit
from fedkeel.report.audit_page import render_audit_page
from fedkeel.report.audit_text import headline
from fedkeel.runner.ingredients import gather
from fedkeel.study.audit import examine as module
from study.audit.conftest import Arrays


def make() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def ask(digits: Arrays, method: str = "fedsgd", **settings: Any) -> AuditRecord:
    x, y = digits
    clients = fk.from_clients({"<a>": (x[:2], y[:2]), "b": (x[2:20], y[2:20])}, classes=10)
    torch.manual_seed(0)
    values = {"lbfgs": 3, "tries": 1, "iterations": 10, **settings.pop("attack", {})}
    return fk.audit(
        method,
        task=fk.Task(make),
        clients=clients,
        test=(x[100:300], y[100:300]),
        rounds=4,
        local=fk.Local(lr=0.1, epochs=1),
        attack=build(fk.Audit, values, "audit"),
        progress=False,
        **settings,
    )


def test_all_attacks_answer_and_are_not_made_again(
    digits: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = {"attacks": "linear,labels,dlg,cosine,loss,updates,lira", "shadows": 4}
    record = ask(digits, attack=attack, out=tmp_path)
    assert [r.attack for r in record.results] == attack["attacks"].split(",")
    assert record.skipped == ()
    assert record.results[0].target == "client <a>: 2 examples, 1 local step"  # the smaller one
    assert record.mean("linear", "psnr") > 40.0
    monkeypatch.setattr(module, "ATTACKS", {})
    monkeypatch.setattr(module, "lira", None)
    again = ask(digits, attack=attack, out=tmp_path)
    assert again.to_json() == record.to_json()
    page = render_audit_page(record)
    assert page.count("<img") == 2 * sum(len(r.pictures) for r in record.results) > 0
    assert "<script" not in page
    assert "`linear` recovered 100 % of the inputs" in headline(record)


def test_a_reconstruction_just_below_the_bound_is_named() -> None:
    """A person recognises many digits at 19 dB, so "nothing was recovered" would be too much."""
    numbers = {"recovered": 0.0, "psnr_best": 18.94}
    picture = Picture("data:,", "data:,", 18.94)
    made = AttackResult("cosine", "inputs", "", "", "", "", numbers, (picture,))
    worse = AttackResult("dlg", "inputs", "", "", "", "", {**numbers, "psnr_best": 7.0})
    nothing = AttackResult("linear", "inputs", "", "", "", "", {**numbers, "psnr_best": None})
    record = AuditRecord("a", "fedavg", 0, "client", 1, 1, 1, results=(nothing, worse, made))
    expected = "No reconstruction reached 20 dB; the best, by `cosine`, has 18.9 (look at it"
    assert headline(record).startswith(expected)
    assert repr(record).splitlines()[0] == "AuditRecord of fedavg, round 1 of 1"
    assert len(repr(record)) < 1000
    assert "has 18.9 (look at it: some can be recognised below that)" in render_audit_page(record)
    assert "look" not in headline(replace(record, results=(worse,)))
    assert headline(replace(record, results=(nothing,))).startswith("No input was recovered")


def test_what_is_seen_is_one_client_a_sum_or_the_models(digits: Arrays) -> None:
    views = {}
    for view in ("client", "sum", "release"):
        attack = {"attacks": "labels", "view": view, "round": 2}
        record = ask(digits, method="fedavg", attack=attack)
        (views[view],) = record.results
    assert views["client"].numbers["examples"] == 2.0
    assert views["sum"].target == "the mean of 2 clients: 20 examples, 1 local step"
    assert views["release"].numbers == pytest.approx(views["sum"].numbers)


def test_epsilon_of_the_round_is_in_the_record(digits: Arrays) -> None:
    privacy = fk.Privacy(epsilon=8.0, delta=1e-3, unit="client")
    attack = {"attacks": "labels", "view": "release", "round": 2}
    record = ask(digits, method="fedavg", attack=attack, privacy=privacy)
    assert 0.0 < record.epsilon < 8.0  # noise is meant for 4 rounds, and 2 were made
    assert (record.unit, record.delta) == ("client", 1e-3)


def test_what_does_not_apply_says_why(digits: Arrays) -> None:
    record = ask(digits, method="fedper", attack={"attacks": "dlg,linear"})
    assert not record.results
    assert {s.attack for s in record.skipped} == {"dlg", "linear"}
    assert "keep some parameters" in record.skipped[0].reason


def test_membership_needs_others_that_it_can_compare_with(digits: Arrays) -> None:
    x, y = digits  # the first ten are 0 to 9
    record = fk.audit(
        "fedavg",
        task=fk.Task(make),
        clients=fk.from_clients([(x[k : k + 1], y[k : k + 1]) for k in range(3)], classes=10),
        test=(x[3:10], y[3:10]),
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1),
        attack=fk.Audit(attacks=("loss", "updates", "lira"), shadows=4),
        progress=False,
    )
    assert record.results == ()
    reasons = {s.attack: s.reason for s in record.skipped}
    assert "none of the test examples of any client has a label" in reasons["loss"]
    assert reasons["updates"] == reasons["loss"]
    assert "no client has two examples" in reasons["lira"]


def test_baselines_and_rounds_beyond_the_run_are_refused(digits: Arrays) -> None:
    with pytest.raises(ConfigError, match="sends nothing"):
        ask(digits, method="local")
    with pytest.raises(ConfigError, match="not one of the run's"):
        ask(digits, attack={"round": 5})
    with pytest.raises(ConfigError, match="does not wait"):
        ask(digits, method="fedasync")
    with pytest.raises(ConfigError, match="several models"):
        ask(digits, method="ifca")
    privacy = fk.Privacy(epsilon=1.0, delta=1e-3, unit="client")
    with pytest.raises(RunError, match="ended before the round"):
        ask(digits, method="dpclient(sigma=4.0)", privacy=privacy, attack={"round": 4})
    with pytest.raises(ConfigError, match="attacks"):
        build(fk.Audit, {"attacks": "dgl"}, "audit")


def test_tables_of_clients_are_compared_with_test_rows_of_the_same_one(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, count in (("North", 300), ("South", 150)):
        rows = [
            f"{a:.3f},{b:.3f},{'yes' if a > -1 else 'no'}"
            for a, b in random.normal(size=(count, 2))
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,ill", *rows]))
    values = {
        "method": "fedavg",
        "rounds": 1,
        "data": {
            "source": [str(tmp_path / "North.csv"), str(tmp_path / "South.csv")],
            "label": "ill",
            "test_fraction": 0.2,
        },
        "partition": {"kind": "source"},
        "model": {"name": "mlp", "args": {"hidden": [8]}},
        "local": {"lr": 0.1, "epochs": 1},
    }
    attack = build(fk.Audit, {"attacks": "linear,labels,updates"}, "audit")
    experiment = build(config.Experiment, values, "experiment")
    record = module.examine(experiment, gather(experiment), attack)
    linear, labels, updates = record.results
    assert updates.target.startswith("client South: 120 examples")
    assert updates.numbers["others_alike"] == linear.numbers["others_alike"] == 1.0
    assert updates.numbers["others"] <= 30
    assert "dB, where held-out examples of the same client have" in linear.says
    yes = labels.numbers["labels_right_of_majority"]
    assert yes > 0.75 > labels.numbers["labels_right_of_even"]
    assert f"{120 * yes:.0f} by the test set's most frequent class for all" in labels.says


def test_the_command_writes_page_and_numbers(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedkeel.cli import app

    file = tmp_path / "e.toml"
    file.write_text(
        'method = "fedsgd"\nrounds = 2\n[data]\nsource = "digits"\n[partition]\nkind = "iid"\n'
        'clients = 200\n[model]\nname = "mlp"\nargs = { hidden = [16] }\n[local]\nlr = 0.1\n'
        "epochs = 1\n[cohort]\nclients = 3\n"
    )
    out = tmp_path / "out"
    arguments = ["audit", str(file), "--attacks", "linear,labels", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    values = json.loads((out / "audit.json").read_text())
    found = json.loads(result.stdout)
    assert found.pop("headline") == headline(read_audit(out))
    assert found == values
    assert [r["attack"] for r in values["results"]] == ["linear", "labels"]
    assert (out / "audit.html").stat().st_size > 1000
