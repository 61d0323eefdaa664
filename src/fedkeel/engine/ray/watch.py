"""Looking after a Ray cluster while work is done on it: its head, its nodes, their machines."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedkeel.engine.process.affinity import processor_name
from fedkeel.errors import ClusterWarning, RunError, counted
from fedkeel.version import __version__

ANSWER_SECONDS = 5.0
"""Seconds in which a cluster has to answer."""

CHECK_SECONDS = 5.0
"""Seconds between two looks at the head, at least."""

_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable for the seconds without its head after which Ray ends this process, without a word."""

PATIENCE = 2 / 3
"""Share of these seconds for which a head that is silent is waited for."""

GO_ON = "a run with a folder goes on with --resume (resume=True in Python), to the same bits"

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""The first bytes that Ray's servers are sent, who answer with nine bytes of the same form."""


def check_answer(address: str) -> None:
    """Raise OSError where no Ray answers at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    place = host.strip("[]"), int(port)
    with socket.create_connection(place, timeout=ANSWER_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(_PREFACE)
        answer = connection.makefile("rb").read(9)
    if answer[3:4] != b"\x04":
        raise OSError("what answers there is not Ray")


@dataclass(frozen=True)
class Machine:
    """What the bits of a client's training depend on beside the run: where it is trained.

    Args:
        fedkeel: version of fedkeel.
        torch: version of torch.
        processor: name of the processor.
    """

    fedkeel: str
    torch: str
    processor: str

    def __str__(self) -> str:
        return f"{self.processor} with torch {self.torch}"


def this_machine() -> Machine:
    """Return what this process is."""
    return Machine(__version__, str(torch.__version__), processor_name())


class Watch:
    """Tells when the head or a node of a cluster is lost, and where machines differ.

    Args:
        ray: the package, connected to the cluster.
        address: where the cluster was found; None asks Ray.
    """

    def __init__(self, ray: Any, address: str | None) -> None:  # noqa: ANN401
        self._ray = ray
        self._address: str | None = address or str(ray.get_runtime_context().gcs_address)
        try:
            check_answer(self._address)
        except (OSError, ValueError):  # behind a proxy, say, that Ray knows
            self._address = None
        self._patience = PATIENCE * float(os.environ.get(_LIMIT, "60"))
        self._checked = time.monotonic()
        self._own = str(ray.get_runtime_context().get_node_id())
        self._living = self._nodes()
        self._machines: Counter[Machine] = Counter()
        self.warnings: list[str] = []

    def wait_for_head(self, now: bool = False) -> None:
        """Return once the head of the cluster answers.

        Args:
            now: ask it even if it has answered within the last `CHECK_SECONDS`.

        Raises:
            RunError: it does not answer, and Ray would soon end this process.
        """
        began = time.monotonic()
        if self._address is None or (not now and began - self._checked < CHECK_SECONDS):
            return
        while True:
            try:
                check_answer(self._address)
            except OSError as error:
                silent = time.monotonic() - began
                if silent >= self._patience:
                    raise RunError(
                        "The head of the Ray cluster does not answer any more.",
                        got=f"{self._address}: {error}, for {silent:.0f} s",
                        why="without its head Ray starts no actors, and soon ends this process",
                        do=f"start the cluster again; {GO_ON}",
                    ) from error
                time.sleep(min(1.0, self._patience / 4))
            else:
                self._checked = time.monotonic()
                return

    def count_nodes(self) -> None:
        """Warn of the nodes that have been lost since this was called last.

        Raises:
            RunError: one of them holds what this process has sent: model, data and messages.
        """
        living = self._nodes()
        if self._own in self._living.keys() - living.keys():
            raise RunError(
                "Ray has lost the node to which this process is connected.",
                got=self._living[self._own],
                do=f"start Ray there again; {GO_ON}",
            )
        lost = [name for node, name in self._living.items() if node not in living]
        self._living = living
        if lost:
            self._warn(
                f"Ray has lost {counted(len(lost), 'node')} ({', '.join(sorted(lost))}); what "
                f"{'it' if len(lost) == 1 else 'they'} had not finished is done by actors on "
                f"{counted(len(living), 'other node')}, with the same bits"
            )

    def add_machine(self, machine: Machine) -> None:
        """Hear on what machine an actor has started, and warn where machines differ.

        Raises:
            RunError: another version of fedkeel is installed there.
        """
        if machine.fedkeel != __version__:
            raise RunError(
                "A node of the Ray cluster has another version of fedkeel.",
                got=machine.fedkeel,
                expected=__version__,
                do="install the same version on every machine of the cluster",
            )
        is_new = machine not in self._machines
        self._machines[machine] += 1
        here = this_machine()
        if is_new and {*self._machines} != {here}:
            others = ", ".join(str(one) for one in self._machines if one != here)
            self._warn(
                f"Ray actors train on {others}, and this process is on {here}: these may round "
                "differently, so the last bits may depend on who trained which client"
            )

    def _nodes(self) -> dict[str, str]:
        """Return the nodes that live: their addresses, by their ids."""
        nodes: Sequence[dict[str, Any]] = self._ray.nodes()
        return {n["NodeID"]: str(n["NodeManagerAddress"]) for n in nodes if n["Alive"]}

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        warnings.warn(text, ClusterWarning, stacklevel=2)
