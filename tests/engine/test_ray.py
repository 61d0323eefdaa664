"""Ray actors, on two nodes, make the bits of one loop; those that die leave no trace.

One Ray serves all tests of this file: two nodes on this machine, of one core each.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import fedkeel as fk
from fedkeel.engine.base import Split
from fedkeel.engine.evaluation import evaluate
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.ray import cluster
from fedkeel.engine.ray import engine as module
from fedkeel.engine.ray.engine import Ray
from fedkeel.errors import RunError, TrainingError
from fedkeel.method.server_round import server_message
from fedkeel.records.folder import RunFolder
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.start import start
from toys import MODELS, OWN_STEPS, Kills, Net, Raises, Slow, eventually, federation, prepared, same

LOCAL = fk.Local(lr=0.05, epochs=2, batch_size=4, momentum=0.5, drop_last="single")

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


class Nodes:
    """A Ray of two nodes, and this process connected to it."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000}
        self.ray: Any = cluster.module()
        self.cluster = Cluster(initialize_head=True, head_node_args=node)
        self.address: str = self.cluster.address
        self.second = self.cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
        self.ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")

    def close(self) -> None:
        self.ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Nodes()
        gc.collect()
    yield found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.close()
        gc.collect()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every actor that is started, in order."""
    begin, found = Ray._start_worker, []

    def noted(self: Ray) -> None:
        begin(self)
        found.append(self._workers[-1].actor)

    monkeypatch.setattr(Ray, "_start_worker", noted)
    return found


def on_ray(nodes: Nodes, method: str = "fedavg", model: Any = Net, **more: Any) -> Prepared:
    more = {"kind": "ray", "workers": 2, "address": nodes.address, "per_round": 6, **more}
    return prepared(method, model, **more)


class AtClient(Callback):
    """Does something once a client of the first round has been trained."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self.seen = act, []

    def on_clients_trained(self, trained: int, count: int) -> None:
        self.seen.append((trained, count))
        act, self._act = self._act, lambda: None
        act()


# --- the same bits --------------------------------------------------------------------------------


def test_actors_train_by_a_function_of_the_user(nodes: Nodes) -> None:
    one, two = start(prepared(local=OWN_STEPS, per_round=6)), start(on_ray(nodes, local=OWN_STEPS))
    assert two.record.engine.kind == "ray"
    assert same(one, two)


def test_actors_make_the_bits_of_one_loop(nodes: Nodes) -> None:
    more = {"local": LOCAL, "per_round": 6, "rounds": 2}
    callback = AtClient(lambda: None)
    one, two = (
        start(prepared("mime", **more)),
        start(on_ray(nodes, "mime", **more), None, callbacks=[callback]),
    )
    assert (two.record.engine.kind, two.record.engine.workers) == ("ray", 2)
    assert any(row.test["loss"] != one.rows[0].test["loss"] for row in one.rows)
    assert same(one, two)
    assert callback.seen[-1] == (6, 6)
    assert len(callback.seen) > 4


@pytest.mark.slow
def test_so_do_they_with_buffers_a_clients_evaluation_and_state_in_a_file(
    nodes: Nodes, tmp_path: Path
) -> None:
    evaluation = fk.Evaluation(batch_size=7, clients_every=1)
    clients = federation().hold_out(0.3, seed=1)
    more = {"buffers": "local", "evaluation": evaluation, "clients": clients, "state": "disk"}
    one = start(prepared("scaffold", MODELS["norm"], per_round=6, **more), tmp_path / "one")
    two = start(on_ray(nodes, "scaffold", MODELS["norm"], **more), tmp_path / "two")
    assert same(one, two)


@pytest.mark.slow
def test_clients_side_by_side_in_actors_are_those_of_worker_processes(nodes: Nodes) -> None:
    more = {"parallel_clients": 3, "workers": 2, "per_round": 6}
    one = start(prepared("scaffold", kind="vectorized", **more))
    two = start(on_ray(nodes, "scaffold", **more))
    assert two.record.engine.parallel_clients == 3
    for name, tensor in one.params.items():  # a first step and its recording differ in rounding
        torch.testing.assert_close(tensor, two.params[name], rtol=1e-5, atol=1e-6)
    assert [row.steps for row in one.rows] == [row.steps for row in two.rows]


@pytest.mark.slow
def test_actors_stand_on_both_nodes_and_one_too_many_harms_nobody(nodes: Nodes) -> None:
    ready = prepared()
    params = ready.setup.training.network.params
    message = server_message(ready.plan, ready.server, 0.05)
    with Ray(ready.setup, ready.spec, 6, message, 3, nodes.address) as engine:
        for split in get_args(Split):
            expected = evaluate(ready.setup, params, {}, split)
            assert torch.equal(engine.evaluate(params, {}, split).states, expected.states)
        assert nodes.ray.available_resources().get("CPU", 0.0) == 0.0  # of one core on each


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_actor_killed_in_mid_round_leaves_no_trace(
    nodes: Nodes, tmp_path: Path, actors: list[Any]
) -> None:
    """It dies while it trains client 3, the first time that client takes part."""
    more = {"clients": federation(marked=3), "per_round": 6, "rounds": 2}
    one = start(prepared("scaffold", Kills, **more))
    once = tmp_path / "once"
    two = start(on_ray(nodes, "scaffold", partial(Kills, once), **more))
    assert once.exists()
    assert len(actors) == 3
    assert same(one, two)


