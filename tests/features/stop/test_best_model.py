"""The best model of a run: which round it is of, and that a continued run keeps the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedkeel as fk
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError
from fedkeel.records.folder import BEST_MODEL, MODEL, RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import BestModel
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from toys import federation, prepared


class Kill(BaseException):
    """Ends a run as a kill would: nothing catches it."""


class States(Callback):
    """Keeps the model of every round, and kills the run after one."""

    def __init__(self, kill_after: int = -1) -> None:
        self.kill_after = kill_after
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def on_evaluation(self, row: RoundRecord, model: GlobalModel) -> None:
        self.states[row.round] = model.state_dict()

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == self.kill_after:
            raise Kill


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = (torch.equal(tensor, other[name]) for name, tensor in one.items())
    return one.keys() == other.keys() and all(same)


def best(result: Result) -> BestModel:
    assert result.record.best_model is not None
    return result.record.best_model


def ready(**more: object) -> Prepared:
    return prepared("scaffold", dtype="float64", rounds=6, **more)  # type: ignore[arg-type]


def test_the_best_of_the_test_scores(tmp_path: Path) -> None:
    states = States()
    result = start(ready(), tmp_path / "run", callbacks=[states])
    scores = dict(result.accuracies)
    first = min(number for number, score in scores.items() if score == max(scores.values()))
    assert best(result) == BestModel(first, max(scores.values()), "test set")
    assert equal(result.best_state_dict(), states.states[first])
    assert equal(load_file(tmp_path / "run" / BEST_MODEL), states.states[first])
    assert RunFolder(tmp_path / "run").read_run().best_model == best(result)
    again = start(ready(), tmp_path / "run")
    assert equal(again.best_state_dict(), states.states[first])


def test_the_best_on_held_out_examples(tmp_path: Path) -> None:
    """Where clients hold examples out and are evaluated during the run."""
    clients = federation().hold_out(0.3, 0)
    evaluated = fk.Evaluation(clients_every=2)
    result = start(ready(clients=clients, evaluation=evaluated), tmp_path / "run")
    scores = {}
    for row in result.rows:
        if row.per_client is not None:
            counts, shares = row.per_client["examples"], row.per_client["accuracy"]
            right = sum(n * score for n, score in zip(counts, shares, strict=True) if n)
            scores[row.round] = right / sum(counts)
    assert sorted(scores) == [2, 4, 6]
    chosen = best(result)
    assert chosen.chosen_on == "held-out clients"
    assert chosen.round == max(scores, key=lambda number: (scores[number], -number))
    assert chosen.score == pytest.approx(scores[chosen.round], abs=1e-12)
    plain = start(ready(clients=clients))
    assert best(plain).chosen_on == "test set"


@pytest.mark.parametrize("last", [1, 3, 5])
def test_a_continued_run_keeps_the_same_model(tmp_path: Path, last: int) -> None:
    whole = start(ready())
    with pytest.raises(Kill):
        start(ready(checkpoint_seconds=0.0), tmp_path / "run", callbacks=[States(last)])
    assert not (tmp_path / "run" / BEST_MODEL).exists()
    result = start(ready(), tmp_path / "run", resume=True)
    assert best(result) == best(whole)
    assert equal(result.best_state_dict(), whole.best_state_dict())


def test_without_a_file_there_is_no_best_model(tmp_path: Path) -> None:
    result = start(ready(), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.drop_model()
    assert folder.changes(folder.read_run(), folder.rows()) == []
    assert not (tmp_path / "run" / MODEL).exists()
    assert equal(result.best_state_dict(), result.best_state_dict())  # this one is in memory
    emptied = Result(result.record, result.rows, {}, {}, {}, tmp_path / "run")
    with pytest.raises(RunError, match="no best model"):
        emptied.best_state_dict()
