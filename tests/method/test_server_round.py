"""The server round: order, absent and broken replies, weights, buffers, memory."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.errors import CompositionError, TrainingError
from fedkeel.method.compose import Plan
from fedkeel.method.context import Population
from fedkeel.method.grammar import parse
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.roles import AggregateTransform, CohortTransform, ServerOptimiser, ServerState
from fedkeel.method.round_values import Replies, RoundResult, Server
from fedkeel.method.server_memory import server_start
from fedkeel.method.server_round import server_message, server_round
from fedkeel.task.network import Network
from fedkeel.tree import State, Tree
from harness import EVERYTHING, Federation, stack, toy_network
from method.players import (
    ENTRIES,
    contrary,
    copied,
    equal,
    federation,
    gap,
    normed,
    play,
    skewed,
)

CLIENTS = [0, 1, 2, 3]
WEIGHTS = ("examples", "processed", "uniform")


def begun(entry: str, **options: object) -> Federation:
    """A federation in which something has happened, and is remembered."""
    played = federation(entry, **options)
    played.round()
    played.round([0, 3])
    return played


def answers(played: Federation, clients: list[int]) -> Replies:
    found = {k: played.reply(k) for k in clients}
    replies = stack(clients, found, [len(played.data[k][1]) for k in clients])
    return played.with_root(replies, found)


@cache
def answered(entry: str, opposed: bool = False) -> tuple[Federation, Replies]:
    """A begun federation and the next replies of all; to make them takes most of a test's time."""
    played = begun(entry, data=contrary(4)) if opposed else begun(entry)
    return played, answers(played, CLIENTS)


def own(server: Server) -> Server:
    """The server with memory of its own: parts may change theirs in place."""
    return replace(server, memory={k: copied(v) for k, v in server.memory.items()})


def aggregate(played: Federation, replies: Replies, seed: int = 0) -> RoundResult:
    server = own(played.played.server)
    message = played.message(range(len(played.data)))
    known = played.remembered([int(k) for k in replies.clients])
    return server_round(played.plan, server, message, replies, played.population, seed, known)


def known(server: Server) -> State:
    return {
        "params": dict(server.params),
        "buffers": dict(server.buffers),
        "memory": dict(server.memory),
    }


def picked(replies: Replies, rows: list[int]) -> Replies:
    """Some of the replies, in that order."""
    index = torch.tensor(rows, dtype=torch.int64)

    def take(state: State) -> State:
        return tree.map_tensors(lambda t: t[index], state)

    return Replies(
        clients=replies.clients[rows],
        examples=replies.examples[rows],
        processed=replies.processed[rows],
        finite=replies.finite[rows],
        update=take(replies.update),
        buffers=take(replies.buffers),
        uploads=take(replies.uploads),
        root=replies.root,
    )


# --- who replies, and in what order ----------------------------------------------------------


@each("entry", ENTRIES)
def test_the_order_of_replies_does_not_matter(entry: str) -> None:
    played, replies = deepcopy(answered(entry, opposed=True))
    done = aggregate(played, replies)
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        again = aggregate(played, picked(replies, order))
        assert equal(known(again.server), known(done.server))
        assert again.diagnostics == done.diagnostics


@pytest.mark.parametrize(
    "weights",
    ["examples", *(pytest.param(w, marks=pytest.mark.slow) for w in ("processed", "uniform"))],
)
@each("entry", ENTRIES)
def test_replies_that_weigh_nothing_or_are_not_finite_change_nothing(
    entry: str, weights: str
) -> None:
    played = begun(entry, weights=weights)
    replies = answers(played, CLIENTS)
    few = aggregate(played, picked(replies, [0, 2]))
    garbage = tree.map_tensors(torch.clone, replies.update)
    for rows in garbage.values():
        rows[1], rows[3] = 1e9, float("nan")
    mixed = replace(
        replies,
        update=garbage,
        examples=replies.examples * np.array([1, 0, 1, 1]),
        processed=replies.processed * np.array([1, 0, 1, 1]),
        finite=np.array([True, True, True, False]),
    )
    done = aggregate(played, mixed)
    assert equal(known(done.server), known(few.server))
    assert done.diagnostics == few.diagnostics
    assert done.excluded == [3]
    assert few.excluded == []


@each("entry", ENTRIES)
def test_a_round_of_nobody_changes_only_the_round_number(entry: str) -> None:
    """Also where a part has it; MIFA makes a step, see its own test."""
    played, replies = deepcopy(answered(entry))
    nobody = picked(replies, [])
    weightless = replace(replies, examples=replies.examples * 0, processed=replies.processed * 0)
    before = known(own(played.played.server))
    if entry == "fedtrip":
        before["memory"]["fedtrip"]["round"] += 1.0
    for empty in (nobody, weightless):
        done = aggregate(played, empty)
        if entry == "mifa":
            assert gap(done.server.params, played.params) > 1e-3
            before["params"] = dict(done.server.params)
        assert equal(known(done.server), before)
        assert done.server.round == played.played.server.round + 1 == 3
        assert done.excluded == []
        assert entry in ("dpquantile", "mifa") or not done.diagnostics


