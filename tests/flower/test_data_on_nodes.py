"""Runs on data that stays on the nodes."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from rich.console import Console
from safetensors.torch import load_file

from commands import call
from fedkeel import config
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError, DataError, FedkeelError, RunError, TrainingError
from fedkeel.features.progress.display import FINISHED
from fedkeel.flower.apps import client_app
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.flower.local import federation
from fedkeel.flower.node import answer
from fedkeel.flower.node.configuration import make_node, state_folder
from fedkeel.flower.protocol import MAX_SIZE
from fedkeel.flower.server import membership as membership_module
from fedkeel.flower.server.engine import NodeClients
from fedkeel.flower.server.serve import LinesWithFaults, RunOptions, serve
from fedkeel.flower.wire import HEADER, Header
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.features import check_nodes
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.task.predict.trained_model import load, metadata
from in_process_grid import InProcessGrid, changed, header_of
from toys import deadline

DATA = {"source": "nodes", "label": "kind", "labels": ["no", "yes"]}


def own(**changes: object) -> config.Experiment:
    values = {
        "method": "scaffold",
        "rounds": 2,
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 8},
        "data": DATA,
        "partition": {"kind": "nodes", "clients": 2},
        "model": {"name": "mlp", "args": {"hidden": [5]}},
        "engine": {"dtype": "float64"},
        "flower": {"deadline_seconds": 2.0, "poll_seconds": 0.01},
    }
    return config.build(config.Experiment, {**values, **changes}, "test")


def table(file: Path, seed: int, labels: tuple[str, ...] = ("no", "yes")) -> Path:
    random = np.random.default_rng(seed)
    lines = ["a,b,c,kind"]
    for number in range(30 + 10 * seed):
        label = labels[number % len(labels)]
        x = random.normal(size=3) + 2 * (label == "yes")
        lines.append(",".join([*(f"{v:.10f}" for v in x), label]))  # of no other number's digits
    file.write_text("\n".join(lines) + "\n")
    return file


def nodes_with(tmp_path: Path, experiment: config.Experiment, data: list[str]) -> InProcessGrid:
    return InProcessGrid(
        {
            100 + i: make_node(
                experiment,
                {
                    "partition-id": i,
                    "num-partitions": 2,
                    "data": text,
                    "state": str(tmp_path / "s"),
                },
            )
            for i, text in enumerate(data)
        }
    )


def test_a_node_that_is_given_back_its_data_takes_part_again(tmp_path: Path) -> None:
    """Also where it was never seen to be gone in between."""
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    good = files[1].read_text()
    values = {"deadline_seconds": 1.0, "poll_seconds": 0.01, "quorum": 0.4}
    experiment = own(method="fedavg", rounds=6, flower=values)
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])

    def leads(kind: str, reply: RecordDict) -> RecordDict:
        round = header_of(reply)["round"] if kind == "train" else 0
        if round == 1:
            grid.nodes.pop(101, None)
        if round in (2, 4):
            files[1].write_text(good.replace("0.", "1.") if round == 2 else good)
            grid.nodes[101] = nodes_with(tmp_path, experiment, [str(f) for f in files]).nodes[101]
        if round == 4:
            time.sleep(0.15)
        return reply

    grid.edits[100] = leads
    rows = serve(grid, experiment, RunOptions(tmp_path / "run")).rows[1:]
    assert [row.clients for row in rows[3:]] == [[0], [0], [0, 1]]
    assert sum("was turned away" in words for row in rows for words in row.faults) == 1


def test_a_run_on_data_that_only_the_nodes_have(tmp_path: Path) -> None:
    """Nothing that the server is sent, or writes, holds an example."""
    experiment = own()
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
    result = serve(grid, experiment, RunOptions(tmp_path / "run"))
    assert result.record.status == "finished"
    rows = result.rows
    assert [row.clients for row in rows[1:]] == [[0, 1]] * 2
    assert rows[-1].test is not None
    assert rows[-1].test.examples == 6 + 8
    assert set(rows[-1].sources) == {"client 0", "client 1"}
    assert rows[-1].test["accuracy"] > rows[0].test["accuracy"]
    assert rows[1].bytes_down["evaluation"] > 0
    record = result.record
    assert (record.partition.histogram, record.partition.sizes) == ([], [24, 32])
    written = "".join(f.read_text(errors="replace") for f in (tmp_path / "run").rglob("*.json*"))
    values = [line.split(",")[0] for line in files[0].read_text().splitlines()[1:]]
    assert not any(value in written for value in values)
    assert load_file(next((tmp_path / "run").rglob("*.safetensors"))).keys()


def test_a_server_that_does_not_wait_for_nodes_with_data_of_their_own(tmp_path: Path) -> None:
    experiment = own(method="scaffold+fedasync", rounds=6, weights="uniform")
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
    rows = serve(grid, experiment, RunOptions(tmp_path / "run")).rows
    assert {client for row in rows for client in row.clients} == {0, 1}
    assert [len(row.staleness_seconds) for row in rows[1:]] == [1] * 6
    assert sum(row.examples for row in rows[1:]) > 0
    assert rows[-1].test is not None
    assert rows[-1].test.examples == 6 + 8
    assert [row.faults for row in rows] == [{}] * 7


def test_a_server_trains_on_a_file_that_no_node_has(tmp_path: Path) -> None:
    root = tmp_path / "root.npz"
    experiment = own(method="fltrust", root={"file": str(root)})
    grid = nodes_with(tmp_path, experiment, [str(table(tmp_path / f"{i}.csv", i)) for i in (0, 1)])
    labels = np.array(["yes", "no"] * 8)  # in another order than the experiment's
    np.savez(root, x=np.random.default_rng(5).normal(size=(16, 3)) + 2.0, label=labels)
    result = serve(grid, experiment, RunOptions(tmp_path / "run"))
    assert [row.clients for row in result.rows[1:]] == [[0, 1]] * 2
    assert all(row.diagnostics["fltrust.trusted"] > 0.0 for row in result.rows[1:])
    assert result.record.root == f"16 examples at the server, read from {root}"
    drawn = own(method="fltrust", root={"examples": 5})
    with pytest.raises(ConfigError, match="only where the experiment divides the data"):
        serve(grid, drawn, RunOptions(tmp_path / "other"))


def test_sums_are_secure_where_the_data_are_on_nodes_that_share_a_folder(tmp_path: Path) -> None:
    data = [str(table(tmp_path / f"{k}.csv", k)) for k in range(2)]
    models = []
    for secure in (False, True):
        flower = {"poll_seconds": 0.01, "secure_aggregation": secure}
        experiment = own(flower=flower)
        grid = nodes_with(tmp_path / str(secure), experiment, data)
        result = serve(grid, experiment, RunOptions(tmp_path / f"run-{secure}"))
        assert [row.faults for row in result.rows] == [{}] * 3
        models.append(result.params)
    for name, tensor in models[0].items():
        assert torch.allclose(models[1][name], tensor, rtol=1e-9, atol=1e-11)


def test_updates_are_diagnosed_and_examples_are_not(tmp_path: Path) -> None:
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]

    def made(kinds: str, folder: str) -> Result:
        experiment = own(diagnose={"kinds": kinds} if kinds else {})
        grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
        return serve(grid, experiment, RunOptions(tmp_path / folder))

    plain, seen = made("", "plain"), made("drift, conflict", "seen")
    assert all(torch.equal(plain.params[k], seen.params[k]) for k in plain.params)
    assert seen.record.key == plain.record.key
    found = seen.rows[-1].diagnostics
    assert -1 <= found["conflict.cosine"] <= found["conflict.cosine_with_mean"] <= 1
    assert found["drift.norm"] > found["drift.norm_of_mean"] > 0
    with pytest.raises(ConfigError, match="the server sees only the updates"):
        made("cka", "refused")
    with pytest.raises(ConfigError, match="clients train on their nodes"):
        check_nodes(own(diagnose={"kinds": "participation"}))


def test_a_score_is_the_share_of_hits_that_it_is(tmp_path: Path) -> None:
    """In full: an accuracy of 4/5 has to reach a target of 0.8."""
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    grid = nodes_with(tmp_path, own(), [str(f) for f in files])
    last = serve(grid, own(), RunOptions(tmp_path / "run")).rows[-1]
    assert last.test is not None
    scores = [last.sources["client 0"], last.sources["client 1"], last.test]
    assert [one.examples for one in scores] == [6, 8, 14]
    assert any(one["accuracy"] not in (0.0, 0.5, 1.0) for one in scores)
    assert all(
        one["accuracy"] == round(one["accuracy"] * one.examples) / one.examples for one in scores
    )


@pytest.mark.parametrize(
    "what", ["test_examples", pytest.param("train_examples", marks=pytest.mark.slow)]
)
def test_no_work_grows_with_what_a_node_claims(tmp_path: Path, what: str) -> None:
    """Each evaluation took minutes and more than ten gigabytes."""
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    experiment = own(method="fedcurv")  # whose clients look at all their examples

    def made(claim: int) -> Result:
        grid = nodes_with(tmp_path, experiment, [str(f) for f in files])

        def claims(kind: str, reply: RecordDict) -> RecordDict:
            if kind != "query.describe":
                return reply
            (client,) = header_of(reply)["clients"]
            return changed(reply, clients=[{**client, what: claim}])

        grid.edits[100] = claims
        return serve(grid, experiment, RunOptions(tmp_path / f"run-{claim}"))

    with deadline(60):
        result = made(MAX_SIZE)
    assert result.rows[-1].test is not None
    if what == "test_examples":
        assert result.rows[-1].test.examples == result.record.data.test == MAX_SIZE + 8
    else:
        assert result.record.data.train == MAX_SIZE + 32
        assert result.rows[-1].clients == [1]  # it has not done the work that it claims
    with pytest.raises(RunError, match=f"{what}' is wrong. Input should be less than or equal"):
        made(10**18)


@pytest.mark.parametrize("lie", [-3e29, 1e308])
def test_a_loss_that_is_not_like_the_others_is_left_out(tmp_path: Path, lie: float) -> None:
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    grid = nodes_with(tmp_path, own(), [str(f) for f in files])

    def lies(kind: str, reply: RecordDict) -> RecordDict:
        if kind == "evaluate":
            reply["scores-0"]["states"] = [3.0, 6.0, lie]
        return reply

    grid.edits[100] = lies
    last = serve(grid, own(), RunOptions(tmp_path / "run")).rows[-1]
    assert last.test is not None
    assert last.test.examples == 8
    assert 0.0 < last.test["loss"] < 10.0
    assert [who for words, who in last.faults.items() if "evaluation: a loss" in words] == [[0]]


def test_nodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """The scores of one stood in place of the other's."""
    experiment = own(partition={"kind": "nodes", "clients": 4}, rounds=1)
    nodes = {}
    for i, name in enumerate(["hospital", "hospital", "", "hospital (client 1)"]):
        file = table(tmp_path / f"{i}.csv", i)
        config = {"partition-id": i, "data": str(file), "state": str(tmp_path / "s"), "name": name}
        nodes[100 + i] = make_node(experiment, config)
    last = serve(InProcessGrid(nodes), experiment, RunOptions(tmp_path / "run")).rows[-1]
    assert {name: score.examples for name, score in last.sources.items()} == {
        "hospital (client 0)": 6,
        "hospital (client 1)": 8,
        "client 2": 10,
        "hospital (client 1) (client 3)": 12,
    }


