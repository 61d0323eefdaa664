"""A node trains by the trainer of its device; here that is the processor, with compiled steps."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.base import ClientJob
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.errors import RunError, TrainingError
from fedkeel.features.budget.policy import Policy
from fedkeel.flower.node import choose_training, several_devices, training
from fedkeel.flower.node.choose_training import make_training
from fedkeel.flower.node.guard import Guard
from fedkeel.flower.node.hardware import PLAIN, NodePlace
from fedkeel.flower.node.log import public_reason
from fedkeel.flower.node.node import Node
from fedkeel.flower.node.several_devices import SeveralDevices, shares
from fedkeel.flower.node.training import PATIENCE, ClientStart, DeviceTraining, PlainTraining
from fedkeel.flower.protocol import UNTOLD, NodeTraining
from fedkeel.method.context import Message
from fedkeel.records.folder import RunFolder
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import MARK, Marked, Net, federation, prepared, same


class Fails(Net):
    """Raises in training for marked examples."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool((x[:, 0] == MARK).any()):
            raise ArithmeticError("this example is marked")
        return Net.forward(self, x)


COMPILED = NodePlace(("cpu",), "vectorized")


def on(places: Sequence[NodePlace], made: Prepared, root: Path) -> dict[int, Node]:
    """Nodes that share the clients of a run, each with its place."""
    nodes = make_nodes(made, root, len(places))
    given = zip(nodes.items(), places, strict=True)
    return {number: replace(node, place=place) for (number, node), place in given}


def run(made: Prepared, root: Path, places: Sequence[NodePlace] = (COMPILED, COMPILED)) -> Result:
    return run_on_nodes(made, InProcessGrid(on(places, made, root)), root / "run")


def distance(one: Result, two: Result) -> float:
    """How far two models are from each other, relative to how far one has moved from zero."""
    a, b = (torch.cat([p.flatten() for p in each.params.values()]) for each in (one, two))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "mime", "topk", "fedper", "fedcurv"])
def test_compiled_steps_end_where_a_simulation_does_up_to_rounding(
    tmp_path: Path, method: str
) -> None:
    """With client states, surveys, codecs and personal models; clients of a node side by side."""
    made = prepared(method, dtype="float64", per_round=4)
    nodes = on((COMPILED, COMPILED), made, tmp_path)
    far, near = run_on_nodes(made, InProcessGrid(nodes), tmp_path / "run"), start(made)
    assert [row.faults for row in far.rows] == [{}] * 4
    assert distance(far, near) < 1e-10
    assert [row.steps for row in far.rows] == [row.steps for row in near.rows]
    for node in nodes.values():
        assert isinstance(node.training, DeviceTraining)
        assert node.training._trainer is not None
        assert node.training._trainer.strategy.is_compiled
        assert (node.training.report.engine, node.training.report.reasons) == ("vectorized", ())


def test_it_has_the_bits_of_the_same_trainer_in_a_simulation(tmp_path: Path) -> None:
    """A node for each client: each is trained by itself, as with `parallel_clients = 1`."""
    made = prepared("scaffold", per_round=6)
    far = run_on_nodes(made, InProcessGrid(on([COMPILED] * 6, made, tmp_path)))
    near = start(
        prepared("scaffold", per_round=6, kind="vectorized", parallel_clients=1, workers=1)
    )
    for name, tensor in near.params.items():
        assert torch.equal(far.params[name], tensor), name
    assert not same(far, start(made))  # so the steps were compiled