def test_nobody_comes_where_mifa_makes_a_step_beside_others() -> None:
    """Server halves then see no update; those that go by what clients sent leave all as it was."""
    roles = AggregateTransform | CohortTransform | ServerOptimiser | ServerState
    stood = []
    for entry in ENTRIES:
        try:
            plan = parse(f"{entry}+mifa", EVERYTHING, "uniform")
        except CompositionError:
            continue
        if entry == "mifa" or not any(isinstance(part, roles) for part in plan.parts[:-1]):
            continue
        played = federation(f"{entry}+mifa", weights="uniform")
        played.round([])
        played.round([0, 1])
        before = known(own(played.played.server))
        played.round([])
        after = known(played.played.server)
        if equal(after["params"], before["params"]):
            stood.append(entry)
        played.round([1, 3])
        assert all(torch.isfinite(v).all() for v in played.params.values()), entry
    assert stood == ["fednova", "fedcm", "fedexp", "fedsmoo", "mofedsam", "fedmuon"]


def test_a_round_without_any_finite_reply_is_an_error_that_names_the_way_out() -> None:
    played = begun("fedavg")
    replies = answers(played, CLIENTS)
    with pytest.raises(TrainingError) as caught:
        aggregate(played, replace(replies, finite=np.zeros(4, dtype=bool)))
    text = str(caught.value)
    assert "diverged in round 3" in text
    assert "4 updates with NaN or infinity" in text
    assert "local.lr" in text
    assert len(text.splitlines()) <= 4


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
def test_clients_count_as_told(weights: str) -> None:
    """By examples owned, by examples processed, or equally; the mean by hand."""
    steps = {0: 1, 1: 3, 2: 2, 3: 5}
    played = federation("fedavg", weights=weights, batches=lambda k, _: [np.arange(4)] * steps[k])
    start = played.params
    counts = {
        "examples": [len(y) for _, y in skewed()],
        "processed": [4 * steps[k] for k in CLIENTS],
        "uniform": [1] * 4,
    }[weights]
    done = played.round()
    mean = {
        name: sum(c * done.deltas[k][name] for k, c in zip(CLIENTS, counts, strict=True))
        / sum(counts)
        for name in start
    }
    assert gap(tree.sub(played.params, start), mean) < 1e-13


def test_the_three_weights_differ() -> None:
    ends = [
        play("fedavg", weights=w, batches=lambda k, _: [np.arange(4)] * (k + 1)) for w in WEIGHTS
    ]
    assert all(gap(a, b) > 1e-3 for i, a in enumerate(ends) for b in ends[:i])


# --- buffers ---------------------------------------------------------------------------------


@each("weights", WEIGHTS)
@each("entry", ["fedavg", "fedgh", "gradma.s"])
def test_buffers_are_averaged_as_clients_count(entry: str, weights: str) -> None:
    """By the mean of the run's weights, whatever is done to the updates; of counts the largest."""
    steps = {0: 1, 1: 3, 2: 2, 3: 5}
    played = federation(
        entry,
        network=normed(),
        buffers="average",
        weights=weights,
        batches=lambda k, _: [np.arange(4)] * steps[k],
    )
    done = played.round()
    counts = {
        "examples": [len(y) for _, y in skewed()],
        "processed": list(steps.values()),
        "uniform": [1] * 4,
    }[weights]
    for name in ("norm.running_mean", "norm.running_var"):
        mean = sum(
            c * done.replies[k].buffers[name] for k, c in zip(CLIENTS, counts, strict=True)
        ) / sum(counts)
        torch.testing.assert_close(done.server.buffers[name], mean, rtol=0, atol=1e-14)
    tracked = done.server.buffers["norm.num_batches_tracked"]
    assert (int(tracked), tracked.dtype) == (5, torch.int64)
    message = server_message(played.plan, done.server, 0.1)
    assert equal(dict(message.buffers), dict(done.server.buffers))


def test_buffers_that_stay_local_are_the_clients_own() -> None:
    played = federation("fedavg", network=normed(), buffers="local")
    for _ in range(2):
        done = played.round()
    assert done.server.buffers == {}
    means = [tree.leaves(m, "buffers")["norm.running_mean"] for m in done.client_state.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(means) for b in means[:i])
    counts = [
        int(tree.leaves(m, "buffers")["norm.num_batches_tracked"])
        for m in done.client_state.values()
    ]
    assert counts == [2 * len(played.batches(k, 0)) for k in CLIENTS]


# --- memory and messages ---------------------------------------------------------------------


@each("entry", ENTRIES)
def test_no_reply_and_no_model_is_changed(entry: str) -> None:
    """Nor a memory, but those that a server optimiser updates in place."""
    played, replies = deepcopy(answered(entry, opposed=True))
    server = own(played.played.server)
    optimiser = played.plan.server_optimiser.name
    given: State = {
        "update": dict(replies.update),
        "uploads": dict(replies.uploads),
        "params": dict(server.params),
        "memory": {k: v for k, v in server.memory.items() if k != optimiser},
    }
    before = copied(given)
    message = played.message(range(len(played.data)))
    known = played.remembered([int(k) for k in replies.clients])
    server_round(played.plan, server, message, replies, played.population, 0, known)
    assert equal(given, before)


