"""Which node plays which client, and which nodes are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import RecordDict

from fedkeel import config
from fedkeel.errors import RunError
from fedkeel.flower.protocol import DESCRIBE, Agreement
from fedkeel.flower.server import connection as connection_module
from fedkeel.flower.server import membership as membership_module
from fedkeel.flower.server.connection import NodeConnection
from fedkeel.flower.server.membership import ClientData, Membership
from fedkeel.flower.wire import HEADER, Header
from fedkeel.version import __version__ as VERSION
from in_process_grid import InProcessGrid, changed, header_of, make_nodes
from toys import federation, prepared

QUICK = config.Flower(deadline_seconds=0.2, poll_seconds=0.01)


def membership_of(grid: InProcessGrid, clients: int) -> Membership:
    return Membership(NodeConnection(grid, QUICK), QUICK, clients)


def never_enough(node_by_client: dict[int, int]) -> bool:
    return False


def test_a_client_belongs_to_the_node_that_is_there(tmp_path: Path) -> None:
    """A second node that says it plays it waits until the first is gone, and then has it."""
    made = prepared(clients=federation(2), per_round=2)
    first, second = make_nodes(made, tmp_path)
    grid = InProcessGrid(make_nodes(made, tmp_path))
    membership = membership_of(grid, 2)
    membership.refresh(0.1, never_enough)
    assert membership.node_by_client() == {0: first, 1: second}
    grid.nodes[5] = replace(grid.nodes[first], folder=tmp_path / "thief")
    membership.refresh(0.1, never_enough)
    assert membership.node_by_client() == {0: first, 1: second}
    del grid.nodes[first]
    membership.refresh(0.1, never_enough)
    assert membership.node_by_client() == {0: 5, 1: second}
    assert membership.clients_by_node([0, 1]) == {5: [0], second: [1]}
    assert membership.faults == []


def test_other_data_and_strange_numbers_are_turned_away(tmp_path: Path) -> None:
    made = prepared(clients=federation(3), per_round=2)
    grid = InProcessGrid(make_nodes(made, tmp_path, nodes=3))
    membership = membership_of(grid, 2)
    membership.refresh(0.1, never_enough)
    assert sorted(membership.node_by_client()) == [0, 1]
    assert any("it plays client 2, of 2" in words for words in membership.faults)
    membership = membership_of(grid, 3)
    digest = made.setup.federation.data.fingerprint()
    sizes = made.setup.federation.sizes
    membership.require(
        {
            0: ClientData(int(sizes[0]), digest),
            1: ClientData(int(sizes[1]) + 1, digest),
            2: ClientData(int(sizes[2]), "x"),
        }
    )
    membership.refresh(0.1, never_enough)
    assert sorted(membership.node_by_client()) == [0]
    assert sum("its data are not those" in words for words in membership.faults) == 2


def test_who_was_turned_away_is_asked_again_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed connected, so it was never asked again, whatever data it had by then."""
    made = prepared(clients=federation(2), per_round=2)
    grid = InProcessGrid(make_nodes(made, tmp_path))
    first, second = sorted(grid.nodes)
    asked = []

    def lies(kind: str, reply: RecordDict) -> RecordDict:
        asked.append(second)
        if len(asked) < 4:
            return changed(reply, data_digest="another")
        return reply

    grid.edits[second] = lies
    membership, now = membership_of(grid, 2), [100.0]
    digest, sizes = made.setup.federation.data.fingerprint(), made.setup.federation.sizes
    membership.require({k: ClientData(int(sizes[k]), digest) for k in range(2)})
    monkeypatch.setattr(membership_module.time, "monotonic", lambda: now[0])
    told = []
    for _ in range(40):
        membership.refresh(0.0, never_enough)
        told += membership.faults
        membership.faults.clear()
        now[0] += QUICK.deadline_seconds / 100
    assert membership.node_by_client() == {0: first, 1: second}
    assert len(asked) == 4  # every tenth of a deadline
    assert told == [
        f"node {second} was turned away: its data are not those that client 1 began with"
    ]


@pytest.mark.parametrize(
    ("field", "lie"),
    [
        ("train_examples", 10**12),
        ("train_examples", -1),
        ("test_examples", 2**62),
        ("shape", [10**9]),
        ("shape", [10**5, 10**5]),
        ("classes", 10**15),
        ("client", -1),
        ("name", "x" * 10**6),
    ],
)
def test_what_a_node_says_of_itself_is_bounded(tmp_path: Path, field: str, lie: object) -> None:
    """The server takes memory for it, where it has no data of its own."""
    made = prepared(clients=federation(2), per_round=2)
    grid = InProcessGrid(make_nodes(made, tmp_path, nodes=1))

    def lies(kind: str, reply: RecordDict) -> RecordDict:
        if field not in ("client", "train_examples", "test_examples"):
            return changed(reply, **{field: lie})
        clients = header_of(reply)["clients"]
        return changed(reply, clients=[{**clients[0], field: lie}, *clients[1:]])

    grid.edits[10**9] = lies
    membership = membership_of(grid, 2)
    membership.refresh(0.1, never_enough)
    assert membership.node_by_client() == {}
    assert len(membership.faults) == 1
    assert "was turned away" in membership.faults[0]


