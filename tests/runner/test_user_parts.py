"""Parts of one's own that return what they should not: the part is named, and others go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import fedkeel as fk
from each import each
from fedkeel import config
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import RunError, TrainingError
from fedkeel.records.folder import RunFolder
from fedkeel.runner.start import start
from fedkeel.runner.warnings import find_warnings
from fedkeel.study.tune import tune
from toys import Net, federation, held, prepared, same

PARTS = """
from dataclasses import dataclass
from typing import ClassVar
import numpy
import torch
from fedkeel.method.roles import *

class Mine:
    paper: ClassVar[str] = ""

@dataclass(frozen=True)
class Change(Mine, AggregateTransform):
    how: str = "none"
    name: ClassVar[str] = "change"
    aggregate_stage: ClassVar[Stage] = Stage.LIMIT
    def transform_aggregate(self, delta, updates, cohort):
        if self.how == "raises" and cohort.round == 1:
            return {k: v @ v for k, v in delta.items()}
        if self.how == "nan" and cohort.round == 1:
            return {k: v * float("nan") for k, v in delta.items()}
        return delta if self.how in ("raises", "nan") else None

@dataclass(frozen=True)
class Apply(Mine, ServerOptimiser):
    how: str = "alone"
    name: ClassVar[str] = "apply"
    def init_optimiser(self, params, population):
        return None if self.how == "init" else {"n": torch.zeros(())}
    def apply(self, params, delta, updates, cohort):
        new = {k: v + delta[k] for k, v in params.items()}
        long = {k: v[None] for k, v in new.items()}
        return {"alone": new, "state": (new, None), "shape": (long, {})}[self.how]

@dataclass(frozen=True)
class Send(Mine, ServerState, Broadcast):
    name: ClassVar[str] = "send"
    def init_server(self, params, population): return {}
    def next_server(self, outcome): return {}
    def message(self, state): return None

@dataclass(frozen=True)
class First(Mine, ServerState, AggregateTransform):
    copies: bool = False
    name: ClassVar[str] = "first"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    aggregate_stage: ClassVar[Stage] = Stage.LIMIT
    def init_server(self, params, population): return {k: v * 0.0 for k, v in params.items()}
    def next_server(self, outcome):
        rows = outcome.updates.materialise()
        return {k: v[0].clone() if self.copies else v[0] for k, v in rows.items()}
    def transform_aggregate(self, delta, updates, cohort):
        return {k: v + 0.3 * cohort.state[k] for k, v in delta.items()}

@dataclass(frozen=True)
class Rows(Mine, Table):
    how: str = "shape"
    name: ClassVar[str] = "rows"
    def init_row(self, params): return None if self.how == "init" else {"r": torch.zeros(2)}
    def next_rows(self, outcome): return {"r": torch.zeros(2)}

@dataclass(frozen=True)
class Keep(Mine, ClientState, Upload):
    how: str = "shape"
    name: ClassVar[str] = "keep"
    def init_client(self, start): return {"c": torch.zeros(2)}
    def next_client(self, round):
        kind = torch.zeros(2, dtype=torch.int64)
        if self.how == "mine":
            return {"c": round.client_state["c"].add_(1.0)}
        wrong = {"shape": {"c": torch.zeros(3)}, "name": {"d": torch.zeros(2)}, "none": None}
        return {**wrong, "kind": {"c": kind}}.get(self.how, {"c": torch.ones(2)})
    def upload(self, round):
        round.log("size", torch.zeros(2) if self.how == "long" else 0.5)
        return {"sends": None, "bare": torch.zeros(2)}.get(self.how, {"u": torch.zeros(1)})

@dataclass(frozen=True)
class Peek(Mine, Survey, GradientTransform):
    name: ClassVar[str] = "peek"
    gradient_stage: ClassVar[Stage] = Stage.CORRECT
    def survey(self, step):
        last = step.broadcast.get("survey")
        nothing = step.start["fc1.bias"].new_zeros(())
        return {"n": nothing + (1.0 if last is None else 1.0 + last["n"])}
    def transform_gradient(self, grads, params, step):
        return {k: g * step.broadcast["survey"]["n"] for k, g in grads.items()}

COUNT = [0]