@each("entry", ENTRIES)
def test_memory_keeps_names_shapes_and_types(entry: str) -> None:
    def form(server: Server) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {path: (t.shape, t.dtype) for path, t in tree.walk(dict(server.memory))}

    played = federation(entry)
    forms = [form(played.played.server)]
    for selected in (CLIENTS, [2], CLIENTS):
        played.round(selected)
        forms.append(form(played.played.server))
    assert forms[0] == forms[1] == forms[2] == forms[3]


@each("entry", ENTRIES)
def test_clients_receive_the_model_and_what_parts_broadcast(entry: str) -> None:
    played = begun(entry)
    message = server_message(played.plan, played.played.server, 0.3)
    dispatch = played.plan.dispatch
    if dispatch is None:
        assert equal(message.params, played.params)
    else:
        memory = played.played.server.memory[dispatch.name]
        assert equal(message.params, dispatch.dispatch(played.params, memory, 0.3))
        assert not equal(message.params, played.params)
    assert list(message.broadcast) == [part.name for part in played.plan.broadcasts]
    assert (message.round, message.lr, message.buffers) == (2, 0.3, {})


def training_of(
    plan: Plan, network: Network | None = None, buffers: str = "refuse"
) -> ClientTraining:
    return ClientTraining(plan, network or toy_network(), Local(lr=0.1, epochs=1), buffers)


def test_the_first_server_is_a_copy_of_the_network() -> None:
    network = toy_network()
    server = server_start(training_of(parse("momentum"), network, "average"), Population(4, 4))
    assert equal(server.params, network.params)
    server.params["fc1.bias"].add_(1.0)
    assert not equal(server.params, network.params)
    assert server.round == 0


@pytest.mark.parametrize("entry", ["fedgh"])
def test_random_orders_belong_to_the_runs_seed_and_the_round(entry: str) -> None:
    played = begun(entry, data=contrary(6))
    replies = answers(played, list(range(6)))
    ends = [aggregate(played, replies, seed).server.params for seed in (0, 0, 1, 2, 3)]
    assert equal(ends[0], ends[1])
    assert any(not equal(ends[0], other) for other in ends[2:])


# --- GradMA's memory -------------------------------------------------------------------------


def test_a_memory_too_small_for_a_round_is_refused() -> None:
    plan = parse("gradma.s(memory=3)", EVERYTHING)
    with pytest.raises(CompositionError) as caught:
        server_start(training_of(plan), Population(10, 4))
    assert "memory=3 for 4 clients a round" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4
    server_start(training_of(plan), Population(10, 3))
    server_start(training_of(parse("gradma.s(memory=50)")), Population(4, 4))


def test_the_one_that_took_part_least_makes_room_and_among_equals_the_earliest() -> None:
    """Algorithm 4 with three slots: who is stored, and how often each has been counted."""
    played = federation("gradma.s(memory=3)", skewed((8,) * 6), per_round=2)
    story = [
        ([0, 1], {0: 1, 1: 1}),
        ([1, 2], {0: 1, 1: 2, 2: 1}),
        ([2, 3], {1: 2, 2: 2, 3: 1}),  # 0 goes, with the smallest count
        ([4, 5], {2: 2, 4: 1, 5: 1}),  # 3 goes for 4; then 1, stored earlier than 2, for 5
        ([0, 4], {0: 1, 2: 2, 4: 2}),  # 5 goes; 0 begins again at 1
    ]
    for selected, stored in story:
        played.round(selected)
        memory = played.played.server.memory["gradma.s"]
        workers, counts = memory["worker"].tolist(), memory["count"].tolist()
        assert {w: c for w, c in zip(workers, counts, strict=True) if w >= 0} == stored


def test_who_comes_back_finds_no_memory_of_the_time_before_it_left() -> None:
    """With two slots 2 takes that of 0, and 0 that of 2; 1 stays and fades by half each round."""
    played = federation("gradma.s(memory=2, beta2=0.5)", skewed((8,) * 3), per_round=1)
    told: dict[int, list[Tree]] = {0: [], 1: [], 2: []}
    for client in (0, 1, 1, 2, 0):
        told[client].append(played.round([client]).deltas[client])
    faded = tree.scale(tree.add(told[1][1], told[1][0], 0.5), 0.25)
    memory = played.played.server.memory["gradma.s"]
    rows, scale = tree.leaves(memory, "rows"), tree.leaf(memory, "scale")
    workers = tree.leaf(memory, "worker").tolist()
    assert sorted(workers) == [0, 1]
    for client, expected in ((0, told[0][1]), (1, faded)):
        slot = workers.index(client)
        assert gap({k: v[slot] * scale[slot] for k, v in rows.items()}, expected) < 1e-13
