"""A node's part in secure sums: its secrets between the steps, and its clients' masked vector."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedkeel import tree
from fedkeel.engine.base import ClientJob
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError
from fedkeel.flower.protocol import OK, RESTARTED, ClientResult, Request, TrainingReply
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
from fedkeel.flower.wire import HEADER, TENSORS, WireError, pack
from fedkeel.method.round_values import Reply
from fedkeel.records.files import write_bytes
from fedkeel.runner.early_stopping import smallest_count
from fedkeel.secure.fixed_point import encoded
from fedkeel.secure.participant import Participant, threshold
from fedkeel.secure.primitives import SecureSumError, Words
from fedkeel.tree import Tree

SECRETS = "secure-sum-{}.json"
"""File of what a node knows in a sum, by its number: nodes of one machine may share a folder. Only
its owner may read it, and it is removed with the last step, or by the next sum."""

SumStep = KeysRequest | SharesRequest | SumRequest | UnmaskRequest
"""What the server says of a sum in each step: the run, the round, the number of the node."""

_PARTICIPANT = TypeAdapter(Participant)

NOT_FINITE = "made NaN or infinity, and sent nothing"


def refuse_single_updates(prepared: Prepared) -> None:
    """Refuse a request for single updates where the experiment asks for sums.

    Raises:
        WireError: it does.
    """
    if prepared.settings.flower.secure_aggregation:
        raise WireError(
            "The server asks for single updates, and the experiment has secure aggregation.",
            do="use the same experiment file at the server and here",
        )


@dataclass(frozen=True)
class SecureSums:
    """Takes part in secure sums for the clients of a node.

    Args:
        prepared: the run, as the node sees it.
        root: the node's folder.
    """

    prepared: Prepared
    root: Path

    def begin(self, request: KeysRequest) -> RecordDict:
        """Return new public keys; what is left of an earlier sum is forgotten."""
        participant = Participant.new(int(request.node), session_of(request))
        self._save(request, participant)
        keys = NodeKeys.of(int(request.node), participant.public_keys)
        return _content(KeysReply(run=request.run, round=request.round, keys=keys))

    def share(self, content: RecordDict) -> RecordDict:
        """Return what each other node needs to help to unmask the sum.

        Raises:
            SecureSumError: the keys are too few, or not what they should be.
        """
        request = SharesRequest.read(content)
        peers = {int(item.node): item.keys for item in request.keys}
        least = threshold(len(peers), self.prepared.settings.flower.secure_minimum)
        participant, sealed = self._load(request).share(peers, least)
        self._save(request, participant)
        reply = SharesReply(run=request.run, round=request.round, shares=texts(sealed))
        return _content(reply)

    def masked(
        self,
        content: RecordDict,
        request: Request,
        trained: Iterable[tuple[ClientResult, Reply | None]],
    ) -> RecordDict:
        """Return the masked sum of what clients would send, and a result of each.

        Raises:
            SecureSumError: the node has no part in this sum.
        """
        wanted = SumRequest.read(RecordDict({HEADER: content[SECURE]}))
        participant = self._load(wanted)
        layout = VectorLayout.of(self.prepared)
        total: Words = np.zeros(layout.size, dtype=np.uint64)
        results, count = [], 0
        for result, reply in trained:
            if reply is not None:
                result = self._checked(result, reply)
            if reply is not None and result.status in (OK, RESTARTED):
                try:
                    total += encoded(self._vector(layout, result, reply, wanted))
                    count += 1
                except SecureSumError as error:
                    result = result.model_copy(update={"status": error.what})
            results.append(result)
        header = TrainingReply(run=request.run, round=request.round, clients=tuple(results))
        records = _content(header)
        if count:
            participant, vector = participant.masked(total, by_node(wanted.shares))
            self._save(wanted, participant)  # first: a vector must not be masked again
            records[TENSORS] = pack({VECTOR: torch.from_numpy(vector.view(np.int64))})
        return records

    def unmask(self, content: RecordDict) -> RecordDict:
        """Return the shares by which the sum is unmasked, once.

        Raises:
            SecureSumError: the sum is another one, or of too few.
        """
        request = UnmaskRequest.read(content)
        survivors, dropped = map(int, request.survivors), map(int, request.dropped)
        revealed = self._load(request).reveal(set(survivors), set(dropped))
        with _disk_errors():
            self._file(request).unlink()
        return _content(UnmaskReply.of(request, revealed))

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
        self, layout: VectorLayout, result: ClientResult, reply: Reply, wanted: SumRequest
    ) -> NDArray[np.float64]:
        """Return a client's vector, with its share of the noise of the sum."""
        flower, plan = self.prepared.settings.flower, self.prepared.plan
        deviation = plan.reduction.sum_noise()
        if deviation > 0.0:
            planned = smallest_count(flower.quorum, wanted.clients)
            share = deviation / math.sqrt(planned)
            reply = replace(reply, update=with_noise(reply.update, share))
        job = ClientJob(0, result.client, 0)
        weight = float(self.prepared.setup.raw_weights([job], [result.examples])[0])
        return layout.vector(self.prepared, reply, weight, wanted)

    def _file(self, request: SumStep) -> Path:
        """Return the file of secrets. The run's digest names its folder: no name is received."""
        name = hashlib.blake2b(request.run.encode(), digest_size=12).hexdigest()
        return self.root / name / SECRETS.format(request.node)

    def _save(self, request: SumStep, participant: Participant) -> None:
        file = self._file(request)
        with _disk_errors():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, _PARTICIPANT.dump_json(participant), mode=0o600)

    def _load(self, request: SumStep) -> Participant:
        """Return what the node knows in the sum of a request.

        Raises:
            SecureSumError: it has no part in this sum.
        """
        session = session_of(request)
        try:
            participant = _PARTICIPANT.validate_json(self._file(request).read_bytes())
        except FileNotFoundError:
            participant = None
        except (OSError, ValidationError) as error:
            raise SecureSumError(
                f"The secrets of a sum are lost: {type(error).__name__}."
            ) from None
        if participant is None or participant.session != session:
            raise SecureSumError("The node has no part in this secure sum, or has left it.")
        return participant


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


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn an error of the disk into one that the server may be told."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"The secrets of a sum cannot be kept: {error.strerror or type(error).__name__}.",
            do="see that the node's disk has space and that the node may write to it",
        ) from None
