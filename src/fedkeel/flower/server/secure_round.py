"""A round whose updates the server sees in a sum alone: four messages to each node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from flwr.app import RecordDict

from fedkeel.data import batches
from fedkeel.engine.base import ClientJob, TrainedCohort
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import TrainingError
from fedkeel.flower.protocol import LOST, OK, RESTARTED, ClientResult, Request
from fedkeel.flower.secure_protocol import (
    BUFFERS,
    KEYS,
    SHARES,
    UNMASK,
    UPDATE,
    VECTOR,
    KeysReply,
    KeysRequest,
    NodeKeys,
    SharesReply,
    SharesRequest,
    SummedReplies,
    SumRequest,
    UnmaskReply,
    UnmaskRequest,
    VectorLayout,
    by_node,
    session_of,
    texts,
)
from fedkeel.flower.server.connection import NodeConnection, NodeReply
from fedkeel.flower.server.replies import ReplyReader
from fedkeel.flower.server.traffic import TrafficRecord
from fedkeel.flower.wire import HEADER, TENSORS, Header, WireError, unpack
from fedkeel.method.round_values import Replies
from fedkeel.runner.early_stopping import smallest_count
from fedkeel.secure.collector import Collector
from fedkeel.secure.fixed_point import decoded
from fedkeel.secure.participant import PublicKeys, Revealed, threshold
from fedkeel.secure.primitives import SecureSumError
from fedkeel.tree import Tree, map_tensors, substate, substates, tensors

H = TypeVar("H", bound=Header)

SECURE_SUM = "secure sum"
"""Name of what a secure sum costs beside the tensors, among the bytes of a round."""

UNMASK_STAGE = "unmask"
"""Stage of a round after the masked vectors have come."""

TOLERANCE = 1e-6
"""Relative difference between what the sum says of its weight and what is known of it."""

NORM_SLACK = 1e-3
"""Share by which the norm of a sum may be above its bound, by rounding."""


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
        self._prepared, self._connection = prepared, connection
        self._traffic, self._reader, self._requests = traffic, reader, requests
        self._settings = prepared.settings.flower
        self._layout = VectorLayout.of(prepared)
        self._further: SumRequest
        self.trained: dict[int, ClientResult] = {}  # clients in the sum
        self.lost: list[int] = []
        self.replied: set[int] = set()  # clients of nodes that have replied

    # ---- before training ------------------------------------------------------------------------

    def begin(self) -> Collector:
        """Exchange keys and shares, the first two steps.

        Raises:
            TrainingError: too few nodes have replied.
        """
        keys = self._keys()
        least = threshold(len(keys), self._settings.secure_minimum)
        self._check_nodes(len(keys), self._least)
        first = next(iter(self._requests.values()))
        collector = Collector(session_of(first), least, self._layout.size, keys)
        all_keys = tuple(NodeKeys.of(node, pair) for node, pair in sorted(keys.items()))
        requests = {
            node: SharesRequest(run=first.run, round=first.round, node=str(node), keys=all_keys)
            for node in keys
        }
        for node, reply in self._exchange(SHARES, requests, SharesReply):
            try:
                collector.take_shares(node, by_node(reply.shares))
            except SecureSumError as error:
                self._fault(node, error.what)
        self._check_nodes(len(collector.shared), least)
        return collector

    def _keys(self) -> dict[int, PublicKeys]:
        """Return the public keys of the nodes that send some."""
        requests = {
            node: KeysRequest.model_validate({**dict(request), "node": str(node)})
            for node, request in self._requests.items()
        }
        keys = {}
        for node, reply in self._exchange(KEYS, requests, KeysReply):
            if reply.keys.node == str(node):
                keys[node] = reply.keys.keys
            else:
                self._fault(node, "sent the keys of another node")
        return keys

    def sum_requests(
        self, collector: Collector, jobs: Sequence[ClientJob]
    ) -> dict[int, SumRequest]:
        """Return what the request for training says of the sum, for each node that has shared.

        Args:
            collector: has the shares.
            jobs: the clients that were selected.
        """
        setup = self._prepared.setup
        processed = [
            batches.count_examples(
                setup.training.local, int(setup.federation.sizes[job.client]), job.steps_done
            )
            for job in jobs
        ]
        total = float(setup.raw_weights(jobs, processed).sum())
        further = {
            node: SumRequest(
                run=request.run,
                round=request.round,
                node=str(node),
                shares=texts(collector.texts_for(node)),
                total_weight=total,
                clients=len(jobs),
            )
            for node, request in self._requests.items()
            if node in collector.shared
        }
        self._further = next(iter(further.values()))
        for item in further.values():
            self._traffic.add_sent_bytes(SECURE_SUM, len(item.model_dump_json()))
        return further

    # ---- training -------------------------------------------------------------------------------

    def receive(self, reply: NodeReply, request: Request, collector: Collector) -> None:
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
                collector.add(reply.node, words)
        except (WireError, SecureSumError) as error:
            self._traffic.add_fault(_short(error), request.client_ids)
            return
        self.replied |= set(request.client_ids)
        self.trained |= counted
        if counted:
            self._count_bytes()
        for _, result in pairs:
            self._record_status(result)

    def _record_status(self, result: ClientResult) -> None:
        if result.status == LOST:
            self.lost.append(result.client)
            reason = "lost its client state; the method begins anew"
            self._traffic.add_fault(reason, [result.client])
        elif result.status == RESTARTED:
            self.lost.append(result.client)
            self._traffic.add_fault("lost its client state, and began anew", [result.client])
        elif result.status != OK:
            self._traffic.add_fault(f"failed: {result.status:.200}", [result.client])

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

    def is_lost(self, collector: Collector) -> bool:
        """Return whether too few are left because clients have lost their state.

        The round is then one of nobody, after which the method begins anew. Asking again would
        bring nothing back.
        """
        lost = set(self.lost) - set(self.trained)
        return bool(lost) and len(collector.survivors) < self._least

    @property
    def _least(self) -> int:
        return threshold(len(self._requests), self._settings.secure_minimum)

    def finish(self, collector: Collector) -> TrainedCohort:
        """Unmask the sum, the last step, and return the round that it makes.

        Raises:
            TrainingError: too few nodes are in the sum, or help to unmask it; or the sum is not
                what it should be.
        """
        self._check_nodes(len(collector.survivors), self._least)
        self._check_planned_noise()
        revealed = self._revealed(collector)
        try:
            total = decoded(collector.unmasked(revealed))
        except SecureSumError as error:
            raise self._failed(error.what, error.got, error.expected) from None
        summed = self._layout.read(total, self._further)
        clients = np.array(sorted(self.trained), dtype=np.int64)
        examples = self._prepared.setup.federation.sizes[clients]
        processed = np.array([self.trained[k].examples for k in clients.tolist()])
        jobs = [ClientJob(row, k, 0) for row, k in enumerate(clients.tolist())]
        weight = float(self._prepared.setup.raw_weights(jobs, processed.tolist()).sum())
        self._check_sum(summed, weight, len(clients))
        count, update = len(clients), tensors(substate(summed.state, "update"))
        return TrainedCohort(
            replies=Replies(
                clients=clients,
                examples=examples,
                processed=processed,
                finite=np.ones(count, dtype=np.bool_),
                update={k: t[None] for k, t in update.items()},
                buffers=_same_for_all(tensors(substate(summed.state, "buffers")), weight, count),
                uploads={
                    part: map_tensors(lambda t: t[None], state)
                    for part, state in substates(substate(summed.state, "uploads")).items()
                },
                summed=True,
                noisy=self._noise() > 0.0,
            ),
            loss=np.full(count, summed.loss),
            steps=np.array([self.trained[k].steps for k in clients.tolist()]),
            diagnostics={k: np.full(count, value) for k, value in summed.diagnostics.items()},
        )

    def _revealed(self, collector: Collector) -> list[Revealed]:
        """Return what the survivors reveal, of as many of them as are needed."""
        requests = {
            node: UnmaskRequest(
                run=self._further.run,
                round=self._further.round,
                node=str(node),
                survivors=tuple(map(str, collector.survivors)),
                dropped=tuple(map(str, collector.dropped)),
            )
            for node in collector.survivors
        }
        needed = collector.threshold
        revealed: list[Revealed] = []
        replies = self._exchange(
            UNMASK, requests, UnmaskReply, UNMASK_STAGE, lambda: len(revealed) >= needed
        )
        for node, reply in replies:
            shares = reply.revealed
            is_whole = set(shares.seeds) == set(collector.survivors)
            if is_whole and set(shares.keys) == set(collector.dropped):
                revealed.append(shares)
            else:
                self._fault(node, "reveals other shares than it was asked for", UNMASK_STAGE)
        return revealed

    def _check_sum(self, summed: SummedReplies, weight: float, count: int) -> None:
        """Refuse a sum that is not of the clients that it should be of, or is too long."""
        is_right = math.isclose(summed.weight, weight, rel_tol=TOLERANCE)
        if not is_right or not math.isclose(summed.clients, count, rel_tol=TOLERANCE):
            raise self._failed(
                "The secure sum is not of the clients that it should be of.",
                f"{summed.clients:.6g} clients of weight {summed.weight:.6g}",
                f"{count} of weight {weight:.6g}",
            )
        largest = self._settings.secure_norm
        update = tensors(substate(summed.state, "update"))
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in update.values()))
        if largest is not None and not self._noise() and norm > (1 + NORM_SLACK) * weight * largest:
            raise self._failed(
                "The secure sum of the updates is longer than all of them may be together.",
                f"norm {norm / weight:.3g} of the mean",
                f"at most {largest:g}, which is flower.secure_norm",
            )

    def _check_planned_noise(self) -> None:
        """Refuse a sum of fewer clients than share the noise: it would have too little."""
        planned = smallest_count(self._settings.quorum, self._further.clients)
        if self._noise() and len(self.trained) < planned:
            raise self._failed(
                "The secure sum has too few clients for the noise of its privacy budget.",
                f"{len(self.trained)} clients",
                f"at least {planned}, by flower.quorum",
            )

    def _noise(self) -> float:
        return self._prepared.plan.reduction.sum_noise()

    def _check_nodes(self, count: int, least: int) -> None:
        if count >= least:
            return
        faults = "; ".join(f"{key}: {clients}" for key, clients in self._traffic.faults.items())
        details = f" ({faults:.300})" if faults else ""
        raise self._failed(
            "A secure sum has too few nodes.",
            f"{count} of {len(self._requests)} nodes{details}",
            f"at least {least}",
        )

    def _failed(self, what: str, got: object, expected: object) -> TrainingError:
        return TrainingError(
            what,
            got=got,
            expected=expected,
            do="see that the nodes are up, then go on with resume; everything is saved",
        )

    # ---- messages -------------------------------------------------------------------------------

    def _exchange(
        self,
        kind: str,
        requests: Mapping[int, Header],
        reply_type: type[H],
        stage: str = "",
        is_enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, H]]:
        """Send headers, and yield each node with the header of its reply; the others get a fault.

        Args:
            kind: type of the message.
            requests: what each node is sent.
            reply_type: what it replies.
            stage: of the round, for faults.
            is_enough: whether no more replies are needed.
        """
        contents = {}
        for node, request in requests.items():
            contents[node] = RecordDict({HEADER: request.record()})
            self._traffic.add_sent_bytes(SECURE_SUM, len(request.model_dump_json()))
        silent = set(requests)
        for reply in self._connection.ask(contents, kind, is_enough):
            silent.discard(reply.node)
            try:
                header = reply_type.read(reply.checked())
                expected = requests[reply.node]
                if (header.run, header.round) != (expected.run, expected.round):
                    raise WireError("A reply belongs to another round or run.")
            except WireError as error:
                self._fault(reply.node, error.short(), stage)
                continue
            self._traffic.add_received_bytes(SECURE_SUM, len(header.model_dump_json()))
            yield reply.node, header
        for node in () if is_enough() else silent:
            self._fault(node, "no reply before the deadline", stage)

    def _fault(self, node: int, reason: str, stage: str = "") -> None:
        self._traffic.add_fault(reason, self._requests[node].client_ids, stage)


def _short(error: WireError | SecureSumError) -> str:
    return error.short() if isinstance(error, WireError) else error.what


def _same_for_all(total: Tree, weight: float, count: int) -> Tree:
    """Return the mean of buffers as if each client had sent it."""
    return {name: (t / weight).expand(count, *t.shape) for name, t in total.items()}
