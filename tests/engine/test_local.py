"""One client's round: what it draws, what it reports, and what it says when something breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.evaluation import cut_into_shards, evaluate, split_examples
from fedkeel.engine.local import train_client
from fedkeel.engine.message_state import message_from_state, message_state
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.rehearsal import rehearse
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.trainer import SequentialTrainer
from fedkeel.engine.vectorized.single_process import SingleProcess
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method.context import Message
from fedkeel.method.parts.fedprox import FedProx
from fedkeel.method.server_round import server_message
from fedkeel.runner.start import start
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.task.network import Network
from toys import MODELS, NaN, Net, Raises, federation, held, prepared, same


def message(ready: Prepared) -> Message:
    return server_message(ready.plan, ready.server, ready.setup.training.local.lr)


def update(ready: Prepared, client: int = 2, round: int = 0, seed: int = 0) -> dict[str, Tensor]:
    sent = replace(message(ready), round=round)
    setup = replace(ready.setup, seed=seed)
    return train_client(setup, sent, ClientJob(0, client, 0), None).reply.update


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


# --- what a round is ------------------------------------------------------------------------------


def test_steps_and_examples_are_counted() -> None:
    ready = prepared()  # two epochs, batches of 4
    for client, n in enumerate(ready.setup.federation.sizes):
        result = train_client(ready.setup, message(ready), ClientJob(0, client, 0), None)
        assert (result.steps, result.examples) == (2 * -(-n // 4), 2 * n)
    result = train_client(ready.setup, message(ready), ClientJob(0, 3, 0), None, limit=1)
    assert (result.steps, result.examples) == (1, 4)


@pytest.mark.parametrize("model", MODELS)
def test_a_client_draws_from_its_own_streams(model: str) -> None:
    """By seed, round and client; from nothing that happened before."""
    local = fk.Local(lr=0.05, epochs=2, batch_size=4, drop_last="single")
    ready = prepared(model=MODELS[model], buffers="average", local=local)
    first = update(ready)
    torch.manual_seed(12345)
    np.random.seed(12345)
    state = torch.random.get_rng_state()
    assert equal(first, update(ready))
    assert torch.equal(state, torch.random.get_rng_state())  # and leaves no trace
    assert not equal(first, update(ready, round=1))
    assert not equal(first, update(ready, seed=1))


def test_dropout_differs_from_step_to_step_and_client_to_client() -> None:
    plain, dropped = prepared(), prepared(model=MODELS["dropout"])
    assert not equal(update(plain), update(dropped))


def test_images_are_cropped_anew_in_every_round() -> None:
    x = torch.rand(12, 1, 8, 8)
    data = fk.federation(fk.dataset(x, [0, 1, 2] * 4), [np.arange(12)])
    model = partial(nn.Sequential, nn.Flatten(), nn.Linear(64, 3))
    ready = prepared(
        model=model,
        clients=data,
        per_round=1,
        test=fk.dataset(x, [0, 1, 2] * 4),
        local=fk.Local(lr=0.1, steps=1, batch_size="all"),
    )
    before = data.data.x.clone()
    still = update(ready, client=0)
    assert equal(still, update(ready, client=0, round=1))
    moving = replace(ready, setup=replace(ready.setup, augment=True))
    one, two = update(moving, client=0), update(moving, client=0, round=1)
    assert not equal(still, one)
    assert not equal(one, two)
    assert equal(one, update(moving, client=0))
    assert torch.equal(before, data.data.x)


def test_a_client_goes_on_where_it_stopped() -> None:
    local = fk.Local(lr=0.05, steps=2, batch_size=4)
    ready = prepared(local=local)
    first = train_client(ready.setup, message(ready), ClientJob(0, 5, 0), None).reply.update
    again = train_client(ready.setup, message(ready), ClientJob(0, 5, 2), None).reply.update
    assert not equal(first, again)


# --- errors name client, step and part ------------------------------------------------------------


def test_an_error_names_client_and_step() -> None:
    ready = prepared(model=Raises, clients=federation(marked=3))
    with pytest.raises(TrainingError, match=r"failed at client 3, step 1\.") as found:
        train_client(ready.setup, message(ready), ClientJob(0, 3, 0), None)
    assert found.value.got == "ArithmeticError: this example is marked"
    assert "toys.py" in found.value.why
    assert isinstance(found.value.__cause__, ArithmeticError)


def test_an_error_names_the_step_at_which_it_happened() -> None:
    clients = federation()
    rows = clients.client(5)
    clients.data.x[rows[7], 0] = 100.0
    ready = prepared(model=Raises, clients=clients)
    with pytest.raises(TrainingError, match=r"client 5, step [2-5]\."):
        train_client(ready.setup, message(ready), ClientJob(0, 5, 0), None)


def test_an_error_names_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepared("fedprox")

    def broken(self: FedProx, params: object, step: object) -> object:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(FedProx, "penalty_gradient", broken)
    with pytest.raises(TrainingError, match=r"client 1, step 1, in fedprox\.") as found:
        train_client(ready.setup, message(ready), ClientJob(0, 1, 0), None)
    assert "test_local.py" in found.value.why


def test_an_error_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepared("scaffold")

    def broken(self: object, start: object) -> object:
        raise RuntimeError

    part = type(ready.plan.parts[0])
    monkeypatch.setattr(part, "init_client", broken)
    with pytest.raises(TrainingError, match=r"client 1, before its first step, in scaffold\."):
        train_client(ready.setup, message(ready), ClientJob(0, 1, 0), None)


def test_a_user_can_act_on_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What says already what is wrong is passed on as it is."""
    ready = prepared("fedprox")

    def broken(self: FedProx, params: object, step: object) -> object:
        raise FedkeelError("This is what to do.")

    monkeypatch.setattr(FedProx, "penalty_gradient", broken)
    with pytest.raises(FedkeelError, match=r"^This is what to do\.$"):
        train_client(ready.setup, message(ready), ClientJob(0, 1, 0), None)


