"""Where clients train: on a GPU where there is one and the model runs there."""

from __future__ import annotations

import torch

from fedkeel import config
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.vectorized.facts import few_examples
from fedkeel.errors import RunError
from fedkeel.task.network import Batch


def device_for(asked: config.Engine, setup: TrainingSetup) -> tuple[str, list[str]]:
    """Return the device that clients train on, ``cpu`` or ``cuda``, and why it is no GPU.

    Raises:
        RunError: a GPU is asked for, and torch finds none, or the model does not run on it.
    """
    if asked.kind not in ("auto", "vectorized") or asked.device == "cpu":
        return "cpu", []
    if torch.cuda.is_available():
        refused = refusal(setup, torch.device("cuda"))
        if refused and asked.device == "cuda":
            raise RunError(
                "The model or its loss does not run on a GPU.",
                got=refused,
                do="make tensors where the inputs are (device=x.device), "
                "or set engine.device = 'cpu'",
            )
        if refused:
            return "cpu", [f"clients are not trained on the GPU: {refused}"]
        return "cuda", []
    if asked.device == "cuda":
        raise RunError(
            "There is no GPU that torch can use.",
            got=f"torch {torch.__version__}",
            expected="torch.cuda.is_available()",
            do="install a build of torch for CUDA, or set engine.device = 'cpu'",
        )
    return "cpu", []


def refusal(setup: TrainingSetup, device: torch.device) -> str:
    """Return why a training step of the model fails on a device, "" where it does not.

    Modules and losses of one's own may make tensors on the processor, wherever their inputs are.
    """
    few = few_examples(setup)
    batch = Batch(few.x.to(device), few.y.to(device))
    drawing = [device] if device.type == "cuda" else []
    try:
        network = setup.training.network.on(device)
        buffers = network.copy_buffers(network.buffers)
        with torch.random.fork_rng(devices=drawing):
            network.value_and_grad(network.params, buffers, batch, "eager")
            network.example_losses(network.test_logits(network.params, buffers, batch.x), batch.y)
    except torch.OutOfMemoryError:  # is said where the data are placed
        return ""
    except Exception as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
    return ""
