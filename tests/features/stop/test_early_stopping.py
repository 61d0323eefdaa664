"""A run ends before its last round where its settings say so: the same in every engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedkeel as fk
from commands import EXPERIMENT, call, experiment
from each import each
from fedkeel import config
from fedkeel.config import Flower
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError
from fedkeel.features.stop.early_stopping import EarlyStopping
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.report.alerts import alerts
from fedkeel.report.runs import load_runs
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.api import compare
from in_process_grid import InProcessGrid, header_of, make_nodes, run_on_nodes
from toys import Net, federation, held, plain, prepared, same


def ended(accuracies: list[float | None], **settings: object) -> int | None:
    """The round after which a run with these accuracies ends, None where it does not."""
    early = EarlyStopping(fk.Stop(**settings), ACCURACY)  # type: ignore[arg-type]
    for number, accuracy in enumerate(accuracies):
        test = None if accuracy is None else Scores(10, {"accuracy": accuracy})
        if reason := early.stop_reason(RoundRecord(number, test=test)):
            assert f"ended early after round {number}:" in reason
            return number
    return None


@each(
    ("accuracies", "settings", "after"),
    [
        ([0.1, 0.4, 0.5, 0.6], {"target": 0.5}, 2),
        ([0.9, 0.4, 0.95], {"target": 0.5}, 2),  # the untrained model ends nothing
        ([0.1, 0.4], {"target": 0.5}, None),
        ([0.1, 0.1, 0.1], {}, None),
        ([0.1, 0.1, 0.1, 0.1], {"patience": 2}, 2),
        ([0.1, 0.2, 0.1, 0.2, 0.3], {"patience": 2}, 3),  # as high as before is not risen
        ([0.1, 0.2, 0.1, 0.3, 0.1, 0.1], {"patience": 2}, 5),
        ([0.1, None, None, None, 0.2, None, None, None, 0.2], {"patience": 4}, 8),
        ([0.1, 0.15, 0.19, 0.21, 0.3], {"patience": 3, "min_delta": 0.1}, None),
        ([0.1, 0.15, 0.19, 0.20, 0.3], {"patience": 3, "min_delta": 0.1}, 3),
        ([0.5, 0.4, 0.4, 0.6], {"patience": 2, "target": 0.6}, 2),
    ],
)
def test_when(accuracies: list[float | None], settings: dict[str, object], after: int) -> None:
    assert ended(accuracies, **settings) == after


def test_an_evaluation_of_nothing_says_nothing() -> None:
    """Nodes that evaluate may all be away."""
    early = EarlyStopping(fk.Stop(patience=1), ACCURACY)
    for number in range(4):
        assert not early.stop_reason(RoundRecord(number, test=Scores(0, {"accuracy": 0.0})))


def reached(run: Result) -> float:
    """An accuracy that a run reaches for the first time after some rounds, before its last."""
    scores = [accuracy for _, accuracy in run.accuracies]
    rising = [i for i in range(2, len(scores) - 1) if scores[i] > max(scores[:i])]
    assert rising
    return scores[rising[0]]


@pytest.fixture(scope="module")
def full() -> Result:
    return start(prepared("scaffold", dtype="float64", rounds=8))


def until(full: Result, **more: object) -> Prepared:
    stop = fk.Stop(target=reached(full))
    return prepared("scaffold", dtype="float64", rounds=8, stop=stop, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sequential", "workers", "vectorized"])
def test_every_engine_ends_at_the_same_round(full: Result, kind: str) -> None:
    run = start(until(full, kind=kind, workers=2))
    last = run.rows[-1].round
    assert 1 < last < 8
    assert run.record.status == "finished"
    assert f"ended early after round {last}: the test accuracy" in run.record.message
    assert run.rows[-1].per_client is not None
    if kind != "vectorized":
        rows = [row for row in full.rows if row.round <= last]
        rows[-1] = replace(rows[-1], per_client=run.rows[-1].per_client)
        assert plain(run) == plain(replace(full, rows=rows))


def test_a_federation_of_nodes_ends_at_the_same_round(full: Result, tmp_path: Path) -> None:
    made = until(full)
    far, here = run_on_nodes(made, InProcessGrid(make_nodes(made, tmp_path))), start(made)
    for row in (*far.rows, *here.rows):
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    assert same(far, here)
    assert far.record.message == here.record.message != ""


@pytest.mark.parametrize("after", [1, 2])
def test_going_on_ends_at_the_same_round_with_the_same_bits(tmp_path: Path, after: int) -> None:
    """Patience counts from before the end; what is finished is not gone on with."""
    stop = fk.Stop(patience=3, min_delta=0.9)
    made = prepared("scaffold", dtype="float64", rounds=8, stop=stop)
    whole, grid = start(made), InProcessGrid(make_nodes(made, tmp_path / "nodes"))
    assert whole.rows[-1].round == 3
    quick = Flower(deadline_seconds=0.2, poll_seconds=0.01, quorum=1.0)
    made = replace(made, settings=made.settings.model_copy(update={"flower": quick}))
    node, out = next(iter(grid.nodes)), tmp_path / "run"
    grid.edits[node] = lambda kind, reply: (
        None if kind == "train" and header_of(reply)["round"] == after else reply
    )
    with pytest.raises(fk.FedkeelError, match="no quorum"):
        run_on_nodes(made, grid, out)
    assert RunFolder(out).rows()[-1].round == after
    grid.edits.clear()
    for _ in range(2):
        run = run_on_nodes(made, grid, out, resume=True)
        assert (run.record.status, run.record.message) == ("finished", whole.record.message)
        assert all(torch.equal(run.params[k], whole.params[k]) for k in whole.params)


def test_a_kill_between_the_last_row_and_the_end(full: Result, tmp_path: Path) -> None:
    made, folder = until(full), RunFolder(tmp_path / "run")
    run = start(made, folder.path)
    folder.write_run(replace(run.record, status="running", message=""))
    again = start(made, folder.path, resume=True)
    assert again.record.message == run.record.message
    assert same(again, run)


def test_it_is_part_of_what_a_run_is() -> None:
    plain = prepared("fedavg")
    assert prepared("fedavg", stop=fk.Stop()).key == plain.key
    assert prepared("fedavg", stop=fk.Stop(target=0.5)).key != plain.key


def test_a_comparison_and_its_page_say_so(tmp_path: Path) -> None:
    task, local = fk.Task(Net), fk.Local(lr=0.05, epochs=2, batch_size=4)
    stop, out = fk.Stop(patience=1, min_delta=0.99), tmp_path / "both"
    found = compare(
        ["fedavg", "fedprox"],
        task=task,
        clients=federation(),
        test=held(),
        rounds=5,
        local=local,
        seeds=1,
        stop=stop,
        out=out,
    )
    assert [result.rows[-1].round for result in found.results] == [1, 1]
    assert found.complete
    said = alerts(load_runs(sorted(out.glob("*/"))))
    assert len([words for words in said if "ended early, 1 of 5 rounds" in words]) == 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = experiment(tmp_path, EXPERIMENT.replace("rounds = 4", "rounds = 30"))
    done = call("run", file, "-s", "stop.target=0.5", "--out", "run", "--json")
    assert done.code == 0, done.err
    assert done.json["status"] == "finished"
    assert 0 < done.json["rounds"] < 30
    assert "has reached stop.target 0.5" in done.err
    assert done.json["message"] in done.err.replace("\n", " ")
    again = call("run", file, "-s", "stop.target=0.5", "--out", "run", "--json")
    assert again.json == done.json


def test_mistakes() -> None:
    values = {"method": "fedavg", "rounds": 3, "local": {"lr": 0.1, "epochs": 1}}
    for wrong, words in (
        ({"target": float("nan")}, r"stop\.target"),
        ({"patience": 0}, r"stop\.patience"),
        ({"min_delta": 0.1}, "'min_delta' needs 'patience'"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            config.build(config.Run, {**values, "stop": wrong}, "test")
        assert len(error.value.lines()) <= 4


@pytest.mark.parametrize("target", [0.0, 1.5, 80.0, -0.5])
def test_a_target_of_accuracy_is_a_share(target: float) -> None:
    with pytest.raises(ConfigError, match=r"stop\.target is not a share") as error:
        prepared(stop=fk.Stop(target=target))
    assert len(error.value.lines()) <= 4
    assert (error.value.do == "write 0.8") == (target == 80.0)


def test_a_lower_error_is_better() -> None:
    error = MetricInfo("mae", higher_is_better=False)
    for settings, values, end in (
        ({"target": 2.0}, [3.0, 2.5, 2.0, 1.0], 2),
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.0, 1.0], 3),
        ({"patience": 2, "min_delta": 0.1}, [3.0, 2.0, 1.95, 1.85, 1.95, 1.8], 5),
    ):
        early = EarlyStopping(fk.Stop(**settings), error)  # type: ignore[arg-type]
        reasons = [
            early.stop_reason(RoundRecord(number, test=Scores(10, {"mae": value})))
            for number, value in enumerate(values)
        ]
        assert [bool(reason) for reason in reasons].index(True) == end
        assert "MAE" in reasons[end]
