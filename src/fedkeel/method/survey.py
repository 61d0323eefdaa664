"""The survey before local training: clients answer, and the mean answer joins the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.errors import CompositionError, TrainingError
from fedkeel.method.checks import call
from fedkeel.method.context import (
    ByPart,
    ClientInfo,
    Floats,
    Message,
    PartStates,
    PersonalParameters,
    part_state,
)
from fedkeel.method.local_loop import make_step, start_carry
from fedkeel.method.local_training import PERSONAL, ClientTraining, start_client_state
from fedkeel.task.batch import Batch


def client_survey(
    training: ClientTraining,
    message: Message,
    client_state: ByPart | None,
    client_info: ClientInfo,
    all_examples: Callable[[], Batch],
) -> ByPart:
    """Return a client's answers to the surveys, by part, before it trains.

    Args:
        training: method, model and local training.
        message: what the server sent.
        client_state: what the client kept from its last round, None the first time.
        client_info: about the client.
        all_examples: returns all examples of the client.
    """
    client_state, buffers = start_client_state(training, message, client_state)
    carry = start_carry(training.plan, message.params, client_state)
    states = PartStates(message.broadcast, client_state, carry)
    start = tree.tensors(part_state(client_state, PERSONAL))
    personal = PersonalParameters(start, start)
    step = make_step(
        training, message, client_info, all_examples(), buffers, states, personal=personal
    )
    return {part.name: call(part.survey, step.view(part.name)) for part in training.plan.surveys}


def add_mean_answers(message: Message, answers: ByPart, weights: Floats) -> Message:
    """Return the message with the weighted mean of the clients' answers in it.

    Args:
        message: what the clients have received.
        answers: by part, tensors [K, ...].
        weights: [K] weights of the clients, in the same order; they need not sum to 1.

    Raises:
        CompositionError: an answer is not made of floating-point tensors.
        TrainingError: no client gave a finite answer.
    """
    by_path = dict(tree.walk(dict(answers)))
    other_types = [path for path, t in by_path.items() if not t.is_floating_point()]
    if other_types or not by_path:
        got = f"{other_types[0]}: {by_path[other_types[0]].dtype}" if other_types else "nothing"
        raise CompositionError(
            "The answers to a survey have no mean.", got=got, expected="floating-point tensors"
        )
    finite = [t.reshape(len(t), -1).isfinite().all(dim=1) for t in by_path.values()]
    weights = np.where(torch.stack(finite).all(dim=0).cpu().numpy(), weights, 0.0)
    if not weights.any():
        raise TrainingError(
            f"Training diverged in round {message.round + 1}: no client's answer is finite.",
            do="lower local.lr (or the method's own step size), or clip gradients",
        )
    rows = np.flatnonzero(weights)
    index, shares = torch.from_numpy(rows), torch.from_numpy(weights[rows] / weights.sum())

    def mean(t: Tensor) -> Tensor:
        factors: Tensor = shares.to(t.device, t.dtype)
        return torch.einsum("k,k...->...", factors, t[index.to(t.device)])

    return with_answers(
        message, {part: tree.map_tensors(mean, state) for part, state in answers.items()}
    )


def with_answers(message: Message, answers: ByPart) -> Message:
    """Return the message with answers, by part, among what is sent."""
    added = {
        part: {**part_state(message.broadcast, part), "survey": answer}
        for part, answer in answers.items()
    }
    return replace(message, broadcast={**message.broadcast, **added})
