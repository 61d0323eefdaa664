"""Which training a node takes at its place, by the rules of the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fedkeel import config
from fedkeel.engine.choose.device import device_error
from fedkeel.engine.choose.engine_rule import choose_engine
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_device
from fedkeel.errors import RunError
from fedkeel.flower.node.hardware import NodePlace
from fedkeel.flower.node.several_devices import SeveralDevices
from fedkeel.flower.node.training import ClientTrainer, DeviceTraining, PlainTraining


def make_training(prepared: Prepared, place: NodePlace, clients: int) -> ClientTrainer:
    """Return what trains a node's clients in a run.

    Args:
        prepared: the run, as the node sees it.
        place: where the node trains.
        clients: number of clients that it plays.

    Raises:
        RunError: the operator asks for a GPU, and the model does not run on it.
    """
    if place.is_plain:
        return PlainTraining()
    device, wish = torch.device(place.devices[0]), prepared.settings.engine
    use_device(device)
    error = "" if place.on_cpu else device_error(prepared.setup, device)
    if error and not place.may_be_cpu:
        raise RunError(
            "The model or its loss does not run on the GPU of this node.",
            got=error,
            do="make tensors where the inputs are (device=x.device), or start the node with "
            "--device auto or cpu",
        )
    if error:
        return PlainTraining(["the model or its loss does not run on the GPU"])
    is_open = place.may_be_cpu and (wish.kind, wish.device) == ("auto", "auto")
    if is_open and not place.on_cpu and _is_short(prepared):
        return PlainTraining(["the run is too short for a GPU"])
    if place.engine == "vectorized" and prepared.plan.makes_steps:
        own = {"device": device.type, "parallel_clients": wish.parallel_clients, "workers": 1}
        choice = choose_engine(_with_engine(prepared, kind="vectorized", **own))
        share = math.ceil(clients / len(place.devices))
        return _training(prepared, place, min(choice.parallel_clients or 1, share))
    if place.on_cpu:
        return PlainTraining(["local training of the user's own is not compiled"])
    return _training(prepared, replace(place, engine="sequential"), 1)


def _training(prepared: Prepared, place: NodePlace, parallel_clients: int) -> ClientTrainer:
    devices = SeveralDevices if len(place.devices) > 1 else DeviceTraining
    return devices(prepared.spec, place, parallel_clients, prepared.setup.precision)


def _is_short(prepared: Prepared) -> bool:
    """Return whether a run is over before a GPU is worth its start."""
    return choose_engine(_with_engine(prepared, kind="auto")).device == "cpu"


def _with_engine(prepared: Prepared, **values: object) -> Prepared:
    """Return a run whose settings ask for an engine, as the rule that chooses one reads it."""
    engine = prepared.settings.engine
    same = {"dtype": engine.dtype, "precision": engine.precision}
    asked = config.Engine.model_validate({**same, **values})
    return replace(prepared, settings=prepared.settings.model_copy(update={"engine": asked}))