def test_what_is_kept_on_the_device_is_kept_for_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are placed, and the steps compiled, once; a round only sends the model."""
    made, count = prepared("fedavg", rounds=4), [0]
    init = VectorizedTrainer.__init__

    def counted(self: VectorizedTrainer, *args: Any, **more: Any) -> None:
        count[0] += 1
        init(self, *args, **more)

    monkeypatch.setattr(VectorizedTrainer, "__init__", counted)
    run(made, tmp_path)
    assert count == [2]  # one for each node


# ---- what the server learns ---------------------------------------------------------------------


def test_nodes_that_train_otherwise_are_in_the_record_with_a_warning(tmp_path: Path) -> None:
    made = prepared("fedavg", per_round=6)
    run(made, tmp_path, (COMPILED, PLAIN))
    record = RunFolder(tmp_path / "run").read_run()
    (warning,) = record.warnings
    assert "clients 0, 2, 4: vectorized on the processor in float32" in warning
    assert "clients 1, 3, 5: sequential on the processor" in warning
    assert "has not the bits of a simulation" in warning


def test_where_all_have_the_bits_of_a_simulation_nothing_is_said(tmp_path: Path) -> None:
    made = prepared("fedavg")
    far, near = run(made, tmp_path, (PLAIN, PLAIN)), start(made)
    assert all(torch.equal(far.params[name], tensor) for name, tensor in near.params.items())
    record = RunFolder(tmp_path / "run").read_run()
    assert (record.warnings, record.engine.reasons) == ([], [])


def test_a_site_need_not_tell_on_what_it_trains(tmp_path: Path) -> None:
    made = prepared("fedavg")
    nodes = on((COMPILED, PLAIN), made, tmp_path)
    policy = Policy(messages=())
    first = min(nodes)
    nodes[first] = replace(nodes[first], guard=Guard(policy, made))
    assert nodes[first]._report == UNTOLD
    run_on_nodes(made, InProcessGrid(nodes), tmp_path / "run")
    (warning,) = RunFolder(tmp_path / "run").read_run().warnings
    assert "clients 0, 2, 4: a device that the site does not tell" in warning
    assert "vectorized" not in warning
    told = Guard(Policy(messages=("device",)), made)
    assert replace(nodes[first], guard=told)._report.engine == "vectorized"


def test_what_an_error_of_the_users_code_says_stays_on_the_node() -> None:
    made = prepared("fedavg")
    device = DeviceTraining(made.spec, COMPILED, 1)
    trainer = device._trainer_of(made.setup)
    trainer.reasons.append("steps are not compiled: patient 17 has no such layer")
    assert device.report.reasons == ("steps are not compiled",)


# ---- memory and faults --------------------------------------------------------------------------


def out_of_memory(*args: object, **more: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_a_trainer_out_of_memory_takes_fewer_clients_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prepared("fedavg", dtype="float64", per_round=6)
    train = VectorizedTrainer._train

    def only_small(self: VectorizedTrainer, group: Any, *args: Any) -> Any:
        return out_of_memory() if len(group) > 1 else train(self, group, *args)

    monkeypatch.setattr(VectorizedTrainer, "_train", only_small)
    far = run(made, tmp_path)
    assert [row.faults for row in far.rows] == [{}] * 4
    assert distance(far, start(made)) < 1e-10
    record = RunFolder(tmp_path / "run").read_run()
    (reason,) = record.engine.reasons
    assert reason == "clients 0, 1, 2, 3, 4, 5: at most 1 clients are trained side by side"


def test_where_nothing_fits_the_processor_trains_with_the_bits_of_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = prepared("scaffold", rounds=4), [0]

    def none_fits(*args: object, **more: object) -> Any:
        calls[0] += 1
        return out_of_memory()

    monkeypatch.setattr(VectorizedTrainer, "train", none_fits)
    far = run(made, tmp_path)
    assert [row.faults for row in far.rows] == [{}] * 5
    assert all(torch.equal(far.params[k], v) for k, v in start(made).params.items())
    assert calls[0] <= 2 * PATIENCE  # then the node does not try it again
    record = RunFolder(tmp_path / "run").read_run()
    (reason,) = record.engine.reasons
    assert reason == "clients 0, 1, 2, 3, 4, 5: compiled training has too little memory"
    assert "clients 0, 1, 2, 3, 4, 5: sequential on the processor" in record.warnings[0]


def test_a_gpu_that_has_room_again_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared("fedavg")
    device = DeviceTraining(made.spec, COMPILED, 1)
    params, buffers = dict(made.server.params), dict(made.server.buffers)
    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluate", out_of_memory)
        patch.setattr(PlainTraining, "evaluate", lambda *args: "plain")
        assert device.evaluate(made.setup, params, buffers) == "plain"
        assert device.report.engine == "sequential"
    measured = device.evaluate(made.setup, params, buffers)
    assert measured.states.isfinite().all()
    assert device.report.engine == "vectorized"


def test_an_operator_who_wants_the_gpu_only_gets_a_clear_failure_and_the_node_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 1's node has no room in round 2; the run goes on without it, and then with it."""
    quick = config.Flower(deadline_seconds=0.3, poll_seconds=0.01, quorum=0.5)
    made = prepared("scaffold", clients=federation(3), per_round=3, rounds=3, flower=quick)
    only = replace(COMPILED, may_be_cpu=False)
    nodes = on((PLAIN, only, PLAIN), made, tmp_path)
    train = DeviceTraining._train

    def full(self: DeviceTraining, setup: Any, message: Any, clients: Any) -> Any:
        args = setup, message, clients
        return out_of_memory() if message.round == 1 else train(self, *args)

    monkeypatch.setattr(DeviceTraining, "_train", full)
    result = run_on_nodes(made, InProcessGrid(nodes), tmp_path / "run")
    what = "failed: RunError: Compiled training of this node has too little memory."
    assert [row.faults for row in result.rows[1:]] == [{}, {what: [1]}, {}]
    log = (tmp_path / "1" / "node.log").read_text()
    assert "Tried to allocate 2 GiB" in log  # the whole error, for the operator


