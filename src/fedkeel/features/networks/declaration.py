"""What records and report know of clients with different networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedkeel.base.feature import Declaration


@dataclass(frozen=True)
class NetworkRecord:
    """One of the networks that clients have beside the task's own.

    Args:
        name: what it is called.
        model: the model, as `ModelRecord.name`.
        parameters: its trained parameters.
        bytes: their bytes.
        head: name of its classifier.
        clients: the clients that have it, by their numbers.
    """

    name: str
    model: str
    parameters: int
    bytes: int
    head: str
    clients: list[int]


@dataclass(frozen=True)
class NetworksRecord:
    """The networks that some clients have in place of the task's own.

    Args:
        others: the networks.
    """

    others: list[NetworkRecord]


class NetworksDeclaration(Declaration):
    """Clients with different networks: asked for by the task, without a table."""

    feature = "fedkeel.features.networks.feature:DifferentNetworks"
    table = "networks"
    label = "other networks"
    record_class = NetworksRecord
    meaning = "clients with different networks, as model.others says."

    @classmethod
    def text(cls, record: Any) -> str:  # noqa: ANN401 - of `record_class`
        """Return the networks with their parameters, and how many clients have each."""
        return "; ".join(
            f"{one.name}: {one.model}, {one.parameters:,} parameters, {len(one.clients)} clients"
            for one in record.others
        )
