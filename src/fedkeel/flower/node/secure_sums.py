"""A node's part in secure sums: its secrets between the steps, and its clients' masked vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from fedkeel import tree
from fedkeel.config.flower import smallest_count
from fedkeel.engine.base import ClientJob
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import FedkeelError
from fedkeel.features.secure.fixed_point import encoded
from fedkeel.features.secure.participant import Participant, threshold
from fedkeel.features.secure.primitives import SecureSumError, Words
from fedkeel.flower.node.answered_sums import AnsweredSums
from fedkeel.flower.node.secure_secrets import Secrets, SecretsFile
from fedkeel.flower.node.signing import Signing
from fedkeel.flower.protocol import (
    OK,
    RESTARTED,
    SURVEY,
    TRAIN,
    ClientResult,
    NodeTraining,
    Request,
    TrainingReply,
)
from fedkeel.flower.secure_protocol import (
    SECURE,
    VECTOR,
    KeysReply,
    KeysRequest,
    NodeKeys,
    SharesReply,
    SharesRequest,
    SumRequest,
    UnmaskReply,
    UnmaskRequest,
    VectorLayout,
    by_node,
    session_of,
    texts,
)
from fedkeel.flower.statistics_protocol import STATISTICS, TotalsRequest
from fedkeel.flower.wire import HEADER, TENSORS, WireError, pack
from fedkeel.method.round_values import Reply
from fedkeel.tree import Tree

NOT_FINITE = "made NaN or infinity, and sent nothing"

SumStep = KeysRequest | SharesRequest | SumRequest | TotalsRequest | UnmaskRequest
"""What the server says of a sum in each step: the run, the round, the number of the node."""

SINGLE = {TRAIN: "updates", SURVEY: "updates", STATISTICS: "sites' statistics"}
"""Messages whose answers are single clients', and what these are."""


def refuse_single_updates(prepared: Prepared, kind: str) -> None:
    """Refuse a request for single clients' answers where the experiment asks for sums.

    Raises:
        WireError: it does.
    """
    if prepared.settings.flower.secure_aggregation and kind in SINGLE:
        raise WireError(
            f"The server asks for single {SINGLE[kind]}, and the experiment has secure "
            "aggregation.",
            do="use the same experiment file at the server and here",
        )