def test_the_processor_never_takes_the_place_of_a_gpu_that_is_asked_for() -> None:
    """Not after many refusals, which end when there is room again, nor after a failure."""
    made = prepared("fedavg")
    device = DeviceTraining(made.spec, replace(COMPILED, may_be_cpu=False), 1)

    def fails() -> str:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for _ in range(PATIENCE + 2):
        with pytest.raises(RunError, match="has too little memory"):
            device._there_or_here(out_of_memory, lambda: "here")
    assert device._there_or_here(lambda: "there", lambda: "here") == "there"
    for _ in range(2):
        with pytest.raises(RunError, match="of this node has failed"):
            device._there_or_here(fails, lambda: "here")
    assert device.is_broken
    assert device.report.engine == "vectorized"


def test_a_client_that_fails_leaves_the_others_of_its_group(tmp_path: Path) -> None:
    """They are trained together, so each is trained again by itself."""
    quick = config.Flower(deadline_seconds=0.3, poll_seconds=0.01, quorum=0.5)
    clients = federation(4, marked=2)
    made = prepared("fedavg", Fails, clients=clients, per_round=4, rounds=2, flower=quick)
    result = run(made, tmp_path, (COMPILED,))
    for row in result.rows[1:]:
        ((reason, failed),) = row.faults.items()
        assert failed == [2]
        assert reason.startswith("failed: TrainingError: Training failed at client 2")


def test_a_device_that_has_failed_is_left_to_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = prepared("fedavg")
    device = DeviceTraining(made.spec, COMPILED, 1)

    def fails(*args: object, **more: object) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(VectorizedTrainer, "train", fails)
    params, buffers = dict(made.server.params), dict(made.server.buffers)
    message = Message(params, buffers, {}, 0, 0.05)
    ((job, _),) = device.train(made.setup, message, [ClientStart(ClientJob(0, 1, 0), None)])
    assert job.client == 1  # the processor has trained it
    assert device.is_broken
    assert device.report.reasons == ("compiled training has failed",)


def test_an_error_of_the_users_own_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared("fedavg")

    def fails(*args: object, **more: object) -> Any:
        raise LookupError("mine")

    monkeypatch.setattr(VectorizedTrainer, "train", fails)
    device = DeviceTraining(made.spec, COMPILED, 1)
    with pytest.raises(LookupError, match="mine"):
        device._there_or_here(lambda: fails(), lambda: None)
    assert not device.is_broken


# ---- who trains how -----------------------------------------------------------------------------


class Fake:
    """What torch would say of a machine with GPUs."""

    def __init__(self, patch: pytest.MonkeyPatch, error: str = "") -> None:
        patch.setattr(choose_training, "use_device", lambda device: None)
        patch.setattr(choose_training, "device_error", lambda setup, device: error)


def test_a_model_that_does_not_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch, "Expected all tensors to be on the same device")
    made, gpu = prepared("fedavg"), NodePlace(("cuda:0",), "vectorized")
    plain = make_training(made, gpu, 1)
    assert isinstance(plain, PlainTraining)
    assert plain.report.reasons == ("the model or its loss does not run on the GPU",)
    with pytest.raises(RunError, match="does not run on the GPU of this node") as error:
        make_training(made, replace(gpu, may_be_cpu=False), 1)
    assert "same device" in str(error.value.got)


def test_a_short_run_stays_on_the_processor_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Fake(monkeypatch)
    made, gpu = prepared("fedavg", kind="auto"), NodePlace(("cuda:0",), "vectorized")
    assert make_training(made, gpu, 1).report.reasons == ("the run is too short for a GPU",)


TWO = NodePlace(("cpu", "cpu"), "vectorized")


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_several_devices_share_the_clients_of_a_node(tmp_path: Path, method: str) -> None:
    """Each of two processes trains three of the six clients, one by one: the bits are the same."""
    made = prepared(method, per_round=6, parallel_clients=1)
    nodes = on((TWO,), made, tmp_path)
    far = run_on_nodes(made, InProcessGrid(nodes), tmp_path / "run")
    (node,) = nodes.values()
    assert isinstance(node.training, SeveralDevices)
    assert node.training.report.device == "cpu, cpu"
    assert len(node.training._children) == 1
    node.training.close()
    assert [row.faults for row in far.rows] == [{}] * 4
    one = run(made, tmp_path / "one", (COMPILED,))
    assert all(torch.equal(far.params[name], t) for name, t in one.params.items())


