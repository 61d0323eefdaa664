"""The clients of a round are spread over devices, and the number of devices changes no bit."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from engine.test_deaths import Wide
from engine.vectorized.test_engine import net
from engine.vectorized.test_engine import ready as images
from fedkeel.engine.base import Split
from fedkeel.engine.choose.engine_rule import choose_engine, kept_engine
from fedkeel.engine.evaluation import cut_into_shards, evaluate
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.work_items import DEVICE_SUMS, evaluation_items, training_items
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.workers import Workers
from fedkeel.errors import ConfigError, RunError
from fedkeel.method.server_round import server_message
from fedkeel.records.run_record import EngineChoice
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.start import start
from fedkeel.study.pool import single_process
from toys import children, federation, prepared, same


def normed() -> nn.Module:
    return nn.Sequential(Wide(), nn.BatchNorm1d(3))


def spread(method: str, *devices: str, norm: bool = False, **engine: object) -> Prepared:
    """Prepare a run of twelve clients, of whom a process trains three side by side."""
    values = {"kind": "auto", "devices": list(devices), "parallel_clients": 3, **engine}
    model = normed if norm else Wide
    more = {"buffers": "average"} if norm else {}
    local = fk.Local(lr=0.05, steps=2, batch_size=4, drop_last="single")
    clients = federation(12)
    return prepared(
        method, model, rounds=2, clients=clients, per_round=12, local=local, **more, **values
    )


class At(Callback):
    """Does something after the first round."""

    def __init__(self, act: object) -> None:
        self._act = act

    def on_round_end(self, row: object, model: object) -> None:
        if row.round == 1:
            self._act()


def interrupt() -> None:
    raise KeyboardInterrupt


def kill_one() -> None:
    os.kill(children(os.getpid())[0], signal.SIGKILL)


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "norm"),
    [
        ("fedavg", True),
        pytest.param("scaffold", False, marks=pytest.mark.slow),
        pytest.param("fedgc", False, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_devices_changes_no_bit(method: str, norm: bool) -> None:
    """Sums of work items, what clients keep, and the updates of single clients."""
    alone = {"kind": "vectorized", "devices": None, "workers": 1}
    expected = start(spread(method, norm=norm, **alone))
    assert expected.rows[-1].test["loss"] != expected.rows[0].test["loss"]
    result = start(spread(method, "cpu", "cpu", "cpu", norm=norm))
    engine = result.record.engine
    assert (engine.kind, engine.workers, engine.devices) == ("vectorized", 3, ["cpu"] * 3)
    assert same(expected, result)
    assert same(expected, start(spread(method, "cpu", norm=norm)))


def test_a_device_process_that_is_killed_is_replaced() -> None:
    expected = start(spread("scaffold", "cpu", "cpu"))
    assert same(expected, start(spread("scaffold", "cpu", "cpu"), callbacks=[At(kill_one)]))


def test_a_run_goes_on_with_another_number_of_devices(tmp_path: Path) -> None:
    open_ = {"parallel_clients": None}
    before = spread("scaffold", "cpu", "cpu", **open_)
    expected = start(before)
    with pytest.raises(KeyboardInterrupt):
        start(before, tmp_path, callbacks=[At(interrupt)])
    result = start(spread("scaffold", "cpu", "cpu", "cpu", **open_), tmp_path, resume=True)
    assert result.record.engine.devices == ["cpu"] * 3
    assert result.record.engine.parallel_clients == expected.record.engine.parallel_clients == 6
    assert same(expected, result)


def test_each_process_has_a_trainer_on_its_own_device() -> None:
    """By another name of the processor, a process copies model and data as for a GPU."""
    ready = spread("fedavg", "cpu")
    message, clients = server_message(ready.plan, ready.server, 0.05), np.arange(12)
    replies = []
    for devices in (["cpu"], ["cpu:0", "cpu:1"]):
        trainer = VectorizedTrainer(ready.setup, 3)
        placed = trainer.on(torch.device(devices[0]), 1).placed
        assert (placed is trainer.placed) == (devices == ["cpu"])
        count = len(devices)
        with Workers(
            ready.setup, ready.spec, 12, message, count, trainer=trainer, devices=devices
        ) as engine:
            trained = engine.train(message, clients, lambda _: None)
            replies.append({k: t.clone() for k, t in trained.replies.update.items()})
    for name, update in replies[0].items():
        assert torch.equal(update, replies[1][name])


@pytest.mark.slow
def test_device_processes_that_are_spawned_make_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they are beside a GPU."""
    expected = start(spread("scaffold", "cpu"))
    monkeypatch.setattr(Workers.__init__, "__defaults__", ("spawn",))
    assert same(expected, start(spread("scaffold", "cpu", "cpu")))