def test_a_model_that_cannot_train_is_found_before_the_run() -> None:
    """One step of the first client is rehearsed, whatever evaluation says."""

    class Trains(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("no training mode\nsecond line")
            return Net.forward(self, x)

    with pytest.raises(TrainingError, match="client 0, step 1") as found:
        prepared(model=Trains)
    assert found.value.got == "RuntimeError: no training mode"
    assert len(found.value.lines()) <= 4


# --- replies --------------------------------------------------------------------------------------


def test_a_reply_that_is_not_finite_says_so() -> None:
    ready = prepared(model=NaN, clients=federation(marked=2))
    for client, finite in ((1, True), (2, False)):
        reply = train_client(ready.setup, message(ready), ClientJob(0, client, 0), None).reply
        assert bool(reply.finite) is finite


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova", "gradma", "fedgc"])
def test_a_message_passes_through_shared_memory(method: str) -> None:
    ready = prepared(method, MODELS["norm"], buffers="average", local=fk.Local(lr=0.1, epochs=1))
    sent = message(ready)
    again = message_from_state(message_state(sent), sent.round, sent.lr)
    assert list(again.params) == list(sent.params)
    assert list(again.buffers) == list(sent.buffers)
    assert again.broadcast == sent.broadcast
    assert again == sent


@pytest.mark.parametrize("kind", ["sequential", "buffers"])
def test_a_part_whose_reply_changes_its_form_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared("scaffold")
    part = type(ready.plan.parts[0])
    upload = part.upload

    def odd(self: object, round: object) -> dict[str, object]:
        sent = dict(upload(self, round))
        return {**sent, "more": torch.zeros(())} if round.client_info.client == 4 else sent

    monkeypatch.setattr(part, "upload", odd)
    if kind == "sequential":
        engine = Sequential(ready.setup, ready.spec, 4)
    else:
        engine = SingleProcess(ready.setup, ready.spec, 4, SequentialTrainer(ready.setup))
    engine.train(message(ready), np.array([1]), print)
    with pytest.raises(TrainingError, match="client 4 has another form") as found:
        engine.train(message(ready), np.array([4]), print)
    assert "uploads/scaffold/more" in found.value.got


def test_a_rehearsal_says_what_a_reply_looks_like() -> None:
    ready = prepared("scaffold", MODELS["norm"], buffers="local", local=fk.Local(lr=0.1, epochs=1))
    found = {path.split("/")[0] for path in rehearse(ready.setup, message(ready))}
    assert found == {"update", "uploads", "client_state"}
    assert any(path.startswith("client_state/buffers/") for path in ready.spec)


# --- evaluation -----------------------------------------------------------------------------------


def shards(setup: TrainingSetup, split: str) -> Measured:
    network = setup.training.network
    with use_numerics("float32"):
        return evaluate(setup, network.params, network.buffers, split)


@pytest.mark.parametrize(
    ("module", "shard"),
    [
        (nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()), 100),
        (nn.Sequential(nn.Conv2d(1, 3, 8), nn.BatchNorm2d(3, track_running_stats=False)), 400),
        (nn.Linear(64, 3), 400),
    ],
)
def test_convolutions_are_evaluated_in_small_shards(module: nn.Module, shard: int) -> None:
    setup = prepared().setup
    training = replace(setup.training, network=Network(module))
    assert replace(setup, training=training, eval_batch=400).shard == shard
    assert replace(setup, training=training, eval_batch=7).shard == 7


