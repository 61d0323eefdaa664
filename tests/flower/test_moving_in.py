"""What the page for users of other libraries says works: files are accepted, Flower's app runs."""

from __future__ import annotations

import re
import tomllib
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn

from fedkeel.config import Experiment, build
from fedkeel.method.grammar import parse
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