@pytest.mark.parametrize(
    "lie",
    [1.5, float("nan"), *(pytest.param(x, marks=pytest.mark.slow) for x in (-0.1, float("inf")))],
)
def test_a_score_that_cannot_be_is_left_out(tmp_path: Path, lie: float) -> None:
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    grid = nodes_with(tmp_path, own(), [str(f) for f in files])

    def lies(kind: str, reply: RecordDict) -> RecordDict:
        if kind == "evaluate":
            reply["scores-0"]["states"] = [6 * lie, 6.0, 3.0]
        return reply

    grid.edits[100] = lies
    last = serve(grid, own(), RunOptions(tmp_path / "run")).rows[-1]
    assert last.test is not None
    assert last.test.examples == 8
    assert [who for words, who in last.faults.items() if "not a share" in words] == [[0]]


@pytest.mark.parametrize(
    ("silent", "after"), [pytest.param(0, 1, marks=pytest.mark.slow), (1, 1), (2, 4)]
)
def test_a_score_of_fewer_than_the_quorum_ends_no_run(
    tmp_path: Path, silent: int, after: int
) -> None:
    """One hospital of three reached the target for all, and nothing said who was silent."""
    files = [table(tmp_path / f"{i}.csv", i) for i in range(3)]
    values = {"deadline_seconds": 0.3, "poll_seconds": 0.01, "quorum": 0.5}
    experiment = own(
        method="fedavg",
        rounds=4,
        partition={"kind": "nodes", "clients": 3},
        flower=values,
        stop={"target": 0.05},
    )
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
    for node in range(100, 100 + silent):
        grid.edits[node] = lambda kind, reply: None if kind == "evaluate" else reply
    result = serve(grid, experiment, RunOptions(tmp_path / "run"))
    assert result.record.status == "finished"
    assert ("ended early" in result.record.message) == (silent < 2)
    rows = result.rows
    assert len(rows) - 1 == after
    who = list(range(silent))
    for row in rows[1:]:
        assert row.clients == [0, 1, 2]
        found = {"evaluation: no reply before the deadline": who} if who else {}
        assert row.faults == found
        assert row.test is not None
        assert row.test.examples == sum([6, 8, 10][silent:])