@dataclass(frozen=True)
class Bend(Mine, GradientTransform):
    how: str = "none"
    name: ClassVar[str] = "bend"
    gradient_stage: ClassVar[Stage] = Stage.CORRECT
    def transform_gradient(self, grads, params, step):
        COUNT[0] += 1
        if self.how == "start":
            step.start["fc1.weight"].add_(0.01)
        if self.how == "params":
            params["fc1.weight"][0] = 0.0
        if self.how == "asks":
            return step.state
        if self.how == "noise":
            return {k: g + step.noise[k] for k, g in grads.items()}
        if self.how == "counts":
            return {k: g / step.client_info.class_counts.sum() for k, g in grads.items()}
        with_noise = {
            "numpy": lambda g: g + float(numpy.random.normal()),
            "count": lambda g: g / COUNT[0],
            "torch": lambda g: g + torch.randn_like(g),
            "nan": lambda g: g * float("nan"),
        }.get(self.how, lambda g: g.mul_(0.5))
        return {k: with_noise(g) for k, g in grads.items()}
"""


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("mine:Change", r"change \(Change\) does not return a tensor for each parameter"),
        ("mine:Change(how='raises')", r"The server's step in round 2 failed, in change\."),
        ("mine:Apply", r"apply \(Apply\) does not return a model and a state"),
        ("mine:Apply(how='state')", "What apply remembers at the server is not a state"),
        ("mine:Apply(how='shape')", r"(?s)apply \(Apply\) does not .*expected \[6, 5\] of float32"),
        ("mine:Rows", "What rows remembers of clients has another form than before"),
    ],
)
def test_a_server_part_is_named_and_the_run_has_failed(method: str, words: str) -> None:
    out = Path("run")
    with pytest.raises(TrainingError, match=words) as said:
        start(prepared(method), out)
    record = RunFolder(out).read_run()
    assert (record.status, record.message) == ("failed", said.value.what)
    assert len(said.value.lines()) <= 4


@pytest.mark.parametrize("kind", ["sequential", "workers", "vectorized"])
def test_what_a_part_remembers_of_an_update_is_its_own(kind: str) -> None:
    """Updates lie where the next round's are written."""
    more = {"rounds": 4, "kind": kind, "workers": 2, "parallel_clients": 2}
    kept, copied = (prepared(f"mine:First(copies={one})", **more) for one in (False, True))
    assert same(start(copied), start(kept))


