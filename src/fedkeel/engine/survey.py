"""One client's answers to the surveys, before it trains, as every engine asks for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from fedkeel.base.rng import seed_torch, torch_seed
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.client_inputs import client_info, take_examples
from fedkeel.method.checks import check_states, explain_errors
from fedkeel.method.context import ByPart, Message
from fedkeel.method.survey import client_survey


@torch.no_grad()
def survey_client(
    setup: TrainingSetup, message: Message, job: ClientJob, client_state: ByPart | None
) -> ByPart:
    """Return a client's answers to the surveys, by part.

    Args:
        setup: method, model, data and seed.
        message: what the server sent.
        job: the client.
        client_state: what the client kept, None the first time.

    Raises:
        TrainingError: the model, the loss or a part raised an exception; it names client and part.
    """
    setup = setup.of(job.client)
    # the message's memory may still hold the answers of the last round
    broadcast = {
        part: {name: value for name, value in state.items() if name != "survey"}
        for part, state in message.broadcast.items()
    }
    with (
        explain_errors(f"Training failed at client {job.client}, before its first step"),
        torch.random.fork_rng(devices=[]),
    ):
        seed_torch(torch_seed(setup.seed, "survey", message.round, job.client))
        answers = client_survey(
            setup.training,
            replace(message, broadcast=broadcast),
            client_state,
            client_info(setup, job.client),
            partial(take_examples, setup, setup.federation.client(job.client)),
        )
        check_states("answers to its survey", answers)
    return answers
