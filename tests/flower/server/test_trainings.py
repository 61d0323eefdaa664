"""A server that does not wait for its nodes: late replies are used, whatever else goes wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict

import fedkeel as fk
from fedkeel.config import Flower
from fedkeel.errors import CompositionError, ConfigError, TrainingError
from fedkeel.features.time.trainings import Event, VirtualTrainings
from fedkeel.flower.protocol import TRAIN, Request
from fedkeel.flower.strategy import Method
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.features import check_nodes
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from in_process_grid import (
    InProcessGrid,
    changed,
    header_of,
    make_nodes,
    node_clients,
    run_on_nodes,
)
from toys import prepared

QUICK = Flower(deadline_seconds=60.0, poll_seconds=0.001)
SLOW = fk.System(speed="lognormal", sigma=1.0, step_seconds=1.0)


@dataclass
class OrderedGrid(InProcessGrid):
    """Hands out replies to training in a given order, one at a time.

    Args:
        order: clients, as their replies are to come; whoever was asked first comes after them.
    """

    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._client_of: dict[str, int] = {}
        self.most_on_their_way = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        numbers = list(super().push_messages(messages))
        for number, message in zip(numbers, messages, strict=True):
            if message.metadata.message_type == TRAIN:
                (self._client_of[number],) = Request.read(message.content).client_ids
        self.most_on_their_way = max(self.most_on_their_way, len(self._client_of))
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        numbers = list(message_ids)
        waiting = {self._client_of[n]: n for n in numbers if n in self._client_of}
        replies = list(super().pull_messages(n for n in numbers if n not in self._client_of))
        if not self.order:
            self.order = list(waiting)[:1]
        if self.order and self.order[0] in waiting:
            number = waiting[self.order.pop(0)]
            del self._client_of[number]
            replies += super().pull_messages([number])
        return replies


class Recorded(VirtualTrainings):
    """Trainings that note in which order they end."""

    order: ClassVar[list[int]] = []

    def ended(self, idle: np.ndarray) -> Iterator[Event]:
        for event in super().ended(idle):
            self.order.append(event.client)
            yield event


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients of simulations, as their trainings end."""
    monkeypatch.setattr(Recorded, "order", [])
    monkeypatch.setattr("fedkeel.features.time.feature.VirtualTrainings", Recorded)
    return Recorded.order


@pytest.mark.parametrize(
    "method", ["fedasync", "scaffold+fedbuff(buffer=2)", "fedprox+topk+fedbuff(buffer=3)"]
)
def test_the_same_order_gives_the_bits_of_the_simulation(
    method: str, order: list[int], tmp_path: Path
) -> None:
    given = {"dtype": "float64", "per_round": 4, "rounds": 8, "weights": "uniform"}
    local = start(prepared(method, system=SLOW, **given))
    run = prepared(method, flower=QUICK, **given)
    grid = OrderedGrid(make_nodes(run, tmp_path), order=list(order))
    remote = run_on_nodes(run, grid)
    assert grid.most_on_their_way == 4
    assert max(max(row.staleness, default=0) for row in remote.rows) >= 1
    for mine, other in zip(local.rows, remote.rows, strict=True):
        assert (mine.clients, mine.staleness) == (other.clients, other.staleness)
        assert (mine.test, mine.train_loss) == (other.test, other.train_loss)
        assert len(other.staleness_seconds) == len(other.staleness)
        assert (other.virtual_seconds, other.faults) == (None, {})
    assert all(torch.equal(local.params[k], remote.params[k]) for k in local.params)


# --- faults ----------------------------------------------------------------------------------

IMPATIENT = Flower(deadline_seconds=0.4, poll_seconds=0.001, quorum=0.5)


def faults(result: Result) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for row in result.rows:
        for reason, clients in row.faults.items():
            found.setdefault(reason, set()).update(clients)
    return found


def test_a_client_that_never_replies_gives_its_place_to_another(tmp_path: Path) -> None:
    run = prepared("fedbuff(buffer=2)", per_round=1, rounds=8, flower=IMPATIENT)
    grid = InProcessGrid(make_nodes(run, tmp_path, nodes=6))
    silent = sorted(grid.nodes)[2]
    grid.edits[silent] = lambda kind, reply: None if kind == TRAIN else reply
    result = run_on_nodes(run, grid)
    assert [len(row.clients) for row in result.rows[1:]] == [2] * 8
    assert all(2 not in row.clients for row in result.rows)
    assert faults(result) == {"no reply before the deadline": {2}}


def test_a_step_is_made_of_a_quorum_where_no_more_can_come(tmp_path: Path) -> None:
    run = prepared("fedbuff(buffer=4)", per_round=6, rounds=2, flower=IMPATIENT)
    grid = InProcessGrid(make_nodes(run, tmp_path, nodes=6))
    for node in sorted(grid.nodes)[:3]:
        grid.edits[node] = lambda kind, reply: None if kind == TRAIN else reply
    result = run_on_nodes(run, grid)
    assert [row.clients for row in result.rows[1:]] == [[3, 4, 5]] * 2
    for node in sorted(grid.nodes)[3:5]:
        grid.edits[node] = grid.edits[sorted(grid.nodes)[0]]
    with pytest.raises(TrainingError, match="no quorum") as error:
        run_on_nodes(run, grid)
    assert "1 of 4 updates" in str(error.value)


