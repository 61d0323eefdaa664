"""``fedkeel tune``: a table, files to go on with, and a command that may be stopped."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from commands import Process, call, run
from fedkeel.cli.common import ExperimentSource
from fedkeel.cli.next_steps import next_steps
from fedkeel.config import load
from fedkeel.records.folder import RunFolder
from fedkeel.study.tuning_result import TunedMethod, TuningResult
from toys import children, eventually

RATES = ("-s", "tune.space.local.lr=[0.001,0.1,0.3]", "-s", "rounds=2")
MU = ("-s", "tune.method.fedprox.mu=[0.1,1.0]")
TWO = ("--methods", "fedavg, fedprox")


def test_a_table_and_a_file_for_each_method(folder: Path) -> None:
    done = call("tune", "toy.toml", *TWO, *RATES, *MU)
    assert done.code == 0, done.err
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.strip()}
    assert "validation" in lines["fedavg"]
    assert "validation" in lines["fedprox"]
    assert "local.lr=" in lines["fedavg"]
    assert "fedprox(mu=" in done.out
    assert "Trials differ" in done.out
    assert "best    runs/toy-tune/best/fedprox.toml" in done.err
    assert "fedavg, local.lr 0.1, seed 0: " in done.err
    assert "test " not in done.err
    best = load(Path("runs/toy-tune/best/fedprox.toml"))
    assert best.method.startswith("fedprox(mu=")
    again = call("run", "runs/toy-tune/best/fedprox.toml", "--json", "-q")
    assert again.code == 0
    assert again.json["run_dir"] == "runs/toy-fedprox"
    over = call("compare", "runs/toy-tune/best/fedprox.toml", "--seeds", "2", "--json", "-q",
                "--out", "over")  # fmt: skip
    assert [(row["method"], row["seeds"]) for row in over.json] == [(best.method, 2)]


def test_the_end_says_how_to_compare_on_new_seeds(folder: Path) -> None:
    one = ("-s", "tune.space.local.lr=[0.1]", "-s", "rounds=1", "-q")
    done = call("tune", "toy.toml", *TWO, *one, *MU)
    (line,) = [line for line in done.err.splitlines() if line.startswith("next ")]
    assert line.startswith("next    fedkeel compare toy.toml ")
    words = shlex.split(line)[2:]
    assert "seed=1" in words
    made = call(*words, "--seeds", "2", "--json", "-q")
    assert made.code == 0, made.err
    assert made.json[0]["method"] == "fedavg"
    assert made.json[1]["method"].startswith("fedprox(mu=")
    tuned = ("compare", "runs/toy-tune/best/fedavg.toml", "--seeds", "2", "-q")
    told = "chosen by runs with the same seeds"
    assert told in call(*tuned).err
    assert told not in call(*tuned, "-s", "seed=1").err
    assert told not in made.err
    refused = call("compare", "runs/toy-tune")
    assert refused.code == 2
    assert "runs/toy-tune holds a search" in refused.err
    assert "runs/toy-tune/best" in refused.err


def test_the_end_says_what_to_do_where_rates_differ(folder: Path) -> None:
    row = TunedMethod(
        **{"method": "fedavg", "chosen": {"local.lr": 0.1, "method": "fedavg"}, "value": 0.5},
        **{"spread": None, "seeds": 1, "trials": 2, "offered": 2, "failed": 0, "edge": {}},
        **{"on": "validation", "metric": "best"},
    )
    other = replace(row, method="ditto", chosen={"local.lr": 0.3, "method": "ditto"})
    result = TuningResult([row, other], [], {}, Path("runs/toy-tune"))
    source = ExperimentSource(Path("toy.toml"), None, (), False)
    says, first, second, report = next_steps(result, load(Path("toy.toml")), source)
    assert says.startswith("one comparison has one local.lr for all methods")
    assert first.startswith("fedkeel compare runs/toy-tune/best/fedavg.toml -s seed=1 --out ")
    assert second.endswith("best/ditto.toml -s seed=1 --out runs/toy-tune-compare/ditto")
    assert report == "fedkeel report runs/toy-tune-compare/fedavg runs/toy-tune-compare/ditto"


def test_as_json_and_taken_again(folder: Path) -> None:
    words = ("tune", "toy.toml", *TWO, *RATES, "--json", "--out", "out")
    done = call(*words)
    assert done.code == 0, done.err
    assert [row["method"] for row in done.json] == ["fedavg", "fedprox"]
    assert done.json == json.loads(Path("out/tune.json").read_text())["rows"]
    assert set(done.json[0]["chosen"]) == {"local.lr", "method"}
    again = call(*words)
    assert again.json == done.json
    assert again.err.count("taken from an earlier run") == 6
    assert "since the run ended" not in again.err
    changed, deleted = sorted(path.parent for path in Path("out").glob("*/run.json"))[:2]
    (changed / "model.safetensors").write_bytes(b"")
    (deleted / "config.toml").unlink()
    told = call(*words, "-q")
    assert told.json == done.json
    assert f"{changed}: model.safetensors has changed since the run ended" in told.err
    assert f"{deleted}: config.toml has been deleted since the run ended" in told.err


def test_on_the_test_set_is_said_on_every_line(folder: Path) -> None:
    done = call("tune", "toy.toml", *TWO, *RATES, "-s", "tune.split=test", "-q")
    rows = [line for line in done.out.splitlines() if line.lstrip().startswith("fed")]
    assert len(rows) == 2
    assert all("test set" in row for row in rows)
    assert "Chosen on the test set" in done.out
    assert "test set" in Path("runs/toy-tune/best/fedavg.toml").read_text().splitlines()[0]


def test_options_are_laid_over_the_file(folder: Path) -> None:
    text = Path("toy.toml").read_text()
    text += '[compare]\nmethods = ["fedavg"]\n[tune]\ntrials = 9\n'
    text += '[tune.space]\n"local.lr" = {low = 0.01, high = 1.0, log = true}\n'
    Path("own.toml").write_text(text)
    done = call("tune", "own.toml", "--trials", "2", "--seeds", "2", "-s", "rounds=1", "--json")
    assert done.code == 0, done.err
    assert [(row["trials"], row["seeds"], row["offered"]) for row in done.json] == [(2, 2, None)]


def test_a_method_of_which_nothing_came_is_a_failure(folder: Path) -> None:
    words = ("-s", "tune.space.local.lr=[1e38]", "-s", "model.name=logistic")
    words = ("tune", "toy.toml", *words, "-s", "model.args={}", "-s", "rounds=5", "-q")
    done = call(*words, "--methods", "fedavg")
    assert done.code == 1
    assert "No trial could be finished" in done.err
    assert "diverged" in done.err
    part = call(*words, "--methods", "fedavg, fedsgd, clip(norm=1e-38)")
    assert part.code == 1
    assert "failed  fedavg: no trial could be finished" in part.err
    assert "best    runs/toy-tune/best/clip-norm-1e-38.toml" in part.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no method to search for"),
        (("--methods", "fedpox"), "did you mean 'fedprox'"),
        (("--methods", "fedavg", "-s", "tune.space.local.lrr=[1]"), "did you mean 'local.lr'"),
        (("--methods", "fedavg", "-s", "tune.space.local.lr=1"), "give a list"),
        (("--methods", "fedavg", "-s", "tune.method.fedprox.my=[1]"), "did you mean 'mu'"),
        (("--methods", "fedavg", "-s", "tune.trails=3"), "did you mean 'trials'"),
        (("--methods", "fedavg", "-s", "tune.holdout=0.01"), "to hold any out"),
    ],
)
def test_mistakes(folder: Path, words: tuple[str, ...], says: str) -> None:
    done = call("tune", "toy.toml", *words)
    assert done.code == 2
    assert says in done.err
    assert len(done.err.strip().splitlines()) <= 4
    assert done.out == ""
    assert not (folder / "runs").exists()


LONG = ("tune", "toy.toml", *TWO, "-s", "tune.space.local.lr=[0.001,0.1]", "-s", "rounds=12")


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_it_can_be_stopped_and_goes_on(folder: Path, jobs: int) -> None:
    words = (*LONG, "--jobs", str(jobs), "--json")
    whole = run(*words, "--out", "whole", folder=folder)
    assert whole.code == 0, whole.err
    process = Process(*words, "--out", "out", folder=folder)
    out = folder / "out"
    assert eventually(lambda: len(list(out.glob("*/checkpoint/round-*"))) >= jobs, 40)
    process.send(2)
    first = process.wait()
    assert first.code == 130, first.err
    assert "interrupted after" in first.err
    assert "stopping after this round" in first.err
    states = {RunFolder(p).read_run().status for p in out.iterdir() if RunFolder(p).exists()}
    assert states <= {"finished", "interrupted"}
    process = Process(*words, "--out", "out", folder=folder)
    seen = len(list(out.glob("*/rounds.jsonl")))
    assert eventually(lambda: len(list(out.glob("*/rounds.jsonl"))) > seen, 40)
    below = children(process.pid)
    process.send(9)
    process.wait()
    assert eventually(lambda: not set(below) & set(_running(below)), 5)
    last = run(*words, "--out", "out", folder=folder)
    assert last.code == 0, last.err
    assert last.json == whole.json
    assert "taken from an earlier run" in last.err


def _running(pids: list[int]) -> list[int]:
    from toys import alive

    return [pid for pid in pids if alive(pid)]