@pytest.mark.parametrize("kind", ["workers", "vectorized"])
def test_answers_of_the_last_round_are_not_in_the_next_question(kind: str) -> None:
    """Workers read the message where the last one lay, with its answers."""
    one, two = (start(prepared("mine:Peek", kind=k, workers=2)) for k in ("sequential", kind))
    for name, tensor in one.params.items():
        torch.testing.assert_close(two.params[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_step_of_the_server_that_diverges_is_told_as_such(rounds: int) -> None:
    """In the last round too, of which no client would be left to tell."""
    out = Path("run")
    words = r"diverged in round 2: the server's step left a model that is not finite"
    with pytest.raises(TrainingError, match=words) as said:
        start(prepared("mine:Change(how='nan')", rounds=rounds), out)
    assert "mean, change, addition" in said.value.why
    assert said.value.got == "NaN or infinity in 'fc1.weight'"
    folder = RunFolder(out)
    assert (folder.read_run().status, folder.read_run().message) == ("failed", said.value.what)
    assert [row.round for row in folder.rows()] == [0, 1]
    assert not (out / "model.safetensors").exists()


@each(
    ("method", "words"),
    [
        ("mine:Apply(how='init')", "What apply remembers at the server is not a state"),
        ("mine:Send", "What send sends to the clients is not a state"),
        ("mine:Rows(how='init')", "What rows remembers of a client is not a state"),
        ("mine:Keep(how='none')", "What keep keeps for a client is not a state"),
        ("mine:Keep(how='sends')", "What keep sends to the server is not a state"),
        (
            "mine:Keep(how='bare')",
            r"(?s)What keep sends .*got \[2\] of float32; expected a dict of named tensors",
        ),
        ("mine:Keep(how='mine')", "(?s)What a client keeps was changed in place.*'keep/c'"),
        ("mine:Keep(how='long')", r"(?s)in keep\..*'size' is one number for a client; got \[2\]"),
        ("mine:Bend(how='noise')", "(?s)in bend.*add Capability.NOISE to"),
        ("mine:Bend(how='counts')", "(?s)in bend.*add Capability.CLASS_COUNTS to .*`class_counts`"),
        (
            "mine:Keep(how='shape')",
            r"(?s)What keep keeps for a client has another form.*\[3\] of float.*\[2\] of float",
        ),
        ("mine:Keep(how='name')", r"(?s)What keep keeps .*keep/c: nothing; expected \[2\]"),
        ("mine:Keep(how='kind')", r"(?s)What keep keeps .*\[2\] of int64; expected \[2\] of float"),
    ],
)
def test_what_shows_in_the_rehearsal_is_refused_before_anything_runs(
    method: str, words: str
) -> None:
    with pytest.raises(TrainingError, match=words):
        prepared(method)


@pytest.mark.parametrize("how", ["start", "params"])
def test_what_all_clients_receive_is_changed_by_none_of_them(how: str) -> None:
    """Every engine made something else of it, and nothing was said."""
    with pytest.raises(TrainingError, match="was changed in place, in mine") as said:
        prepared(f"mine:Bend(how='{how}')")
    assert said.value.got == "other numbers in 'params/fc1.weight'"
    assert len(said.value.lines()) == 4


@pytest.mark.parametrize(
    ("how", "told"),
    [("none", 0), ("torch", 0), ("nan", 0), ("numpy", 1), ("count", 1)],
)
def test_a_step_that_does_not_repeat_is_told(how: str, told: int) -> None:
    """Engines would not agree. What torch draws is drawn anew from the run's seed."""
    found = find_warnings(prepared(f"mine:Bend(how='{how}')"))
    assert len(found) == told
    assert all(one.startswith("the same step of the same client") for one in found)


def test_what_a_step_has_is_said_to_who_asks_for_more() -> None:
    with pytest.raises(TrainingError, match="'Step' object has no attribute 'state'") as said:
        prepared("mine:Bend(how='asks')")
    assert str(said.value.do).startswith("Step has batch, start, client_info, ")
    assert "states" not in said.value.do


def test_a_number_is_noted_as_it_is() -> None:
    found = start(
        prepared("mine:Keep(how='well')", kind="vectorized", parallel_clients=2, workers=1)
    )
    assert [row.diagnostics for row in found.rows[1:]] == [{"keep.size": 0.5}] * 3


def test_a_comparison_goes_on_with_the_other_methods() -> None:
    found = fk.compare(
        ["mine:Change", "fedavg"],
        task=fk.Task(Net),
        clients=federation(),
        test=held(),
        rounds=2,
        seeds=1,
        local=fk.Local(lr=0.05, epochs=1, batch_size=4),
        engine=fk.Engine(kind="sequential"),
        out="both",
    )
    assert [r.record.method for r in found.results] == ["fedavg"]
    assert found.failures[0].startswith("mine:Change, seed 0: change (Change) does not return")
    assert len(json.loads(Path("both/comparison.json").read_text())["runs"]) == 2


def test_a_run_that_failed_before_its_first_round_keeps_nothing_from_its_folder() -> None:
    """Its method is mended, and the same command is given once more."""
    once = PARTS.replace("cohort.round == 1", "cohort.round == 0")
    for text, fails in ((once, True), (PARTS, False)):
        written_anew(text)
        ready = prepared("mine:Change(how='raises')", rounds=1)
        if fails:
            with pytest.raises(TrainingError, match="in round 1 failed"):
                start(ready, Path("run"))
        else:
            start(ready, Path("run"))
    assert [row.round for row in RunFolder("run").rows()] == [0, 1]
    alone = start(ready, Path("other"))
    assert same(alone, start(ready, Path("run")))  # as it is there


def test_a_run_that_failed_later_keeps_its_folder() -> None:
    ready = prepared("mine:Change(how='raises')", rounds=2)
    with pytest.raises(TrainingError, match="in round 2 failed"):
        start(ready, Path("run"))
    before = Path("run/rounds.jsonl").read_bytes()
    written_anew(PARTS + "# another line\n")
    with pytest.raises(RunError, match="run holds another run"):
        start(prepared("mine:Change(how='raises')", rounds=2), Path("run"))
    assert Path("run/rounds.jsonl").read_bytes() == before


def written_anew(text: str) -> None:
    Path("mine.py").write_text(text)
    sys.modules.pop("mine", None)


def test_a_method_that_was_written_anew_is_named_by_its_file() -> None:
    start(prepared("mine:Change(how='raises')", rounds=1), Path("run"))
    written_anew(PARTS + "# another line\n")
    with pytest.raises(RunError, match=r"the method's own code \(mine\.py\), the model, the"):
        start(prepared("mine:Change(how='raises')", rounds=1), Path("run"))


def test_a_search_goes_on_with_the_other_methods() -> None:
    settings = config.Run(
        name="toy",
        rounds=2,
        local=fk.Local(lr=0.05, epochs=1, batch_size=4),
        cohort=fk.Cohort(clients=3),
        engine=fk.Engine(kind="sequential"),
    )
    ingredients = Ingredients(fk.Task(Net), lambda seed: federation(seed=seed), held(), "toy")
    space = config.Space(space={"local.lr": (0.01, 0.1)})
    found = tune(settings, ingredients, ["mine:Change", "fedavg"], space, Path("out"))
    assert [row.value is None for row in found.rows] == [True, False]
    assert {trial.error for trial in found.trials} == {
        "",
        "change (Change) does not return a tensor for each parameter.",
    }