def test_a_run_goes_on_without_a_node_that_has_left_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said of its data is in the checkpoint; every resume waited for it."""
    files = [table(tmp_path / f"{i}.csv", i) for i in range(3)]
    values = {"deadline_seconds": 0.3, "poll_seconds": 0.01, "quorum": 0.5}
    kind = {"kind": "nodes", "clients": 3}
    stop = {"dtype": "float64", "checkpoint_seconds": 0.0}
    experiment = own(method="fedavg", rounds=4, partition=kind, flower=values, engine=stop)
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
    train = NodeClients.train

    def ends(self, message, *more):  # type: ignore[no-untyped-def]
        if message.round == 2:
            raise TrainingError("the server was stopped")
        return train(self, message, *more)

    monkeypatch.setattr(NodeClients, "train", ends)
    with pytest.raises(TrainingError):
        serve(grid, experiment, RunOptions(tmp_path / "run"))
    monkeypatch.setattr(NodeClients, "train", train)
    gone = grid.nodes.pop(102)
    monkeypatch.setattr(membership_module, "STRAGGLER_SECONDS", 0.1)
    result = serve(grid, experiment, RunOptions(tmp_path / "run", resume=True))
    assert result.record.status == "finished"
    assert [row.clients for row in result.rows[1:]] == [[0, 1, 2]] * 2 + [[0, 1]] * 2
    assert result.rows[4].faults == {"evaluation: not connected": [2], "not connected": [2]}
    assert set(result.rows[1].sources) == set(result.rows[4].sources)

    monkeypatch.setattr(NodeClients, "train", ends)
    grid.nodes[102] = gone
    with pytest.raises(TrainingError):
        serve(grid, experiment, RunOptions(tmp_path / "other"))
    monkeypatch.setattr(NodeClients, "train", train)
    table(files[2], 5)  # and one that comes back with other data stays out
    grid.nodes[102] = nodes_with(tmp_path, experiment, [str(f) for f in files]).nodes[102]
    rows = serve(grid, experiment, RunOptions(tmp_path / "other", resume=True)).rows
    assert [row.clients for row in rows[3:]] == [[0, 1]] * 2


def test_a_node_that_is_not_there_to_evaluate_is_written_down(tmp_path: Path) -> None:
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    experiment = own(method="fedavg", rounds=1)
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])

    def leaves(kind: str, reply: RecordDict) -> RecordDict:
        if kind == "train":
            grid.nodes.pop(101)
        return reply

    grid.edits[101] = leaves
    row = serve(grid, experiment, RunOptions(tmp_path / "run")).rows[-1]
    assert row.faults == {"evaluation: not connected": [1]}


def columns(file: Path, order: str) -> Path:
    """The same table with its columns in another order."""
    rows = [line.split(",") for line in file.read_text().splitlines()]
    place = [rows[0].index(name) for name in order.split(",")]
    file.write_text("\n".join(",".join(row[i] for i in place) for row in rows) + "\n")
    return file


def test_columns_are_the_same_everywhere(tmp_path: Path) -> None:
    """An input is known by its place: another order was trained on as if it were the same."""
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    columns(files[1], "a,c,b,kind")
    grid = nodes_with(tmp_path, own(), [str(f) for f in files])
    with pytest.raises(DataError, match="columns of client 1 and client 0 differ") as error:
        serve(grid, own(), RunOptions(tmp_path / "run"))
    assert "'c' as column 2; expected 'b'" in str(error.value)
    columns(files[1], "a,c,kind")
    lines = files[1].read_text().splitlines()
    files[1].write_text("\n".join(f"{line},1" for line in lines).replace("kind,1", "kind,age"))
    grid = nodes_with(tmp_path, own(), [str(f) for f in files])
    with pytest.raises(DataError, match="columns of client 1 and client 0 differ") as error:
        serve(grid, own(), RunOptions(tmp_path / "run"))
    assert "client 1 lacks 'b' and also has 'age'" in str(error.value)
    table(files[1], 1)
    grid = nodes_with(tmp_path, own(), [str(f) for f in files])
    assert serve(grid, own(), RunOptions(tmp_path / "run")).record.data.columns == ["a", "b", "c"]


def test_a_node_whose_data_change_is_left_out(tmp_path: Path) -> None:
    """Also while it stays connected, and where their number stays."""
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    experiment = own(flower={"deadline_seconds": 2.0, "poll_seconds": 0.01, "quorum": 0.4})
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])

    def changed(kind: str, reply: RecordDict) -> RecordDict:
        files[1].write_text(files[1].read_text().replace("0.", "1."))
        grid.nodes[101] = nodes_with(tmp_path, experiment, [str(f) for f in files]).nodes[101]
        return reply

    grid.edits[101] = changed
    row = serve(grid, experiment, RunOptions(tmp_path / "run")).rows[-1]
    assert row.clients == [0]
    assert any("not those that the run began with" in words for words in row.faults)


FUNCTIONS = """\
import numpy as np
import fedkeel as fk


