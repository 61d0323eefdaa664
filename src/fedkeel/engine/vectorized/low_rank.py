"""Matrices of a client's state as products of two factors, and how the client store keeps them.

What a client keeps of a short round may have a low rank: SCAFFOLD's c_k is a mean of gradients, and
for a linear layer the gradient of n examples is a product with inner dimension n. A compiled round
returns such matrices as factors (`compiler/low_rank_terms.py`). They are stored as factors too,
because these take less time to write, to read and to multiply with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedkeel.engine.compiler.low_rank_matrix import LowRank as LowRank
from fedkeel.engine.compiler.low_rank_matrix import Matrix as Matrix
from fedkeel.engine.compiler.low_rank_matrix import dense as dense
from fedkeel.engine.compiler.low_rank_matrix import saves_work
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.record import ClientRecord, CompactTensor, Value
from fedkeel.method.compose import Plan
from fedkeel.tree import Tree

RANK_MULTIPLE = 8
"""Ranks of client groups are multiples of this, so that few shapes of a round are compiled."""


def as_matrix(value: Value) -> Matrix:
    """Return a value of a client's record; other compact forms than `LowRank` become dense."""
    return value if isinstance(value, Tensor | LowRank) else value.dense()


class LowRankCodec:
    """A `RowCodec` that stores matrices as factors, one behind the other in the matrix's place.

    Args:
        paths: matrices of a client's state that may be low-rank.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)

    def encode(self, value: CompactTensor) -> tuple[int, Sequence[Tensor]]:
        """Return the rank and the factors [K, a, r], [K, r, b]."""
        if not isinstance(value, LowRank):
            raise TypeError(f"not a low-rank matrix: {type(value).__name__}")
        return value.rank, (value.left, value.right)

    def entries(self, header: int, spec: TensorSpec) -> int:
        """Return how many entries the factors of a rank have."""
        return header * sum(spec.shape)

    def decode(self, header: int, entries: Tensor, spec: TensorSpec) -> LowRank:
        """Return the factors of a rank that the entries hold, as views."""
        a, b = spec.shape
        left, right = entries[: a * header], entries[a * header :]
        return LowRank(left.view(a, header), right.view(header, b))


def low_rank_codec(client_state: Mapping[str, TensorSpec], plan: Plan) -> LowRankCodec | None:
    """Return the codec of a method's client state; None where no matrix may have a low rank.

    Args:
        client_state: shape and type of each tensor that a client keeps, by path.
        plan: the method, which says whose state is made anew in each round.
    """
    paths = [
        path
        for path, spec in client_state.items()
        if path.split("/")[0] in plan.last_round_states and len(spec.shape) == 2
    ]
    return LowRankCodec(paths) if paths else None


def stack_records(
    records: Iterable[ClientRecord], clients: int, rank: int, parts: Collection[str]
) -> dict[str, Matrix]:
    """Return the records of a client group on a leading axis, by path.

    A matrix of one of the parts that is low-rank for some clients and zero for the others becomes
    low-rank; other matrices become dense. A matrix that is zero for all clients becomes low-rank if
    it will be low-rank after the round.

    Args:
        records: one for each client, with the same paths.
        clients: how many there are.
        rank: largest rank after the round.
        parts: names of the parts whose matrices may be low-rank.

    Raises:
        ValueError: the records have different paths.
    """
    stacked: Tree = {}
    candidates: dict[str, list[Matrix]] = {}  # by path, of clients so far: low-rank or zero
    zeros: Tree = {}  # matrices known to be zero; new clients share them
    paths: list[str] = []
    for i, record in enumerate(records):
        paths = paths or list(record.values)
        if set(paths) != set(record.values):
            raise ValueError("clients keep different things")
        for path in paths:
            value = as_matrix(record.values[path])
            if path not in stacked:
                if path.split("/")[0] in parts and _is_candidate(path, value, zeros):
                    candidates.setdefault(path, []).append(value)
                    continue
                tensor = dense(value)
                stacked[path] = tensor.new_empty(clients, *tensor.shape)
                for earlier, other in enumerate(candidates.pop(path, [])):
                    stacked[path][earlier] = dense(other)
            stacked[path][i] = dense(value)
    return {
        path: stacked[path] if path in stacked else _stack_matrices(candidates[path], rank)
        for path in paths
    }


def _is_candidate(path: str, value: Matrix, zeros: Tree) -> bool:
    """Return whether a value is low-rank, or a matrix of zeros."""
    if isinstance(value, LowRank):
        return True
    if value is not zeros.get(path):
        if value.ndim != 2 or value.any():
            return False
        zeros[path] = value
    return True


def _stack_matrices(matrices: Sequence[Matrix], rank: int) -> Matrix:
    """Return matrices that are low-rank or zero on a leading axis, as factors if that pays."""
    low_rank = {i: m for i, m in enumerate(matrices) if isinstance(m, LowRank)}
    a, b = matrices[0].shape
    if not low_rank and not saves_work(rank, a, b):
        return torch.stack([dense(matrix) for matrix in matrices])
    first = next(iter(low_rank.values())).left if low_rank else dense(matrices[0])
    rank = max([rank, *(matrix.rank for matrix in low_rank.values())])
    rank += -rank % RANK_MULTIPLE
    left = first.new_zeros(len(matrices), a, rank)
    right = first.new_zeros(len(matrices), rank, b)
    for i, matrix in low_rank.items():
        left[i, :, : matrix.rank], right[i, : matrix.rank] = matrix.left, matrix.right
    return LowRank(left, right)
