"""A study in one object: its runs are those of the calls in one line, to the bit."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.base.feature import declared_tables
from fedkeel.errors import ArgumentError, CompositionError, ConfigError
from fedkeel.records.audit import AuditRecord
from fedkeel.records.doctor import DoctorRecord
from fedkeel.study.arguments import SharedArguments
from toys import Net, federation, held, same

SHARED = {
    "task": fk.Task(Net),
    "clients": federation(),
    "test": held(),
    "rounds": 3,
    "local": fk.Local(lr=0.05, epochs=1, batch_size=4),
    "participation": 0.5,
    "evaluation": fk.Evaluation(every=2),
    "stop": fk.Stop(patience=50),
    "adversary": fk.Adversary(kind="sign_flip", share=0.2),
    "system": fk.System(speed="lognormal", sigma=1.0),
    "engine": fk.Engine(kind="sequential"),
    "diagnose": "drift",
}
ONE_CALL: list[Callable[..., object]] = [fk.run, fk.compare, fk.doctor, fk.audit]


def flipped(x: torch.Tensor, y: torch.Tensor, random: np.random.Generator) -> tuple[object, object]:
    """A random change of a batch."""
    return (-x if random.random() < 0.5 else x), y


# --- the same numbers -----------------------------------------------------------------------------


def test_a_run_is_that_of_the_call_in_one_line(tmp_path: Path) -> None:
    """With settings of several features, in memory and from a folder."""
    study = fk.Simulation(**SHARED, augment=flipped)
    first = study.run("fedprox(mu=0.1)", seed=3, out=tmp_path)
    assert same(first, fk.run("fedprox(mu=0.1)", **SHARED, augment=flipped, seed=3))
    assert first.record.adversary is not None
    assert first.rows[1].virtual_seconds > 0
    again = study.run("fedprox(mu=0.1)", seed=3, out=tmp_path)
    assert (again.folder, again.record.key) == (tmp_path, first.record.key)
    assert not same(first, study.run("fedprox(mu=0.1)", seed=4))
    with pytest.raises(fk.FedkeelError):
        study.run("fedavg", seed=3, out=tmp_path)  # another run is there


def test_clients_that_hold_examples_out_need_no_test_set() -> None:
    given = held()
    x, y = given.x.numpy(), given.y.numpy()
    parts = {"a": (x[::2], y[::2]), "b": (x[1::2], y[1::2])}
    shared = {name: SHARED[name] for name in ("task", "rounds", "local", "engine")}
    clients = fk.from_clients(parts, holdout=0.25)
    study = fk.Simulation(**{**shared, "clients": clients})
    kept = clients.data.take(clients.holdout_rows)
    result = study.run("fedavg")
    assert result.rows[-1].test.examples == len(kept)
    same_test = fk.Simulation(**{**shared, "clients": clients, "test": kept}).run("fedavg")
    assert result.rows[-1].test == same_test.rows[-1].test
    with pytest.raises(fk.FedkeelError, match=r"fedkeel\.from_clients\(\.\.\., holdout=0\.25\)"):
        fk.Simulation(**{**shared, "clients": fk.from_clients(parts)})


def test_a_comparison_is_that_of_the_call_in_one_line() -> None:
    both = [
        fk.Simulation(**SHARED).compare("fedavg, scaffold", seeds=2, seed=5),
        fk.compare(["fedavg", "scaffold"], seeds=2, seed=5, **SHARED),
    ]
    one, two = (found.results for found in both)
    assert [(r.record.method, r.record.seed) for r in one] == [
        *(("fedavg", 5), ("fedavg", 6), ("scaffold", 5), ("scaffold", 6))
    ]
    assert all(same(a, b) for a, b in zip(one, two, strict=True))
    assert one[2].record.weights == "examples"
    assert fk.Simulation(**SHARED).run("scaffold").record.weights == "uniform"


def test_the_doctor_and_the_audit_are_those_of_the_calls_in_one_line() -> None:
    shared = {name: SHARED[name] for name in ("task", "clients", "test", "rounds", "local")}
    study = fk.Simulation(**shared)
    records: list[DoctorRecord] = [
        study.doctor(trial_rounds=1, methods=["fedavg", "fedprox"], seed=1),
        fk.doctor(**shared, trial_rounds=1, methods=["fedavg", "fedprox"], seed=1),
    ]
    assert records[0].advised
    assert records[0].to_json() == records[1].to_json()
    attack = fk.Audit(attacks="labels, loss", round=2)
    found: list[AuditRecord] = [
        study.audit("fedprox", attack=attack, seed=1),
        fk.audit("fedprox", **shared, attack=attack, seed=1),
    ]
    assert {result.attack for result in found[0].results} == {"labels", "loss"}
    assert found[0] == found[1]


def test_a_search(tmp_path: Path) -> None:
    study = fk.Simulation(**SHARED)
    rates = fk.Space(space={"local.lr": (0.01, 0.2)}, seeds=2)
    found = study.tune("fedavg, fedprox", rates, out=tmp_path / "search", seed=2)
    assert [row.method for row in found.rows] == ["fedavg", "fedprox"]
    assert {row.chosen["local.lr"] for row in found.rows} <= {0.01, 0.2}
    assert [len(trial.runs) for trial in found.trials] == [2] * 4
    assert all("seed2" in trial.runs[0] and "seed3" in trial.runs[1] for trial in found.trials)
    ranged = fk.Space(space={"local.lr": fk.Range(low=0.01, high=0.2)}, trials=1)
    with pytest.raises(ConfigError, match=r"write e\.g\. space=fedkeel\.Space"):
        study.tune("fedavg", {"local.lr": ranged}, out=tmp_path / "other")
    with pytest.raises(ConfigError, match="'out' is not a folder"):
        study.tune("fedavg", rates, out=3)
    with pytest.raises(ArgumentError, match=r"needs 'out'(.|\n)*  do   write e\.g\. out="):
        study.tune("fedavg, fedprox", rates)
    assert not (tmp_path / "other").exists()


def test_a_search_prints_its_table(tmp_path: Path) -> None:
    rates = fk.Space(space={"local.lr": (0.01, 0.2)})
    found = fk.Simulation(**SHARED).tune("fedavg, fedprox", rates, out=tmp_path / "search")
    assert repr(found) == str(found)
    lines = str(found).splitlines()
    assert lines[0].startswith("| method | best % | measured on | chosen | trials |")
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| `fedavg`", "| `fedprox`"]
    assert "local.lr=" in lines[2]
    end = (
        f"4 trials in {tmp_path / 'search'}; experiment files with the best settings in its best/."
    )
    assert lines[-1] == end
    assert len(list((tmp_path / "search" / "best").iterdir())) == 2
    assert len(str(found)) < 1200
    assert "<th><code>fedprox</code></th>" in found._repr_html_()
    assert end in found._repr_html_()
    assert "Interrupted after 4 trials; the same call" in str(replace(found, complete=False))


# --- checking -------------------------------------------------------------------------------------


def test_a_check_says_what_would_run() -> None:
    calls = []

    def model() -> nn.Module:
        calls.append(torch.initial_seed())
        return Net()

    study = fk.Simulation(**{**SHARED, "task": fk.Task(model)})
    checked = study.check("scaffold", seed=2)
    assert len(set(calls)) == 1
    ran = study.run("scaffold", seed=2).record
    assert (checked.describe, checked.key, checked.estimate) == (
        *(ran.describe, ran.key, ran.estimate),
    )
    assert checked.method == "scaffold"
    assert checked.warnings == ran.warnings[: len(checked.warnings)]


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("fedpox", {}),
        ("fedadam+fedyogi", {}),
        ("fedlc", {"clients": fk.iid([[0.5]] * 8, [0.5] * 8, 2), "test": ([[0.5]], [0.25])}),
        ("fedavg", {"task": fk.Task(nn.Linear(4, 3))}),
        ("fedavg", {"participation": 0.01}),
    ],
)
def test_a_check_refuses_what_a_run_refuses(method: str, changed: dict[str, object]) -> None:
    study = fk.Simulation(**{**SHARED, **changed})
    with pytest.raises(fk.FedkeelError) as by_run:
        study.run(method)
    with pytest.raises(type(by_run.value)) as by_check:
        study.check(method)
    assert str(by_check.value) == str(by_run.value)


@pytest.mark.parametrize("call", ["run", "check", "audit"])
def test_method_and_seed_are_checked(call: str) -> None:
    study = fk.Simulation(**SHARED)
    with pytest.raises(CompositionError, match="did you mean 'fedprox'"):
        getattr(study, call)("fedpox")
    with pytest.raises(ConfigError, match="'seed' cannot be used"):
        getattr(study, call)("fedavg", seed=-1)


# --- the value ------------------------------------------------------------------------------------


def test_it_is_a_value(tmp_path: Path) -> None:
    study = fk.Simulation(**SHARED, augment=flipped)
    study.run("fedavg")  # which leaves it as it was
    copy = pickle.loads(pickle.dumps(study))
    assert study == copy == fk.Simulation(**{**SHARED, "clients": federation()}, augment=flipped)
    assert hash(study) == hash(copy)
    assert same(study.run("fedavg", seed=1), copy.run("fedavg", seed=1))
    with pytest.raises(FrozenInstanceError):
        study.settings = copy.settings
    assert study != "fedavg"


@pytest.mark.parametrize(
    "changed",
    [
        {"rounds": 4},
        {"local": fk.Local(lr=0.06, epochs=1, batch_size=4)},
        {"clients": federation(5)},
        {"test": held(9)},
        {"task": fk.Task(lambda: Net())},
        {"augment": flipped},
        {"stop": None},
    ],
)
def test_others_are_not_equal(changed: dict[str, object]) -> None:
    assert fk.Simulation(**SHARED) != fk.Simulation(**{**SHARED, **changed})


def test_modules_are_equal_by_their_weights() -> None:
    def study(bias: float) -> fk.Simulation:
        torch.manual_seed(0)
        module = nn.Linear(5, 3)
        nn.init.constant_(module.bias, bias)
        return fk.Simulation(**{**SHARED, "task": fk.Task(module)})

    assert study(0.5) == study(0.5)
    assert study(0.5) != study(0.25)


def test_what_cannot_be_read_is_equal_to_itself_only(tmp_path: Path) -> None:
    class Logging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log = file

        def __deepcopy__(self, memo: object) -> nn.Module:
            return Logging()

    with open(tmp_path / "log", "w", encoding="utf-8") as file:
        task = fk.Task(Logging())
        one, two = (fk.Simulation(**{**SHARED, "task": task}) for _ in range(2))
        assert one == one
        assert one != two


def test_it_shows_what_was_chosen_in_a_few_lines() -> None:
    text = repr(fk.Simulation(**SHARED))
    assert text.startswith("Simulation(Net, 6 clients with 75 examples, 60 test examples, rounds=3")
    assert "local=Local(lr=0.05, epochs=1, batch_size=4)" in text
    assert "evaluation=Evaluation(every=2)" in text
    assert "privacy" not in text
    many = fk.Adversary(kind="sign_flip", clients=tuple(range(2000)))
    long = repr(fk.Simulation(**{**SHARED, "adversary": many, "track": fk.Track(project="p" * 99)}))
    for shown in (text, long):
        assert len(shown.splitlines()) <= 4
        assert max(map(len, shown.splitlines())) <= 96


# --- its arguments --------------------------------------------------------------------------------


def test_a_call_in_one_line_takes_what_its_method_and_the_simulation_take() -> None:
    """With the same defaults; so editors and `help` show every argument."""
    shared = inspect.signature(fk.Simulation).parameters
    assert SHARED.keys() <= shared.keys()
    for function in ONE_CALL:
        method = inspect.signature(getattr(fk.Simulation, function.__name__)).parameters
        own = {name: one.default for name, one in method.items() if name != "self"}
        taken = {name: one.default for name, one in inspect.signature(function).parameters.items()}
        assert taken == {**own, **{name: one.default for name, one in shared.items()}}


def test_a_checker_of_types_knows_every_argument() -> None:
    for function in (*ONE_CALL, fk.Simulation.__init__):
        hints = get_type_hints(inspect.unwrap(function), include_extras=True)
        assert get_args(hints["shared"]) == (SharedArguments,)
    types = get_type_hints(SharedArguments)
    for table, feature in declared_tables().items():
        if feature.__module__.startswith("fedkeel."):
            assert feature.settings_class in get_args(types[table])


def test_arguments_of_the_simulation_are_described() -> None:
    described = str(inspect.getdoc(fk.Simulation)).split("Args:")[1].split("Raises:")[0]
    for name in inspect.signature(fk.Simulation).parameters:
        assert f"\n    {name}: " in described


@pytest.mark.parametrize("call", [*ONE_CALL, fk.Simulation])
@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ("particpation", "did you mean 'participation'?"),
        ("num_rounds", "did you mean 'rounds'?"),
        ("lr", "set local.lr"),
    ],
)
def test_a_misspelt_argument(call: Callable[..., object], wrong: str, advice: str) -> None:
    methods = [] if call in (fk.doctor, fk.Simulation) else ["fedavg"]
    with pytest.raises(ArgumentError, match=advice) as found:
        call(*methods, **SHARED, **{wrong: 1})
    assert isinstance(found.value, TypeError)
    assert isinstance(found.value, fk.FedkeelError)
    name = call.__name__
    assert found.value.what == f"{name}() has no argument {wrong!r}."
    assert "'self'" not in str(found.value)


def test_a_misspelt_argument_of_the_call_itself() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'progress'"):
        fk.run("fedavg", **SHARED, progres=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sed'"):
        fk.Simulation(**SHARED).run("fedavg", sed=1)  # type: ignore[call-arg]


def test_missing_arguments() -> None:
    with pytest.raises(ArgumentError, match="run\\(\\) also needs 'clients', 'rounds' and 'local'"):
        fk.run("fedavg", task=fk.Task(Net))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'method'"):
        fk.run(**SHARED)  # type: ignore[call-arg]
