"""A search: equal budgets, the right measure, nothing made twice, the same after a kill."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from commands import experiment
from fedkeel import config
from fedkeel.config import Range, Space
from fedkeel.engine.choose import engine_rule, nominal_seconds
from fedkeel.engine.prepared import Ingredients
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.errors import CompositionError, ConfigError, DataError, RunError, TrainingError
from fedkeel.features.progress.display import REUSED, ProgressDisplay
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.study.compare import compare
from fedkeel.study.tune import tune
from fedkeel.study.tuning_result import Trial, TuningResult
from toys import Net, federation, held

RATES = {"local.lr": (0.001, 0.1, 1.0)}
TPE = Space(
    space={"local.lr": Range(low=0.001, high=1.0, log=True)},
    method={"fedprox": {"mu": Range(low=0.01, high=10.0, log=True)}},
    trials=6,
)
METHODS = ["fedavg", "fedprox"]


def ingredients(model: object = Net, test: fk.Dataset | None = None, seeds: int = 9) -> Ingredients:
    data = [federation(seed=seed) for seed in range(seeds)]
    return Ingredients(fk.Task(model), lambda seed: data[seed], test or held(), "toy")


def settings(**more: object) -> config.Run:
    values = {
        "name": "toy",
        "rounds": 3,
        "local": fk.Local(lr=0.05, epochs=1, batch_size=4),
        "cohort": fk.Cohort(clients=3),
        "engine": fk.Engine(kind="sequential"),
    }
    return config.Run(**{**values, **more})


def tuned(
    out: Path, methods: list[str], space: Space | None = None, **more: object
) -> TuningResult:
    space = space or Space(space=RATES)
    return tune(settings(**more), ingredients(), methods, space, out)


class Counts(ProgressDisplay):
    """Counts what is planned, begun from the start, continued, and read; may stop in between."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.planned, self.begun, self.rounds, self.reused = 0, 0, 0, 0
        self._stop_at = stop_at

    def plan(self, runs: int, rounds: int, expected: str = "") -> None:
        self.planned += runs

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        self.begun += done == 0

    def row(self, run: str, row: RoundRecord) -> None:
        self.rounds += 1
        assert row.test is None
        if self.rounds == self._stop_at:
            raise Kill

    def end(self, run: str, how: str) -> None:
        self.reused += how == REUSED


class Kill(BaseException):
    """Nothing catches it."""


# --- what is chosen -------------------------------------------------------------------------------


def test_the_highest_value_is_chosen(tmp_path: Path) -> None:
    found = tuned(tmp_path, ["fedavg", "fedprox+gcfed"], Space(space=RATES, seeds=2))
    assert [row.method for row in found.rows] == ["fedavg", "fedprox+gcfed"]
    assert found.complete
    for row in found.rows:
        trials = [t for t in found.trials if t.method == row.method]
        assert [t.point for t in trials] == [{"local.lr": lr} for lr in RATES["local.lr"]]
        best = max(trials, key=lambda t: t.value)
        assert best.value > min(t.value for t in trials)
        assert row.value == best.value == sum(best.values) / 2
        assert row.spread == pytest.approx(np.std(best.values, ddof=1))
        assert row.chosen == {**best.point, "method": row.method}
        assert (row.trials, row.offered, row.failed, row.seeds) == (3, 3, 0, 2)
        assert found.settings[row.method].local.lr == best.point["local.lr"]
        assert found.settings[row.method].seed == 0


def test_the_first_of_equals_is_chosen(tmp_path: Path) -> None:
    space = Space(space={"weights": ("examples", "uniform")})
    found = tuned(tmp_path, ["fedavg"], space, local=fk.Local(lr=1e-9, epochs=1))
    assert found.trials[0].value == found.trials[1].value
    assert found.rows[0].chosen["weights"] == "examples"


@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, "examples"), ("method", "uniform"), ("processed", "processed")]
)
def test_all_methods_weight_clients_alike(
    tmp_path: Path, chosen: str | None, expected: str
) -> None:
    space = Space(space={"local.lr": (0.1,)})
    found = tuned(tmp_path, ["scaffold"], space, weights=chosen)
    (folder,) = found.trials[0].runs
    record = json.loads((tmp_path / folder / "run.json").read_text())
    assert record["weights"] == expected
    assert found.settings["scaffold"].weights == (chosen or "examples")


