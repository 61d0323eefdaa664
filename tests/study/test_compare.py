"""Methods and seeds: everything else the same, nothing made twice, one failure is not all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedkeel as fk
from commands import Process, experiment, run
from fedkeel import config
from fedkeel.engine.choose import engine_rule, nominal_seconds
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.errors import (
    CompositionError,
    ConfigError,
    DataError,
    ModelError,
    RunError,
    TrainingError,
)
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.comparison import INDEX, runs_of
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import to_json
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.report.page import write_report
from fedkeel.report.runs import load_runs
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study import compare as module
from fedkeel.study.compare import compare
from fedkeel.study.comparison import Comparison
from fedkeel.study.tune import tune
from toys import Net, eventually, federation, held, plain, prepared, same

LOCAL = fk.Local(lr=0.05, epochs=1, batch_size=4)


def ingredients(model: object = Net, clients: object = None) -> Ingredients:
    data = federation()
    return Ingredients(fk.Task(model), clients or (lambda seed: data), held(), "toy")


def settings(**more: object) -> config.Run:
    values = {"rounds": 2, "local": LOCAL, "cohort": fk.Cohort(clients=3), "name": "toy"}
    engine = fk.Engine(kind="sequential", checkpoint_seconds=0)
    return config.Run(**{**values, "engine": engine, **more})


def compared(methods: list[str], seeds: int, out: Path | None = None, **more: object) -> Comparison:
    return compare(settings(**more), ingredients(), methods, seeds, out)


def names(found: Comparison) -> list[tuple[str, int]]:
    return [(r.record.method, r.record.seed) for r in found.results]


def written(out: Path) -> dict[str, int]:
    """When each file of the runs was last written, the page and the list left out."""
    files = [p for p in out.glob("*/**/*") if p.is_file()]
    return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in files}


def index(out: Path) -> list[tuple[str, int]]:
    runs = json.loads((out / "comparison.json").read_text())["runs"]
    return [(run["method"], run["seed"]) for run in runs]


# --- one comparison -------------------------------------------------------------------------------


def test_every_method_with_every_seed() -> None:
    found = compared(["fedavg", "scaffold"], 2, seed=5)
    assert names(found) == [("fedavg", 5), ("fedavg", 6), ("scaffold", 5), ("scaffold", 6)]
    assert found.complete
    assert found.failures == []
    assert [row["method"] for row in found.rows] == ["fedavg", "scaffold"]
    assert [row["seeds"] for row in found.rows] == [2, 2]
    assert "scaffold" in str(found)


class Warnings(ProgressDisplay):
    """Keeps what is said about runs."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def warn(self, run: str, message: str) -> None:
        self.messages.append(message)


def weighted(methods: list[str], **more: object) -> tuple[list[str], list[str], str]:
    """The weights of each method, what is said before, and what is shown after."""
    display = Warnings()
    found = compare(settings(**more), ingredients(), methods, 1, display=display)
    weights = [result.record.weights for result in found.results]
    return weights, display.messages, str(found)


def test_all_methods_weight_clients_alike() -> None:
    methods = ["fedavg", "scaffold", "fedgh", "fedgc.cgc+mime"]  # the last two state others
    weights, messages, text = weighted(methods)
    assert weights == ["examples"] * 4
    (message,) = messages
    assert "`scaffold`, `fedgh` and `fedgc.cgc+mime` would not: set weights = 'method'" in message
    assert "weights" not in text
    assert weighted(["fedavg", "fedprox"])[:2] == (["examples"] * 2, [])
    assert weighted(methods, weights="uniform")[:2] == (["uniform"] * 4, [])


def test_papers_own_weights_are_taken_where_they_are_chosen() -> None:
    weights, messages, text = weighted(["fedavg", "scaffold"], weights="method")
    assert weights == ["examples", "uniform"]
    assert messages == []
    assert (
        "fedavg weights clients by size; scaffold weights them equally. "
        "Set `weights` to compare fairly." in text
    )


