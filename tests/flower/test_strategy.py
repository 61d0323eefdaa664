"""The server's half of a method, behind Flower's own messages."""

from __future__ import annotations

import math
import re
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy.multikrum import select_multikrum

from fedkeel.errors import CompositionError, RunError
from fedkeel.flower.local.processes import NAME, FlowerProcesses
from fedkeel.flower.strategy import Method
from harness import toy_network
from in_process_grid import InProcessGrid, across
from toys import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_strategy"
LAST = 2**64 - 33
COUNTS = {11: 30, 2**63 + 22: 10, LAST: 20}
"""Examples by node: ids are whole numbers of 64 bits, without a sign."""


class Plain(InProcessGrid):
    """Nodes that add what they are told to the model they receive, and say how many examples."""

    def __init__(self, moves: dict[int, dict[str, np.ndarray]]) -> None:
        super().__init__(nodes={})
        self.moves = moves
        self.losses: dict[int, float] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.moves)[::-1]

    def _reply(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        arrays = across(message.content)["arrays"].to_numpy_ndarrays(keep_input=True)
        names = list(message.content["arrays"])
        moved = {k: a + self.moves[node].get(k, 0) for k, a in zip(names, arrays, strict=True)}
        state = {k: torch.from_numpy(np.asarray(v)) for k, v in moved.items()}
        content = RecordDict(
            {
                "arrays": ArrayRecord(state),
                "metrics": MetricRecord(
                    {"num-examples": COUNTS[node], "loss": self.losses.get(node, 1.0)}
                ),
            }
        )
        return [Message(across(content), reply_to=_from(message, node))]


def _from(message: Message, node: int) -> Message:
    message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
    return message


def moves(seed: int = 0) -> dict[int, dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    params = toy_network().params
    return {node: {k: random.normal(size=v.shape) for k, v in params.items()} for node in COUNTS}


def played(method: str, told: dict[int, dict[str, np.ndarray]], rounds: int = 2) -> Method:
    strategy = Method(method, clients=3, fraction_evaluate=0.0)
    arrays = ArrayRecord({**toy_network().params, "count": torch.tensor(3)})
    grid = Plain(told)
    for number in range(1, rounds + 1):
        sent = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        replies = [reply for message in sent for reply in grid._reply(message)]
        found, metrics = strategy.aggregate_train(number, replies)
        assert found is not None
        assert metrics is not None
        arrays = found
    assert int(arrays["count"].numpy()) == 3
    strategy.last = {k: a.numpy() for k, a in arrays.items()}  # type: ignore[attr-defined]
    return strategy


def test_fedavg_is_the_weighted_mean() -> None:
    told = moves()
    last = played("fedavg", told, rounds=1).last
    total = sum(COUNTS.values())
    for name, start in toy_network().params.items():
        mean = sum(COUNTS[n] / total * told[n][name] for n in COUNTS)
        assert np.allclose(last[name], start.numpy() + mean, rtol=0, atol=1e-12)


def test_momentum_goes_on() -> None:
    told = moves()
    last = played("momentum(beta=0.5)", told, rounds=3).last
    total = sum(COUNTS.values())
    for name, start in toy_network().params.items():
        mean = sum(COUNTS[n] / total * told[n][name] for n in COUNTS)
        gone = (1 + 1.5 + 1.75) * mean
        assert np.allclose(last[name], start.numpy() + gone, rtol=0, atol=1e-12)


def test_multi_krum_counts_those_equally_that_flower_chooses_too() -> None:
    """Flower's own strategy then takes their mean by examples."""
    told, start = moves(), toy_network().params
    models = [
        ArrayRecord({k: v + torch.from_numpy(told[n][k]) for k, v in start.items()}) for n in COUNTS
    ]
    contents = [RecordDict({"arrays": model}) for model in models]
    chosen = [contents.index(c) for c in select_multikrum(contents, 0, 2)]
    assert len(set(chosen)) == 2
    last = played("multikrum(beta=0.0, keep=2)", told, rounds=1).last
    for name, value in start.items():
        mean = np.mean([told[list(COUNTS)[i]][name] for i in chosen], axis=0)
        assert np.allclose(last[name], value.numpy() + mean, rtol=0, atol=1e-12)


def test_a_round_without_usable_replies_counts() -> None:
    """MIFA makes a step in it, along the mean of the last updates; others leave the model."""
    told = moves()
    for method, steps in (("mifa", 2), ("fedvarp", 1)):
        strategy = played(method, told, rounds=1)
        found, metrics = strategy.aggregate_train(2, [])
        assert metrics is None
        assert strategy._server.round == 2
        for name, start in toy_network().params.items():
            mean = sum(told[n][name] for n in COUNTS) / len(COUNTS)
            assert np.allclose(
                found[name].numpy(), start.numpy() + steps * mean, rtol=0, atol=1e-12
            )


def test_a_second_start_begins_from_the_arrays_that_it_is_given() -> None:
    """It went on from the model, the momenta and the faults of the first one."""
    told, strategy = moves(), Method("momentum+fedvarp", clients=3, fraction_evaluate=0.0)
    found = []
    for scale in (5.0, 1.0):
        arrays = ArrayRecord({k: scale * v for k, v in toy_network().params.items()})
        lost = {**told, LAST: {k: v * np.inf for k, v in told[LAST].items()}}
        result = strategy.start(Plain(lost if scale > 1 else told), arrays, num_rounds=2)
        found.append((result.arrays, dict(strategy.faults)))
    fresh = Method("momentum+fedvarp", clients=3, fraction_evaluate=0.0)
    arrays = ArrayRecord(dict(toy_network().params))
    expected = fresh.start(Plain(told), arrays, num_rounds=2).arrays
    (first, _), (second, faults) = found
    assert faults == {}
    for name in toy_network().params:
        assert np.array_equal(second[name].numpy(), expected[name].numpy())
        assert not np.array_equal(first[name].numpy(), expected[name].numpy())


@pytest.mark.parametrize("method", ["fedgh", "fedadam", "median", "globalgc", "fedvarp", "mifa"])
def test_methods_of_the_server_run(method: str) -> None:
    strategy = played(method, moves())
    assert strategy.faults == {}
    assert all(np.isfinite(a).all() for a in strategy.last.values())


@pytest.mark.parametrize(
    ("method", "equally"), [("fedadam(lr=1.0)", False), ("momentum", False), ("median", True)]
)
def test_running_statistics_are_averaged_as_clients_count(method: str, equally: bool) -> None:
    """Adam's steps took variances below 0: the model was NaN where it is evaluated."""
    told = moves()
    statistics = {"norm.running_mean": torch.zeros(3), "norm.running_var": torch.full((3,), 0.1)}
    for number, node in enumerate(COUNTS):
        told[node]["norm.running_var"] = np.full(3, -0.05 - 0.01 * number, dtype=np.float32)
    strategy = Method(method, clients=3, fraction_evaluate=0.0)
    arrays, grid = ArrayRecord({**toy_network().params, **statistics}), Plain(told)
    sent = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    replies = [reply for message in sent for reply in grid._reply(message)]
    found, _ = strategy.aggregate_train(1, replies)
    assert found is not None
    weights = [1] * 3 if equally else list(COUNTS.values())
    mean = 0.05 - sum(0.01 * i * n / sum(weights) for i, n in enumerate(weights))
    assert np.allclose(found["norm.running_var"].numpy(), mean, atol=1e-6)
    assert np.array_equal(found["norm.running_mean"].numpy(), np.zeros(3))


def test_a_round_that_leaves_nothing_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It ended the app, and with it the model of all rounds before."""
    told = {node: {k: v * np.nan for k, v in own.items()} for node, own in moves().items()}
    strategy = Method("momentum", clients=3, fraction_evaluate=0.0)
    arrays = ArrayRecord(dict(toy_network().params))
    with caplog.at_level("WARNING", logger="flwr"):
        result = strategy.start(Plain(told), arrays, num_rounds=2)
    assert "round 2 changes nothing: " in caplog.text
    assert set(strategy.faults[2]) == set(COUNTS)
    for name, value in toy_network().params.items():
        assert np.array_equal(result.arrays[name].numpy(), value.numpy())


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "gcfed", "fedgc", "topk", "mime"])
def test_methods_that_change_clients_are_refused(method: str) -> None:
    with pytest.raises(CompositionError, match="needs more of the clients than their models"):
        Method(method, clients=3)


def test_what_is_not_finite_or_of_another_form_is_left_out() -> None:
    told = moves()
    alone = {node: told[node] for node in list(COUNTS)[:2]}
    told[LAST] = {k: v * np.inf for k, v in told[LAST].items()}
    found = played("fedavg", told, rounds=1)
    expected = played("fedavg", alone, rounds=1)
    for name in toy_network().params:
        assert np.allclose(found.last[name], expected.last[name], rtol=0, atol=1e-12)
    told = moves()
    told[LAST] = {"fc1.bias": np.zeros((2, 6))}  # broadcasts to another shape
    found = played("fedavg", told, rounds=1)
    assert "has another shape or type" in found.faults[1][LAST]
    for name in toy_network().params:
        assert np.allclose(found.last[name], expected.last[name], rtol=0, atol=1e-12)


def test_who_is_left_out_is_named_and_its_metrics_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """A model that was not finite was left out without a word, and its loss was not."""
    told = moves()
    told[LAST] = {k: v * np.nan for k, v in told[LAST].items()}
    grid, strategy = Plain(told), Method("fedavg", clients=3, fraction_evaluate=0.0)
    grid.losses = {LAST: math.nan}
    arrays = ArrayRecord(dict(toy_network().params))
    with caplog.at_level("WARNING", logger="flwr"):
        sent = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
        replies = [reply for message in sent for reply in grid._reply(message)]
        _, metrics = strategy.aggregate_train(1, replies)
    assert metrics is not None
    assert metrics["loss"] == pytest.approx(1.0)
    assert strategy.faults == {1: {LAST: "sent NaN or infinity"}}
    assert f"round 1: node {LAST} is left out: sent NaN or infinity" in caplog.text


def test_the_outlier_factor_decides_what_is_left_out() -> None:
    told = moves()
    told[LAST] = {name: 50.0 * update for name, update in told[LAST].items()}
    grid, arrays = Plain(told), ArrayRecord(dict(toy_network().params))
    strategy = Method("fedavg", clients=3, outlier_factor=10.0)
    with pytest.warns(FutureWarning, match="'screen' is now called 'outlier_factor'"):
        old_name = Method("fedavg", clients=3, screen=10.0)
    for method in (strategy, old_name):
        sent = list(method.configure_train(1, arrays, ConfigRecord(), grid))
        method.aggregate_train(1, [reply for message in sent for reply in grid._reply(message)])
        assert "times as large as the median" in method.faults[1][LAST]


def test_a_node_that_comes_back_takes_the_place_of_one_that_is_gone() -> None:
    told = moves()
    strategy, grid = Method("fedavg", clients=3), Plain(told)
    arrays = ArrayRecord(dict(toy_network().params))

    def asked() -> list[int]:
        sent = strategy.configure_train(1, arrays, ConfigRecord(), grid)
        return [message.metadata.dst_node_id for message in sent]

    assert asked() == sorted(COUNTS)
    grid.moves = {44: told[LAST], **{node: told[node] for node in list(COUNTS)[:2]}}
    assert asked() == [11, 44, 2**63 + 22]
    grid.moves = {**grid.moves, 55: {}}
    assert asked() == [11, 44, 2**63 + 22]  # there are three clients


def test_too_few_nodes_are_waited_for_and_not_for_ever() -> None:
    strategy = Method("fedavg", clients=3, wait=0.3)
    arrays = ArrayRecord(dict(toy_network().params))
    with pytest.raises(RunError, match="are not there") as error:
        strategy.configure_train(1, arrays, ConfigRecord(), Plain({11: {}}))
    assert len(error.value.lines()) <= 4


def test_the_same_nodes_in_every_run() -> None:
    grid, chosen = Plain(moves()), []
    for _ in range(2):
        strategy = Method("fedavg", clients=3, fraction_train=0.34, min_train_nodes=1)
        arrays = ArrayRecord(dict(toy_network().params))
        rounds = [strategy.configure_train(r, arrays, ConfigRecord(), grid) for r in range(1, 9)]
        chosen.append([[m.metadata.dst_node_id for m in sent] for sent in rounds])
    assert chosen[0] == chosen[1]
    assert {node for (node,) in chosen[0]} == set(COUNTS)


@pytest.mark.processes
def test_the_example_runs_as_it_is_submitted(federation: FlowerProcesses, patience: float) -> None:
    """By `flwr run`, on a SuperLink and two SuperNodes."""
    run = federation.submit(EXAMPLE, {"method": "fedgh+momentum"})
    assert eventually(lambda: federation.status(run).startswith("finished"), 20 * patience)
    said = federation.flwr("log", str(run), NAME, "--show")
    assert federation.status(run) == "finished:completed", said
    scores = [float(one) for one in re.findall(r"round \d: accuracy ([0-9.]+)", said)]
    assert len(scores) == 2, said
    assert scores[1] > 0.1


@pytest.mark.slow
def test_the_example_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own client and its own strategy, through Flower's records."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("client", "server"):
        sys.modules.pop(name, None)
    import client

    class Clients(Plain):
        def _reply(self, message: Message) -> list[Message]:
            node = message.metadata.dst_node_id
            config = {"partition-id": list(COUNTS).index(node), "num-partitions": 2}
            context = Context(1, node, config, RecordDict(), {})
            act = client.train if message.metadata.message_type == "train" else client.evaluate
            message = _from(message, node)
            return [Message(across(act(message, context).content), reply_to=message)]

    torch.manual_seed(0)
    grid = Clients({node: {} for node in list(COUNTS)[:2]})
    strategy = Method("fedgh+momentum", clients=2)
    arrays, scores = ArrayRecord(client.net().state_dict()), []
    for number in range(1, 9):
        sent = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        found, _ = strategy.aggregate_train(number, [r for m in sent for r in grid._reply(m)])
        assert found is not None
        arrays = found
        asked = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
        said = strategy.aggregate_evaluate(number, [r for m in asked for r in grid._reply(m)])
        assert said is not None
        scores.append(float(said["accuracy"]))
    assert scores[-1] > max(0.5, scores[0])
