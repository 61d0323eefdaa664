"""A ClientApp whose messages are answered in a process of their own, which may end at any time."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedkeel.engine.process.forking import end_with_parent, exit_reason
from fedkeel.errors import RunError
from fedkeel.flower.node.answer import CLIENT_APP_RAISED
from fedkeel.flower.node.configuration import state_folder
from fedkeel.flower.node.expiry import ended_in_time
from fedkeel.flower.node.log import log_error

CLIENT_APP_CRASHED = 8
"""Flower's code for a ClientApp whose process has ended."""

POLL_SECONDS = 0.1
"""Time between looks whether the process that answers a message still runs."""


class SupervisedClientApp(ClientApp):
    """A ClientApp that answers each message in a child process, and says so when that one ends.

    Where the process of a ClientApp is killed or exits, Flower notices after two missed heartbeats,
    a minute later. Here the child does the work, and its parent replies at once with an error. A
    child that hangs is ended before its message expires, because Flower's heartbeats go on, and its
    node would never be free again. Its output then shows where it hung.

    The child is a fork, on Linux. Elsewhere a fork after such imports is not safe: the process that
    Flower started answers itself, and is ended when it hangs.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, or reply that the process which worked on it has ended."""
        if not sys.platform.startswith("linux"):
            return self._answer(message, context)
        reader, writer = Pipe(duplex=False)
        parent = os.getpid()
        with warnings.catch_warnings():  # Flower's heartbeats are a thread, which the child lacks
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            reader.close()
            self._answer_in_child(message, context, writer, parent)
        writer.close()
        with reader:
            return _receive(reader, child, message, context)

    def _answer(self, message: Message, context: Context) -> Message:
        with ended_in_time(message):
            return super().__call__(message, context)

    def _answer_in_child(
        self, message: Message, context: Context, writer: Connection, parent: int
    ) -> NoReturn:
        """Send the reply and the app's state to the parent, and end this process."""
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):  # Flower's own would report to it
                signal.signal(number, signal.SIG_DFL)
            end_with_parent(parent)
            try:
                reply = self._answer(message, context)
            except Exception as error:  # its message may hold data, so it stays here
                traceback.print_exc()
                reply = Message(Error(CLIENT_APP_RAISED, type(error).__name__), reply_to=message)
            writer.send_bytes(pickle.dumps((reply, context.state)))
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _receive(reader: Connection, child: int, message: Message, context: Context) -> Message:
    """Return what a child sends, or an error once it has ended without a word."""
    status: int | None = None
    # a process that the child has started may hold the pipe open when the child has ended
    while not reader.poll(POLL_SECONDS) and status is None:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = code if ended else None
    sent = b""
    with suppress(EOFError, OSError):  # the latter where it ended in the middle
        sent = reader.recv_bytes() if reader.poll() else b""
    if status is None:
        _, status = os.waitpid(child, 0)
    if sent:
        reply: Message
        reply, context.state = pickle.loads(sent)
        return reply
    exit_code = os.waitstatus_to_exitcode(status)
    reason = end_reason(exit_code)
    problem = f"A message of the server was not answered: {reason}."
    why = exit_reason(exit_code) if exit_code < 0 else None
    log_error(state_folder(context.node_config), RunError(problem, why=why))
    return Message(Error(CLIENT_APP_CRASHED, reason), reply_to=message)


def end_reason(code: int) -> str:
    """Return in words how a process ended, by its exit code, negative for a signal.

    >>> end_reason(-9), end_reason(3)
    ('its process was killed by SIGKILL', 'its process ended with exit code 3')
    """
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"its process was killed by {name}"