def test_everything_else_is_the_same() -> None:
    found = compared(["fedavg", "scaffold", "fedgh"], 2)
    for seed in (0, 1):
        runs = [r for r in found.results if r.record.seed == seed]
        assert len({repr([row.clients for row in r.rows]) for r in runs}) == 1
        assert len({repr(r.rows[0].test) for r in runs}) == 1
    assert found.results[0].rows[0].test != found.results[1].rows[0].test


def test_a_run_does_not_depend_on_the_others() -> None:
    alone = compared(["scaffold"], 1, weights="method").results[0]
    among = compared(["gradma", "fedavg", "scaffold"], 1, weights="method").results[-1]
    assert same(alone, among)
    single = prepared("scaffold", rounds=2, per_round=3, local=LOCAL, evaluation=fk.Evaluation())
    assert plain(start(single)) == plain(among)


def test_a_method_given_twice_is_run_once() -> None:
    assert names(compared(["fedavg", "fedavg"], 1)) == [("fedavg", 0)]


def test_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="nothing to compare"):
        compared([], 2)


# --- on disk --------------------------------------------------------------------------------------


def test_a_comparison_is_a_folder_of_runs(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er"
    found = compared(["fedavg", "fedprox(mu=0.1)+gcfed"], 2, out)
    assert index(out) == names(found)
    folders = runs_of(out)
    assert [f.name.rsplit("-", 1)[0] for f in folders] == [
        "fedavg-seed0",
        "fedavg-seed1",
        "fedprox-mu-0.1-gcfed-seed0",
        "fedprox-mu-0.1-gcfed-seed1",
    ]
    entries = load_runs(folders)
    assert [(e.label, len(e.runs)) for e in entries] == [
        ("fedavg", 2),
        ("fedprox(mu=0.1)+gcfed", 2),
    ]
    assert runs_of(folders[0]) == [folders[0]]
    shown, not_shown = str(found), replace(found)
    shutil.rmtree(out)  # a notebook outlives its folders; what was read once is still shown
    assert "fedavg" in shown
    assert repr(found) == str(found) == shown
    assert repr(not_shown) == f"Comparison of 4 runs in {out}"


@pytest.mark.parametrize("text", [None, "{", "[]", '{"runs": [{}]}'])
def test_a_folder_that_is_no_comparison(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "comparison.json").write_text(text)
    with pytest.raises(RunError) as found:
        runs_of(tmp_path)
    assert len(found.value.lines()) <= 4


def test_a_run_is_not_made_into_a_comparison(tmp_path: Path) -> None:
    start(prepared(), tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(RunError, match=r"holds a run[^$]*-s name="):
        compared(["fedavg"], 1, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_what_was_made_is_used_again(tmp_path: Path) -> None:
    first = compared(["fedavg", "scaffold"], 2, tmp_path)
    before = written(tmp_path)
    again = compared(["fedavg", "scaffold"], 2, tmp_path)
    assert written(tmp_path) == before
    assert all(same(a, b) for a, b in zip(first.results, again.results, strict=True))
    assert [r.record for r in first.results] == [r.record for r in again.results]


def test_a_new_method_or_seed_trains_only_what_is_new(tmp_path: Path) -> None:
    compared(["fedavg", "scaffold"], 1, tmp_path)
    before = written(tmp_path)
    found = compared(["fedavg", "scaffold", "fedgh"], 1, tmp_path)
    assert index(tmp_path) == [("fedavg", 0), ("scaffold", 0), ("fedgh", 0)] == names(found)
    after = written(tmp_path)
    assert {k: after[k] for k in before} == before
    assert all(name.startswith("fedgh-seed0") for name in after.keys() - before.keys())
    compared(["fedavg"], 3, tmp_path)
    last = written(tmp_path)
    assert {k: last[k] for k in after} == after
    new = {name.split("/")[0].rsplit("-", 1)[0] for name in last.keys() - after.keys()}
    assert new == {"fedavg-seed1", "fedavg-seed2"}


def test_another_setting_is_another_run(tmp_path: Path) -> None:
    compared(["fedavg"], 1, tmp_path)
    before = written(tmp_path)
    compared(["fedavg"], 1, tmp_path, local=fk.Local(lr=0.06, epochs=1, batch_size=4))
    after = written(tmp_path)
    assert {k: after[k] for k in before} == before
    assert len({name.split("/")[0] for name in after}) == 2


class Kill(BaseException):
    """Nothing catches it."""


class StopAt(ProgressDisplay):
    """Ends the second run after its first round."""

    def __init__(self) -> None:
        self._runs = 0

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        self._runs += 1

    def row(self, run: str, row: RoundRecord) -> None:
        if self._runs == 2 and row.round == 1:
            raise Kill


def test_earlier_runs_of_the_same_settings_stay_in_the_table(tmp_path: Path) -> None:
    compared(["fedavg"], 1, tmp_path)
    found = compared(["scaffold"], 2, tmp_path)
    assert index(tmp_path) == [("fedavg", 0), ("scaffold", 0), ("scaffold", 1)]
    assert [row["method"] for row in found.rows] == ["fedavg", "scaffold"]
    assert found.others == 0
    (run,) = (path for path in tmp_path.iterdir() if path.name.startswith("fedavg"))
    (run / "config.toml").unlink()  # then the record says what it was
    more = compared(["fedsgd"], 1, tmp_path, local=LOCAL)
    assert (more.others, index(tmp_path)[0]) == (0, ("fedavg", 0))
    other = compared(["fedavg"], 1, tmp_path, rounds=3)
    assert (len(other.rows), other.others) == (1, 4)


def test_runs_of_another_model_data_or_version_are_in_no_row_of_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(seeds: int, width: int = 6, data: int = 0) -> Comparison:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3))

        made = ingredients(model, lambda seed: federation(seed=data))
        return compare(settings(rounds=1), made, ["fedavg"], seeds, tmp_path)

    assert again(1).others == 0
    assert again(2).others == 0
    for more in ({"width": 9}, {"width": 9, "data": 1}):
        before = index(tmp_path)
        found = again(3, **more)
        assert found.others == len(before)
        assert [row["seeds"] for row in found.rows] == [3]
        (entry,) = found.entries
        assert len({run.record.model.parameters for run in entry.runs}) == 1
        assert len({run.record.data.fingerprint for run in entry.runs}) == 1
    every = load_runs([p for p in tmp_path.iterdir() if p.is_dir()])
    assert sorted(len(entry.runs) for entry in every) == [2, 3, 3]
    for name in ("identity", "manifest"):
        monkeypatch.setattr(f"fedkeel.runner.{name}.__version__", "0.0.0")
    found = again(1, width=9, data=1)
    assert ([row["seeds"] for row in found.rows], found.others) == ([1], 3)


def test_a_method_written_in_two_ways_is_one() -> None:
    found = compared(["fedprox+gcfed", "fedprox + gcfed", "fedprox(mu=0.01)+gcfed"], 1)
    assert [row["seeds"] for row in found.rows] == [1, 1]


def test_what_was_begun_is_continued(tmp_path: Path) -> None:
    whole = compared(["fedavg", "scaffold"], 2, rounds=3)
    with pytest.raises(Kill):
        compare(settings(rounds=3), ingredients(), ["fedavg", "scaffold"], 2, tmp_path, StopAt())
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 2
    found = compared(["fedavg", "scaffold"], 2, tmp_path, rounds=3)
    assert all(same(a, b) for a, b in zip(whole.results, found.results, strict=True))


# --- what goes wrong ------------------------------------------------------------------------------

EXPLODES = partial(nn.Sequential, nn.Linear(5, 6), nn.Linear(6, 3))
TOO_FAST = {"rounds": 5, "local": fk.Local(lr=1e4, epochs=2, batch_size=4)}


def test_a_method_that_diverges_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedkeel.method.parts.fedprox import FedProx

    def explode(self: FedProx, params: dict, step: object) -> dict:
        return {k: v * float("inf") for k, v in params.items()}

    monkeypatch.setattr(FedProx, "penalty_gradient", explode)
    found = compared(["fedavg", "fedprox", "scaffold"], 2, tmp_path)
    assert names(found) == [("fedavg", 0), ("fedavg", 1), ("scaffold", 0), ("scaffold", 1)]
    assert [line.split(":")[0] for line in found.failures] == [
        "fedprox, seed 0",
        "fedprox, seed 1",
    ]
    assert "diverged in round 1" in found.failures[0]
    assert found.complete
    assert index(tmp_path) == [(m, s) for m in ("fedavg", "fedprox", "scaffold") for s in (0, 1)]
    assert [row["unfinished"] for row in found.rows] == [0, 2, 0]


@pytest.mark.parametrize("typed", ["fedprox", "fedprox(mu=0.1)"])
def test_a_method_is_marked_where_one_of_its_seeds_diverged(
    monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    begun = module.start

    def start(prepared: Prepared, *given: object, **more: object) -> Result:
        made = begun(prepared, *given, **more)  # type: ignore[arg-type]
        if prepared.plan.expression == "fedprox" and prepared.settings.seed == 1:
            error = TrainingError("It diverged.")
            error.result = replace(made, record=replace(made.record, status="failed"))
            raise error
        return made

    monkeypatch.setattr(module, "start", start)
    found = compared(["fedavg", typed], 2)
    assert [(row["seeds"], row["unfinished"]) for row in found.rows] == [(2, 0), (2, 1)]


def test_an_interrupt_in_a_run_that_diverges_ends_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = module.start

    def start(prepared: Prepared, *given: object, **more: object) -> Result:
        if prepared.settings.method == "fedprox":
            signal.raise_signal(signal.SIGINT)
            raise TrainingError("It diverged.")
        return begun(prepared, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "start", start)
    found = compared(["fedavg", "fedprox", "scaffold"], 1)
    assert names(found) == [("fedavg", 0)]
    assert not found.complete


def test_a_method_that_failed_at_once_has_no_score_and_is_named(tmp_path: Path) -> None:
    """It stood in the table with the score of the untrained model, as if it could go on."""
    for out in (None, tmp_path / "out"):
        found = compare(settings(), ingredients(), ["fedavg", "fedprox(mu=1e300)"], 2, out)
        text = str(found)
        assert [one.record.method for one in found.failed] == ["fedprox(mu=1e300)"] * 2
        assert "failed: fedprox(mu=1e300), seed 0: Training diverged in round 1" in text
        for row in found.rows[1:]:
            assert (row["best"], row["last"], row["failed"]) == (None, None, 2)
            assert "fedprox(mu=1e300): training failed in 2 runs." in text
        assert found.rows[0]["best"] is not None
        assert found.rows[0]["failed"] == 0


def test_a_run_that_fails_later_counts_in_memory_as_on_disk(tmp_path: Path) -> None:
    """In memory the mean was of the seeds that had survived."""

    data = federation()
    data.data.x[data.client(2)] *= 1e200
    made = ingredients(clients=lambda seed: data)
    alone = settings(rounds=8, cohort=fk.Cohort(clients=1))
    memory = compare(alone, made, ["fedavg"], 3)
    disk = compare(alone, made, ["fedavg"], 3, tmp_path / "out")
    ended = [one.record.status for one in (*memory.results, *memory.failed)]
    assert "failed" in ended
    assert any(one.rows[-1].round > 0 for one in memory.failed)
    assert _without_seconds(memory.rows) == _without_seconds(disk.rows)


def test_a_method_that_learns_nothing_is_named_beside_the_table() -> None:
    """In Python too: with units that are dead the score is that of chance, and all is finite."""

    class Dead(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Net.forward(self, x) * 0.0

    found = compare(settings(rounds=6), replace(ingredients(), task=fk.Task(Dead)), ["fedavg"], 1)
    assert "fedavg, seed 0: the model learnt nothing in 6 rounds." in str(found)
    assert "learnt nothing" not in str(compared(["fedavg"], 1, rounds=6))


def test_a_refusal_names_the_method() -> None:
    model = nn.Sequential(Net(), nn.Dropout(0.5))
    with pytest.raises(ModelError, match="'dpsgd' takes each example's gradient"):
        compare(settings(), ingredients(model), ["fedavg", "dpsgd"], 1)


def test_all_methods_diverge() -> None:
    with pytest.raises(TrainingError, match="No run of the comparison") as found:
        compare(settings(**TOO_FAST), ingredients(EXPLODES), ["fedavg", "fedprox", "fedgh"], 1)
    assert all(f"{name}, seed 0: " in found.value.got for name in ("fedavg", "fedprox", "fedgh"))
    assert len(found.value.lines()) <= 4


@pytest.mark.parametrize("error", [RunError("The disk is full."), KeyboardInterrupt()])
def test_what_ends_them_all_leaves_the_list_of_what_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    begun = start

    def ends(made: Prepared, *given: object, **more: object) -> Result:
        if made.plan.expression == "scaffold":
            raise error
        return begun(made, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "start", ends)
    with pytest.raises(type(error)):
        compared(["fedavg", "scaffold", "fedprox"], 2, tmp_path / "out")
    assert index(tmp_path / "out") == [("fedavg", 0)]
    assert [run.name for run in runs_of(tmp_path / "out")] == [
        path.parent.name for path in (tmp_path / "out").glob("*/run.json")
    ]


def test_an_error_before_the_first_run_leaves_the_list_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(["fedavg"], 2, tmp_path / "out")
    before = (tmp_path / "out" / "comparison.json").read_text()

    def ends(*given: object, **more: object) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "start", ends)
    with pytest.raises(KeyboardInterrupt):
        compared(["scaffold"], 2, tmp_path / "out", rounds=3)
    assert (tmp_path / "out" / "comparison.json").read_text() == before


def test_what_cannot_be_composed_is_refused_before_anything_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CompositionError, match="which takes one"):
        compared(["fedavg", "momentum+gradma.s"], 2, out)
    assert not out.exists()


def test_so_is_a_seed_whose_clients_cannot_be_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = federation()

    def clients(seed: int) -> fk.Federation:
        if seed == 2:
            raise DataError("No partition with this seed.")
        return data

    with pytest.raises(DataError, match="No partition"):
        compare(settings(), ingredients(clients=clients), ["fedavg"], 3, out)
    assert not out.exists()


# --- as a process ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_with_the_same_command(tmp_path: Path) -> None:
    file = experiment(tmp_path)
    words = ("compare", file, "--methods", "fedavg,scaffold", "--seeds", "2", "-s", "rounds=12")
    words = (*words, "-s", "engine.kind=workers", "--json")
    whole = run(*words, "--out", "whole", folder=tmp_path)
    assert whole.code == 0, whole.err
    process = Process(*words, "--out", "out", folder=tmp_path)
    assert eventually(lambda: len(list((tmp_path / "out").glob("*/rounds.jsonl"))) == 2, 40)
    process.send(2)
    first = process.wait()
    assert first.code == 130, first.err
    assert "interrupted; the same command goes on where it stopped" in first.err
    assert (tmp_path / "out" / "report.html").exists()
    process = Process(*words, "--out", "out", folder=tmp_path)
    assert eventually(lambda: len(list((tmp_path / "out").glob("*/rounds.jsonl"))) == 4, 40)
    process.send(9)
    process.wait()
    last = run(*words, "--out", "out", folder=tmp_path)
    assert last.code == 0, last.err
    for a, b in zip(_without_seconds(last.json), _without_seconds(whole.json), strict=True):
        assert a == b
    assert "taken from an earlier run" in last.err
    shutil.rmtree(tmp_path / "whole")


def _without_seconds(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Which method is fastest is marked too, and is different each time."""
    return [{k: v for k, v in row.items() if "seconds" not in k and k != "marked"} for row in rows]


def _where_compiling_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short runs be vectorized, in as many processes as there are cores."""
    for name in ("COMPILE", "COMPILED_OPERATION", "PROCESSES", "DISPATCH"):
        monkeypatch.setattr(nominal_seconds, f"{name}_SECONDS", 0.0)
    monkeypatch.setattr(nominal_seconds, "COMPARED_RUNS", 0)


def test_a_comparison_keeps_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more methods, and on a machine where the rule would take another."""
    auto = {"engine": fk.Engine(checkpoint_seconds=0), "rounds": 1}
    _where_compiling_takes_no_time(monkeypatch)
    monkeypatch.setattr(engine_rule, "core_count", lambda: 1)
    first = compared(["fedavg"], 1, tmp_path / "out", **auto)
    monkeypatch.setattr(engine_rule, "core_count", lambda: 3)
    second = compared(["scaffold", "fedavg"], 1, tmp_path / "out", **auto)
    engine = first.results[0].record.engine
    assert (engine.kind, engine.parallel_clients, engine.asked) == ("vectorized", 3, "auto")
    assert [result.record.engine for result in second.results] == [engine] * 2
    assert json.loads((tmp_path / "out" / INDEX).read_text())["engine"] == to_json(engine)
    elsewhere = compared(["fedavg"], 1, tmp_path / "elsewhere", **auto)
    assert elsewhere.results[0].record.engine.parallel_clients == 1


BRANCHES = """
from dataclasses import dataclass
from typing import ClassVar
from fedkeel.method.roles import *

@dataclass(frozen=True)
class Branches(GradientTransform):
    name: ClassVar[str] = "branches"
    paper: ClassVar[str] = ""
    gradient_stage: ClassVar[Stage] = Stage.CORRECT

    def transform_gradient(self, grads, params, step):
        positive = sum(float(g.sum()) for g in grads.values()) > 0
        return {k: g if positive else 2 * g for k, g in grads.items()}
"""


def test_a_method_that_cannot_be_compiled_decides_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "branches.py").write_text(BRANCHES)
    monkeypatch.chdir(tmp_path)
    _where_compiling_takes_no_time(monkeypatch)
    found = compared(["fedavg", "branches:Branches"], 1, engine=fk.Engine(workers=1))
    engines = [result.record.engine for result in found.results]
    assert [engine.kind for engine in engines] == ["sequential"] * 2
    assert [engine.reasons[0].split(":")[:2] for engine in engines] == [
        ["branches", "Branches"]
    ] * 2


def test_baselines_are_compared_as_methods_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their order: one engine, one comparison that can be extended, one table."""
    _where_compiling_takes_no_time(monkeypatch)
    monkeypatch.setattr(engine_rule, "core_count", lambda: 1)
    auto = {"engine": fk.Engine(checkpoint_seconds=0)}
    methods = ["centralised", "local", "fedavg"]
    found = compared(methods, 3, tmp_path / "one", **auto)
    other = compared(methods[::-1], 3, tmp_path / "two", **auto)
    engine = other.results[0].record.engine
    assert (engine.kind, engine.parallel_clients) == ("vectorized", 3)
    assert all(r.record.engine == engine for r in [*found.results, *other.results])
    again = compared([*methods, "fedprox"], 3, tmp_path / "one", **auto)
    assert (len(again.results), again.others) == (12, 0)
    assert [row.summary.method for row in again.table] == [*methods, "fedprox"]
    gain = next(note for note in again.notes if note.startswith("Is federation worth it?"))
    assert gain in str(again)
    assert not any("The methods differ in" in note for note in again.notes)
    page = write_report(runs_of(tmp_path / "one"), tmp_path / "report.html").read_text()
    assert "Is federation worth it?" in page
    shutil.rmtree(tmp_path / "two")


def test_a_search_takes_no_baseline(tmp_path: Path) -> None:
    space = config.Space(space={"local.lr": (0.1,)})
    with pytest.raises(CompositionError, match="'local' is a baseline"):
        tune(settings(), ingredients(), ["local"], space, tmp_path)


VECTORIZED = fk.Engine(kind="vectorized", workers=1, parallel_clients=3, checkpoint_seconds=0)


def test_seeds_that_train_side_by_side_are_runs_as_any_other(tmp_path: Path) -> None:
    """Each has its folder, its seed and the number of runs beside it; one job or two."""
    methods = ["fedavg", "scaffold"]
    found = [
        compare(
            settings(engine=VECTORIZED),
            ingredients(),
            methods,
            3,
            tmp_path / str(jobs),
            jobs=jobs,
        )
        for jobs in (1, 2)
    ]
    assert names(found[0]) == names(found[1])
    assert sorted(names(found[0])) == sorted((m, s) for m in methods for s in range(3))
    for one, other in zip(found[0].results, found[1].results, strict=True):
        assert (one.record.engine.parallel_runs or 0) >= 3
        assert same(one, other)
    apart = settings(engine=VECTORIZED.model_copy(update={"parallel_runs": 1}))
    by_itself = compare(apart, ingredients(), ["fedavg"], 1)
    assert by_itself.results[0].record.engine.parallel_runs is None
    for name, tensor in by_itself.results[0].params.items():
        torch.testing.assert_close(found[0].results[0].params[name], tensor)


def test_methods_that_differ_in_a_number_train_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where their parts allow it: the others are told why not, and train by themselves."""
    groups = []
    genuine = module._Runs._make_group

    def watched(self: module._Runs, group: list[config.Run]) -> list[bool]:
        groups.append([(one.method, one.seed) for one in group])
        return genuine(self, group)

    monkeypatch.setattr(module._Runs, "_make_group", watched)
    methods = ["fedprox(mu=0.1)", "fedlc(tau=0.1)", "fedprox(mu=1.0)", "fedlc(tau=0.5)"]
    given = settings(engine=VECTORIZED)
    one = compare(given, ingredients(), methods, 2, tmp_path / "one")
    assert groups == [
        [(m, s) for s in range(2) for m in ("fedprox(mu=0.1)", "fedprox(mu=1.0)")],
        *([(m, s) for s in range(2)] for m in ("fedlc(tau=0.1)", "fedlc(tau=0.5)")),
    ]
    two = compare(given, ingredients(), methods, 2, tmp_path / "two", jobs=2)
    assert all(map(same, one.results, two.results))
    for result in (*one.results, *two.results):
        engine = result.record.engine
        assert engine.parallel_numbers == ["fedprox.mu"]
        assert any(r.startswith("runs that differ in fedlc.tau do not") for r in engine.reasons)
    apart = settings(engine=VECTORIZED.model_copy(update={"parallel_runs": 1}))
    by_itself = compare(apart, ingredients(), methods, 2).results
    assert all(result.record.engine.parallel_numbers == [] for result in by_itself)
    for first, second in zip(one.results, by_itself, strict=True):
        for name, tensor in second.params.items():
            torch.testing.assert_close(first.params[name], tensor)


def test_a_comparison_goes_on_with_another_number(tmp_path: Path) -> None:
    """What is finished stays, and the new runs have the bits of a comparison of all at once."""
    given, methods = settings(engine=VECTORIZED), [f"fedprox(mu={mu})" for mu in (0.1, 0.5, 1.0)]
    compare(given, ingredients(), methods[:2], 1, tmp_path / "in two")
    later = compare(given, ingredients(), methods, 1, tmp_path / "in two")
    whole = compare(given, ingredients(), methods, 1, tmp_path / "whole")
    assert all(map(same, later.results, whole.results))


def test_jobs_that_were_interrupted_before_any_run_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is an interrupt, not a failure of training."""
    monkeypatch.setattr(module, "run_all", lambda requests, *more: [None for _ in requests])
    with pytest.raises(KeyboardInterrupt):
        compare(settings(), ingredients(), ["fedavg"], 2, tmp_path / "c", jobs=2)


def test_jobs_that_were_interrupted_show_all_that_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(requests: Iterable[Any], *more: Any) -> list[Any]:
        """Make all runs but the last, and press Ctrl-C."""
        *first, last = run_all(requests, *more)
        shutil.rmtree(last.folder)
        os.kill(os.getpid(), signal.SIGINT)
        return [*first, None]

    run_all = module.run_all
    monkeypatch.setattr(module, "run_all", interrupted)
    made = compare(settings(), ingredients(), ["fedavg", "scaffold"], 2, tmp_path / "c", jobs=2)
    assert not made.complete
    shown = [(result.record.method, result.record.seed) for result in made.results]
    assert shown == [("fedavg", 0), ("fedavg", 1), ("scaffold", 0)]
    assert len(runs_of(tmp_path / "c")) == 3


def test_several_jobs_need_a_folder_and_no_callbacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no `out`"):
        compare(settings(), ingredients(), ["fedavg"], 2, jobs=2)
    with pytest.raises(ConfigError, match="callbacks"):
        compare(
            settings(),
            ingredients(),
            ["fedavg"],
            2,
            tmp_path / "c",
            callbacks=[fk.Callback()],
            jobs=2,
        )
