"""Callbacks follow a run and may end it; what they raise reaches the user, and all is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedkeel as fk
from fedkeel.errors import ConfigError
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel, RunInfo
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from toys import Net, federation, held, prepared, same


class Recorder(Callback):
    """Records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def on_run_begin(self, run: RunInfo) -> None:
        self.calls.append(("begin", run.record.method, run.rounds_done, run.is_finished))

    def on_clients_trained(self, trained: int, count: int) -> None:
        self.calls.append(("clients", trained, count))

    def on_evaluation(self, row: RoundRecord, model: GlobalModel) -> None:
        self.calls.append(("evaluation", row.round))

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        self.calls.append(("round", row.round))

    def on_run_end(self, result: Result) -> None:
        self.calls.append(("end", result.record.status))

    def without_clients(self) -> list[tuple[object, ...]]:
        return [call for call in self.calls if call[0] != "clients"]


class Fails(Callback):
    """Raises an error in one of its methods."""

    def __init__(self, method: str, round: int = 2) -> None:
        self.method, self.round = method, round

    def _check(self, method: str, round: int | None = None) -> None:
        if method == self.method and round in (None, self.round):
            raise LookupError(f"raised in {method}")

    def on_run_begin(self, run: RunInfo) -> None:
        self._check("on_run_begin")

    def stop_reason(self, row: RoundRecord) -> str:
        self._check("stop_reason", row.round)
        return ""

    def on_evaluation(self, row: RoundRecord, model: GlobalModel) -> None:
        self._check("on_evaluation", row.round)

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        self._check("on_round_end", row.round)


def test_the_calls_of_a_run() -> None:
    recorder = Recorder()
    ready = prepared(rounds=3, evaluation=fk.Evaluation(every=2))
    start(ready, callbacks=[recorder])
    assert recorder.without_clients() == [
        ("begin", "fedavg", 0, False),
        ("evaluation", 0),
        ("round", 1),
        ("evaluation", 2),
        ("round", 2),
        ("evaluation", 3),
        ("round", 3),
        ("end", "finished"),
    ]
    counts = [call[1:] for call in recorder.calls if call[0] == "clients"]
    assert counts[-1] == (4, 4)


def test_the_model_is_that_of_the_round() -> None:
    states = []

    class Keep(Callback):
        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            states.append(model.state_dict())

    result = start(prepared(rounds=2), callbacks=[Keep()])
    last = result.state_dict()
    assert states[1].keys() == last.keys()
    assert all(torch.equal(tensor, last[name]) for name, tensor in states[1].items())
    assert not all(torch.equal(tensor, last[name]) for name, tensor in states[0].items())


@pytest.mark.parametrize("method", ["on_run_begin", "stop_reason", "on_evaluation", "on_round_end"])
def test_an_exception_ends_the_run_with_everything_saved(tmp_path: Path, method: str) -> None:
    """Going on gives the run that no exception has ended."""
    ready, out, recorder = prepared("scaffold", rounds=4), tmp_path / "run", Recorder()
    with pytest.raises(LookupError, match=f"raised in {method}"):
        start(ready, out, callbacks=[recorder, Fails(method)])
    record = RunFolder(out).read_run()
    assert (record.status, record.message) == ("failed", f"LookupError: raised in {method}")
    assert recorder.calls[-1] == ("end", "failed")
    done = {"on_run_begin": 0, "stop_reason": 1}.get(method, 2)
    again = Recorder()
    result = start(ready, out, resume=True, callbacks=[again])
    if method != "stop_reason":  # before its row was recorded
        assert again.calls[0] == ("begin", "scaffold", done, False)
    assert result.record.status == "finished"
    assert same(result, start(ready))


def test_a_callback_may_end_a_run_early(tmp_path: Path) -> None:
    class Stops(Callback):
        def stop_reason(self, row: RoundRecord) -> str:
            return "two rounds are enough" if row.round == 2 else ""

    result = start(prepared(rounds=5), tmp_path / "run", callbacks=[Stops()])
    assert (result.record.status, result.record.message) == ("finished", "two rounds are enough")
    assert result.rows[-1].round == 2
    assert result.rows[-1].per_client is not None


def test_a_finished_run_is_only_begun_and_ended(tmp_path: Path) -> None:
    ready, recorder = prepared(rounds=2), Recorder()
    start(ready, tmp_path / "run")
    start(ready, tmp_path / "run", callbacks=[recorder])
    assert recorder.calls == [("begin", "fedavg", 2, True), ("end", "finished")]


def run(callbacks: object) -> None:
    fk.run(
        "fedavg",
        task=fk.Task(Net),
        clients=federation(),
        test=held(),
        rounds=1,
        local=fk.Local(lr=0.05, epochs=1, batch_size=4),
        callbacks=callbacks,  # type: ignore[arg-type]
    )


def test_callbacks_of_the_public_functions() -> None:
    recorder = Recorder()
    run([recorder])
    assert recorder.calls[-1] == ("end", "finished")
    fk.compare(
        ["fedavg", "fedgh"],
        task=fk.Task(Net),
        clients=federation(),
        test=held(),
        rounds=1,
        local=fk.Local(lr=0.05, epochs=1, batch_size=4),
        seeds=1,
        callbacks=[recorder],
    )
    begun = [call[1] for call in recorder.calls if call[0] == "begin"]
    assert begun == ["fedavg", "fedavg", "fedgh"]


@pytest.mark.parametrize("wrong", [[print], Recorder(), [Recorder]])
def test_what_is_no_callback_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"not a list of fedkeel\.Callback"):
        run(wrong)
