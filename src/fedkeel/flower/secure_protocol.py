"""The messages of a secure sum between server and nodes: their kinds, headers and the vector.

A node is one participant, whichever clients it plays: it masks the sum of their vectors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedkeel.config import Settings
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.spec import TensorSpec
from fedkeel.features.secure.fixed_point import in_range
from fedkeel.features.secure.participant import Commitments, PublicKeys, Revealed
from fedkeel.flower.protocol import MessageSpecs, Request
from fedkeel.flower.wire import Header
from fedkeel.method.round_values import Reply, uploaded_state
from fedkeel.tree import State, Tree, unwalk, walk

KEYS, SHARES, MASKED, UNMASK = "train.keys", "train.shares", "train.masked", "train.unmask"
"""Message types of the four steps, with their actions. `MASKED` asks for training, too."""

SECURE = "secure"
"""Record of a request for training that has what a secure sum needs beside it."""

VECTOR = "vector"
"""Name of the masked vector among a reply's tensors."""

UPDATE, BUFFERS = "update/", "buffers/"
"""Prefixes of what is summed with the clients' weights; all else is summed without."""

Hex = Annotated[str, Field(pattern="^([0-9a-f]{2})*$", max_length=400)]
"""Bytes."""

NodeNumber = Annotated[str, Field(pattern="^[0-9]{1,20}$")]
"""The number of a node, in digits: Flower's have 64 bits, and settings take whole numbers of 63."""


def session_of(header: Header) -> str:
    """Return the name of a round's secure sum."""
    return f"{header.run} {header.round}"


class NodeKeys(Settings):
    """The public keys of a node in a sum.

    Args:
        node: its number.
        cipher: as in `PublicKeys`.
        mask: as in `PublicKeys`.
        clients: how many clients the node was asked for.
        signature: of `signed_text`, by the node's own key; "" where it has none.
    """

    node: NodeNumber
    cipher: Hex
    mask: Hex
    clients: int = Field(ge=1)
    signature: Hex = ""

    @classmethod
    def of(cls, node: int, keys: PublicKeys, clients: int) -> NodeKeys:
        """Return what is sent of keys, without a signature."""
        return cls(node=str(node), cipher=keys.cipher.hex(), mask=keys.mask.hex(), clients=clients)

    @property
    def keys(self) -> PublicKeys:
        """The keys."""
        return PublicKeys(bytes.fromhex(self.cipher), bytes.fromhex(self.mask))

    def signed_text(self, session: str, experiment: str) -> bytes:
        """Return what a node signs: its keys, for which sum they are, and by which settings.

        Args:
            session: names the sum.
            experiment: digest of the settings on which server and nodes have to agree.
        """
        facts = ["fedkeel keys of a secure sum", session, experiment]
        return json.dumps([*facts, self.node, self.cipher, self.mask, self.clients]).encode()


class NodeBytes(Settings):
    """Bytes from a node, or for one, or about one."""

    node: NodeNumber
    data: Hex


Texts = tuple[NodeBytes, ...]


def texts(by_node: Mapping[int, bytes]) -> Texts:
    """Return what is sent of bytes by node."""
    return tuple(
        NodeBytes(node=str(node), data=data.hex()) for node, data in sorted(by_node.items())
    )


def by_node(items: Texts) -> dict[int, bytes]:
    """Return bytes by node."""
    return {int(item.node): bytes.fromhex(item.data) for item in items}


class KeysRequest(Request):
    """The header of `KEYS`: what is asked for in the round, and the number of the node."""

    node: NodeNumber


class KeysReply(Header):
    """A node's public keys, None where it has helped to unmask this round: the reply to `KEYS`."""

    keys: NodeKeys | None


class SharesRequest(Header):
    """All public keys, by which a node shares its secrets: the header of `SHARES`."""

    node: NodeNumber
    keys: tuple[NodeKeys, ...]


class SharesReply(Header):
    """What a node has written for each other one: the reply to `SHARES`.

    Args:
        shares: texts that only the others can read.
        seed: what it is bound to, of its seed.
        bound: what it is bound to, of its shares for each node, itself too.
    """

    shares: Texts
    seed: Hex
    bound: Texts

    @property
    def commitments(self) -> Commitments:
        """What the node is bound to."""
        return Commitments(bytes.fromhex(self.seed), by_node(self.bound))


class SumRequest(Header):
    """What `MASKED` says of the sum, beside the `Request` for training.

    Args:
        node: the number of the node.
        shares: what the other nodes have written for this one.
        bound: what they are bound to, of these shares.
        total_weight: weights of all clients that are asked, so that shares of a mean are summed.
        clients: how many clients are asked.
    """

    node: NodeNumber
    shares: Texts
    bound: Texts
    total_weight: float = Field(gt=0.0)
    clients: int = Field(ge=1)