def images():
    x = np.random.default_rng(0).normal(3, 2, size=(40, 1, 8, 8))
    return x, (x[:, 0, 0, 0] > 3).astype(int)


def halves():
    x, y = images()
    return fk.dataset(x, y, classes=2), fk.dataset(x[:5, :, :4], y[:5], classes=2)


def no_test():
    made = fk.dataset(*images(), classes=2)
    return made, made.take(np.arange(0))


def turned():
    x, y = images()
    return fk.dataset(x, 1 - y, classes=2, label_names=("yes", "no"))


def texts():
    x, y = images()
    return x, np.where(y == 1, "yes", "no")


def one_text():
    x, y = images()
    return x, ["yes"] * len(x)


def several():
    return images()[0], np.arange(80).reshape(40, 2) % 2


def of_255():
    x, y = several()
    return x, 255 * y


def strange_text():
    x, y = images()
    return x, np.where(y == 1, "Yes", "no")


def named_otherwise():
    return fk.dataset(*images(), classes=2, label_names=("yes", "perhaps"))
"""


def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, **data: object) -> Prepared:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = own(data={"source": "nodes", "labels": ["no", "yes"], **data})
    return make_node(experiment, {"partition-id": 0, "data": f"functions:{name}"}).prepared


def test_settings_of_the_data_hold_for_functions_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were ignored, without a word."""
    for how in ("client", "pixels"):
        x = called(tmp_path, monkeypatch, "images", normalize=how).setup.federation.data.x[:32]
        over = (0, 2, 3) if how == "client" else (0,)
        assert x.mean(over).abs().max() < 1e-5
        assert (x.std(over, unbiased=False) - 1).abs().max() < 1e-3
    assert not called(tmp_path, monkeypatch, "images").setup.augment
    assert called(tmp_path, monkeypatch, "images", augment="crop_flip").setup.augment


def test_halves_that_a_function_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="training and test examples of data 'functions:halves'"):
        called(tmp_path, monkeypatch, "halves")
    federation = called(tmp_path, monkeypatch, "no_test").setup.federation
    assert federation.holdout_rows is not None
    assert (len(federation.rows), len(federation.holdout_rows)) == (40, 0)


def test_labels_that_a_function_names_are_numbered_as_the_experiment_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes were those of the function's own order, so the model's were turned round."""
    data = called(tmp_path, monkeypatch, "turned").setup.federation.data
    assert data.label_names == ("no", "yes")
    assert torch.equal(data.y, (data.x[:, 0, 0, 0] > 3).long())
    with pytest.raises(DataError, match="holds a label that is not known"):
        called(tmp_path, monkeypatch, "named_otherwise")


def test_labels_that_are_texts_are_numbered_as_the_experiment_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were refused with the advice to number them, in an order of the node's own."""
    data = called(tmp_path, monkeypatch, "texts").setup.federation.data
    assert torch.equal(data.y, (data.x[:, 0, 0, 0] > 3).long())
    alone = called(tmp_path, monkeypatch, "one_text").setup.federation.data
    assert alone.y.unique().tolist() == [1]
    with pytest.raises(DataError, match="holds a label that is not known"):
        called(tmp_path, monkeypatch, "strange_text")


def test_targets_that_the_loss_cannot_take_are_refused_by_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = own(data={"source": "nodes"}, task={"loss": "bce"})
    make_node(experiment, {"partition-id": 0, "data": "functions:several"})
    with pytest.raises(DataError, match="outside of 0 to 1") as error:
        make_node(experiment, {"partition-id": 0, "data": "functions:of_255"})
    assert "y // 255" in str(error.value)