@pytest.mark.parametrize("split", ["test", "clients"])
def test_every_example_is_evaluated_once(split: str) -> None:
    ready = prepared()
    setup = ready.setup
    found = shards(setup, split)
    data = setup.test if split == "test" else setup.federation.data
    rows = np.arange(len(data)) if split == "test" else setup.federation.rows
    module = setup.training.network
    logits = module.logits(module.params, {}, data.x[torch.from_numpy(rows)], train=False)
    hits = (logits.argmax(1) == data.y[torch.from_numpy(rows)]).double()
    cut = cut_into_shards(setup, split)
    assert found.states.shape == (len(cut.group), 3)
    group = torch.from_numpy(split_examples(setup, split).groups())
    expected = torch.zeros(int(group.max()) + 1).double().index_add_(0, group, hits)
    total = setup.metrics.merged(found.states, torch.from_numpy(cut.group), len(expected))
    assert torch.equal(total[:, 0], expected)


def test_clients_are_evaluated_on_what_they_held_out() -> None:
    clients = federation().hold_out(0.5, seed=0)
    setup = prepared(clients=clients).setup
    examples = split_examples(setup, "clients")
    assert examples.rows is not None
    assert examples.group_count == 6
    assert set(examples.rows).isdisjoint(clients.rows)
    counts = examples.sizes
    assert counts.tolist() == [n // 2 for n in federation().sizes]


@pytest.mark.parametrize("threads", [1, 2])
def test_dropout_nets_are_the_same_in_both_engines(
    threads: int, keep_threads: Callable[[int], None]
) -> None:
    keep_threads(threads)
    model = MODELS["dropout"]
    one = start(prepared(model=model))
    two = start(prepared(model=model, kind="workers", workers=2))
    assert same(one, two)
    assert not same(one, start(prepared(model=model, seed=1)))
    assert held().y.shape == (60,)


def test_steps_continue_through_the_data_from_round_to_round() -> None:
    """Of one client that trains alone, rounds of 2 steps are one round of all of them."""
    whole = federation()
    alone = fk.federation(whole.data, [np.arange(20)])
    ends = []
    for rounds, steps in ((4, 2), (1, 8)):
        local = fk.Local(lr=0.05, steps=steps, batch_size=4)
        ends.append(start(prepared(clients=alone, rounds=rounds, per_round=1, local=local)).params)
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-5, atol=1e-6)