def test_nobody_there_is_said_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="clients of the federation are not there") as error:
        membership_of(InProcessGrid({}), 3).wait_for_clients(lambda count: count >= 2, "2 clients")
    assert len(error.value.lines()) <= 4
    words = "0 of 3 clients, without 0, 1, 2; no other node is connected"
    assert capsys.readouterr().out == f"waiting for nodes: {words}\n"  # and once alone


def test_nodes_that_are_connected_and_do_not_take_part_are_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said to start the SuperNodes, though all of them ran."""
    made = prepared(clients=federation(3), per_round=3)
    _, second, third = (found := make_nodes(made, tmp_path, nodes=3))
    grid = InProcessGrid(found)
    grid.edits[second] = lambda kind, reply: changed(reply, version="0.0.1")
    grid.edits[third] = lambda kind, reply: old_format(reply)
    with pytest.raises(RunError) as error:
        membership_of(grid, 3).wait_for_clients(lambda count: count == 3, "all 3")
    assert "1 of 3 clients, without 1, 2; " in str(error.value)
    words = f"node {second} was turned away: it has version 0.0.1 of fedkeel, the server {VERSION}"
    assert words in str(error.value)
    assert f"node {third} was turned away: A message was written by another" in str(error.value)
    assert "start the SuperNodes" not in str(error.value)


def test_another_model_or_experiment_is_turned_away_before_it_trains(tmp_path: Path) -> None:
    """It was found when the first round came back, in words that did not say which."""
    made = prepared(clients=federation(3), per_round=3)
    first, second, third = (found := make_nodes(made, tmp_path, nodes=3))
    grid, agreed = InProcessGrid(found), Agreement.of(made)
    grid.edits[second] = lambda kind, reply: disagrees(reply, model="x")
    grid.edits[third] = lambda kind, reply: disagrees(reply, experiment="x", model="y")
    membership = membership_of(grid, 3)
    membership.refresh(0.1, never_enough)
    assert sorted(membership.node_by_client()) == [
        0,
        1,
        2,
    ]  # where data are on the nodes, terms come later
    data = made.setup.federation.data.fingerprint()
    sizes = made.setup.federation.sizes
    membership.require({k: ClientData(int(n), data) for k, n in enumerate(sizes)}, agreed)
    assert membership.node_by_client() == {0: first}
    assert f"node {second} was turned away: it makes another model" in membership.faults[0]
    assert f"node {third} was turned away: it runs another experiment" in membership.faults[1]
    assert membership.absence_reason(1).startswith("turned away: it makes another model")
    grid.edits.pop(second)
    membership.refresh(0.1, never_enough)
    del grid.nodes[third]  # one that is gone is not connected, whatever it was
    membership.refresh(0.1, never_enough)
    assert membership.absence_reason(2) == "not connected"


def test_a_question_that_is_too_old_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was waited for, which Flower had thrown away, while the node's client was lost."""
    made = prepared(clients=federation(2), per_round=2)
    first, second = (found := make_nodes(made, tmp_path))
    grid, now = InProcessGrid(found), [100.0]
    monkeypatch.setattr(connection_module.time, "monotonic", lambda: now[0])
    connection = NodeConnection(grid, QUICK)
    hello = RecordDict({HEADER: Header().record()})
    orders = {first: hello, second: hello}
    grid.edits[second] = lambda kind, reply: None
    assert [one.node for one in connection.ask({first: hello}, DESCRIBE, lambda: True)] == []
    assert len(grid._replies) == 1
    now[0] += QUICK.deadline_seconds
    assert [one.node for one in connection.ask({first: hello}, DESCRIBE)] == [
        first
    ]  # the old answer
    list(connection.ask({second: hello}, DESCRIBE, lambda: True))
    pushed = len(grid.sizes), len(grid._replies)
    grid.edits.clear()
    now[0] += QUICK.deadline_seconds + connection_module.GRACE + 1
    assert sorted(one.node for one in connection.ask(orders, DESCRIBE)) == [first, second]
    assert pushed[1] == 1


def old_format(reply: RecordDict) -> RecordDict:
    reply[HEADER]["format"] = 1
    return reply


def disagrees(reply: RecordDict, **digests: str) -> RecordDict:
    return changed(reply, agreement={**header_of(reply)["agreement"], **digests})


def test_two_nodes_with_one_partition_id_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one waited without a word, and the advice was to start the nodes."""
    made = prepared(clients=federation(3), per_round=3)
    found = make_nodes(made, tmp_path, nodes=3)
    first, second, third = found
    grid = InProcessGrid({first: found[first], second: replace(found[first]), third: found[third]})
    words = f"nodes {first} and {second} both have partition-id 0"
    with pytest.raises(RunError, match=words) as error:
        membership_of(grid, 3).wait_for_clients(lambda count: count == 3, "all 3")
    assert "give each SuperNode a partition-id of its own" in str(error.value)
    assert len(error.value.lines()) <= 4
    assert capsys.readouterr().out == f"waiting for nodes: 2 of 3 clients, without 1; {words}\n"
    membership = membership_of(grid, 3)
    membership.wait_for_clients(lambda count: count >= 2, "at least 2")
    assert membership.faults == [words]  # which the first round's row says
    grid.nodes[second] = replace(found[first], clients=frozenset({0, 1}))
    with pytest.raises(RunError, match=f"nodes {first} and {second} both play client 0"):
        membership_of(grid, 3).wait_for_clients(lambda count: count == 3, "all 3")
