"""Which replies are outliers: by the round, by those of before and by the client's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import nn

import fedkeel as fk
from fedkeel.engine.base import TrainedCohort
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import TrainingError
from fedkeel.flower.protocol import TRAIN
from fedkeel.flower.server.engine import NodeClients
from fedkeel.flower.server.outliers import (
    OF_UPDATE,
    UPDATE,
    Outliers,
    norms,
    number_sizes,
)
from fedkeel.method.context import Message
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, header_of, make_nodes, run_on_nodes
from toys import federation, prepared

SECOND = 10**9 + 7
"""The node of client 1."""

QUICK = fk.config.Flower(deadline_seconds=60.0, poll_seconds=0.001, quorum=0.2, enough=1.0)


def grid_of(made: Prepared, root: Path) -> InProcessGrid:
    return InProcessGrid(make_nodes(made, root, nodes=made.population.clients))


def scaled(reply: RecordDict, factor: float, only: str = "") -> RecordDict:
    """A reply that is too long, or one kind of its tensors is."""
    (name,) = [key for key in reply if key.startswith("tensors-")]
    arrays = {
        k: Array(
            np.asarray(
                a.numpy() * (factor if k.startswith(only) and a.numpy().dtype.kind == "f" else 1)
            )
        )
        for k, a in reply[name].items()
    }
    return RecordDict({**reply, name: ArrayRecord(arrays)})


def lying(grid: InProcessGrid, rounds: set[int], bend: Any) -> None:
    """Let client 1 bend its replies of some rounds."""

    def edit(kind: str, reply: RecordDict) -> RecordDict:
        return bend(reply) if kind == TRAIN and header_of(reply)["round"] in rounds else reply

    grid.edits[SECOND] = edit


def faults(result: Result) -> list[dict[str, list[int]]]:
    return [row.faults for row in result.rows[1:]]


WHOLE = fk.Local(lr=0.05, epochs=2, batch_size="all")
BUDGET = fk.Privacy(epsilon=8.0, delta=0.01)


@pytest.mark.parametrize(
    ("method", "more", "only"),
    [
        ("fedavg", {}, ""),
        ("scaffold", {}, ""),
        ("scaffold", {}, "uploads/"),
        ("fedper", {}, ""),
        ("fedcurv", {}, ""),
        ("fedcurv", {}, "uploads/"),
        ("dpclient(sigma=3.0)", {"privacy": BUDGET}, ""),
        ("fedavg", {"model": lambda: Normed(), "buffers": "average", "local": WHOLE}, "buffers/"),
    ],
)
def test_a_reply_900_times_too_long_is_left_out(
    tmp_path: Path, method: str, more: dict[str, Any], only: str
) -> None:
    """In the first round, where only the others are known, as in a later one."""
    made = prepared(method, rounds=3, flower=QUICK, cohort=fk.Cohort(clients=6), **more)
    grid = grid_of(made, tmp_path)
    lying(grid, {0, 2}, lambda reply: scaled(reply, 900.0, only))
    first, second, third = run_on_nodes(made, grid).rows[1:]
    for row in (first, third):
        ((reason, clients),) = row.faults.items()
        assert clients == [1]
        assert reason.endswith("times as large as the median")
        assert row.clients == [0, 2, 3, 4, 5]
    assert (second.faults, second.clients) == ({}, [0, 1, 2, 3, 4, 5])


class Normed(nn.Module):
    """Normalises its inputs, whose statistics are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("number", [-math.inf, math.inf, math.nan])
def test_a_diagnostic_that_is_not_finite_is_a_fault(tmp_path: Path, number: float) -> None:
    made = prepared("fedgc", rounds=1, per_round=6, flower=QUICK)
    grid = grid_of(made, tmp_path)

    def bend(reply: RecordDict) -> RecordDict:
        reply["diagnostics-1"]["fedgc.cgc.active"] = number
        return reply

    lying(grid, {0}, bend)
    assert faults(run_on_nodes(made, grid)) == [{"sent NaN or infinity": [1]}]


@pytest.mark.parametrize("method", ["fedasync", "fedbuff(buffer=2)"])
@pytest.mark.parametrize(("rounds", "factor"), [({0}, 1e6), (set(range(1, 30)), 900.0)])
def test_a_reply_that_comes_by_itself_is_judged_by_those_before(
    tmp_path: Path, method: str, rounds: set[int], factor: float
) -> None:
    """And the first one by the model: a single one moved the model by 200,000 honest moves."""
    made = prepared(method, rounds=12, per_round=6, flower=QUICK)
    grid = grid_of(made, tmp_path)
    lying(grid, rounds, lambda reply: scaled(reply, factor, "update/"))
    result, honest = run_on_nodes(made, grid), start(made)
    found = {reason: who for row in faults(result) for reason, who in row.items()}
    assert found
    for reason, who in found.items():
        assert reason.endswith("times as large as the median"), reason
        assert who == [1]
    norm, usual = (float(norms([v[None] for v in r.params.values()])[0]) for r in (result, honest))
    assert norm < 2 * usual


