"""Nothing hangs for ever: not a node, not what waits for one, not what waits for Flower."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import Message

from fedkeel.config import Flower
from fedkeel.errors import RunError
from fedkeel.flower.local.federation import shared_configs
from fedkeel.flower.local.processes import FlowerProcesses
from fedkeel.flower.protocol import TRAIN
from fedkeel.flower.server import connection
from fedkeel.flower.server.membership import Membership
from fedkeel.records.folder import RunFolder
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import alive, deadline, eventually, federation, prepared, same

HANGS = """
import re, sys, time
from pathlib import Path
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedkeel.flower.apps import client_app

TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = 1, 1, 1

def sleeps(message, context, go_on):
    time.sleep(1000)

def holds_on(message, context, go_on):
    re.match("(a+)+$", "a" * 60 + "b")  # without ever letting another thread run

app = client_app(Path("none.toml"), mods=[{way}])
context = Context(1, 1, {{"state": "."}}, RecordDict(), {{}})
reply = app(Message(RecordDict(), 1, "train", ttl=0.5), context)
assert reply.error.reason == "its process ended with exit code 1"
"""


@pytest.mark.parametrize("way", [pytest.param("sleeps", marks=pytest.mark.slow), "holds_on"])
def test_a_process_that_hangs_is_ended_when_its_message_has_lived(tmp_path: Path, way: str) -> None:
    """Also where the time passes in code that lets nobody else run."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS.format(way=way)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Timeout" in done.stderr
    assert f"in {way}" in done.stderr


class Silent(InProcessGrid):
    """A grid that from some time on tries for ever, as Flower's does where nobody answers."""

    after: float = float("inf")
    pulls = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulls += 1
        if self.pulls > self.after:
            threading.Event().wait()
        return super().pull_messages(message_ids)

    def get_node_ids(self) -> Iterable[int]:
        if self.pulls > self.after:
            threading.Event().wait()
        return super().get_node_ids()


class Slow(InProcessGrid):
    """A grid that has a part of a reply, and waits for the rest until it is asked who is there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked = threading.Event()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.asked.wait()
        self.asked.clear()
        return super().pull_messages(message_ids)

    def get_node_ids(self) -> Iterable[int]:
        self.asked.set()
        return super().get_node_ids()


def test_a_reply_that_takes_long_to_send_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower waits for all of it when it is asked for what has come."""
    made = prepared("scaffold", dtype="float64", clients=federation(3), per_round=3)
    grid = Slow(make_nodes(made, tmp_path / "nodes"))
    monkeypatch.setattr(connection, "GRACE", 2.0)  # for what else the machine does
    quick = Flower(deadline_seconds=0.2, poll_seconds=0.01)
    made = replace(made, settings=made.settings.model_copy(update={"flower": quick}))
    with deadline(90):
        far, here = run_on_nodes(made, grid), start(made)
    assert [row.faults for row in far.rows] == [{}] * 4
    assert all(torch.equal(far.params[k], one) for k, one in here.params.items())


def test_a_question_lives_as_long_as_an_order(tmp_path: Path) -> None:
    """A node may take as long to read its data as to train."""
    made, lives = prepared("fedavg", clients=federation(2), per_round=2), []

    class Timed(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            lives.extend(one.metadata.ttl for one in messages)
            return super().push_messages(messages)

    settings = Flower(deadline_seconds=600.0, poll_seconds=0.01)
    membership = Membership(
        connection.NodeConnection(Timed(make_nodes(made, tmp_path)), settings), settings, 2
    )
    membership.refresh(0.1, lambda node_by_client: False)
    assert lives == [600.0 + connection.GRACE] * 2


def test_a_superlink_that_does_not_answer_ends_the_run_with_all_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GRACE", 0.2)
    made = prepared("scaffold", dtype="float64", clients=federation(3), per_round=3)
    quick = Flower(deadline_seconds=1.0, poll_seconds=0.01)
    made = replace(made, settings=made.settings.model_copy(update={"flower": quick}))
    grid, out = Silent(make_nodes(made, tmp_path / "nodes")), tmp_path / "run"
    grid.after = 3  # hello, and two rounds
    with deadline(20), pytest.raises(RunError, match="SuperLink does not answer") as error:
        run_on_nodes(made, grid, out)
    assert len(error.value.lines()) <= 4
    record = RunFolder(out).read_run()
    assert (record.status, record.message) == ("failed", "The SuperLink does not answer.")
    saved = RunFolder(out).load()
    assert saved is not None
    assert saved.round == 2
    grid.after = float("inf")
    gone_on, here = run_on_nodes(made, grid, out, resume=True), start(made)
    for row in (*gone_on.rows, *here.rows):
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    assert same(gone_on, here)


def test_what_flower_raises_ends_the_run_in_words(tmp_path: Path) -> None:
    """A certificate that has expired, for one: the run was left as if it went on."""
    made = prepared("fedavg", clients=federation(3), per_round=3)

    class Broken(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if any(one.metadata.message_type == TRAIN for one in messages):
                raise ConnectionError("certificate has expired")
            return super().push_messages(messages)

    with pytest.raises(RunError, match="certificate has expired") as error:
        run_on_nodes(made, Broken(make_nodes(made, tmp_path / "nodes")), tmp_path / "run")
    assert len(error.value.lines()) <= 4
    record = RunFolder(tmp_path / "run").read_run()
    assert (record.status, record.message) == (
        "failed",
        "The SuperLink cannot be reached any more.",
    )


def left_over(database: Path) -> int:
    """Return how many messages the SuperLink keeps that it gives to nobody any more."""
    messages = "SELECT message_id FROM message_ins UNION SELECT message_id FROM message_res"
    query = f"SELECT count(*) FROM objects WHERE ref_count = 0 AND object_id NOT IN ({messages})"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return int(connection.execute(query).fetchone()[0])


@pytest.mark.processes
def test_a_node_that_hung_is_free_again(
    misbehaving: Callable[[Path, list[str]], None], patience: float, tmp_path: Path
) -> None:
    """Rounds go on without it, its process is ended in time, and it takes part again."""
    app, state = tmp_path / "app", tmp_path / "state"
    words = ["rounds=1000", "cohort.clients=12", "flower.enough=0.5"]
    misbehaving(app, [*words, f"flower.deadline_seconds={patience}"])
    nodes = [f'{one} state="{state / str(i)}"' for i, one in enumerate(shared_configs(2))]
    nodes[1] += ' bad="hangs:0"'
    with FlowerProcesses(tmp_path / "federation", nodes) as running:
        running.submit(app, {"out": str(tmp_path / "run")})
        mark = state / "1" / "1" / "pid"
        assert eventually(mark.exists, 9 * patience), running.tail("superlink")
        pid = int(mark.read_text())
        assert alive(pid)
        lived = patience + connection.GRACE
        assert eventually(lambda: not alive(pid), lived + patience)
        back = 120 + 4 * patience  # its SuperNode misses two heartbeats first
        assert eventually(lambda: len(list(mark.parent.glob("began-*"))) > 1, back)
        assert "Timeout" in (running.folder / "node-1.log").read_text()
        # what the node never fetched is not kept until the run ends, a thousand models of it
        assert eventually(lambda: left_over(running.folder / "superlink.db") == 0, lived + patience)
