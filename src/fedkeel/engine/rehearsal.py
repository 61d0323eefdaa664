"""The rehearsal: one client trains one step, to learn names, shapes and types of a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from fedkeel.data.federation import Federation
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.local import train_client
from fedkeel.engine.message_state import message_state
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.survey import survey_client
from fedkeel.errors import TrainingError
from fedkeel.method import checks
from fedkeel.method.context import ByPart, Message
from fedkeel.method.local_training import start_client_state
from fedkeel.method.plugins import user_modules
from fedkeel.method.round_values import reply_state
from fedkeel.method.survey import add_mean_answers, with_answers
from fedkeel.tree import State, map_tensors, substates, unwalk

MAX_REHEARSED = 8
"""Examples of a rehearsal, at most: a mini-batch of a large network takes seconds on a processor,
and the form of a reply does not depend on their number."""

UPDATE_PREFIX = "update/"
"""Start of the paths of updates among the specs of a reply."""

CLIENT_STATE_PREFIX = "client_state/"
"""Start of the paths of what a client keeps."""

SURVEY_PREFIX = "survey/"
"""Start of the paths of the answers to surveys."""


def rehearse(setup: TrainingSetup, message: Message) -> dict[str, TensorSpec]:
    """Train one step of the first client, throw it away, and return the form of its reply.

    It has the task's own network, whichever it has in the run.

    Returns:
        Shape and type of each tensor of a reply, by path, and of each answer to a survey.

    Raises:
        TrainingError: the model, the loss or a part raised an exception; or a user's part changed
            in place what it received or what it kept.
    """
    setup = replace(setup, others=None)
    user_parts = user_modules(setup.training.plan.parts)
    if not user_parts or setup.training.network.traits.writes_parameters:
        return specs_of(rehearse_client(setup, message))
    received, fault = message_state(message), f"was changed in place, in {', '.join(user_parts)}"
    before = checks.tensor_versions(received)
    spec = specs_of(rehearse_client(setup, message))
    checks.check_unchanged(f"What the server sent {fault}", before, received)
    client_state, _ = start_client_state(setup.training, message, None)
    before = checks.tensor_versions(dict(client_state))
    rehearse_client(setup, message, client_state)
    checks.check_unchanged(f"What a client keeps {fault}", before, dict(client_state))
    return spec


def rehearse_client(
    setup: TrainingSetup, message: Message, client_state: ByPart | None = None
) -> State:
    """Return what the first client sends and keeps after one step, and its answers to surveys.

    Args:
        setup: method, model, data and seed.
        message: what the server sent.
        client_state: what the client kept, None the first time.
    """
    first = int(np.flatnonzero(setup.federation.sizes)[0])  # a node has only its own data
    setup = replace(setup, federation=with_one_batch(setup, first))
    job = ClientJob(row=0, client=first, steps_done=0)
    answers: ByPart = {}
    if setup.training.plan.surveys:
        answers = survey_client(setup, message, job, client_state)
        of_one_client = map_tensors(lambda t: t[None], dict(answers))
        message = add_mean_answers(message, substates(of_one_client), np.ones(1))
    result = train_client(setup, message, job, client_state, limit=1)
    return {**reply_state(result.reply), "survey": dict(answers)}


def with_one_batch(setup: TrainingSetup, client: int) -> Federation:
    """Return the federation with a few of a client's examples, one mini-batch.

    A part may use all of them, and a node of a federation may claim any number.
    """
    federation, batch_size = setup.federation, setup.training.local.batch_size
    size = MAX_REHEARSED if batch_size == "all" else min(batch_size, MAX_REHEARSED)
    rows = np.array(federation.client(client)[:size])
    offsets = np.where(np.arange(len(federation) + 1) > client, len(rows), 0)
    return replace(federation, rows=rows, offsets=offsets)


def specs_below(spec: Mapping[str, TensorSpec], prefix: str) -> dict[str, TensorSpec]:
    """Return the specs of the paths that start with a prefix, by path without it."""
    return {
        path.removeprefix(prefix): tensor
        for path, tensor in spec.items()
        if path.startswith(prefix)
    }


def client_state_spec(spec: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return shape and type of what a client keeps, by path, from those of its reply."""
    return specs_below(spec, CLIENT_STATE_PREFIX)


def spec_of_client(
    setup: TrainingSetup, spec: Mapping[str, TensorSpec], client: int
) -> Mapping[str, TensorSpec]:
    """Return the form of a client's reply: what it keeps is that of its own network.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, of the task's own network.
        client: index of the client.
    """
    kept = None if setup.others is None else setup.others.kept_by(client)
    if kept is None:
        return spec
    sent = {path: item for path, item in spec.items() if not path.startswith(CLIENT_STATE_PREFIX)}
    return {**sent, **{CLIENT_STATE_PREFIX + path: item for path, item in kept.items()}}


def check_reply(
    spec: Mapping[str, TensorSpec], client: int, rehearsed: Mapping[str, TensorSpec]
) -> None:
    """Refuse a reply, or answers, whose names, shapes or types differ from the rehearsal's.

    Raises:
        TrainingError: names the client and the first tensor that differs.
    """
    if spec == rehearsed:
        return
    path = next(p for p in {**rehearsed, **spec} if spec.get(p) != rehearsed.get(p))
    raise TrainingError(
        f"The reply of client {client} has another form than the first one.",
        got=f"{path}: {spec.get(path)}",
        expected=f"{rehearsed.get(path)}",
        why="what a part sends, keeps and logs has the same names, shapes and types each time",
    )


def with_empty_answers(message: Message, spec: Mapping[str, TensorSpec]) -> Message:
    """Return the message with zeros in place of the survey's answers, which are not known yet.

    Args:
        message: what the server sends before the survey.
        spec: shape and type of each tensor of a rehearsed reply, by path.
    """
    zeros = {
        path: torch.zeros(tensor.shape, dtype=tensor.dtype)
        for path, tensor in specs_below(spec, SURVEY_PREFIX).items()
    }
    return with_answers(message, substates(unwalk(zeros)))
