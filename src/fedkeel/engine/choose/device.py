"""The devices on which clients train: a GPU where there is one and the model runs on it."""

from __future__ import annotations

import os

import torch

from fedkeel import config
from fedkeel.base.values import map_values
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.vectorized.facts import few_examples
from fedkeel.errors import RunError
from fedkeel.task.batch import Batch


def choose_device(requested: config.Engine, setup: TrainingSetup) -> tuple[str, list[str]]:
    """Return the device, ``cpu`` or ``cuda``, and the reasons why it is not a GPU.

    Raises:
        RunError: a GPU is requested, but torch finds none, or the model does not run on it.
    """
    is_reference = requested.kind == "sequential" and requested.device != "cuda"
    if requested.device == "cpu" or is_reference or requested.kind in ("workers", "ray"):
        return "cpu", []
    names = named_devices(requested)
    if names and names[0] == "cpu":
        return "cpu", []
    is_required = requested.device == "cuda" or bool(names)
    if torch.cuda.is_available():
        error = device_error(setup, torch.device(names[0] if names else "cuda"))
        if error and is_required:
            raise RunError(
                "The model or its loss does not run on a GPU.",
                got=error,
                do="make tensors where the inputs are (device=x.device), "
                "or set engine.device = 'cpu'",
            )
        if error:
            return "cpu", [f"clients are not trained on the GPU: {error}"]
        return "cuda", []
    if requested.device == "cuda":
        raise missing_gpu("set engine.device = 'cpu'")
    return "cpu", []


def has_gpu(wanted: str | None) -> bool:
    """Return whether runs may train on a GPU, without using it, so that a process can be forked.

    Args:
        wanted: the device that is asked for, None where none is.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return wanted == "cuda" or (wanted in (None, "auto") and torch.cuda.is_available())


def named_devices(requested: config.Engine) -> list[str]:
    """Return the devices over which a round is spread, empty where none are asked for.

    Raises:
        RunError: torch does not find one of them.
    """
    if requested.devices is None or requested.devices == ("cpu",) * len(requested.devices):
        return list(requested.devices or ())
    available = available_gpus()
    if not available:
        raise missing_gpu("leave out engine.devices")
    if requested.devices == "all":
        return available
    for name in requested.devices:
        if name not in available:
            raise RunError(
                f"There is no device {name!r} on this machine.",
                got=f"engine.devices = {list(requested.devices)}",
                expected=f"among {', '.join(available)}",
                do="name devices that are there, or set engine.devices = 'all'",
            )
    return list(requested.devices)


def available_gpus() -> list[str]:
    """Return the names of the GPUs that torch finds."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def missing_gpu(do: str) -> RunError:
    """Return the error where a GPU is asked for, and torch finds none."""
    return RunError(
        "There is no GPU that torch can use.",
        got=f"torch {torch.__version__}",
        expected="torch.cuda.is_available()",
        do=f"install a build of torch for CUDA, or {do}",
    )


def device_error(setup: TrainingSetup, device: torch.device) -> str:
    """Return why a training step of the model fails on a device, "" where it does not.

    A user's module or loss may make tensors on the CPU although its inputs are on the device.
    """
    examples = few_examples(setup)
    x, y = (map_values(lambda t: t.to(device), values) for values in (examples.x, examples.y))
    batch = Batch(x, y)
    devices = [device] if device.type == "cuda" else []
    try:
        network = setup.training.network.on(device)
        buffers = network.copy_buffers(network.buffers)
        with torch.random.fork_rng(devices=devices):
            network.value_and_grad(network.params, buffers, batch, "eager")
            network.example_losses(network.test_output(network.params, buffers, batch.x), batch.y)
    except torch.OutOfMemoryError:  # the engine reports it when it places the data
        return ""
    except Exception as failure:
        return next(iter(str(failure).strip().splitlines()), type(failure).__name__)[:160]
    return ""
