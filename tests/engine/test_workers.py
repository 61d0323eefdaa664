"""Any number of processes, started in any way, make the bits that one loop makes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedkeel as fk
from fedkeel.engine import workers as module
from fedkeel.engine.base import TrainedCohort
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.forking import start_method
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.workers import Workers
from fedkeel.errors import FedkeelError, RunError, TrainingError
from fedkeel.method.context import Ints
from fedkeel.method.server_round import server_message
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from toys import (
    MODELS,
    Kills,
    NaN,
    Noisy,
    Raises,
    children,
    eventually,
    federation,
    held,
    prepared,
    same,
)

METHODS = ["fedavg", "scaffold", "gradma", "fedgc", "fedreg", "fednova+fedgh", "fedprox+momentum"]
LOCAL = fk.Local(lr=0.05, epochs=2, batch_size=4, momentum=0.5, drop_last="single")


def quiet(trained: int) -> None:
    """A tick that nobody hears."""


def pool(ready: Prepared, workers: int, how: str = "fork") -> Workers:
    message = server_message(ready.plan, ready.server, 0.05)
    return Workers(ready.setup, ready.spec, 4, message, workers, start=how)


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_workers_make_the_bits_of_one_loop(method: str) -> None:
    more = {"local": LOCAL, "per_round": 5}
    one = start(prepared(method, **more))
    assert any(row.test["loss"] != one.rows[0].test["loss"] for row in one.rows)
    for count in (1, 2, 3, 5) if method == "scaffold" else (3,):
        found = start(prepared(method, **more, kind="workers", workers=count))
        assert found.record.engine.workers == count
        assert same(one, found), count


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_so_do_they_with_batch_normalisation(method: str, buffers: str) -> None:
    model = MODELS["norm"]
    one = start(prepared(method, model, buffers=buffers, local=LOCAL))
    for count in (2, 5):
        two = prepared(method, model, buffers=buffers, local=LOCAL, kind="workers", workers=count)
        assert same(one, start(two)), count
    assert bool(one.buffers) is (buffers == "average")


def test_so_do_they_where_everyone_continues_through_the_data() -> None:
    local = fk.Local(lr=0.05, steps=3, batch_size=4)
    one = start(prepared("gradma", local=local, rounds=5))
    assert same(one, start(prepared("gradma", local=local, rounds=5, kind="workers", workers=3)))


def test_so_do_they_in_float64_and_with_held_out_examples() -> None:
    clients = federation().hold_out(0.3, seed=1)
    evaluation = fk.Evaluation(batch_size=7, clients_every=2)
    more = {"clients": clients, "evaluation": evaluation, "dtype": "float64"}
    one = start(prepared("fedgc", **more))
    assert one.params["fc1.weight"].dtype == torch.float64
    assert same(one, start(prepared("fedgc", **more, kind="workers", workers=2)))


def test_so_do_they_where_a_module_lays_out_its_weights_in_its_own_way() -> None:
    """What has gone through shared memory lies in order, and products round by how things lie."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(40, 5).t())
            self.last = nn.Parameter(torch.randn(3, 40).t())

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.first) @ self.last

    one, two = (prepared(model=Transposed, rounds=5, kind=k) for k in ("sequential", "workers"))
    assert same(start(one), start(two))


@pytest.mark.slow
def test_spawned_workers_make_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them dies on the way."""
    clients = federation(marked=3)
    more = {"buffers": "average", "local": LOCAL, "clients": clients, "rounds": 2, "per_round": 6}
    one = start(prepared("scaffold", partial(Kills, norm=True), **more))
    monkeypatch.setattr(Workers.__init__, "__defaults__", ("spawn",))
    once = tmp_path / "once"
    model = partial(Kills, once, norm=True)
    assert same(one, start(prepared("scaffold", model, **more, kind="workers", workers=2)))
    assert once.exists()


def test_gathering_a_round_leaves_torchs_other_threads_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Indexing with a tensor wakes them, and they then spin on a core that a worker wants."""
    called: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def gather(self: RoundBuffers, clients: Ints) -> TrainedCohort:
        with Watch():
            return plain(self, clients)

    plain = RoundBuffers.gather
    monkeypatch.setattr(RoundBuffers, "gather", gather)
    start(
        prepared("fedavg", local=LOCAL, rounds=2, kind="vectorized", parallel_clients=2, workers=2)
    )
    assert "index_select" in called  # there are several sums
    assert "index" not in called


def test_beside_a_gpu_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd and CUDA refuse to work in a process forked from one that has used them."""
    for count, begun in ((0, "fork"), (1, "spawn")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert start_method.__wrapped__() == begun


def test_a_model_that_cannot_be_spawned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers.__init__, "__defaults__", ("spawn",))
    before = children(os.getpid())
    ready = prepared(kind="workers", workers=2, loss=lambda z, y: nn.functional.cross_entropy(z, y))
    with pytest.raises(RunError, match="cannot be sent to worker processes") as found:
        start(ready)
    assert len(found.value.lines()) <= 4
    assert eventually(lambda: children(os.getpid()) == before, 20)  # a helper takes a moment


def test_workers_that_cannot_even_begin(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where a script spawns without a guard: each of them ends with exit code 1 at once."""
    monkeypatch.setattr(module, "_serve", lambda *_: os._exit(1))
    with pytest.raises(TrainingError, match="died 3 times") as found:
        start(prepared(kind="workers", workers=2))
    assert "exit code 1" in found.value.got
    assert "__main__" in found.value.why
    assert capfd.readouterr().err == ""


# --- one round ------------------------------------------------------------------------------------