def test_hyperparameters_are_chosen_with_the_settings(tmp_path: Path) -> None:
    space = Space(space={"local.lr": (0.1, 0.2)}, method={"fedprox": {"mu": (0.1, 0.2, 1e4)}})
    found = tuned(tmp_path, ["fedavg", "fedprox", "fedprox(mu=0.3)"], space)
    assert [(row.trials, row.offered) for row in found.rows] == [(2, 2), (6, 6), (2, 2)]
    assert re.fullmatch(r"fedprox\(mu=0\.[12]\)", found.rows[1].chosen["method"])
    assert found.rows[2].chosen["method"] == "fedprox(mu=0.3)"
    best = found.settings["fedprox"]
    assert best.method == found.rows[1].chosen["method"]
    assert "fedprox.mu" not in found.rows[0].edge


def test_an_edge_is_named(tmp_path: Path) -> None:
    found = tuned(tmp_path, ["fedavg"], Space(space={"local.lr": (1e-9, 1e-8, 0.1)}), rounds=9)
    assert found.rows[0].edge == {"local.lr": "high"}


def test_a_budget_is_the_same_for_all(tmp_path: Path) -> None:
    found = tuned(tmp_path, METHODS, TPE)
    assert [row.trials for row in found.rows] == [6, 6]
    assert [row.offered for row in found.rows] == [None, None]
    space = Space(space=RATES, method={"fedprox": {"mu": (0.1, 0.2)}}, trials=4)
    found = tuned(tmp_path, METHODS, space)
    assert [(row.trials, row.offered) for row in found.rows] == [(3, 3), (4, 6)]


def test_seeds_of_its_own(tmp_path: Path) -> None:
    found = tuned(tmp_path, ["fedavg"], Space(space=RATES, seeds=2, seed=5))
    seeds = {RunFolder(tmp_path / run).read_run().seed for t in found.trials for run in t.runs}
    assert seeds == {5, 6}
    assert found.settings["fedavg"].seed == 0


# --- what is chosen by ----------------------------------------------------------------------------


def by_hand(run: Path, metric: str) -> float:
    """The accuracy on the held-out examples, of models trained round by round from scratch."""
    config_ = config.build(config.Run, _plain(run), "run")
    data = federation(seed=config_.seed).hold_out(0.2, config_.seed)
    own = Ingredients(fk.Task(Net), lambda _: data, held(), "toy")
    accuracy = []
    for rounds in range(1, config_.rounds + 1):
        one = prepare(config_.model_copy(update={"rounds": rounds}), own)
        result = start(one)
        assert data.holdout_rows is not None
        x, y = data.data.x[data.holdout_rows], data.data.y[data.holdout_rows]
        network = one.setup.training.network
        logits = network.logits(result.params, network.copy_buffers({}), x, train=False)
        accuracy.append(float((logits.argmax(1) == y).double().mean()))
    means = {"best": max(accuracy), "last": accuracy[-1], "last_mean": np.mean(accuracy)}
    return means[metric]


def _plain(run: Path) -> dict[str, object]:
    import tomllib

    return tomllib.loads((run / "config.toml").read_text())


@pytest.mark.parametrize(
    "metric",
    [*(pytest.param(m, marks=pytest.mark.slow) for m in ("best", "last")), "last_mean"],
)
def test_validation_is_on_examples_that_nobody_trains_on(tmp_path: Path, metric: str) -> None:
    found = tuned(tmp_path, ["fedavg"], Space(space={"local.lr": (0.1,)}, metric=metric, seeds=2))
    [trial] = found.trials
    assert found.rows[0].on == "validation"
    assert found.validation_examples == len(federation().hold_out(0.2, 0).holdout_rows)
    for value, run in zip(trial.values, trial.runs, strict=True):
        assert value == pytest.approx(by_hand(tmp_path / run, metric), abs=1e-12)


