"""What the page for users of other libraries says works: files are accepted, Flower's app runs."""

from __future__ import annotations

import re
import sys
import tomllib
import types
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn

import fedkeel as fk
from fedkeel.config import Experiment, build
from fedkeel.method.grammar import parse
from fedkeel.task.models import make
from in_process_grid import InProcessGrid, across

PAGE = (Path(__file__).parents[2] / "docs" / "getting-started" / "moving-in.md").read_text("utf-8")

APP = """
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

def main(grid, arrays, fraction_evaluate, evaluate):
    strategy = FedAvg(fraction_evaluate=fraction_evaluate)
    return strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=3,
        evaluate_fn=evaluate,
    )
"""
"""What the server of Flower's quickstart does, with its words for arguments and metrics."""


class Nodes(InProcessGrid):
    """Two nodes that train as the quickstart's clients do, and know nothing of fedkeel."""

    def __init__(self) -> None:
        super().__init__(nodes={})
        random = np.random.default_rng(0)
        x = torch.tensor(random.normal(size=(60, 4)), dtype=torch.float32)
        y = (x[:, 0] > 0).to(torch.int64)
        self.data = {7: (x[:20], y[:20]), 9: (x[20:], y[20:])}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.data)

    def _reply(self, message: Message) -> list[Message]:
        x, y = self.data[message.metadata.dst_node_id]
        content, model = across(message.content), nn.Linear(4, 2)
        model.load_state_dict(content["arrays"].to_torch_state_dict())
        message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        loss = nn.functional.cross_entropy(model(x), y)
        metrics: dict[str, Any] = {"num-examples": len(y), "eval_loss": loss.item()}
        if message.metadata.message_type == "evaluate":
            return [self._answer(message, {"metrics": MetricRecord(metrics)})]
        optimiser = torch.optim.SGD(model.parameters(), lr=float(content["config"]["lr"]))
        loss.backward()
        optimiser.step()
        metrics = {"train_loss": loss.item(), "num-examples": len(y)}
        records = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
        return [self._answer(message, records)]

    @staticmethod
    def _answer(message: Message, records: dict[str, Any]) -> Message:
        return Message(across(RecordDict(records)), reply_to=message)


def changed(app: str, method: str | None = None) -> str:
    """The app with the changes that the page shows, perhaps with another method."""
    diff = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()
    old = [line[1:].strip() for line in diff if line.startswith("-")]
    new = [line[1:].strip() for line in diff if line.startswith("+")]
    assert len(old) == len(new) == 2
    for before, after in zip(old, new, strict=True):
        assert app.count(before) == 1, before
        app = app.replace(before, after)
    return app if method is None else re.sub(r'Method\("[^"]+"', f'Method("{method}"', app)


def result(app: str) -> tuple[dict[str, torch.Tensor], list[int], Any]:
    """The last model, the rounds that the server evaluated, and Flower's own result."""
    names: dict[str, Any] = {}
    exec(app, names)
    torch.manual_seed(0)
    rounds: list[int] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        rounds.append(server_round)
        return MetricRecord({"entries": len(arrays)})

    made = names["main"](Nodes(), ArrayRecord(nn.Linear(4, 2).state_dict()), 1.0, evaluate)
    return made.arrays.to_torch_state_dict(), rounds, made


def test_the_two_changed_lines_of_the_quickstart() -> None:
    """FedAvg of both is the same; the page's method gives another model of the same app."""
    theirs, rounds, _ = result(APP)
    ours, our_rounds, made = result(changed(APP, "fedavg"))
    assert rounds == our_rounds == [0, 1, 2, 3]
    for name, tensor in theirs.items():
        assert torch.allclose(tensor, ours[name], atol=1e-6)
    assert sorted(made.train_metrics_clientapp) == [1, 2, 3]
    assert sorted(made.evaluate_metrics_clientapp) == [1, 2, 3]
    others, _, _ = result(changed(APP))
    assert not torch.allclose(others["weight"], ours["weight"], atol=1e-4)


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_the_files_are_experiments(text: str) -> None:
    settings = build(Experiment, tomllib.loads(text), "the page")
    parse(settings.method)


def test_every_method_of_the_tables_is_there() -> None:
    rows = [line.split("|")[2:-1] for line in PAGE.splitlines() if line.startswith("| `")]
    right = " ".join(cell for row in rows for cell in row)
    named = re.findall(r"`([a-z_0-9]+(?:\([a-z]+=[0-9.]+\))?)`", right)
    known = [name for name in named if not re.fullmatch(r"lr|momentum|epsilon|delta", name)]
    skipped = {"epochs", "batch_size", "quorum", "deadline_seconds", "auto", "weights", "holdout"}
    skipped |= {"score", "patience", "source", "rounds", "seed"}
    methods = [name for name in known if name not in skipped]
    assert len(methods) > 25
    for name in methods:
        parse(name)


SECTIONS = {
    text.split("\n", 1)[0]: text.split("\n", 1)[1].strip() for text in PAGE.split("\n## From ")[1:]
}


class WithLoss(nn.Sequential):
    """A classifier that says its loss, as pfl-research's models do."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(x), y)


def of_flower(net: nn.Module, loader: list[Any], epochs: int, lr: float, device: object) -> float:
    """What the training function of Flower's quickstart does."""
    optimiser, total = torch.optim.SGD(net.parameters(), lr=lr), 0.0
    for _ in range(epochs):
        for batch in loader:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(batch["img"]), batch["label"])
            loss.backward()
            optimiser.step()
            total += loss.item()
    return total / len(loader)


@pytest.mark.parametrize("peer", SECTIONS)
def test_each_section_begins_with_training_that_stays(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "task", types.SimpleNamespace(train=of_flower))
    section = SECTIONS[peer]
    assert section.startswith("**You keep ")
    source = section.split("```python\n", 1)[1].split("```", 1)[0]
    assert section.index(source) < 600
    names: dict[str, Any] = {}
    exec(source, names)
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4))
    y = (x[:, 0] > 0).astype(int)
    settings = {
        "task": fk.Task(WithLoss),
        "clients": fk.iid(x, y, clients=2),
        "test": (x, y),
        "rounds": 3,
        "local": fk.Local(lr=0.3, epochs=2, batch_size=10, momentum=0.9 * (peer == "NVFlare")),
        "engine": fk.Engine(kind="sequential"),
    }
    own = fk.run("fedavg", **settings, local_training=names["own"])
    plain = fk.run("fedavg", **settings)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], tensor)


def test_the_peers_of_the_page_are_those_of_the_comparison() -> None:
    assert list(SECTIONS) == ["Flower", "PFLlib", "FL-bench", "pfl-research", "NVFlare"]


def test_the_network_of_pfllib() -> None:
    names: dict[str, Any] = {}
    exec(SECTIONS["PFLlib"].split("```python\n")[2].split("```")[0], names)
    network = names["FedAvgCNN"]()
    counts = [sum(p.numel() for p in module.parameters()) for module in (network, of_mcmahan())]
    assert counts == [582_026, 1_663_370]
    assert all(f"{count:,}" in SECTIONS["PFLlib"] for count in counts)
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def of_mcmahan() -> nn.Module:
    return make("cnn_mcmahan", (1, 28, 28), 10)
