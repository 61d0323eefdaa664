"""One client's round, and one client's survey, as every engine runs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.clock import Clock
from fedkeel.base.rng import seed_torch, torch_seed
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.client_inputs import (
    batch_maker,
    batch_plans,
    client_info,
    first_pass_length,
    noise_source,
    take_examples,
)
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method import checks
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.method.local_loop import client_finish, client_start, client_step
from fedkeel.method.round_values import Reply

PHASES = ("data", "steps", "upload")
"""Phases of a client's round: choosing and loading examples; the start and the local steps; the
end, and storing the reply."""


@dataclass(frozen=True)
class LocalResult:
    """What came of one client's round.

    Args:
        reply: what the client sends, keeps and logs.
        steps: number of local steps.
        examples: number of examples processed, each as often as it was used.
    """

    reply: Reply
    steps: int
    examples: int


@torch.no_grad()
def train_client(
    setup: TrainingSetup,
    message: Message,
    job: ClientJob,
    client_state: ByPart | None,
    limit: int | None = None,
    clock: Clock | None = None,
) -> LocalResult:
    """Run one client's round.

    Args:
        setup: method, model, data and seed.
        message: what the server sent.
        job: the client.
        client_state: what the client kept, None the first time.
        limit: the most steps, for a rehearsal; None for all.
        clock: counts the seconds of each of `PHASES`.

    Raises:
        TrainingError: the model, the loss or a part raised an exception; it names client, step and
            part.
    """
    clock, setup = clock or Clock(), setup.of(job.client)
    rows = setup.federation.client(job.client)
    batch_positions = batch_plans(setup, message, [job])[0][:limit]
    clock.lap("data")
    step = 0
    try:
        with torch.random.fork_rng(devices=[]):
            seed_torch(torch_seed(setup.seed, "torch", message.round, job.client))
            # the distinct examples of the round, for parts that prepare them
            prepares = bool(setup.training.plan.preparations)
            distinct = np.unique(np.concatenate(batch_positions)) if prepares else None
            client, local = client_start(
                setup.training,
                message,
                client_state,
                client_info(setup, job.client),
                all_examples=partial(take_examples, setup, rows),
                examples=None
                if distinct is None
                else partial(take_examples, setup, rows[distinct]),
            )
            checks.check_states("prepares", client.prepared)
            checks.check_states("carries from step to step", local.carry)
            make_batch = batch_maker(setup, message, job, batch_positions)
            count, examples = len(batch_positions), sum(map(len, batch_positions))
            noise = noise_source(setup, message, job.client)
            pass_length = first_pass_length(setup, job, batch_positions)
            factors = setup.training.step_factors(message.round, count)
            phases = setup.training.phases_of_steps(count, message.round)
            clock.lap("steps")
            if setup.own is not None:
                work = make_batch, (count, examples), limit is not None
                result = LocalResult(*setup.own.train_client(setup, client, local, job, *work))
                clock.lap("steps")
                return result
            for step, positions in enumerate(batch_positions, start=1):
                batch = make_batch(step)
                clock.lap("data")
                first_pass = batch_positions[(step - 1) % pass_length]
                local = client_step(
                    client,
                    local,
                    batch,
                    rows=_index_in(distinct, positions),
                    first_pass=_index_in(distinct, first_pass),
                    noise=noise(),
                    lr=message.lr * factors[step - 1] if factors else None,
                    phase=phases[step - 1] if phases else None,
                )
                clock.lap("steps")
            reply = client_finish(client, local, count)
            checks.check_states("keeps for a client", reply.client_state)
            if client_state is None:  # later states are compared with the rehearsal's
                checks.check_same_form(
                    "keeps for a client", client.client_state, reply.client_state
                )
            clock.lap("upload")
            return LocalResult(reply, count, examples)
    except FedkeelError:
        raise
    except Exception as error:
        raise _client_error(error, job.client, step) from error


def _index_in(distinct: Ints | None, positions: Ints) -> Tensor | None:
    """Return where positions stand among the distinct ones; None where no part prepares."""
    return None if distinct is None else torch.from_numpy(np.searchsorted(distinct, positions))


def _client_error(error: Exception, client: int, step: int) -> TrainingError:
    """Return an error that says at which client and step, and in which part, another was raised."""
    when = f"step {step}" if step else "before its first step"
    return checks.training_error(f"Training failed at client {client}, {when}", error)