@pytest.mark.parametrize(("method", "model"), [("fedper", "auto"), ("finetune", "personal")])
def test_personal_models_are_judged_by_their_own_scores(
    tmp_path: Path, method: str, model: str
) -> None:
    """As in a run without validation in which each client's held-out examples are its own."""
    judged = config.Evaluation(model=model)
    space = Space(space={"local.lr": (0.1,)}, metric="last_mean")
    found = tuned(tmp_path, [method], space, evaluation=judged)
    divided = federation().hold_out(0.2, 0)
    parts = Ingredients(fk.Task(Net), lambda _: divided, held(), "toy")
    alone = config.Local(lr=0.1, epochs=1, batch_size=4)
    result = start(prepare(settings(method=method, evaluation=judged, local=alone), parts))
    expected = np.mean([row.test["accuracy"] for row in result.rows[1:]])
    assert found.trials[0].value == pytest.approx(expected, abs=1e-12)


def test_the_test_set_has_no_say_in_it(tmp_path: Path) -> None:
    one = tune(settings(), ingredients(), METHODS, Space(space=RATES), tmp_path / "a")
    data = held()
    other = fk.dataset(data.x, (data.y + 1) % 3, classes=3)
    two = tune(settings(), ingredients(test=other), METHODS, Space(space=RATES), tmp_path / "b")
    assert one.rows == two.rows
    assert [t.values for t in one.trials] == [t.values for t in two.trials]


def test_on_the_test_set_where_that_is_asked_for(tmp_path: Path) -> None:
    """The runs are those of a comparison, and are taken from one."""
    compared = compare(settings(), ingredients(), ["fedavg"], 2, tmp_path)
    space = Space(space={"local.lr": (0.05, 0.5)}, split="test", seeds=2)
    display = Seen()
    found = tune(settings(), ingredients(), ["fedavg"], space, tmp_path, display=display)
    assert found.trials[0].values == tuple(result.best for result in compared.results)
    assert display.ends == [True, True, False, False]
    assert display.accuracies
    assert (found.validation_examples, found.rows[0].on) == (None, "test")
    last = tune(settings(), ingredients(), ["fedavg"], _with(space, metric="last"), tmp_path)
    assert last.trials[0].values == tuple(result.last for result in compared.results)


def _with(space: Space, **more: object) -> Space:
    return space.model_copy(update=more)


class Seen(ProgressDisplay):
    """Sees accuracies, and which runs were read."""

    def __init__(self) -> None:
        self.ends: list[bool] = []
        self.accuracies = False

    def row(self, run: str, row: RoundRecord) -> None:
        self.accuracies |= row.test is not None

    def end(self, run: str, how: str) -> None:
        self.ends.append(how == REUSED)


def test_what_clients_hold_out_already_is_left_alone(tmp_path: Path) -> None:
    own = federation().hold_out(0.5, 0)
    ready = Ingredients(fk.Task(Net), lambda _: own, held(), "toy")
    found = tune(settings(), ready, ["fedavg"], Space(space={"local.lr": (0.1,)}), tmp_path)
    again = own.hold_out(0.2, 0)
    assert found.validation_examples == len(again.holdout_rows) < len(own.holdout_rows)
    assert not set(again.holdout_rows) & set(own.holdout_rows)


