"""The Python interface: a model, arrays and a method, in one call."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import CompositionError, ConfigError, DataError, ModelError, RunError
from fedkeel.records.folder import RunFolder
from fedkeel.runner.result import Result
from fedkeel.study.comparison import Comparison
from fedkeel.study.watching import STOPPED, _without_traceback
from toys import Net, federation, held, same

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model_and_data.py"
LOCAL = fk.Local(lr=0.05, epochs=1, batch_size=4)


def arrays(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    data = held(n)
    return data.x.numpy(), data.y.numpy()


def run(method: str = "fedavg", model: object = Net, **more: object) -> Result:
    values = {
        "task": fk.Task(model),
        "clients": federation(),
        "test": arrays(),
        "rounds": 2,
        "local": LOCAL,
        "engine": fk.Engine(kind="sequential"),
    }
    return fk.run(method, **{**values, **more})


# --- the example of the README --------------------------------------------------------------------


def test_the_example_is_short() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    docstring = len((ast.get_docstring(ast.parse(text)) or "").splitlines())
    lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
    assert len(lines) - docstring < 15
    assert "noqa" not in text


@pytest.mark.slow
def test_the_example_runs_and_learns(tmp_path: Path) -> None:
    """On real data, as a script of its own, with nothing beside it."""
    found = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=80
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    accuracy = {
        line.split(":")[0]: float(line.split(":")[1].split("%")[0])
        for line in found.stdout.splitlines()
    }
    assert list(accuracy) == ["fedavg", "scaffold"]
    assert all(60 < value < 100 for value in accuracy.values())
    assert accuracy["scaffold"] > accuracy["fedavg"]
    assert list(tmp_path.iterdir()) == []


# --- models and data of one's own -----------------------------------------------------------------


class Own(nn.Module):
    """As a user writes one: no base class of ours, no registration."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Needy(nn.Linear):
    """Cannot be made without an argument."""

    def __init__(self, width: int) -> None:
        super().__init__(5 // width, 3)


def test_a_class_and_an_instance() -> None:
    by_class = run(model=Own)
    assert by_class.record.model.name == "Own"
    assert by_class.record.model.head == "classifier"
    module = Own()
    before = [p.clone() for p in module.parameters()]
    by_instance = run(model=module)
    assert by_instance.record.model.name == "Own"
    assert list(by_instance.params) == [name for name, _ in module.named_parameters()]
    assert all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))
    assert not torch.equal(by_instance.params["classifier.bias"], before[-1])
    module.load_state_dict(by_instance.params)  # the trained model, for use elsewhere


def test_a_class_begins_each_seed_anew_and_the_same_each_time() -> None:
    torch.manual_seed(1)
    one = run(model=Own)
    torch.manual_seed(2)
    assert same(one, run(model=Own))
    assert not same(one, run(model=Own, seed=1))


@pytest.mark.parametrize("kind", [list, np.asarray, torch.as_tensor])
def test_arrays_of_any_kind(kind: object) -> None:
    x, y = arrays(40)
    given = (x.tolist(), y.tolist()) if kind is list else (kind(x), kind(y))
    clients = fk.iid(*given, clients=4)
    assert same(run(clients=clients, test=given), run(clients=fk.iid(x, y, 4), test=(x, y)))


@pytest.mark.parametrize(
    "divide",
    [
        partial(fk.iid, clients=5, sizes="power", sigma=0.5),
        partial(fk.dirichlet, clients=5, alpha=0.5, min_size=2),
        partial(fk.by_classes, clients=6, k=1),
        partial(fk.by_client, client_ids=["a", "b", "c"] * 20),
    ],
)
def test_every_way_to_divide_them(divide: partial) -> None:
    result = run(clients=divide(*arrays()))
    assert result.last >= 0
    assert sum(result.record.partition.sizes) == 60


def test_participation_in_three_ways() -> None:
    assert len(run().rows[1].clients) == 6
    assert len(run(participation=0.5).rows[1].clients) == 3
    assert len(run(clients_per_round=2).rows[1].clients) == 2
    assert len(run(cohort=fk.Cohort(clients=4)).rows[1].clients) == 4
    with pytest.raises(ConfigError, match="'cohort' and 'clients_per_round' both say who"):
        run(cohort=fk.Cohort(participation=1.0), clients_per_round=2)
    with pytest.raises(ConfigError, match="not both"):
        run(participation=0.5, clients_per_round=2)


