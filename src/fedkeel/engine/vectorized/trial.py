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
    training, facts = setup.training, establish(setup)
    size = training.local.batch_size
    few = MAX_REHEARSED if size == "all" else min(size, MAX_REHEARSED)
    one_step = training.local.model_copy(update={"epochs": None, "steps": 1, "batch_size": few})
    setup = replace(setup, training=replace(training, local=one_step))
    facts = replace(facts, short_rounds=has_short_rounds(setup))
    sizes = setup.federation.sizes
    smallest = sorted(np.flatnonzero(sizes).tolist(), key=lambda k: int(sizes[k]))[:clients]
    jobs = [ClientJob(row=0, client=client, steps_done=0) for client in smallest]
    trainer = VectorizedTrainer(setup, len(jobs), facts=facts)
    try:
        with use_numerics(setup.precision):
            for _ in trainer(message, jobs, lambda _: None):
                pass
    except FedkeelError as error:  # which the run raises again
        return first_line(error)
    return "" if trainer.strategy.is_compiled else trainer.reasons[-1]
