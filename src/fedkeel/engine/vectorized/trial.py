"""Whether a method and a model can be compiled, found out by one local step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.rehearsal import MAX_REHEARSED
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.vectorized.facts import establish, has_short_rounds
from fedkeel.errors import FedkeelError, first_line
from fedkeel.method.context import Message


def compile_obstacle(setup: TrainingSetup, message: Message, clients: int) -> str:
    """Return why local steps cannot be compiled, "" where they can.

    The smallest clients make one step with a few examples. Their results are lost.

    Args:
        setup: method, model, data and seed.
        message: any message of the run.
        clients: how many clients make the step side by side: 2, or 1 where each trains alone.
    """
    facts, setup = establish(setup), of_few_steps(setup, 1)
    facts = replace(facts, short_rounds=has_short_rounds(setup))
    jobs = smallest_clients(setup, clients)
    trainer = VectorizedTrainer(setup, len(jobs), facts=facts)
    try:
        with use_numerics(setup.precision):
            for _ in trainer(message, jobs, lambda _: None):
                pass
    except FedkeelError as error:  # which the run raises again
        return first_line(error)
    return "" if trainer.strategy.is_compiled else trainer.reasons[-1]


def of_few_steps(setup: TrainingSetup, steps: int) -> TrainingSetup:
    """Return a setup whose clients make a few steps with a few examples each."""
    local = setup.training.local
    size = local.batch_size
    few = MAX_REHEARSED if size == "all" else min(size, MAX_REHEARSED)
    local = local.model_copy(update={"epochs": None, "steps": steps, "batch_size": few})
    return replace(setup, training=replace(setup.training, local=local))


def smallest_clients(setup: TrainingSetup, count: int) -> list[ClientJob]:
    """Return the first round of the clients with the fewest examples."""
    sizes = setup.federation.sizes
    smallest = sorted(np.flatnonzero(sizes).tolist(), key=lambda k: int(sizes[k]))[:count]
    return [ClientJob(row=0, client=client, steps_done=0) for client in smallest]
