"""A round whose updates the server sees only in a sum: four messages to each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedkeel.config.flower import smallest_count
from fedkeel.data import batches
from fedkeel.engine.base import ClientJob
from fedkeel.engine.prepared import Prepared
from fedkeel.features.secure.collector import Collector
from fedkeel.features.secure.participant import are_usable, threshold
from fedkeel.features.secure.primitives import SecureSumError
from fedkeel.flower.protocol import LOST, OK, RESTARTED, ClientResult, Request
from fedkeel.flower.secure_protocol import (
    BUFFERS,
    KEYS,
    SHARES,
    UPDATE,
    VECTOR,
    KeysReply,
    KeysRequest,
    NodeKeys,
    SharesReply,
    SharesRequest,
    SumRequest,
    VectorLayout,
    by_node,
    session_of,
    texts,
)
from fedkeel.flower.server.asking import round_error
from fedkeel.flower.server.connection import NodeConnection, NodeReply
from fedkeel.flower.server.kept_sums import KeptNode, KeptSum, KeptSums
from fedkeel.flower.server.replies import ReplyReader
from fedkeel.flower.server.secure_exchange import (
    SECURE_SUM,
    SecureExchange,
    SkippedRoundError,
)
from fedkeel.flower.server.traffic import TrafficRecord
from fedkeel.flower.server.unmasking import Unmasking
from fedkeel.flower.wire import TENSORS, WireError, unpack
from fedkeel.tree import tensors


class SecureRound:
    """The steps of one round.

    Args:
        prepared: the run.
        connection: how nodes are asked.
        traffic: where bytes and faults are recorded.
        reader: checks what nodes say of their clients.
        requests: what each node is asked for.
    """

    def __init__(
        self,
        prepared: Prepared,
        connection: NodeConnection,
        traffic: TrafficRecord,
        reader: ReplyReader,
        requests: Mapping[int, Request],
    ) -> None:
        self._prepared, self._traffic = prepared, traffic
        self._reader, self._requests = reader, requests
        self._settings = prepared.settings.flower
        self._layout = VectorLayout.of(prepared)
        clients = {node: request.client_ids for node, request in requests.items()}
        self._exchange = SecureExchange(connection, traffic, clients)
        self._keys: dict[int, NodeKeys] = {}
        self._collector: Collector
        self._total_weight, self._asked = 0.0, 0
        self.trained: dict[int, ClientResult] = {}  # clients in the sum
        self.lost: list[int] = []
        self.replied: set[int] = set()  # clients of nodes that have replied

    # ---- before training ------------------------------------------------------------------------

    def begin(self) -> None:
        """Exchange keys and shares, the first two steps.

        Raises:
            SkippedRoundError: too few nodes take part, because others have helped to unmask this
                round before.
            TrainingError: too few nodes have replied.
        """
        self._keys = self._asked_keys()
        count = len(self._keys)
        minimum = threshold(count, self._settings.secure_minimum)
        self._exchange.check_nodes(count, len(self._requests), self._minimum)
        first = next(iter(self._requests.values()))
        keys = {node: item.keys for node, item in self._keys.items()}
        self._collector = Collector(session_of(first), minimum, self._layout.size, keys)
        all_keys = tuple(item for _, item in sorted(self._keys.items()))
        requests = {
            node: SharesRequest(run=first.run, round=first.round, node=str(node), keys=all_keys)
            for node in keys
        }
        for node, reply in self._exchange.ask(SHARES, requests, SharesReply):
            try:
                self._collector.take_shares(node, by_node(reply.shares), reply.commitments)
            except SecureSumError as error:
                self._exchange.fault(node, error.what)
        self._exchange.check_nodes(len(self._collector.shared), len(self._requests), minimum)

    def _asked_keys(self) -> dict[int, NodeKeys]:
        """Return the public keys of the nodes that send some."""
        requests = {
            node: KeysRequest.model_validate({**dict(request), "node": str(node)})
            for node, request in self._requests.items()
        }
        keys, answered = dict[int, NodeKeys](), False
        for node, reply in self._exchange.ask(KEYS, requests, KeysReply):
            if reply.keys is None:
                answered = True
                self._exchange.fault(node, "has helped to unmask this round before")
            elif (reply.keys.node, reply.keys.clients) != (
                str(node),
                len(self._requests[node].clients),
            ):
                self._exchange.fault(node, "sent the keys of another node")
            elif not are_usable(reply.keys.keys, [item.keys for item in keys.values()]):
                self._exchange.fault(node, "sent keys that cannot be used")
            else:
                keys[node] = reply.keys
        if answered and len(keys) < self._minimum:
            raise SkippedRoundError(
                "skipped: nodes have helped to unmask this round before, and do so once"
            )
        return keys

    def sum_requests(self, jobs: Sequence[ClientJob]) -> dict[int, SumRequest]:
        """Return what the request for training says of the sum, for each node that has shared.

        Args:
            jobs: the clients that were selected.
        """
        setup = self._prepared.setup
        processed = [
            batches.count_examples(
                setup.training.local, int(setup.federation.sizes[job.client]), job.steps_done
            )
            for job in jobs
        ]
        self._total_weight = float(setup.raw_weights(jobs, processed).sum())
        self._asked = len(jobs)
        further = {
            node: SumRequest(
                run=request.run,
                round=request.round,
                node=str(node),
                shares=texts(self._collector.texts_for(node)),
                bound=texts(self._collector.commitments_for(node)),
                total_weight=self._total_weight,
                clients=self._asked,
            )
            for node, request in self._requests.items()
            if node in self._collector.shared
        }
        for item in further.values():
            self._traffic.add_sent_bytes(SECURE_SUM, len(item.model_dump_json()))
        return further

    # ---- training -------------------------------------------------------------------------------

    def receive(self, reply: NodeReply, request: Request) -> None:
        """Take a node's masked vector into the sum, or record why not."""
        try:
            content = reply.checked()
            header = self._reader.header(content, request)
            pairs = list(zip(request.clients, header.clients, strict=True))
            counted = {
                item.client: result for item, result in pairs if result.status in (OK, RESTARTED)
            }
            for item, result in pairs:
                if item.client in counted:
                    self._reader.check_counts(item, result)
            if counted:
                vector = unpack(content, TENSORS, self._layout.spec)
                words = tensors(vector)[VECTOR].numpy().view(np.uint64)
                self._collector.add(reply.node, words)
        except (WireError, SecureSumError) as error:
            self._traffic.add_fault(_short(error), request.client_ids)
            return
        self.replied |= set(request.client_ids)
        self.trained |= counted
        if counted:
            self._count_bytes()
        for _, result in pairs:
            if result.status in (LOST, RESTARTED):
                self.lost.append(result.client)
            self._traffic.add_status(result)

    def _count_bytes(self) -> None:
        """Count the bytes of a masked vector, 8 for each number, by part."""
        rest = self._layout.size
        for path, count in self._layout.sizes.items():
            is_model = path.startswith((UPDATE, BUFFERS))
            part = "model" if is_model else path.split("/")[1]
            self._traffic.add_received_bytes(part, 8 * count)
            rest -= count
        self._traffic.add_received_bytes(SECURE_SUM, 8 * rest)

    # ---- after training -------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether too few are left because clients have lost their state.

        The round then counts as one without replies, and the method begins anew. Asking again
        would bring nothing back.
        """
        lost = set(self.lost) - set(self.trained)
        return bool(lost) and len(self._collector.survivors) < self._minimum

    @property
    def _minimum(self) -> int:
        return threshold(len(self._requests), self._settings.secure_minimum)

    def unmasking(self, sums: KeptSums) -> Unmasking:
        """Return the last step, once it is on the disk that it has been reached.

        Raises:
            TrainingError: too few nodes are in the sum, or too few clients share its noise.
            RunError: the disk fails.
        """
        collector = self._collector
        self._exchange.check_nodes(len(collector.survivors), len(self._requests), self._minimum)
        planned = smallest_count(self._settings.quorum, self._asked)
        if self._prepared.plan.reduction.sum_noise() and len(self.trained) < planned:
            raise round_error(
                "The secure sum has too few clients for the noise of its privacy budget.",
                f"{len(self.trained)} clients",
                f"at least {planned}, by flower.quorum",
            )
        kept = self._kept()
        sums.keep(kept, collector)
        return Unmasking(self._prepared, self._exchange, sums, kept, collector)

    def _kept(self) -> KeptSum:
        """Return all that the last step needs to know, but for the vectors."""
        collector, first = self._collector, next(iter(self._requests.values()))
        bound = collector.commitments
        return KeptSum(
            run=first.run,
            round=first.round,
            session=session_of(first),
            threshold=collector.threshold,
            total_weight=self._total_weight,
            asked=self._asked,
            nodes=tuple(
                KeptNode(
                    keys=keys,
                    clients=tuple(self._requests[node].client_ids),
                    seed=bound[node].seed.hex() if node in bound else "",
                    bound=texts(bound[node].shares) if node in bound else (),
                    is_in_sum=node in collector.survivors,
                )
                for node, keys in self._keys.items()
            ),
            trained=tuple(self.trained[k] for k in sorted(self.trained)),
            lost=tuple(self.lost),
            faults={reason: tuple(ids) for reason, ids in self._traffic.faults.items()},
            down=self._traffic.down,
            up=self._traffic.up,
        )


def resumed(
    prepared: Prepared, connection: NodeConnection, traffic: TrafficRecord, sums: KeptSums,
    kept: KeptSum, collector: Collector,
) -> Unmasking:  # fmt: skip
    """Return the last step of a sum that an earlier process has kept."""
    traffic.restore(kept.faults, kept.down, kept.up)
    clients = {node.number: node.clients for node in kept.nodes}
    exchange = SecureExchange(connection, traffic, clients)
    return Unmasking(prepared, exchange, sums, kept, collector, is_resumed=True)


def _short(error: WireError | SecureSumError) -> str:
    return error.short() if isinstance(error, WireError) else error.what
