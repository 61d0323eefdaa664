"""A process of a node that trains on a device, and keeps there what the next message needs again.

A message is answered by a process of its own. On a GPU each would have to load CUDA, place model
and data, and compile the steps anew, in every round. So where a node trains on a device, the
process of the message hands it to this one, and waits for the reply (`device_process`). There is
one for each node. It ends with the SuperNode; when another run, or other settings, data or policy
take its place; when no message comes for long; and when its device has failed. The next message
then starts another one.

Linux only. Elsewhere each message starts anew.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from flwr.supercore.task_identity import TaskIdentity

from fedkeel.base.user_code import add_flower_app
from fedkeel.config import Experiment, load
from fedkeel.flower.apps import read_experiment
from fedkeel.flower.node import device_process
from fedkeel.flower.node.answer import answer
from fedkeel.flower.node.configuration import check_asked, make_node, site_policy
from fedkeel.flower.node.device_process import OTHER, START_SECONDS, TAKEN, Order, place_of
from fedkeel.flower.node.expiry import ended_in_time
from fedkeel.flower.node.node import Node

POLL_SECONDS = 0.5
"""Time between looks whether the SuperNode still runs."""

IDLE_LIVES = 2.0
"""The process ends when no message has come for as many lives of the last one: it leaves the memory
of the device to others."""


class NodeAnswers:
    """Answers the messages of one run.

    Args:
        key: digest of what it keeps, see `device_process.order_key`.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._node: Node | None = None

    @property
    def is_broken(self) -> bool:
        """Whether another process could use the device, and this one cannot any more."""
        node = self._node
        return node is not None and "training" in vars(node) and node.training.is_broken

    def answer(self, order: Order) -> bytes:
        """Return the reply to a message, and the state of its context, as bytes."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = order.identity
        for folder in list(order.file.absolute().parents)[:2]:  # as Flower does with an app
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        add_flower_app(order.file)

        def read() -> tuple[Experiment, Experiment]:
            return load(order.file), read_experiment(order.file, order.context)

        reply = answer(order.file, read, order.message, order.context, self._make)
        return pickle.dumps((reply, order.context.state))

    def _make(
        self,
        experiment: Experiment,
        config: Mapping[str, object],
        installed: Experiment | None,
        kind: str,
    ) -> Node:
        if self._node is None:
            self._node = make_node(experiment, config, installed, kind)
        else:  # that was made for a message of another kind
            check_asked(experiment, installed, site_policy(config), kind)
        return self._node


def serve(name: str, parent: int) -> None:
    """Answer the messages of a node for as long as there is a reason to.

    Args:
        name: the node's name.
        parent: process with which this one ends.
    """
    answers, idle, last = None, START_SECONDS, time.monotonic()
    _withdraw(name)  # what a process has left that was killed; this one has its lock
    with socket.socket(socket.AF_UNIX) as listener:
        with place_of(name) as place:
            listener.bind(place)
        listener.listen(16)
        listener.settimeout(POLL_SECONDS)
        _mute()
        try:
            while _is_running(parent) and time.monotonic() - last < idle:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection, suppress(EOFError, OSError):  # the other end may have been ended
                    order, pipe = _received(connection)
                    answers = answers or NodeAnswers(order.key)
                    with pipe:
                        if order.key != answers.key:
                            _withdraw(name)
                            pipe.send_bytes(OTHER)
                            return
                        pipe.send_bytes(TAKEN)
                        with ended_in_time(order.message):
                            reply = answers.answer(order)
                        if answers.is_broken:
                            _withdraw(name)
                        pipe.send_bytes(reply)
                    idle = IDLE_LIVES * order.message.metadata.ttl
                _mute()
                if answers is not None and answers.is_broken:
                    return
                last = time.monotonic()
        finally:
            _withdraw(name)


def _received(connection: socket.socket) -> tuple[Order, Connection]:
    """Return an order; from here on this process writes where the one that gave it does."""
    connection.settimeout(10.0)
    _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
    connection.settimeout(None)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
        os.close(output)
    pipe = Connection(os.dup(connection.fileno()))
    return pickle.loads(pipe.recv_bytes()), pipe


def _mute() -> None:
    """Let go of the output of a message: whoever reads it waits until all have."""
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    os.close(null)


def _withdraw(name: str) -> None:
    """Take no further message."""
    with suppress(FileNotFoundError):
        os.unlink(device_process.FOLDER / f"{name}.sock")


def _is_running(pid: int) -> bool:
    """Return whether a process runs: one that has ended and waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def main(words: list[str]) -> None:
    """Serve a node: FOLDER NAME PARENT. The lock is held for as long as this process lives."""
    device_process.FOLDER = Path(words[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the SuperNode, with which it ends
    serve(words[1], int(words[2]))