def test_statistics_of_the_nodes_own_are_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No evaluation worked: they were sent buffers that they did not ask for."""
    (tmp_path / "normed.py").write_text(
        "from torch import nn\n\n\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    experiment = own(method="fedavg", model={"name": "normed:model", "buffers": "local"})
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    rows = serve(
        nodes_with(tmp_path, experiment, [str(f) for f in files]),
        experiment,
        RunOptions(tmp_path / "run"),
    ).rows
    assert [row.test.examples for row in rows if row.test] == [14] * 3
    assert not any(row.faults for row in rows)


def test_a_run_that_has_finished_starts_no_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started all nodes, showed the old score as if it were new, and changed nothing."""

    def starts(*_: object) -> None:
        raise AssertionError("a federation is started")

    monkeypatch.setattr(federation, "FlowerProcesses", starts)
    files = [str(table(tmp_path / f"{i}.csv", i)) for i in range(2)]
    experiment, out = own(), tmp_path / "run"
    serve(nodes_with(tmp_path, experiment, files), experiment, RunOptions(out))
    (tmp_path / "own.toml").write_text(config.to_toml(experiment))
    words = ["flower", "up", tmp_path / "own.toml", "--out", out]
    words += [word for file in files for word in ("--data", file)]
    done = call(*words)
    assert done.code == 0, done.err
    assert "this run had finished before" in done.err
    assert "test" not in done.err.partition("run ")[0]
    table(Path(files[0]), 3)  # other data: no run of them has finished
    with pytest.raises(AssertionError, match="a federation is started"):
        call(*words)


def test_one_client_alone_is_trained_as_if_its_data_were_the_federation(tmp_path: Path) -> None:
    """What it sends is a step of gradient descent on its own rows."""
    experiment = own(
        method="fedavg",
        rounds=1,
        local={"lr": 0.1, "steps": 1, "batch_size": "all"},
        partition={"kind": "nodes", "clients": 1},
    )
    file = table(tmp_path / "0.csv", 0)
    node = make_node(
        experiment, {"partition-id": 0, "data": str(file), "state": str(tmp_path / "s")}
    )
    result = serve(InProcessGrid({1: node}), experiment, RunOptions(tmp_path / "run"))
    setup = node.prepared.setup
    rows = torch.from_numpy(setup.federation.client(0))
    x, y = setup.federation.data.x[rows], setup.federation.data.y[rows]
    start = {k: v.clone().requires_grad_() for k, v in node.prepared.server.params.items()}
    loss = torch.nn.functional.cross_entropy(
        setup.training.network.logits(start, {}, x, train=True), y
    )
    grads = torch.autograd.grad(loss, list(start.values()))
    for (name, v), g in zip(start.items(), grads, strict=True):
        assert torch.allclose(result.params[name], v - 0.1 * g, rtol=0, atol=1e-12)


def test_data_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\n"
        "def load():\n"
        "    x = np.random.default_rng(0).normal(size=(40, 3))\n"
        "    return x, (x[:, 0] > 0).astype(int)\n"
    )
    monkeypatch.chdir(tmp_path)
    grid = nodes_with(tmp_path, own(), ["mine:load", str(table(tmp_path / "1.csv", 1))])
    result = serve(grid, own(), RunOptions(tmp_path / "run"))
    assert result.record.partition.sizes == [32, 32]
    with pytest.raises(DataError, match="no 'lod'"):
        nodes_with(tmp_path, own(), ["mine:lod", "x.csv"])


def test_labels_are_numbered_in_the_same_way_everywhere(tmp_path: Path) -> None:
    """Also on a node that has only one of them."""
    one = table(tmp_path / "1.csv", 1, labels=("yes",))
    node = make_node(
        own(), {"partition-id": 1, "num-partitions": 2, "data": str(one), "state": "s"}
    )
    assert set(node.prepared.setup.federation.data.y.tolist()) == {1}
    strange = table(tmp_path / "2.csv", 1, labels=("yes", "perhaps"))
    with pytest.raises(DataError, match="a label that is not known"):
        make_node(own(), {"partition-id": 1, "data": str(strange)})


def test_a_folder_below_the_home_of_who_runs_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert state_folder({"state": "~/states"}) == Path("/somewhere/states")


def test_mistakes(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, object], str]] = [
        ({}, "needs 'partition-id'"),
        ({"partition-id": -1}, "needs 'partition-id'"),
        ({"partition_id": 0}, r"has no key 'partition_id'.\n  do   did you mean 'partition-id'"),
        ({"partition-id": 0, "sate": "/big"}, "did you mean 'state'"),
        ({"partition-id": 0, "dataset": "mnist"}, "needs 'data'"),  # another app's
        ({"partition-id": 0}, "needs 'data'"),
        ({"partition-id": 0, "data": "nowhere.csv"}, "no file or folder"),
        ({"partition-id": 7, "data": str(table(tmp_path / "0.csv", 0))}, "client 7"),
    ]
    for node, words in wrong:
        with pytest.raises((ConfigError, DataError), match=words) as error:
            make_node(own(), node)
        assert len(error.value.lines()) <= 4
    with pytest.raises(DataError, match="are on the nodes"):
        gather(own())
    with pytest.raises(DataError, match="takes no partition"):
        is_on_nodes(own(partition={"kind": "nodes", "clients": 2, "holdout": 0.2}))
    assert is_on_nodes(own(cohort={"new_clients": [1]}))
    with pytest.raises(DataError, match=r"takes no names in cohort\.new_clients"):
        is_on_nodes(own(cohort={"new_clients": ["north"]}))
    with pytest.raises(DataError, match="names 'yes' twice"):
        is_on_nodes(own(data={**DATA, "labels": ["yes", "no", "yes"]}))
    with pytest.raises(DataError, match=r"needs data\.source = 'nodes' and"):
        is_on_nodes(own(partition={"kind": "iid", "clients": 2}))
    with pytest.raises(DataError, match=r"needs data\.labels"):
        is_on_nodes(own(data={"source": "nodes"}))


