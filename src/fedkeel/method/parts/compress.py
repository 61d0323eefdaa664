"""Compression of uploads: only the largest entries, or 8 bits for each entry.

Source
    Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018 (key stich2018),
    Algorithm 1; Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding, NeurIPS 2017 (key alistarh2017), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Round
from fedkeel.method.part import param
from fedkeel.method.roles import ClientState, Codec
from fedkeel.tree import State, Tree

LEVELS = 127
"""Largest whole number of 8 bits with a sign, its negative left out."""


@dataclass(frozen=True)
class TopK(Codec, ClientState):
    r"""Sends the largest entries of the update, and adds the others to the next update.

    .. math::
        v = \Delta + e, \qquad \text{sent} = \mathrm{top}_k(v), \qquad
        e \leftarrow v - \mathrm{top}_k(v)

    top_k keeps the k entries of v with the largest absolute values over the whole model, and sets
    the others to zero.

    Source: stich2018, Algorithm 1, for a client's update in place of a step.

    Args:
        fraction: k as a share of the model's entries, in (0, 1]; at least one entry is sent.
        feedback: 1 adds the entries that were not sent to the client's next update (the paper), 0
            drops them.
    Sent: k values and k whole numbers of 32 bits up, in place of the model.
    State: e for each client, one model, starting at 0.
    Cost: a partial sort of the update in each round.
    Laws: fraction = 1 is FedAvg, bit for bit. The sent entries and the new e add up to the update
        plus the old e. With n entries in v, the new e has at most sqrt(1 - k/n) times the norm of
        v.
    Deviations: the paper sends in every step. Among equal entries the sort decides which ones are
        sent. Uploads of other parts are not compressed.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedprox+topk(fraction=0.05)").codec.fraction
        0.05
    """

    fraction: float = param(0.01, gt=0.0, le=1.0)
    feedback: int = param(1, ge=0, le=1)

    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = "stich2018"

    def encode(self, update: Tree, round: Round) -> State:
        """Return the k largest entries of what is to be sent, and where they stand."""
        v = _flat(self._with_memory(update, round))
        k = max(1, nearest_whole(self.fraction * v.numel()))
        where = torch.topk(v.abs(), k, sorted=False).indices.sort().values
        return {"values": torch.gather(v, 0, where), "where": where.to(torch.int32)}

    def decode(self, sent: State, like: Tree) -> Tree:
        """Return the entries that were sent, and zeros in the place of the others."""
        values, where = tree.leaf(sent, "values"), tree.leaf(sent, "where")
        zeros = values.new_zeros(tree.numel(like))
        return _unflat(zeros.scatter(0, where.long(), values), like)

    def init_client(self, start: Tree) -> State:
        """Return e = 0."""
        return {"e": tree.zeros_like(start)}

    def next_client(self, round: Round) -> State:
        """Return what was not sent."""
        if not self.feedback:
            return {"e": tree.leaves(round.client_state, "e")}
        full = self._with_memory(round.update, round)
        return {"e": tree.sub(full, self.decode(self.encode(round.update, round), full))}

    def _with_memory(self, update: Tree, round: Round) -> Tree:
        return tree.add(update, tree.leaves(round.client_state, "e"))


@dataclass(frozen=True)
class Quantise(Codec):
    r"""Sends each entry of the update in 8 bits, as a multiple of a step for each tensor.

    .. math::
        s = \max_i |\Delta_i| / 127, \qquad
        q_i = \mathrm{round}(\Delta_i / s) \in \{-127, \dots, 127\}, \qquad \text{received} = s\,q

    Source: alistarh2017, section 3.1, with the largest absolute value in place of the norm.

    Sent: one byte for each entry and one number for each tensor up, in place of the model.
    State: none.
    Cost: two passes over the update in each round.
    Laws: the error of an entry is at most half a step, s / 2. Scaling the update scales the
        received update. An update of whole multiples of s, with 127 s among them, is received
        exactly.
    Deviations: the paper rounds up or down at random, which is unbiased; here rounding is to the
        nearest level, which has a smaller error and is the same in every run. The paper's lossless
        code of the levels is left out.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("scaffold+quantise").codec.name
        'quantise'
    """

    name: ClassVar[str] = "quantise"
    paper: ClassVar[str] = "alistarh2017"

    def encode(self, update: Tree, round: Round) -> State:
        """Return whole numbers, and the step of each tensor."""
        steps = tree.map(lambda v: v.abs().amax() / LEVELS, update)
        levels = tree.map(lambda v, step: _rounded(v, step).to(torch.int8), update, steps)
        return {"q": levels, "step": steps}

    def decode(self, sent: State, like: Tree) -> Tree:
        """Return whole numbers times steps."""
        levels, steps = tree.leaves(sent, "q"), tree.leaves(sent, "step")
        return tree.map(lambda v, q, step: q.to(v.dtype) * step, like, levels, steps)


def _rounded(v: Tensor, step: Tensor) -> Tensor:
    """Return v / step to the nearest whole number, 0 where nothing is sent or v is not finite."""
    safe = torch.where(step > 0, step, torch.ones_like(step))
    return torch.nan_to_num((v / safe).round(), nan=0.0, posinf=0.0, neginf=0.0)


def _flat(params: Tree) -> Tensor:
    return torch.cat([v.reshape(-1) for v in params.values()])


def _unflat(v: Tensor, like: Tree) -> Tree:
    out, start = {}, 0
    for name, one in like.items():
        out[name] = v[start : start + one.numel()].view(one.shape)
        start += one.numel()
    return out


def nearest_whole(x: float) -> int:
    """Return the nearest whole number, the larger one of two.

    >>> nearest_whole(2.5)
    3
    """
    return int(x + 0.5)