def test_nobody_can_hold_out_anything(tmp_path: Path) -> None:
    lists = [np.array([i]) for i in range(6)]
    data = fk.federation(federation().data, lists)
    ready = Ingredients(fk.Task(Net), lambda _: data, held(), "toy")
    with pytest.raises(DataError, match="to hold any out"):
        tune(settings(), ready, ["fedavg"], Space(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the same after a kill ------------------------------------------------------------------------


def test_what_was_made_is_used_again(tmp_path: Path) -> None:
    first, again = Counts(), Counts()
    one = tune(settings(), ingredients(), METHODS, TPE, tmp_path, display=first)
    two = tune(settings(), ingredients(), METHODS, TPE, tmp_path, display=again)
    assert one == two
    assert (first.planned, first.begun, first.reused) == (12, 12, 0)
    assert (again.planned, again.begun, again.reused) == (12, 0, 12)


def test_a_larger_budget_goes_on_from_a_smaller_one(tmp_path: Path) -> None:
    tuned(tmp_path, ["fedavg"], _with(TPE, trials=4))
    more = Counts()
    tune(settings(), ingredients(), ["fedavg"], _with(TPE, trials=6), tmp_path, display=more)
    assert (more.reused, more.begun) == (4, 2)


@pytest.mark.parametrize(
    "space",
    [pytest.param(TPE, marks=pytest.mark.slow), Space(space=RATES, seeds=2)],
    ids=["tpe", "grid"],
)
@pytest.mark.parametrize("stop_at", [pytest.param(2, marks=pytest.mark.slow), 14])
def test_a_search_that_was_killed_ends_as_one_that_was_not(
    tmp_path: Path, space: Space, stop_at: int
) -> None:
    one = settings(engine=fk.Engine(kind="sequential", checkpoint_seconds=0))
    whole = tune(one, ingredients(), METHODS, space, tmp_path / "whole")
    out = tmp_path / "killed"
    with pytest.raises(Kill):
        tune(one, ingredients(), METHODS, space, out, display=Counts(stop_at))
    rest = Counts()
    again = tune(one, ingredients(), METHODS, space, out, display=rest)
    assert (again.rows, again.trials) == (whole.rows, whole.trials)
    assert rest.reused == (stop_at - 1) // 3
    assert rest.begun == 11 - rest.reused
    assert written(out) == written(tmp_path / "whole")


@pytest.mark.parametrize("run", [pytest.param(8, marks=pytest.mark.slow), 12])
def test_an_interrupt_in_the_last_round_of_a_wave_counts(tmp_path: Path, run: int) -> None:
    """The first waves of both methods are eight runs; after the last of all nothing is left."""

    class Presses(Counts):
        def row(self, name: str, row: RoundRecord) -> None:
            if self.begun == run and row.round == 3:
                signal.raise_signal(signal.SIGINT)

    found = tune(settings(), ingredients(), METHODS, TPE, tmp_path, display=Presses())
    assert (found.complete, len(found.trials)) == (run == 12, run)


def _where_compiling_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short runs be vectorized, in as many processes as there are cores."""
    for name in ("COMPILE", "COMPILED_OPERATION", "PROCESSES", "DISPATCH"):
        monkeypatch.setattr(nominal_seconds, f"{name}_SECONDS", 0.0)
    monkeypatch.setattr(nominal_seconds, "COMPARED_RUNS", 0)


def test_a_search_keeps_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with other methods and points, and on a machine where the rule would take another."""
    _where_compiling_takes_no_time(monkeypatch)
    auto = {"engine": fk.Engine(checkpoint_seconds=0), "rounds": 1}
    for cores, methods, rates in ((1, ["fedavg"], (0.01,)), (3, ["scaffold"], (0.1, 0.2))):
        monkeypatch.setattr(engine_rule, "core_count", lambda cores=cores: cores)
        tuned(tmp_path, methods, Space(space={"local.lr": rates}), **auto)
        engines = [RunFolder(p.parent).read_run().engine for p in tmp_path.glob("*/run.json")]
        assert all(engine == engines[0] for engine in engines)
    assert (len(engines), engines[0].kind, engines[0].workers) == (3, "vectorized", 1)


def written(out: Path) -> dict[str, str]:
    return {
        str(p.relative_to(out)): p.read_text() for p in [*out.glob("best/*"), out / "tune.json"]
    }


# --- what goes wrong ------------------------------------------------------------------------------

EXPLODES = partial(nn.Sequential, nn.Linear(5, 6), nn.Linear(6, 3))


@pytest.mark.parametrize("sampler", [pytest.param("grid", marks=pytest.mark.slow), "tpe"])
def test_a_trial_that_diverges_is_the_worst(tmp_path: Path, sampler: str) -> None:
    rates = (0.1, 1e4, 1e-3, 3e4, 1e-2)
    space = Space(space={"local.lr": rates}, sampler=sampler, trials=5 - (sampler == "tpe"))
    local = fk.Local(lr=1.0, epochs=2, batch_size=4)
    found = tune(
        settings(rounds=5, local=local), ingredients(EXPLODES), ["fedavg"], space, tmp_path
    )
    [row] = found.rows
    failed = [trial for trial in found.trials if trial.value is None]
    assert row.failed == len(failed) > 0
    assert all(trial.point["local.lr"] >= 1e4 for trial in failed)
    assert all("diverged" in trial.error for trial in failed)
    assert row.trials == len(found.trials) == space.trials
    assert row.chosen["local.lr"] < 1
    summary = json.loads((tmp_path / "tune.json").read_text())
    assert [trial["value"] for trial in summary["trials"]].count(None) == len(failed)


def test_a_method_of_which_every_trial_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(tmp_path, METHODS)
    assert (tmp_path / "best" / "fedprox.toml").exists()
    shutil.rmtree(next(tmp_path.glob("fedprox-seed0-*")))
    from fedkeel.method.parts.fedprox import FedProx

    def explode(self: FedProx, params: dict, step: object) -> dict:
        return {k: v * float("inf") for k, v in params.items()}

    monkeypatch.setattr(FedProx, "penalty_gradient", explode)
    found = tuned(tmp_path, METHODS, Space(space={"local.lr": (0.002,)}))
    assert asdict(found.rows[1]) == {
        **asdict(found.rows[0]),
        "method": "fedprox",
        "chosen": {},
        "value": None,
        "failed": 1,
    }
    assert list(found.settings) == ["fedavg"]
    assert not (tmp_path / "best" / "fedprox.toml").exists()
    with pytest.raises(TrainingError, match="No trial could be finished"):
        tuned(tmp_path, ["fedprox"], Space(space={"local.lr": (0.002,)}))


@pytest.mark.parametrize(
    ("methods", "space", "kind"),
    [
        ([], Space(), ConfigError),
        (["fedavg", "momentum+gradma.s"], Space(), CompositionError),
        (["fedavg"], Space(space={"local.lrr": (1,)}), ConfigError),
        (
            ["fedavg"],
            Space(space={"local.lr": Range(low=1, high=2.0)}, sampler="grid"),
            ConfigError,
        ),
        (["fedavg"], Space(space={"cohort.clients": (99,)}), ConfigError),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    tmp_path: Path, methods: list[str], space: Space, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        tuned(tmp_path / "out", methods, space)
    assert not (tmp_path / "out").exists()


def test_so_is_a_seed_whose_clients_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        tune(settings(), ingredients(seeds=1), ["fedavg"], Space(seeds=2), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_made_into_a_search(tmp_path: Path) -> None:
    start(prepare(settings(), ingredients()), tmp_path)
    with pytest.raises(RunError, match="holds a run"):
        tuned(tmp_path, ["fedavg"])


# --- what is written ------------------------------------------------------------------------------


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> config.Experiment:
    monkeypatch.chdir(tmp_path)
    return config.load(experiment(tmp_path), ["compare.seeds=4"])


def test_the_best_experiments_are_whole(digits: config.Experiment) -> None:
    space = Space(space={"local.lr": (0.1,)}, method={"fedprox": {"mu": (0.1, 1.0)}})
    methods = ["fedavg", "fedprox+gcfed", "fedprox(mu=0.5)+gcfed"]
    found = tune(digits, gather(digits), methods, space, Path("out"))
    assert sorted(p.name for p in Path("out/best").iterdir()) == [
        "fedavg.toml",
        "fedprox-gcfed.toml",
        "fedprox-mu-0.5-gcfed.toml",
    ]
    best = config.load(Path("out/best/fedprox-gcfed.toml"))
    row = found.rows[1]
    assert best.local.lr == row.chosen["local.lr"]
    assert best.method == row.chosen["method"] == best.compare.methods[0]
    assert (best.name, best.compare.seeds) == ("toy-fedprox-gcfed", 4)
    assert (best.partition, best.evaluation) == (digits.partition, digits.evaluation)
    assert "validation part" in Path("out/best/fedprox-gcfed.toml").read_text().splitlines()[0]


def test_names_that_are_the_same_in_words_are_told_apart(tmp_path: Path) -> None:
    methods = ["fedprox(mu=0.1)", "fedprox(mu= 0.1)", "fedprox(mu =0.1)"]
    tuned(tmp_path, methods, Space(space={"local.lr": (0.1,)}))
    names = sorted(p.name for p in (tmp_path / "best").iterdir())
    assert names == ["fedprox-mu-0.1--2.toml", "fedprox-mu-0.1--3.toml", "fedprox-mu-0.1.toml"]


def test_the_file_in_a_trials_folder_repeats_the_trial(digits: config.Experiment) -> None:
    for seed in (None, 3):
        partition = digits.partition.model_copy(update={"seed": seed})
        one = digits.model_copy(update={"partition": partition})
        found = tune(one, gather(one), ["fedavg"], Space(space={"local.lr": (0.1,)}), Path("out"))
        folder = RunFolder(Path("out") / found.trials[0].runs[0])
        again = config.load(folder.path / "config.toml")
        assert prepare(again, gather(again)).key == folder.read_run().key


def test_the_summary_holds_every_trial(tmp_path: Path) -> None:
    found = tuned(tmp_path, METHODS, TPE)
    summary = json.loads((tmp_path / "tune.json").read_text())
    assert summary["rows"] == [asdict(row) for row in found.rows]
    assert [t["value"] for t in summary["trials"]] == [t.value for t in found.trials]
    assert {run for t in summary["trials"] for run in t["runs"]} == {
        p.name for p in tmp_path.iterdir() if RunFolder(p).exists()
    }
    assert (summary["sampler"], summary["complete"]) == ("tpe", True)


@pytest.mark.slow
def test_methods_are_searched_for_one_after_the_other(tmp_path: Path) -> None:
    """As in one call; another search takes the place of the first."""
    tuned(tmp_path / "one", ["fedavg"], TPE)
    found = tuned(tmp_path / "one", ["fedprox"], TPE)
    both = tuned(tmp_path / "both", METHODS, TPE)
    assert (found.rows, found.trials, found.replaced) == (both.rows, both.trials, ())
    assert written(tmp_path / "one") == written(tmp_path / "both")

    for other, space in ((settings(rounds=2), TPE), (settings(), _with(TPE, trials=3))):
        shutil.copytree(tmp_path / "both", out := tmp_path / f"other-{other.rounds}-{space.trials}")
        found = tune(other, ingredients(), ["fedprox"], space, out)
        assert [row.method for row in found.rows] == ["fedprox"]
        assert found.replaced == ("fedavg",)
        assert [file.name for file in (out / "best").iterdir()] == ["fedprox.toml"]
    shutil.copytree(tmp_path / "both", out := tmp_path / "other-data")
    more = ingredients(test=held(61))
    assert tune(settings(), more, ["fedprox"], TPE, out).replaced == ("fedavg",)


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    tuned(tmp_path, ["fedavg"])
    assert torch.equal(before, torch.get_rng_state())


def test_numbers_of_a_method_are_tried_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All points of a grid in one group, each with the score that it has by itself."""
    runs = []
    genuine = VectorizedTrainer._train

    def seen(self: VectorizedTrainer, group: Any, *others: Any) -> Any:
        runs.append(len(group.distinct_runs))
        return genuine(self, group, *others)

    monkeypatch.setattr(VectorizedTrainer, "_train", seen)
    space = Space(
        space={"local.lr": (0.05, 0.1)}, method={"fedprox": {"mu": (0.0, 0.1, 1.0)}}, seeds=1
    )
    engine = fk.Engine(kind="vectorized", workers=1, parallel_clients=3, checkpoint_seconds=0)
    more: dict[str, Any] = {"cohort": fk.Cohort(clients=2), "rounds": 2}

    def searched(name: str, **changes: object) -> list[Trial]:
        given = settings(engine=engine.model_copy(update=changes), **more)
        return list(tune(given, ingredients(), ["fedprox"], space, tmp_path / name).trials)

    together = searched("together")
    assert max(runs) == 6
    found = RunFolder(tmp_path / "together" / together[0].runs[0]).read_run().engine
    assert found.parallel_numbers == ["fedprox.mu"]
    runs.clear()
    apart = searched("apart", parallel_runs=1)
    assert set(runs) == {1}
    assert [t.point for t in together] == [t.point for t in apart]
    for one, other in zip(together, apart, strict=True):
        assert one.value == pytest.approx(other.value)