def test_weights_decide_the_mean() -> None:
    one, two = run(weights="examples"), run(weights="uniform")
    assert (one.record.weights, two.record.weights) == ("examples", "uniform")
    assert not same(one, two)


# --- folders --------------------------------------------------------------------------------------


def test_in_memory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run().folder is None
    fk.compare(
        ["fedavg"],
        task=fk.Task(Net),
        clients=federation(),
        test=held(),
        rounds=1,
        local=LOCAL,
        seeds=1,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_kept_and_used_again(tmp_path: Path) -> None:
    first = run("scaffold", out=tmp_path / "run")
    assert first.folder == tmp_path / "run"
    assert RunFolder(tmp_path / "run").read_run().status == "finished"
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    assert same(first, run("scaffold", out=str(tmp_path / "run")))
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before
    with pytest.raises(RunError, match="holds another run") as refused:
        run("fedavg", out=tmp_path / "run")
    assert "out=... in Python" in refused.value.do
    for more, why in (
        ({"clients": federation(seed=1)}, "the training data differ; nothing is overwritten"),
        (
            {"test": held(50)},
            "the model, the loss, or a value that their code reaches, the division or",
        ),
    ):
        with pytest.raises(RunError, match=why):
            run("scaffold", out=tmp_path / "run", **more)


def calls_left() -> int:
    """Count one call less in the environment, which is not part of a run's key."""
    left = int(os.environ.get("CALLS_LEFT", 0)) - 1
    os.environ["CALLS_LEFT"] = str(left)
    return left


def test_an_unfinished_run_is_continued_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    whole = run("scaffold", rounds=4)
    monkeypatch.setenv("CALLS_LEFT", "60")

    def fails(logits: Tensor, y: Tensor) -> Tensor:
        if calls_left() == 0:
            raise OSError("the disk is full")
        return nn.functional.cross_entropy(logits, y, reduction="none")

    task = fk.Task(Net, loss=fails)
    engine = fk.Engine(kind="sequential", checkpoint_seconds=0)
    with pytest.raises(fk.FedkeelError, match="disk is full"):
        run("scaffold", rounds=4, task=task, out=out, engine=engine)
    done = RunFolder(out).read_run()
    assert done.status == "failed"
    with pytest.raises(RunError, match="unfinished") as refused:
        run("scaffold", rounds=4, task=task, out=out, resume=False)
    assert "resume=True" in refused.value.do
    assert "out=..." in refused.value.do
    result = run("scaffold", rounds=4, task=task, out=out)
    assert [row.test for row in result.rows] == [row.test for row in whole.rows]
    assert all(torch.equal(whole.params[k], result.params[k]) for k in whole.params)


def test_a_comparison(tmp_path: Path) -> None:
    more = {"task": fk.Task(Net), "clients": federation(), "test": held(), "rounds": 2}
    found = fk.compare(
        ["fedavg", "fedgh"], **more, local=LOCAL, seeds=2, out=tmp_path, participation=0.5
    )
    assert [(r.record.method, r.record.seed) for r in found.results] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedgh", 0),
        ("fedgh", 1),
    ]
    assert [row["method"] for row in found.rows] == ["fedavg", "fedgh"]
    assert all(r.folder is not None and r.folder.parent == tmp_path for r in found.results)


# --- interrupts -----------------------------------------------------------------------------------


def interrupting(logits: Tensor, y: Tensor) -> Tensor:
    """A loss that has somebody press Ctrl-C when no calls are left."""
    if calls_left() == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return nn.functional.cross_entropy(logits, y, reduction="none")