def test_a_round_of_outliers_alone_changes_nothing(tmp_path: Path) -> None:
    """It has not diverged: who sends what is too long ends no run."""
    made = prepared("fedavg", rounds=3, per_round=1, flower=QUICK, clients=federation(1))
    grid = grid_of(made, tmp_path)
    (node,) = grid.nodes
    grid.edits[node] = lambda kind, reply: (
        scaled(reply, 1e6) if kind == TRAIN and header_of(reply)["round"] == 1 else reply
    )
    rows = run_on_nodes(made, grid).rows[1:]
    assert [row.clients for row in rows] == [[0], [], [0]]
    assert [list(row.faults.values()) for row in rows] == [[], [[0]], []]


def test_a_resumed_run_judges_as_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered is in the checkpoint: the only reply of a round has nothing else."""
    made = prepared("fedavg", rounds=8, per_round=1, flower=QUICK, seed=1)
    train = NodeClients.train

    def begun(root: Path) -> InProcessGrid:
        grid = grid_of(made, root)
        for node in grid.nodes:
            grid.edits[node] = lambda kind, reply: (
                scaled(reply, 300.0) if kind == TRAIN and header_of(reply)["round"] == 7 else reply
            )
        return grid

    def killed(self: NodeClients, message: Message, *more: Any) -> TrainedCohort:
        if message.round == 7:
            raise TrainingError("stopped, with everything saved")
        return train(self, message, *more)

    whole = run_on_nodes(made, begun(tmp_path / "whole"))
    assert (len(whole.rows[-1].faults), whole.rows[-1].clients) == (1, [])
    grid, out = begun(tmp_path / "parts"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(NodeClients, "train", killed)
        with pytest.raises(TrainingError):
            run_on_nodes(made, grid, out)
    assert faults(run_on_nodes(made, grid, out, resume=True)) == faults(whole)


def test_what_honest_clients_send_is_no_outlier() -> None:
    """Also where sizes differ by much, change for all, or grow for one that others do not know."""
    random = np.random.default_rng(0)

    def run(rounds: int, of_round: int, spread: float, scale: Any) -> int:
        outliers, left_out = Outliers(1000.0, 20), 0
        own = np.exp(spread * random.normal(size=20))
        for number in range(rounds):
            clients = np.sort(random.permutation(20)[:of_round])
            noise = np.exp(0.2 * random.normal(size=of_round))
            sizes = {UPDATE: (own[clients] * noise * scale(number), OF_UPDATE)}
            left_out += len(outliers.judge(clients, sizes))
        return left_out

    for of_round in (1, 2, 5, 20):
        assert run(60, of_round, 1.0, lambda number: 0.95**number) == 0
        assert run(60, of_round, 0.3, lambda number: 1.0 + number) == 0
    assert run(60, 5, 0.3, lambda number: 1e4 if number > 30 else 1.0) == 0
    assert run(60, 1, 0.3, lambda number: 1e4 if number > 30 else 1.0) < 20  # then it is usual


def test_a_few_cannot_make_long_replies_usual() -> None:
    """Neither slowly nor at once: what counts is a median of clients, each once."""
    outliers, alike = Outliers(1000.0, 9), np.exp(0.3 * np.random.default_rng(1).normal(size=9))
    length, longest = 1.0, 0.0
    for number in range(200):
        client = number % 9 if number % 2 else 8  # the last one replies most often
        size = length if client == 8 else alike[client]
        reasons = outliers.judge(np.array([client]), {UPDATE: (np.array([size]), OF_UPDATE)})
        if client == 8:
            longest = longest if reasons else max(longest, length)
            length = length / 4 if reasons else length * 1.5
        else:
            assert reasons == {}
    assert 10.0 < longest < 150.0


def test_sizes_of_any_numbers() -> None:
    long = torch.full((2, 4), 1e200, dtype=torch.float64)
    assert norms([long, torch.zeros(2, 3, dtype=torch.float64)]).tolist() == [2e200, 2e200]
    assert norms([torch.full((1, 4), 1.7e308, dtype=torch.float64)]).tolist() == [math.inf]
    values = np.array([0.0, -1e9, math.inf, math.nan])
    ((sizes, _),) = number_sizes({"a loss": values}).values()
    assert sizes[:3].tolist() == [1.0, 1e9, math.inf]
    more = np.array([*values, 1.0, 2.0])
    assert set(Outliers(1000.0, 6).judge(np.arange(6), number_sizes({"a loss": more}))) == {1, 2}
