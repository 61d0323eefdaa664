"""Handing a message to the process of a node that trains on a device, see `trainer_process`.

Orders go through a socket in a folder that only the user of the node can open, so what is unpickled
at either end comes from that user's own processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from flwr.app import Context, Message
from flwr.supercore.task_identity import TaskIdentity

from fedkeel.config import Experiment
from fedkeel.errors import RunError
from fedkeel.flower.node.configuration import site_files, state_folder
from fedkeel.flower.node.log import disk_errors
from fedkeel.version import __version__

FOLDER = Path.home() / ".fedkeel" / "trainers"
"""Folder of the sockets and locks."""

START_SECONDS = 120.0
"""Time that the process may take to start: it imports torch and Flower."""

ATTEMPTS = 5
"""How often a process is asked that ends before it takes the message."""

TAKEN, OTHER = b"taken", b"other"
"""What the process says of a message first: that it answers; or that it has read something else
for another one, and ends."""

_COMMAND = "import sys; from fedkeel.flower.node.trainer_process import main; main(sys.argv[1:])"


@dataclass(frozen=True)
class Order:
    """A message that is to be answered.

    Args:
        key: digest of all that decides what the process keeps from message to message.
        file: the experiment of the app.
        message: from the server.
        context: Flower's, with the node's configuration.
        identity: Flower's numbers of task, run and node.
    """

    key: str
    file: Path
    message: Message
    context: Context
    identity: tuple[int, int, int]


def is_supported() -> bool:
    """Return whether this system allows such a process."""
    return sys.platform == "linux"


def ask(file: Path, experiment: Experiment, message: Message, context: Context) -> Message:
    """Return the reply to a message from the node's process, which is started where there is none.

    Args:
        file: the experiment of the app.
        experiment: the same with the settings of the server.
        message: from the server.
        context: Flower's, with the node's configuration.

    Raises:
        RunError: the process does not start, or has ended in the middle of its work.
    """
    with disk_errors(f"{FOLDER.name} in the node's folder of fedkeel cannot be used"):
        FOLDER.mkdir(parents=True, exist_ok=True)
        FOLDER.chmod(stat.S_IRWXU)
    identity = TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id
    key = order_key(file, experiment, context)
    order = pickle.dumps(Order(key, file, message, context, identity))
    name, parent = node_name(context), owner()
    for _ in range(ATTEMPTS):
        with (
            suppress(EOFError, OSError),  # it has just ended: the next one is asked
            _connected(name, parent) as connection,
            _hand_over(connection, order) as pipe,
        ):
            if pipe.recv_bytes() == TAKEN:
                return _reply(pipe, context)
    raise RunError(
        "The process that trains on the device of this node ends before it takes a message.",
        do="see the output of the SuperNode, or start the node with --device cpu",
    )


def _reply(pipe: Connection, context: Context) -> Message:
    """Return what the process replies.

    Raises:
        RunError: it has ended before that.
    """
    try:
        reply: Message
        reply, context.state = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        raise RunError(
            "The process that trains on the device of this node has ended in the middle of its "
            "work.",
            why="usually the system lacks memory, or a library of the GPU has failed",
            do="see the output of the SuperNode; the next message starts another process",
        ) from None
    return reply


def node_name(context: Context) -> str:
    """Return a name for a node among those of its user, by its folder and its clients."""
    config = context.node_config
    facts = [str(state_folder(config).absolute()), str(config.get("partition-id"))]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=10).hexdigest()


def order_key(file: Path, experiment: Experiment, context: Context) -> str:
    """Return a digest of what a process reads once, and then keeps.

    Of the site's files, and of those in a folder of data, it takes names, sizes and times.
    """
    facts = [
        __version__,
        str(file),
        experiment.model_dump_json(),
        sorted((name, str(value)) for name, value in context.node_config.items()),
        [_signature(path) for path in (file, *site_files(context.node_config))],
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _signature(path: Path) -> str:
    """Return what changes when a file, or a file in a folder, is changed."""
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    for item in paths:
        with suppress(OSError):
            now = item.stat()
            facts = [str(item), now.st_size, now.st_mtime_ns, now.st_ino]
            digest.update(json.dumps(facts).encode())
    return digest.hexdigest()


def owner() -> int:
    """Return the process with which the trainer ends: the one that starts those of the messages.

    This process is a child of what Flower has started for the message, see `client_app`.
    """
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


@contextmanager
def place_of(name: str) -> Iterator[str]:
    """Give a short path of a node's socket: that of its folder may be longer than such may be."""
    folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{name}.sock"
    finally:
        os.close(folder)


def _connected(name: str, parent: int) -> socket.socket:
    """Return a connection to the process of a node, which is started where there is none.

    Raises:
        RunError: it does not start.
    """
    end = time.monotonic() + START_SECONDS
    lock = os.open(FOLDER / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    started: subprocess.Popen[bytes] | None = None
    try:
        while time.monotonic() < end and (started is None or started.poll() is None):
            if connection := _connect(name):
                return connection
            if started is None and _try_lock(lock):  # else it starts, or ends, just now
                started = _start(name, parent, lock)
            time.sleep(0.05)
    finally:
        os.close(lock)
    raise RunError(
        "The process that trains on the device of this node does not start.",
        do="see the output of the SuperNode, or start the node with --device cpu",
    )


def _connect(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with place_of(name) as place:
            connection.connect(place)
    except OSError:
        connection.close()
        return None
    return connection


def _try_lock(lock: int) -> bool:
    """Take the lock that a process holds for as long as it lives; return whether it was free."""
    import fcntl  # which not every system has

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(name: str, parent: int, lock: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", "-c", _COMMAND, str(FOLDER), name, str(parent)]
    return subprocess.Popen(
        words, pass_fds=[lock], stdin=subprocess.DEVNULL, start_new_session=True
    )


def _hand_over(connection: socket.socket, order: bytes) -> Connection:
    """Send an order, with the output of this process, and return the pipe for the reply."""
    socket.send_fds(connection, [b"o"], [1, 2])
    pipe = Connection(os.dup(connection.fileno()))
    pipe.send_bytes(order)
    return pipe
