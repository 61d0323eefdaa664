"""The server's message as one state of named tensors, which can be written, packed and counted."""

from __future__ import annotations

from fedkeel.method.compose import Plan
from fedkeel.method.context import Message
from fedkeel.tree import State, Tree, nbytes, substate, substates, tensors


def message_state(message: Message) -> State:
    """Return everything that a message sends, as one state."""
    return {
        "params": dict(message.params),
        "buffers": dict(message.buffers),
        "broadcast": dict(message.broadcast),
    }


def bytes_to_client(message: Message, plan: Plan) -> dict[str, int]:
    """Return the bytes that a client is sent, by part, with one model: the global or its own."""
    down = {"model": nbytes(dict(message.params)) + nbytes(dict(message.buffers))}
    to_all = {k: v for k, v in message.broadcast.items() if k not in plan.row_senders}
    return {**down, **{part: nbytes(state) for part, state in to_all.items()}}


PERSONAL_PARAMS = "personal"
"""Name of the parameters that no message has, beside it, where a whole model is evaluated."""


def evaluation_state(params: Tree, personal: frozenset[str]) -> State:
    """Return a model as a state whose shared parameters stand where a message has them."""
    return {
        "params": {name: value for name, value in params.items() if name not in personal},
        PERSONAL_PARAMS: {name: value for name, value in params.items() if name in personal},
    }


def evaluated_params(state: State) -> Tree:
    """Return the model of a state that `evaluation_state` returned."""
    return tensors({**substate(state, "params"), **substate(state, PERSONAL_PARAMS)})


def shared_state(message: Message, personal: Tree) -> State:
    """Return a message with the parameters that only an evaluation of a whole model needs."""
    return {**message_state(message), PERSONAL_PARAMS: dict(personal)}


def message_from_state(state: State, round: int, lr: float) -> Message:
    """Return the message of a state that `message_state` returned."""
    return Message(
        params=tensors(substate(state, "params")),
        buffers=tensors(substate(state, "buffers")),
        broadcast=substates(substate(state, "broadcast")),
        round=round,
        lr=lr,
    )