def test_each_device_of_a_node_is_named_once() -> None:
    """Also where a process has trained, and one that began before it has not."""
    made = prepared("fedavg")
    several = SeveralDevices(made.spec, NodePlace(("cpu", "cuda:1", "cuda:2"), "vectorized"), 1)
    several._reports[1] = NodeTraining(engine="vectorized", device="cuda:2")
    assert several.report.device == "cpu, cuda:1, cuda:2"
    several._reports[0] = NodeTraining(engine="vectorized", device="cuda:1", reasons=("slow",))
    assert several.report.device == "cpu, cuda:1, cuda:2"
    assert several.report.reasons == ("slow",)


def test_the_shares_of_devices_are_about_as_large() -> None:
    made = prepared("fedavg", clients=federation(7))
    starts = [ClientStart(ClientJob(k, k, 0), None) for k in range(7)]
    parts = shares(made.setup, starts, 3)
    sizes = [sum(made.setup.federation.sizes[one.job.client] for one in part) for part in parts]
    assert sorted(one.job.client for part in parts for one in part) == list(range(7))
    assert max(sizes) - min(sizes) <= max(made.setup.federation.sizes)
    assert shares(made.setup, starts[:1], 3)[1:] == [[], []]


def test_a_process_of_a_device_that_ends_is_replaced(tmp_path: Path) -> None:
    made = prepared("fedavg", per_round=6, rounds=2)
    training = SeveralDevices(made.spec, TWO, 1)
    message = Message(dict(made.server.params), dict(made.server.buffers), {}, 0, 0.05)
    starts = [ClientStart(ClientJob(k, k, 0), None) for k in range(6)]
    assert len(training.train(made.setup, message, starts)) == 6
    training._children[0].kill()
    with pytest.raises(RunError, match="a device of this node has ended"):
        training.train(made.setup, message, starts)
    assert len(training.train(made.setup, message, starts)) == 6
    training.close()


def test_an_error_on_another_device_is_that_of_its_client(tmp_path: Path) -> None:
    quick = config.Flower(deadline_seconds=0.3, poll_seconds=0.01, quorum=0.5)
    clients = federation(4, marked=2)
    made = prepared("fedavg", Fails, clients=clients, per_round=4, rounds=1, flower=quick)
    nodes = on((TWO,), made, tmp_path)
    result = run_on_nodes(made, InProcessGrid(nodes))
    (node,) = nodes.values()
    assert isinstance(node.training, SeveralDevices)
    node.training.close()
    ((reason, failed),) = result.rows[1].faults.items()
    assert failed == [2]
    assert reason.startswith("failed: TrainingError: Training failed at client 2")


def test_an_error_of_the_users_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> Any:
        raise LookupError("mine")

    monkeypatch.setattr(DeviceTraining, "train", fails)
    made = prepared("fedavg")
    ours, theirs = Pipe()
    ours.send_bytes(pickle.dumps((None, [], made.setup.seed)))
    monkeypatch.setattr(several_devices, "ignore_ctrl_c", lambda: None)
    serving = Thread(
        target=several_devices._serve, args=(made.setup, made.spec, COMPILED, 1, "float32", theirs)
    )
    serving.start()
    failure, _, _ = pickle.loads(ours.recv_bytes())
    ours.close()
    serving.join(10.0)
    assert isinstance(failure, TrainingError)
    assert "LookupError: mine" in failure.__notes__[0]
    assert "mine" not in public_reason(failure)


def test_a_sites_own_noise_is_drawn_anew_for_each_answer(tmp_path: Path) -> None:
    """The seed is the node's, and not that of the run: nobody can take the noise off."""
    budget = config.Privacy(epsilon=50.0, delta=0.01, unit="example")
    made = prepared("dpsgd(sigma=2.0)", dtype="float64", rounds=1, privacy=budget, per_round=6)
    policy = Policy(epsilon=50.0, delta=0.01, ledger=str(tmp_path / "ledger.json"))
    models = []
    for name in ("one", "two"):
        nodes = on((COMPILED,), made, tmp_path / name)
        nodes = {k: replace(node, guard=Guard(policy, made)) for k, node in nodes.items()}
        result = run_on_nodes(made, InProcessGrid(nodes))
        assert [row.faults for row in result.rows] == [{}] * 2
        models.append(np.concatenate([p.numpy().ravel() for p in result.params.values()]))
    assert not np.allclose(*models)


def test_batch_statistics_stay_with_their_clients(tmp_path: Path) -> None:
    local = fk.Local(lr=0.05, epochs=2, batch_size=4, drop_last="single")
    of_each = {"buffers": "local", "local": local, "dtype": "float64"}
    made = prepared("fedavg", lambda: Net(norm=True), **of_each)
    assert distance(run(made, tmp_path), start(made)) < 1e-10


def test_marked_examples_reach_the_trainer(tmp_path: Path) -> None:
    """The data of a node are those of its run, and no others."""
    made = prepared("fedavg", Marked, clients=federation(4, marked=1), per_round=4)
    assert distance(run(made, tmp_path), start(made)) < 1e-4
