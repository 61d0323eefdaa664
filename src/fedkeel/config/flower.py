"""The settings of a Flower federation."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fedkeel.config.base import Settings


class Flower(Settings):
    """How rounds are run in a Flower federation. Results depend on it only where nodes fail.

    Args:
        deadline_seconds: a round, or an evaluation, waits at most so long for its clients.
        quorum: share of the selected clients that have to answer by then, in (0, 1]; with fewer the
            run stops, and can go on later. The score of an evaluation on fewer of the nodes is
            recorded, and ends no run by `stop`.
        enough: share of the selected clients with whose answers a round ends, in (0, 1]. Less than
            1 is over-selection: select more than are needed, and take the first. An evaluation by
            nodes waits for all of them, until the deadline: see `evaluation.every`.
        screen: a reply is left out where the norm of its update, or of a part's message or answer,
            is more than so many times the median of the round.
        poll_seconds: time between looks at what has come.
        message_mb: the largest message that is sent, in 10^6 bytes.
        secure_aggregation: whether the server may see sums of updates alone. It is refused: Flower
            has SecAgg+ for its older interface only.
    """

    deadline_seconds: float = Field(600.0, gt=0.0)
    quorum: float = Field(0.5, gt=0.0, le=1.0)
    enough: float = Field(1.0, gt=0.0, le=1.0)
    screen: float = Field(1000.0, gt=1.0)
    poll_seconds: float = Field(0.2, gt=0.0)
    message_mb: float = Field(1000.0, gt=0.0)
    secure_aggregation: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.enough < self.quorum:
            raise ValueError("'enough' must be at least 'quorum'")
        return self