def test_a_round_is_gathered_in_the_order_of_the_cohort() -> None:
    ready = prepared("scaffold")
    message = server_message(ready.plan, ready.server, 0.05)
    clients = np.array([1, 3, 4, 5])
    ticks: list[int] = []
    with Sequential(ready.setup, ready.spec, 4) as one, pool(ready, 3) as two:
        a = one.train(message, clients, quiet)
        b = two.train(message, clients, ticks.append)
        assert a.replies.clients.tolist() == b.replies.clients.tolist() == [1, 3, 4, 5]
        assert a.steps.tolist() == b.steps.tolist()
        assert a.loss.tolist() == b.loss.tolist()
        assert a.replies.processed.tolist() == b.replies.processed.tolist()
        for name, rows in a.replies.update.items():
            assert torch.equal(rows, b.replies.update[name])
        assert sum(ticks) == 4
        one.commit(a, clients[1:])
        two.commit(b, clients[1:])
        kept = two.state()
        assert kept["clients/index"].tolist() == [3, 4, 5]
        for name, array in one.state().items():
            np.testing.assert_array_equal(array, kept[name])


def test_state_is_written_only_when_the_round_is_taken() -> None:
    ready = prepared("scaffold")
    message = server_message(ready.plan, ready.server, 0.05)
    with pool(ready, 2) as engine:
        trained = engine.train(message, np.array([0, 1]), quiet)
        assert engine.state()["clients/index"].tolist() == []
        again = engine.train(message, np.array([0, 1]), quiet)
        assert torch.equal(trained.replies.update["fc1.bias"], again.replies.update["fc1.bias"])


def test_a_round_of_nobody() -> None:
    ready = prepared("scaffold")
    message = server_message(ready.plan, ready.server, 0.05)
    for engine in (Sequential(ready.setup, ready.spec, 4), pool(ready, 2)):
        with engine:
            trained = engine.train(message, np.array([], dtype=np.int64), quiet)
            assert trained.replies.update["fc1.bias"].shape == (0, 6)
            engine.commit(trained, trained.replies.clients)
            assert engine.state()["clients/index"].tolist() == []


@pytest.mark.parametrize("split", ["test", "clients"])
@pytest.mark.parametrize("buffers", ["refuse", "average", "local"])
def test_evaluations_agree(split: str, buffers: str) -> None:
    model = MODELS["plain" if buffers == "refuse" else "norm"]
    ready = prepared(model=model, buffers=buffers, test=held(61), local=LOCAL)
    network = ready.setup.training.network
    params = {k: v + 0.1 for k, v in network.params.items()}
    moved = {k: v + 1 if buffers == "average" else v for k, v in network.buffers.items()}
    with Sequential(ready.setup, ready.spec, 4) as one, pool(ready, 3) as two:
        a = one.evaluate(params, moved, split).states
        assert torch.equal(a, two.evaluate(params, moved, split).states)
        assert a.shape[1] == 3
        assert not torch.equal(a, one.evaluate(network.params, network.buffers, split).states)


@pytest.mark.parametrize("split", ["test", "clients"])
def test_noise_in_evaluation_is_that_of_the_seed(split: str) -> None:
    ready = prepared(model=Noisy, test=held(61))
    network = ready.setup.training.network
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with Sequential(ready.setup, ready.spec, 4) as one, pool(ready, 3) as two:
        found = one.evaluate(network.params, {}, split).states
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.manual_seed(2)
        assert torch.equal(found, one.evaluate(network.params, {}, split).states)
        assert torch.equal(found, two.evaluate(network.params, {}, split).states)
    other = prepared(model=Noisy, test=held(61), seed=1)
    with Sequential(other.setup, other.spec, 4) as three:
        assert not torch.equal(found, three.evaluate(network.params, {}, split).states)


# --- errors ---------------------------------------------------------------------------------------


def error(run: Callable[[], Result]) -> FedkeelError:
    with pytest.raises(FedkeelError) as found:
        run()
    return found.value


def test_an_error_is_the_same_whoever_runs_into_it() -> None:
    clients = federation(marked=3)
    one = error(lambda: start(prepared(model=Raises, clients=clients, per_round=6)))
    assert "client 3, step 1" in one.what
    for count in (1, 2, 3):
        ready = prepared(model=Raises, clients=clients, per_round=6, kind="workers", workers=count)
        two = error(lambda ready=ready: start(ready))
        assert type(two) is type(one) is TrainingError
        assert two.lines() == one.lines()


def test_a_client_that_gives_nan_is_the_same_too() -> None:
    more = {"model": NaN, "clients": federation(marked=2), "per_round": 6}
    one = start(prepared("scaffold", **more))
    assert [row.excluded for row in one.rows] == [[], [2], [2], [2]]
    assert same(one, start(prepared("scaffold", **more, kind="workers", workers=3)))


def test_a_worker_that_fails_outside_of_training_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("nothing there")

    monkeypatch.setattr(module, "evaluate_shard", broken)
    found = error(lambda: start(prepared(kind="workers", workers=2)))
    assert found.what == "A worker failed on an evaluation."
    assert "nothing there" in found.got


def test_workers_ignore_the_interrupt_that_their_parent_hears() -> None:
    """Ctrl-C goes to every process of the terminal; the round is finished all the same."""
    ready = prepared()
    message = server_message(ready.plan, ready.server, 0.05)
    with pool(ready, 2) as engine:
        engine.train(message, np.array([0, 1, 2, 3]), quiet)
        for pid in children(os.getpid()):
            os.kill(pid, signal.SIGINT)
        before = children(os.getpid())
        engine.train(message, np.array([0, 1, 2, 3]), quiet)
        assert children(os.getpid()) == before
