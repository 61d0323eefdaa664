"""What a run does when Ray loses a node or its head, and what it says where there is no Ray.

Each test of a loss starts a Ray of its own: two nodes on this machine, of one core each.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedkeel.engine.prepared import Prepared
from fedkeel.engine.ray import cluster, watch
from fedkeel.engine.ray.watch import Machine, Watch, check_answer, this_machine
from fedkeel.errors import ClusterWarning, RunError
from fedkeel.records.folder import RunFolder
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.start import start
from toys import Slow, children, deadline, prepared, same

MODEL = partial(Slow, 0.01)

HEARTBEATS = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""A lost node is noticed after two seconds, where it takes 15 otherwise."""


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with deadline(180):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Ray warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()


class Nodes:
    """A Ray of two nodes, to which nobody is connected."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": 100_000_000}
        head = {**node, "include_dashboard": False, "_system_config": HEARTBEATS}
        self.ray: Any = cluster.module()
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self.cluster.address
        self.second = self.cluster.add_node(**node)
        both = (self.cluster.head_node, self.second)
        raylets = [one.process.pid for node in both for one in node.all_processes["raylet"]]
        self.agents = [pid for raylet in raylets for pid in children(raylet)]

    def kill_second(self) -> None:
        """Kill the node on which this process does not depend, as a machine that loses power."""
        here = self.ray.get_runtime_context().get_node_id()
        assert here != self.second.node_id
        with quiet():
            self.second.kill_all_processes(check_alive=False, allow_graceful=False)

    def kill_head(self) -> None:
        """Kill what knows the nodes and starts actors; the actors go on."""
        (server,) = self.cluster.head_node.all_processes["gcs_server"]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    before = signal.getsignal(signal.SIGTERM)
    with quiet():
        found = Nodes()
    yield found
    with quiet():
        found.cluster.shutdown()
    for pid in found.agents:  # they outlive a raylet that was killed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    signal.signal(signal.SIGTERM, before)


class InRound(Callback):
    """Does something once a client of a round has been trained."""

    def __init__(self, round: int, act: Callable[[], None]) -> None:
        self._round, self._act, self.acted = round, act, False

    def on_clients_trained(self, trained: int, count: int) -> None:
        if self._round == 0 and not self.acted:
            self.acted = trained < count
            self._act()

    def on_round_end(self, row: object, model: object) -> None:
        self._round -= 1


def on_ray(address: str, **more: Any) -> Prepared:
    more = {"kind": "ray", "workers": 2, "address": address, **more}
    return prepared("scaffold", MODEL, per_round=6, rounds=3, **more)


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_killed_in_mid_round_changes_no_bit(
    nodes: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = start(prepared("scaffold", MODEL, per_round=6, rounds=3))
    killer = InRound(1, nodes.kill_second)
    with pytest.warns(ClusterWarning, match="lost one node"):
        two = start(on_ray(nodes.address), tmp_path / "run", callbacks=[killer])
    assert killer.acted
    assert same(one, two)
    assert two.record.engine.kind == "ray"
    (warning,) = RunFolder(tmp_path / "run").read_run().warnings
    assert "done by actors on one other node" in warning
    assert "Raylet is terminated" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_run_that_lost_the_head_says_so_and_goes_on_later(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.05)  # of a minute
    monkeypatch.setattr(watch, "CHECK_SECONDS", 0.2)
    out = tmp_path / "run"
    with pytest.raises(RunError, match="head of the Ray cluster does not answer") as found:
        start(on_ray(nodes.address), out, callbacks=[InRound(1, nodes.kill_head)])
    assert found.value.got.startswith(nodes.address)
    assert "--resume" in found.value.do
    record = RunFolder(out).read_run()
    assert (record.status, record.message) == ("failed", found.value.what)
    assert not nodes.ray.is_initialized()
    later = start(prepared("scaffold", MODEL, per_round=6, rounds=3), out, resume=True)
    assert same(start(prepared("scaffold", MODEL, per_round=6, rounds=3)), later)


# --- no Ray ---------------------------------------------------------------------------------------


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """Give the address of a server that answers everybody with the same bytes, or with none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return
                if reply is not None:
                    held[-1].sendall(reply)
                    held[-1].shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield "127.0.0.1:{1}".format(*server.getsockname())
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    ("reply", "says"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "not Ray"), (b"", "not Ray"), (None, "timed out")],
)
def test_what_is_not_ray_is_not_waited_for(
    reply: bytes | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would try for more than three minutes."""
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(cluster.module(), "is_initialized", lambda: False)
    with (
        answering(reply) as address,
        pytest.raises(RunError, match="no Ray cluster") as found,
        cluster.connected(address, 1),
    ):
        pass
    assert says in found.value.got


@pytest.mark.parametrize("address", ["", "10.0.0.7", "host:", "host:port", "a b:1", "ray://host"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with (
        pytest.raises(RunError, match="not an address") as found,
        cluster.connected(address, 1),
    ):
        pass
    assert found.value.got == repr(address)
    assert "HOST:PORT" in found.value.expected


@pytest.mark.parametrize(
    ("address", "place"),
    [
        (None, None),
        ("auto", None),
        ("local", None),
        ("10.0.0.7:6379", "10.0.0.7:6379"),
        ("[::1]:6379", "[::1]:6379"),
        ("ray://head:10001", "head:10001"),
    ],
)
def test_addresses(address: str | None, place: str | None) -> None:
    assert cluster.head_address(address) == place


# --- looking after a cluster ----------------------------------------------------------------------


def fake(*nodes: tuple[str, bool]) -> Any:
    """A Ray whose nodes are given, at an address where nobody answers."""
    context = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "a")
    listed = [{"NodeID": n, "NodeManagerAddress": f"at {n}", "Alive": alive} for n, alive in nodes]
    return SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: listed)


def test_a_head_that_was_never_reached_is_not_waited_for() -> None:
    with pytest.raises(OSError, match="refused"):
        check_answer("127.0.0.1:1")
    Watch(fake(("a", True)), None).wait_for_head(now=True)


def test_each_lost_node_is_named_once() -> None:
    ray = fake(("a", True), ("b", True), ("c", True))
    looking = Watch(ray, None)
    looking.count_nodes()
    ray.nodes = fake(("a", True), ("b", False)).nodes
    with pytest.warns(ClusterWarning, match=r"lost 2 nodes \(at b, at c\)"):
        looking.count_nodes()
    looking.count_nodes()
    assert len(looking.warnings) == 1


def test_without_the_node_of_this_process_there_is_no_going_on() -> None:
    ray = fake(("a", True), ("b", True))
    looking = Watch(ray, None)
    ray.nodes = fake(("a", False), ("b", True)).nodes
    with pytest.raises(RunError, match="to which this process is connected") as found:
        looking.count_nodes()
    assert found.value.got == "at a"
    assert "--resume" in found.value.do


def test_machines_that_differ_are_named_once_each() -> None:
    here = this_machine()
    other = Machine(here.fedkeel, "1.0", "Another Processor")
    looking = Watch(fake(("a", True)), None)
    looking.add_machine(here)
    with pytest.warns(ClusterWarning, match=r"Another Processor with torch 1\.0, and this"):
        looking.add_machine(other)
    looking.add_machine(other)
    looking.add_machine(here)
    assert len(looking.warnings) == 1


def test_another_version_of_fedkeel_is_refused() -> None:
    here = this_machine()
    with pytest.raises(RunError, match="another version") as found:
        Watch(fake(), None).add_machine(Machine("0.0.1", here.torch, here.processor))
    assert found.value.got == "0.0.1"
