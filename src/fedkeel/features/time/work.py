"""What a client's round takes: its computing, in multiply-adds of the method's own steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedkeel.data import batches
from fedkeel.data.partition.common import Floats
from fedkeel.engine.base import ClientJob
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.choose.work import OperationCounter, gradient_multiply_adds
from fedkeel.engine.local import train_client
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.rehearsal import with_empty_answers, with_one_batch
from fedkeel.features.time.settings import System
from fedkeel.method.server_round import server_message


@dataclass(frozen=True)
class ClientWork:
    """What a round takes of each of C clients, at speed 1 and before bandwidth.

    Args:
        seconds: [C] seconds of computing.
        survey_seconds: [C] seconds of an answer before training; zeros without a survey.
        down: bytes to a client.
        up: bytes from a client.
        loss_seconds: [C] seconds until a client knows the loss of a model on its own examples.
    """

    seconds: Floats
    survey_seconds: Floats
    down: float
    up: float
    loss_seconds: Floats = field(default_factory=lambda: np.zeros(0))


def client_work(prepared: Prepared, settings: System) -> ClientWork:
    """Return what a round takes of each client of a run.

    The multiply-adds of a step are counted once, in a client's first steps with the method's own
    gradients and corrections, and scale with the examples: those of the steps with the examples in
    the mini-batches, those of the start and the end with all examples of the client.
    """
    setup = prepared.setup
    sizes, local = setup.federation.sizes, setup.training.local
    steps = np.array([batches.count_steps(local, int(n)) if n else 0 for n in sizes])
    examples = np.array([batches.count_examples(local, int(n)) if n else 0 for n in sizes])
    seconds: Floats = np.zeros(len(sizes))
    answer: Floats = np.zeros(len(sizes))
    if settings.step_seconds is not None:
        seconds += steps * settings.step_seconds
    else:
        per_step, per_round = method_multiply_adds(prepared)
        seconds += (per_step * examples + per_round * sizes) / settings.multiply_adds
    if setup.training.plan.surveys:
        answer += sizes * gradient_multiply_adds(setup) / settings.multiply_adds
    estimate = estimate_run(prepared)
    return ClientWork(
        seconds,
        answer,
        float(sum(estimate.down.values())),
        float(sum(estimate.up.values())),
        _loss_seconds(prepared, settings),
    )


def _loss_seconds(prepared: Prepared, settings: System) -> Floats:
    """Return [C] the time of a forward pass of all examples, a third of that with gradients."""
    setup = prepared.setup
    sizes, local = setup.federation.sizes, setup.training.local
    if settings.step_seconds is None:
        of_gradients = sizes * gradient_multiply_adds(setup) / settings.multiply_adds
    else:
        passes = [batches.batches_per_pass(local, int(n)) if n else 0 for n in sizes]
        of_gradients = np.array(passes) * settings.step_seconds
    return np.asarray(of_gradients / 3.0)


def method_multiply_adds(prepared: Prepared) -> tuple[float, float]:
    """Return the multiply-adds of a method: for an example of a step, and of a round.

    Of a model that does not bear being watched, they are those of plain gradients.
    """
    setup = prepared.setup
    first = int(np.flatnonzero(setup.federation.sizes)[0])
    setup = replace(setup, federation=with_one_batch(setup, first))
    size = int(setup.federation.sizes[first])
    message = server_message(prepared.plan, prepared.server, 1e-9)
    message = with_empty_answers(message, prepared.spec)
    job = ClientJob(row=0, client=first, steps_done=0)
    counts = []
    longer = replace(setup.training, local=setup.training.local.model_copy(update=_TWO_STEPS))
    setup = replace(setup, training=longer)
    with use_numerics(setup.precision), torch.random.fork_rng(devices=[]):
        try:
            for steps in (1, 2):
                with OperationCounter() as counter:
                    train_client(setup, message, job, None, limit=steps)
                counts.append(counter.multiply_adds)
        # what fails without the watch too fails in training, and reaches the user
        except Exception:
            return gradient_multiply_adds(prepared.setup), 0.0
    per_step = (counts[1] - counts[0]) / size
    return per_step, max(0.0, counts[0] / size - per_step)


_TWO_STEPS = {"epochs": None, "steps": 2, "accumulate": 1}
"""Local work that has a second step for any client."""