def test_what_an_error_says_stays_on_the_node(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server is told what kind of error it was, and never the words, which may be data.

    Whoever runs the node sees them where the SuperNode was started, and in its log.
    """
    file = tmp_path / "experiment.toml"
    file.write_text(config.to_toml(own()))
    secret = tmp_path / "secret-patient.py"
    app = client_app(file)
    node = {"partition-id": 0, "num-partitions": 2, "state": str(tmp_path / "s")}
    hello = RecordDict({HEADER: Header().record()})
    InProcessGrid({})  # gives this process an identity
    gap = tmp_path / "secret-patient.csv"
    gap.write_text(table(tmp_path / "b.csv", 0).read_text().replace(",", ",nan,", 1))
    for data, said in (
        (str(secret), "DataError"),
        (str(gap), "DataError"),
        (str(table(tmp_path / "a.csv", 0)), "WireError"),
    ):
        message = Message(hello, 1, "query.describe" if said == "DataError" else "train", ttl=60.0)
        context = Context(1, 1, {**node, "data": data}, RecordDict(), {})
        reply = app(message, context)
        assert reply.has_error()
        assert reply.error.reason.startswith(said)
        assert "secret-patient" not in reply.error.reason
    log = (tmp_path / "s" / "node.log").read_text()
    assert "secret-patient" in log
    assert log == capfd.readouterr().err


def test_an_unexpected_error_stays_on_the_node_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server hears only its type: the message may hold data."""

    def breaks(*_: object) -> None:
        raise LookupError("secret-patient")

    monkeypatch.setattr(answer, "make_node", breaks)
    file = tmp_path / "experiment.toml"
    file.write_text(config.to_toml(own()))
    InProcessGrid({})  # gives this process an identity
    message = Message(RecordDict(), 1, "train", ttl=60.0)
    context = Context(1, 1, {"state": str(tmp_path / "s")}, RecordDict(), {})
    assert client_app(file)(message, context).error.reason == "LookupError"
    log = (tmp_path / "s" / "node.log").read_text()
    assert "LookupError: secret-patient" in log
    assert "in breaks" in log


def test_who_submitted_a_run_sees_its_faults_at_once() -> None:
    console = Console(file=StringIO())
    with LinesWithFaults(console) as display:
        display.begin("fedavg seed 0", 5, 0)
        display.row("fedavg seed 0", RoundRecord(1, faults={"no reply": [2, 3]}))
        display.end("fedavg seed 0", FINISHED)
    first, last = console.file.getvalue().splitlines()
    assert first == "round 1: no reply: clients [2, 3]"
    assert last.startswith("fedavg seed 0: ")


@pytest.mark.parametrize("function", [False, True])
def test_a_node_writes_down_how_it_standardised_its_inputs(
    function: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody kept it, so that the model could not be applied to new data."""
    file = table(tmp_path / "0.csv", 0)
    (tmp_path / "own_rows.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        f"    rows = np.genfromtxt({str(file)!r}, delimiter=',', skip_header=1, usecols=range(3))\n"
        "    return rows, np.arange(len(rows)) % 2\n"
    )
    monkeypatch.chdir(tmp_path)
    experiment = own(
        partition={"kind": "nodes", "clients": 1}, data={**DATA, "normalize": "client"}
    )
    text = "own_rows:load" if function else str(file)
    grid = nodes_with(tmp_path, experiment, [text])
    serve(grid, experiment, RunOptions(tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    file_of_run = tmp_path / "s" / f"scale-0-{record['key']}.json"
    scale = json.loads(file_of_run.read_text())
    raw = np.genfromtxt(file, delimiter=",", skip_header=1, usecols=(0, 1, 2))
    federation = grid.nodes[100].prepared.setup.federation
    seen = federation.data.x.numpy()[: len(federation.rows)]
    made = (raw - scale["mean"]) / scale["deviation"]
    assert all(np.abs(made - one).max(axis=1).min() < 1e-5 for one in seen)
    assert record["data"]["scale"] is None
    assert str(scale["mean"][0]) not in json.dumps(record)
    before = file_of_run.read_bytes()  # neither another run nor a node that is asked who it is
    table(file, 3)
    nodes_with(tmp_path, experiment, [text]).nodes[100].describe()
    serve(nodes_with(tmp_path, experiment, [text]), experiment, RunOptions(tmp_path / "second"))
    assert file_of_run.read_bytes() == before
    assert len(list((tmp_path / "s").glob("scale-0-*.json"))) == 2


def test_all_nodes_are_standardised_alike_and_send_sums_alone(tmp_path: Path) -> None:
    """By the mean and deviation over all training examples, which a simulation computes at once."""
    files = []
    for k in range(2):  # far from 0, and each elsewhere
        file, lines = table(tmp_path / f"{k}.csv", k), []
        for row in file.read_text().splitlines()[1:]:
            a, b, c, kind = row.split(",")
            lines.append(f"{1000 + 100 * k + float(a):.6f},{b},{5 * k - float(c):.8f},{kind}")
        file.write_text("\n".join(["a,b,c,kind", *lines]) + "\n")
        files.append(file)
    experiment = own(data={**DATA, "normalize": "standardize"}, method="scaffold")
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
    served = serve(grid, experiment, RunOptions(tmp_path / "run"))
    simulated = config.build(
        config.Experiment,
        {
            **experiment.model_dump(mode="json", exclude={"partition", "data", "flower"}),
            "data": {
                "source": [str(f) for f in files],
                "label": "kind",
                "normalize": "standardize",
            },
            "partition": {"kind": "source"},
        },
        "test",
    )
    prepared = prepare(simulated, gather(simulated))
    data = prepared.setup.federation.data
    record = served.record.data
    assert record.scale is not None
    np.testing.assert_allclose(record.scale.mean, data.scale[0], rtol=1e-7)
    np.testing.assert_allclose(record.scale.deviation, data.scale[1], rtol=1e-4)
    result = start(prepared)
    for name, tensor in result.state_dict().items():
        torch.testing.assert_close(served.state_dict()[name], tensor, rtol=1e-3, atol=1e-3)
    assert served.rows[-1].test["accuracy"] == result.rows[-1].test["accuracy"]
    written = "".join(f.read_text(errors="replace") for f in (tmp_path / "run").rglob("*.json*"))
    assert not any(row.split(",")[0] in written for row in files[0].read_text().splitlines()[1:])


def test_nodes_and_server_standardise_alike(tmp_path: Path) -> None:
    experiment = own(data={**DATA, "normalize": "standardize"})
    files = [table(tmp_path / f"{i}.csv", i) for i in range(2)]
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
    server = own(data={**DATA, "normalize": "none"})
    with pytest.raises(DataError, match="Client 0 standardises its inputs otherwise"):
        serve(grid, server, RunOptions(tmp_path / "run"))


@pytest.mark.parametrize("shape", [(6, 3), (3, 3)])
@pytest.mark.parametrize("how", ["standardize", "client"])
def test_nodes_standardise_series_along_the_declared_axis(
    shape: tuple[int, int], how: str, tmp_path: Path
) -> None:
    """Each channel, the last axis, has one mean and deviation over nodes, steps and examples."""
    raw = {}
    for k in range(2):
        x = np.random.default_rng(k).normal(size=(20, *shape)) * [1, 2, 3] + [0, 50, 7 * k]
        np.savez(tmp_path / f"{k}.npz", x=x, kind=np.array(["no", "yes"] * 10))
        raw[k] = x
    data = {**DATA, "normalize": how, "channels": "last"}
    experiment, files = own(data=data), [str(tmp_path / f"{k}.npz") for k in range(2)]
    grid = nodes_with(tmp_path, experiment, files)
    served = serve(grid, experiment, RunOptions(tmp_path / "run"))
    assert [row.faults for row in served.rows] == [{}] * 3
    trained = []
    for k in range(2):
        federation = nodes_with(tmp_path, own(data=DATA), files).nodes[100 + k].prepared.setup
        federation = federation.federation
        trained.append(federation.data.x.numpy()[federation.rows])
    scales = [
        json.loads((tmp_path / "s" / f"scale-{k}-{served.record.key}.json").read_text())
        for k in range(2)
    ]
    for k, scale in enumerate(scales):
        known = np.concatenate(trained) if how == "standardize" else trained[k]
        for name, values in (("mean", known.mean((0, 1))), ("deviation", known.std((0, 1)))):
            full = np.broadcast_to(values, shape).ravel() if shape[0] == shape[1] else values
            np.testing.assert_allclose(scale[name], full, rtol=1e-5, atol=1e-6)
    if how == "standardize":
        np.testing.assert_allclose(served.record.data.scale.mean, scales[0]["mean"])
        words = "another axis" if shape == (6, 3) else "another experiment"
        server = own(data={**DATA, "normalize": how})
        with pytest.raises(FedkeelError, match=words):
            serve(nodes_with(tmp_path, experiment, files), server, RunOptions(tmp_path / "other"))


def test_nodes_leave_out_targets_that_are_not_known(tmp_path: Path) -> None:
    files = []
    for k in range(2):
        random = np.random.default_rng(k)
        x = random.normal(size=(30, 3))
        y = np.where(random.random((30, 2)) < 0.3, np.nan, x[:, :2] + k)
        files.append(str(tmp_path / f"{k}.npz"))
        np.savez(files[-1], x=x, y=y)
    data = {"label": "y", "target": "quantity", "missing_targets": "leave_out"}
    task = {"loss": "mse", "metrics": ["mae", "r2"]}
    model = {"name": "mlp", "args": {"hidden": [5]}}
    experiment = own(data={"source": "nodes", **data}, task=task, model=model)
    served = serve(
        nodes_with(tmp_path, experiment, files), experiment, RunOptions(tmp_path / "run")
    )
    assert [row.faults for row in served.rows] == [{}] * 3
    values = experiment.model_dump(mode="json", exclude={"partition", "data", "flower"})
    values |= {"data": {"source": files, **data}, "partition": {"kind": "source"}}
    simulated = config.build(config.Experiment, values, "test")
    result = start(prepare(simulated, gather(simulated)))
    for name in ("loss", "mae", "r2"):
        assert served.rows[-1].test[name] == pytest.approx(result.rows[-1].test[name], rel=1e-6)
    refused = own(data={"source": "nodes", **data, "missing_targets": "refuse"}, task=task)
    with pytest.raises(FedkeelError, match="leave_out"):
        nodes_with(tmp_path, refused, files)


def test_categories_on_nodes_have_names(tmp_path: Path) -> None:
    data = {**DATA, "categories": ["b"], "missing": "indicator"}
    with pytest.raises(DataError, match="needs the names of the categories of 'b'"):
        is_on_nodes(own(data=data))
    rows = ("1,x,no", "2,y,yes", "3,x,no", "4,x,yes") * 5
    texts = ["\n".join(["a,b,kind", *rows]), "\n".join(["a,b,kind", *rows, "?,x,no"])]
    files = [tmp_path / f"{k}.csv" for k in range(2)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text + "\n")
    experiment = own(
        data={**data, "categories": {"b": ["x", "y", "z"]}, "normalize": "standardize"}
    )
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
    result = serve(grid, experiment, RunOptions(tmp_path / "run"))
    columns = ("a", "a is missing", "b=x", "b=y", "b=z", "b is missing")
    assert tuple(result.record.data.columns) == columns
    assert result.record.data.scale.mean[1:] == [0] * 5
    assert result.record.data.scale.deviation[1:] == [1] * 5


def test_a_run_on_nodes_predicts_on_tables_as_the_nodes_made_their_inputs(tmp_path: Path) -> None:
    """By the names of columns; of a gap the mean of all nodes, where the server knows it."""
    files = []
    for k in range(2):
        rows = [
            f"{k}_{i},{'xyz'[i % 3]},{10 * k + i % 7},{DATA['labels'][i % 2]}" for i in range(30)
        ]
        files.append(tmp_path / f"{k}.csv")
        files[k].write_text("\n".join(["id,b,a,kind", *rows]) + "\n")
    data = {**DATA, "drop": ["id"], "categories": {"b": ["z", "x", "y"]}, "missing": "indicator"}
    experiment = own(data={**data, "normalize": "standardize"})
    grid = nodes_with(tmp_path, experiment, [str(f) for f in files])
    result = serve(grid, experiment, RunOptions(tmp_path / "run"))
    model = load(tmp_path / "run")
    record = result.record.data
    new = tmp_path / "new.csv"
    new.write_text("a,patient,b\n3,p1,z\n,p2,y\n12,p3,x\n")  # in another order, without labels
    found = model.preparation.apply(str(new), str(new)).x
    mean, deviation = record.scale.mean[4], record.scale.deviation[4]
    expected = [[1, 0, 0, 0, (3 - mean) / deviation, 0], [0, 0, 1, 0, 0, 1]]
    expected.append([0, 1, 0, 0, (12 - mean) / deviation, 0])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    answers = model.predict(str(new))
    assert set(answers.labels) <= {"no", "yes"}
    assert answers.others["patient"] == ["p1", "p2", "p3"]
    of_node = grid.nodes[101].prepared.setup.federation
    examples = model.predict(str(files[1]))  # all the node's own rows have the inputs of training
    made = {tuple(np.round(row, 4)) for row in model.preparation.apply(str(files[1])).x.tolist()}
    raw = of_node.data.x.clone()
    raw[:, 4] = (raw[:, 4] - mean) / deviation
    assert {tuple(np.round(row, 4)) for row in raw.tolist()} == made
    assert len(examples) == 30
    new.write_text("a,b\n3,z\n4,\n")
    with pytest.raises(DataError, match="in training each node filled its gaps") as error:
        model.predict(str(new))
    assert "a value of 'b' is missing" in str(error.value)
    assert "a gap in row 1 (counted from 0)" in str(error.value)
    new.write_text("a,b\n3,z\n4,Q\n")
    with pytest.raises(DataError, match="column 'b' holds a category that is not known") as error:
        model.predict(str(new))
    assert "'Q' in row 1 (counted from 0); expected one of 'z', 'x', 'y'" in str(error.value)
    schema = json.loads(metadata(model)["schema"])
    assert [(column["name"], column.get("indicator")) for column in schema] == [
        ("b", True),
        ("a", True),
    ]


def test_a_prediction_says_what_only_the_nodes_know(tmp_path: Path) -> None:
    files = [str(table(tmp_path / f"{i}.csv", i)) for i in range(2)]
    experiment = own(data={**DATA, "normalize": "client"})
    serve(nodes_with(tmp_path, experiment, files), experiment, RunOptions(tmp_path / "run"))
    with pytest.raises(DataError, match="each node standardised its inputs by its own mean"):
        load(tmp_path / "run").predict(files[0])
    for k in range(2):
        x = np.random.default_rng(k).normal(size=(20, 3))
        np.savez(tmp_path / f"{k}.npz", x=x, kind=np.array(["no", "yes"] * 10))
    arrays = [str(tmp_path / f"{k}.npz") for k in range(2)]
    serve(nodes_with(tmp_path / "n", own(), arrays), own(), RunOptions(tmp_path / "arrays"))
    with pytest.raises(DataError, match="the training data had no names of columns"):
        load(tmp_path / "arrays").predict(files[0])


def test_the_largest_message(tmp_path: Path) -> None:
    experiment = own(flower={"deadline_seconds": 2.0, "message_mb": 0.0001})
    grid = nodes_with(
        tmp_path, experiment, [str(table(tmp_path / f"{i}.csv", i)) for i in range(2)]
    )
    with pytest.raises(FedkeelError, match="too large"):
        serve(grid, experiment, RunOptions(tmp_path / "run"))


@pytest.mark.parametrize("values", [{"method": "fedavgg"}, {"model": {"name": "mlpp"}}])
def test_a_mistake_in_the_settings_is_said_before_anybody_is_waited_for(
    values: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With data on the nodes it waited for them until the deadline, and then blamed them."""
    with pytest.raises(FedkeelError, match="did you mean"):
        serve(InProcessGrid({}), own(**values), RunOptions(tmp_path / "run"))
    assert "waiting" not in capsys.readouterr().out
