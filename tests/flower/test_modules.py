"""Modules of one's own on nodes, each made anew for every message, as in processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.base.named_code import ImportTarget, import_object
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ModelError, TrainingError
from fedkeel.flower.apps import client_app
from fedkeel.flower.node.node import Node
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import Net, federation, prepared, same


class FreshNodes(dict[int, Node]):
    """Nodes that prepare the run for every message, as real ones do."""

    def __init__(self, make: Callable[[], Prepared], root: Path) -> None:
        self._make, self._root = make, root
        super().__init__(make_nodes(make(), root))

    def __getitem__(self, node: int) -> Node:
        return replace(super().__getitem__(node), prepared=self._make())


def assert_same_as_sequential(make: Callable[[], Prepared], root: Path) -> None:
    """Compare a federation with the sequential engine."""
    remote, local = run_on_nodes(make(), InProcessGrid(FreshNodes(make, root))), start(make())
    assert [row.faults for row in remote.rows] == [{}] * len(remote.rows)
    for row in (*remote.rows, *local.rows):
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
        if not row.clients:  # nodes send nothing, and not zeros
            row.bytes_up.clear()
    assert same(remote, local)
    assert all(torch.equal(remote.module[k], local.module[k]) for k in local.module)


class TransposedNet(nn.Module):
    """Has a parameter that lies column after column."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 129)
        self.w = nn.Parameter((torch.randn(129, 129) * 0.1).t())
        self.outer = nn.Linear(129, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(nn.functional.linear(torch.tanh(self.inner(x)), self.w)))


class UnusualNet(nn.Module):
    """Has a parameter without an axis, frozen and tied ones, empty buffers, counters and flags."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.outer = nn.Linear(5, 3)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("on", torch.tensor(True))
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.mean += x.mean()
        inner = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.outer(inner * self.scale)


def dropout_net() -> nn.Module:
    return Net(dropout=0.3)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        (TransposedNet, "fedavg"),
        (UnusualNet, "topk+scaffold"),
        (dropout_net, "fedavg"),
        pytest.param(TransposedNet, "topk+scaffold", marks=pytest.mark.slow),
        pytest.param(UnusualNet, "fedavg", marks=pytest.mark.slow),
        pytest.param(dropout_net, "topk+scaffold", marks=pytest.mark.slow),
    ],
)
def test_the_same_bits(tmp_path: Path, model: Callable[[], nn.Module], method: str) -> None:
    policy = "average" if model is UnusualNet else "refuse"
    assert_same_as_sequential(lambda: prepared(method, model, rounds=2, buffers=policy), tmp_path)


@pytest.mark.parametrize("policy", ["average", pytest.param("local", marks=pytest.mark.slow)])
def test_batch_normalisation(tmp_path: Path, policy: str) -> None:
    local = fk.Local(lr=0.05, epochs=1, batch_size=4, drop_last="single")
    assert_same_as_sequential(
        lambda: prepared("scaffold", lambda: Net(norm=True), rounds=2, buffers=policy, local=local),
        tmp_path,
    )


def test_however_parameters_lie_engines_agree() -> None:
    """A message is laid out anew, so the initial model is too."""
    one, two = (
        prepared("fedavg", TransposedNet, rounds=2, kind=k) for k in ("sequential", "workers")
    )
    assert same(start(one), start(two))


class RandomNet(nn.Module):
    """Draws in its constructor, from a source that nobody seeds, what is never sent."""

    def __init__(self, what: str) -> None:
        super().__init__()
        found = torch.from_numpy(np.random.default_rng().normal(size=(6, 5))).float()
        self.scale = 1.0
        if what == "frozen":
            self.w = nn.Parameter(found, requires_grad=False)
        elif what == "buffer":
            self.register_buffer("w", found)
        else:
            self.w = torch.ones(6, 5)
            self.scale = float(found[0, 0])
        self.outer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.scale * nn.functional.linear(x, self.w.to(x))))


@pytest.mark.parametrize("what", ["frozen", "buffer", "attribute"])
def test_a_node_with_another_model_is_refused(tmp_path: Path, what: str) -> None:
    """It would train another function, and nobody would see it."""

    def make() -> Prepared:
        policy = "local" if what == "buffer" else "refuse"
        return prepared("fedavg", lambda: RandomNet(what), rounds=1, buffers=policy)

    with pytest.raises(TrainingError, match="no quorum") as error:
        run_on_nodes(make(), InProcessGrid(FreshNodes(make, tmp_path)))
    assert "This node makes another model than the server" in str(error.value)


def test_buffers_that_are_sent_may_begin_as_they_like(tmp_path: Path) -> None:
    """Every message brings them."""

    def make() -> Prepared:
        return prepared("fedavg", lambda: RandomNet("buffer"), rounds=1, buffers="average")

    result = run_on_nodes(make(), InProcessGrid(FreshNodes(make, tmp_path)))
    assert result.rows[1].faults == {}


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fednova"])
def test_steps_that_go_on_across_short_batches(tmp_path: Path, method: str) -> None:
    """What a client has to do in a round depends on where its last one ended."""
    local = fk.Local(lr=0.05, steps=3, batch_size=4, sampling="continue")
    clients = federation(7)
    assert any(size % 4 for size in clients.sizes)
    assert_same_as_sequential(
        lambda: prepared(method, clients=clients, rounds=5, local=local), tmp_path
    )


@pytest.mark.parametrize("method", ["scaffold", pytest.param("mime", marks=pytest.mark.slow)])
def test_a_round_from_which_everybody_drops(tmp_path: Path, method: str) -> None:
    cohort = fk.Cohort(clients=2, dropout=0.7)
    assert_same_as_sequential(lambda: prepared(method, rounds=6, cohort=cohort), tmp_path)
    rows = start(prepared(method, rounds=6, cohort=cohort)).rows
    assert any(not row.clients for row in rows[1:])


def test_the_files_of_an_app_come_before_those_of_the_nodes_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's own file of the same name was taken, and its replies were left out."""
    app, local = tmp_path / "app", tmp_path / "here"
    (app / "federation").mkdir(parents=True)
    local.mkdir()
    (app / "whose_net.py").write_text("class Net: whose = 'app'\n")
    (local / "whose_net.py").write_text("class Net: whose = 'node'\n")
    (local / "whose_rows.py").write_text("class Net: whose = 'node'\n")
    monkeypatch.chdir(local)
    monkeypatch.setattr(sys, "path", [str(app), *sys.path])  # as Flower does
    client_app(app / "federation" / "experiment.toml")
    wanted = ImportTarget("model", ModelError, "a:B", lambda value: True, "a class", "")
    try:
        assert vars(import_object("whose_net:Net", wanted))["whose"] == "app"
        assert vars(import_object("whose_rows:Net", wanted))["whose"] == "node"
    finally:
        for name in ("whose_net", "whose_rows"):
            sys.modules.pop(name, None)
