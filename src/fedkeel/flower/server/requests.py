"""What nodes are asked: the headers of requests, and the client states that the server believes in.

A node writes the state of a client that it has trained at once, beside the older one. The server
names, in its next request, the state that it has taken, by round and digest.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedkeel.engine.base import ClientJob
from fedkeel.engine.message_state import message_state
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError
from fedkeel.flower.data_on_nodes import NODES
from fedkeel.flower.protocol import (
    EVALUATE,
    PERSONAL,
    PICTURES,
    Agreement,
    ClientRequest,
    CommonScale,
    Request,
)
from fedkeel.flower.server.membership import Membership
from fedkeel.flower.server.traffic import EVALUATION, TrafficRecord
from fedkeel.flower.wire import HEADER, TENSORS, pack
from fedkeel.method.context import Message
from fedkeel.tree import State, nbytes

STATE_ROUND, STATE_DIGEST = "nodes/state_round", "nodes/state_digest"
"""Names in a checkpoint of the round and the digest of each client's state."""

RUN_NUMBER = "nodes/run_number"
"""Name in a checkpoint of a random number by which nodes tell this run from another one of the same
key."""


@dataclass(frozen=True)
class NewState:
    """The state that a client has written: rounds completed after which it counts, and digest."""

    round: int
    digest: str


class Requests:
    """Makes the requests of a run.

    Args:
        prepared: the run.
        membership: which nodes are connected.
        traffic: where bytes are recorded.
    """

    def __init__(self, prepared: Prepared, membership: Membership, traffic: TrafficRecord) -> None:
        self._prepared, self._membership, self._traffic = prepared, membership, traffic
        federation = prepared.setup.federation
        scale = federation.data.scale if federation.how["kind"] == NODES else None
        self._scale = scale and CommonScale(mean=scale[0], deviation=scale[1])
        self._agreement, self._settings = Agreement.of(prepared), prepared.settings.flower
        self._run_number = np.array([secrets.randbits(64)], dtype=np.uint64)
        clients = len(federation)
        self._state_round = np.zeros(clients, dtype=np.int64)  # [C] of each client's state
        self._state_digest = np.zeros(clients, dtype=np.uint64)  # [C]
        self._checkpoint_round = np.zeros(clients, dtype=np.int64)  # [C] at the last checkpoint

    @property
    def run(self) -> str:
        """The server's name for the run."""
        return f"{self._prepared.key}-{int(self._run_number[0]):016x}"

    def go_on_as(self, run: str) -> None:
        """Take the name that a run of the same key had before it could save any checkpoint."""
        key, _, number = run.rpartition("-")
        if key == self._prepared.key:
            self._run_number[0] = int(number, 16)

    # --- requests --------------------------------------------------------------------------------

    def headers(self, message: Message, jobs: Mapping[int, ClientJob]) -> dict[int, Request]:
        """Return the header of the request to each connected node that plays one of the clients.

        Args:
            message: what is sent.
            jobs: what each client is asked for.

        Raises:
            RunError: the message is too large.
        """
        size = nbytes(message_state(message))
        if size > self._settings.message_mb * 1e6:
            raise RunError(
                "A message to the clients is too large.",
                got=f"{size / 1e6:.0f} MB",
                expected=f"at most {self._settings.message_mb:g} MB",
                do="raise flower.message_mb, or use a smaller model",
            )
        descriptions = self._membership.descriptions()
        return {
            node: Request(
                run=self.run,
                round=message.round,
                agreement=self._agreement,
                data_digest=descriptions[clients[0]].data_digest,
                lr=message.lr,
                clients=tuple(self._client_request(jobs[k]) for k in clients),
                scale=self._scale,
            )
            for node, clients in self._membership.clients_by_node(sorted(jobs)).items()
        }

    def _client_request(self, job: ClientJob) -> ClientRequest:
        return ClientRequest(
            client=job.client,
            steps_done=job.steps_done,
            state_round=int(self._state_round[job.client]),
            state_digest=f"{int(self._state_digest[job.client]):016x}",
            checkpoint_round=int(self._checkpoint_round[job.client]),
        )

    def contents(
        self,
        kind: str,
        message: Message,
        requests: Mapping[int, Request],
        further: Mapping[int, Mapping[str, ConfigRecord]] | None = None,
    ) -> dict[int, RecordDict]:
        """Return what each node is sent, and count its bytes, but for pictures.

        Pictures are asked for after the last record.

        Args:
            kind: message type.
            message: the tensors.
            requests: the header for each node.
            further: more records for each node.
        """
        tensors = pack(message_state(message))
        model: dict[str, State] = {"params": dict(message.params), "buffers": dict(message.buffers)}
        name = EVALUATION if kind in (EVALUATE, PERSONAL) else "model"
        contents = {}
        for node, request in requests.items():
            contents[node] = RecordDict(
                {HEADER: request.record(), TENSORS: tensors, **(further or {}).get(node, {})}
            )
            if kind == PICTURES:
                continue
            self._traffic.add_sent(name, model)
            for part, state in message.broadcast.items():
                self._traffic.add_sent(part if name == "model" else name, {part: state})
        return contents

    # --- client states ---------------------------------------------------------------------------

    def take(self, states: Mapping[int, NewState], clients: Iterable[int]) -> None:
        """Believe from now on in the states that clients have written."""
        for client in clients:
            self._state_round[client] = states[client].round
            self._state_digest[client] = int(states[client].digest, 16)

    def forget_states(self) -> None:
        """Believe in no client's state any more: all begin anew."""
        self._state_round[:] = 0
        self._state_digest[:] = 0

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has to hold."""
        return {
            STATE_ROUND: self._state_round.copy(),
            STATE_DIGEST: self._state_digest.copy(),
            RUN_NUMBER: self._run_number.copy(),
        }

    def saved(self) -> None:
        """Note that the checkpoint of the last state is complete."""
        self._checkpoint_round[:] = self._state_round

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the states in which the server believed at a checkpoint."""
        self._state_round[:] = arrays[STATE_ROUND]
        self._state_digest[:] = arrays[STATE_DIGEST]
        self._run_number[:] = arrays[RUN_NUMBER]
        self._checkpoint_round[:] = self._state_round
