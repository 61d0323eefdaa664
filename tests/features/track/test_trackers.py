"""Trackers get every round once, also of a run that was interrupted, and change no bit of it.

Each back end is a real one on this machine: event files, a SQLite store, offline runs.
"""

from __future__ import annotations

import importlib.util
import socket
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fedkeel as fk
from features.track import wandb_files
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError, TrackerFailed
from fedkeel.features.track.numbers import numbers
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.features import callbacks_of
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.comparison import Comparison
from toys import Net, deadline, federation, held, prepared, same

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the trackers' own packages
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with deadline(240):
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A SQLite store for the module; making its tables takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # MLflow keeps files of runs in ./mlruns
        yield f"sqlite:///{folder}/mlflow.db"


class Breaks(Callback):
    """Raises an error after a round."""

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == 2:
            raise LookupError("in the middle")


def tracked(track: fk.Track, rounds: int = 4) -> Prepared:
    ready = prepared(rounds=rounds)
    return replace(ready, settings=ready.settings.model_copy(update={"track": track}))


def go(ready: Prepared, folder: Path, *callbacks: Callback) -> Result:
    """Make or continue a run, with the trackers of its settings."""
    return start(ready, folder, True, [*callbacks_of(ready.settings, folder), *callbacks])


def interrupted_and_resumed(track: fk.Track, folder: Path) -> Result:
    ready = tracked(track)
    with pytest.raises(LookupError):
        go(ready, folder, Breaks())
    return go(ready, folder)


def accuracies(result: Result) -> dict[int, float]:
    return {row.round: row.test["accuracy"] for row in result.rows if row.test is not None}


def compared(track: fk.Track, out: Path | None = None) -> Comparison:
    return fk.compare(
        "fedavg, fedprox",
        task=fk.Task(Net),
        clients=federation(),
        test=held(),
        rounds=2,
        seeds=2,
        local=fk.Local(lr=0.05, epochs=1, batch_size=8),
        engine=fk.Engine(kind="sequential"),
        track=track,
        out=out,
    )


def test_tensorboard_shows_every_round_once_and_changes_no_bit(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = interrupted_and_resumed(fk.Track(to="tensorboard"), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = events.Scalars("test/accuracy")
    assert [event.step for event in shown] == [0, 1, 2, 3, 4]
    assert [event.value for event in shown] == pytest.approx(list(accuracies(result).values()))
    last = events.Scalars("traffic/bytes_so_far")[-1]
    sent = [sum(row.bytes_up.values()) + sum(row.bytes_down.values()) for row in result.rows]
    assert (last.step, last.value) == (4, sum(sent))
    assert "_hparams_/session_start_info" in events.summary_metadata
    untracked = start(prepared(rounds=4))
    assert same(result, untracked)


def test_bytes_are_shown_by_their_direction() -> None:
    result = start(prepared(rounds=1))
    row = replace(result.rows[1], bytes_up={"update": 3, "uploads": 4}, bytes_down={"params": 50})
    shown = numbers(row, result.record, bytes_so_far=57)
    assert (shown["traffic/bytes_up"], shown["traffic/bytes_down"]) == (7.0, 50.0)
    assert shown["traffic/bytes_so_far"] == 57.0


@pytest.mark.slow
def test_mlflow_groups_the_runs_of_a_comparison(store: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    track = fk.Track(to="mlflow", project="compared", mlflow_uri=store)
    comparison = compared(track, tmp_path / "both")
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("compared")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags["fedkeel.kind"] == "comparison"]
    children = [run for run in runs if run.data.tags["fedkeel.kind"] == "run"]
    assert parent.info.run_name == "both"
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert len(children) == len(comparison.results) == 4
    by_key = {run.data.tags["fedkeel.key"]: run for run in children}
    for result in comparison.results:
        run = by_key[result.record.key]
        history = client.get_metric_history(run.info.run_id, "test/accuracy")
        assert {m.step: m.value for m in history} == accuracies(result)
        assert run.info.status == "FINISHED"
        assert run.data.params["local.lr"] == "0.05"
        files = [file.path for file in client.list_artifacts(run.info.run_id, "models")]
        assert "models/model.safetensors" in files
    top = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"report.html", "results.md"} <= top
    compared(track, tmp_path / "both")  # finished runs are not told again
    assert len(client.search_runs([experiment.experiment_id])) == 5


@pytest.mark.slow
def test_mlflow_continues_a_run_and_a_store_that_breaks_loses_none(
    store: str, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    track = fk.Track(to="mlflow", project="continued", mlflow_uri=store)
    result = interrupted_and_resumed(track, tmp_path / "run")
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("continued")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "test/accuracy")
    assert [(m.step, m.value) for m in history] == list(accuracies(result).items())

    class Spoils(Callback):
        """Takes a table away in the middle of a run."""

        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            if row.round == 1:
                with sqlite3.connect(store.removeprefix("sqlite:///")) as database:
                    database.execute("ALTER TABLE metrics RENAME TO lost")

    with pytest.warns(TrackerFailed, match="mlflow failed and is told nothing more"):
        spoiled = go(tracked(track), tmp_path / "spoiled", Spoils())
    assert spoiled.record.status == "finished"
    assert same(spoiled, result)


@pytest.mark.slow
def test_wandb_offline_keeps_the_whole_of_a_continued_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    track = fk.Track(to="wandb", wandb_mode="offline", group="hospitals")
    result = interrupted_and_resumed(track, tmp_path / "run")
    files = sorted(
        (tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime
    )
    first, last = map(wandb_files.read, files)
    assert first.id == last.id
    assert (last.group, last.name) == ("hospitals", "fedavg, seed 0")
    assert {k: v["test/accuracy"] for k, v in last.history.items()} == accuracies(result)
    assert last.settings["local.lr"] == 0.05
    assert {"report", "model", "record"} == set(last.artifacts)
    assert last.summary["best"] == result.best
    assert (first.summary["status"], last.summary["status"]) == ("failed", "finished")


def test_a_tracker_that_cannot_begin_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    track = fk.Track(to="tensorboard", tensorboard_folder=str(tmp_path / "file" / "events"))
    with pytest.warns(TrackerFailed, match="tensorboard failed"):
        result = go(tracked(track), tmp_path / "run")
    assert result.record.status == "finished"
    assert len(RunFolder(tmp_path / "run").rows()) == 5


def test_an_mlflow_server_that_is_not_there_is_soon_given_up(tmp_path: Path) -> None:
    """MLflow tries for minutes; a run is worth more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
        began = time.process_time()
        with deadline(40.0), pytest.warns(TrackerFailed, match="no server answers at 127.0.0.1"):
            result = go(tracked(fk.Track(to=("mlflow",), mlflow_uri=uri)), tmp_path / "run")
    assert result.record.status == "finished"
    assert time.process_time() - began < 20.0


def test_a_package_that_is_missing_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        compared(fk.Track(to="mlflow"), tmp_path / "none")
    assert "pip install 'fedkeel[mlflow]'" in str(caught.value)
    assert not (tmp_path / "none").exists()
