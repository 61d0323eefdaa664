"""What a store keeps of a client, and the protocol of a codec for compact tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedkeel.engine.spec import TensorSpec
from fedkeel.method.context import ByPart
from fedkeel.tree import State, substates, unwalk, walk


class CompactTensor(Protocol):
    """A tensor in a form that takes less memory, which its `RowCodec` stores."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the dense tensor."""

    def dense(self) -> Tensor:
        """Return the tensor itself."""

    def to(self, device: torch.device) -> CompactTensor:
        """Return it on a device."""


Value = Tensor | CompactTensor


@dataclass(frozen=True)
class ClientRecord:
    """What is stored of one client or, with a leading axis [K, ...], of several clients.

    Args:
        values: tensors by path, ``part/name``; some of them may be in compact form.
    """

    values: Mapping[str, Value]

    @classmethod
    def of(cls, state: Mapping[str, Tensor | State]) -> ClientRecord:
        """Return the record of a state."""
        return cls(dict(walk(state)))

    @property
    def state(self) -> ByPart:
        """The state by part, with dense tensors."""
        tensors = {k: v if isinstance(v, Tensor) else v.dense() for k, v in self.values.items()}
        return substates(unwalk(tensors))


class RowCodec(Protocol):
    """Stores some tensors of a row in compact form.

    A row begins with a header of one integer for each of `paths`. It is 0 where the tensor is
    dense; otherwise it says how the compact form lies in the tensor's place.
    """

    @property
    def paths(self) -> Sequence[str]:
        """Tensors of a row that may be in compact form, by path."""

    def encode(self, value: CompactTensor) -> tuple[int, Sequence[Tensor]]:
        """Return the integer for the header, and tensors [K, ...] to write one after another."""

    def entries(self, header: int, spec: TensorSpec) -> int:
        """Return how many entries of a row the compact form takes."""

    def decode(self, header: int, entries: Tensor, spec: TensorSpec) -> CompactTensor:
        """Return the compact tensor that `entries` of a row hold, as views."""