@pytest.mark.slow
def test_all_actors_killed_at_once_leave_no_trace(nodes: Nodes, actors: list[Any]) -> None:
    one = start(prepared("scaffold", per_round=6))

    def kill() -> None:
        for actor in list(actors):
            nodes.ray.kill(actor)

    assert same(one, start(on_ray(nodes, "scaffold"), callbacks=[AtClient(kill)]))
    assert len(actors) > 2


@pytest.mark.slow
def test_a_client_that_always_kills_its_actor_is_named(nodes: Nodes) -> None:
    ready = on_ray(nodes, model=Kills, clients=federation(marked=3))
    with pytest.raises(TrainingError, match="died 3 times on the same work") as found:
        start(ready)
    assert found.value.got == "an actor that ended on client 3"
    assert "exit" in found.value.why
    assert "sequential" in found.value.do


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_error_is_the_same_wherever_it_happens(nodes: Nodes) -> None:
    more = {"clients": federation(marked=3), "per_round": 6}
    with pytest.raises(TrainingError, match="client 3, step 1") as one:
        start(prepared(model=Raises, **more))
    with pytest.raises(TrainingError) as two:
        start(on_ray(nodes, model=Raises, **more))
    assert two.value.lines() == one.value.lines()


@pytest.mark.slow
def test_an_interrupt_ends_the_actors(nodes: Nodes, actors: list[Any]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(on_ray(nodes, model=Slow), callbacks=[AtClient(interrupt)])
    for actor in actors:
        assert eventually(lambda actor=actor: gone(nodes, actor))


def gone(nodes: Nodes, actor: Any) -> bool:
    """Whether an actor has ended; ending it takes the cluster a moment."""
    try:
        nodes.ray.get(actor.ready.remote(), timeout=10)
    except nodes.ray.exceptions.RayActorError:
        return True
    return False


def test_a_cluster_without_a_free_core_is_refused(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 1.0)
    ready = prepared(per_round=6)
    message = server_message(ready.plan, ready.server, 0.05)
    network = ready.setup.training.network
    full = nodes.ray.util.placement_group([{"CPU": 1}] * 2, strategy="SPREAD")
    assert full.wait(30)
    try:
        with (
            Ray(ready.setup, ready.spec, 6, message, 1, nodes.address) as engine,
            pytest.raises(RunError, match="no free core"),
        ):
            engine.evaluate(network.params, {}, "test")
    finally:
        nodes.ray.util.remove_placement_group(full)


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match="not installed") as found:
        start(prepared(kind="ray", workers=2))
    assert "pip install 'fedkeel[ray]'" in found.value.do
    assert len(found.value.lines()) <= 4


def test_where_no_cluster_answers_the_error_and_the_record_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = cluster.module()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RunError, match="no Ray cluster") as found:
        start(prepared(kind="ray", workers=2, address="127.0.0.1:1"), tmp_path / "run")
    record = RunFolder(tmp_path / "run").read_run()
    assert (record.status, record.message) == ("failed", found.value.what)
    assert found.value.got.startswith("127.0.0.1:1: ")
    assert "ray start --head" in found.value.do


OWN = {
    "own_net.py": """
import own_helper
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, own_helper.CLASSES)

    def forward(self, x):
        return own_helper.act(self.layer(x))
""",
    "own_helper.py": """
import torch

CLASSES = 3

def act(x):
    return torch.tanh(x)
""",
}


@pytest.mark.slow
def test_modules_that_others_cannot_import_go_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those in the folder where a run is started: found once, and not by another process."""
    for name, text in OWN.items():
        (tmp_path / name).write_text(text)
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        net = importlib.import_module("own_net").Net
    pickled = cluster.pickled(prepared(model=net).setup)
    (tmp_path / "setup").write_bytes(pickle.dumps(pickled, protocol=4))
    code = (
        "import pickle, pathlib, sys; from fedkeel.engine.ray.cluster import unpickled; "
        "setup = unpickled(pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())); "
        "n = setup.training.network; "
        "print(n.logits(n.params, {}, setup.test.x[:1], train=False).shape[1])"
    )
    command = [sys.executable, "-P", "-W", "error", "-c", code, str(tmp_path / "setup")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("3", "")


def test_a_second_name_of_a_module_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unknown.shell", "unknown.again"):
        monkeypatch.setitem(sys.modules, name, os)
    monkeypatch.setitem(sys.modules, "unknown.kind", dict)  # type: ignore[misc]
    assert cluster.pickled(prepared().setup).body


@pytest.mark.slow
def test_an_address_is_for_ray() -> None:
    with pytest.raises(fk.errors.ConfigError, match="address"):
        prepared(kind="workers", address="10.0.0.7:6379")