# --- what is cut for GPUs -------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["test", "clients"])
def test_a_gpu_evaluates_several_shards_in_one_pass(split: Split) -> None:
    ready = images(net(nn.Identity()))
    setup = ready.setup
    setup.__dict__["shard"] = 3  # as for convolutions on a processor
    params = setup.training.network.params
    expected = evaluate(setup, params, {}, split)
    message = server_message(ready.plan, ready.server, 0.05)
    trainer = VectorizedTrainer(replace(setup, eval_batch=8), 1)
    with Workers(setup, ready.spec, 5, message, 2, trainer=trainer) as engine:
        engine._on_gpu = True
        measured = engine.evaluate(params, {}, split)
    torch.testing.assert_close(measured.states, expected.states)
    items = evaluation_items(cut_into_shards(setup, split), split, 2, 2)
    assert max(len(item.starts) for item in items) == 2
    assert sum(len(item.starts) for item in items[:-1]) % 2 == 0


def test_a_round_on_gpus_leaves_few_sums_however_many_there_are() -> None:
    ready = prepared(clients=federation(40), per_round=40)
    message = server_message(ready.plan, ready.server, 0.05)
    jobs = [SimpleNamespace(client=k, steps_done=0) for k in range(40)]
    cuts = [training_items(ready.setup, message, jobs, n, 1, True, DEVICE_SUMS) for n in (1, 4)]
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) == DEVICE_SUMS


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"devices": ["cpu", "cuda:0"]}, "mixes processors and GPUs"),
        ({"devices": ["cuda"]}, "neither 'cpu' nor like 'cuda:0'"),
        ({"devices": []}, "names no device"),
        ({"devices": ["cpu"], "device": "cpu"}, "'devices' and 'device' are both given"),
        ({"devices": ["cpu"], "workers": 2}, "'devices' and 'workers' are both given"),
        ({"devices": ["cpu"], "kind": "workers"}, "is for kind 'vectorized'"),
        ({"devices": ["cpu"], "kind": "sequential"}, "is for kind 'vectorized'"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(engine: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fk.Engine(**engine)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for devices in ("all", ["cuda:0"]):
        with pytest.raises(RunError, match="no GPU that torch can use"):
            choose_engine(prepared(kind="auto", devices=devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fedkeel.engine.choose.device.device_error", lambda *_: "")
    with pytest.raises(RunError, match=r"(?s)no device 'cuda:2'.*among cuda:0, cuda:1"):
        choose_engine(prepared(kind="auto", devices=["cuda:0", "cuda:2"]))
    choice = choose_engine(prepared(kind="auto", devices="all", per_round=5))
    assert (choice.kind, choice.device, choice.workers) == ("vectorized", "cuda", 2)
    assert choice.devices == ["cuda:0", "cuda:1"]
    assert choice.parallel_clients == 3  # a device's share of the round
    alone = choose_engine(prepared(kind="auto", devices="all", per_round=1))
    assert alone.devices == ["cuda:0"]  # a second one would have no client


def test_a_run_keeps_its_devices_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    four = [f"cuda:{index}" for index in range(4)]
    before = EngineChoice("vectorized", 4, 8, device="cuda", devices=four)
    fewer = replace(before, workers=2, devices=four[:2])
    assert kept_engine(before, fk.Engine()) == fewer
    assert kept_engine(before, fk.Engine(devices="all")) == fewer
    assert kept_engine(before, fk.Engine(devices=("cpu", "cpu"))) is None
    assert kept_engine(EngineChoice("workers", 2), fk.Engine(devices=("cpu",))) is None
    in_one = kept_engine(before, fk.Engine(workers=1))
    assert in_one == replace(before, workers=1, devices=[])


def test_a_run_beside_others_is_in_one_process() -> None:
    engine = single_process(fk.Engine(devices=("cpu", "cpu"), parallel_clients=3))
    assert engine == fk.Engine(kind="vectorized", device="cpu", workers=1, parallel_clients=3)
    assert single_process(fk.Engine(devices="all")).device == "cuda"