@pytest.mark.parametrize("when", ["in the middle", "in the last round"])
def test_an_interrupt_saves_the_run_and_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setenv("CALLS_LEFT", "0")
    task, out = fk.Task(Net, loss=interrupting), tmp_path / "run"
    whole = run("scaffold", rounds=4, task=task)
    calls = -int(os.environ["CALLS_LEFT"])
    monkeypatch.setenv("CALLS_LEFT", str(calls // 2 if when == "in the middle" else calls - 1))
    with pytest.raises(KeyboardInterrupt):
        run("scaffold", rounds=4, task=task, out=out)
    done = RunFolder(out).read_run()
    assert done.status == ("interrupted" if when == "in the middle" else "finished")
    assert (RunFolder(out).rows()[-1].round < 4) == (done.status == "interrupted")
    result = run("scaffold", rounds=4, task=task, out=out)
    assert [row.test for row in result.rows] == [row.test for row in whole.rows]
    assert all(torch.equal(whole.params[k], result.params[k]) for k in whole.params)


def test_an_interrupt_ends_a_run_in_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLS_LEFT", "30")
    with pytest.raises(KeyboardInterrupt):
        run(task=fk.Task(Net, loss=interrupting), rounds=9)


@pytest.mark.parametrize("call", ["run", "compare"])
def test_an_interrupt_ends_a_script_without_a_traceback(tmp_path: Path, call: str) -> None:
    script = tmp_path / "script.py"
    method = '"fedavg"' if call == "run" else '["fedavg", "fedgh"]'
    script.write_text(
        "import os, signal, torch\n"
        "import fedkeel as fk\n"
        "x = torch.randn(20, 3)\n"
        "def loss(output, y):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return torch.nn.functional.cross_entropy(output, y, reduction='none')\n"
        "data = {'a': (x, (x[:, 0] > 0).long())}\n"
        "try:\n"
        f"    fk.{call}({method}, task=fk.Task(torch.nn.Linear(3, 2), loss=loss),\n"
        "        clients=fk.from_clients(data), test=data['a'], rounds=9,\n"
        "        local=fk.Local(lr=0.1, epochs=1, batch_size=20), engine=fk.Engine())\n"
        "finally:\n"
        "    print('tidied')\n"
    )
    source = str(Path(fk.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.stdout == "tidied\n"  # the script's own handlers see the interrupt
    assert done.stderr.splitlines()[-1] == STOPPED
    assert "Traceback" not in done.stderr
    assert done.returncode == -signal.SIGINT


def test_what_is_not_our_interrupt_has_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    _without_traceback(KeyboardInterrupt, KeyboardInterrupt(), None)
    _without_traceback(ValueError, ValueError("on purpose"), None)
    assert capsys.readouterr().err == "KeyboardInterrupt\nValueError: on purpose\n"


def test_an_interrupt_ends_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for out in (None, tmp_path):
        monkeypatch.setenv("CALLS_LEFT", "30")
        with pytest.raises(KeyboardInterrupt):
            compare(["fedavg", "fedgh"], task=fk.Task(Net, loss=interrupting), out=out)
    assert len(json.loads((tmp_path / "comparison.json").read_text())["runs"]) == 1


def test_what_was_asked_to_end_begins_nothing_more() -> None:
    with interrupts(lambda: None) as outer:
        os.kill(os.getpid(), signal.SIGINT)
        assert outer.wait(5)
        with interrupts(lambda: None) as inner:
            assert inner.is_set()
    with interrupts(lambda: None) as fresh:
        assert not fresh.is_set()


# --- where it is called ---------------------------------------------------------------------------


def test_it_may_be_called_in_a_thread() -> None:
    """Where no signal can be heard: a notebook server, a web application."""
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join(60)
    assert same(found[0], run())


def test_it_shows_nothing_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    run()
    assert capfd.readouterr() == ("", "")
    run(progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first == "preparing data, model and engine"
    assert second.startswith("fedavg seed 0: ")


def test_it_leaves_signals_and_threads_as_they_were() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    run(engine=fk.Engine(kind="workers", workers=2))
    run()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


# --- what a user does wrong -----------------------------------------------------------------------

WRONG_KIND = [
    ({"task": Net}, ConfigError, "got the class Net\n  do   write task=fedkeel.Task(Net)"),
    ({"task": nn.Linear(5, 3)}, ConfigError, "'task' is not a fedkeel.Task"),
    ({"clients": arrays()}, DataError, "clients=fedkeel.iid(x, y, clients=10)"),
    ({"test": None}, DataError, "test=(x_test, y_test)"),
    ({"test": arrays()[0]}, DataError, "'test' is not a test set"),
    ({"engine": "sequential"}, ConfigError, "engine=fedkeel.Engine(kind='sequential')"),
    ({"local": 0.1}, ConfigError, "local=fedkeel.Local(lr=0.1, epochs=1)"),
    ({"local": None}, ConfigError, "'local' is not a fedkeel.Local"),
    ({"engine": fk.Stop()}, ConfigError, "'engine' is not a fedkeel.Engine"),
]
"""Arguments of another kind than is meant."""


def refused_in_four_lines(
    call: Callable[..., object],
    out: Path,
    wrong: dict[str, object],
    kind: type[fk.FedkeelError],
    words: str,
) -> None:
    """A mistake is said with what to do, and nothing is written."""
    with pytest.raises(kind) as found:
        call(**wrong, out=out)
    assert words in str(found.value)
    assert len(found.value.lines()) <= 4
    assert not out.exists()


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"method": "fedpox"}, CompositionError, "fedprox"),
        ({"method": "fedprox(mu=-1)"}, CompositionError, "mu"),
        ({"rounds": 0}, ConfigError, "rounds"),
        ({"rounds": 2.5}, ConfigError, "rounds"),
        ({"seed": -1}, ConfigError, "seed"),
        ({"participation": 1.5}, ConfigError, "participation"),
        ({"participation": 0.01}, ConfigError, "selects nobody"),
        ({"test": ([[0.0] * 5], [7])}, ModelError, "3 outputs for 8 classes"),
        ({"test": ([[0.0] * 4], [0])}, ModelError, "differ in shape"),
        ({"test": ([[float("nan")] * 5], [0])}, DataError, "NaN"),
        ({"task": fk.Task(nn.Linear(5, 2))}, ModelError, "2 outputs for 3 classes"),
        ({"task": fk.Task(nn.Linear(4, 3))}, ModelError, "cannot take the data"),
        ({"task": fk.Task(Net, head="fc9")}, ModelError, "fc2"),
        ({"task": fk.Task(nn.ReLU())}, ModelError, "no parameters"),
        ({"task": fk.Task(lambda: 3)}, ModelError, "torch.nn.Module"),
        ({"task": fk.Task(Needy)}, ModelError, "Task(lambda: Needy(...))"),
        ({"task": fk.Task(Needy)}, ModelError, "model 'Needy' cannot be built\n  got TypeError: "),
        ({"task": fk.Task(partial(Needy, 0))}, ModelError, "'Needy' cannot be built\n  got Zero"),
        ({"weights": "sizes"}, ConfigError, "weights"),
        *WRONG_KIND,
    ],
)
def test_a_mistake_is_said_in_four_lines(
    tmp_path: Path, wrong: dict[str, object], kind: type[fk.FedkeelError], words: str
) -> None:
    refused_in_four_lines(run, tmp_path / "run", wrong, kind, words)


def test_an_output_folder_is_a_path() -> None:
    with pytest.raises(ConfigError, match="'out' is not a folder"):
        run(out=3)


def compare(methods: object = ("fedavg",), **more: object) -> Comparison:
    values = {
        "task": fk.Task(Net),
        "clients": federation(),
        "test": arrays(),
        "rounds": 1,
        "seeds": 1,
        "local": LOCAL,
        "engine": fk.Engine(kind="sequential"),
    }
    return fk.compare(methods, **{**values, **more})


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        *WRONG_KIND,
        ({"seeds": 0}, ConfigError, "compare: 'seeds' cannot be used.\n  got 0; expected greater"),
        ({"seeds": -1}, ConfigError, "seeds"),
        ({"seeds": "3"}, ConfigError, "seeds"),
        ({"methods": None}, ConfigError, "methods"),
        ({"methods": ["fedavg", 3]}, ConfigError, "methods"),
    ],
)
def test_a_comparison_refuses_the_same_and_says_it_in_four_lines(
    tmp_path: Path, wrong: dict[str, object], kind: type[fk.FedkeelError], words: str
) -> None:
    refused_in_four_lines(compare, tmp_path / "run", wrong, kind, words)


def test_a_comparison_takes_a_list_as_the_command_does() -> None:
    found = compare("fedavg, fedprox(mu=0.1)")
    assert [r.record.method for r in found.results] == ["fedavg", "fedprox(mu=0.1)"]
