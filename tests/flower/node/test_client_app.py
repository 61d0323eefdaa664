"""A node whose process ends in the middle of its work replies that it has."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedkeel.flower.apps import client_app
from in_process_grid import InProcessGrid
from toys import alive, deadline

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no child process")

GoOn = Callable[[Message, Context], Message]


def ask(tmp_path: Path, mod: Callable[[Message, Context, GoOn], Message], ttl: float = 60.0):  # type: ignore[no-untyped-def]
    """Return the reply of a node's app to a message, and its context."""
    InProcessGrid({})  # gives this process an identity
    app = client_app(tmp_path / "none.toml", mods=[mod])
    context = Context(1, 1, {"state": str(tmp_path / "state")}, RecordDict(), {})
    with deadline(30):
        return app(Message(RecordDict(), 1, "train", ttl=ttl), context), context


def exits(message: Message, context: Context, go_on: GoOn) -> Message:
    os._exit(3)


def leaves(message: Message, context: Context, go_on: GoOn) -> Message:
    sys.exit(4)


def is_killed(message: Message, context: Context, go_on: GoOn) -> Message:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def leaves_a_process(message: Message, context: Context, go_on: GoOn) -> Message:
    """Its own child goes on, and holds all that was open."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    os._exit(5)


@linux
@pytest.mark.parametrize(
    ("mod", "reason"),
    [
        (exits, "its process ended with exit code 3"),
        (leaves, "its process ended with exit code 4"),
        (is_killed, "its process was killed by SIGKILL"),
        (leaves_a_process, "its process ended with exit code 5"),
    ],
)
def test_a_process_that_ends_is_told_at_once(
    tmp_path: Path, mod: Callable[[Message, Context, GoOn], Message], reason: str
) -> None:
    """The server waited for its whole deadline, in every round."""
    began = time.monotonic()
    reply, _ = ask(tmp_path, mod)
    assert time.monotonic() - began < 15  # of a message that lives for a minute
    assert reply.has_error()
    assert reply.error.reason == reason
    log = (tmp_path / "state" / "node.log").read_text()
    assert f"RunError: A message of the server was not answered: {reason}." in log
    assert ("lack of memory" in log) == ("SIGKILL" in reason)


@linux
def test_what_hangs_is_ended_while_a_reply_still_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"

    def hangs(message: Message, context: Context, go_on: GoOn) -> Message:
        pid.write_text(str(os.getpid()))
        time.sleep(1000)
        raise AssertionError

    reply, _ = ask(tmp_path, hangs, ttl=6.5)
    assert reply.error.reason == "its process ended with exit code 1"
    assert reply.metadata.ttl > 0
    assert not alive(int(pid.read_text()))
    assert "in hangs" in capfd.readouterr().err


@linux
def test_what_an_app_raises_stays_on_the_node(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def raises(message: Message, context: Context, go_on: GoOn) -> Message:
        raise LookupError("secret-patient")

    reply, _ = ask(tmp_path, raises)
    assert reply.error.reason == "LookupError"
    assert "LookupError: secret-patient" in capfd.readouterr().err


def test_an_app_keeps_what_it_writes_into_its_state(tmp_path: Path) -> None:
    """Flower's own middlewares keep their numbers there from message to message."""

    def counts(message: Message, context: Context, go_on: GoOn) -> Message:
        context.state["count"] = ConfigRecord({"n": 7})
        content = RecordDict({"pid": ConfigRecord({"pid": os.getpid()})})
        return Message(content, reply_to=message)

    reply, context = ask(tmp_path, counts)
    assert context.state["count"] == ConfigRecord({"n": 7})
    assert (reply.content["pid"]["pid"] != os.getpid()) == (sys.platform == "linux")
    assert not reply.has_error()