def test_wrong_replies_are_left_out_and_second_ones_dropped(tmp_path: Path) -> None:
    """Node 0 replies for another round, node 1 sends each reply twice, and node 2 sends NaN."""
    run = prepared("scaffold+fedbuff(buffer=2)", per_round=3, rounds=12, flower=IMPATIENT)
    grid = TwiceGrid(make_nodes(run, tmp_path, nodes=6))
    first, second, third = sorted(grid.nodes)[:3]
    grid.edits[third] = lambda kind, reply: not_finite(reply) if kind == TRAIN else reply
    grid.edits[first] = lambda kind, reply: (
        changed(reply, round=header_of(reply)["round"] + 1) if kind == TRAIN else reply
    )
    grid.twice = second
    result = run_on_nodes(run, grid)
    assert all({0, 2}.isdisjoint(row.clients) for row in result.rows)
    assert any(1 in row.clients for row in result.rows)
    found = faults(result)
    assert found.pop("sent NaN or infinity") == {2}
    assert all(reason.startswith("A reply belongs to another round") for reason in found)
    assert set().union(*found.values()) == {0}


def not_finite(reply: RecordDict) -> RecordDict:
    (name,) = [key for key in reply if key.startswith("tensors-")]
    arrays = {k: Array(array.numpy() * np.nan) for k, array in reply[name].items()}
    return RecordDict({**reply, name: ArrayRecord(arrays)})


@dataclass
class TwiceGrid(InProcessGrid):
    """Hands out the replies of one node twice, the second time with the next call."""

    twice: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._again: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        again, replies = self._again, list(super().pull_messages(message_ids))
        self._again = [m for m in replies if m.metadata.src_node_id == self.twice]
        return replies + again


def test_a_lost_state_begins_the_method_anew_for_those_that_train(
    order: list[int], tmp_path: Path
) -> None:
    """Whoever trains meanwhile has a state whose change no longer fits the server's sum."""
    given = {"per_round": 4, "rounds": 12, "weights": "uniform"}
    start(prepared("scaffold+fedbuff(buffer=1)", system=SLOW, **given))
    run = prepared("scaffold+fedbuff(buffer=1)", flower=QUICK, **given)
    grid = OrderedGrid(make_nodes(run, tmp_path), order=list(order))
    engine = node_clients(run, grid, QUICK)

    class Loses(Callback):
        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            if row.round == 4:
                grid.order.clear()
                for file in tmp_path.rglob("*.safetensors"):
                    file.unlink()

    result = start(run, None, engine=engine, callbacks=[Loses()])
    found = faults(result)
    assert found.keys() == {
        "lost its client state; the method begins anew",
        "began before a client lost its state: dropped",
    }
    assert len(result.rows) == 13


# --- going on --------------------------------------------------------------------------------


class KilledError(Exception):
    pass


class Killed(Callback):
    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == 5:
            raise KilledError


def test_a_server_that_was_killed_asks_again_and_finds_the_states(tmp_path: Path) -> None:
    run = prepared("scaffold+fedbuff(buffer=2)", per_round=4, rounds=9, flower=QUICK)
    nodes = make_nodes(run, tmp_path / "nodes")
    engine = node_clients(run, InProcessGrid(nodes), QUICK)
    with pytest.raises(KilledError):
        start(run, tmp_path / "run", engine=engine, callbacks=[Killed()])
    saved = RunFolder(tmp_path / "run").load()
    assert saved is not None
    assert not any(name.startswith("versions/") for name in saved.arrays)
    again = run_on_nodes(run, InProcessGrid(nodes), tmp_path / "run", resume=True)
    assert [row.round for row in again.rows] == list(range(10))
    assert faults(again) == {}
    assert again.rows[saved.round + 1].staleness == [0, 0]  # what was on its way is forgotten


# --- what is refused -------------------------------------------------------------------------


def test_what_does_not_go_with_nodes_or_with_rounds_is_refused() -> None:
    with pytest.raises(CompositionError, match="fedbuff cannot be run with secure aggregation"):
        prepared("fedbuff(buffer=2)", flower=Flower(secure_aggregation=True))
    with pytest.raises(CompositionError, match="does not wait for the clients"):
        Method("fedbuff(buffer=2)", clients=4)
    by_losses = prepared(cohort=fk.Cohort(clients=2, sampling="oort")).settings
    with pytest.raises(ConfigError, match="cohorts of nodes depend only on the seed"):
        check_nodes(by_losses)
    with pytest.raises(ConfigError, match="Virtual time is for simulations"):
        check_nodes(prepared("fedasync", system=SLOW).settings)
    with pytest.raises(ConfigError, match="never leaves its node"):
        check_nodes(prepared("fedper", client_models="all").settings)
