"""The server's message as one state of named tensors, which can be written, packed and counted."""

from __future__ import annotations

from fedkeel.method.context import Message
from fedkeel.tree import State, substate, substates, tensors


def message_state(message: Message) -> State:
    """Return everything that a message sends, as one state."""
    return {
        "params": dict(message.params),
        "buffers": dict(message.buffers),
        "broadcast": dict(message.broadcast),
    }


def message_from_state(state: State, round: int, lr: float) -> Message:
    """Return the message of a state that `message_state` returned."""
    return Message(
        params=tensors(substate(state, "params")),
        buffers=tensors(substate(state, "buffers")),
        broadcast=substates(substate(state, "broadcast")),
        round=round,
        lr=lr,
    )
