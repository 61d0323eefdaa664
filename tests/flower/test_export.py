"""What nodes get of an experiment: the user's modules that it names, and what these import."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk

from commands import EXPERIMENT, call, experiment
from fedkeel.config import load
from fedkeel.flower.apps import client_app
from fedkeel.flower.export import LEFT_OUT
from fedkeel.flower.local.processes import NAME, FlowerProcesses
from fedkeel.flower.protocol import DESCRIBE
from fedkeel.records.folder import RunFolder
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import eventually

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower asks for it

MODULES = {
    "our_constants.py": "SMOOTHING = 0.1\n",
    "our_loss.py": """\
import our_constants
from torch.nn import functional

def smooth(output, target):
    smoothing = our_constants.SMOOTHING
    return functional.cross_entropy(
        output, target, label_smoothing=smoothing, reduction="none"
    )
""",
    "our_metric.py": """\
def margin(output, target):
    best = output.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]
""",
    "our_score.py": """\
def errors(output, target):
    return (output.argmax(dim=1) != target).float()
""",
    "our_augment.py": """\
def shift(x, y, random):
    return x + float(random.normal()), y
""",
}
SETTINGS = {
    "task.loss": "our_loss:smooth",
    "task.metrics": ["our_metric:margin", "our_score:errors"],
    "task.score": "errors",
    "data.augment": "our_augment:shift",
}


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The app as Flower brings it to a machine that has nothing of the user's."""
    home, machine = tmp_path / "home", tmp_path / "machine"
    for folder in (home, machine):
        folder.mkdir()
    for name, text in MODULES.items():
        (home / name).write_text(text)
    monkeypatch.chdir(home)
    data = f'"{home / "toy.npz"}"'
    file = experiment(home, EXPERIMENT.replace('"toy.npz"', data))
    words = [word for key, value in SETTINGS.items() for word in ("-s", f"{key}={value}")]
    done = call("flower", "export", file, "--out", "app", *words)
    assert done.code == 0, done.err
    assert "is not in the app" not in done.err
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(home / "app"))) as fab:
        fab.extractall(machine / "app")
    for name in MODULES:
        (home / name).unlink()
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.chdir(machine)
    monkeypatch.setattr(sys, "path", [str(machine / "app"), *sys.path])  # as Flower does
    return machine / "app"


def test_an_export_says_that_every_node_needs_the_files_of_all_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what to change where each node has data of its own; then nothing is said."""
    monkeypatch.chdir(tmp_path)
    names = "north", "south", "west"
    for name in names:
        rows = [f"{i * 7 % 60},{'no' if i % 2 else 'yes'}" for i in range(60)]
        Path(f"{name}.csv").write_text("\n".join(["age,kind", *rows]) + "\n")
    text = """\
rounds = 1

[data]
source = ["north.csv", "south.csv", "west.csv"]
label = "kind"
categories = ["age"]

[partition]
kind = "source"
holdout = 0.25
stratify = true

[model]
name = "logistic"

[local]
lr = 0.1
epochs = 1
"""
    file = Path("heart.toml")
    file.write_text(text)
    done = call("flower", "export", str(file), "--out", "app")
    assert done.code == 0, done.err
    told = " ".join(done.err.split())
    assert "need the files of all clients: north.csv, south.csv, west.csv" in told
    for change in (
        'data.source = "nodes"',
        'partition.kind = "nodes"',
        "partition.clients = 3",
        "data.labels = [",
        "data.categories = {age = [",
        "take out partition.holdout, partition.stratify",
    ):
        assert change in told
    text = text.replace('["north.csv", "south.csv", "west.csv"]', '"nodes"')
    text = text.replace('"source"\n', '"nodes"\nclients = 3\n')
    text = text.replace("holdout = 0.25\nstratify = true\n", "")
    text = text.replace('["age"]', '{age = ["0", "7"]}\nlabels = ["no", "yes"]')
    file.write_text(text)
    done = call("flower", "export", str(file), "--out", "other")
    assert done.code == 0, done.err
    assert "files of all clients" not in done.err


def test_an_app_holds_all_modules_that_its_experiment_names(
    app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, metric, score and augmentation, each in a module, and a fifth that one imports."""
    monkeypatch.setattr(sys, "platform", "here")  # so that the app answers in this process
    InProcessGrid({})  # gives this process an identity
    node: dict[str, str | int | float] = {"partition-id": 0, "num-partitions": 2, "state": "state"}
    ask = Message(RecordDict(), 1, DESCRIBE, ttl=60.0)
    reply = client_app(app / "federation" / "experiment.toml")(
        ask, Context(1, 1, node, RecordDict(), {})
    )
    assert not reply.has_error(), reply.error.reason
    files = {name: str(sys.modules[name.removesuffix(".py")].__file__) for name in MODULES}
    assert files == {name: str(app / name) for name in MODULES}


def test_nodes_train_by_the_modules_of_an_app(app: Path, tmp_path: Path) -> None:
    prepared = prepare(settings := load(app / "federation" / "experiment.toml"), gather(settings))
    remote = run_on_nodes(prepared, InProcessGrid(make_nodes(prepared, tmp_path / "nodes")))
    local = start(prepared)
    assert [row.faults for row in remote.rows] == [{}] * (settings.rounds + 1)
    test = remote.rows[-1].test
    assert test is not None
    assert {"margin", "errors"} <= set(test.values)
    assert remote.rows[-1].test == local.rows[-1].test


@pytest.mark.processes
def test_real_nodes_train_by_the_modules_of_an_app(
    app: Path, tmp_path: Path, federation: FlowerProcesses, patience: float
) -> None:
    out = tmp_path / "run"
    run = federation.submit(app, {"out": str(out), "settings": "rounds=1"})
    assert eventually(lambda: federation.status(run).startswith("finished"), 20 * patience)
    said = federation.flwr("log", str(run), NAME, "--show")
    assert federation.status(run) == "finished:completed", said
    last = RunFolder(out).rows()[-1]
    assert (last.round, last.faults) == (1, {})
    assert last.test is not None
    assert {"margin", "errors"} <= set(last.test.values)


@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_what_flower_leaves_out_of_an_app_is_known(app: Path, pattern: str) -> None:
    """If it were taken for a part of the app, the nodes would miss it."""
    name = pattern.replace("*", "x")
    file = app / (name if name.endswith(".py") else f"{name}/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as fab:
        assert str(file.relative_to(app)) not in fab.namelist()
        assert "our_loss.py" in fab.namelist()