class UnmaskRequest(Header):
    """Who is in the sum, and who has shared its secrets and is not: the header of `UNMASK`."""

    node: NodeNumber
    survivors: tuple[NodeNumber, ...]
    dropped: tuple[NodeNumber, ...]


class UnmaskReply(Header):
    """The shares that a node reveals: the reply to `UNMASK`."""

    seeds: Texts
    keys: Texts

    @classmethod
    def of(cls, request: Header, revealed: Revealed) -> UnmaskReply:
        """Return the reply to a request."""
        seeds, keys = texts(revealed.seeds), texts(revealed.keys)
        return cls(run=request.run, round=request.round, seeds=seeds, keys=keys)

    @property
    def revealed(self) -> Revealed:
        """The shares."""
        return Revealed(by_node(self.seeds), by_node(self.keys))


@dataclass(frozen=True)
class SummedReplies:
    """What the server learns of the clients in a secure sum.

    Args:
        weight: sum of their weights.
        clients: how many they are.
        loss: mean of their losses.
        diagnostics: mean of each of their diagnostics.
        state: updates and buffers, summed with the clients' weights, and uploads, summed without.
    """

    weight: float
    clients: float
    loss: float
    diagnostics: dict[str, float]
    state: State


@dataclass(frozen=True)
class VectorLayout:
    """The order of what is summed in a vector: weight, count, loss, diagnostics, tensors.

    All numbers are shares of a mean over the clients that are asked, so no sum is larger than the
    largest number.

    Args:
        specs: shape and type of each tensor of a reply, by path.
        diagnostics: names of the diagnostics.
    """

    specs: Mapping[str, TensorSpec]
    diagnostics: tuple[str, ...]

    @classmethod
    def of(cls, prepared: Prepared) -> VectorLayout:
        """Return the layout of a run."""
        specs = MessageSpecs.of(prepared)
        return cls(specs.reply, tuple(specs.diagnostics))

    @cached_property
    def size(self) -> int:
        """Numbers of a vector."""
        return 3 + len(self.diagnostics) + sum(self.sizes.values())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Numbers of each tensor, by path."""
        return {path: torch.Size(spec.shape).numel() for path, spec in self.specs.items()}

    @property
    def spec(self) -> Mapping[str, TensorSpec]:
        """Shape and type of a masked vector."""
        return {VECTOR: TensorSpec((self.size,), torch.int64)}

    def vector(
        self, prepared: Prepared, reply: Reply, weight: float, request: SumRequest
    ) -> NDArray[np.float64]:
        """Return a client's vector.

        Args:
            prepared: the run.
            reply: what the client would send.
            weight: how it counts, not yet scaled to sum 1.
            request: what it is asked for.

        Raises:
            SecureSumError: a number is not finite, or too large.
        """
        share, each = weight / request.total_weight, 1.0 / request.clients
        means = [float(reply.loss), *(float(reply.diagnostics[name]) for name in self.diagnostics)]
        parts = [np.array([share, each]), each * in_range(np.array(means))]
        state = dict(walk(uploaded_state(prepared.plan, reply)))
        for path in self.specs:
            factor = share if path.startswith((UPDATE, BUFFERS)) else each
            parts.append(factor * in_range(state[path].detach().cpu().double().numpy().ravel()))
        return np.concatenate(parts)

    def of_update(self, update: Tree, factor: float) -> NDArray[np.float64]:
        """Return a vector that adds an update, times a factor, and nothing else.

        Raises:
            SecureSumError: a number is not finite, or too large.
        """
        parts = [np.zeros(3 + len(self.diagnostics))]
        for path, size in self.sizes.items():
            tensor = update.get(path.removeprefix(UPDATE)) if path.startswith(UPDATE) else None
            numbers = np.zeros(size) if tensor is None else tensor.double().numpy().ravel()
            parts.append(factor * in_range(numbers))
        return np.concatenate(parts)

    def read(self, total: NDArray[np.float64], total_weight: float, clients: int) -> SummedReplies:
        """Return what the sum of vectors says.

        Args:
            total: [n] the sum.
            total_weight: as in `SumRequest`.
            clients: as in `SumRequest`.
        """
        weight, count = float(total[0]) * total_weight, float(total[1]) * clients
        start = 3 + len(self.diagnostics)
        tensors = {}
        for path, spec in self.specs.items():
            is_weighted = path.startswith((UPDATE, BUFFERS))
            factor = total_weight if is_weighted else clients
            values = factor * total[start : start + self.sizes[path]]
            tensors[path] = torch.from_numpy(values).reshape(spec.shape).to(spec.dtype)
            start += self.sizes[path]
        means = total[2 : 3 + len(self.diagnostics)] * clients / max(count, 1.0)
        return SummedReplies(
            weight=weight,
            clients=count,
            loss=float(means[0]),
            diagnostics=dict(zip(self.diagnostics, means[1:].tolist(), strict=True)),
            state=unwalk(tensors),
        )
