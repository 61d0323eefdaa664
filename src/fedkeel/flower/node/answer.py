"""The reply of a node's process to one message of Flower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.app import Context, Error, Message

from fedkeel.config import Experiment
from fedkeel.errors import FedkeelError
from fedkeel.flower.node import device_process
from fedkeel.flower.node.configuration import make_node, state_folder, trains_on_device
from fedkeel.flower.node.log import log_error, log_reply, public_reason
from fedkeel.flower.node.node import Node
from fedkeel.flower.node.sums_only import app_name, check_sums_only, promise_sums
from fedkeel.flower.protocol import DESCRIBE_DATA

CLIENT_APP_RAISED = 2
"""Flower's code for a ClientApp that raised an exception."""

MakeNode = Callable[[Experiment, Mapping[str, object], Experiment | None, str], Node]
"""Gives a node as `make_node` does."""


def answer(
    file: Path,
    read: Callable[[], tuple[Experiment, Experiment]],
    message: Message,
    context: Context,
    make: MakeNode | None = None,
) -> Message:
    """Return the reply to a message, or a short reason why there is none.

    Where the node trains on a device, its process for that answers: see `trainer_process`.

    Args:
        file: the experiment of the app.
        read: reads the experiment: as it is installed here, and as the server has set it.
        message: from the server.
        context: Flower's, with the node's configuration.
        make: gives the node in that process; None in any other.
    """
    folder = state_folder(context.node_config)
    try:
        kind, (installed, experiment) = message.metadata.message_type, read()
        if make is None and _has_process(context.node_config, experiment):
            return device_process.ask(file, experiment, message, context)
        app = app_name(file)
        check_sums_only(folder, app, installed, experiment)
        config = dict(context.node_config)
        node = (make or make_node)(experiment, config, installed, kind)
        promise_sums(folder, app, experiment)  # a run that is refused binds nobody
        content = node.reply(kind, message.content)
        log_reply(kind, content)
        return Message(content, reply_to=message)
    except FedkeelError as error:
        log_error(folder, error)
        reason = public_reason(error)
        if message.metadata.message_type == DESCRIBE_DATA:  # the server does not know it yet
            reason = f"{_site(context.node_config)}: {reason}"
    except Exception as error:  # its message may hold data, so it stays here
        log_error(folder, error)
        reason = type(error).__name__
    return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)


def _site(config: Mapping[str, object]) -> str:
    """Return the name of a site, or the number of its client where it has none."""
    return str(config.get("name") or f"client {config.get('partition-id')}")


def _has_process(config: Mapping[str, object], experiment: Experiment) -> bool:
    """Return whether another process of the node answers: see `trainer_process`."""
    return device_process.is_supported() and trains_on_device(config, experiment)