@dataclass(frozen=True)
class SecureSums:
    """Takes part in secure sums for the clients of a node.

    Args:
        prepared: the run, as the node sees it.
        root: the node's folder.
        clients: those that the node plays.
        experiment: digest of the settings on which server and nodes have to agree.
        signing: the node's own key, and those of the nodes that its site trusts.
    """

    prepared: Prepared
    root: Path
    clients: frozenset[int]
    experiment: str
    signing: Signing

    @property
    def _answered(self) -> AnsweredSums:
        return AnsweredSums(self.root)

    def begin(self, request: KeysRequest) -> RecordDict:
        """Return new public keys; what is left of an earlier sum is forgotten.

        There are none for a round that the node has helped to unmask before.
        """
        keys = None
        if not self._answered.has(request.run, request.round, self.clients):
            participant = Participant.new(int(request.node), session_of(request))
            self._file(request).save(Secrets(participant))
            keys = NodeKeys.of(int(request.node), participant.public_keys, len(request.clients))
            text = keys.signed_text(participant.session, self.experiment)
            keys = keys.model_copy(update={"signature": self.signing.sign(text).hex()})
        return _content(KeysReply(run=request.run, round=request.round, keys=keys))

    def share(self, content: RecordDict) -> RecordDict:
        """Return what each other node needs to help to unmask the sum.

        Raises:
            SecureSumError: the keys are too few, not what they should be, or not signed by the
                nodes that the site trusts.
        """
        request = SharesRequest.read(content)
        session = session_of(request)
        self.signing.check(
            {
                int(item.node): (
                    item.signed_text(session, self.experiment),
                    bytes.fromhex(item.signature),
                )
                for item in request.keys
                if item.node != request.node
            }
        )
        peers = {int(item.node): item.keys for item in request.keys}
        smallest = threshold(len(peers), self.prepared.settings.flower.secure_minimum)
        with self._taken(request) as secrets:
            participant, sealed, bound = secrets.participant.share(peers, smallest)
        clients = {int(item.node): item.clients for item in request.keys}
        self._file(request).save(Secrets(participant, clients))
        return _content(
            SharesReply(
                run=request.run,
                round=request.round,
                shares=texts(sealed),
                seed=bound.seed.hex(),
                bound=texts(bound.shares),
            )
        )

    def masked(
        self,
        content: RecordDict,
        request: Request,
        subject: str,
        trained: Iterable[tuple[ClientResult, Reply | None]],
        report: Callable[[], NodeTraining],
    ) -> RecordDict:
        """Return the masked sum of what clients would send, and a result of each.

        The secrets are taken before anybody trains, so a second request at the same time, which may
        ask for other weights, finds none.

        Args:
            content: the message.
            request: its header.
            subject: digest of the model, and of how the clients train from it.
            trained: the clients' replies, which are computed as they are taken.
            report: says how they were trained, after that.

        Raises:
            SecureSumError: the node has no part in this sum; or the server counts on more clients
                than there can be, so that there would be too little noise.
        """
        wanted = SumRequest.read(RecordDict({HEADER: content[SECURE]}))
        if (wanted.run, wanted.round) != (request.run, request.round):
            raise SecureSumError("A secure sum is of another round than the training.")
        secrets = self._file(wanted).take(session_of(wanted))
        if len(request.clients) != secrets.clients.get(secrets.participant.number):
            raise SecureSumError("A node is asked to train other clients than it was asked for.")
        planned = self._planned(secrets, wanted)
        layout = VectorLayout.of(self.prepared)
        total: Words = np.zeros(layout.size, dtype=np.uint64)
        results, count = [], 0
        update: Tree = {}
        for result, reply in trained:
            if reply is not None:
                result = self._checked(result, reply)
            if reply is not None and result.status in (OK, RESTARTED):
                try:
                    total += encoded(self._vector(layout, result, reply, wanted, planned))
                    update, count = reply.update, count + 1
                except SecureSumError as error:
                    result = result.model_copy(update={"status": error.what})
            results.append(result)
        header = TrainingReply(
            run=request.run, round=request.round, clients=tuple(results), training=report()
        )
        records = _content(header)
        if planned and count < len(results):  # the others count on the noise of all
            share = self._noise(planned) * math.sqrt(len(results) - count)
            noise = with_noise({k: torch.zeros_like(t) for k, t in update.items()}, share)
            total += encoded(layout.of_update(noise, 1.0 / wanted.total_weight))
        if count:
            participant, vector = secrets.participant.masked(
                total, by_node(wanted.shares), by_node(wanted.bound)
            )
            self._file(wanted).save(  # first: a vector must not be masked again
                replace(secrets, participant=participant, planned=planned, subject=subject)
            )
            records[TENSORS] = pack({VECTOR: torch.from_numpy(vector.view(np.int64))})
        return records

    def masked_counts(self, wanted: TotalsRequest, counts: Words, subject: str) -> Words:
        """Return statistics under a mask.

        Args:
            wanted: what the server says of the sum.
            counts: the numbers.
            subject: digest of whose they are.

        Raises:
            SecureSumError: the node has no part in this sum.
        """
        secrets = self._file(wanted).take(session_of(wanted))
        participant, vector = secrets.participant.masked(
            counts, by_node(wanted.shares), by_node(wanted.bound)
        )
        self._file(wanted).save(replace(secrets, participant=participant, subject=subject))
        return vector

    def unmask(self, content: RecordDict) -> RecordDict:
        """Return the shares by which the sum is unmasked, for one set of nodes.

        The same request has the same reply again, where the first was lost on its way.

        Raises:
            SecureSumError: the sum is another one, or of too few; or the node has helped to unmask
                this round before, or a sum of other nodes from the same model.
        """
        request = UnmaskRequest.read(content)
        file, text = self._file(request), request.model_dump_json()
        if before := file.kept_reply(text):
            return _content(UnmaskReply.model_validate_json(before))
        survivors, dropped = set(map(int, request.survivors)), set(map(int, request.dropped))
        with self._taken(request) as secrets:
            revealed = secrets.participant.reveal(survivors, dropped)
            present = sum(secrets.clients[number] for number in survivors)
            _check_noise(secrets.planned, present)
            self._answered.add(request.run, request.round, self.clients, secrets.subject, survivors)
        reply = UnmaskReply.of(request, revealed)
        file.keep_reply(text, reply.model_dump_json())
        return _content(reply)

    @contextmanager
    def _taken(self, request: SumStep) -> Iterator[Secrets]:
        """Take the secrets of a sum for a step, and put them back where it is refused."""
        file = self._file(request)
        secrets = file.take(session_of(request))
        try:
            yield secrets
        except FedkeelError:
            file.save(secrets)
            raise

    def _planned(self, secrets: Secrets, wanted: SumRequest) -> int:
        """Return the smallest number of clients that share the noise of a sum, 0 for no noise.

        The server says how many clients it has asked. There cannot be more than the experiment
        has, and of those that are to share the noise, all have to be known: each node has said of
        how many it was asked.

        Raises:
            SecureSumError: it says too many.
        """
        most = self.prepared.population.clients
        if wanted.clients > most:
            raise SecureSumError(
                "A secure sum is said to be of more clients than the experiment has.",
                got=wanted.clients,
                expected=f"at most {most}",
            )
        if not self.prepared.plan.reduction.sum_noise():
            return 0
        planned = smallest_count(self.prepared.settings.flower.quorum, wanted.clients)
        sharers = {secrets.participant.number, *by_node(wanted.shares)}
        known = sum(count for number, count in secrets.clients.items() if number in sharers)
        _check_noise(planned, known)
        return planned

    def _noise(self, planned: int) -> float:
        """Return the deviation of each client's share of the noise, whose weights are all 1."""
        return self.prepared.plan.reduction.sum_noise() / math.sqrt(planned)

    def _checked(self, result: ClientResult, reply: Reply) -> ClientResult:
        """Return the result of a client; its status says so where it must not be in the sum."""
        norm = math.sqrt(float(tree.dot(reply.update, reply.update))) if reply.update else 0.0
        largest = self.prepared.settings.flower.secure_norm
        if not (bool(reply.finite) and math.isfinite(norm)):
            return result.model_copy(update={"status": NOT_FINITE})
        if largest is not None and norm > largest:
            status = f"its update has norm {norm:.3g}, more than secure_norm, and was not sent"
            return result.model_copy(update={"status": status})
        return result

    def _vector(
        self,
        layout: VectorLayout,
        result: ClientResult,
        reply: Reply,
        wanted: SumRequest,
        planned: int,
    ) -> NDArray[np.float64]:
        """Return a client's vector, with its share of the noise of the sum."""
        if planned:
            reply = replace(reply, update=with_noise(reply.update, self._noise(planned)))
        job = ClientJob(0, result.client, 0)
        weight = float(self.prepared.setup.raw_weights([job], [result.examples])[0])
        return layout.vector(self.prepared, reply, weight, wanted)

    def _file(self, request: SumStep) -> SecretsFile:
        return SecretsFile(self.root, request.run, request.node)


def _check_noise(planned: int, known: int) -> None:
    """Refuse a sum whose noise more clients share than are known to be in it."""
    if known < planned:
        raise SecureSumError(
            "A secure sum would have too little noise: more clients are to share it than have "
            "shown their keys.",
            got=f"{known} clients",
            expected=f"at least {planned}, by flower.quorum",
        )


def with_noise(update: Tree, deviation: float) -> Tree:
    """Return an update with Gaussian noise that nobody else can compute.

    The system's randomness seeds it, and not the run: the server knows the run's seed.

    Args:
        update: the update.
        deviation: standard deviation of the noise on each number.
    """
    random = np.random.default_rng()
    return {
        name: tensor
        + torch.from_numpy(deviation * random.standard_normal((1, *tensor.shape)))[0].to(
            tensor.dtype
        )
        for name, tensor in update.items()
    }


def _content(header: KeysReply | SharesReply | TrainingReply | UnmaskReply) -> RecordDict:
    return RecordDict({HEADER: header.record()})
